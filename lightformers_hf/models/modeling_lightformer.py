"""LightFormer: a Transformer of low-rank matrices (Eq. 7-10) whose layers are shared in groups (§3.2).

Names of modules are those of Marian and BART, so that a converted weight is found where its teacher had it.
"""

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.generation import GenerationMixin
from transformers.utils.output_capturing import OutputRecorder

from .attention import MultiHeadAttention
from .configuration_base import causal_config
from .configuration_lightformer import RELATIVE_POSITIONS, LightFormerConfig
from .embeddings import make_positions
from .layer_sharing import LayerStack, group_layers
from .lm_heads import (
    CausalLMHead,
    ConditionalGenerationHead,
    EncoderDecoder,
    SequenceClassificationHead,
)
from .matrices import from_pattern, projections
from .relative_positions import RelativePositions, find_distances
from .stacks import DecoderStack, EncoderStack, FactorizedPreTrainedModel, make_table
from .transformer_layer import Depth, Dropout, RMSNorm, TransformerLayer, add_feed_forward, add_layer_norms
from .transformers_internals import keep_own_names

# The names of an encoder-decoder's encoder → those of the classifier.
ENCODER_OF_PAIR = {r"^model\.encoder\.": "encoder.", r"^(?:model\.)?shared\.": "encoder.embed_tokens."}


def make_norm(config: LightFormerConfig, width: int) -> nn.Module:
    """The norm that `normalization` names, of states of that width."""
    norm = RMSNorm if config.normalization == "rms_norm" else nn.LayerNorm
    return norm(width, eps=config.norm_epsilon)


def make_relative_positions(config: LightFormerConfig, stack: str) -> RelativePositions:
    """The biases of the `encoder` or the `decoder`, or of one layer of it."""
    heads = getattr(config, f"{stack}_attention_heads")
    return RelativePositions(config.relative_buckets, heads, config.relative_furthest, is_causal=stack == "decoder")


class LightFormerLayer(TransformerLayer):
    """One layer of either stack: self-attention (Eq. 9), cross-attention in the decoder, feed-forward (Eq. 10).

    Args:
        stack: `encoder` or `decoder`; a decoder of a causal language model has no cross-attention.
        index: number of this stored layer, which names its matrices in `rank_pattern`.
        private_norms: the LayerNorms come with each call, from the depth.
    """

    def __init__(self, config: LightFormerConfig, stack: str, index: int, private_norms: bool):
        name = f"{stack}.layers.{index}"

        def attention(part: str, is_causal: bool, joint_qkv: bool = False) -> MultiHeadAttention:
            return MultiHeadAttention(
                config,
                config.d_model,
                getattr(config, f"{stack}_attention_heads"),
                projections(config, f"{name}.{part}", "attention", bias=config.use_bias),
                is_causal=is_causal,
                head_dim=from_pattern(config.head_dim_pattern, f"{name}.{part}", config.head_dim),
                joint_qkv=joint_qkv,
                output_projection=config.attention_output_projection,
                scale=config.scale_attention,
            )

        has_cross = stack == "decoder" and config.is_encoder_decoder
        super().__init__(
            config,
            attention("self_attn", is_causal=stack == "decoder", joint_qkv=config.joint_qkv),
            attention("encoder_attn", is_causal=False) if has_cross else None,
            normalize_before=config.normalize_before,
        )
        ffn_dim = from_pattern(config.ffn_dim_pattern, name, getattr(config, f"{stack}_ffn_dim"))
        project = projections(config, name, "ffn", bias=config.use_bias)
        add_feed_forward(self, config.d_model, ffn_dim, project, gated=config.gated_ffn)
        if config.position_embedding_type == "relative_per_layer":
            self.relative_positions = make_relative_positions(config, stack)
        if not private_norms:
            add_layer_norms(self, config.d_model, has_cross, partial(make_norm, config))


class LightFormerPreTrainedModel(FactorizedPreTrainedModel):
    """Weights, loading and saving of every LightFormer."""

    config_class = LightFormerConfig
    config: LightFormerConfig
    _no_split_modules = ["LightFormerLayer"]  # noqa: RUF012

    @property
    def _supports_flash_attn(self) -> bool:  # type: ignore[override]
        return self.config.position_embedding_type not in RELATIVE_POSITIONS  # whose biases it has no argument for

    @property
    def _supports_flex_attn(self) -> bool:  # type: ignore[override]
        return self.config.position_embedding_type not in RELATIVE_POSITIONS


