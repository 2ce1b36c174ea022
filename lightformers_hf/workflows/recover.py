"""Recover the quality of a compressed model by one call, of the parts `training/run_translation.py` is made of.

From top to bottom: the call, and its record on disk.
"""

from __future__ import annotations

import logging
import math
import numbers
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, set_seed

from ..arguments import BEGAN, RecoverArguments
from ..engines.engine import ONE_OUTPUT
from ..evaluation.quality import check_metrics
from ..evaluation.transcribe import reads_sound
from ..files import (
    RECORD_FILE,
    check_content,
    check_place,
    find_foreign,
    list_entries,
    lock,
    open_to_readers,
    parents,
    read_json,
    write_json,
)
from ..in_memory import identify, on_disk
from ..languages import begin_with, first_token_of
from ..loading import check_vocabulary, load_pretrained, resolve_source
from ..models.modeling_lightformer import LightFormerForConditionalGeneration
from ..options import OptionError, check_speech, takes, values_of
from ..processors import has_fast_bf16
from ..recovery import check_reports, load_distiller, one_process, remove_checkpoints
from ..recovery.runs import hush_trainer, keep_randomness
from ..text import data_name
from .recover_speech import SoundRun
from .run import TRANSLATIONS_FILE, VALIDATION_FILE, Recovery, Run

logger = logging.getLogger(__name__)
# Arguments that an interrupted recovery may resume with others of.
NOT_ASKED = ("output", "tokenizer", "report_to", "device", "skip_bad_lines", "overwrite", "progress")
CHECKPOINTS = r"checkpoint-\d+(/.*)?"  # checkpoints of the training, until it ends
# Below this ratio, model and teacher were swapped; forms that do not pay may have made a model a little larger.
LEAST_RATIO = 0.9
ROUNDED_TYPES = ("int8", "int4")  # of weights, in a training
LATE = 1.5  # times its minutes: a recovery that takes longer says so


@takes(RecoverArguments)
def recover(call: RecoverArguments) -> Recovery:
    """Train a compressed model with its teacher for about so many minutes, with settings that follow from both.

    The function keeps the checkpoint with the best score on the validation text, which may be the initial one. The
    score is the first of `metrics`, by default chrF; for references of one word the character error rate, for
    summaries ROUGE-L. BLEU does not distinguish similar models. The same call resumes
    an interrupted recovery.

    Args:

    Raises:
        ValueError: an option is out of its range, or data or models do not match.
        FileNotFoundError: a model or a file does not exist.
        FileExistsError: `output` contains anything else than this recovery, interrupted.

    Example:
        >>> recover("light", "recovered", teacher="opus-mt-de-en", data="train.jsonl", minutes=30)
    """
    start, metrics = BEGAN.get() or time.monotonic(), check_metrics(call.metrics)
    check_minutes(call.minutes)
    check_reports(call.report_to)
    trains_on_cpu(call.device)
    if call.quantization not in (None, *ROUNDED_TYPES):
        raise OptionError("quantization", f" is {call.quantization!r}: expected {' or '.join(ROUNDED_TYPES)}")
    data, validation, exclude = map(data_name, (call.data, call.validation, call.exclude))
    asked = {name: value for name, value in values_of(call).items() if name not in NOT_ASKED}
    asked |= {"model": identify(call.model), "teacher": identify(call.teacher), "metrics": metrics or None}
    asked |= {"data": data, "validation": validation, "exclude": exclude}
    output = Path(os.path.expanduser(call.output))
    with on_disk(call.tokenizer, call.model, call.teacher) as (light, dense):
        if os.path.realpath(light) == os.path.realpath(dense):
            raise ValueError(f"{light} is given as the model and as its teacher: the teacher is the dense checkpoint")
        inputs = [light, dense, data, validation, exclude]
        record = claim(output, asked, overwrite=call.overwrite, inputs=inputs)
        with one_process(), keep_randomness(), parents(output), lock(output), hush_trainer():
            if (output / RECORD_FILE).exists():  # read again, now without other writers
                record = claim(output, asked, overwrite=call.overwrite, inputs=inputs)
            set_seed(call.seed)
            resumes = "scores" in record
            call = replace(call, metrics=metrics)
            run = start_run(call, output, light, dense, data, validation, exclude, resumes=resumes)
            now = run.corpus.describe_files()
            if changed := find_changed(record.get("data", {}), now):
                logger.warning(f"{changed} has changed since this work began, which resumes with it as it is now")
            if not resumes:
                begin(output, record)
                record |= run.prepare(call.minutes, call.translations, start) | {"data": now}
                write_json(record, output / RECORD_FILE)
            recovery = finish(output, record, run.train(record))
            if not resumes and (took := (time.monotonic() - start) / 60) > LATE * call.minutes:
                logger.warning(
                    f"the recovery took {took:.1f} minutes in place of {call.minutes:g}: reading, measuring and "
                    "writing need the most of so short a time; give more minutes"
                )
            return recovery


