"""Generation of exported models: the options that every engine supports, and greedy and beam search in numpy.

The two searches give the tokens of transformers' `generate()`, without its overhead a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from transformers import GenerationConfig

from ..decoding import output_limit, suggest_limit
from ..options import OptionError

NEVER = np.float32(-1e9)
# Options of `generate()` that change greedy or beam search, that engines do not have, and the value that is none.
UNSUPPORTED: dict[str, float | None] = {"repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0}
UNSUPPORTED |= {"encoder_no_repeat_ngram_size": 0, "num_return_sequences": 1}
UNSUPPORTED |= dict.fromkeys(
    "begin_suppress_tokens sequence_bias exponential_decay_length_penalty guidance_scale stop_strings max_time "
    "watermarking_config".split()
)
# Those that exported models for text have, but Argos Translate does not.
NOT_OF_ARGOS: dict[str, float | None] = {"no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": None}
# Those that exported models for speech do not have.
UNHEARD = {name: none for name, none in UNSUPPORTED.items() if name != "begin_suppress_tokens"}
UNHEARD |= {**NOT_OF_ARGOS, "bad_words_ids": None}


def find_ignored(generation: GenerationConfig, lacking: Mapping[str, float | None]) -> str:
    """The options of `generation` among those that a program lacks, whose values for none are given, with commas."""
    asked = {name: getattr(generation, name, None) for name in lacking}
    return ", ".join(f"{name}={value!r}" for name, value in asked.items() if value not in (None, lacking[name]))


@dataclass(frozen=True)
class Search:
    """Options of a generation configuration, in new tokens; see `transformers.GenerationConfig` for the names."""

    start: int
    pad: int
    ends: tuple[int, ...]
    num_beams: int = 1
    max_new_tokens: int | None = None  # `None`: as of `limited`
    min_new_tokens: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    no_repeat_ngram_size: int = 0
    suppressed: tuple[int, ...] = ()
    first: tuple[int, ...] = ()  # tokens that are suppressed at the first step
    forced_start: int | None = None
    forced_end: int | None = None
    renormalizes: bool = False

    @classmethod
    def of(cls, generation: GenerationConfig) -> Search:
        """The search that `generation` asks for.

        Raises:
            ValueError: it has an option that no engine has, or a value of a wrong type.
        """
        try:
            search = cls._read(generation)
            numbers = (search.start, search.pad, search.num_beams, search.max_new_tokens or 1, search.min_new_tokens)
            if not all(isinstance(number, int) for number in (*numbers, *search.ends, *search.suppressed)):
                raise TypeError("a number of tokens or beams, or a token's, is no whole number")
        except (TypeError, AttributeError, LookupError) as error:
            raise ValueError(f"generation_config.json has a value of a wrong type: {error}") from error
        return search

    @classmethod
    def _read(cls, generation: GenerationConfig) -> Search:
        for option, none in UNSUPPORTED.items():
            value = getattr(generation, option, None)
            if value is not None and value != none:
                raise ValueError(
                    f"generation_config.json has {option}={value!r}, which exported models do not support: set it to "
                    f"{none!r} there, or run the model in transformers"
                )
        bad = generation.bad_words_ids or []
        if longer := [words for words in bad if len(words) > 1]:
            raise ValueError(
                f"generation_config.json has bad_words_ids of several tokens ({longer[0]}), but exported models "
                "forbid single ones only: remove it there, or run the model in transformers"
            )
        start, pad = generation.decoder_start_token_id, generation.pad_token_id
        if start is None:
            raise ValueError(
                "generation_config.json has no decoder_start_token_id: set the token that decoding starts from"
            )
        ends, forced_end = (
            () if value is None else (value,) if isinstance(value, int) else tuple(value)
            for value in (generation.eos_token_id, generation.forced_eos_token_id)
        )
        return cls(
            start=start,
            pad=ends[0] if pad is None and ends else pad or 0,
            ends=ends,
            num_beams=generation.num_beams or 1,
            max_new_tokens=output_limit(generation),
            min_new_tokens=generation.min_new_tokens or max((generation.min_length or 0) - 1, 0),
            length_penalty=1.0 if generation.length_penalty is None else generation.length_penalty,
            early_stopping=generation.early_stopping or False,
            no_repeat_ngram_size=generation.no_repeat_ngram_size or 0,
            suppressed=tuple(sorted({words[0] for words in bad} | set(generation.suppress_tokens or ()))),
            forced_start=generation.forced_bos_token_id,
            forced_end=forced_end[0] if forced_end else None,
            renormalizes=bool(generation.renormalize_logits),
        )

    def with_options(self, num_beams: int | None, max_new_tokens: int | None, forced_length: int | None) -> Search:
        """The same with other numbers; `forced_length` is so many tokens for every sentence, past any end token."""
        given = {"num_beams": num_beams, "max_new_tokens": max_new_tokens}
        changes: dict = {name: value for name, value in given.items() if value is not None}
        if forced_length is not None:
            changes |= {"max_new_tokens": forced_length, "min_new_tokens": 0, "ends": (), "forced_end": None}
        for name in ("num_beams", "max_new_tokens"):
            if changes.get(name, 1) < 1:
                raise OptionError(name, f" is {changes[name]}: expected 1 or more")
        return replace(self, **changes)

    @property
    def limit(self) -> int:
        """`max_new_tokens` after `limited`, which sets it."""
        return cast(int, self.max_new_tokens)

    def limited(self, batch: Sequence[Sequence[int]], positions: int | None) -> Search:
        """The same with the limit that the longest source suggests, where the model names none."""
        if self.max_new_tokens is not None:
            return self
        return replace(self, max_new_tokens=suggest_limit(max(map(len, batch)), positions))

    def restrict(self, scores: np.ndarray, step: int, tokens: np.ndarray) -> np.ndarray:
        """`scores` (N, V), with forbidden tokens at -inf. `tokens` (N, 1 + step): those so far, start included."""
        forced = self.forced_start if step == 0 else None
        forced = self.forced_end if step == self.limit - 1 and self.forced_end is not None else forced
        if forced is not None:
            scores = np.full_like(scores, -np.inf)
            scores[:, forced] = 0
            return scores
        barred = self.suppressed + (self.first if step == 0 else ())
        for token in barred + (self.ends if step < self.min_new_tokens else ()):
            scores[:, token] = -np.inf
        size = self.no_repeat_ngram_size
        if size and tokens.shape[1] + 1 >= size:
            for row, sentence in enumerate(tokens):
                last = sentence[len(sentence) - size + 1 :]
                for first in range(len(sentence) - size + 1):
                    if np.array_equal(sentence[first : first + size - 1], last):
                        scores[row, sentence[first + size - 1]] = -np.inf
        return scores


# Tokens (N) of this step, and for each of them the row that it continues, or None for its own row → logits.
Step = Callable[[np.ndarray, np.ndarray | None], np.ndarray]


def generate(step: Step, sentences: int, search: Search) -> list[list[int]]:
    """New tokens of each sentence, the end token included, by greedy or beam search."""
    return greedy(step, sentences, search) if search.num_beams == 1 else beams(step, sentences, search)


def greedy(step: Step, sentences: int, search: Search) -> list[list[int]]:
    """The most probable token at every step."""
    tokens = np.full((sentences, search.limit + 1), search.pad, dtype=np.int64)
    tokens[:, 0] = search.start
    lengths = np.full(sentences, search.limit)
    running = np.ones(sentences, dtype=bool)
    for length in range(search.limit):
        logits = search.restrict(step(tokens[:, length], None), length, tokens[:, : length + 1])
        chosen = logits.argmax(axis=1)
        tokens[running, length + 1] = chosen[running]
        if search.ends:
            ended = running & np.isin(chosen, search.ends)
            lengths[ended] = length + 1
            running &= ~ended
            if not running.any():
                break
    return [row[1 : count + 1].tolist() for row, count in zip(tokens, lengths, strict=True)]


def beams(step: Step, sentences: int, search: Search) -> list[list[int]]:
    """Beam search as transformers' `generate()` does it: K beams, finished ones by score / length^penalty."""
    B, K, most = sentences, search.num_beams, search.limit
    stops_early = search.early_stopping is True
    kept = max(2, 1 + len(search.ends)) * K
    rows = np.arange(B)[:, None]
    tokens = np.full((B, K, most + 1), search.pad, dtype=np.int64)
    tokens[:, :, 0] = search.start
    scores = np.full((B, K), NEVER, dtype=np.float32)
    scores[:, 0] = 0  # all beams are equal at first: only one is continued
    done, done_scores = tokens.copy(), np.full((B, K), NEVER, dtype=np.float32)
    done_lengths, is_done = np.zeros((B, K), dtype=np.int64), np.zeros((B, K), dtype=bool)
    is_open = np.ones(B, dtype=bool)
    order = None
    for length in range(1, most + 1):
        logits = step(tokens[:, :, length - 1].reshape(-1), order)
        log_p = search.restrict(log_softmax(logits), length - 1, tokens[:, :, :length].reshape(B * K, -1))
        if search.renormalizes:  # over the allowed tokens
            log_p = log_softmax(log_p)
        V = log_p.shape[1]
        log_p += scores.reshape(-1, 1)
        totals, flat = largest(log_p.reshape(B, K * V), kept)
        beam, token = np.divmod(flat, V)
        candidates = tokens[rows, beam]
        candidates[:, :, length] = token
        ended = np.isin(token, search.ends) | (length == most)

        chosen = np.argsort(ended, axis=1, kind="stable")[:, :K]  # the best that are continued
        scores = totals[rows, chosen] + NEVER * ended[rows, chosen]
        tokens = candidates[rows, chosen]
        order = (beam[rows, chosen] + rows * K).reshape(-1)

        finished = ended.copy()
        finished[:, K:] = False
        if finished.any():
            barred = ~finished | ~is_open[:, None] | (is_done.all(axis=1, keepdims=True) & stops_early)
            new_scores = totals / np.float32(length**search.length_penalty) + NEVER * barred
            done_scores, chosen = largest(np.concatenate([done_scores, new_scores], axis=1), K)
            done = np.concatenate([done, candidates], axis=1)[rows, chosen]
            lengths = np.concatenate([done_lengths, np.full_like(token, length)], axis=1)
            done_lengths = lengths[rows, chosen]
            is_done = np.concatenate([is_done, finished], axis=1)[rows, chosen]
        if is_done.any():
            hypothetical = most if search.early_stopping == "never" and search.length_penalty > 0 else length
            best = scores[:, :1] / np.float32(hypothetical**search.length_penalty)
            is_open &= (best > np.where(is_done, done_scores.min(axis=1, keepdims=True), NEVER)).any(axis=1)
            if not is_open.any() or (stops_early and is_done.all()):
                break
        if ended.all():
            break
    return [row[0, 1 : count[0] + 1].tolist() for row, count in zip(done, done_lengths, strict=True)]


def largest(values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` largest values of each row in falling order, and their columns."""
    found, columns = torch.from_numpy(values).topk(count)
    return found.numpy(), columns.numpy()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """log softmax over the last axis."""
    return torch.log_softmax(torch.from_numpy(logits), dim=-1).numpy()
