"""`plan` and `convert` as users call them: a checkpoint or a loaded model in, a folder, a model or a push out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from transformers import PreTrainedModel

from ..checkpoints.teacher import Teacher, read
from ..conversion.convert import compress, finish, write
from ..conversion.options import CompressionOptions, Method, StudyOptions, resolve_study
from ..conversion.report import CompressionReport, Plan
from ..conversion.workers import share_cores
from ..deprecated import renamed_arguments
from ..files import atomic_output, check_output
from ..hub import check_push, push_folder
from ..in_memory import AnyModel, given_folders, model_name
from ..loading import hide_bars, resolve_source
from ..processors import usual_settings
from ..text import check_data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@renamed_arguments(source="model")
def plan(
    model: AnyModel,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    ratio: float | None = None,
    rank: str | int | None = None,
    energy: float | None = None,
    params: str | None = None,
    size: str | None = None,
    languages: str | Sequence[str] | None = None,
    vocabulary: str | Sequence[str] | None = None,
    vocabulary_size: int | None = None,
    pattern: dict[str, str | int | None] | None = None,
    encoder_layers: int | None = None,
    decoder_layers: int | None = None,
    encoder_groups: int | None = None,
    decoder_groups: int | None = None,
    method: Method = "auto",
    calibration: str | None = None,
    calibration_samples: int | None = None,
    source_lang: str | None = None,
    target_lang: str | None = None,
    device: str = "cpu",
    progress: bool = True,
    study: StudyOptions | None = None,
) -> Plan:
    """Return the plan of `convert`, without writing anything: form, parameters and error of every matrix.

    Args:
        model: a checkpoint folder, a name on the Hub, or a loaded model.
        tokenizer: that of a loaded model; without text (`calibration`, `vocabulary`) it may be missing.
        ratio, rank, …, device: see `CompressionOptions`.
        progress: show a progress bar.
        study: switches for experiments.

    Raises:
        ValueError, FileNotFoundError: as `convert`.

    Example:
        >>> print(plan("opus-mt-de-en", ratio=4, encoder_groups=3))
    """
    asked = CompressionOptions.of(locals())
    with conversion(progress):
        check_options(asked, study)
        report = compress(read_teacher(model, tokenizer, asked), asked, study, dry=True).report
    return cast(Plan, report)


@renamed_arguments(source="model")
def convert(
    model: AnyModel,
    output: str | Path | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    ratio: float | None = None,
    rank: str | int | None = None,
    energy: float | None = None,
    params: str | None = None,
    size: str | None = None,
    languages: str | Sequence[str] | None = None,
    vocabulary: str | Sequence[str] | None = None,
    vocabulary_size: int | None = None,
    pattern: dict[str, str | int | None] | None = None,
    encoder_layers: int | None = None,
    decoder_layers: int | None = None,
    encoder_groups: int | None = None,
    decoder_groups: int | None = None,
    method: Method = "auto",
    calibration: str | None = None,
    calibration_samples: int | None = None,
    source_lang: str | None = None,
    target_lang: str | None = None,
    device: str = "cpu",
    push_to_hub: str | None = None,
    private: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    study: StudyOptions | None = None,
) -> CompressionReport | PreTrainedModel:
    """Compress a trained checkpoint of Marian, BART, mBART, Pegasus, M2M100, T5, mT5, UMT5 or this package.

    `output` gets weights, configuration, tokenizer, generation configuration, the model's code, `compression.json` and
    a model card: `AutoModelForSeq2SeqLM.from_pretrained(output)` and `AutoTokenizer.from_pretrained(output)` load it.
    The folder is written completely or not at all. Without `output` the function returns the compressed model, ready
    for `Seq2SeqTrainer`. Its report is `model.compression_report`, and its tokenizer is that of `model`.

    On a CPU it uses as many worker threads as PyTorch has threads.

    Args:
        model: a checkpoint folder, a name on the Hub, or a loaded model.
        output: the folder to write. `None`: return the compressed model.
        tokenizer: that of a loaded model; without text (`calibration`, `vocabulary`) it may be missing.
        ratio, rank, …, device: see `CompressionOptions`.
        push_to_hub: push the complete folder to the Hub under this name, in one commit.
        private: make the repository private.
        overwrite: replace the content of `output`, if this package wrote all of it.
        progress: show a progress bar.
        study: switches for experiments.

    Returns: a report with `output`; the compressed model without it.

    Raises:
        ValueError: the model is of no supported family, holds NaN, does not fit its configuration, or an option is out
            of its range.
        FileNotFoundError: the model, its weights or one of its shards is not there.
        FileExistsError, BlockingIOError: see `files.atomic_output`.
        OSError: the push failed. The folder stays.

    Example:
        >>> report = convert("opus-mt-de-en", "light", ratio=4, calibration="train.jsonl")
        >>> light = convert(model, tokenizer=tokenizer, ratio=4)  # a loaded model
    """
    asked = CompressionOptions.of(locals())
    if output is None and push_to_hub:
        raise ValueError("push_to_hub needs output, the folder that is pushed: give output, too")
    if output is None and asked.vocabulary:
        raise ValueError("vocabulary changes the tokenizer, too: give output, a folder for model and tokenizer")
    with conversion(progress):
        check_options(asked, study)
        if output is None:
            name = model_name(model).rpartition("/")[2]
            return finish(compress(read_teacher(model, tokenizer, asked), asked, study, dry=False), f"{name}-light")
        output = Path(os.path.expanduser(output))
        check_output(output, overwrite=overwrite, inputs=[*given_folders(model), *asked.texts])
        if push_to_hub:
            check_push(push_to_hub)
        inputs: list[str | Path | None] = [*map(resolve_source, given_folders(model)), *asked.texts]
        with atomic_output(output, overwrite=overwrite, inputs=inputs) as temporary:
            result = compress(read_teacher(model, tokenizer, asked), asked, study, dry=False)
            write(result, temporary, output.name)
    if push_to_hub:
        push_folder(output, push_to_hub, private=private)
    return result.report


@contextmanager
def conversion(progress: bool) -> Iterator[None]:
    """Inside, a conversion has its threads, its progress bars, and PyTorch's usual settings."""
    with share_cores(progress=progress), usual_settings(), hide_bars():
        yield


def read_teacher(model: AnyModel, tokenizer: PreTrainedTokenizerBase | None, options: CompressionOptions) -> Teacher:
    """Read a model between the languages of the options."""
    return read(model, tokenizer, (options.source_lang, options.target_lang))


def check_options(asked: CompressionOptions, study: StudyOptions | None) -> None:
    """Raise an error for options that contradict a study's switches, or a text that is not there."""
    resolve_study(asked, study)
    for text in asked.texts:
        check_data(text)
