"""Checkpoints as they are, run by transformers behind the interface of the exported ones."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...processors import use_threads
from ..search import Search


class TransformersModel:
    """A model of transformers behind the methods of `RunningModel`."""

    def __init__(self, model: PreTrainedModel, search: Search, threads: int):
        self.network, self.search, self.threads = model, search, threads

    @torch.inference_mode()
    def generate(self, batch: list[list[int]], search: Search) -> list[list[int]]:
        """As `Engine.generate`."""
        options = {"num_beams": search.num_beams, "max_new_tokens": search.max_new_tokens, "max_length": None}
        if not search.ends:
            options |= {"eos_token_id": None, "forced_eos_token_id": None}
        with use_threads(self.threads):
            rows = self.network.generate(**self._pad(batch), **options)[:, 1:].tolist()
        return [_cut_at_end(row, search.ends) for row in rows]

    @torch.inference_mode()
    def score(self, sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
        """As `Engine.score`."""
        end = self.search.ends[0] if self.search.ends else self.search.pad
        labels = [[*target, end] for target in targets]
        inputs = self._pad([[self.search.start, *target] for target in targets])["input_ids"]
        with use_threads(self.threads):
            logits = self.network(**self._pad(sources), decoder_input_ids=inputs).logits
        logits[..., list(self.search.suppressed)] = -torch.inf
        log_p = torch.log_softmax(logits, dim=-1)
        return [log_p[row, range(len(ids)), ids].tolist() for row, ids in enumerate(labels)]

    def _pad(self, batch: list[list[int]]) -> dict[str, Tensor]:
        width = max(map(len, batch))
        ids = [sentence + [self.search.pad] * (width - len(sentence)) for sentence in batch]
        mask = [[1] * len(sentence) + [0] * (width - len(sentence)) for sentence in batch]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def _cut_at_end(row: list[int], ends: tuple[int, ...]) -> list[int]:
    """The tokens up to the first that ends them, included."""
    first = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
    return row[: first + 1]
