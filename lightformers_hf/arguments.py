"""Arguments of the public functions, each stated once: signature, command, reference page and records follow.

Importing this file imports neither torch nor transformers: the command line reads its options here.
"""

import os
import re
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from .conversion.options import METHODS, CompressionOptions, Method, StudyOptions
from .engines import deployment_names
from .engines.arguments import (
    AnyPath,
    BatchSize,
    DeploymentOptions,
    Device,
    MaxNewTokens,
    MaxSamples,
    Metrics,
    Model,
    NumBeams,
    Output,
    Overwrite,
    SourceCode,
    SourceLang,
    Split,
    TargetCode,
    TargetLang,
    Tokenizer,
)
from .options import Help, OptionError

if TYPE_CHECKING:
    from .in_memory import AnyModel

# When the command `recover` began, by `time.monotonic()`: its minutes include the import of torch and transformers.
BEGAN: ContextVar[float | None] = ContextVar("BEGAN", default=None)
Progress = Annotated[bool, Help("Show bars, and a line for every step.", kind="hidden")]
Study = Annotated[StudyOptions | None, Help("Switches for experiments.", kind="hidden")]
Push = Annotated[str | None, Help("Push the complete folder to the Hub: you/model.", "NAME", "In one commit.")]
Private = Annotated[bool, Help("Make that repository private.", needs="push_to_hub")]


@dataclass(frozen=True)
class PlanArguments(CompressionOptions):
    """Arguments of `plan`."""

    model: Model
    _: KW_ONLY
    tokenizer: Tokenizer = None
    progress: Progress = True
    study: Study = None


