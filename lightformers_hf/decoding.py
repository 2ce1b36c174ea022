"""Decoding by every command: greedy or beam search, whatever a checkpoint asks for; begin and length of outputs."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

# Fields of a generation configuration that ask for more than greedy or beam search: the value without effect, and
# the strategy. Transformers 5 has moved all but the first two to code on the Hub.
STRATEGIES: dict[str, tuple[Any, str]] = {
    "do_sample": (False, "sampling"),
    "prompt_lookup_num_tokens": (None, "assisted generation"),
    "assistant_early_exit": (None, "assisted generation"),
    "num_beam_groups": (1, "group beam search"),
    "diversity_penalty": (0.0, "group beam search"),
    "penalty_alpha": (None, "contrastive search"),
    "dola_layers": (None, "DoLa"),
    "force_words_ids": (None, "forced words"),
    "constraints": (None, "forced words"),
}
SAMPLING = "temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff".split()  # without effect else
_SAMPLING = threading.Lock()


def find_strategies(generation: GenerationConfig) -> dict[str, Any]:
    """Fields of a configuration that ask for another strategy than greedy or beam search, with their values."""
    values = {name: getattr(generation, name, None) for name in STRATEGIES}
    return {name: value for name, value in values.items() if value not in (None, STRATEGIES[name][0])}


def search_options(generation: GenerationConfig) -> dict[str, Any]:
    """Options of `generate()` by which it searches with beams, or greedily, instead of the strategies found.

    Example:
        >>> search_options(GenerationConfig(do_sample=True))
        {'do_sample': False}
    """
    return {name: STRATEGIES[name][0] for name in find_strategies(generation)}


def describe_strategies(generation: GenerationConfig) -> str:
    """`sampling (do_sample=True)`, or an empty text where greedy or beam search is all that is asked for."""
    found = find_strategies(generation).items()
    return ", ".join(f"{STRATEGIES[name][1]} ({name}={value!r})" for name, value in found)


def check_strategies(options: dict[str, Any], seed: int | None) -> None:
    """Raise `ValueError` where a call asks for a strategy that is not there, or for chance without a seed."""
    for name, (neutral, strategy) in STRATEGIES.items():
        if name == "do_sample" or options.get(name) in (None, neutral):
            continue
        raise ValueError(f"{name} is {options[name]!r}, but there is no {strategy} here: remove {name}")
    if options.get("do_sample") and seed is None:
        raise ValueError("do_sample is True, which needs a seed: give sample_seed=0 instead (--sample-seed 0)")


@contextmanager
def seeded(seed: int, ids: Sequence[int], device: torch.device) -> Iterator[None]:
    """Chance that depends on a seed and on the token ids of one sentence; one thread at a time."""
    digest = hashlib.sha256(repr((seed, list(ids))).encode()).digest()
    with _SAMPLING, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(digest[:7], "big"))
        yield


def repeated_start(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the token that a decoder starts from, if a tokenizer also begins every target with it, else `None`.

    Targets are to lose it: with it, the decoder would read it twice, and all that follows one position later than in
    an output. Models that were trained on such targets predict it after the start, and keep it.
    """
    start, first = model.config.decoder_start_token_id, tokenizer(text_target="")["input_ids"]
    if len(first) < 2 or first[0] != start or model.generation_config.forced_bos_token_id == start:
        return None
    source = torch.tensor([tokenizer("")["input_ids"]], device=model.device)
    with torch.inference_mode():
        logits = model(input_ids=source, decoder_input_ids=source.new_tensor([[start]])).logits
    return start if int(logits[0, -1].argmax()) != start else None


def output_limit(generation: GenerationConfig) -> int | None:
    """Most new tokens of an output by a configuration; `None` where it names no length."""
    return generation.max_new_tokens or (generation.max_length - 1 if generation.max_length else None)


def suggest_limit(tokens: int, positions: int | None) -> int:
    """Most new tokens for a source of so many tokens, of a model whose configuration names no length.

    It is the power of two from twice the source and ten more, so that few different limits occur, and at most the
    number of positions.

    Example:
        >>> suggest_limit(30, None)
        128
    """
    limit = 1 << (2 * tokens + 9).bit_length()
    return min(limit, positions) if positions else limit


def ended_by_limit(row: Sequence[int], limit: int, ends: Sequence[int], *, forced: bool) -> bool:
    """Whether the new tokens of an output, the end token included, fill the limit without an end of their own.

    A `forced` end token at the limit is none.
    """
    length = next((count for count, token in enumerate(row, 1) if token in ends), len(row))
    return length >= limit and (forced or row[limit - 1] not in ends)
