"""Folders whose files register themselves: adding a family, or a form, takes just its file."""

from __future__ import annotations

import importlib
import pkgutil


def import_files(package: str) -> None:
    """Import every file of a package, so that what they register is known."""
    module = importlib.import_module(package)
    for file in pkgutil.iter_modules(module.__path__):
        importlib.import_module(f"{package}.{file.name}")
