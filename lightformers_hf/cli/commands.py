"""What all commands of the command line have alike: options, output for people and for machines, errors, exit codes.

Exit codes are 0; 1 for what the user can mend, said in one message; 2 for words that the command does not know; 130
for Ctrl-C.
"""

import dataclasses
import functools
import inspect
import logging
import os
import sys
import typing
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ..conversion.options import METHODS, CompressionOptions, read_pattern
from ..files import json_text

COMPRESSION_HELP = {
    "ratio": "Dense / kept parameters of the matrices, above 1. Without any choice: 2.",
    "params": "Parameters of the result at most, e.g. 20M.",
    "size": "Bytes of the result's weights at most, e.g. 40MB.",
    "speedup": "Times as fast as the source, estimated on this machine.",
    "rank": "Singular values kept in each matrix.",
    "energy": "Share of the squared singular values kept in each matrix.",
    "pattern": "NAME=64 (rank), 4x (ratio), 90% (energy) or dense; NAME: embedding, attention, ffn, or the end of "
    "modules' names. Repeatable.",
    "encoder_layers": "Layers of the encoder that are kept.",
    "decoder_layers": "Layers of the decoder that are kept.",
    "encoder_groups": "Encoder layers that are stored; must divide them.",
    "decoder_groups": "Decoder layers that are stored; must divide them.",
    "method": "low-rank: each matrix by itself; narrow: narrower heads, fewer neurons; auto: what loses less; paper: "
    "plain SVD.",
    "calibration": "Parallel text, never a test's, that errors are weighed on. Default: the model's own.",
    "calibration_samples": "Sentence pairs drawn from it. Default: 1000 (own: 256).",
    "source_lang": "Its column or language, for multilingual models also the code: de, or de=de_DE.",
    "target_lang": "The same of the target.",
    "device": "Where to compute: cpu, cuda, cuda:1, mps.",
}

LIBRARIES = ("transformers", "datasets", "huggingface_hub")  # each has levels and handlers of its own


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a command found out.

    Attributes:
        data: for machines, what `--json` writes.
        show: prints it for people.
        exit_code: of the command.
    """

    data: dict | list
    show: Callable[[Console], object]
    exit_code: int = 0


def says(*lines: str) -> Callable[[Console], None]:
    """An answer's `show` that prints lines as they are."""

    def show(console: Console) -> None:
        for line in lines:
            console.print(escape(line), highlight=False, soft_wrap=True)

    return show


class Commands(typer.Typer):
    """Commands that all take `--quiet` and `--verbose`, those that return an `Answer` also `--json`."""

    def command(self, *arguments: Any, **settings: Any) -> Callable[[Callable], Callable]:
        """As Typer's."""
        register = super().command(*arguments, **settings)
        return lambda function: register(with_output(function))


QUIET = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Print errors, and what was asked for; no bars, no tables, no warnings."),
]
VERBOSE = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Print the libraries' messages, too, and an error's traceback."),
]
JSON = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write what is found as JSON to this file, or to stdout with '-', and nothing else there.",
    ),
]


def with_output(command: Callable) -> Callable:
    """Give a command the options that all have, print what it returns, and say in one line what the user can mend."""
    signature = inspect.signature(command)
    added = {"quiet": QUIET, "verbose": VERBOSE}
    if answers := signature.return_annotation is Answer:
        added = {"json_file": JSON, **added}

    @functools.wraps(command)
    def run(*, quiet: bool, verbose: bool, json_file: Path | None = None, **arguments: Any) -> None:
        to_stdout = str(json_file) == "-"
        speaks = os.environ.get("RANK", "0") == "0"  # of several processes, the first
        try:
            if json_file is not None and not json_file.parent.is_dir():
                raise FileNotFoundError(f"--json {json_file}: there is no folder {json_file.parent}")
            with _loudness(quiet, verbose, chatter=sys.stderr if to_stdout else None, hush=quiet and answers):
                answer = command(**arguments)
            if not answers or not speaks:
                return
            if not quiet and not to_stdout:
                answer.show(Console())
            if json_file is not None:
                write_json(answer.data, json_file)
        except BrokenPipeError:  # whoever reads has enough: Typer ends quietly
            raise
        except (ValueError, OSError) as error:
            if verbose:
                raise
            if not speaks:
                raise typer.Exit(1) from None
            message = " ".join(str(error).split())  # those of libraries have several lines
            Console(stderr=True).print("[red]error:[/red]", escape(message), highlight=False, soft_wrap=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            Console(stderr=True).print("stopped")
            raise typer.Exit(130) from None
        if answer.exit_code:
            raise typer.Exit(answer.exit_code)

    options = [_option(name, annotation, None if name == "json_file" else False) for name, annotation in added.items()]
    return _with_parameters(run, [*signature.parameters.values(), *options], None)


@contextmanager
def _loudness(quiet: bool, verbose: bool, *, chatter: Any, hush: bool) -> Iterator[None]:
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


def write_json(content: dict | list, file: Path) -> None:
    """Write `content` to `file`, or to stdout where that is `-`."""
    text = json_text(content, "--json")
    sys.stdout.write(text) if str(file) == "-" else file.write_text(text, encoding="utf-8")


def compression_options(command: Callable) -> Callable:
    """Give a command one option for every field of `CompressionOptions`; it gets their values as `options`."""
    signature = inspect.signature(command)
    own = [parameter for name, parameter in signature.parameters.items() if name != "options"]
    options = []
    types = typing.get_type_hints(CompressionOptions)
    for option in dataclasses.fields(CompressionOptions):
        details = typer.Option(
            help=COMPRESSION_HELP[option.name],
            autocompletion=choices(*METHODS) if option.name == "method" else None,
        )
        value_type = {"pattern": list[str] | None, "method": str}.get(option.name, types[option.name])
        options.append(_option(option.name, Annotated[value_type, details], option.default))

    @functools.wraps(command)
    def with_options(**arguments: Any) -> Any:
        values = {option.name: arguments.pop(option.name) for option in options}
        values["pattern"] = read_pattern(values["pattern"] or [])
        return command(**arguments, options=values)

    return _with_parameters(with_options, [*own, *options], signature.return_annotation)


def choices(*values: str | None) -> Callable[[], list[str]]:
    """What the shell completes an option with."""
    return lambda: [value for value in values if value]


def _option(name: str, annotation: Any, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _with_parameters(function: Callable, parameters: list[inspect.Parameter], returns: Any) -> Callable:
    """Let Typer see these parameters."""
    function.__signature__ = inspect.Signature(parameters, return_annotation=returns)
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function
