"""`benchmark` and its commands: this package measured against what it replaces."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from ..conversion.options import METHODS
from ..evaluation.benchmarks import TEACHERS, VOCABULARY_ROWS
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
    option("--shapes", default="opus-mt", values=tuple(TEACHERS), help="Of which checkpoint."),
    option("--runs", type=AT_LEAST_ONE, default=3, help=RUNS_HELP),
    option(
        "--samples",
        type=AT_LEAST_ONE,
        help="Time so many full decompositions of a shape and multiply. Default: all of them.",
    ),
    option("--whole", is_flag=True, help="Instead convert a checkpoint with random weights: every step, and memory."),
    option("--method", values=METHODS, help="Of that conversion. Default: its default."),
    option("--ratio", type=float, help="Of that conversion. Default: its default."),
)
def conversion(
    shapes: str, runs: int, samples: int | None, whole: bool, method: str | None, ratio: float | None
) -> Answer:
    """Time the factorization of a whole checkpoint beside a full torch.linalg.svd of every matrix.

    Examples:
      lightformers benchmark conversion --shapes bart-large --runs 1 --samples 6
      lightformers benchmark conversion --shapes opus-mt --whole
    """
    from ..evaluation.benchmarks.conversion import benchmark_conversion, show, show_whole, time_conversion

    options = given(method=method, ratio=ratio)
    if whole:
        taken = time_conversion(shapes, **options)
        data = asdict(taken) | {"steps": {name: one._asdict() for name, one in taken.steps.items()}}
        return Answer(data | {"total": taken.total._asdict()}, show_whole(taken))
    if options:
        raise ValueError(f"--{next(iter(options))} says how a whole checkpoint is converted: give --whole, too")
    result = benchmark_conversion(shapes, runs=runs, samples=samples)
    seconds = {"full_seconds": result.full_seconds, "our_seconds": result.our_seconds}
    data = asdict(result) | {name: [run._asdict() for run in of_runs] for name, of_runs in seconds.items()}
    return Answer(data | {"speedup": result.speedup._asdict()}, show(result))


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

    Ratios are to the teacher in the same engine, and to the teacher in CTranslate2 int8, what a user would deploy.
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


@command(
    option("--shapes", default="opus-mt", values=tuple(VOCABULARY_ROWS), help="Of which checkpoint."),
    option("--candidates", type=AT_LEAST_ONE, multiple=True, help="Tokens that can come for a sentence. Repeatable."),
    option("--runs", type=AT_LEAST_ONE, default=5, help=RUNS_HELP),
    option("--sentences", type=AT_LEAST_ONE, default=10, help="Sentences of a run, one at a time."),
    option("--new-tokens", type=AT_LEAST_ONE, default=25, help="Tokens generated for every sentence."),
)
def vocabulary(shapes: str, **options: Any) -> Answer:
    """Time random weights in CTranslate2 int8: all tokens, those of one pair, and few that can come.

    Needs pip install 'lightformers_hf[export]'; nllb-600m takes 8 GB of memory.

    Example: lightformers benchmark vocabulary --shapes opus-mt --candidates 1537 --runs 9
    """
    from ..evaluation.benchmarks.vocabulary import benchmark_vocabulary, vocabulary_table

    rows = benchmark_vocabulary(shapes, **options, progress=True)
    return Answer([row.to_dict() for row in rows], [vocabulary_table(rows)])


@command(
    Argument("model", type=CHECKPOINT, required=False, about="Checkpoint to translate with. Default: a tiny Marian."),
    option("--runs", type=AT_LEAST_ONE, default=5, help=RUNS_HELP),
)
def startup(model: str | None, runs: int) -> Answer:
    """Measure what commands cost before they do anything: processor time of a whole process, as ratios.

    Every process runs in turn with the plain program that it is compared with: import transformers, a class of it, or
    a model of it that translates the same sentence.

    Example: lightformers benchmark startup --runs 9
    """
    from ..evaluation.benchmarks.startup import measure_startup, startup_table

    ratios = measure_startup(model, runs=runs, progress=True)
    return Answer([ratio.to_dict() for ratio in ratios], [startup_table(ratios)])


group = Group(
    "benchmark",
    help="Measure this package against what it replaces.",
    examples="Example: lightformers benchmark architectures --pair partialformer-36m --no-training",
    commands=[conversion, architectures, engines, vocabulary, startup],
)
