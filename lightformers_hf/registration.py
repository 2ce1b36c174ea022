"""The architectures and pipelines are registered as soon as transformers is imported, without importing it.

`import lightformers_hf` must be fast: the command line prints `--help` without a model. Yet after it
`AutoModelForSeq2SeqLM.from_pretrained` must support our model types, and `pipeline` the tasks of such models,
whichever package is imported first. A finder in `sys.meta_path` imports `.models`, which registers the classes, and
`.pipelines` right after the first `import transformers`.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def register_when_used() -> None:
    """Register architectures and pipelines now if transformers is imported, else as soon as it is."""
    if "transformers" in sys.modules:
        _register()
    elif not any(isinstance(finder, AfterTransformers) for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterTransformers())


def _register() -> None:
    import_module(".models", __package__)
    import_module(".pipelines", __package__).register()
    with suppress(ImportError):  # an older version of transformers has no registry of exporters
        import_module(".exporter", __package__).register()


class AfterTransformers:
    """Find transformers as the other finders do, and make its loader continue with `_register`."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "transformers":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_register(module: ModuleType) -> None:
            load(module)
            if self in sys.meta_path:  # once: `importlib.reload` loads again
                sys.meta_path.remove(self)
                _register()

        spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


def lazy_names(package: str, homes: dict[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` (PEP 562) of a package that exports names of its modules.

    Args:
        package: `__name__` of the package.
        homes: public name → module that has it, relative to the package (`.trainer`).
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name], package), name)
        setattr(sys.modules[package], name, value)  # looked up once
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, names
