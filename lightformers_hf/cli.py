"""The `lightformers` command: every sub-command is one call into the package.

Imports of torch and transformers stand inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import sys

import typer
from rich.console import Console

app = typer.Typer(
    help="Make a trained translation or summarization model smaller and faster, and win its quality back.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
)
debug_mode = {"on": False}


@app.callback()
def root(debug: bool = typer.Option(False, "--debug", help="Show the full traceback of an error.")) -> None:
    """Options that stand before the command's name."""
    debug_mode["on"] = debug


def main() -> None:
    """Run the command line. An expected error (`ValueError`, `OSError`) is one message on stderr and exit code 1."""
    try:
        app()
    except (ValueError, OSError) as error:
        if debug_mode["on"]:
            raise
        Console(stderr=True).print("[red]error:[/red]", str(error), highlight=False, markup=True, soft_wrap=True)
        sys.exit(1)
