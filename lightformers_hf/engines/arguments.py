"""Arguments of the functions that write other formats, and fields that functions of other packages have, too.

Importing this file imports neither torch nor transformers: the command line reads its options here.
"""

import os
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ..options import Help
from . import ARGOS, ENGINES

if TYPE_CHECKING:
    from ..in_memory import AnyModel, AnyTokenizer

AnyPath = str | os.PathLike
Model = Annotated[
    "AnyModel", Help("Folder or Hub name of a checkpoint.", None, "Or a loaded model.", kind="checkpoint")
]
Output = Annotated[str | Path, Help("The folder to write.", kind="file")]
Tokenizer = Annotated[
    "AnyTokenizer | None",
    Help("That of a loaded model; of one for speech its processor. Without text it may be missing.", kind="hidden"),
]
Overwrite = Annotated[bool, Help("Replace the folder, if a command wrote all of it.")]
SourceLang = Annotated[
    str | None,
    Help(
        "Column of the source; of multilingual models also the code: de=de_DE. T5: de='prefix: '.",
        "de",
        "Or a language in a column `translation`. Default: the tokenizer's.",
        name="--source-lang",
    ),
]
TargetLang = Annotated[str | None, Help("The same for the target.", "en", name="--target-lang")]
SourceCode = Annotated[
    str | None, Help("Code of the source's language; T5: en, or en='a prefix: '.", "de_DE", name="--source-lang")
]
TargetCode = Annotated[str | None, Help("Code of the language to translate into.", "en_XX", name="--target-lang")]
Quantization = Annotated[
    str | None,
    Help(
        "float32, int8, int4 (--to onnx), or another type of numbers that the engine has. Default: int8; "
        "`export --to onnx` also writes float32 and float16.",
        values=("int8", "int4", "float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16"),
    ),
]
Shortlist = Annotated[
    AnyPath | None,
    Help(
        "Text, parallel or sources alone. The engine then computes only tokens that match the source's.",
        "PATH",
        "The model translates sources alone: a file of lines, or data. `None`: all tokens are computed.",
        kind="data",
        is_for_text=True,
    ),
]
Rounding = Annotated[
    AnyPath | None,
    Help(
        "Text, parallel or sources alone, by which int4 is rounded. Default: every number is rounded to the nearest.",
        "PATH",
        kind="data",
        is_for_text=True,
    ),
]
BatchSize = Annotated[int, Help("Sentences that are translated together.", kind="count")]
NumBeams = Annotated[int | None, Help("Beams; 1 is greedy. Default: the checkpoint's.", kind="count")]
MaxNewTokens = Annotated[int | None, Help("Longest output. Default: the checkpoint's.", kind="count")]
Split = Annotated[str, Help("Split of a dataset on the Hub.")]
MaxSamples = Annotated[int | None, Help("Use only the first N pairs. Default: all.", kind="count")]
Device = Annotated[str, Help("Where to compute: cpu, cuda, cuda:1, mps.")]
Metrics = Annotated[
    Iterable[str],
    Help(
        "exact-match, cer, bleu, multi-bleu, chrf, rouge, …. Repeatable. Default: follows from the data.",
        "NAME",
        name="--metric",
        kind="metric",
    ),
]


@dataclass(frozen=True, kw_only=True)
class DeploymentOptions:
    """Options of the deployed model."""

    to: Annotated[str, Help("Engine: " + " or ".join(ENGINES) + ".", values=ENGINES)] = "ctranslate2"
    quantization: Quantization = "int8"
    shortlist: Shortlist = None


@dataclass(frozen=True)
class ExportArguments:
    """Arguments of `export`."""

    model: Model
    output: Output
    _: KW_ONLY
    tokenizer: Tokenizer = None
    to: Annotated[
        str,
        Help(
            f"Engine: {' or '.join(ENGINES)}; or {ARGOS}: CTranslate2 and a package for Argos Translate.",
            values=(*ENGINES, ARGOS),
        ),
    ]
    quantization: Quantization = None
    shortlist: Shortlist = None
    calibration: Rounding = None
    source_lang: Annotated[SourceLang, Help("", is_for_text=True)] = None
    target_lang: Annotated[TargetLang, Help("", is_for_text=True)] = None
    overwrite: Overwrite = False


@dataclass(frozen=True)
class WebArguments:
    """Arguments of `export_web`."""

    model: Model
    output: Output
    _: KW_ONLY
    compare: Annotated[
        str | Path | None, Help("A second model that the page runs beside it.", "TEACHER", kind="checkpoint")
    ] = None
    quantization: Annotated[str, Help("Type of numbers: int8 or int4.", values=("int8", "int4"))] = "int8"
    calibration: Rounding = None
    source_lang: SourceCode = None
    target_lang: Annotated[TargetCode, Help("", is_for_text=True)] = None
    overwrite: Overwrite = False
