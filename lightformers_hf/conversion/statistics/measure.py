"""What the teacher does on sample text: the user's, or text of its own making."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from ...text import fingerprint
from ..options import CompressionOptions, StudyOptions
from ..sharing.groups import find_matrices
from ..teacher import Teacher
from ..workers import own_share
from .calibration import Calibration
from .samples import parallel_batches, sample_pairs
from .synthesis import synthetic_batches, translated_batches


def measure(
    whole: Teacher,
    teacher: Teacher,
    options: CompressionOptions,
    study: StudyOptions,
    *,
    device: torch.device,
    progress: bool,
) -> tuple[Calibration, list[str]]:
    """The moments of every linear layer of `teacher`, and fingerprints of the user's sentences they were measured on.

    Args:
        whole: the teacher with all its layers, which makes the text where the user gave none, and translates it where
            they gave one language alone.
        teacher: the teacher with those that stay.
        device: where the model runs.

    Raises:
        ValueError: no tokenizer, unknown languages, too little text, states or gradients that are not finite.
    """
    model = teacher.load().to(device)
    sentences: list[str] = []
    batches: Sequence[dict[str, torch.Tensor]]
    if options.calibration is None:
        author = model if whole is teacher else whole.load().to(device)
        batches = synthetic_batches(
            author, whole, options.calibration_samples, study.calibration_seed, progress=progress
        )
    else:
        tokenizer = teacher.tokenizer()
        _check_languages(tokenizer, teacher)
        pairs = sample_pairs(teacher.config, tokenizer, options, study)
        sentences = sorted({fingerprint(sentence) for sentence in pairs["source"]})
        if "target" in pairs.column_names:
            batches = own_share(parallel_batches(model, tokenizer, pairs))
        else:
            author = model if whole is teacher else whole.load().to(device)
            batches = translated_batches(author, whole, pairs["source"][:], progress=progress)
    linear = [name for name, kind in find_matrices(model) if kind != "embedding"]
    return Calibration(model, linear, batches, progress=progress), sentences


def _check_languages(tokenizer: PreTrainedTokenizerBase, teacher: Teacher) -> None:
    if getattr(tokenizer, "tgt_lang", "") is None:
        raise ValueError(
            f"{teacher.name} translates between many languages: give source_lang and target_lang, columns of the "
            "calibration text with the tokenizer's codes: de=de_DE and en=en_XX"
        )
