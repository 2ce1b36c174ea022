"""`plan` and `convert` as users call them: a checkpoint or a loaded model in, a folder, a model or a push out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from transformers import PreTrainedModel

from ..arguments import ConvertArguments, PlanArguments
from ..checkpoints.teacher import Teacher, read
from ..conversion.convert import compress, finish, write
from ..conversion.options import CompressionOptions, StudyOptions, resolve_study
from ..conversion.report import CompressionReport, Plan
from ..conversion.workers import share_cores
from ..data_files import check_data
from ..files import atomic_output, check_output
from ..hub import check_push, push_folder
from ..in_memory import given_folders, model_name
from ..loading import hide_bars, resolve_source
from ..options import OptionError, takes, values_of
from ..processors import usual_settings


@takes(PlanArguments)
def plan(call: PlanArguments) -> Plan:
    """Return the plan of `convert`, without writing anything: form, parameters and error of every matrix.

    Args:

    Raises:
        ValueError, FileNotFoundError: as `convert`.

    Example:
        >>> print(plan("opus-mt-de-en", ratio=4, encoder_groups=3))
    """
    asked = CompressionOptions.of(values_of(call))
    with conversion(call.progress):
        check_options(asked, call.study)
        report = compress(read_teacher(call, asked), asked, call.study, dry=True).report
    return cast(Plan, report)


@takes(ConvertArguments)
def convert(call: ConvertArguments) -> CompressionReport | PreTrainedModel:
    """Compress a trained Marian, BART, mBART, Pegasus, M2M100, T5, mT5, UMT5, Whisper or LightFormer checkpoint.

    `output` gets weights, configuration, tokenizer, generation configuration, the model's code, `compression.json` and
    a model card: `AutoModelForSeq2SeqLM.from_pretrained(output)` and `AutoTokenizer.from_pretrained(output)` load it.
    The folder is written completely or not at all. Without `output` the function returns the compressed model, ready
    for `Seq2SeqTrainer`. Its report is `model.compression_report`, and its tokenizer is that of `model`.

    On a CPU it uses as many worker threads as PyTorch has threads.

    Args:

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
    asked = CompressionOptions.of(values_of(call))
    if call.output is None and call.push_to_hub:
        raise OptionError("push_to_hub", " needs output, the folder that is pushed: give output, too")
    if call.output is None and asked.vocabulary:
        raise OptionError("vocabulary", " changes the tokenizer, too: give output, a folder for model and tokenizer")
    with conversion(call.progress):
        check_options(asked, call.study)
        if call.output is None:
            name = model_name(call.model).rpartition("/")[2]
            return finish(compress(read_teacher(call, asked), asked, call.study, dry=False), f"{name}-light")
        output = Path(os.path.expanduser(call.output))
        check_output(output, overwrite=call.overwrite, inputs=[*given_folders(call.model), *asked.texts])
        if call.push_to_hub:
            check_push(call.push_to_hub)
        inputs: list[str | Path | None] = [*map(resolve_source, given_folders(call.model)), *asked.texts]
        with atomic_output(output, overwrite=call.overwrite, inputs=inputs) as temporary:
            result = compress(read_teacher(call, asked), asked, call.study, dry=False)
            write(result, temporary, output.name)
    if call.push_to_hub:
        push_folder(output, call.push_to_hub, private=call.private)
    return result.report


@contextmanager
def conversion(progress: bool) -> Iterator[None]:
    """Inside, a conversion has its threads, its progress bars, and PyTorch's usual settings."""
    with share_cores(progress=progress), usual_settings(), hide_bars():
        yield


def read_teacher(call: PlanArguments, options: CompressionOptions) -> Teacher:
    """Read a model between the languages of the options."""
    return read(call.model, call.tokenizer, (options.source_lang, options.target_lang))


def check_options(asked: CompressionOptions, study: StudyOptions | None) -> None:
    """Raise an error for options that contradict a study's switches, or a text that is not there."""
    resolve_study(asked, study)
    for text in asked.texts:
        check_data(text)
