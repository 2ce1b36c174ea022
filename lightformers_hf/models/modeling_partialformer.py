"""PartialFormer: layers of attention with feed-forward networks inside its heads (§3.2), and residual-like attention
over the embeddings (§3.3).
"""

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.output_capturing import OutputRecorder

from .attention import MultiHeadAttention
from .configuration_base import causal_config
from .configuration_partialformer import PartialFormerConfig
from .embeddings import SinusoidalPositions
from .layer_sharing import LayerStack, group_layers
from .lm_heads import CausalLMHead, ConditionalGenerationHead, EncoderDecoder
from .matrices import projections
from .partial_attention import GlobalAttention, PartialAttention
from .stacks import DecoderStack, EncoderStack, FactorizedPreTrainedModel, make_table
from .transformer_layer import TransformerLayer, add_feed_forward, add_layer_norms, drop


class PartialFormerLayer(GradientCheckpointingLayer):
    """Self-attention in an encoder, self- and cross-attention in a decoder, with the networks inside; pre-norm."""

    def __init__(self, config: PartialFormerConfig, stack: str, index: int):
        super().__init__()
        ffn_in = getattr(config, f"{stack}_ffn_in")
        expansion = getattr(config, f"{stack}_ffn_expansion")

        def attention(part: str, kind: str) -> PartialAttention:
            return PartialAttention(
                config,
                f"{stack}.layers.{index}.{part}",
                getattr(config, f"{stack}_attention_heads"),
                is_cross_attention=kind == "cross",
                ffn_expansion=expansion if ffn_in in (kind, "both") else None,
                head_scaling=config.head_scaling,
            )

        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.self_attn = attention("self_attn", "self")
        if stack == "decoder" and config.is_encoder_decoder:
            self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model)
            self.encoder_attn = attention("encoder_attn", "cross")
        self.dropout = config.dropout

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        layer_idx: int | None = None,
        cross_layer_idx: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """(B, T, d) → (B, T, d). The cache slots: see `LayerStack.by_depth`."""
        states = self.self_attn_layer_norm(hidden_states)
        output, _ = self.self_attn(states, attention_mask=attention_mask, layer_idx=layer_idx, **kwargs)
        hidden_states = hidden_states + drop(output, self.dropout, self.training)
        if encoder_hidden_states is not None:
            output, _ = self.encoder_attn(
                self.encoder_attn_layer_norm(hidden_states),
                key_value_states=encoder_hidden_states,
                attention_mask=encoder_attention_mask,
                layer_idx=cross_layer_idx,
                **kwargs,
            )
            hidden_states = hidden_states + drop(output, self.dropout, self.training)
        return hidden_states


class VanillaLayer(TransformerLayer):
    """A Transformer layer, pre-norm, with a feed-forward network of width 4·d (Table 7), and maybe head scaling."""

    def __init__(self, config: PartialFormerConfig, stack: str, index: int):
        name, d_model = f"{stack}.layers.{index}", config.d_model

        def attention(part: str) -> nn.Module:
            if config.vanilla_head_scaling:
                return PartialAttention(
                    config,
                    f"{name}.{part}",
                    getattr(config, f"{stack}_attention_heads"),
                    is_cross_attention=part == "encoder_attn",
                    ffn_expansion=None,
                    head_scaling=True,
                )
            project = projections(config, f"{name}.{part}", "attention")
            is_causal = stack == "decoder" and part == "self_attn"
            return MultiHeadAttention(config, d_model, config.base_attention_heads, project, is_causal=is_causal)

        has_cross = stack == "decoder" and config.is_encoder_decoder
        cross = attention("encoder_attn") if has_cross else None
        super().__init__(config, attention("self_attn"), cross, normalize_before=True)
        add_feed_forward(self, d_model, 4 * d_model, projections(config, name, "ffn"))
        add_layer_norms(self, d_model, has_cross)


