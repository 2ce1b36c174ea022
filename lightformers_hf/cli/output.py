"""What all commands of the command line have alike: help, options, output for people and for machines, errors.

Exit codes are 0; 1 for what the user can mend, said in one message; 2 for words that the command does not know; 130
for Ctrl-C, 143 for SIGTERM.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from rich.console import Console

LIBRARIES = ("transformers", "datasets", "huggingface_hub")  # each has levels and handlers of its own
SETTINGS = {"help_option_names": ["-h", "--help"]}
# Files or folders, which the shell completes, or names on the Hub. Of models and data, what is not there is refused
# before torch is imported.
PLACE, CHECKPOINT, DATA = click.Path(), click.Path(), click.Path()
CLOSED = set[str]()  # standard streams that were closed when the process began
ROOM = 120  # columns of a table in a file or a pipe
SEED = click.IntRange(0, 2**32 - 1)  # what numpy takes


@dataclass(frozen=True)
class Answer:
    """What a command found out.

    Attributes:
        data: for machines, what `--json` writes.
        lines: for people.
        draw: prints tables for people, before the lines.
        exit_code: of the command.
    """

    data: dict | list
    lines: Sequence[str] = ()
    draw: Callable[[Console], object] | None = None
    exit_code: int = 0

    def show(self) -> None:
        """Print it for people."""
        if self.draw is not None:
            self.draw(make_console())
        for line in self.lines:
            click.echo(line)


def make_console() -> Console:
    """Where tables are printed: as wide as the terminal, wide in a file or a pipe.

    Titles and captions are lines above and below a table. Rich would fold them to the table's width, within words.
    """
    from rich.console import Console
    from rich.table import Table

    class TableConsole(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            if not objects or not all(isinstance(one, Table) for one in objects):
                return super().print(*objects, **options)
            for table in objects:
                title, caption, table.title, table.caption = table.title, table.caption, None, None
                lines = {"soft_wrap": not self.is_terminal, "highlight": False}
                for part in (title, table, caption):
                    if part is not None:
                        super().print(part, **options, **({} if part is table else lines))

    console = TableConsole()
    if not (console.is_terminal or "COLUMNS" in os.environ):
        console.width = ROOM
    return console


class Argument(click.Argument):
    """An argument that the help explains: `about` says what it is (older clicks know no help of arguments)."""

    def __init__(self, name: str, about: str, **settings: Any):
        super().__init__([name], **settings)
        self.about = about


def option(*names: str, values: Callable[[], Sequence[str]] | Sequence[str] = (), **settings: Any) -> click.Option:
    """An option, with its default in the help. The shell completes it with `values`."""
    if values:

        def complete(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
            return [value for value in (values() if callable(values) else values) if value.startswith(begun)]

        settings["shell_complete"] = complete
    if settings.get("type") is int or isinstance(settings.get("type"), click.IntRange):
        settings = {"metavar": "N", **settings}
    return click.Option(names, show_default=settings.get("default") is not None, **settings)


def _metavar(argument: Argument) -> str:
    name = str(argument.name).upper()
    name = name if argument.required else f"[{name}]"
    return f"{name}..." if argument.nargs == -1 else name


class Command(click.Command):
    """A command; its help ends with the options that all commands have, and with examples as they stand.

    Args:
        shared: names of those options.
        examples: text that is not wrapped.
    """

    def __init__(self, name: str, *, examples: str, shared: Sequence[str] = (), **settings: Any):
        super().__init__(name, context_settings=SETTINGS, **settings)
        self.examples, self.shared = examples, {*shared, "help"}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write arguments, own options, and the others."""
        arguments = [
            (_metavar(parameter), parameter.about) for parameter in self.params if isinstance(parameter, Argument)
        ]
        options = [parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)]
        own = [parameter for parameter in options if parameter.name not in self.shared]
        rest = [parameter for parameter in options if parameter.name in self.shared]
        records = {
            title: [parameter.get_help_record(ctx) for parameter in some]
            for title, some in (("Options", own), ("Options of every command", rest))
        }
        for title, rows in {"Arguments": arguments, **records}.items():
            if rows := [row for row in rows if row is not None]:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        formatter.write(f"\n{self.examples}\n")


