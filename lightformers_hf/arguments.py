"""Arguments of the public functions, each stated once: signature, command, reference page and records follow.

Importing this file imports neither torch nor transformers: the command line reads its options here.
"""

import os
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from .conversion.options import METHODS, CompressionOptions, Method, StudyOptions
from .engines import ENGINES
from .options import Help

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .in_memory import AnyModel

AnyPath = str | os.PathLike | None
# When the command `recover` began, by `time.monotonic()`: its minutes include the import of torch and transformers.
BEGAN: ContextVar[float | None] = ContextVar("BEGAN", default=None)
Tokenizer = Annotated[
    "PreTrainedTokenizerBase | None", Help("That of a loaded model. Without text it may be missing.", kind="hidden")
]
Progress = Annotated[bool, Help("Show bars, and a line for every step.", kind="hidden")]
Study = Annotated[StudyOptions | None, Help("Switches for experiments.", kind="hidden")]
Push = Annotated[str | None, Help("Push the complete folder to the Hub: you/model.", "NAME", "In one commit.")]
Private = Annotated[bool, Help("Make that repository private.")]


@dataclass(frozen=True)
class PlanArguments(CompressionOptions):
    """Arguments of `plan`."""

    model: Annotated["AnyModel", Help("Folder or Hub name of a checkpoint.", kind="checkpoint")]
    _: KW_ONLY
    tokenizer: Tokenizer = None
    progress: Progress = True
    study: Study = None


@dataclass(frozen=True)
class ConvertArguments(PlanArguments):
    """Arguments of `convert`."""

    output: Annotated[
        str | Path | None,
        Help("The folder to write.", more="`None`: return the compressed model.", kind="file"),
    ] = None
    _: KW_ONLY
    push_to_hub: Push = None
    private: Private = False
    overwrite: Annotated[bool, Help("Replace the folder, if a command wrote all of it.")] = False


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Data and settings of a training with the teacher."""

    data: Annotated[
        AnyPath,
        Help(
            "Sentence pairs, or sources alone, which the teacher translates: a file, or a Hub name. Default: random "
            "tokens, which it translates, too.",
            more="Pairs as of `load_parallel`.",
            kind="data",
        ),
    ] = None
    validation: Annotated[
        AnyPath,
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
    metrics: Annotated[
        Iterable[str],
        Help(
            "exact-match, cer, bleu, multi-bleu, chrf, rouge, …. Repeatable. Default: follows from the data.",
            "NAME",
            name="--metric",
            kind="metric",
        ),
    ] = ()
    report_to: Annotated[tuple[str, ...], Help("Log to tensorboard, trackio, wandb, …. Repeatable.")] = ()
    seed: Annotated[int, Help("Seed of everything that is random.", kind="seed")] = 0
    skip_bad_lines: Annotated[
        bool, Help("Skip damaged lines of --data, and count them.", more="Otherwise they are errors.")
    ] = False


@dataclass(frozen=True)
class RecoverArguments(TrainingOptions):
    """Arguments of `recover`."""

    model: Annotated["AnyModel", Help("Folder or Hub name of the compressed checkpoint.", kind="checkpoint")]
    output: Annotated[str | Path, Help("The folder to write.", kind="file")]
    _: KW_ONLY
    tokenizer: Tokenizer = None
    teacher: Annotated["AnyModel", Help("The checkpoint that it was made from.", kind="checkpoint")]
    exclude: Annotated[AnyPath, Help("Pairs whose sources are not trained on, as those of a test.", kind="data")] = (
        None
    )
    source_lang: Annotated[
        str | None,
        Help("Column of the source; of multilingual models also the code: de=de_DE. T5: de='prefix: '.", "de"),
    ] = None
    target_lang: Annotated[str | None, Help("The same for the target.", "en")] = None
    quantization: Annotated[
        str | None,
        Help(
            "int8 or int4, of the deployed model: the last third of the training rounds its weights.",
            more="Scores are those of the rounded weights; the saved ones are not rounded.",
            values=("int8", "int4"),
        ),
    ] = None
    device: Annotated[str | None, Help("Where to train: cpu. Default: an accelerator, if there is one.", "cpu")] = None
    overwrite: Annotated[bool, Help("Start over in the folder of an earlier recovery.")] = False
    progress: Progress = True


@dataclass(frozen=True, kw_only=True)
class DeploymentOptions:
    """Options of the deployed model."""

    to: Annotated[str, Help("Engine: " + " or ".join(ENGINES) + ".", values=ENGINES)] = "ctranslate2"
    quantization: Annotated[
        str | None,
        Help(
            "float32, int8, int4 (--to onnx), or another type of numbers that the engine has. Default: int8; "
            "`export --to onnx` also writes float32 and float16.",
            values=("int8", "int4", "float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16"),
        ),
    ] = "int8"
    shortlist: Annotated[
        AnyPath,
        Help(
            "Text, parallel or sources alone. The engine then computes only tokens that match the source's.",
            "PATH",
            kind="data",
        ),
    ] = None


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
    ] = None
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
        AnyPath,
        Help(
            "Pairs for the last measurement. Default: a part of --data, if pairs.",
            more="With them, `data` may be of one language.",
            kind="data",
        ),
    ] = None
    device: Annotated[
        str | None, Help("Where to convert, train and score. Default: cpu, then an accelerator.", "cpu")
    ] = None
    push_to_hub: Push = None
    private: Private = False
    overwrite: Annotated[bool, Help("Start over in the folder of an earlier compression.")] = False
    progress: Progress = True

    def __post_init__(self) -> None:
        pass
