"""PartialFormer: feed-forward networks and gates inside attention heads (§3.2), head scaling (§3.4), and residual-like
attention over the embeddings, A^G (§3.3).

Shapes: B batch, T and S lengths, d `d_model`, d_k `head_dim`, H heads, h heads of queries and keys (`base`), ρ the
expansion of the heads' feed-forward network.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin

from .configuration_partialformer import PartialFormerConfig
from .heads import CausalLMHead, ConditionalGenerationHead, EncoderDecoder
from .layers import (
    Attention,
    MultiHeadAttention,
    SinusoidalPositions,
    TransformerLayer,
    add_feed_forward,
    add_layer_norms,
    add_mask,
    apply_dropout,
    attention_weights,
    cached_states,
    find_attention,
)
from .low_rank import (
    JOINT_GAIN,
    Projection,
    WeightLayer,
    draw_matrix,
    factor_std,
    make_embedding,
    projections,
    set_initializer,
    xavier_std,
)
from .stack import DecoderStack, EncoderStack, FactorizedPreTrainedModel, LayerStack, group_layers

# Bias with which gates start open, and bias with which attention scores pass a ReLU unchanged.
OPEN_GATE, WITHIN_RELU = 1.0, 4.0


def split_heads(states: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, T, heads·d_k) → (B, heads, T, d_k)."""
    return states.unflatten(-1, (heads, -1)).transpose(1, 2)


class HeadLinear(WeightLayer):
    """A linear layer over the head axis: (B, h, N) → (B, H, N), by one matrix product and without moving the axis."""

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        weight = self.weight.expand(logits.shape[0], -1, -1)
        return torch.baddbmm(self.bias.unsqueeze(-1), weight, logits)


class Distances(nn.Embedding):
    """A trained vector per distance, and its products with queries (…, d_k): (…, distances)."""

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        return torch.matmul(query, self.weight.T)


@torch.no_grad()
def draw_parts(module: nn.Linear, m: int, parts: list[int], last_bias: float) -> None:
    """Draw a matrix m×n that consists of several of JOINT side by side, each as if it were alone, or one factor of it.

    `parts` are their widths, whose sum is n. `module` is the layer, or `u` (without bias) or `v` (with bias) of a
    low-rank layer.
    """
    rank, scale = getattr(module, "product_rank", None), 1.0
    if rank is not None:
        left = factor_std(xavier_std(m, sum(parts)), rank)
        if module.bias is None:
            init.normal_(module.weight, std=left)
            return
        scale = rank**-0.5 / left
    weight = torch.empty_like(module.weight)
    for part in filter(torch.numel, weight.split(parts)):
        part.normal_(std=scale * xavier_std(m, len(part), JOINT_GAIN))
    init.copy_(module.weight, weight)
    init.copy_(module.bias, torch.cat([torch.zeros(sum(parts[:-1])), torch.full((parts[-1],), last_bias)]))


@torch.no_grad()
def draw_copies(layer: nn.Linear, bias: float) -> None:
    """Initialize a layer so that output j = input (j modulo the number of inputs) + `bias`."""
    init.copy_(layer.weight, torch.eye(layer.in_features)[torch.arange(layer.out_features) % layer.in_features])
    init.constant_(layer.bias, bias)


def joint_projection(
    project: Projection, name: str, in_features: int, parts: list[int], last_bias: float = 0.0
) -> nn.Module:
    """One matrix that holds several side by side, of the widths `parts`; the last one's bias starts at `last_bias`."""
    joint = project(name, in_features, sum(parts))
    set_initializer(joint, partial(draw_parts, m=in_features, parts=parts, last_bias=last_bias))
    return joint


