"""Attention of PartialFormer: feed-forward networks and gates inside heads (§3.2), head scaling (§3.4), A^G (§3.3).

Shapes: B batch, T and S lengths, d `d_model`, d_k `head_dim`, H heads, h heads of queries and keys (`base`), ρ the
expansion of the heads' feed-forward network.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache

from .attention import cached_states
from .configuration_partialformer import PartialFormerConfig
from .matrices import Projection, WeightLayer, projections
from .starts import draw, draw_copies, draw_parts, set_start, xavier_std
from .transformer_layer import add_feed_forward, drop

# Bias with which gates start, open, and above which attention logits pass a ReLU unchanged.
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
    """A trained vector a distance, of which queries (…, d_k) want their products: (…, distances)."""

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        return torch.matmul(query, self.weight.T)


def joint_projection(
    project: Projection, name: str, in_features: int, parts: list[int], last_bias: float = 0.0
) -> nn.Module:
    """One matrix that holds several side by side, of the widths `parts`; the last one's bias starts at `last_bias`."""
    joint = project(name, in_features, sum(parts))
    set_start(joint, partial(draw_parts, m=in_features, parts=parts, last_bias=last_bias))
    return joint


class PartialAttention(nn.Module):
    """Attention whose heads have a feed-forward network and a gate: AFFN (§3.2, Figure 2c).

    What is made of the same states is one matrix: `in_proj` (d → q, k, v, gate) in self-attention, in cross-attention
    `query_proj` (d → q, gate) for the decoder's states and `memory_proj` (d → k, v) for the encoder's. The cache holds
    keys and values with all heads side by side, (B, 1, S, h·d_k) and (B, 1, S, H·d_k), so that their numbers of heads
    may differ.

    Args:
        config: gives d, d_k, and what the heads' network looks like.
        name: of the module, for `rank_pattern`.
        heads: H.
        ffn_expansion: ρ; `None` for attention without feed-forward network and gate.
        head_scaling: whether queries and keys have `base_attention_heads` heads instead of H.
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
            set_start(self.expand, partial(draw_copies, bias=WITHIN_RELU))
            set_start(self.mix, partial(draw_copies, bias=-WITHIN_RELU))
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
        """(B, T, d) → (B, T, d) and the weights (B, H, T, S).

        `attention_mask` (B, 1 or H, T, S) is added to the logits: masks and A^G alike (Eq. 6).
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
        query, keys = split_heads(query * self.scaling, self.base), split_heads(keys.squeeze(1), self.base)
        logits = torch.matmul(query, keys.transpose(2, 3))
        if self.expand is not None:
            logits = self._scale_heads(logits)
        if attention_mask is not None:
            logits = logits + attention_mask
        precision = torch.promote_types(logits.dtype, torch.float32)
        weights = nn.functional.softmax(logits, dim=-1, dtype=precision).to(query.dtype)
        weights = drop(weights, self.dropout, self.training)
        states = torch.matmul(weights, split_heads(values.squeeze(1), self.heads)).transpose(1, 2)
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
        output = self.fc2(drop(inner, self.activation_dropout, self.training))
        output = drop(output, self.ffn_dropout, self.training)
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
            set_start(self.distances, partial(draw, std=xavier_std(2 * self.furthest + 1, width)))

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
        return logits if attention_mask is None else logits + attention_mask

    def _relative(self, query: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
        """q_i·r_(j−i): queries (B, H, T, d_k) at positions i (T) → (B, H, T, S), for the positions j < S."""
        distance = torch.arange(length, device=query.device) - positions.unsqueeze(-1)
        index = distance.clamp(-self.furthest, self.furthest) + self.furthest
        return self.distances(query).gather(-1, index.expand(*query.shape[:2], -1, -1))