class Group(click.Group):
    """A group of commands; its help ends with an example."""

    def __init__(self, name: str, *, examples: str, commands: Sequence[click.Command], **settings: Any):
        super().__init__(name, commands=commands, no_args_is_help=True, context_settings=SETTINGS, **settings)
        self.examples = examples

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click, which says of a command's options before its name only that there are none such."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            own = {name for command in self.commands.values() for key in command.params for name in key.opts}
            if error.option_name in own:
                error.message = f"{error.option_name} is an option of commands: give it behind a command's name."
            raise

    def list_commands(self, _: click.Context) -> list[str]:
        """In the order given, not of the alphabet."""
        return list(self.commands)

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        """Write every command with the first sentence of its help."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, re.split(r"\.(?=\s|$)", command.help or "")[0]) for name, command in self.commands.items()]
            )

    format_epilog = Command.format_epilog


SHARED = {
    "json_file": option(
        "--json",
        "json_file",
        metavar="FILE",
        type=click.Path(path_type=Path, allow_dash=True),
        help="Write what is found as JSON to this file, or to stdout with '-', and nothing else there.",
    ),
    "quiet": option("--quiet", "-q", is_flag=True, help="No bars, no tables, no warnings."),
    "verbose": option("--verbose", "-v", is_flag=True, help="The libraries' messages, too, and tracebacks."),
}


def command(*parameters: click.Parameter, name: str | None = None) -> Callable[[Callable], Command]:
    """Make a command of a function, which is called with the values of `parameters`.

    Its docstring is the help; what begins with `Example` is shown as it stands. A function that returns an `Answer`
    also gets `--json`.
    """

    def make(function: Callable) -> Command:
        text, word, examples = inspect.cleandoc(function.__doc__ or "").partition("\n\nExample")
        answers = inspect.signature(function).return_annotation in (Answer, "Answer")
        shared = [key for key in SHARED if answers or key != "json_file"]
        params = [*parameters, *(SHARED[key] for key in shared)]
        typed = {key.name: max(key.opts, key=len) for key in params if isinstance(key, click.Option)}
        return Command(
            name or function.__name__,
            help=text,
            examples=f"{word.strip()}{examples}",
            params=params,
            shared=shared,
            callback=functools.partial(run, function, answers, typed, {key.name: key.type for key in parameters}),
        )

    return make


def run(
    function: Callable,
    answers: bool,
    typed: Mapping[str, str],
    types: Mapping[str, click.ParamType],
    *,
    quiet: bool,
    verbose: bool,
    json_file: Path | None = None,
    **arguments: Any,
) -> None:
    """Call a command's function, print what it returns, and say in one line what the user can mend."""
    to_stdout = str(json_file) == "-"
    speaks = os.environ.get("RANK", "0") == "0"  # of several processes, the first
    try:
        if to_stdout:
            check_open("stdout", "give --json a file")
        elif json_file is not None:
            check_answer_file(json_file, arguments)
        check_places(types, arguments)
        if arguments.get("metrics"):
            from ..evaluation.quality import check_metrics

            check_metrics(arguments["metrics"])
        with loudness(quiet, verbose, chatter=sys.stderr if to_stdout else None, hush=quiet and answers):
            answer = function(**arguments)
        if not answers or not speaks:
            return
        if not quiet and not to_stdout:
            answer.show()
        if json_file is not None:
            write_answer(answer.data, json_file)
    except BrokenPipeError:  # whoever reads has enough: click ends quietly
        raise
    except (ValueError, OSError) as error:
        if verbose:
            raise
        if speaks:
            message = as_typed(" ".join(str(error).split()), typed)  # those of libraries have several lines
            click.echo(f"{click.style('error:', fg='red')} {name_options(message, typed, arguments)}", err=True)
        raise click.exceptions.Exit(1) from None
    except Exception as error:
        from ..files import is_full_disk
        from ..loading import is_out_of_memory

        if is_full_disk(error):
            reason = "the disk is full: make room, then give the same command again"
        elif is_out_of_memory(error):
            reason = "there is not enough memory for what was asked for"
        elif isinstance(error, ImportError) and "socksio" in str(error):
            reason = "a SOCKS proxy is set (ALL_PROXY), for which socksio is missing: pip install 'httpx[socks]'"
        else:
            raise
        if verbose:
            raise
        click.echo(f"{click.style('error:', fg='red')} {reason}", err=True)
        raise click.exceptions.Exit(1) from None
    except KeyboardInterrupt:
        click.echo("stopped", err=True)
        raise click.exceptions.Exit(130) from None
    if answer.exit_code:
        raise click.exceptions.Exit(answer.exit_code)


def as_typed(message: str, typed: Mapping[str, str]) -> str:
    """A message with options as they are typed: `encoder_groups is 4` → `--encoder-groups is 4`.

    A name of several words is an option wherever it stands alone. One of a single word is a word, too: it is meant
    where a message begins with it, or says to give it or to leave it out.

    Args:
        typed: {name of the argument in Python: the option}.
    """

    def spell(match: re.Match) -> str:
        return re.sub(r"\w+", lambda word: typed.get(word[0], word[0]), match[0])

    message = re.sub(r"^(\w+)((, \w+)* and \w+)?(?= (is|are|has|needs) | ')", spell, message)
    message = re.sub(r"(?<=\bleave )\w+(?= out\b)|(?<=\bgive )\w+(?= alone\b)", spell, message)
    names = "|".join(re.escape(name) for name in typed if "_" in name)
    return re.sub(rf"(?<![\w.'/-])({names})(?![\w=.'/-])", spell, message) if names else message


