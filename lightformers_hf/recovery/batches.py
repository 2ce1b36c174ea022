"""Batches of pairs of similar length that hold a budget of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Sampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class TokenBatchSampler(Sampler[list[int]]):
    """Batches of sentence pairs of similar length that hold at most `max_tokens` tokens, padding counted.

    A batch of n pairs costs n · (longest source + longest target), in tokens.

    Pairs are put in order of length and cut into batches. Every epoch shuffles which of the pairs with equal
    lengths goes where, and the order of the batches. The batches' *shapes* stay: so `len()` is exact for every epoch,
    and a trainer that computes its steps from it is right. `seed` and epoch determine everything.

    accelerate deals the batches out to processes in turn and repeats some when there are not as many for each. The
    number of batches is therefore made a multiple of `num_processes` by halving the largest ones, as far as there are
    pairs: every pair comes exactly once.

    Args:
        source_lengths, target_lengths: length of each pair's texts, in tokens.
        max_tokens: the budget of one batch; with several processes, of one process.
        num_processes: how many processes share the batches.
        seed: seed of the shuffling.

    Raises:
        ValueError: no pairs, lengths that do not match, or a pair that alone exceeds `max_tokens`.
    """

    def __init__(
        self,
        source_lengths: Sequence[int],
        target_lengths: Sequence[int],
        max_tokens: int,
        *,
        num_processes: int = 1,
        seed: int = 0,
    ) -> None:
        self.source, self.target = np.asarray(source_lengths), np.asarray(target_lengths)
        if self.source.shape != self.target.shape or self.source.size == 0:
            raise ValueError(
                f"{self.source.size} source and {self.target.size} target lengths: "
                "expected as many of one as of the other, and at least one."
            )
        total = self.source + self.target
        if total.max() > max_tokens:
            raise ValueError(
                f"max_tokens is {max_tokens}, but pair {total.argmax() + 1} alone has {total.max()} source and target "
                "tokens: raise max_tokens, or lower max_source_length and max_target_length."
            )
        self.seed, self.epoch = seed, 0
        order = self._sort_by_length(np.arange(total.size))
        self.bounds = _cut_batches(self.source[order], self.target[order], max_tokens)
        while len(self) % num_processes and (sizes := np.diff(np.asarray(self.bounds))).max() > 1:
            self.bounds = sorted([*self.bounds, self.bounds[sizes.argmax()] + int(sizes.max()) // 2])

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose batches the next iteration gives."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __iter__(self) -> Iterator[list[int]]:
        """Indices of the pairs of each batch, in the epoch's order."""
        random = np.random.default_rng([self.seed, self.epoch])
        order = self._sort_by_length(random.permutation(self.source.size))
        for batch in random.permutation(len(self)):
            yield order[self.bounds[batch] : self.bounds[batch + 1]].tolist()

    def _sort_by_length(self, indices: np.ndarray) -> np.ndarray:
        """`indices` ordered by the longer text of each pair; pairs of equal lengths keep their order.

        Within a length the difference of the two lengths runs up and down in turn: neighbours are alike at the turns.
        """
        source, target = self.source[indices], self.target[indices]
        longer, difference = np.maximum(source, target), source - target
        # lexsort is stable, and its last key is the first to decide.
        return indices[np.lexsort((np.where(longer % 2, difference, -difference), longer))]


class EpochCallback(TrainerCallback):
    """Passes a `TokenBatchSampler` the epoch: Trainer's own call is lost when accelerate's wrappers stand between."""

    def __init__(self, sampler: TokenBatchSampler) -> None:
        self.sampler = sampler

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Runs before the epoch's first batch is drawn; `state.epoch` has a fraction after a resume in mid-epoch."""
        self.sampler.set_epoch(int(state.epoch))


def _cut_batches(source: np.ndarray, target: np.ndarray, max_tokens: int) -> list[int]:
    """Bounds of consecutive batches, each as long as rows · (longest source + longest target) <= max_tokens allows."""
    bounds, longest_source, longest_target = [0], 0, 0
    for row, (s, t) in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
        longest_source, longest_target = max(longest_source, s), max(longest_target, t)
        if (row + 1 - bounds[-1]) * (longest_source + longest_target) > max_tokens:
            bounds.append(row)
            longest_source, longest_target = s, t
    return [*bounds, len(source)]