class PartialFormerPreTrainedModel(FactorizedPreTrainedModel):
    """Weights, loading and saving of every PartialFormer. Attention is eager: its maps are what heads are made of."""

    config_class = PartialFormerConfig
    config: PartialFormerConfig
    _no_split_modules = ["PartialFormerLayer", "VanillaLayer", "GlobalAttention"]  # noqa: RUF012
    _supports_flash_attn = False
    _supports_sdpa = False
    _supports_flex_attn = False
    _supports_attention_backend = False


class PartialFormerStack(PartialFormerPreTrainedModel):
    """Embeddings, A^G, layers, final LayerNorm."""

    def __init__(self, config: PartialFormerConfig, stack: str):
        super().__init__(config)
        positions = SinusoidalPositions(config.max_position_embeddings, config.d_model)
        self.add_embeddings(make_table(config, stack), positions, width=config.d_model)
        has_global = config.has_global_attention(stack)
        self.global_attention = GlobalAttention(config, stack) if has_global else None
        layer_class = PartialFormerLayer if getattr(config, f"{stack}_style") == "partial" else VanillaLayer
        layers, groups = getattr(config, f"{stack}_layers"), getattr(config, f"{stack}_groups")
        self.layers = LayerStack(lambda index: layer_class(config, stack, index), group_layers(layers, groups))
        self.layer_norm = nn.LayerNorm(config.d_model)
        self.gradient_checkpointing = False
        self.post_init()

    def run(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *cross: torch.Tensor | None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Embeddings with positions (B, T, d) → states (B, T, d)."""
        if self.global_attention is not None:
            slot = len(self.layers.stored_at)
            attention_mask = self.global_attention(hidden_states, attention_mask, past_key_values, slot)
        kwargs["past_key_values"] = past_key_values
        for layer, slots in self.layers.by_depth():
            hidden_states = layer(hidden_states, attention_mask, *cross, **slots, **kwargs)
        return self.layer_norm(hidden_states)


# One recorder of both: transformers 5.4 takes a list of two for one of self- and one of cross-attention.
ATTENTIONS = (PartialAttention, MultiHeadAttention)


class PartialFormerEncoder(EncoderStack, PartialFormerStack):
    """`encoder_layers` depths of bidirectional self-attention."""

    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": GradientCheckpointingLayer,  # either kind of layer
        "attentions": OutputRecorder(ATTENTIONS, index=1, layer_name="self_attn"),
    }

    def __init__(self, config: PartialFormerConfig):
        super().__init__(config, "encoder")


class PartialFormerDecoder(DecoderStack, PartialFormerStack):
    """`decoder_layers` depths of causal self-attention, and of cross-attention if `config.is_encoder_decoder`."""

    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": GradientCheckpointingLayer,  # either kind of layer
        "attentions": OutputRecorder(ATTENTIONS, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(ATTENTIONS, index=1, layer_name="encoder_attn"),
    }

    def __init__(self, config: PartialFormerConfig):
        super().__init__(config, "decoder")


class PartialFormerModel(EncoderDecoder, PartialFormerPreTrainedModel):
    """Encoder and decoder without a head."""

    def __init__(self, config: PartialFormerConfig):
        super().__init__(config)
        self.add_stacks(PartialFormerEncoder, PartialFormerDecoder)
        self.post_init()


class PartialFormerForConditionalGeneration(ConditionalGenerationHead, PartialFormerPreTrainedModel, GenerationMixin):
    """PartialFormer for translation and summarization: `AutoModelForSeq2SeqLM`."""

    def __init__(self, config: PartialFormerConfig):
        super().__init__(config)
        self.add_head(PartialFormerModel(config))
        self.post_init()


class PartialFormerForCausalLM(CausalLMHead, PartialFormerPreTrainedModel, GenerationMixin):
    """The decoder alone, as a causal language model: `AutoModelForCausalLM`. Uses the `decoder_*` fields."""

    def __init__(self, config: PartialFormerConfig):
        super().__init__(causal_config(config))
        self.add_head(PartialFormerDecoder(self.config))
        self.post_init()
