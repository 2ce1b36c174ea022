"""Source families: how each teacher's configuration and tensor names read as one of this package's.

A family is a class in a file of its own in this folder, under `@register_family("model_type")`. The architectures of
this package are read as they are; every other family becomes a LightFormer, whose tensor names are Marian's and
BART's own.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig

from ...loading import CheckpointReader
from ...models.configuration_lightformer import FactorizedConfig, LightFormerConfig

# Fields that Marian, BART and their relatives call as LightFormer does.
SHARED_FIELDS = (
    "vocab_size decoder_vocab_size d_model encoder_layers decoder_layers encoder_attention_heads "
    "decoder_attention_heads encoder_ffn_dim decoder_ffn_dim max_position_embeddings scale_embedding "
    "activation_function dropout attention_dropout activation_dropout share_encoder_decoder_embeddings "
    "tie_word_embeddings use_cache pad_token_id bos_token_id eos_token_id decoder_start_token_id "
    "forced_eos_token_id"
).split()
STACKS = ("encoder", "decoder")
SHARED = "model.shared.weight"  # the token table of both stacks
POSITION_TABLES = r"(en|de)coder\.embed_positions\.weights?"  # of sinusoids, which are computed here


class Family:
    """One source family. Where its names or its configuration are not Marian's, it overrides the two methods.

    Attributes:
        architectures: names of the model classes that can be converted.
        fields: fields of `LightFormerConfig` that the family fixes by its code.
        ignored: pattern of tensor names (without `model.`) that its checkpoints may hold and that say nothing.
    """

    architectures: ClassVar[tuple[str, ...]]
    fields: ClassVar[dict[str, Any]] = {}
    ignored: ClassVar[str] = r"(en|de)coder\.version"

    @classmethod
    def own_config(cls, config: PreTrainedConfig) -> FactorizedConfig:
        """The configuration of this package that computes what the source computes: dense and unshared."""
        shared = {name: getattr(config, name) for name in SHARED_FIELDS if hasattr(config, name)}
        return LightFormerConfig(**shared, **cls.fields, dtype=config.dtype)

    @classmethod
    def fit_weights(cls, config: FactorizedConfig, reader: CheckpointReader) -> FactorizedConfig:
        """`own_config` as the checkpoint's tensors have it, where the source's configuration does not tell."""
        return config if config.tie_word_embeddings else cls.fit_tables(config, reader)

    @classmethod
    def fit_tables(cls, config: FactorizedConfig, reader: CheckpointReader) -> FactorizedConfig:
        """Let each stack have its own token table if the checkpoint holds two that differ.

        Of these families, Marian alone has a field for it: in the others transformers unties all tables or none.
        """
        stored = {cls.own_name(key): key for key in reader.keys()}  # noqa: SIM118, a reader is no dict
        first, second = (stored.get(f"model.{stack}.embed_tokens.weight", stored.get(SHARED)) for stack in STACKS)
        if first and second and first != second and not torch.equal(reader.read(first), reader.read(second)):
            config.share_encoder_decoder_embeddings = False
        return config

    @classmethod
    def own_name(cls, name: str) -> str | None:
        """A tensor's name as this package's module has it, or `None` if the tensor says nothing.

        Checkpoints saved from a base class lack the `model.` in front.
        """
        bare = name.removeprefix("model.")
        if re.fullmatch(cls.ignored, bare):
            return None
        return f"model.{bare}" if re.match(r"(encoder|decoder|shared)\.", bare) else name


FAMILIES: dict[str, type[Family]] = {}


def register_family(*model_types: str) -> Callable[[type[Family]], type[Family]]:
    """Make a class the family of checkpoints whose configuration has one of these `model_type`s."""

    def register(family: type[Family]) -> type[Family]:
        FAMILIES.update(dict.fromkeys(model_types, family))
        return family

    return register


def find_family(config: PreTrainedConfig) -> type[Family]:
    """The family of a source configuration.

    Raises:
        ValueError: no such family, or a model of it that is not sequence-to-sequence.
    """
    for file in pkgutil.iter_modules(__path__):  # each registers itself
        importlib.import_module(f"{__name__}.{file.name}")
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(
            f"checkpoints of the family {config.model_type!r} can't be converted; known: {', '.join(FAMILIES)}"
        )
    architecture = (config.architectures or [family.architectures[0]])[0]
    if architecture not in family.architectures:
        raise ValueError(
            f"the checkpoint holds a {architecture}, which is no sequence-to-sequence model with an output layer; "
            f"of the family {config.model_type!r} these can be converted: {', '.join(family.architectures)}"
        )
    return family


class OwnFamily(Family):
    """Names and configuration are this package's already."""

    @classmethod
    def own_config(cls, config: Any) -> Any:
        """The checkpoint's own."""
        return config

    @classmethod
    def own_name(cls, name: str) -> str | None:
        """The same name."""
        return name


@register_family("lightformer")
class LightFormer(OwnFamily):
    """LightFormers, of any rank."""

    architectures = (
        "LightFormerForConditionalGeneration",
        "LightFormerForCausalLM",
        "LightFormerForSequenceClassification",
    )


@register_family("subformer")
class Subformer(OwnFamily):
    """Subformers."""

    architectures = ("SubformerForConditionalGeneration", "SubformerForCausalLM")


@register_family("partialformer")
class PartialFormer(OwnFamily):
    """PartialFormers."""

    architectures = ("PartialFormerForConditionalGeneration", "PartialFormerForCausalLM")
