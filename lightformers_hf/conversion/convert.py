"""A trained checkpoint in, a smaller one out."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch

from ..files import atomic_output
from ..loading import load_tensors, resolve_source
from .card import write_card
from .compress import Compression
from .options import CompressionOptions, StudyOptions, settle
from .report import CompressionReport, write_report
from .teacher import Teacher
from .workers import ended_together, find_device, is_main


def plan(
    source: str | Path, *, progress: bool = True, study: StudyOptions | None = None, **options
) -> CompressionReport:
    """What `convert` would do, without writing anything: rank, parameters and error of every matrix.

    Args:
        source: a checkpoint folder, or a name on the Hub.
        progress: show a progress bar.
        study: switches that compare ways of compressing.
        options: the fields of `CompressionOptions`.

    Raises:
        ValueError, FileNotFoundError: as `convert`.
    """
    with ended_together():
        wanted = CompressionOptions(**options)
        settle(wanted, study)
        device = find_device(wanted.device)
        compression = Compression(
            Teacher(resolve_source(source), str(source), wanted.languages), wanted, device, study
        )
        compression.run(dry=True, progress=progress and is_main())
    return compression.report


def convert(
    source: str | Path,
    output: str | Path,
    *,
    overwrite: bool = False,
    progress: bool = True,
    study: StudyOptions | None = None,
    **options,
) -> CompressionReport:
    """Compress a trained checkpoint of Marian, BART, mBART, Pegasus, M2M100 or this package by truncated SVD (Eq. 11).

    `output` gets weights, configuration, tokenizer, generation configuration, the model's code, `compression.json` and
    a model card: `AutoModelForSeq2SeqLM.from_pretrained(output)` and `AutoTokenizer.from_pretrained(output)` load it.
    It is written whole or not at all.

    Processes that `torchrun` or `accelerate launch` started must all call it: they share the work, and one of them
    writes.

    Args:
        source: a checkpoint folder, or a name on the Hub.
        output: the folder to write.
        overwrite: replace what `output` holds.
        progress: show a progress bar.
        study: switches that compare ways of compressing.
        options: the fields of `CompressionOptions`: `ratio=2`, `encoder_groups=3`, ….

    Raises:
        ValueError: the source is of no known family, holds NaN, does not fit its configuration, an option is out of
            its range, or another process failed.
        FileNotFoundError: the source, its weights or one of its shards is not there.
        FileExistsError: `output` is not empty and `overwrite` is false.
    """
    with ended_together():
        wanted = CompressionOptions(**options)
        settle(wanted, study)
        device = find_device(wanted.device)
        folder = resolve_source(source)
        place = {"overwrite": overwrite, "forbidden": folder}
        with atomic_output(Path(output), **place) if is_main() else nullcontext() as temporary:
            compression = Compression(Teacher(folder, str(source), wanted.languages), wanted, device, study)
            compression.run(dry=False, progress=progress and is_main())
            if is_main():
                _write(compression, temporary)
    return compression.report


def _write(compression: Compression, folder: Path) -> None:
    _write_model(compression, folder)
    if compression.teacher.has_tokenizer:
        # Loaded and saved rather than copied: the class's name gets written, which the model type no longer tells.
        compression.teacher.tokenizer().save_pretrained(folder)
    write_report(compression.report, folder)
    write_card(compression.report, folder)


def _write_model(compression: Compression, folder: Path) -> None:
    model = compression.model
    dtype = compression.teacher.config.dtype or torch.float32
    state = {name: tensor.to(dtype) for name, tensor in compression.state.items()}
    load_tensors(model, state, assign=True)
    model.generation_config = compression.teacher.generation_config()
    model.save_pretrained(folder)
