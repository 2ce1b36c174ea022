"""The tokens that stay: their rows, their new ids wherever a configuration names one, and their tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...models.configuration_lightformer import FactorizedConfig
from ...vocabularies import narrow_fields, single_ids, token_axes


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

    def rows(self, model: PreTrainedModel) -> dict[str, tuple[int, Tensor]]:
        """{tensor: (dimension, the indices that stay there)} of a model's tensors that have an entry a token."""
        return {
            name: (dimension, torch.tensor(self.source if ".encoder." in name else self.target))
            for name, dimension in token_axes(model).items()
        }


def named_ids(configs: Sequence[Mapping[str, Any]]) -> Iterator[int]:
    """All ids that configurations name by single fields."""
    for fields in configs:
        for ids in single_ids(fields).values():
            yield from ids
