"""Batches of a corpus that is read, tokenized and cut while a model trains."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from ..corpus import Corpus, Pairs
from ..languages import target_ids
from ..text import CHECKED, check_known
from .batches import TokenBatchSampler

logger = logging.getLogger(__name__)
AT_ONCE = 1000  # texts that are tokenized together
Position = tuple[int, int, int]  # epoch, pool, and batch in it


class TokenizedPool:
    """Tokens of the pairs of a pool, in as little memory as they need.

    Args:
        longest: tokens after which sources and targets are cut.
        max_tokens: tokens of a pair at most; pairs of more are left out, with a logged warning.
        start: as for `tokenize_pairs`.

    Attributes:
        input_ids, labels: for each pair, the ids of a text as 32-bit integers.
        lengths: numbers of tokens, as `source` and `target`.
    """

    def __init__(
        self,
        pairs: Pairs,
        tokenizer: PreTrainedTokenizerBase,
        *,
        longest: tuple[int, int],
        max_tokens: int,
        start: int | None = None,
    ):
        sources, targets = pairs["source"], pairs["target"]
        self.input_ids: list[np.ndarray] = []
        self.labels: list[np.ndarray] = []
        for first in range(0, len(sources), AT_ONCE):
            batch = slice(first, first + AT_ONCE)
            self.input_ids += _compact(tokenizer(sources[batch], max_length=longest[0], truncation=True)["input_ids"])
            self.labels += _compact(target_ids(targets[batch], tokenizer, longest[1], start))
        kept = [index for index, ids in enumerate(self.input_ids) if len(ids) + len(self.labels[index]) <= max_tokens]
        if len(kept) < len(self.labels):
            logger.warning(f"{len(sources) - len(kept)} pairs have more than {max_tokens} tokens and are left out")
            self.input_ids, self.labels = ([texts[index] for index in kept] for texts in (self.input_ids, self.labels))
        self.lengths = {"source": [len(ids) for ids in self.input_ids], "target": [len(ids) for ids in self.labels]}
        for texts in (self.input_ids, self.labels):
            check_known((ids.tolist() for ids in texts[:CHECKED]), tokenizer)

    def __len__(self) -> int:
        return len(self.labels)

    def features(self, rows: list[int]) -> list[dict[str, list[int]]]:
        """The pairs of a batch, as a collator takes them."""
        return [{"input_ids": self.input_ids[row].tolist(), "labels": self.labels[row].tolist()} for row in rows]


def _compact(texts: list[list[int]]) -> list[np.ndarray]:
    """Rows of one array."""
    ids = np.fromiter((token for text in texts for token in text), np.int32)
    return np.split(ids, np.cumsum([len(text) for text in texts])[:-1]) if texts else []


class TokenBatches(IterableDataset):
    """The batches of a corpus, epoch after epoch without an end, each with the position of the next.

    The pairs of a pool are cut into batches by `TokenBatchSampler`. Of the batches that several processes take in one
    step, each process gets its own, by its `rank`; all of them read all pools. So the batches of a step do not depend
    on the number of processes, but for accumulation.

    Args:
        corpus: pairs, less those that are held out.
        tokenize: makes the tokens of a pool.
        max_tokens: budget of a batch, as for `TokenBatchSampler`.
        seed: seed of the order.

    Attributes:
        position: where the next iteration begins.

    Raises:
        ValueError: an epoch has no pair.
    """

    def __init__(self, corpus: Corpus, tokenize: Callable[[Pairs], TokenizedPool], max_tokens: int, seed: int = 0):
        self.corpus, self.tokenize, self.max_tokens, self.seed = corpus, tokenize, max_tokens, seed
        self.position: Position = (0, 0, 0)
        self.num_processes, self.rank = 1, 0

    def __iter__(self) -> Iterator[tuple[Position, list[dict[str, list[int]]]]]:
        epoch, pool, batch = self.position
        while True:
            is_empty = pool == 0
            for number, pairs in self.corpus.pools(self.seed, epoch, pool):
                is_empty = False
                for index, features in self._cut(epoch, number, self.tokenize(pairs), batch):
                    yield (epoch, number, index), features
                batch = 0
            if is_empty:
                raise ValueError(f"{self.corpus.name} holds only the text of the validation: give other text")
            epoch, pool, batch = epoch + 1, 0, 0

    def _cut(
        self, epoch: int, number: int, tokens: TokenizedPool, first: int
    ) -> Iterator[tuple[int, list[dict[str, list[int]]]]]:
        """(index of the step's end, batch of this process) of a pool, from the batch `first` on."""
        together = self.num_processes
        sampler = self.sampler(tokens)
        sampler.set_epoch(epoch * 1_000_003 + number)
        last = len(sampler) - len(sampler) % together  # a pool of fewer pairs than processes has none
        for index, rows in enumerate(sampler):
            if first <= index < last and index % together == self.rank:
                yield index - self.rank + together, tokens.features(rows)

    def sampler(self, tokens: TokenizedPool) -> TokenBatchSampler:
        """The batches of a pool."""
        lengths = tokens.lengths["source"], tokens.lengths["target"]
        return TokenBatchSampler(*lengths, self.max_tokens, num_processes=self.num_processes, seed=self.seed)

    def count_steps(self) -> int:
        """Steps of an epoch, about: those of its first pool, as many times as it has pairs."""
        _, pairs = next(self.corpus.pools(self.seed, 0))
        tokens = self.tokenize(pairs)
        steps = len(self.sampler(tokens)) / self.num_processes
        return max(1, round(steps * max(1.0, self.corpus.rows / len(tokens))))


class StreamLoader:
    """The collated batches of `TokenBatches`, for a Trainer; `batches.position` follows what was taken."""

    def __init__(self, batches: TokenBatches, collate: Callable, **options: Any):
        self.batches = batches
        self.loader = DataLoader(
            batches, batch_size=None, collate_fn=lambda item: (item[0], collate(item[1])), **options
        )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for position, batch in self.loader:
            self.batches.position = position
            yield batch


class StreamPosition(TrainerCallback, ExportableState):
    """Saves with each checkpoint where the stream is, and resumes there."""

    def __init__(self, batches: TokenBatches):
        self.batches = batches

    def state(self) -> dict[str, Any]:
        return {"position": list(self.batches.position)}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Take the position of a checkpoint."""
        kept = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step and kept:
            epoch, pool, batch = kept["position"]
            self.batches.position = (epoch, pool, batch)
