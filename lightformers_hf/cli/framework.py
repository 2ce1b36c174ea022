"""The framework of the command line: help, options, completion, output for people and for machines, errors.

Exit codes are 0; 1 for an error that the user can mend, with one message; 2 for unknown words; 130 for Ctrl-C, 143 for
SIGTERM.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from click.shell_completion import get_completion_class

from .. import __version__
from ..deprecated import current_words
from ..results import Result, print_parts

if TYPE_CHECKING:
    from rich.table import Table

LIBRARIES = ("transformers", "datasets", "huggingface_hub")  # each has separate levels and handlers
SETTINGS = {"help_option_names": ["-h", "--help"]}
# Files or folders, or names on the Hub. A model or data file that does not exist is refused
# before torch is imported.
PLACE, CHECKPOINT, DATA = click.Path(), click.Path(), click.Path()
CLOSED = set[str]()  # standard streams that were closed when the process began
SEED = click.IntRange(0, 2**32 - 1)  # range of numpy
AT_LEAST_ONE = click.IntRange(min=1)
FILE = click.Path(path_type=Path)
NAME = "lightformers"
# Start-up files of shells.
STARTUP_FILES = {"bash": "~/.bashrc", "zsh": "~/.zshrc", "fish": "~/.config/fish/config.fish"}
# Functions that call this command when TAB is pressed, whatever the environment is then.
COMPLETIONS = f"~/.config/{NAME}/completion."
# zsh has no completion before it is loaded.
PREPARATIONS = {"zsh": "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }\n"}


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


class Argument(click.Argument):
    """An argument with a help text, `about`, which older versions of click do not have."""

    def __init__(self, name: str, about: str, **settings: Any):
        super().__init__([name], **settings)
        self.about = about

    @property
    def word(self) -> str:
        """Its form in the help: NAME, [NAME] if it is optional, NAME... for several."""
        name = str(self.name).upper()
        return (name if self.required else f"[{name}]") + "..." * (self.nargs == -1)


class Option(click.Option):
    """An option, under the heading `section` of the help."""

    section = "Options"


def section(title: str, options: Iterable[Option]) -> list[Option]:
    """Return copies of options, under a heading of the help."""
    copies = [copy.copy(one) for one in options]
    for one in copies:
        one.section = title
    return copies


def option(*names: str, values: Callable[[], Sequence[str]] | Sequence[str] = (), **settings: Any) -> Option:
    """Return an option, with its default in the help. The shell completes it with `values`."""
    if values:

        def complete(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
            return [value for value in (values() if callable(values) else values) if value.startswith(begun)]

        settings["shell_complete"] = complete
    if settings.get("type") is int or isinstance(settings.get("type"), click.IntRange):
        settings = {"metavar": "N", **settings}
    return Option(names, show_default=settings.get("default") is not None, **settings)


class Command(click.Command):
    """A command; its help ends with the options that all commands have (`shared`), and with examples as they stand."""

    def __init__(self, name: str, *, examples: str, shared: Sequence[str] = (), **settings: Any):
        super().__init__(name, context_settings=SETTINGS, **settings)
        self.examples, self.shared = examples, {*shared, "help"}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words after options of earlier versions were replaced."""
        words, warnings = current_words(str(self.name), args)
        for warning in warnings if not {"-q", "--quiet"} & {*args} else ():
            click.echo(f"{click.style('warning:', fg='yellow')} {warning}", err=True)
        return super().parse_args(ctx, words)

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

    def __init__(self, name: str, *, examples: str, commands: Sequence[click.Command], **settings: Any):
        super().__init__(name, commands=commands, no_args_is_help=True, context_settings=SETTINGS, **settings)
        self.examples = examples

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click, which reports options of a command in front of its name as unknown."""
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
            helps = {name: command.help or "" for name, command in self.commands.items()}
            formatter.write_dl([(name, re.split(r"\.(?=\s|$)", text)[0]) for name, text in helps.items()])

    format_epilog = Command.format_epilog


SHARED = {
    "json_file": option(
        "--json",
        "json_file",
        metavar="FILE",
        type=click.Path(path_type=Path, allow_dash=True),
        help="Write the result as JSON to this file. With '-', stdout holds the JSON and nothing else.",
    ),
    "quiet": option("--quiet", "-q", is_flag=True, help="Print no progress bars, tables or warnings."),
    "verbose": option("--verbose", "-v", is_flag=True, help="Print the libraries' messages and tracebacks, too."),
}


def command(*parameters: click.Parameter, name: str | None = None) -> Callable[[Callable], Command]:
    """Make a command of a function, which is called with the values of `parameters`.

    Its docstring is the help; text that begins with `Example` is shown unchanged. A function that returns an `Answer`
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
    """Call a command's function, print its result, and print errors that the user can correct in one line."""
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
            print_parts(answer.parts)
        if json_file is not None:
            from ..files import json_text

            text = json_text(answer.data, "--json")
            sys.stdout.write(text) if to_stdout else json_file.write_text(text, encoding="utf-8")
    except BrokenPipeError:  # the reader has closed the pipe: click ends quietly
        raise
    except KeyboardInterrupt:
        click.echo("stopped", err=True)
        raise click.exceptions.Exit(130) from None
    except Exception as error:
        reason = explain(error, typed, arguments)
        if verbose or not reason:
            raise
        if speaks or not isinstance(error, ValueError | OSError):  # which all processes raise
            click.echo(f"{click.style('error:', fg='red')} {reason}", err=True)
        raise click.exceptions.Exit(1) from None
    if answer.exit_code:
        raise click.exceptions.Exit(answer.exit_code)


