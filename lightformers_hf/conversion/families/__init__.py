"""Source families: how each teacher's configuration and tensor names read as one of this package's.

The architectures of this package are read as they are. Every other family becomes a LightFormer, whose tensor names
are Marian's and BART's own, so a family is one row: its classes, the fields that its code fixes, and what its
checkpoints may hold besides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

from ...models.configuration_base import FactorizedConfig
from ...models.configuration_lightformer import LightFormerConfig

# Fields that Marian, BART and their relatives call as LightFormer does.
SHARED_FIELDS = (
    "vocab_size decoder_vocab_size d_model encoder_layers decoder_layers encoder_attention_heads "
    "decoder_attention_heads encoder_ffn_dim decoder_ffn_dim max_position_embeddings scale_embedding "
    "activation_function dropout attention_dropout activation_dropout share_encoder_decoder_embeddings "
    "tie_word_embeddings use_cache pad_token_id bos_token_id eos_token_id decoder_start_token_id "
    "forced_eos_token_id"
).split()
PRE_NORM = {"normalize_before": True, "final_layer_norm": True}
LEARNED_POSITIONS = {"position_embedding_type": "learned", "position_offset": 2}
POSITION_TABLES = r"(en|de)coder\.embed_positions\.weights?"


@dataclass(frozen=True)
class Family:
    """One source family.

    Attributes:
        fields: LightFormer fields that the family fixes by its code.
        ignored: pattern of tensor names (without `model.`) that its checkpoints may hold and that say nothing, e.g.
            tables of sinusoids.
        architectures: names of the model classes that can be converted.
    """

    architectures: tuple[str, ...]
    fields: dict[str, Any] = field(default_factory=dict)
    ignored: str = r"(en|de)coder\.version"


FAMILIES: dict[str, Family] = {
    "marian": Family(("MarianMTModel",), ignored=POSITION_TABLES),
    "bart": Family(("BartForConditionalGeneration", "BartModel"), LEARNED_POSITIONS | {"layernorm_embedding": True}),
    "mbart": Family(("MBartForConditionalGeneration",), LEARNED_POSITIONS | PRE_NORM | {"layernorm_embedding": True}),
    "pegasus": Family(("PegasusForConditionalGeneration",), PRE_NORM, ignored=POSITION_TABLES),
    "m2m_100": Family(
        ("M2M100ForConditionalGeneration",),
        PRE_NORM | {"position_embedding_type": "sinusoidal_half", "position_offset": 2},
        ignored=POSITION_TABLES,
    ),
    "lightformer": Family(
        ("LightFormerForConditionalGeneration", "LightFormerForCausalLM", "LightFormerForSequenceClassification")
    ),
    "subformer": Family(("SubformerForConditionalGeneration", "SubformerForCausalLM")),
    "partialformer": Family(("PartialFormerForConditionalGeneration", "PartialFormerForCausalLM")),
}


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a source configuration.

    Raises:
        ValueError: no such family, or a model of it that is not sequence-to-sequence.
    """
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


def own_config(config: PreTrainedConfig) -> FactorizedConfig:
    """The configuration that computes what the source computes: the source's own where it is of this package, else the
    LightFormer's, dense and unshared."""
    if isinstance(config, FactorizedConfig):
        return config
    shared = {name: getattr(config, name) for name in SHARED_FIELDS if hasattr(config, name)}
    return LightFormerConfig(**shared, **family_of(config).fields, dtype=config.dtype)


def canonical_name(name: str, config: PreTrainedConfig) -> str | None:
    """A tensor's name in a checkpoint of `config` as this package's module has it, or `None` if it says nothing.

    Checkpoints of other families saved from their base class lack the `model.` in front.
    """
    bare = name.removeprefix("model.")
    if re.fullmatch(family_of(config).ignored, bare):
        return None
    has_prefix = isinstance(config, FactorizedConfig) or not re.match(r"(encoder|decoder|shared)\.", bare)
    return name if has_prefix else f"model.{bare}"
