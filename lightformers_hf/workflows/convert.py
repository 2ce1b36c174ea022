"""`plan` and `convert` as users call them: a checkpoint or a loaded model in, a folder, a model or a push out."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, cast

import transformers
from transformers import PreTrainedModel

from ..conversion.convert import compress, write
from ..conversion.options import CompressionOptions, Method, StudyOptions, resolve_study
from ..conversion.report import CompressionReport, Plan
from ..conversion.workers import share_cores
from ..deprecated import renamed_arguments
from ..files import atomic_output, check_output
from ..hub import check_push, push_folder
from ..in_memory import AnyModel, model_name, on_disk
from ..loading import load_pretrained, resolve_source
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
        tokenizer: that of a loaded model.
        ratio, rank, …, device: see `CompressionOptions`.
        progress: show a progress bar.
        study: switches for experiments.

    Raises:
        ValueError, FileNotFoundError: as `convert`.

    Example:
        >>> print(plan("opus-mt-de-en", ratio=4, encoder_groups=3))
    """
    asked = CompressionOptions.of(locals())
    with share_cores(progress=progress), on_disk(tokenizer, model) as (place,):
        check_options(asked, study)
        report = compress(resolve_source(place), model_name(model), asked, study, dry=True).report
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
        tokenizer: that of a loaded model.
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
    if output is None:
        if push_to_hub:
            raise ValueError("push_to_hub needs output, the folder that is pushed: give output, too")
        return convert_in_memory(model, tokenizer, asked, study, progress=progress)
    output = Path(os.path.expanduser(output))
    with share_cores(progress=progress), on_disk(tokenizer, model) as (place,):
        check_options(asked, study)
        check_output(output, overwrite=overwrite, inputs=[place, *asked.texts])
        if push_to_hub:
            check_push(push_to_hub)
        folder = resolve_source(place)
        inputs: list[str | Path | None] = [folder, *asked.texts]
        with atomic_output(output, overwrite=overwrite, inputs=inputs) as temporary:
            result = compress(folder, model_name(model), asked, study, dry=False)
            write(result, temporary, output.name)
    if push_to_hub:
        push_folder(output, push_to_hub, private=private)
    return result.report


def convert_in_memory(
    model: AnyModel,
    tokenizer: PreTrainedTokenizerBase | None,
    options: CompressionOptions,
    study: StudyOptions | None,
    *,
    progress: bool,
) -> PreTrainedModel:
    """Convert into a temporary folder, and return the model that it holds, with its report."""
    if options.vocabulary:
        raise ValueError("vocabulary changes the tokenizer, too: give output, a folder for model and tokenizer")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        asked = {field.name: getattr(options, field.name) for field in fields(options)}
        place = Path(folder, "light")
        report = convert(model, place, tokenizer=tokenizer, progress=progress, study=study, **asked)
        auto = getattr(transformers, report.auto_class)
        light = load_pretrained(auto, place, dtype="auto")
    light.config.name_or_path = light.name_or_path = f"{model_name(model).rpartition('/')[2]}-light"
    light.compression_report = report
    return light


def check_options(asked: CompressionOptions, study: StudyOptions | None) -> None:
    """Raise an error for options that contradict a study's switches, or a text that is not there."""
    resolve_study(asked, study)
    for text in asked.texts:
        check_data(text)