def start_run(
    call: RecoverArguments,
    output: Path,
    light: str,
    teacher: str,
    data: str | None,
    validation: str | None,
    exclude: str | None = None,
    *,
    resumes: bool = False,
) -> Run:
    """Load the two models and the text. Raises `ValueError` where they do not fit, or as `load_parallel`."""
    on_cpu, folder = trains_on_cpu(call.device), resolve_source(light)
    kind = SoundRun if reads_sound(folder) else Run
    if kind is SoundRun:
        check_speech(call, light)
    tokenizer: PreTrainedTokenizerBase = load_pretrained(AutoTokenizer, folder)
    attention = kind.cpu_attention if on_cpu else None
    languages = call.source_lang, call.target_lang
    model = kind.load_model(folder, tokenizer, languages, attention, call.quantization)
    check_vocabulary(tokenizer, model.config, light)
    check_generation(model.generation_config, folder)
    if call.quantization and type(model) is not LightFormerForConditionalGeneration:
        raise OptionError(
            "quantization",
            f" is given, but {light} is a {type(model).__name__}, and a training rounds those of LightFormers "
            "alone: remove ",
            "quantization",
        )
    distiller = load_distiller(teacher, tokenizer, attention, model.config, kind.auto_model)
    if not on_cpu:
        distiller.to(torch.accelerator.current_accelerator())
    # The compressed model contains its languages, or they are given.
    begin_with(distiller, first_token_of(model))
    bf16 = has_fast_bf16() if on_cpu else torch.cuda.is_bf16_supported(including_emulation=False)
    names = (light, teacher, data, validation)
    run = kind(call, output, *names, folder, tokenizer, model, distiller, on_cpu, bf16, resumes, exclude)
    if run.ratio < LEAST_RATIO:
        raise ValueError(
            f"the model to train has {1 / run.ratio:.1f} times its teacher's parameters: give the smaller one "
            "first, and the one it was made of as teacher"
        )
    run.corpus, run.held_out = run.read_data()
    sources, references = run.held_out["source"][:], run.held_out["target"][:]
    # Random tokens have no length that a summary would be shorter than.
    run.metrics = run.choose_metrics(references if data is None else sources, references)
    return run


def check_minutes(minutes: float) -> None:
    """Raise `ValueError` where a time to train is none."""
    if not (isinstance(minutes, numbers.Real) and 0 < minutes < math.inf):
        raise OptionError("minutes", f" is {minutes!r}, expected a number above 0")


def check_generation(generation: GenerationConfig, folder: Path) -> None:
    """Raise `ValueError` where the trainer could not evaluate or save a model with this configuration."""
    wrong = [
        f"{name} is {getattr(generation, name)!r}, set it to {expected!r}"
        for name, expected in ONE_OUTPUT.items()
        if getattr(generation, name, None) not in (None, expected)
    ]
    try:
        generation.validate(strict=True)
    except ValueError as error:
        wrong.append(" ".join(str(error).split()))
    if wrong:
        raise ValueError(f"{folder / 'generation_config.json'} does not allow a training: {' '.join(wrong)}")


