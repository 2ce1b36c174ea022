"""The `lightformers` command: one file a group of commands, every command one call into the package.

What a command needs is imported inside it: `--help`, a wrong option and TAB wait for neither torch nor transformers.
"""

from .entry import app, main

__all__ = ["app", "main"]
