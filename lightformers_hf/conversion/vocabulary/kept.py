"""The tokens that stay: their rows, their new ids wherever a configuration names one, and their tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...loading import stored_tensors
from ...models.configuration_base import FactorizedConfig
from ...vocabularies import narrow_fields, single_ids


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """Tokens of a checkpoint that stay.

    Attributes:
        source, target: their old ids, in the order of the new ones; the same list where both sides have one
            vocabulary.
        tokenizer: with the new ids.
        languages: the codes that stay, where some go.
    """

    source: Sequence[int]
    target: Sequence[int]
    tokenizer: PreTrainedTokenizerBase
    languages: Sequence[str] = ()

    def config(self, config: FactorizedConfig) -> FactorizedConfig:
        """A configuration of this package for the smaller vocabulary."""
        fields = config.to_dict()
        return type(config)(**{**fields, **narrow_fields(fields, self.source, self.target)})

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
