"""Models for inference engines: `export` writes one, `load_engine` runs any exported model.

Names are imported when they are first used, so that a command line can list the engines without waiting for PyTorch.
The package has the name of its function, so that it can be called: `lightformers_hf.export("light", "deployed",
to="ctranslate2")`.
"""

import inspect
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..registration import lazy_names

if TYPE_CHECKING:
    from .engine import Engine, load_engine
    from .write import ExportReport, export

__all__ = ["Engine", "ExportReport", "export", "load_engine"]

__getattr__, __dir__ = lazy_names(
    __name__, {"Engine": ".engine", "load_engine": ".engine", "ExportReport": ".write", "export": ".write"}
)


class CallableModule(ModuleType):
    """This package, which calls its function `export`."""

    def __call__(self, *arguments: Any, **options: Any) -> "ExportReport":
        """Call `export`."""
        return self.export(*arguments, **options)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.export)


sys.modules[__name__].__class__ = CallableModule
