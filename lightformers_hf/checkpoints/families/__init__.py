"""Source families: translation of a teacher's configuration and tensor names to those of this package.

A family is a class with the decorator `@register_family("model_type")`, in one file of this folder. Architectures of
this package keep their names; every other family becomes a LightFormer, whose tensor names are Marian's and BART's
own.
"""

from __future__ import annotations

import copy
import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ...matrices import STACKS
from ...models.configuration_lightformer import FactorizedConfig, LightFormerConfig
from ...models.layers import make_positions

# Fields that Marian, BART and their relatives call as LightFormer does.
SHARED_FIELDS = (
    "vocab_size decoder_vocab_size d_model encoder_layers decoder_layers encoder_attention_heads "
    "decoder_attention_heads encoder_ffn_dim decoder_ffn_dim max_position_embeddings scale_embedding "
    "activation_function dropout attention_dropout activation_dropout share_encoder_decoder_embeddings "
    "tie_word_embeddings use_cache pad_token_id bos_token_id eos_token_id decoder_start_token_id "
    "forced_eos_token_id"
).split()
TASK_FIELDS = ("prefix", "task_specific_params")  # what a pipeline puts before its texts, and its settings of tasks
SHARED = "model.shared.weight"  # the token table of both stacks
POSITION_TABLES = r"model\.(encoder|decoder)\.embed_positions\.weights?"
# Stored tables of sinusoids differ from those computed here by rounding, and by the precision of the frequencies.
SINUSOID_ERROR = 1e-3


class Family:
    """A source family. It overrides methods where its names, tensors or configuration differ from Marian's."""

    architectures: ClassVar[tuple[str, ...]]  # names of the model classes that can be converted
    fields: ClassVar[dict[str, Any]] = {}  # fields of `LightFormerConfig` that the family fixes by its code
    model_class: ClassVar[str] = "LightFormerForConditionalGeneration"  # that a checkpoint of the family becomes
    tokenizers: ClassVar[tuple[str, ...]] = ()  # classes by which other programs know the family
    translates: ClassVar[bool] = False  # whether its models do nothing else
    ignored: ClassVar[str] = r"(en|de)coder\.version"  # pattern of names (without `model.`) that have no effect
    zeros: ClassVar[str] = ""  # pattern of names of this package, whose tensors the family lacks: they are zero
    reads_positions: ClassVar[bool] = False  # whether its class loads stored positions in place of sinusoids

    @classmethod
    def own_config(cls, config: PreTrainedConfig) -> FactorizedConfig:
        """Return the configuration of this package that computes the same as the source: dense and unshared."""
        names = (*SHARED_FIELDS, *TASK_FIELDS)
        shared = {name: getattr(config, name) for name in names if hasattr(config, name)}
        return LightFormerConfig(**shared, **cls.fields, dtype=config.dtype)

    @classmethod
    def fit_weights(
        cls, config: FactorizedConfig, tensors: Mapping[str, Tensor], where: str | Path
    ) -> FactorizedConfig:
        """`own_config` as the source's tensors have it, if its configuration does not contain it.

        `where` names the source in messages.
        """
        config = cls.fit_positions(config, tensors, where)
        return config if config.tie_word_embeddings else cls.fit_tables(config, tensors)

    @classmethod
    def fit_tables(cls, config: FactorizedConfig, tensors: Mapping[str, Tensor]) -> FactorizedConfig:
        """Give each stack a separate embedding matrix if the checkpoint contains two different ones.

        Of these families, Marian alone has a field for it: in the others transformers unties all tables or none.
        """
        stored = {cls.own_name(key): key for key in tensors}
        first, second = (stored.get(f"model.{stack}.embed_tokens.weight", stored.get(SHARED)) for stack in STACKS)
        if first and second and first != second and not torch.equal(tensors[first], tensors[second]):
            config.share_encoder_decoder_embeddings = False
        return config

    @classmethod
    def fit_positions(
        cls, config: FactorizedConfig, tensors: Mapping[str, Tensor], where: str | Path
    ) -> FactorizedConfig:
        """Compare stored tables of positions with the sinusoids that are computed in their place.

        If they differ, the result has trained positions. Raises `ValueError` if the source's class does not read them.
        """
        for key, tensor in tensors.items():
            if cls.is_computed(cls.own_name(key), config) and not is_sinusoidal(tensor, config):
                if not cls.reads_positions:
                    raise ValueError(
                        f"{key} of {where} are not the sinusoids that {cls.architectures[0]} computes in "
                        "their place: remove them from the checkpoint if the model was trained with sinusoids"
                    )
                config.position_embedding_type = "learned"
        return config

    @classmethod
    def is_computed(cls, name: str | None, config: FactorizedConfig) -> bool:
        """Whether a model with `config` computes the tensor of this name: a table of sinusoids."""
        kind = getattr(config, "position_embedding_type", "learned")
        return kind.startswith("sinusoidal") and re.fullmatch(POSITION_TABLES, name or "") is not None

    @classmethod
    def substitute(cls, name: str, shape: torch.Size, config: FactorizedConfig) -> Tensor | None:
        """Return a tensor that a source may omit; `None` for others.

        The bias of the logits and the tensors of `zeros` are zero. Positions are sinusoids where only one stack has
        trained ones.
        """
        if name == "final_logits_bias" or re.fullmatch(cls.zeros, name):
            return torch.zeros(shape)
        if name.endswith("embed_positions.weight") and cls.reads_positions:
            computed = copy.copy(config)
            computed.position_embedding_type = "sinusoidal"
            return cast(Any, make_positions(computed)).table
        return None

    @classmethod
    def own_name(cls, name: str) -> str | None:
        """Return the name of a tensor in this package, or `None` if the tensor has no effect.

        Checkpoints saved from a base class lack the `model.` in front.
        """
        bare = name.removeprefix("model.")
        if re.fullmatch(cls.ignored, bare):
            return None
        return f"model.{bare}" if re.match(r"(encoder|decoder|shared)\.", bare) else name