class PartialAttention(Attention):
    """Attention whose H heads have a feed-forward network and a gate: AFFN (§3.2, Figure 2c).

    Projections of the same states are one matrix: `in_proj` (d → q, k, v, gate) in self-attention. In cross-attention,
    `query_proj` (d → q, gate) for the decoder's states and `memory_proj` (d → k, v) for the encoder's. The cache holds
    keys and values with all heads side by side, (B, 1, S, h·d_k) and (B, 1, S, H·d_k), so that their numbers of heads
    may differ. `ffn_expansion` is ρ, `None` without network and gate. With `head_scaling` queries and keys have
    `base_attention_heads` heads instead of H.
    """

    def __init__(
        self,
        config: PartialFormerConfig,
        name: str,
        heads: int,
        *,
        is_cross_attention: bool,
        ffn_expansion: int | None,
        head_scaling: bool,
    ):
        super().__init__()
        self.config = config
        self.is_causal = False  # the mask of a decoder hides later keys: `PartialFormerStack.run`
        width, project = config.head_dim, projections(config, name, "attention")
        self.heads, self.base = heads, config.base_attention_heads if head_scaling else heads
        self.scaling, self.dropout = width**-0.5, config.attention_dropout
        query = key = self.base * width
        value = heads * width
        gate = 0 if ffn_expansion is None else value
        self.is_cross_attention = is_cross_attention
        if is_cross_attention:
            self.parts, self.memory_parts = [query, gate], [key, value]
            self.query_proj = joint_projection(project, "query_proj", config.d_model, self.parts, OPEN_GATE)
            self.memory_proj = joint_projection(project, "memory_proj", config.d_model, self.memory_parts)
        else:
            self.parts = [query, key, value, gate]
            self.in_proj = joint_projection(project, "in_proj", config.d_model, self.parts, OPEN_GATE)
        self.out_proj = project("out_proj", value, config.d_model)

        self.expand = self.mix = None
        if head_scaling:
            self.expand, self.mix = HeadLinear(self.base, heads), HeadLinear(heads, heads)
            # All heads start as copies of base heads: logits pass the ReLU between the two as they are.
            set_initializer(self.expand, partial(draw_copies, bias=WITHIN_RELU))
            set_initializer(self.mix, partial(draw_copies, bias=-WITHIN_RELU))
        self.has_ffn = ffn_expansion is not None
        if self.has_ffn:
            ffn = projections(config, name, "ffn")
            add_feed_forward(self, width, ffn_expansion * width, ffn)
            self.fc_gate = ffn("fc_gate", width, ffn_expansion * width) if config.ffn_glu else None
            self.activation, self.gate_activation = ACT2FN[config.activation_function], ACT2FN[config.gate_activation]
            self.activation_dropout, self.ffn_dropout = config.activation_dropout, config.ffn_dropout
            self.ffn_residual = config.ffn_residual

    def forward(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        layer_idx: int | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, T, d) → (B, T, d) and, from eager attention, the weights (B, H, T, S).

        `attention_mask` (B, 1 or H, T, S) is one of `add_mask`, or the sum of A^G and the mask (Eq. 6).
        """
        if self.is_cross_attention:
            query, gate = self.query_proj(hidden_states).split(self.parts, dim=-1)

            def memory() -> tuple[torch.Tensor, ...]:
                return self.memory_proj(key_value_states).unsqueeze(1).split(self.memory_parts, dim=-1)
        else:
            query, *new, gate = self.in_proj(hidden_states).split(self.parts, dim=-1)

            def memory() -> tuple[torch.Tensor, ...]:
                return new[0].unsqueeze(1), new[1].unsqueeze(1)

        keys, values = cached_states(past_key_values, layer_idx, self.is_cross_attention, memory)
        query, keys = split_heads(query, self.base), split_heads(keys.squeeze(1), self.base)
        values = split_heads(values.squeeze(1), self.heads)
        if self.expand is None:
            share = self.dropout if self.training else 0.0
            states, weights = find_attention(self.config)(
                self, query, keys, values, attention_mask, dropout=share, scaling=self.scaling, **kwargs
            )
        else:  # a matrix over the heads comes between product and softmax, so that no kernel has both
            logits = self._scale_heads(torch.matmul(query * self.scaling, keys.transpose(2, 3)))
            weights = apply_dropout(attention_weights(logits, attention_mask), self.dropout, self.training)
            states = torch.matmul(weights, values).transpose(1, 2)
        if self.has_ffn:
            states = self._feed_forward(states) * self.gate_activation(gate).view(states.shape)
        return self.out_proj(states.flatten(2)), weights

    def _scale_heads(self, logits: torch.Tensor) -> torch.Tensor:
        """Attention maps of h heads to those of H (§3.4): (B, h, T, S) → (B, H, T, S)."""
        flat = logits.flatten(2)
        return self.mix(self.expand(flat).relu()).unflatten(2, logits.shape[2:])

    def _feed_forward(self, states: torch.Tensor) -> torch.Tensor:
        """One network for every head (Eq. 4 and 5): (…, d_k) → (…, d_k)."""
        inner = self.activation(self.fc1(states) if self.fc_gate is None else self.fc_gate(states))
        if self.fc_gate is not None:
            inner = inner * self.fc1(states)
        output = self.fc2(apply_dropout(inner, self.activation_dropout, self.training))
        output = apply_dropout(output, self.ffn_dropout, self.training)
        return states + output if self.ffn_residual else output


class GlobalAttention(nn.Module):
    """A^G of Eq. 6, once for a stack: logits of H heads over the embeddings, neither masked nor normalised.

    With `relative`, a trained vector a distance is added to the keys (Shaw et al. 2018, Eq. 4).
    """

    def __init__(self, config: PartialFormerConfig, stack: str):
        super().__init__()
        self.heads, width = getattr(config, f"{stack}_attention_heads"), config.head_dim
        self.scaling = width**-0.5
        self.parts = [self.heads * width] * 2
        self.layer_norm = nn.LayerNorm(config.d_model)
        project = projections(config, f"{stack}.global_attention", "attention")
        self.in_proj = joint_projection(project, "in_proj", config.d_model, self.parts)
        self.furthest = config.max_relative_position
        self.distances = None
        if config.global_attention == "relative":
            self.distances = Distances(2 * self.furthest + 1, width)
            set_initializer(self.distances, partial(draw_matrix, std=xavier_std(2 * self.furthest + 1, width)))

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None = None,
        layer_idx: int | None = None,
    ) -> torch.Tensor:
        """Embeddings (B, T, d) and mask (B, 1, T, S) → A^G and mask in one sum (B, H, T, S), for every layer."""
        query, key = self.in_proj(self.layer_norm(hidden_states)).split(self.parts, dim=-1)
        query = split_heads(query * self.scaling, self.heads)
        if self.distances is not None:
            positions = torch.arange(query.shape[2], device=query.device)
            if past_key_values is not None:  # before the update: a static cache counts in place
                positions = positions + past_key_values.get_seq_length(layer_idx)
        # The slot has keys alone: its values have no width.
        key = key.unsqueeze(1)
        key, _ = cached_states(past_key_values, layer_idx, False, lambda: (key, key[..., :0]))
        key = split_heads(key.squeeze(1), self.heads)
        logits = torch.matmul(query, key.transpose(2, 3))
        if self.distances is not None:
            logits = logits + self._relative(query, positions, key.shape[2])
        return add_mask(logits, attention_mask)

    def _relative(self, query: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
        """q_i·r_(j−i): queries (B, H, T, d_k) at positions i (T) → (B, H, T, S), for the positions j < S."""
        distance = torch.arange(length, device=query.device) - positions.unsqueeze(-1)
        index = distance.clamp(-self.furthest, self.furthest) + self.furthest
        return self.distances(query).gather(-1, index.expand(*query.shape[:2], -1, -1))


class PartialFormerLayer(TransformerLayer):
    """Pre-norm layer: self-attention, cross-attention in a decoder. Their heads contain the feed-forward networks.

    With the style `vanilla` the layer has a feed-forward network of width 4·d instead (Table 7), and its attention has
    no networks and maybe head scaling.
    """

    def __init__(self, config: PartialFormerConfig, stack: str, index: int):
        name, width = f"{stack}.layers.{index}", config.d_model
        is_partial = getattr(config, f"{stack}_style") == "partial"
        ffn_in, expansion = getattr(config, f"{stack}_ffn_in"), getattr(config, f"{stack}_ffn_expansion")

        def attention(part: str, kind: str) -> nn.Module:
            if not (is_partial or config.vanilla_head_scaling):
                project = projections(config, f"{name}.{part}", "attention")
                is_causal = stack == "decoder" and kind == "self"
                return MultiHeadAttention(config, width, config.base_attention_heads, project, is_causal=is_causal)
            return PartialAttention(
                config,
                f"{name}.{part}",
                getattr(config, f"{stack}_attention_heads"),
                is_cross_attention=kind == "cross",
                ffn_expansion=expansion if is_partial and ffn_in in (kind, "both") else None,
                head_scaling=config.head_scaling or not is_partial,
            )

        has_cross = stack == "decoder" and config.is_encoder_decoder
        cross = attention("encoder_attn", "cross") if has_cross else None
        super().__init__(config, attention("self_attn", "self"), cross, normalize_before=True)
        self.is_partial = is_partial
        if not is_partial:
            add_feed_forward(self, width, 4 * width, projections(config, name, "ffn"))
        add_layer_norms(self, width, has_cross)
        if is_partial:
            self.final_layer_norm = nn.Identity()

    def feed_forward(self, states: torch.Tensor, norm: nn.Module, network: nn.Module) -> torch.Tensor:
        """Return the states unchanged if the networks are inside the heads."""
        return states if self.is_partial else super().feed_forward(states, norm, network)


class PartialFormerPreTrainedModel(FactorizedPreTrainedModel):
    """Initialization, loading and saving of every PartialFormer. Attention is eager or SDPA; A^G is a mask."""

    config_class = PartialFormerConfig
    config: PartialFormerConfig
    _no_split_modules = ["PartialFormerLayer", "GlobalAttention"]  # noqa: RUF012
    _supports_flash_attn = False
    _supports_flex_attn = False


class PartialFormerStack(PartialFormerPreTrainedModel):
    """Embeddings, A^G, layers, final LayerNorm."""

    def __init__(self, config: PartialFormerConfig):
        super().__init__(config)
        stack = self.side
        positions = SinusoidalPositions(config.max_position_embeddings, config.d_model)
        self.add_embeddings(make_embedding(config, stack), positions, config.d_model)
        has_global = config.has_global_attention(stack)
        self.global_attention = GlobalAttention(config, stack) if has_global else None
        layers, groups = getattr(config, f"{stack}_layers"), getattr(config, f"{stack}_groups")
        self.layers = LayerStack(lambda index: PartialFormerLayer(config, stack, index), group_layers(layers, groups))
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
        length = hidden_states.shape[1]
        if attention_mask is None and self.side == "decoder" and length > 1:  # SDPA of other models needs none
            past, places = 0, length
            if past_key_values is not None:  # a static cache has more places than past tokens
                past, places = past_key_values.get_seq_length(), past_key_values.get_mask_sizes(length, 0)[0]
            own, others = (torch.arange(count, device=hidden_states.device) for count in (length, places))
            attention_mask = (others <= own[:, None] + past)[None, None]
        if self.global_attention is not None:
            slot = len(self.layers.stored_at)
            attention_mask = self.global_attention(hidden_states, attention_mask, past_key_values, slot)
        kwargs["past_key_values"] = past_key_values
        for layer, slots in self.layers.by_depth():
            hidden_states = layer(hidden_states, attention_mask, *cross, **slots, **kwargs)
        return self.layer_norm(hidden_states)


class PartialFormerEncoder(EncoderStack, PartialFormerStack):
    """`encoder_layers` depths of bidirectional self-attention."""


class PartialFormerDecoder(DecoderStack, PartialFormerStack):
    """`decoder_layers` depths of causal self-attention, and of cross-attention if `config.is_encoder_decoder`."""


class PartialFormerModel(EncoderDecoder, PartialFormerPreTrainedModel):
    """Encoder and decoder without a head."""

    stack_classes = (PartialFormerEncoder, PartialFormerDecoder)


class PartialFormerForConditionalGeneration(ConditionalGenerationHead, PartialFormerPreTrainedModel, GenerationMixin):
    """PartialFormer for translation and summarization: `AutoModelForSeq2SeqLM`."""

    model_class = PartialFormerModel


class PartialFormerForCausalLM(CausalLMHead, PartialFormerPreTrainedModel, GenerationMixin):
    """The decoder alone, as a causal language model: `AutoModelForCausalLM`. Uses the `decoder_*` fields."""

    decoder_class = PartialFormerDecoder