def name_options(message: str, typed: Mapping[str, str], values: Mapping[str, Any]) -> str:
    """A message that names a value, but no option, begins with the options that were given that value."""
    if "--" in message:
        return message
    context = click.get_current_context(silent=True)
    message, trouble = message, message.partition(": ")[0]  # what there is instead stands behind it
    named = []
    for name, option_name in typed.items():
        given = context is None or context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        value = values.get(name)
        is_word = isinstance(value, str | Path) and re.search(rf"(?<![\w/]){re.escape(str(value))}(?![\w/])", trouble)
        if given and is_word:
            named.append(option_name)
    return f"{' and '.join(named)}: {message}" if named else message


@contextmanager
def loudness(quiet: bool, verbose: bool, *, chatter: Any, hush: bool) -> Iterator[None]:
    """Inside, print as much as was asked for; what is printed goes to `chatter`, nowhere where it is to hush."""
    with ExitStack() as stack:
        if verbose and not quiet:
            root, handler = logging.getLogger(), logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            for logger in (root, *map(logging.getLogger, LIBRARIES)):
                stack.callback(_direct, logger, logger.level, logger.propagate, logger.handlers)
                _direct(logger, logging.INFO, True, [handler] if logger is root else [])
        if quiet:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stderr(nowhere))
            stack.callback(logging.disable, logging.root.manager.disable)
            logging.disable(logging.WARNING)
            chatter = nowhere if hush else chatter
        if chatter:
            stack.enter_context(redirect_stdout(chatter))
        yield


def _direct(logger: logging.Logger, level: int, propagate: bool, handlers: list[logging.Handler]) -> None:
    logger.setLevel(level)
    logger.propagate, logger.handlers = propagate, handlers


def check_places(types: Mapping[str, click.ParamType], arguments: Mapping[str, Any]) -> None:
    """Raise an error where a model's folder or a file of data that is named is not there."""
    from ..files import check_folder, find_folder
    from ..text import check_data

    def named(kind: click.ParamType) -> Iterator[str]:
        for name, value in arguments.items():
            if types[name] is kind:
                yield from filter(None, value if isinstance(value, tuple) else (value,))

    for place in named(CHECKPOINT):
        if folder := find_folder(place):
            check_folder(folder)
    for place in named(DATA):
        check_data(place)


def check_new_folder(output: Path, overwrite: bool, inputs: Sequence[str | None]) -> None:
    """As `check_output`, by the first of several processes: before torch is imported."""
    from ..files import check_output

    if os.environ.get("RANK", "0") == "0":
        check_output(output, overwrite=overwrite, inputs=inputs)


def check_answer_file(file: Path, arguments: Mapping[str, Any]) -> None:
    """Raise `ValueError` where `file` is, or belongs to, what a command's arguments name; its output may hold it."""
    from ..files import check_file

    values = [value for name, value in arguments.items() if name != "output"]
    flat = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    check_file(file, [part for part in flat if isinstance(part, str | Path)])


def write_answer(content: dict | list, file: Path) -> None:
    """Write `content` as JSON to `file`, or to stdout where that is `-`."""
    from ..files import json_text

    text = json_text(content, "--json")
    sys.stdout.write(text) if str(file) == "-" else file.write_text(text, encoding="utf-8")


def open_streams() -> None:
    """Give a process whose standard streams are closed, as by `2>&-`, ones that go nowhere.

    Otherwise Python has `None` for them, and the next files that are opened take their numbers.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            CLOSED.add(name)
            nowhere = os.open(os.devnull, os.O_RDWR)  # which takes the lowest free number
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115, for good


def check_open(name: str, remedy: str) -> None:
    """Raise `ValueError` where a standard stream is closed that is needed."""
    if name in CLOSED:
        raise ValueError(f"standard {'input' if name == 'stdin' else 'output'} is closed: {remedy}")


def check_installed(module: str, extra: str, what: str) -> None:
    """Raise `ValueError` where a module of an optional extra is missing, without which `what` can't be done."""
    if find_spec(module) is None:
        raise ValueError(f"{what} needs {module}: pip install 'lightformers_hf[{extra}]'")


def join_names(names: Sequence[str]) -> str:
    """`a, b or c`."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
