"""Subformer: sandwich-style sharing (§2.2) and self-attentive factorized embeddings, SAFE (§2.1).

Shapes: B batch, T and S lengths; d_m `d_model`, d_s `sandwich_dim`, d_e `embedding_dim`, L layers of a stack.
"""

from collections import OrderedDict
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin

from .configuration_subformer import SubformerConfig
from .heads import CausalLMHead, ConditionalGenerationHead, EncoderDecoder
from .layers import (
    Depth,
    MultiHeadAttention,
    SinusoidalPositions,
    TransformerLayer,
    add_feed_forward,
    add_layer_norms,
    apply_dropout,
)
from .low_rank import LowRankLinear, make_embedding, projections, set_initializer
from .stack import DecoderStack, EncoderStack, FactorizedPreTrainedModel, LayerStack

# With this bias, values of unit variance pass a ReLU nearly unchanged.
WITHIN_RELU = 2.0


class Dropout(nn.Dropout):
    """`apply_dropout` as a module."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return apply_dropout(states, self.p, self.training)


@torch.no_grad()
def draw_identity(layer: nn.Linear, bias: float) -> None:
    """Initialize a layer so that output = input + `bias`."""
    init.eye_(layer.weight)
    init.constant_(layer.bias, bias)


@torch.no_grad()
def draw_isometry(layer: nn.Linear, input_bias: float) -> None:
    """Initialize a layer with a semi-orthogonal matrix, and with the bias that removes `input_bias` from its input."""
    init.orthogonal_(layer.weight)
    init.copy_(layer.bias, -input_bias * layer.weight.sum(1))


def stored_at(sharing: str, layers: int) -> list[int]:
    """Index of the stored layer at each of L depths (§2.2)."""
    return {
        "sandwich": [0] + [1] * (layers - 2) + [2],
        "all": [0] * layers,
        "all_independent_ffn": [0] * layers,
        "all_except_last": [0] * (layers - 1) + [1],
        "every_2": [depth // 2 for depth in range(layers)],
        "none": list(range(layers)),
    }[sharing]


def make_projection(
    config: SubformerConfig, name: str, width: int, inner: int | None, out: int, activation: nn.Module | None = None
) -> nn.Module:
    """Return one linear layer width → out, or two with an inner width and, maybe, an activation between them."""
    prefix, _, leaf = name.rpartition(".")
    if inner is None:
        return projections(config, prefix, "ffn")(leaf, width, out)
    project = projections(config, name, "ffn")
    between = {} if activation is None else {"activation": activation}
    return nn.Sequential(
        OrderedDict(first=project("first", width, inner), **between, second=project("second", inner, out))
    )


class SAFE(nn.Module):
    """Self-attentive factorized embeddings (§2.1): (B, T, d_e) → (B, T, d_m), with 5·d_e² + d_e·d_m weights.

    x = LN(x + dropout(MHA(x))); y = LN(dropout(FC2(ReLU(FC1 x)))): no residual around the feed-forward network, whose
    output has another width.
    """

    def __init__(self, config: SubformerConfig, stack: str):
        super().__init__()
        width, name, heads = config.embedding_dim, f"{stack}.safe", config.embedding_attention_heads
        project = projections(config, f"{name}.attn", "attention")
        self.attn = MultiHeadAttention(config, width, heads, project, is_causal=stack == "decoder")
        self.attn_layer_norm = nn.LayerNorm(width)
        project = projections(config, name, "ffn")
        self.fc1 = project("fc1", width, width)
        self.fc2 = project("fc2", width, config.d_model)
        # The ReLU between the two starts linear, so that the first layer gets the vector of a token unchanged.
        if not isinstance(self.fc1, LowRankLinear):
            set_initializer(self.fc1, partial(draw_identity, bias=WITHIN_RELU))
            if not isinstance(self.fc2, LowRankLinear):
                set_initializer(self.fc2, partial(draw_isometry, input_bias=WITHIN_RELU))
        self.final_layer_norm = nn.LayerNorm(config.d_model)
        self.dropout = Dropout(config.dropout)

    def forward(self, states: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
        """Scaled vectors with positions (B, T, d_e) → input of the first layer (B, T, d_m)."""
        attended = self.attn(states, attention_mask=attention_mask, **kwargs)[0]
        states = self.attn_layer_norm(states + self.dropout(attended))
        return self.final_layer_norm(self.dropout(self.fc2(self.fc1(states).relu())))


class SandwichCrossAttention(nn.Module):
    """Cross-attention of the sandwich (Appendix A), at the encoder's width: (B, T, d_s) → (B, T, d_s).

    q = LN(Linear(d_s → d_m)); attention at d_m over the encoder's states; LN(Linear(d_m → d_s)).
    """

    def __init__(self, config: SubformerConfig, name: str):
        super().__init__()
        project = projections(config, name, "attention")
        self.query_projection = project("query_projection", config.sandwich_dim, config.d_model)
        self.query_layer_norm = nn.LayerNorm(config.d_model)
        inner, heads = projections(config, f"{name}.attention", "attention"), config.decoder_attention_heads
        self.attention = MultiHeadAttention(config, config.d_model, heads, inner, is_causal=False)
        self.output_projection = project("output_projection", config.d_model, config.sandwich_dim)
        self.output_layer_norm = nn.LayerNorm(config.sandwich_dim)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """States of the decoder (B, T, d_s) → (B, T, d_s), and the weights (B, H, T, S) from eager attention."""
        query = self.query_layer_norm(self.query_projection(hidden_states))
        output, weights = self.attention(query, **kwargs)
        return self.output_layer_norm(self.output_projection(output)), weights


class SubformerLayer(TransformerLayer):
    """Stored layer `index` at d_m or, in the middle of a sandwich, at d_s. LayerNorms belong to depths."""

    def __init__(self, config: SubformerConfig, stack: str, index: int):
        name = f"{stack}.layers.{index}"
        in_sandwich = config.sharing == "sandwich" and index == 1
        width = config.sandwich_dim if in_sandwich else config.d_model
        own_heads = getattr(config, f"{stack}_attention_heads")

        def attention(part: str, heads: int, is_causal: bool) -> nn.Module:
            project = projections(config, f"{name}.{part}", "attention")
            return MultiHeadAttention(config, width, heads, project, is_causal=is_causal)

        cross = None
        if stack == "decoder" and config.is_encoder_decoder:
            if width == config.d_model:
                cross = attention("encoder_attn", own_heads, is_causal=False)
            else:
                cross = SandwichCrossAttention(config, f"{name}.encoder_attn")
        heads = config.sandwich_attention_heads if in_sandwich else own_heads
        self_attn = attention("self_attn", heads, is_causal=stack == "decoder")
        super().__init__(config, self_attn, cross, normalize_before=bool(config.normalize_before))
        if config.sharing != "all_independent_ffn":
            ffn_dim = config.sandwich_ffn_dim if in_sandwich else config.ffn_dim
            add_feed_forward(self, width, ffn_dim, projections(config, name, "ffn"))


class SubformerPreTrainedModel(FactorizedPreTrainedModel):
    """Initialization, loading and saving of every Subformer."""

    config_class = SubformerConfig
    config: SubformerConfig
    # A shared layer and the LayerNorms of its depths compute together.
    _no_split_modules = ["SubformerEncoder", "SubformerDecoder"]  # noqa: RUF012


class SubformerStack(SubformerPreTrainedModel):
    """Embedding, first layer, up to the sandwich and down again, last layer (Figure 1)."""

    def __init__(self, config: SubformerConfig):
        super().__init__(config)
        stack = self.side
        self._add_embeddings(config, stack)
        layers = getattr(config, f"{stack}_layers")
        self.layers = LayerStack(lambda index: SubformerLayer(config, stack, index), stored_at(config.sharing, layers))
        has_cross = stack == "decoder" and config.is_encoder_decoder
        self.depths = nn.ModuleList(Depth() for _ in range(layers))
        for number, depth in enumerate(self.depths):
            in_sandwich = config.sharing == "sandwich" and 0 < number < layers - 1
            add_layer_norms(depth, config.sandwich_dim if in_sandwich else config.d_model, has_cross)
            if config.sharing == "all_independent_ffn":
                project = projections(config, f"{stack}.depths.{number}", "ffn")
                add_feed_forward(depth, config.d_model, config.ffn_dim, project)
        if config.sandwich_dim != config.d_model:
            self.up = self._change_width(stack, "up", config.d_model, config.sandwich_dim)
            self.down = self._change_width(stack, "down", config.sandwich_dim, config.d_model)
        self.layer_norm = nn.LayerNorm(config.d_model) if config.normalize_before else nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    def _add_embeddings(self, config: SubformerConfig, stack: str) -> None:
        width, projection = config.d_model, None
        if config.embedding == "safe":
            width = config.embedding_dim
        elif config.embedding == "linear":
            widths = [config.embedding_dim, config.embedding_inner_dim, config.d_model]
            projection = make_projection(config, f"{stack}.embed_projection", *widths)
        positions = SinusoidalPositions(config.max_position_embeddings, width)
        self.add_embeddings(make_embedding(config, stack), positions, width, projection)
        if stack == "decoder" and config.decoder_embedding_scale is not None:
            self.embed_scale = config.decoder_embedding_scale
        self.safe = SAFE(config, stack) if config.embedding == "safe" else None

    def _change_width(self, stack: str, name: str, in_features: int, out_features: int) -> nn.Module:
        """Linear, dropout, LayerNorm: (…, in_features) → (…, out_features)."""
        project = projections(self.config, f"{stack}.{name}", "ffn")
        return nn.Sequential(
            OrderedDict(
                projection=project("projection", in_features, out_features),
                dropout=Dropout(self.config.projection_dropout),
                layer_norm=nn.LayerNorm(out_features),
            )
        )

    def run(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *cross: torch.Tensor | None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Vectors with positions (B, T, d_e or d_m) → states (B, T, d_m)."""
        kwargs["past_key_values"] = past_key_values
        last = len(self.depths) - 1
        if self.safe is not None:
            hidden_states = self.safe(hidden_states, attention_mask, layer_idx=last + 1, **kwargs)
        widens = self.config.sandwich_dim != self.config.d_model
        for depth, (layer, slots) in enumerate(self.layers.by_depth()):
            if widens and depth in (1, last):
                hidden_states = (self.up if depth == 1 else self.down)(hidden_states)
            hidden_states = layer(hidden_states, attention_mask, *cross, private=self.depths[depth], **slots, **kwargs)
        return self.layer_norm(hidden_states)


