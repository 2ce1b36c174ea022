"""Multi-head attention over any projections (Vaswani et al. 2017; low-rank ones: LightFormer, Eq. 9)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_base import FactorizedConfig
from .matrices import Projection
from .transformer_layer import drop
from .transformers_internals import attention_of


def eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q·kᵀ·scaling + mask)·v. Shapes: (B, H, T, d_k), (B, H, S, d_k) → (B, T, H, d_k), (B, H, T, S)."""
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        weights = weights + attention_mask
    # Half precision overflows in the sum of exponentials long before fp32 does.
    precision = torch.promote_types(weights.dtype, torch.float32)
    weights = nn.functional.softmax(weights, dim=-1, dtype=precision).to(query.dtype)
    weights = drop(weights, dropout, module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def cached_states(
    past_key_values: Cache | None,
    layer_idx: int | None,
    is_cross_attention: bool,
    compute: Callable[[], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (B, H, S, w) of the cache slot `layer_idx`, after those that `compute` makes have gone there.

    Those of cross-attention are computed once a sentence and kept in their half of an `EncoderDecoderCache`. Without a
    cache: those that `compute` makes.
    """
    if past_key_values is None:
        return compute()
    if not isinstance(past_key_values, EncoderDecoderCache):
        return past_key_values.update(*compute(), layer_idx)
    if not is_cross_attention:
        return past_key_values.self_attention_cache.update(*compute(), layer_idx)
    if past_key_values.is_updated.get(layer_idx):
        slot = past_key_values.cross_attention_cache.layers[layer_idx]
        return slot.keys, slot.values
    past_key_values.is_updated[layer_idx] = True
    return past_key_values.cross_attention_cache.update(*compute(), layer_idx)


class MultiHeadAttention(nn.Module):
    """Attention with H heads of width d_k, whose projections d → H·d_k, and back, come from `project`.

    The cache slot is an argument of the call (`layer_idx`, the depth), never a property of the module: a layer that
    is applied at several depths has one slot for each of them.

    Args:
        config: gives `_attn_implementation` and `attention_dropout`.
        width: d.
        num_heads: H.
        head_dim: d_k; `None` means d/H.
        project: builds a projection from its name and widths.
        is_causal: whether a position sees only those before it. Must be right even where a mask is given, because
            SDPA takes causality from here when there is none.
        joint_qkv: one projection d → 3·H·d_k in place of three (self-attention only; LightFormer Table 1).
        output_projection: whether the heads' outputs are mixed by `out_proj`.
        scale: whether scores are divided by √d_k.
    """

    def __init__(
        self,
        config: FactorizedConfig,
        width: int,
        num_heads: int,
        project: Projection,
        *,
        is_causal: bool,
        head_dim: int | None = None,
        joint_qkv: bool = False,
        output_projection: bool = True,
        scale: bool = True,
    ):
        super().__init__()
        self.config = config
        self.head_dim = head_dim or width // num_heads
        self.scaling = self.head_dim**-0.5 if scale else 1.0
        self.dropout = config.attention_dropout
        self.is_causal = is_causal
        inner = num_heads * self.head_dim
        if joint_qkv:
            self.qkv_proj = project("qkv_proj", width, 3 * inner)
        else:
            self.q_proj = project("q_proj", width, inner)
            self.k_proj = project("k_proj", width, inner)
            self.v_proj = project("v_proj", width, inner)
        self.out_proj = project("out_proj", inner, width) if output_projection else nn.Identity()
        self.joint_qkv = joint_qkv

    def _split_heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.view(*states.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def forward(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        layer_idx: int | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B, T, d) → (B, T, d) and, from eager attention, the weights (B, H, T, S).

        With `key_value_states` (B, S, d) this is cross-attention.
        """
        is_cross_attention = key_value_states is not None

        def compute() -> tuple[torch.Tensor, torch.Tensor]:
            current = key_value_states if is_cross_attention else hidden_states
            return self._split_heads(self.k_proj(current)), self._split_heads(self.v_proj(current))

        if self.joint_qkv:
            parts = self.qkv_proj(hidden_states).chunk(3, dim=-1)
            query, new_key, new_value = (self._split_heads(part) for part in parts)
            key, value = cached_states(past_key_values, layer_idx, False, lambda: (new_key, new_value))
        else:
            query = self._split_heads(self.q_proj(hidden_states))
            key, value = cached_states(past_key_values, layer_idx, is_cross_attention, compute)

        attend = ALL_ATTENTION_FUNCTIONS.get_interface(attention_of(self.config), eager_attention)
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.out_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights
