"""`benchmark` and its commands: this package measured against the models that it replaces."""

from __future__ import annotations

import os
from typing import Any

from ..conversion.options import METHODS
from ..evaluation.benchmarks import TEACHERS
from ..export.engines import deployment_names, split_deployment
from .framework import (
    AT_LEAST_ONE,
    CHECKPOINT,
    DATA,
    LANGUAGES,
    MAX_SAMPLES,
    METRIC,
    Answer,
    Argument,
    Group,
    command,
    given,
    join_names,
    option,
    pop_languages,
)

RUNS_HELP = "Interleaved runs; medians are shown."


@command(
    option("--shapes", default="opus-mt", values=tuple(TEACHERS), help="Shapes of a checkpoint."),
    option("--method", values=METHODS, help="Method of the conversion. Default: its default."),
    option("--ratio", type=float, help="Ratio of the conversion. Default: its default."),
    option("--whole", is_flag=True, expose_value=False, hidden=True, help="As always since version 0.2."),
)
def conversion(shapes: str, **options: Any) -> Answer:
    """Convert a checkpoint with random weights: time of every step, and memory.

    Example: lightformers benchmark conversion --shapes opus-mt
    """
    from ..evaluation.benchmarks.conversion import time_conversion

    return Answer.of(time_conversion(shapes, **given(**options)))


@command(
    option("--pair", multiple=True, help="Only this pair, e.g. subformer-base. Repeatable. Default: all."),
    option("--runs", type=AT_LEAST_ONE, default=10, help=RUNS_HELP),
    option("--new-tokens", type=AT_LEAST_ONE, default=25, help="Tokens generated in a run."),
    option("--training/--no-training", default=True, help="Time training steps, too."),
    option("--bf16", is_flag=True, help="Train under bfloat16 autocast."),
)
def architectures(pair: tuple[str, ...], **options: Any) -> Answer:
    """Time architectures of the papers beside Marian of equal width: decoding and training on one core.

    Example: lightformers benchmark architectures --pair partialformer-36m --no-training
    """
    from ..evaluation.benchmarks.architectures import PAIRS, compare, comparison_table

    comparisons = [compare(name, **options, progress=True) for name in pair or PAIRS]
    return Answer([comparison.to_dict() for comparison in comparisons], [comparison_table(comparisons)])


@command(
    Argument("teacher", type=CHECKPOINT, about="Folder or Hub name of the dense checkpoint."),
    Argument("students", type=CHECKPOINT, nargs=-1, about="Folders or Hub names of checkpoints made from it."),
    option(
        "--engine",
        multiple=True,
        values=deployment_names,
        help=f"{join_names(deployment_names())}. Repeatable. Default: all.",
    ),
    option("--cores", type=int, multiple=True, help="Repeatable. Default: 1 and 2."),
    option("--batch-size", type=int, multiple=True, help="Repeatable. Default: 1 and 32."),
    option("--num-beams", type=int, multiple=True, help="Repeatable. Default: 1 and 4."),
    option("--runs", type=AT_LEAST_ONE, default=5, help=RUNS_HELP),
    option("--sentences", type=AT_LEAST_ONE, default=10, help="Sentences of a run at batch size 1."),
    option("--new-tokens", type=AT_LEAST_ONE, default=25, help="Tokens generated for every sentence."),
    option("--data", type=DATA, help="Parallel text to measure the quality on, too."),
    METRIC,
    option("--shortlist", type=DATA, help="Text, as for export: adds every engine with a shortlist made from it."),
    *LANGUAGES,
    MAX_SAMPLES,
)
def engines(
    teacher: str,
    students: tuple[str, ...],
    engine: tuple[str, ...],
    cores: tuple[int, ...],
    batch_size: tuple[int, ...],
    num_beams: tuple[int, ...],
    **options: Any,
) -> Answer:
    """Time a teacher and its students in transformers, CTranslate2 and ONNX Runtime, in float32 and int8.

    Ratios are to the teacher in the same engine, and to the teacher in CTranslate2 int8, the usual deployment.
    Needs pip install 'lightformers_hf[export]'.

    Example: lightformers benchmark engines opus-mt-de-en recovered --data test.jsonl --cores 1 --batch-size 1
    """
    for name in engine:
        split_deployment(name)  # which refuses unknown ones
    from ..evaluation.benchmarks.engines import compare_engines

    comparison = compare_engines(
        teacher,
        list(students),
        forms=list(engine) or None,
        cores=list(cores or range(1, min(2, os.cpu_count() or 1) + 1)),
        batch_sizes=list(batch_size or (1, 32)),
        beams=list(num_beams or (1, 4)),
        **pop_languages(options),
        **options,
        progress=True,
    )
    return Answer.of(comparison)


group = Group(
    "benchmark",
    help="Measure this package against the models that it replaces.",
    examples="Example: lightformers benchmark architectures --pair partialformer-36m --no-training",
    commands=[conversion, architectures, engines],
)
