"""The tokens that stay: their rows, their new ids wherever a configuration names one, and their tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...loading import stored_tensors
from ...models.configuration_base import FactorizedConfig
from ...vocabularies import renumber_ids, single_ids


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """Tokens of a checkpoint that stay.

    Attributes:
        source, target: their old ids, in the order of the new ones; the same list where both sides have one
            vocabulary.
        tokenizer: with the new ids.
    """

    source: Sequence[int]
    target: Sequence[int]
    tokenizer: PreTrainedTokenizerBase

    def config(self, config: FactorizedConfig) -> FactorizedConfig:
        """A configuration of this package for the smaller vocabulary."""
        fields = config.to_dict()
        sizes = {"vocab_size": len(self.source), "decoder_vocab_size": len(self.target)}
        changed = {name: size for name, size in sizes.items() if name in fields}
        return type(config)(**{**fields, **renumber_ids(fields, self.target), **changed})

    def renumber(self, generation: GenerationConfig) -> GenerationConfig:
        """A generation configuration with the new ids, in place; what was forbidden and is gone is left out."""
        for name, value in renumber_ids(generation.to_dict(), self.target).items():
            setattr(generation, name, value)
        return generation

    def rows(self, before: PreTrainedModel, after: PreTrainedModel) -> dict[str, tuple[int, Tensor]]:
        """{tensor: (dimension, the indices that stay there)} of all tensors that have an entry a token.

        Args:
            before, after: skeletons with all tokens and with those that stay.
        """
        found = {}
        new = stored_tensors(after)
        for name, tensor in stored_tensors(before).items():
            for dimension, (size, smaller) in enumerate(zip(tensor.shape, new[name].shape, strict=True)):
                if size == smaller:
                    continue
                found[name] = dimension, torch.tensor(self.source if ".encoder." in name else self.target)
        return found


def named_ids(configs: Sequence[Mapping[str, Any]]) -> Iterator[int]:
    """All ids that configurations name by single fields."""
    for fields in configs:
        for ids in single_ids(fields).values():
            yield from ids
