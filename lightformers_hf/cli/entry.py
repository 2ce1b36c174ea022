"""The command itself: its sub-commands, its version, and what it teaches the shell."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from .. import __version__
from . import benchmark, compress, look, use, whole
from .output import Group, open_streams

NAME = "lightformers"
# Where a shell reads what to do first.
STARTUP_FILES = {"bash": "~/.bashrc", "zsh": "~/.zshrc", "fish": "~/.config/fish/config.fish"}
# What is read there: functions that call this command when TAB is pressed, in whatever environment it then is.
COMPLETIONS = f"~/.config/{NAME}/completion."
# What has to be there before: zsh has no completion until it is told to.
PREPARATIONS = {"zsh": "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }\n"}


def show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Print the version, and end."""
    if wanted and not context.resilient_parsing:
        click.echo(f"lightformers_hf {__version__}")
        context.exit()


def install_completion(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Have the shell's startup file read what lets TAB complete commands, options and their values; and end."""
    if not wanted or context.resilient_parsing:
        return
    shell = Path(os.environ.get("SHELL", "")).name
    completes = get_completion_class(shell) if shell in STARTUP_FILES else None
    if completes is None:
        raise click.ClickException(f"the shell is {shell!r}, expected one of {', '.join(STARTUP_FILES)}: set SHELL")
    file, script = (Path(os.path.expanduser(name)) for name in (STARTUP_FILES[shell], COMPLETIONS + shell))
    functions = completes(app, {}, NAME, f"_{NAME.upper()}_COMPLETE").source()
    startup_line = f"source {COMPLETIONS}{shell}"
    try:
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(PREPARATIONS.get(shell, "") + functions, encoding="utf-8")
        lines = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        if startup_line not in lines.splitlines():
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8") as opened:  # what is there is not touched
                opened.write(f"{'' if lines.endswith(chr(10)) or not lines else chr(10)}{startup_line}\n")
    except OSError as error:
        raise click.ClickException(f"{error.filename} cannot be written: {error.strerror}") from error
    click.echo(f"{file} teaches {shell} the commands, from its next start on.")
    context.exit()


app = Group(
    NAME,
    help="Make a trained translation or summarization model smaller and faster, and win its quality back.",
    examples="Example: lightformers compress Helsinki-NLP/opus-mt-de-en small --data train.jsonl --ratio 4",
    commands=[
        *(whole.compress, compress.plan, compress.convert, whole.recover, compress.export),
        *(use.translate, use.evaluate, use.compare, use.push, use.demo),
        *(look.analyze, look.report, look.parameters),
        benchmark.group,
    ],
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            expose_value=False,
            is_eager=True,
            callback=show_version,
            help="Show the version and exit.",
        ),
        click.Option(
            ["--install-completion"],
            is_flag=True,
            expose_value=False,
            is_eager=True,
            callback=install_completion,
            help="Teach commands and options to your shell (bash, zsh or fish).",
        ),
    ],
)


def main() -> None:
    """Run the command line, under the same name however it was started."""
    open_streams()
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "30")  # seconds: bars fill no log
    # Compiled kernels of bfloat16 matrix multiplications that oneDNN and PyTorch keep, up to 0.5 MB each. A training
    # uses about 300 of them again and again, a conversion few.
    kernels, plans = ("64", "64") if sys.argv[1:2] in (["convert"], ["plan"]) else ("512", "128")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", kernels)
    os.environ.setdefault("LRU_CACHE_CAPACITY", plans)
    # An error, as Ctrl-C is, so that what is begun is removed, and processes that work for this one end with it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    app(prog_name=NAME)
