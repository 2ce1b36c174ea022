"""The framework of the command line: help, options, completion, output for people and for machines, errors.

Exit codes are 0; 1 for an error that the user can mend, with one message; 2 for unknown words; 130 for Ctrl-C, 143 for
SIGTERM.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..conversion.options import METHODS, CompressionOptions, read_pattern
from ..deprecated import MOVED_COMMANDS, current_words
from ..files import check_file, check_folder, find_folder, is_full_disk, json_text, write_whole
from ..results import Result, print_parts
from ..text import check_data

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
PROXY = re.compile(r"(http|https|all)_proxy", re.IGNORECASE)  # variables of the environment
NAME = "lightformers"
GRACE = 5.0  # seconds from SIGTERM to the end of a process; a container's runtime waits for ten


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
    """A command that calls a function with the values of its parameters.

    The docstring of the function is the help, which ends with the options of every command and the examples as they
    stand. A function that returns an `Answer` also gets `--json`.
    """

    def __init__(self, function: Callable, parameters: Sequence[click.Parameter]):
        text, word, examples = inspect.cleandoc(function.__doc__ or "").partition("\n\nExample")
        self.function, self.examples = function, f"{word.strip()}{examples}"
        self.answers = inspect.signature(function).return_annotation in (Answer, "Answer")
        shared = [one for one in SHARED if self.answers or one.name != "json_file"]
        self.shared = {"help", *(one.name for one in shared)}
        settings = {"help": text, "short_help": re.split(r"\.(?=\s|$)", text)[0], "params": [*parameters, *shared]}
        super().__init__(function.__name__, context_settings=SETTINGS, **settings)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words after options of earlier versions were replaced."""
        words, warnings = current_words(str(self.name), args)
        for warning in warnings if not {"-q", "--quiet"} & {*args} else ():
            click.echo(f"{click.style('warning:', fg='yellow')} {warning}", err=True)
        return super().parse_args(ctx, words)

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
            check_places(self.params, arguments)
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
            click.echo("stopped", err=True)
            raise click.exceptions.Exit(130) from None
        except Exception as error:
            typed = {one.name: max(one.opts, key=len) for one in self.params if isinstance(one, click.Option)}
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
        type=click.Path(path_type=Path, allow_dash=True),
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
    if isinstance(error, ValueError | OSError) and not is_of(error, "torch"):
        return as_typed(" ".join(str(error).split()), typed)  # those of libraries have several lines
    from ..loading import is_out_of_memory

    if is_full_disk(error):
        return "the disk is full: free space, then run the same command again"
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


def check_places(parameters: Sequence[click.Parameter], arguments: Mapping[str, Any]) -> None:
    """Raise an error where a model's folder or a file of data that is named is not there."""
    for parameter in parameters:
        value = arguments.get(str(parameter.name))
        for place in filter(None, value if isinstance(value, tuple) else (value,)):
            if parameter.type is DATA:
                check_data(place)
            elif parameter.type is CHECKPOINT and (folder := find_folder(place)):
                check_folder(folder)


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


def end_on_sigterm() -> None:
    """Make SIGTERM an error like Ctrl-C, so that partial output is removed and worker processes end.

    Python handles a signal only between two of its instructions. If a library computes or waits for longer than
    `GRACE`, the process ends without that.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if not hasattr(os, "register_at_fork"):  # Windows, which sends no SIGTERM
        return
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)  # gets the number of a signal when it arrives
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

    def watch() -> None:
        while os.read(woken, 1) != bytes([signal.SIGTERM]):
            pass
        time.sleep(GRACE)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def check_open(name: str, remedy: str) -> None:
    """Raise `ValueError` where a standard stream is closed that is needed."""
    if name in CLOSED:
        raise ValueError(f"standard {'input' if name == 'stdin' else 'output'} is closed: {remedy}")


@contextmanager
def without_proxies() -> Iterator[None]:
    """Inside, no connection goes through a proxy, as those of a page that is served and read on this machine."""
    found = {name: os.environ.pop(name) for name in [*os.environ] if PROXY.fullmatch(name)}
    try:
        yield
    finally:
        os.environ.update(found)


def check_installed(module: str, extra: str, what: str) -> None:
    """Raise `ValueError` where a module of an optional extra is missing, without which `what` can't be done."""
    if find_spec(module) is None:
        raise ValueError(f"{what} needs {module}: pip install 'lightformers_hf[{extra}]'")


def join_names(names: Sequence[str]) -> str:
    """`a, b or c`."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


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


# Fields of `CompressionOptions`: placeholder of the value, and help.
OPTIONS_HELP = {
    "ratio": ("P", "Dense / kept parameters of the matrices. Default: 2."),
    "params": ("20M", "Instead: parameters of the compressed model at most."),
    "size": ("40MB", "Instead: bytes of its weights at most."),
    "rank": ("R", "Instead: singular values kept in each matrix, or a share of them: 64, 25%."),
    "energy": ("E", "Instead: share of their squares kept in each."),
    "pattern": (
        "NAME=CHOICE",
        "NAME: embedding, attention, ffn, or the end of module names. CHOICE: 64 (rank), 4x (ratio), 90% (energy) or "
        "dense. Repeatable.",
    ),
    "vocabulary": ("PATH", "Text whose tokens stay: file, Hub name. Repeatable."),
    "vocabulary_size": ("N", "Keep only its N most frequent tokens."),
    "languages": ("de_DE,en_XX", "Codes that stay in the vocabulary. Default: all."),
    "encoder_layers": ("N", "Layers of the encoder to keep."),
    "decoder_layers": ("N", "The same for the decoder, which costs most time."),
    "encoder_groups": ("N", "Layers that are stored; the others share them."),
    "decoder_groups": ("N", "The same for the decoder."),
    "method": (
        "METHOD",
        "low-rank: factors; narrow: fewer neurons, narrower heads; auto: the better of both; paper: plain SVD.",
    ),
    "calibration": (
        "PATH",
        "Text to weight errors on, never a test's: pairs, or sources alone (.txt). Default: self-generated.",
    ),
    "calibration_samples": ("N", "How many pairs are drawn. Default: 1000 or more."),
    "source_lang": ("de", "Column; of multilingual models also the code, de or de=de_DE; T5: de='a prefix: '."),
    "target_lang": ("en", "The same for the target."),
    "device": ("cpu", "Where to compute: cpu, cuda, cuda:1, mps."),
}
REPEATABLE = ("pattern", "vocabulary", "languages")


def compression_options(**others: str) -> dict[str, Option]:
    """One option for every field of `CompressionOptions`, in the order of the help; `others` are other help texts."""
    types = {field.name: field.type for field in fields(CompressionOptions)}
    made = {}
    for name, (metavar, help_text) in OPTIONS_HELP.items():
        kind = {"float": float, "int": int}.get(str(types[name]).partition(" ")[0], str)
        kind = DATA if name in ("calibration", "vocabulary") else kind
        settings: dict[str, Any] = {"metavar": metavar, "help": others.get(name, help_text), "type": kind}
        settings |= {"multiple": name in REPEATABLE, "values": METHODS if name == "method" else ()}
        made[name] = option(f"--{name.replace('_', '-')}", **settings)
    return made


def read_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given. An error in those of a conversion is raised before torch is imported."""
    found = given(**options)
    found |= {"pattern": read_pattern(found["pattern"])} if "pattern" in found else {}
    CompressionOptions.of(found)
    return found
