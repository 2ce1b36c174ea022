"""The `lightformers` command: its framework and its commands."""

from .commands import app, main

__all__ = ["app", "main"]