def explain(error: Exception, typed: Mapping[str, str], values: Mapping[str, Any]) -> str:
    """Return one line about an error that the user can correct; nothing for a fault of the program."""
    if isinstance(error, ValueError | OSError):
        message = as_typed(" ".join(str(error).split()), typed)  # those of libraries have several lines
        return name_options(message, typed, values)
    from ..files import is_full_disk
    from ..loading import is_out_of_memory

    if is_full_disk(error):
        return "the disk is full: free space, then run the same command again"
    if is_out_of_memory(error):
        return "there is not enough memory for this command"
    if isinstance(error, ImportError) and "socksio" in str(error):
        return "a SOCKS proxy is set (ALL_PROXY), for which socksio is missing: pip install 'httpx[socks]'"
    return ""


def as_typed(message: str, typed: Mapping[str, str]) -> str:
    """A message with options as they are typed: `encoder_groups is 4` → `--encoder-groups is 4`.

    A name of several words is an option wherever it stands alone. One of a single word is a word, too: it is meant
    where a message begins with it, or asks to give it or to remove it. `typed`: {argument in Python: option}.
    """

    def spell(match: re.Match) -> str:
        return re.sub(r"\w+", lambda word: typed.get(word[0], word[0]), match[0])

    message = re.sub(r"^(\w+)((, \w+)* and \w+)?(?= (is|are|has|needs) | ')", spell, message)
    message = re.sub(r"(?<=\bremove )\w+|(?<=\bgive )\w+(?= alone\b)", spell, message)
    names = "|".join(re.escape(name) for name in typed if "_" in name)
    return re.sub(rf"(?<![\w.'/-])({names})(?![\w=.'/-])", spell, message) if names else message


def name_options(message: str, typed: Mapping[str, str], values: Mapping[str, Any]) -> str:
    """A message that names a value, but no option, begins with the options that were given that value."""
    if "--" in message:
        return message
    context = click.get_current_context(silent=True)
    trouble = message.partition(": ")[0]  # the alternatives follow the colon
    named = [
        option_name
        for name, option_name in typed.items()
        if isinstance(value := values.get(name), str | Path)
        and re.search(rf"(?<![\w/]){re.escape(str(value))}(?![\w/])", trouble)
        and (context is None or context.get_parameter_source(name) is ParameterSource.COMMANDLINE)
    ]
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

    for name, value in arguments.items():
        for place in filter(None, value if isinstance(value, tuple) else (value,)):
            if types[name] is DATA:
                check_data(place)
            elif types[name] is CHECKPOINT and (folder := find_folder(place)):
                check_folder(folder)


def check_new_folder(output: Path, overwrite: bool, inputs: Sequence[str | None]) -> None:
    """As `check_output`, by the first of several processes: before torch is imported."""
    from ..files import check_output

    if os.environ.get("RANK", "0") == "0":
        check_output(output, overwrite=overwrite, inputs=inputs)


