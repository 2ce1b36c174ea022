"""The `lightformers` command: its framework, its commands, and its benchmarks."""

from .commands import app, main

__all__ = ["app", "main"]
