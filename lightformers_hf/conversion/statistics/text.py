"""Sample text: the user's, or text of the teacher's own making."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...text import fingerprint
from ..options import CompressionOptions, StudyOptions
from ..teacher import Teacher
from ..workers import own_share
from .samples import parallel_batches, sample_pairs
from .synthesis import synthetic_batches, translated_batches


def sample_text(
    model: PreTrainedModel, teacher: Teacher, options: CompressionOptions, study: StudyOptions, *, progress: bool
) -> tuple[Sequence[dict[str, torch.Tensor]], list[str]]:
    """Batches for a `Calibration`, of several processes the own share, and fingerprints of the user's sentences.

    Args:
        model: the teacher with all its layers, where it runs: it makes the text where the user gave none, and
            translates it where they gave one language alone.

    Raises:
        ValueError: no tokenizer, unknown languages, too little text.
    """
    if options.calibration is None:
        number, seed = options.calibration_samples, study.calibration_seed
        return synthetic_batches(model, teacher, number, seed, progress=progress), []
    tokenizer = teacher.tokenizer()
    _check_languages(tokenizer, teacher)
    pairs = sample_pairs(teacher.config, tokenizer, options, study)
    sentences = sorted({fingerprint(sentence) for sentence in pairs["source"]})
    if "target" in pairs.column_names:
        return own_share(parallel_batches(model, tokenizer, pairs)), sentences
    return translated_batches(model, teacher, pairs["source"][:], progress=progress), sentences


def _check_languages(tokenizer: PreTrainedTokenizerBase, teacher: Teacher) -> None:
    if getattr(tokenizer, "tgt_lang", "") is None:
        raise ValueError(
            f"{teacher.name} translates between many languages: give source_lang and target_lang, columns of the "
            "calibration text with the tokenizer's codes: de=de_DE and en=en_XX"
        )
