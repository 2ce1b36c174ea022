"""A trained checkpoint in, a smaller one out."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer

from .checkpoint import atomic_output, resolve_source
from .compress import Compression
from .options import CompressionOptions
from .report import CompressionReport, write_report
from .teacher import Teacher


def plan(source: str | Path, *, progress: bool = True, **options) -> CompressionReport:
    """What `convert` would do, without writing anything: rank, parameters and error of every matrix.

    Args:
        source: a checkpoint folder, or a name on the Hub.
        progress: show a progress bar.
        options: the fields of `CompressionOptions`.

    Raises:
        ValueError, FileNotFoundError: as `convert`.
    """
    compression = Compression(Teacher(resolve_source(source), str(source)), CompressionOptions(**options))
    compression.run(dry=True, progress=progress)
    return compression.report


def convert(
    source: str | Path, output: str | Path, *, overwrite: bool = False, progress: bool = True, **options
) -> CompressionReport:
    """Compress a trained checkpoint of Marian, BART, mBART, Pegasus, M2M100 or this package by truncated SVD (Eq. 11).

    `output` gets weights, configuration, tokenizer, generation configuration, the model's code, `compression.json` and
    a model card: `AutoModelForSeq2SeqLM.from_pretrained(output)` and `AutoTokenizer.from_pretrained(output)` load it.
    It is written whole or not at all.

    Args:
        source: a checkpoint folder, or a name on the Hub.
        output: the folder to write.
        overwrite: replace what `output` holds.
        progress: show a progress bar.
        options: the fields of `CompressionOptions`: `ratio=2`, `encoder_groups=3`, ….

    Raises:
        ValueError: the source is of no known family, holds NaN, does not fit its configuration, or an option is out of
            its range.
        FileNotFoundError: the source, its weights or one of its shards is not there.
        FileExistsError: `output` is not empty and `overwrite` is false.
    """
    wanted = CompressionOptions(**options)
    folder = resolve_source(source)
    with atomic_output(Path(output), overwrite=overwrite, forbidden=folder) as temporary:
        compression = Compression(Teacher(folder, str(source)), wanted)
        compression.run(dry=False, progress=progress)
        _write_model(compression, temporary)
        if compression.teacher.has_tokenizer:
            # Loaded and saved rather than copied: the class's name gets written, which the model type no longer tells.
            AutoTokenizer.from_pretrained(folder).save_pretrained(temporary)
        write_report(compression.report, temporary)
    return compression.report


def _write_model(compression: Compression, folder: Path) -> None:
    model = compression.model
    dtype = compression.teacher.config.dtype or torch.float32
    state = {name: tensor.to(dtype) for name, tensor in compression.state.items()}
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    ties = model.get_expanded_tied_weights_keys(all_submodels=True)
    if unexpected or set(missing) - set(ties):
        raise RuntimeError(f"the result's tensors do not fit it: {unexpected or sorted(set(missing) - set(ties))}")
    model.tie_weights()
    model.generation_config = compression.teacher.generation_config()
    model.save_pretrained(folder)
