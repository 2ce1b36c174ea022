"""Commands that do several things one after the other: `recover`, `compress`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from ..conversion.options import CompressionOptions
from ..export.engines import check_engine_name, engine_names
from .output import CHECKPOINT, DATA, SEED, Answer, Argument, command, join_names, option
from .use import METRIC

FILE = click.Path(path_type=Path)
TEXT_HELP = (
    "Sentence pairs, or sources alone, which the teacher translates: a file, or a Hub name. Default: random tokens, "
    "which it translates, too."
)
LANGUAGES = (
    option("--source-lang", metavar="de", help="Column; of multilingual models also the code: de, or de=de_DE."),
    option("--target-lang", metavar="en", help="The same of the target."),
)
TRAINING = (
    option("--data", type=DATA, help=TEXT_HELP),
    option("--validation", type=DATA, help="Other pairs, to choose the best model by. Default: a part of --data."),
    option(
        "--minutes",
        type=click.FloatRange(min=0, min_open=True),
        default=30.0,
        metavar="M",
        help="Time to measure, translate and train in.",
    ),
    *LANGUAGES,
    option(
        "--translations/--no-translations",
        default=None,
        help="Learn from the teacher's own translations, too. Default: where that pays.",
    ),
    METRIC,
    option("--report-to", multiple=True, help="Log to tensorboard, trackio, wandb, … as well. Repeatable."),
    option("--seed", type=SEED, default=0, help="Of everything that is drawn."),
    option("--overwrite", is_flag=True, help="Begin anew where an earlier call wrote."),
)


@command(
    Argument("light", type=CHECKPOINT, about="Folder or Hub name of the compressed checkpoint."),
    option("--teacher", type=CHECKPOINT, required=True, help="The checkpoint that it was made from."),
    option("--output", "-o", type=FILE, required=True, help="The folder to write."),
    *TRAINING,
)
def recover(light: str, source_lang: str | None, target_lang: str | None, **options: Any) -> Answer:
    """Win a compressed model's quality back: train it with its teacher for so many minutes.

    Settings follow from how far it was compressed and from the time, which the first steps measure. The model with the
    best validation score is kept, without pairs against the teacher's own translations. The score is the first
    --metric; by default chrF, for outputs of one word the character error rate, for summaries ROUGE-L. The same
    command goes on where it was interrupted.

    Example: lightformers recover light --teacher opus-mt-de-en --data train.jsonl --output recovered --minutes 30
    """
    from ..workflows.recover import recover as run

    found = run(light, source=source_lang, target=target_lang, progress=True, **options)
    return Answer(found.to_dict(), [f"Written to {found.output}."], draw=lambda console: console.print(found.table()))


@command(
    Argument("teacher", type=CHECKPOINT, about="Folder or Hub name of the trained checkpoint."),
    Argument("output", type=FILE, about="The folder for everything that is made."),
    option("--size", metavar="40MB", help="Bytes of the small model's weights at most, before they are quantized."),
    option("--params", metavar="20M", help="Instead: parameters at most."),
    option(
        "--ratio",
        type=float,
        metavar="P",
        help="Instead: dense / kept parameters. Default: 2, without --decoder-layers.",
    ),
    option("--decoder-layers", type=int, help="Decoder layers that are kept; they cost most time."),
    option("--test", type=DATA, help="Pairs to measure with at last. Default: a part of --data, if pairs."),
    option("--to", default="ctranslate2", values=engine_names, help=f"Deploy for {join_names(engine_names())}."),
    option("--quantization", default="int8", help="Of the deployed model: int8, float32, …."),
    *TRAINING,
)
def compress(teacher: str, output: Path, **options: Any) -> Answer:
    """Make a trained model small and ready to deploy: convert, recover, evaluate, export and report, one by one.

    The folder gets: recovered (to push), deployed (for the engine), report.html, and what was measured. The same
    command goes on where it was interrupted.

    Example: lightformers compress opus-mt-de-en small --data train.jsonl --ratio 4
    """
    given = {name: value for name, value in options.items() if value is not None}
    check_engine_name(options["to"])
    named = {field.name for field in fields(CompressionOptions)}
    CompressionOptions(**{name: value for name, value in given.items() if name in named})
    from ..workflows.compress import compress as run

    found, tables = run(teacher, output, **given)
    lines = [f"Deployed: {output / 'deployed'}. To push: {output / 'recovered'}."]
    if "report.html" in found["files"]:
        lines.append(f"What became of it: {found['files']['report.html']}.")
    return Answer(found, lines, draw=lambda console: [console.print(table) for table in tables])
