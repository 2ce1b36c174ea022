"""Trained models for engines made to run them: `export` writes one, `load_engine` runs any of them.

Names are imported when they are first used, so that a command line can list the engines without waiting for PyTorch.
"""

from __future__ import annotations

import importlib

HOMES = {"Engine": ".engine", "load_engine": ".engine", "ExportReport": ".write", "export": ".write"}

__all__ = ["Engine", "ExportReport", "export", "load_engine"]


def __getattr__(name: str) -> object:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(HOMES[name], __name__), name)
