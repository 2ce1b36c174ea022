"""The framework of the command line: help, options, completion, output for people and for machines, errors.

Exit codes are 0; 1 for an error that the user can mend, with one message; 2 for unknown words; 130 for Ctrl-C, 143 for
SIGTERM.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..files import FULL_DISK, check_file, find_full_disk, json_text, write_whole
from ..options import OptionError
from ..results import Result, print_parts
from .parameters import FILE, Argument, check_inputs, option
from .streams import check_open, loudness

if TYPE_CHECKING:
    from rich.table import Table

SETTINGS = {"help_option_names": ["-h", "--help"]}
# {command, or word after `benchmark`, of an earlier version: the script of the repository that replaces it}.
MOVED_COMMANDS = {
    "analyze": "analyze.py",
    "architectures": "benchmark_architectures.py",
    "conversion": "benchmark_conversion.py",
    "parameters": "count_parameters.py",
}


@dataclass(frozen=True)
class Answer:
    """Result of a command: `data` for `--json`, tables and lines for people, and the exit code."""

    data: dict | list
    parts: Sequence[Table | str] = ()
    exit_code: int = 0

    @classmethod
    def of(cls, result: Result, *lines: str, **more: Any) -> Answer:
        """Return the answer that a result is, with more lines and more data."""
        return cls({**more, **result.to_dict()}, [*result.parts(), *lines])


class Command(click.Command):
    """A command that calls a function with the values of its parameters.

    The docstring of the function is the help, which ends with the options of every command and the examples as they
    stand. A function that returns an `Answer` also gets `--json`.
    """

    def __init__(self, function: Callable, parameters: Sequence[click.Parameter]):
        text, word, examples = inspect.cleandoc(function.__doc__ or "").partition("\n\nExample")
        self.function, self.examples = function, f"{word.strip()}{examples}"
        self.answers = inspect.signature(function).return_annotation in (Answer, "Answer")
        shared = [each for each in SHARED if self.answers or each.name != "json_file"]
        self.shared = {"help", *(each.name for each in shared)}
        settings = {"help": text, "short_help": re.split(r"\.(?=\s|$)", text)[0], "params": [*parameters, *shared]}
        super().__init__(function.__name__, context_settings=SETTINGS, **settings)

    def invoke(self, ctx: click.Context) -> None:
        """Call the function, print its result, and print errors that the user can correct in one line."""
        arguments = dict(ctx.params)
        quiet, verbose, json_file = (arguments.pop(name, None) for name in ("quiet", "verbose", "json_file"))
        to_stdout = str(json_file) == "-"
        try:
            if to_stdout:
                check_open("stdout", "give --json a file")
            elif json_file is not None:
                values = [value for name, value in arguments.items() if name != "output"]  # which may hold it
                flat = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
                check_file(json_file, [part for part in flat if isinstance(part, str | Path)])
            check_inputs(self.params, arguments)
            if arguments.get("metrics"):
                from ..evaluation.quality import check_metrics

                check_metrics(arguments["metrics"])
            chatter = sys.stderr if to_stdout else None
            with loudness(quiet, verbose, chatter=chatter, hush=quiet and self.answers):
                answer = self.function(**arguments)
            if not self.answers:
                return
            if not quiet and not to_stdout:
                print_parts(answer.parts)
            if json_file is not None:
                text = json_text(answer.data, "--json")
                if to_stdout:
                    sys.stdout.write(text)
                else:
                    with write_whole(json_file) as opened:
                        opened.write(text.encode())
        except BrokenPipeError:  # the reader has closed the pipe: click ends quietly
            raise
        except KeyboardInterrupt:
            resumes = "resumes" in (self.help or "")
            click.echo("stopped; the same command resumes" if resumes else "stopped", err=True)
            raise click.exceptions.Exit(130) from None
        except Exception as error:
            typed = {str(each.name): max(each.opts, key=len) for each in self.params if isinstance(each, click.Option)}
            reason = explain(error, typed)
            if verbose or not reason:
                raise
            click.echo(f"{click.style('error:', fg='red')} {reason}", err=True)
            raise click.exceptions.Exit(1) from None
        if answer.exit_code:
            raise click.exceptions.Exit(answer.exit_code)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write arguments, options by section, and those of every command."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        last: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            if isinstance(parameter, Argument):
                sections["Arguments"].append((parameter.word, parameter.about))
            elif row := parameter.get_help_record(ctx):
                title = getattr(parameter, "section", "Options")
                (last if parameter.name in self.shared else sections.setdefault(title, [])).append(row)
        for title, rows in (sections | {"Options of every command": last}).items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        formatter.write(f"\n{self.examples}\n")


class Group(click.Group):
    """A group of commands; its help ends with an example."""

    def __init__(self, name: str, *, help: str, examples: str, commands: Sequence[click.Command]):
        settings: dict[str, Any] = {"help": help, "short_help": help.rstrip("."), "no_args_is_help": True}
        super().__init__(name, commands=commands, context_settings=SETTINGS, **settings)
        self.examples = examples

    def list_commands(self, _: click.Context) -> list[str]:
        """In the order given, not of the alphabet."""
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As in click; a command that became a script of the repository is named in the error."""
        if args and args[0] not in self.commands and (script := MOVED_COMMANDS.get(args[0])):
            message = f"{ctx.command_path} {args[0]} is the script training/{script} of the repository"
            raise click.UsageError(f"{message}: python training/{script} --help", ctx)
        return super().resolve_command(ctx, args)

    format_epilog = Command.format_epilog


SHARED = (
    option(
        "--json",
        "json_file",
        metavar="FILE",
        type=FILE,
        help="Write the result as JSON to this file. With '-', stdout holds the JSON and nothing else.",
    ),
    option("--quiet", "-q", is_flag=True, help="Print no progress bars, tables or warnings."),
    option("--verbose", "-v", is_flag=True, help="Print the libraries' messages and tracebacks, too."),
)


def command(*parameters: click.Parameter) -> Callable[[Callable], Command]:
    """Make a command of a function."""
    return lambda function: Command(function, parameters)


def explain(error: Exception, typed: Mapping[str, str]) -> str:
    """Return one line about an error that the user can correct; nothing for a fault of the program."""
    is_full = getattr(error, "errno", None) in FULL_DISK
    if isinstance(error, FileNotFoundError) and error.errno and error.filename is None:
        try:
            os.getcwd()  # whose error names no folder
        except FileNotFoundError:
            return "the current folder was deleted: change to another one, with cd, and run the command again"
    if isinstance(error, ValueError | OSError) and not is_full and not is_of(error, "torch"):
        message = error.spell(typed) if isinstance(error, OptionError) else str(error)
        return " ".join(message.split())  # those of libraries have several lines
    from ..stored import is_out_of_memory

    if what := find_full_disk(error):
        return f"{what}: free space, then run the same command again"
    if is_out_of_memory(error):
        return "there is not enough memory for this command"
    if isinstance(error, ImportError) and "socksio" in str(error):
        return "a SOCKS proxy is set (ALL_PROXY), for which socksio is missing: pip install 'httpx[socks]'"
    return ""


def is_of(error: Exception, library: str) -> bool:
    """Whether a library raised an error, by the module of the last call."""
    calls = traceback.walk_tb(error.__traceback__)
    last = [frame.f_globals.get("__name__", "") for frame, _ in calls][-1:]
    return any(name.partition(".")[0] == library for name in last)