def is_sinusoidal(table: torch.Tensor, config: FactorizedConfig) -> bool:
    """Return whether a stored table of positions has the values that a model with `config` computes."""
    if table.dim() != 2 or not table.is_floating_point() or len(table) <= config.position_offset:
        return False
    sized = copy.copy(config)
    sized.max_position_embeddings = len(table) - config.position_offset
    with torch.device("cpu"):
        rows = cast(Any, make_positions(sized)).table[config.position_offset :]  # the rows before are of padding
    error = SINUSOID_ERROR + torch.finfo(table.dtype).eps
    stored = table[config.position_offset :].float()
    return stored.shape == rows.shape and torch.allclose(stored, rows, atol=error, rtol=0)


FAMILIES: dict[str, type[Family]] = {}


def register_family(*model_types: str) -> Callable[[type[Family]], type[Family]]:
    """Register a class as the family of checkpoints with one of these `model_type`s."""

    def register(family: type[Family]) -> type[Family]:
        FAMILIES.update(dict.fromkeys(model_types, family))
        return family

    return register


def all_families() -> dict[str, type[Family]]:
    """Return {`model_type`: family} of all files of this folder."""
    for file in pkgutil.iter_modules(__path__):  # each registers itself
        importlib.import_module(f"{__name__}.{file.name}")
    return FAMILIES


def find_family(config: PreTrainedConfig) -> type[Family]:
    """Return the family of a source configuration. Raises `ValueError` for none, and for other classes of models."""
    families = all_families()
    family = families.get(type(config).model_type)
    if family is None:
        raise ValueError(
            f"checkpoints of the family {config.model_type!r} can't be converted; supported: {', '.join(families)}"
        )
    architecture = (config.architectures or [family.architectures[0]])[0]
    if architecture not in family.architectures:
        raise ValueError(
            f"the checkpoint holds a {architecture}, which is no sequence-to-sequence model with an output layer; "
            f"models of the family {config.model_type!r} that can be converted: {', '.join(family.architectures)}"
        )
    return family


class OwnFamily(Family):
    """Family with the names and the configuration of this package."""

    @classmethod
    def own_config(cls, config: Any) -> Any:
        return config

    @classmethod
    def own_name(cls, name: str) -> str | None:
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
