"""Sample text: the user's, or text of the teacher's own making."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..options import CompressionOptions, StudyOptions
from ..teacher import Teacher
from ..workers import own_share
from .samples import mean_tokens, parallel_batches, sample_pairs
from .synthesis import LONGEST, SHORTEST, own_sources, synthetic_batches, translated_batches

if TYPE_CHECKING:  # text of a model's own making needs none of it
    from datasets import Dataset


def draw_pairs(teacher: Teacher, options: CompressionOptions, study: StudyOptions) -> Dataset | None:
    """The user's text that is to be read, as of `sample_pairs`; `None` where there is none.

    Raises:
        ValueError: no tokenizer, unknown languages, too little text.
    """
    if options.calibration is None:
        return None
    tokenizer = teacher.tokenizer()
    _check_languages(tokenizer, teacher)
    return sample_pairs(teacher.config, tokenizer, options, study)


def count_tokens(teacher: Teacher, options: CompressionOptions, pairs: Dataset | None) -> float:
    """Tokens a side that `sample_text` will have, about."""
    if pairs is None:
        return (options.calibration_samples or own_sources(teacher.model)[0]) * (SHORTEST + LONGEST) / 2
    return len(pairs) * mean_tokens(teacher.config, teacher.tokenizer(), pairs)


def sample_text(
    model: PreTrainedModel,
    teacher: Teacher,
    options: CompressionOptions,
    study: StudyOptions,
    pairs: Dataset | None,
    *,
    progress: bool,
) -> Sequence[dict[str, torch.Tensor]]:
    """Batches for a `Calibration`, of several processes the own share.

    Args:
        model: the teacher with all its layers, where it runs: it makes the text where the user gave none, and
            translates it where they gave one language alone.
        pairs: of `draw_pairs`.
    """
    if pairs is None:
        number, seed = options.calibration_samples, study.calibration_seed
        return synthetic_batches(model, teacher, number, seed, progress=progress)
    if "target" in pairs.column_names:
        return own_share(parallel_batches(model, teacher.tokenizer(), pairs))
    return translated_batches(model, teacher, pairs["source"][:], progress=progress)


def _check_languages(tokenizer: PreTrainedTokenizerBase, teacher: Teacher) -> None:
    if getattr(tokenizer, "tgt_lang", "") is None:
        raise ValueError(
            f"{teacher.name} translates between many languages: give source_lang and target_lang, columns of the "
            "calibration text with the tokenizer's codes: de=de_DE and en=en_XX"
        )
