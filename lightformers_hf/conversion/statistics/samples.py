"""Sentence pairs for calibration: which ones, and their batches."""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import DataCollatorForSeq2Seq, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...languages import add_prefix
from ...loading import position_limit
from ...text import load_text, tokenize_pairs
from ..options import CompressionOptions, StudyOptions

if TYPE_CHECKING:  # text of a model's own making needs none of it
    from datasets import Dataset

# Unless told otherwise, so many sentence pairs, and of short ones more, until they have so many tokens a side for each
# of d_model, or so many in all: wide moments take more tokens to know, and wide models more time for each
# (RESULTS.md, "Probes").
SAMPLES, TOKENS_PER_FEATURE, MOST_TOKENS = 1000, 64, 2**15
BATCH = 32  # pairs of a batch at most
# Every tenth sentence is held out of the calibration, of so many at least.
HELD_OUT, FEWEST_SENTENCES = 10, 100
# Tokens of a text, of models that take any number.
LONGEST = 512


def parallel_batches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: Dataset
) -> list[dict[str, Tensor]]:
    """Padded batches of similar lengths, of the columns `source` and `target`."""
    longest = longest_text(model.config, tokenizer)
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


def longest_text(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens after which texts are cut."""
    return min(position_limit(config) or LONGEST, tokenizer.model_max_length)


def mean_tokens(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, pairs: Dataset) -> float:
    """Tokens of a text, whether source or target, on the average of the first `SAMPLES` pairs."""
    first = pairs.select(range(min(SAMPLES, len(pairs))))
    limits = {"truncation": True, "max_length": longest_text(config, tokenizer)}
    texts = tokenizer(first["source"][:], **limits)["input_ids"]
    if "target" in first.column_names:
        texts += tokenizer(text_target=first["target"][:], **limits)["input_ids"]
    return fmean(map(len, texts))


def sample_pairs(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, options: CompressionOptions, study: StudyOptions
) -> Dataset:
    """So many random pairs of the text that `options` name, or texts of the source language alone: see `load_text`.

    Unless `options` say how many, it is `SAMPLES`, and more where these have few tokens.

    Args:
        config: the teacher's, which may have a prefix for sources.
        study: its `calibration_seed` says which.

    Raises:
        ValueError: fewer pairs than asked for, empty ones alone, or mostly repeated ones.
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
    pairs = pairs.shuffle(seed=study.calibration_seed)
    if samples is None:
        wanted = min(TOKENS_PER_FEATURE * config.hidden_size, MOST_TOKENS)
        samples = max(SAMPLES, math.ceil(wanted / max(1, mean_tokens(config, tokenizer, pairs))))
    if (with_held_out := samples + math.ceil(samples / (HELD_OUT - 1))) >= FEWEST_SENTENCES:
        samples = with_held_out
    pairs = pairs.select(range(min(samples, len(pairs))))
    for side in pairs.column_names:
        if not any(text.strip() for text in pairs[side]):
            raise ValueError(f"{data}: every {side} of the {len(pairs)} pairs drawn is empty: give text")
    if (distinct := len(set(pairs["source"]))) < len(pairs) / 10:
        raise ValueError(
            f"{data}: only {distinct} of the {len(pairs)} sources drawn are distinct, which shows few of the model's "
            "inputs. Remove repeated lines, or omit --calibration: the model then generates the text"
        )
    return pairs