def check_answer_file(file: Path, arguments: Mapping[str, Any]) -> None:
    """Raise `ValueError` if `file` is, or is part of, an argument of a command; its output may hold it."""
    from ..files import check_file

    values = [value for name, value in arguments.items() if name != "output"]
    flat = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    check_file(file, [part for part in flat if isinstance(part, str | Path)])


def open_streams() -> None:
    """Open null devices for standard streams that are closed, as by `2>&-`: other files would take their numbers."""
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


def show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Print the version, and end."""
    if wanted and not context.resilient_parsing:
        click.echo(f"lightformers_hf {__version__}")
        context.exit()


def install_completion(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Let the startup file of the shell read the completion of commands, options and their values; and end."""
    if not wanted or context.resilient_parsing:
        return
    shell = Path(os.environ.get("SHELL", "")).name
    completes = get_completion_class(shell) if shell in STARTUP_FILES else None
    if completes is None:
        raise click.ClickException(f"the shell is {shell!r}, expected one of {', '.join(STARTUP_FILES)}: set SHELL")
    file, script = (Path(os.path.expanduser(name)) for name in (STARTUP_FILES[shell], COMPLETIONS + shell))
    functions = completes(context.command, {}, NAME, f"_{NAME.upper()}_COMPLETE").source()
    startup_line = f"source {COMPLETIONS}{shell}"
    try:
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(PREPARATIONS.get(shell, "") + functions, encoding="utf-8")
        lines = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        if startup_line not in lines.splitlines():
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8") as opened:  # existing content stays
                opened.write(f"{'' if lines.endswith(chr(10)) or not lines else chr(10)}{startup_line}\n")
    except OSError as error:
        raise click.ClickException(f"{error.filename} cannot be written: {error.strerror}") from error
    click.echo(f"{shell} completes the commands from its next start on: see {file}.")
    context.exit()


def metric_names() -> list[str]:
    """Return the values of `--metric`."""
    from ..evaluation.quality import metric_names

    return metric_names()


# Arguments and options that several commands have.
MODEL = Argument("model", type=CHECKPOINT, about="Folder or Hub name of a checkpoint.")
OUTPUT = Argument("output", type=FILE, about="The folder to write.")
OVERWRITE = option("--overwrite", is_flag=True, help="Replace the folder, if a command wrote all of it.")
DEVICE = option("--device", default="cpu", help="Where to compute: cpu, cuda, cuda:1, mps.")
DATA_HELP = "Parallel text: a .jsonl, .json, .csv, .tsv or .parquet file, or a Hub name."
SPLIT = option("--split", default="test", help="Split of a dataset on the Hub.")
MAX_SAMPLES = option("--max-samples", type=AT_LEAST_ONE, help="Use only the first N pairs. Default: all.")
BATCH_SIZE = option("--batch-size", type=AT_LEAST_ONE, default=32, help="Sentences that are translated together.")
NUM_BEAMS = option("--num-beams", type=AT_LEAST_ONE, help="Beams; 1 is greedy. Default: the checkpoint's.")
MAX_NEW_TOKENS = option("--max-new-tokens", type=AT_LEAST_ONE, help="Longest output. Default: the checkpoint's.")
METRIC = option(
    "--metric",
    "metrics",
    metavar="NAME",
    multiple=True,
    values=metric_names,
    help="exact-match, cer, bleu, multi-bleu, chrf, rouge, …. Repeatable. Default: follows from the data.",
)
LANGUAGES = (
    option(
        "--source-lang",
        metavar="de",
        help="Column of the source; of multilingual models also the code: de=de_DE. T5: de='prefix: '.",
    ),
    option("--target-lang", metavar="en", help="The same for the target."),
)


def given(**options: Any) -> dict[str, Any]:
    """Return the options that were given."""
    return {name: value for name, value in options.items() if value not in (None, ())}


def pop_languages(options: dict[str, Any]) -> dict[str, Any]:
    """Take the two languages out of the options, under the names that functions behind the public ones have."""
    return {"source": options.pop("source_lang"), "target": options.pop("target_lang")}
