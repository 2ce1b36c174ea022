"""Sentence pairs for calibration: which ones, and their batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from transformers import DataCollatorForSeq2Seq, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...languages import add_prefix
from ...loading import position_limit
from ...text import load_text, tokenize_pairs
from ..options import CompressionOptions, StudyOptions

if TYPE_CHECKING:  # text of a model's own making needs none of it
    from datasets import Dataset

# Sentence pairs, unless told otherwise; those of a batch at most.
SAMPLES, BATCH = 1000, 32
# Tokens of a text, of models that take any number.
LONGEST = 512


def parallel_batches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: Dataset
) -> list[dict[str, Tensor]]:
    """Padded batches of similar lengths, of the columns `source` and `target`."""
    longest = min(position_limit(model.config) or LONGEST, tokenizer.model_max_length)
    tokens = tokenize_pairs(pairs, tokenizer, max_source_length=longest, max_target_length=longest)
    lengths = [sum(pair) for pair in zip(tokens["source_length"], tokens["target_length"], strict=True)]
    order = sorted(range(len(tokens)), key=lengths.__getitem__)
    tokens = tokens.remove_columns(["source_length", "target_length"])
    collate = DataCollatorForSeq2Seq(tokenizer, model=model)
    batches = (
        collate([tokens[index] for index in order[start : start + BATCH]]) for start in range(0, len(order), BATCH)
    )
    names = ("input_ids", "attention_mask", "labels", "decoder_input_ids")
    return [{name: batch[name] for name in names} for batch in batches]


def sample_pairs(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, options: CompressionOptions, study: StudyOptions
) -> Dataset:
    """So many random pairs of the text that `options` name, or texts of the source language alone: see `load_text`.

    Args:
        config: the teacher's, which may have a prefix for sources.
        study: its `calibration_seed` says which.

    Raises:
        ValueError: fewer pairs than asked for, or empty ones alone.
    """
    data, samples = options.calibration, options.calibration_samples
    source, target = options.columns
    default = (
        getattr(tokenizer, "source_lang", None) or "source",
        getattr(tokenizer, "target_lang", None) or "target",
    )
    default = (add_prefix(config, options.source_lang or default[0], target or default[1]), default[1])
    pairs = load_text(data, source=default[0] if source else None, target=target, default=default)
    if samples is not None and len(pairs) < samples:
        raise ValueError(
            f"{data} holds {len(pairs)} pairs, calibration_samples is {samples}: give more text, or ask for fewer"
        )
    pairs = pairs.shuffle(seed=study.calibration_seed).select(range(min(samples or SAMPLES, len(pairs))))
    for side in pairs.column_names:
        if not any(text.strip() for text in pairs[side]):
            raise ValueError(f"{data}: every {side} of the {len(pairs)} pairs drawn is empty: give text")
    return pairs