class SubformerEncoder(EncoderStack, SubformerStack):
    """`encoder_layers` depths of bidirectional self-attention."""


class SubformerDecoder(DecoderStack, SubformerStack):
    """`decoder_layers` depths of causal self-attention, and of cross-attention if `config.is_encoder_decoder`."""


class ProjectedOutput(nn.Module):
    """Output layer of an embedding of width d_e: logits = output(projection(h)). (…, d_m) → (…, d_e) → (…, V).

    The projection is one linear layer, or a two-layer MLP (Appendix A).
    """

    def __init__(self, config: SubformerConfig, output: nn.Module):
        super().__init__()
        widths = [config.d_model, config.output_inner_dim, config.embedding_dim]
        self.projection = make_projection(config, "lm_head.projection", *widths, activation=nn.ReLU())
        self.output = output

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.output(self.projection(hidden_states))


class SubformerHead:
    """The output layer, `lm_head.output` if the embedding is d_e wide."""

    def add_output(self, embedding: nn.Module, embedding_name: str, name: str = "lm_head") -> None:
        is_factorized = self.config.is_factorized
        super().add_output(embedding, embedding_name, "lm_head.output" if is_factorized else name)
        if is_factorized:
            self.lm_head = ProjectedOutput(self.config, self.lm_head)


class SubformerModel(EncoderDecoder, SubformerPreTrainedModel):
    """Encoder and decoder without a head."""

    stack_classes = (SubformerEncoder, SubformerDecoder)


class SubformerForConditionalGeneration(
    SubformerHead, ConditionalGenerationHead, SubformerPreTrainedModel, GenerationMixin
):
    """Subformer for translation and summarization: `AutoModelForSeq2SeqLM`."""

    model_class = SubformerModel


class SubformerForCausalLM(SubformerHead, CausalLMHead, SubformerPreTrainedModel, GenerationMixin):
    """The decoder alone, as a causal language model: `AutoModelForCausalLM`. Uses the `decoder_*` fields."""

    decoder_class = SubformerDecoder
