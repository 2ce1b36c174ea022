"""Which target tokens go with a source token: IBM model 1 (Brown et al. 1993), from pairs of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ROUNDS = 5  # rounds of expectation maximization
MOST = 20_000_000  # pairs of a source and a target token that are looked at: some hundred thousand sentences
LONGEST = 128  # tokens of a sentence


@dataclass(frozen=True)
class Lexicon:
    """Pairs of tokens, by source and then by falling probability.

    Attributes:
        source, target: ids of each pair.
        probability: t(target | source), which adds up to 1 over the targets of a source token.
        frequent: target ids by falling frequency.
    """

    source: np.ndarray
    target: np.ndarray
    probability: np.ndarray
    frequent: np.ndarray

    def targets(self, most: int) -> dict[int, list[int]]:
        """{source token: its most probable targets, so many at most}."""
        starts = np.flatnonzero(np.r_[True, self.source[1:] != self.source[:-1]])
        ends = np.minimum(np.r_[starts[1:], len(self.source)], starts + most)
        return {int(self.source[a]): self.target[a:b].tolist() for a, b in zip(starts, ends, strict=True)}


def learn_lexicon(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> Lexicon:
    """The lexicon of sentence pairs, of so many as `MOST` allows from the first on.

    Model 1 explains every target token by one of the source's, or by none of them (an empty word, which is removed
    from the result). Expectation maximization finds its probabilities.
    """
    size = 1 + max((max(ids, default=0) for ids in (*sources, *targets)), default=0)
    nothing = size  # the empty word
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    pairs = place = 0
    for source, target in zip(sources, targets, strict=True):
        f, e = np.array([*source[:LONGEST], nothing]), np.array(target[:LONGEST], dtype=np.int64)
        parts.append((np.tile(f, len(e)), np.repeat(e, len(f)), np.repeat(np.arange(place, place + len(e)), len(f))))
        place, pairs = place + len(e), pairs + len(f) * len(e)
        if pairs > MOST:
            break
    f, e, places = (np.concatenate([part[index] for part in parts]) for index in range(3))
    keys, which = np.unique(f * size + e, return_inverse=True)
    source, target = np.divmod(keys, size)
    probability = np.ones(len(keys))
    for _ in range(ROUNDS):
        weight = probability[which]
        weight /= np.bincount(places, weight)[places]
        expected = np.bincount(which, weight, len(keys))
        probability = expected / np.bincount(source, expected)[source]
    counts = np.bincount(e[f == nothing], minlength=1)
    order = np.lexsort((-probability, source))
    order = order[source[order] != nothing]
    frequent = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    return Lexicon(source[order], target[order], probability[order], frequent)