class LightFormerStack(LightFormerPreTrainedModel):
    """What encoder and decoder have in common: token and position embeddings, layers by depth, final LayerNorm."""

    def __init__(self, config: LightFormerConfig, stack: str, embedding_dim: int | None = None):
        super().__init__(config)
        d_model, projection = config.d_model, None
        if embedding_dim is None:
            table = make_table(config, stack)
        else:
            table = nn.Embedding(config.vocab_size, embedding_dim, config.pad_token_id)
            projection = nn.Linear(embedding_dim, d_model)
        self.add_embeddings(table, make_positions(config), width=d_model, projection=projection)
        if config.layernorm_embedding:
            self.layernorm_embedding = make_norm(config, d_model)
        is_relative = config.position_embedding_type == "relative"
        self.relative_positions = make_relative_positions(config, stack) if is_relative else None
        layers, groups = getattr(config, f"{stack}_layers"), getattr(config, f"{stack}_groups")
        private_norms = groups is not None and not config.share_layer_norms
        self.layers = LayerStack(
            lambda index: LightFormerLayer(config, stack, index, private_norms), group_layers(layers, groups)
        )
        self.depths = nn.ModuleList(Depth() for _ in range(layers)) if private_norms else None
        for depth in self.depths or ():
            has_cross = stack == "decoder" and config.is_encoder_decoder
            add_layer_norms(depth, d_model, has_cross, partial(make_norm, config))
        self.layer_norm = make_norm(config, d_model) if config.final_layer_norm else nn.Identity()
        self.gradient_checkpointing = False
        if self.depths is not None:  # on the device of their layers
            self._no_split_modules = [type(self).__name__]
        if config.normalization == "rms_norm":
            self._keep_in_fp32_modules = ["fc2"]  # whose outputs are beyond fp16 in many a T5
        self.post_init()

    def by_depth(self) -> Iterator[tuple[nn.Module, dict]]:
        """Every depth's layer and its own arguments."""
        for depth, (layer, slots) in enumerate(self.layers.by_depth()):
            yield layer, {"own": None if self.depths is None else self.depths[depth], **slots}

    def run(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *cross: torch.Tensor | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Apply the layers depth by depth. (B, T, d) → (B, T, d)."""
        if self.config.position_embedding_type in RELATIVE_POSITIONS:
            distances = find_distances(hidden_states, attention_mask, kwargs.get("past_key_values"))
            if self.relative_positions is None:  # each layer has its own; all together would fill the memory
                kwargs["distances"] = distances
            else:
                attention_mask = self.relative_positions(distances, attention_mask)
        states = hidden_states
        for layer, arguments in self.by_depth():
            states = layer(states, attention_mask, *cross, **arguments, **kwargs)
        return self.layer_norm(states).to(hidden_states.dtype)


class LightFormerEncoder(EncoderStack, LightFormerStack):
    """`encoder_layers` depths of bidirectional self-attention."""

    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": LightFormerLayer,
        "attentions": MultiHeadAttention,
    }

    def __init__(self, config: LightFormerConfig, embedding_dim: int | None = None):
        super().__init__(config, "encoder", embedding_dim)


class LightFormerDecoder(DecoderStack, LightFormerStack):
    """`decoder_layers` depths of causal self-attention, and of cross-attention if `config.is_encoder_decoder`."""

    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": LightFormerLayer,
        "attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="encoder_attn"),
    }

    def __init__(self, config: LightFormerConfig):
        if config.embedding_dim is not None:
            raise ValueError(
                f"embedding_dim is {config.embedding_dim}, but word vectors are for "
                "LightFormerForSequenceClassification alone: leave it None here"
            )
        super().__init__(config, "decoder")


class LightFormerModel(EncoderDecoder, LightFormerPreTrainedModel):
    """Encoder and decoder without a head."""

    def __init__(self, config: LightFormerConfig):
        super().__init__(config)
        self.add_stacks(LightFormerEncoder, LightFormerDecoder)
        self.post_init()


class LightFormerForConditionalGeneration(ConditionalGenerationHead, LightFormerPreTrainedModel, GenerationMixin):
    """LightFormer for translation and summarization: `AutoModelForSeq2SeqLM`."""

    def __init__(self, config: LightFormerConfig):
        super().__init__(config)
        self.add_head(LightFormerModel(config))
        self.final_logits_bias = torch.zeros(1, config.decoder_vocab_size)
        self.post_init()


class LightFormerForCausalLM(CausalLMHead, LightFormerPreTrainedModel, GenerationMixin):
    """The decoder alone, as a causal language model: `AutoModelForCausalLM`. Uses the `decoder_*` fields."""

    def __init__(self, config: LightFormerConfig):
        super().__init__(causal_config(config))
        self.add_head(LightFormerDecoder(self.config))
        self.post_init()


class LightFormerForSequenceClassification(SequenceClassificationHead, LightFormerPreTrainedModel):
    """The encoder alone with a classifier (§4.2): `AutoModelForSequenceClassification`."""

    def __init__(self, config: LightFormerConfig):
        config = copy.deepcopy(config)
        config.is_encoder_decoder = False
        super().__init__(config)
        self.encoder = LightFormerEncoder(config, embedding_dim=config.embedding_dim)
        self.dropout = Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.d_model, config.num_labels)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, key_mapping: dict[str, str] | None = None, **kwargs: Any) -> Any:
        """As the base class; of a sequence-to-sequence checkpoint, its encoder and the table of that."""
        loaded = super().from_pretrained(*args, key_mapping=ENCODER_OF_PAIR | (key_mapping or {}), **kwargs)
        keep_own_names(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded
