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

from ..conversion.options import CHOICES, KINDS, CompressionOptions
from ..files import json_text

COMPRESSION_HELP = {
    "ratio": "Dense / kept parameters of the matrices (p of Eq. 12), above 1. Without any choice: 2.",
    "rank": "Singular values kept in each matrix.",
    "energy": "Share of the squared singular values kept in each matrix, in (0, 1].",
    "params": "Parameters of the result at most, e.g. 20M; in place of the ratio.",
    "size": "Bytes of the result's weights at most, e.g. 40MB; in place of the ratio.",
    "speedup": "Times as fast as the source, estimated from costs measured on this machine; in place of the ratio.",
    "rank_pattern": "PATTERN=RANK, or PATTERN=dense, for modules whose names end so; comes first. Repeatable.",
    "encoder_layers": "Layers of the encoder that are kept, evenly spread.",
    "decoder_layers": "Layers of the decoder that are kept: they cost most time.",
    "encoder_groups": "Number of independent encoder layers; must divide the layers.",
    "decoder_groups": "Number of independent decoder layers; must divide the layers.",
    "group_start": "How a group of layers starts: 'aligned' and merged, 'mean', or 'first'. Default: aligned.",
    "share_layer_norms": "Whether LayerNorms of a group are shared, too.",
    "group_residual_rank": "Rank of what each depth of a group has for itself of every matrix.",
    "split": "Where Σ goes: 'sigma-right' (Eq. 11), or 'balanced', √Σ to each factor.",
    "paper": "The paper's procedure exactly: plain SVD of every matrix alone, the ratio for each.",
    "calibration": "Parallel text (a file, or a dataset on the Hub; never a test's) on which errors are weighed. "
    "Default: text that the model makes itself.",
    "calibration_samples": "Sentence pairs drawn from it. Default: 1000, or all of fewer; 256 of the model's own.",
    "calibration_seed": "Which ones.",
    "source_lang": "Its column, or language, to translate from. Default: the tokenizer's.",
    "target_lang": "Its column, or language, to translate to. Default: the tokenizer's.",
    "source_code": "Multilingual models: code of the source language, such as de_DE; the result keeps it.",
    "target_code": "The same of the target language, such as en_XX.",
    "weighting": "Errors of a matrix are weighed by the 'loss'; for comparison by its 'inputs' alone, or by 'rows'.",
    "allocation": "'uniform': the ratio for every matrix; 'budget': parameters where they spare most loss. Default: "
    "'budget' where there is one ratio.",
    "attention_method": "Attention by 'matrix', low-rank, or by 'product', narrower heads. Default: what loses less.",
    "ffn_method": "Feed-forward networks by 'matrix', low-rank, or with fewer 'neurons'. Default: what loses less.",
    "refit": "Regress the teacher's outputs on what every layer gets. Default: where no layer is shared.",
    "device": "Where the model runs and matrices are decomposed: cpu, cuda, cuda:1, mps.",
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
    for option in dataclasses.fields(CompressionOptions):
        kind, _, choice = option.name.rpartition("_")
        of_kind = kind in KINDS and option.name not in COMPRESSION_HELP
        value_type = (
            list[str] | None
            if option.name == "rank_pattern"
            else typing.get_type_hints(CompressionOptions)[option.name]
        )
        details = typer.Option(
            help=f"--{choice} for the {kind} matrices alone." if of_kind else COMPRESSION_HELP[option.name],
            rich_help_panel="Ranks of one kind" if of_kind else "Compression",
            autocompletion=choices(*CHOICES[option.name]) if option.name in CHOICES else None,
        )
        options.append(_option(option.name, Annotated[value_type, details], option.default))

    @functools.wraps(command)
    def with_options(**arguments: Any) -> Any:
        values = {option.name: arguments.pop(option.name) for option in options}
        values["rank_pattern"] = parse_rank_pattern(values["rank_pattern"] or [])
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


def parse_rank_pattern(items: list[str]) -> dict[str, int | None]:
    """`["fc1=64", "shared=dense"]` → `{"fc1": 64, "shared": None}`; anything else raises `ValueError`."""
    pattern = {}
    for item in items:
        name, separator, rank = item.rpartition("=")
        if not separator or not (rank == "dense" or rank.isdecimal()):
            raise ValueError(f"--rank-pattern {item!r}: expected PATTERN=RANK or PATTERN=dense, e.g. fc1=64")
        pattern[name] = None if rank == "dense" else int(rank)
    return pattern