@dataclass(frozen=True)
class ConvertArguments(PlanArguments):
    """Arguments of `convert`."""

    output: Annotated[
        str | Path | None, Help("The folder to write.", more="`None`: return the compressed model.", kind="file")
    ] = None
    _: KW_ONLY
    push_to_hub: Push = None
    private: Private = False
    overwrite: Overwrite = False


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Data and settings of a training with the teacher."""

    data: Annotated[
        AnyPath | None,
        Help(
            "Sentence pairs, or sources alone, which the teacher translates: a file, or a Hub name. Default: random "
            "tokens, which it translates, too.",
            more="Pairs as of `load_parallel`.",
            kind="data",
        ),
    ] = None
    validation: Annotated[
        AnyPath | None,
        Help(
            "Pairs to choose the best model by. Default: a part of --data.",
            more="At most the first 1000 are used. Without pairs, the references are the teacher's translations.",
            kind="data",
        ),
    ] = None
    minutes: Annotated[
        float,
        Help(
            "Time of the whole call: reading, measuring, translating, training, writing.",
            "M",
            "The learning rate falls to 0 by the last step.",
            kind="minutes",
        ),
    ] = 30.0
    translations: Annotated[
        bool | None, Help("Train on the teacher's translations, too. Default: if that improves the result.")
    ] = None
    metrics: Metrics = ()
    report_to: Annotated[tuple[str, ...], Help("Log to tensorboard, trackio, wandb, …. Repeatable.")] = ()
    seed: Annotated[int, Help("Seed of everything that is random.", kind="seed")] = 0
    skip_bad_lines: Annotated[
        bool,
        Help(
            "Skip damaged lines of --data, and count them.",
            more="Otherwise they are errors.",
            needs="data",
            is_for_text=True,
        ),
    ] = False


@dataclass(frozen=True)
class RecoverArguments(TrainingOptions):
    """Arguments of `recover`."""

    model: Annotated["AnyModel", Help("Folder or Hub name of the compressed checkpoint.", kind="checkpoint")]
    output: Output
    _: KW_ONLY
    tokenizer: Tokenizer = None
    teacher: Annotated["AnyModel", Help("The checkpoint that it was made from.", kind="checkpoint")]
    exclude: Annotated[
        AnyPath | None,
        Help(
            "Pairs whose sources are not trained on, as those of a test.", kind="data", needs="data", is_for_text=True
        ),
    ] = None
    source_lang: SourceLang = None
    target_lang: TargetLang = None
    quantization: Annotated[
        str | None,
        Help(
            "int8 or int4, of the deployed model: the last third of the training rounds its weights.",
            more="Scores are those of the rounded weights, which are saved, unless no step improved the model.",
            values=("int8", "int4"),
            is_for_text=True,
        ),
    ] = None
    device: Annotated[str | None, Help("Where to train: cpu. Default: an accelerator, if there is one.", "cpu")] = None
    overwrite: Annotated[bool, Help("Start over in the folder of an earlier recovery.")] = False
    progress: Progress = True


@dataclass(frozen=True)
class CompressArguments(DeploymentOptions, CompressionOptions, TrainingOptions):
    """Arguments of `compress`, whose options of the conversion are checked with the method for the engine."""

    model: Annotated["AnyModel", Help("Folder or Hub name of the trained checkpoint.", kind="checkpoint")]
    output: Annotated[str | Path, Help("The folder for everything that is made.", kind="file")]
    _: KW_ONLY
    tokenizer: Tokenizer = None
    method: Annotated[
        Method | None,
        Help("As for convert. Default: narrow for an engine without low-rank products.", "METHOD", values=METHODS),
    ] = None  # type: ignore[assignment]
    calibration: Annotated[
        str | None,
        Help(
            "Text or speech to weight errors on, never a test's: pairs, or sources alone. Default: a part of --data.",
            "PATH",
            kind="data",
        ),
    ] = None
    minutes: Annotated[
        float,
        Help(
            "Time of the recovery alone; conversion, export and measurements take additional time.",
            "M",
            kind="minutes",
        ),
    ] = 30.0
    test: Annotated[
        AnyPath | None,
        Help(
            "Pairs for the last measurement. Default: a part of --data, if pairs.",
            more="With them, `data` may be of one language.",
            kind="data",
        ),
    ] = None
    device: Annotated[
        str | None, Help("Where to convert, train and score. Default: cpu, then an accelerator.", "cpu")
    ] = None  # type: ignore[assignment]
    push_to_hub: Push = None
    private: Private = False
    overwrite: Annotated[bool, Help("Start over in the folder of an earlier compression.")] = False
    progress: Progress = True

    def __post_init__(self) -> None:
        pass


@dataclass(frozen=True)
class TranslateArguments:
    """Arguments of the command `translate`."""

    model: Model
    file: Annotated[Path | None, Help("Text, UTF-8. Default: standard input.", kind="file")] = None
    _: KW_ONLY
    output: Annotated[Path | None, Help("File to write. Default: standard output.", kind="file")] = None
    batch_size: BatchSize = 32
    num_beams: NumBeams = None
    max_new_tokens: MaxNewTokens = None
    source_lang: SourceCode = None
    target_lang: TargetCode = None
    split: Annotated[
        bool | None,
        Help(
            "Split text into sentences, and join their translations. Default: with models for translation. Those are "
            "trained on sentences, and omit parts of longer text."
        ),
    ] = None
    sample_seed: Annotated[int | None, Help("Sample, with this seed. Default: greedy or beam search.")] = None
    device: Device = "cpu"


@dataclass(frozen=True)
class CompareArguments:
    """Arguments of the command `compare`."""

    teacher: Annotated[str, Help("Folder or Hub name of the dense checkpoint.", kind="checkpoint")]
    model: Annotated[str, Help("The smaller one; like the teacher, it may be an export.", kind="checkpoint")]
    _: KW_ONLY
    num_beams: Annotated[int | None, Help("Beams of both. Default: the smaller model's.", kind="count")] = None
    max_new_tokens: MaxNewTokens = None
    source_lang: SourceCode = None
    target_lang: TargetCode = None
    port: Annotated[int | None, Help("Port to serve at. Default: the first free one from 7860.", "N", kind="port")] = (
        None
    )
    host: Annotated[str, Help("Address to serve at: 127.0.0.1 for this machine, 0.0.0.0 for all.")] = "127.0.0.1"
    browser: Annotated[bool, Help("Open the page in the browser.", name="--open")] = False


@dataclass(frozen=True)
class DemoArguments:
    """Arguments of the command `demo`."""

    output: Annotated[Path, Help("Folder. Default: demo-output.", kind="file")] = Path("demo-output")
    _: KW_ONLY
    seed: Annotated[int, Help("Seed of the corpus and of every training.", kind="seed")] = 0
    fresh: Annotated[bool, Help("Remove the output of an earlier demo, and start over.")] = False


@dataclass(frozen=True)
class EvaluateArguments:
    """Arguments of `evaluate`."""

    model: Annotated[
        "AnyModel",
        Help(
            "Folder or Hub name of a checkpoint, or the folder of an export.",
            more="Or a loaded model. Speed and memory of an export are not measured (`lightformers benchmark engines` "
            "measures its speed).",
            kind="checkpoint",
        ),
    ]
    _: KW_ONLY
    tokenizer: Tokenizer = None
    data: Annotated[
        str | os.PathLike,
        Help("Parallel text: a .jsonl, .json, .csv, .tsv or .parquet file, or a Hub name.", kind="data"),
    ]
    teacher: Annotated["AnyModel | None", Help("The dense checkpoint to compare with.", kind="checkpoint")] = None
    source_lang: SourceLang = None
    target_lang: TargetLang = None
    split: Split = "test"
    max_samples: MaxSamples = None
    batch_size: BatchSize = 32
    num_beams: NumBeams = None
    max_new_tokens: MaxNewTokens = None
    device: Device = "cpu"
    speed: Annotated[
        bool,
        Help("Measure tokens/s and peak memory on one core (minutes), of speech the real-time factor."),
    ] = True
    runs: Annotated[int, Help("Number of runs of the speed measurement.", kind="hidden")] = 10
    metrics: Metrics = ()
    comet: Annotated[
        str | None,
        Help("Local COMET checkpoint (.ckpt); needs the command comet-score.", "PATH", is_for_text=True),
    ] = None
    progress: Progress = True


@dataclass(frozen=True)
class DistillArguments:
    """Arguments of `distill`."""

    teacher: Annotated[
        "AnyModel",
        Help(
            "Folder or Hub name of a checkpoint, or the folder of an export.",
            more="Or a loaded model.",
            kind="checkpoint",
        ),
    ]
    data: Annotated[
        str | os.PathLike,
        Help(
            "Sources or pairs: files, folders, patterns, or a Hub name.",
            more="Targets are not read. A shard is 4 MB of lines, a row group, or a file that is packed.",
            kind="data",
        ),
    ]
    output: Annotated[str | Path, Help("The folder for the shards.", kind="file")]
    _: KW_ONLY
    tokenizer: Tokenizer = None
    source_lang: SourceLang = None
    target_lang: TargetLang = None
    split: Split = "train"
    keep: Annotated[
        str | float | None,
        Help("Keep the best share of all pairs by the teacher's mean log-probability.", "90%", '`"90%"` or 0.9.'),
    ] = None
    format: Annotated[str, Help("jsonl or parquet.", values=("jsonl", "parquet"))] = "jsonl"
    processes: Annotated[
        int | None, Help("Default: one for each core.", more="On an accelerator, one.", kind="count")
    ] = None
    ray: Annotated[
        str | None,
        Help("auto, or the address of a Ray cluster that does the work.", "auto", "Its machines see `output`."),
    ] = None
    num_beams: Annotated[int, Help("Beams of the search.", kind="count")] = 4
    max_new_tokens: MaxNewTokens = None
    batch_size: BatchSize = 32
    skip_bad_lines: Annotated[
        bool,
        Help("Skip damaged lines, and count them.", more="Otherwise they are errors before the first translation."),
    ] = False
    overwrite: Annotated[bool, Help("Start over in the folder of an earlier distillation.")] = False
    progress: Progress = True


@dataclass(frozen=True)
class PushArguments:
    """Arguments of `push_to_hub`."""

    model: Annotated[
        "AnyModel",
        Help(
            "The folder that convert, a training run, export or web wrote.",
            more="Or a loaded model of this package.",
            kind="file",
        ),
    ]
    name: Annotated[
        str, Help("user/model, or model in your own namespace on the Hub.", more="A missing repository is created.")
    ]
    _: KW_ONLY
    tokenizer: Tokenizer = None
    private: Annotated[
        bool, Help("Make the repository private.", more="An existing public repository is refused.")
    ] = False
    revision: Annotated[
        str | None,
        Help("Branch to commit to. Default: main.", more="It is created if it is missing.", also="--branch"),
    ] = None
    message: Annotated[str | None, Help("Message of the commit.", also="-m")] = None
    results: Annotated[
        Sequence[str | Path],
        Help(
            "A file that evaluate --json wrote: becomes a table of the model card. Repeatable.",
            more="And of the Hub's page.",
            kind="file",
        ),
    ] = ()

    def __post_init__(self) -> None:
        if re.fullmatch(r"[0-9a-f]{40}", self.revision or ""):
            raise OptionError(
                "revision", f" is the commit {self.revision}, which nothing can be added to: give the name of a branch"
            )


@dataclass(frozen=True)
class ReportArguments:
    """Arguments of `report_page`."""

    model: Annotated[str, Help("Folder that convert or a training run wrote, or Hub name.", kind="checkpoint")]
    _: KW_ONLY
    teacher: Annotated[
        str | None,
        Help(
            "The checkpoint it was made from: adds its translations to those of --data.",
            kind="checkpoint",
            needs="data",
        ),
    ] = None
    data: Annotated[str | None, Help("Parallel text, as for evaluate: adds sample translations.", kind="data")] = None
    results: Annotated[
        Sequence[str | Path],
        Help(
            "A file that evaluate --json wrote, of this model or others: adds quality against size and speed; or "
            "benchmark engines --json. Repeatable.",
            kind="file",
        ),
    ] = ()
    metrics: Annotated[Metrics, Help("", needs="results")] = ()
    samples: Annotated[int, Help("Translations shown, evenly spread over the data.", kind="count", needs="data")] = 8
    source: Annotated[SourceLang, Help("", needs="data")] = None
    target: Annotated[TargetLang, Help("", needs="data")] = None
    split: Annotated[Split, Help("", needs="data")] = "test"
    num_beams: Annotated[NumBeams, Help("", needs="data")] = None
    max_new_tokens: Annotated[MaxNewTokens, Help("", needs="data")] = None
    progress: Progress = False


@dataclass(frozen=True)
class EnginesArguments:
    """Arguments of `compare_engines`. Every combination of cores, batch sizes and beams is a setting."""

    teacher: Annotated[str, Help("Folder or Hub name of the dense checkpoint.", kind="checkpoint")]
    students: Annotated[Sequence[str], Help("Folders or Hub names of checkpoints made from it.", kind="checkpoint")]
    _: KW_ONLY
    forms: Annotated[
        Sequence[str] | None,
        Help(
            f"{', '.join(deployment_names())}, or with another type of numbers, such as onnx-int4. "
            "Repeatable. Default: all named here.",
            name="--engine",
            values=tuple(deployment_names()),
        ),
    ] = None
    cores: Annotated[
        Sequence[int] | None,
        Help("Repeatable. Default: 1 and 2.", more="At most as many as the machine has.", kind="number"),
    ] = None
    batch_sizes: Annotated[
        Sequence[int],
        Help(
            "Repeatable. Default: 1 and 32.",
            more="A run of size 1 translates `sentences`, one at a time; of more, one batch.",
            name="--batch-size",
            kind="number",
            is_for_text=True,
        ),
    ] = (1, 32)
    beams: Annotated[Sequence[int], Help("Repeatable. Default: 1 and 4.", name="--num-beams", kind="number")] = (1, 4)
    runs: Annotated[int, Help("Interleaved runs; medians are shown.", kind="count")] = 5
    sentences: Annotated[int, Help("Sentences of a run at batch size 1.", kind="count")] = 10
    new_tokens: Annotated[int, Help("Tokens generated for every sentence.", kind="count", is_for_text=True)] = 25
    data: Annotated[
        str | None,
        Help("Parallel text to measure the quality on, too.", more="With the most of `beams`.", kind="data"),
    ] = None
    metrics: Annotated[Metrics, Help("", needs="data")] = ()
    shortlist: Annotated[
        str | None,
        Help("Text, as for export: adds every engine with a shortlist made from it.", kind="data", is_for_text=True),
    ] = None
    calibration: Annotated[
        str | None, Help("Text, as for export, by which int4 rounds.", kind="data", is_for_text=True)
    ] = None
    source: SourceLang = None
    target: TargetLang = None
    max_samples: Annotated[MaxSamples, Help("", needs="data")] = None
    progress: Progress = False
