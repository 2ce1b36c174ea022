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

# Fields that list ids, single ones or words of several.
TOKEN_LISTS, WORD_LISTS = ("suppress_tokens", "begin_suppress_tokens"), ("bad_words_ids",)


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
        return type(config)(**{**fields, **self._renumbered(fields), **changed})

    def renumber(self, generation: GenerationConfig) -> GenerationConfig:
        """A generation configuration with the new ids, in place; what was forbidden and is gone is left out."""
        for name, value in self._renumbered(generation.to_dict()).items():
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

    def _renumbered(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        new = {old: number for number, old in enumerate(self.target)}
        changed: dict[str, Any] = {}
        for name, value in fields.items():
            if name in single_ids(fields):
                changed[name] = [new[token] for token in value] if isinstance(value, list) else new.get(value)
            elif name in TOKEN_LISTS and value:
                changed[name] = [new[token] for token in value if token in new] or None
            elif name in WORD_LISTS and value:
                changed[name] = [[new[token] for token in word] for word in value if {*word} <= new.keys()] or None
        return changed


def single_ids(fields: Mapping[str, Any]) -> dict[str, list[int]]:
    """{field: its ids} of the fields of a configuration that name a token, `pad_token_id` and the like."""
    named = ((name, value) for name, value in fields.items() if name.endswith("_token_id") and value is not None)
    return {name: value if isinstance(value, list) else [value] for name, value in named}


def named_ids(configs: Sequence[Mapping[str, Any]]) -> Iterator[int]:
    """All ids that configurations name by single fields."""
    for fields in configs:
        for ids in single_ids(fields).values():
            yield from ids
