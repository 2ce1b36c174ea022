"""Trained models for engines made to run them: `export` writes one, `load_engine` runs any of them.

Names are imported when they are first used, so that a command line can list the engines without waiting for PyTorch.
"""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .engine import Engine, load_engine
    from .write import ExportReport, export

__all__ = ["Engine", "ExportReport", "export", "load_engine"]

__getattr__, __dir__ = lazy_names(
    __name__, {"Engine": ".engine", "load_engine": ".engine", "ExportReport": ".write", "export": ".write"}
)