def trains_on_cpu(device: str | None) -> bool:
    """Whether a recovery runs on the CPU. Raises `ValueError` for a device that it cannot be sent to."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device not in (None, "cpu", accelerator and accelerator.type):
        raise OptionError(
            "device",
            f" is {device!r}, expected cpu{f' or {accelerator.type}' if accelerator else ''}: a training uses "
            "all accelerators that CUDA_VISIBLE_DEVICES names",
        )
    return device == "cpu" or accelerator is None


def claim(
    output: Path, asked: dict[str, Any], *, overwrite: bool, inputs: Sequence[str | None], file: str = RECORD_FILE
) -> dict[str, Any]:
    """The record, by the name of `file`, of the interrupted work that `output` holds, or a new one.

    Raises as `recover`.
    """
    record = read_json(output / file)
    if record and not overwrite:
        before = record.get("asked", {})
        if name := next((name for name, value in asked.items() if not _is_same(value, before.get(name))), None):
            raise FileExistsError(
                f"{output} holds work with another {name}, {before.get(name)!r}: give the same options to resume "
                "it, another folder, or overwrite=True (--overwrite)"
            )
        if "result" in record:
            raise FileExistsError(
                f"{output} holds the complete result of this call: give another folder or overwrite=True (--overwrite)"
            )
        return record
    check_place(output, inputs)
    if not record and overwrite and output.is_dir() and any(output.iterdir()):
        raise FileExistsError(
            f"{output} is not empty and holds no {file}: overwrite starts work of this command again and replaces "
            "nothing else; give another folder"
        )
    if not record:
        check_content(output, overwrite=False)
    return {"asked": asked}


def _is_same(value: Any, before: Any) -> bool:
    """Whether two values are equal, or paths of one place."""
    if isinstance(value, str) and isinstance(before, str):
        return value == before or os.path.abspath(value) == os.path.abspath(before)
    return value == before


def find_added(folder: Path) -> list[str]:
    """Foreign files in the folder of a complete or interrupted recovery, in alphabetical order."""
    files = "|".join(map(re.escape, (TRANSLATIONS_FILE, VALIDATION_FILE)))
    own = rf"{files}|{CHECKPOINTS}|runs(/.*)?|\..*\.partial"  # while it trains
    return [name for name in find_foreign(folder, RECORD_FILE) if not re.fullmatch(own, name)]


def find_changed(before: Mapping[str, Any], now: Mapping[str, list[int | str]]) -> str | None:
    """The first file of the data that has changed since a work began; `before`: of earlier versions, the sizes alone.

    Raises `FileNotFoundError` where a file is gone.
    """
    if gone := [name for name in before if name not in now]:
        raise FileNotFoundError(
            f"{gone[0]} was a part of the data when this work began, and is gone: put it back to resume, or start "
            "again with overwrite=True (--overwrite)"
        )
    return next((name for name in before if before[name] not in (now[name], now[name][0])), None)


def begin(output: Path, record: dict[str, Any]) -> None:
    """Write the record of a new recovery, and remove the files of an earlier one."""
    output.mkdir(parents=True, exist_ok=True)
    remove_checkpoints(output)
    for name in (TRANSLATIONS_FILE, VALIDATION_FILE):
        (output / name).unlink(missing_ok=True)
    write_json(record, output / RECORD_FILE)


def finish(output: Path, record: dict[str, Any], found: Recovery) -> Recovery:
    """Write and return the result of a recovery, and remove its checkpoints."""
    left = [name for name in list_entries(output, RECORD_FILE) if not re.fullmatch(CHECKPOINTS, name)]
    write_json(record | {"result": asdict(found), "files": left}, output / RECORD_FILE)
    open_to_readers(output, RECORD_FILE)
    remove_checkpoints(output)
    return found
