"""T5 (Raffel et al. 2020), T5 v1.1, FLAN-T5, ByT5, MADLAD-400; mT5 (Xue et al. 2021), UMT5 (Chung et al. 2023)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ...models.configuration_lightformer import LightFormerConfig
from . import TASK_FIELDS, Family, register_family

# T5's name of a part of a layer → this package's.
PARTS = {"SelfAttention": "self_attn", "EncDecAttention": "encoder_attn"}
PARTS |= {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
PARTS |= {"wi": "fc1", "wi_0": "fc_gate", "wi_1": "fc1", "wo": "fc2"}
# The norms of a decoder's layer, each before the sublayer with this number; an encoder's layer lacks the second.
NORMS = ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")


@register_family("t5")
class T5(Family):
    """Pre-norm, RMSNorm, no biases, scores that nothing divides, relative positions that all layers share."""

    architectures: ClassVar[tuple[str, ...]] = ("T5ForConditionalGeneration", "T5WithLMHeadModel")
    fields: ClassVar[dict[str, Any]] = {
        "scale_embedding": False,
        "scale_attention": False,
        "use_bias": False,
        "normalization": "rms_norm",
        "normalize_before": True,
        "final_layer_norm": True,
        "position_embedding_type": "relative",
    }
    # The field that states whether the output layer takes states times 1/√d: in T5, but not in v1.1.
    scales_if: ClassVar[str | None] = "scale_decoder_outputs"
    # Cross-attention has no positions; early checkpoints hold some that nothing reads.
    ignored = r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"

    @classmethod
    def own_config(cls, config: PreTrainedConfig) -> LightFormerConfig:
        dropouts = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), config.dropout_rate)
        start = getattr(config, "decoder_start_token_id", None)
        tasks = {name: getattr(config, name) for name in TASK_FIELDS if hasattr(config, name)}
        return LightFormerConfig(
            vocab_size=config.vocab_size,
            d_model=config.d_model,
            encoder_layers=config.num_layers,
            decoder_layers=config.num_decoder_layers,
            encoder_attention_heads=config.num_heads,
            decoder_attention_heads=config.num_heads,
            head_dim=config.d_kv,
            encoder_ffn_dim=config.d_ff,
            decoder_ffn_dim=config.d_ff,
            gated_ffn=config.is_gated_act,
            activation_function=config.dense_act_fn,
            relative_buckets=config.relative_attention_num_buckets,
            relative_furthest=config.relative_attention_max_distance,
            norm_epsilon=config.layer_norm_epsilon,
            classifier_dropout=config.classifier_dropout,
            scale_output=bool(cls.scales_if and getattr(config, cls.scales_if)),
            use_cache=config.use_cache,
            pad_token_id=config.pad_token_id,
            bos_token_id=getattr(config, "bos_token_id", None),
            eos_token_id=config.eos_token_id,
            decoder_start_token_id=config.pad_token_id if start is None else start,
            dtype=config.dtype,
            **dropouts,
            **tasks,
            **cls.fields,
        )

    @classmethod
    def fit_weights(cls, config: Any, tensors: Mapping[str, Tensor], where: str | Path) -> Any:
        """Tied, unless the checkpoint has an output layer that differs from its embedding; no field contains this."""
        config = cls.fit_tables(config, tensors)
        tables = ["decoder.embed_tokens.weight", "shared.weight", "encoder.embed_tokens.weight"]
        table = next((name for name in tables if name in tensors), None)
        if "lm_head.weight" not in tensors or table is None:
            return config
        config.tie_word_embeddings = torch.equal(tensors["lm_head.weight"], tensors[table])
        return config

    @classmethod
    def own_name(cls, name: str) -> str | None:
        """T5 numbers the sublayers of a block, and names each norm before a sublayer `layer_norm`."""
        if re.fullmatch(cls.ignored, name):
            return None
        match = re.fullmatch(r"(encoder|decoder)\.block\.(\d+)\.layer\.(\d)\.(.+)\.weight", name)
        if match is None:
            name = re.sub(r"^(encoder|decoder)\.final_layer_norm\.", r"\1.layer_norm.", name)
            return f"model.{name}" if re.match(r"(encoder|decoder|shared)\.", name) else name
        stack, layer, sublayer, path = match[1], f"model.{match[1]}.layers.{match[2]}", int(match[3]), match[4]
        if path == "layer_norm":
            norms = NORMS if stack == "decoder" else NORMS[::2]
            return f"{layer}.{norms[sublayer]}.weight" if sublayer < len(norms) else name
        if path == "SelfAttention.relative_attention_bias":  # the first layer may have them for the whole stack
            is_shared = cls.fields["position_embedding_type"] == "relative"
            return f"{f'model.{stack}' if is_shared else layer}.relative_positions.weight"
        parts = path.removeprefix("DenseReluDense.").split(".")
        return f"{layer}.{'.'.join(PARTS.get(part, part) for part in parts)}.weight"


@register_family("mt5")
class MT5(T5):
    """T5 v1.1 in 101 languages."""

    architectures = ("MT5ForConditionalGeneration",)
    scales_if = None


@register_family("umt5")
class UMT5(T5):
    """mT5 whose layers have relative positions of their own."""

    architectures = ("UMT5ForConditionalGeneration",)
    fields: ClassVar[dict[str, Any]] = {**T5.fields, "position_embedding_type": "relative_per_layer"}
    scales_if = "tie_word_embeddings"
