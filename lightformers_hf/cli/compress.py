"""Commands that make a model smaller: `plan`, `convert`, `export`."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import click

from ..conversion.options import METHODS, CompressionOptions, read_pattern
from ..export.engines import check_engine_name, engine_names
from .output import CHECKPOINT, DATA, Answer, Argument, check_new_folder, command, join_names, option

WEB = "web"
SOURCE = Argument("source", about="A checkpoint folder, or a name on the Hub.", type=CHECKPOINT)
OUTPUT = Argument("output", about="The folder to write.", type=click.Path(path_type=Path))
OVERWRITE = option("--overwrite", is_flag=True, help="Replace what a command wrote there.")

# Fields of `CompressionOptions`: what stands for the value, and the help.
OPTIONS_HELP = {
    "ratio": ("P", "Dense / kept, of what layers leave. Default: 2."),
    "params": ("20M", "Instead: parameters of the result at most."),
    "size": ("40MB", "Instead: bytes of the result's weights at most."),
    "rank": ("R", "Instead: singular values kept in each matrix."),
    "energy": ("E", "Instead: share of their squares kept in each."),
    "pattern": (
        "NAME=CHOICE",
        "NAME: embedding, attention, ffn, or the end of module names. CHOICE: 64 (rank), 4x (ratio), 90% (energy) or "
        "dense. Repeatable.",
    ),
    "vocabulary": ("PATH", "Text whose tokens stay: file, Hub name. Repeatable."),
    "vocabulary_size": ("N", "Only the most frequent tokens of it."),
    "languages": ("de_DE,en_XX", "Codes that stay in the vocabulary. Default: all."),
    "encoder_layers": ("N", "Layers that are kept."),
    "decoder_layers": ("N", "The same; the decoder's cost most time."),
    "encoder_groups": ("N", "Layers that are stored; the others share them."),
    "decoder_groups": ("N", "The same of the decoder."),
    "method": (
        "METHOD",
        "low-rank: each alone; narrow: fewer neurons and narrower heads; auto: the better; paper: plain SVD.",
    ),
    "calibration": (
        "PATH",
        "Text, never a test's, to weigh errors on: pairs, or sources alone (.txt). Default: the model's own.",
    ),
    "calibration_samples": ("N", "How many are drawn. Default: 1000, if short more."),
    "source_lang": ("de", "Its column; of multilingual models also their code, de or de=de_DE; T5: de='a prefix: '."),
    "target_lang": ("en", "The same of the target."),
    "device": ("cpu", "Where to compute: cpu, cuda, cuda:1, mps."),
}

REPEATABLE = ("pattern", "vocabulary", "languages")


def compression_options() -> list[click.Option]:
    """One option for every field of `CompressionOptions`, in the order of the help."""
    types = {field.name: field.type for field in fields(CompressionOptions)}
    made = []
    for name, (metavar, help_text) in OPTIONS_HELP.items():
        kind = {"float": float, "int": int}.get(str(types[name]).partition(" ")[0], str)
        kind = DATA if name in ("calibration", "vocabulary") else kind
        settings: dict[str, Any] = {"metavar": metavar, "help": help_text, "type": kind}
        settings |= {"multiple": name in REPEATABLE, "values": METHODS if name == "method" else ()}
        made.append(option(f"--{name.replace('_', '-')}", **settings))
    return made


def read_options(options: dict[str, Any]) -> dict[str, Any]:
    """The fields of `CompressionOptions` that were given. What is wrong with them is said before torch is imported."""
    given = {name: value for name, value in options.items() if value not in (None, ())}
    given |= {"pattern": read_pattern(given["pattern"])} if "pattern" in given else {}
    CompressionOptions(**given)
    return given


@command(SOURCE, *compression_options())
def plan(source: str, **options: Any) -> Answer:
    """Show what `convert` would do to every matrix: rank, parameters, energy kept, error. Writes nothing.

    Example: lightformers plan Helsinki-NLP/opus-mt-de-en --ratio 3 --encoder-groups 3
    """
    given = read_options(options)
    from ..conversion.convert import plan as run
    from ..conversion.tables import print_report

    report = run(source, **given)
    return Answer(report.to_dict(), draw=lambda console: print_report(report, console))


@command(SOURCE, OUTPUT, *compression_options(), OVERWRITE)
def convert(source: str, output: Path, overwrite: bool, **options: Any) -> Answer:
    """Make a trained Marian, BART, mBART, Pegasus, M2M100, T5, mT5, UMT5 or LightFormer checkpoint smaller.

    The output loads with AutoModelForSeq2SeqLM and AutoTokenizer. It lost quality, which `recover` wins back.

    Example: lightformers convert Helsinki-NLP/opus-mt-de-en opus-light --ratio 2
    """
    given = read_options(options)
    check_new_folder(output, overwrite, [source, given.get("calibration"), *given.get("vocabulary", ())])
    from ..conversion.convert import convert as run
    from ..conversion.tables import print_report
    from ..loading import has_tokenizer

    report = run(source, output, overwrite=overwrite, **given)
    lines = [f"Written to {output}; every matrix is listed in its compression.json."]
    if not has_tokenizer(output):
        lines.append(f"{source} has no tokenizer, so {output} has none either: put the files of one into it.")
    return Answer(
        {"output": str(output), **report.to_dict()},
        lines,
        draw=lambda console: print_report(report, console, matrices=False),
    )


@command(
    SOURCE,
    OUTPUT,
    option(
        "--to", required=True, values=lambda: [*engine_names(), WEB], help=f"{join_names([*engine_names(), WEB])}."
    ),
    option(
        "--quantization",
        values=("int8", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16"),
        help="int8, or another that the engine has: int16, int8_float16, float16, … Default: float32.",
    ),
    option(
        "--shortlist",
        type=DATA,
        metavar="PATH",
        help="Text, parallel or of the source alone: only tokens that go with the source's are then computed.",
    ),
    option("--source-lang", metavar="de", help="Its column; of multilingual models also their code, de or de=de_DE."),
    option("--target-lang", metavar="en", help="The same of the target."),
    option("--compare", type=CHECKPOINT, metavar="TEACHER", help="Of a page for the web: a model to run beside it."),
    OVERWRITE,
)
def export(
    source: str,
    output: Path,
    to: str,
    quantization: str | None,
    overwrite: bool,
    compare: str | None,
    **options: Any,
) -> Answer:
    """Write a LightFormer, or a dense model that becomes one, for CTranslate2, ONNX Runtime or a web page.

    Says what the engine cannot express, and compares its outputs with the checkpoint's; needs
    pip install 'lightformers_hf[export]'.

    --to web writes a static page that translates in the browser, with transformers.js; needs npm.

    Examples:

        lightformers export opus-mt-de-en-light opus-mt-de-en-int8 --to ctranslate2 --quantization int8

        lightformers export opus-mt-de-en-light page --to web --compare opus-mt-de-en
    """
    if to == WEB:
        return _export_web(source, output, quantization, compare, overwrite=overwrite, **options)
    check_engine_name(to)
    if compare is not None:
        raise click.UsageError(f"--compare belongs to --to {WEB}, but --to is {to}. Leave it out.")
    check_new_folder(output, overwrite, [source, options["shortlist"]])
    from ..export import export as run

    report = run(source, output, to=to, quantization=quantization, overwrite=overwrite, **options)
    return Answer({"output": str(output), **asdict(report)}, report.lines(output))


def _export_web(
    source: str, output: Path, quantization: str | None, compare: str | None, *, overwrite: bool, **options: Any
) -> Answer:
    """Write a page that translates in the browser."""
    if quantization not in (None, "int8") or options.pop("shortlist") is not None:
        raise click.UsageError(
            f"--to {WEB} has int8 models without a shortlist. Leave --quantization and --shortlist out."
        )
    check_new_folder(output, overwrite, [source, compare])
    from ..export.web import export_web

    report = export_web(source, output, compare=compare, overwrite=overwrite, **options)
    return Answer({"output": str(output), **asdict(report)}, report.lines(output))
