"""The layer of Vaswani et al. 2017, over any attention modules and linear layers, whose parts depths may share."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from .configuration_base import FactorizedConfig
from .matrices import Projection


class RMSNorm(nn.RMSNorm):
    """x / √(mean of x² + ε) · w (Zhang and Sennrich 2019): no mean is subtracted, nothing added. (…, d) → (…, d).

    The result has the type of the weight, whatever that of the states: those of fp16 models may be in fp32.
    """

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(states.dtype)
        return nn.functional.rms_norm(states, self.normalized_shape, weight, self.eps).to(self.weight.dtype)


def drop(states: torch.Tensor, share: float, training: bool) -> torch.Tensor:
    """Dropout that is not even called where nothing is dropped: calls are what a generated token's time goes to.

    On a CPU PyTorch draws a number for each element, in one thread: up to a fifth of a training step. Here four
    elements share the 64 bits of one, so that `share` is a multiple of 2⁻¹⁶.
    """
    if not (training and share):
        return states
    cut = round(share * 2**16)
    if states.device.type != "cpu" or cut >= 2**16 or torch.compiler.is_compiling():
        return nn.functional.dropout(states, p=share)
    numbers = torch.empty(math.ceil(states.numel() / 4), dtype=torch.int64).random_(-(2**63), None)
    kept = numbers.view(torch.int16)[: states.numel()].view(states.shape) >= cut - 2**15
    return states * kept.to(states.dtype).mul_(2**16 / (2**16 - cut))


class Dropout(nn.Dropout):
    """`drop` as a module."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return drop(states, self.p, self.training)


def cast_for(layer: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """Return fp16 `states` in fp32 if `layer` is kept in fp32 beside a model in fp16, as T5's is; else unchanged.

    The weight of a quantized layer has another type, or is no parameter. Such a layer takes the states as they are.
    """
    if states.dtype != torch.float16 or torch.is_autocast_enabled(states.device.type):
        return states
    weight = getattr(getattr(layer, "u", layer), "weight", None)
    return states.float() if isinstance(weight, nn.Parameter) and weight.dtype == torch.float32 else states


def add_layer_norms(
    module: nn.Module,
    width: int,
    has_cross_attention: bool,
    norm: Callable[[int], nn.Module] = nn.LayerNorm,
) -> None:
    """Give `module` the norms of a layer of that width, which `norm` builds."""
    module.self_attn_layer_norm = norm(width)
    if has_cross_attention:
        module.encoder_attn_layer_norm = norm(width)
    module.final_layer_norm = norm(width)


def add_feed_forward(module: nn.Module, width: int, ffn_dim: int, project: Projection, *, gated: bool = False) -> None:
    """Give `module` the two linear layers of a feed-forward network, and that of its gate where it has one."""
    if gated:
        module.fc_gate = project("fc_gate", width, ffn_dim)
    module.fc1 = project("fc1", width, ffn_dim)
    module.fc2 = project("fc2", ffn_dim, width)


class Depth(nn.Module):
    """What one depth has for itself where its layer is shared: LayerNorms, and maybe the feed-forward network."""

    def to(self, *args: Any, **kwargs: Any) -> "Depth":
        """Return the module where it is: accelerate moves what a layer is called with, but each part has its own hook.

        A whole model is moved by `_apply` instead.
        """
        return self


class TransformerLayer(GradientCheckpointingLayer):
    """One layer of either stack: self-attention, cross-attention in a decoder, feed-forward network.

    LayerNorms and feed-forward network are attributes of the layer itself (`add_layer_norms`, `add_feed_forward`) or,
    where the layer serves several depths, come with each call in a `Depth`.

    Args:
        config: gives dropout and activation.
        self_attn, encoder_attn: called as `MultiHeadAttention` is.
        normalize_before: LayerNorm before each sublayer, rather than after its residual connection.
    """

    def __init__(
        self,
        config: FactorizedConfig,
        self_attn: nn.Module,
        encoder_attn: nn.Module | None = None,
        *,
        normalize_before: bool,
    ):
        super().__init__()
        self.self_attn = self_attn
        if encoder_attn is not None:
            self.encoder_attn = encoder_attn
        self.normalize_before = normalize_before
        self.dropout = config.dropout
        self.activation = ACT2FN[config.activation_function]
        self.activation_dropout = config.activation_dropout

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        own: nn.Module | None = None,
        past_key_values: Cache | None = None,
        layer_idx: int | None = None,
        cross_layer_idx: int | None = None,
        distances: torch.Tensor | None = None,
        sublayers: slice = slice(None),
        **kwargs: Any,
    ) -> torch.Tensor:
        """(B, T, d) → (B, T, d). `own` is the `Depth` of this call; the others: see `LayerStack.by_depth`.

        With `distances` (T, S), the layer adds the biases of its `relative_positions` to the mask. Where some of its
        `sublayers` are enough, `hidden_states` are what goes into the first of them.
        """
        if distances is not None:
            attention_mask = self.relative_positions(distances, attention_mask)
        norms = self if own is None else own
        ffn = own if own is not None and hasattr(own, "fc1") else self
        kwargs["past_key_values"] = past_key_values

        def self_attention(states: torch.Tensor) -> torch.Tensor:
            return self.self_attn(states, attention_mask=attention_mask, layer_idx=layer_idx, **kwargs)[0]

        def cross_attention(states: torch.Tensor) -> torch.Tensor:
            return self.encoder_attn(
                states,
                key_value_states=encoder_hidden_states,
                attention_mask=encoder_attention_mask,
                layer_idx=cross_layer_idx,
                **kwargs,
            )[0]

        def feed_forward(states: torch.Tensor) -> torch.Tensor:
            gate = getattr(ffn, "fc_gate", None)
            inner = self.activation((gate or ffn.fc1)(states))
            inner = inner if gate is None else inner * ffn.fc1(states)
            inner = drop(inner, self.activation_dropout, self.training)
            return ffn.fc2(cast_for(ffn.fc2, inner))

        steps = [(norms.self_attn_layer_norm, self_attention), (norms.final_layer_norm, feed_forward)]
        if encoder_hidden_states is not None:
            steps.insert(1, (norms.encoder_attn_layer_norm, cross_attention))
        for norm, compute in steps[sublayers]:
            hidden_states = self._sublayer(hidden_states, norm, compute)
        return hidden_states

    def _sublayer(
        self, states: torch.Tensor, norm: nn.Module, compute: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        output = compute(norm(states) if self.normalize_before else states)
        states = states + drop(output, self.dropout, self.training)
        if states.dtype == torch.float16:  # infinity would be NaN after the next norm
            limit = torch.finfo(torch.float16).max - 1000
            states = states.clamp(-limit, limit)
        return states if self.normalize_before else norm(states)
