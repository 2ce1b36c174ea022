"""A stack's layers without the modules around them: the same operations on the same weights, in less time.

A token of a factorized model is some hundred products of microseconds each. Calling the modules that hold their
weights takes as long as the products, so that a model with a quarter of the arithmetic is not four times as fast.
Here weights are looked up at every call and nothing is kept: what is trained, moved or replaced is seen at once, and a
module that does more than its class says (a hook, an adapter, an offloaded weight) sends all back to the usual way.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import layer_norm, linear, rms_norm, scaled_dot_product_attention
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention import MultiHeadAttention, cached_states
from .configuration_base import FactorizedConfig
from .torch_internals import is_plain, parts_of, weights_of
from .transformer_layer import RMSNorm, TransformerLayer
from .transformers_internals import attention_of

# Functions with weights and biases that follow each other: `linear` of a dense layer, twice of a low-rank one.
Chain = tuple[tuple[Callable[..., torch.Tensor], torch.Tensor, torch.Tensor | None], ...]

# A function of states, and its other arguments.
Norm = tuple[Callable[..., torch.Tensor], tuple]


class NotPlainError(Exception):
    """A module is of another class than expected, drops out, or something is attached to it."""


class Product(NamedTuple):
    """x ↦ x·W + b of a projection, and maybe the residual of the depth. Shapes: (…, m) → (…, n)."""

    chain: Chain
    residual: Chain | None

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        output = _apply(self.chain, states)
        return output if self.residual is None else output + _apply(self.residual, states)


def _apply(chain: Chain, states: torch.Tensor) -> torch.Tensor:
    for compute, weight, bias in chain:
        states = compute(states, weight, bias)
    return states


def _chain(module: nn.Module) -> Chain:
    kind = type(module)
    if not is_plain(module):
        raise NotPlainError
    # What a class says of itself says nothing of one derived from it.
    compute = linear if kind is nn.Linear else kind.__dict__.get("compute")
    if compute is not None:
        weights = weights_of(module)
        return ((compute, weights["weight"], weights["bias"]),)
    names = () if kind is nn.Identity else kind.__dict__.get("in_series")
    if names is None:
        raise NotPlainError
    chain: tuple[tuple, ...] = ()
    parts = parts_of(module)
    for name in names:
        chain += _chain(parts[name])
    return chain


def _product(owner: nn.Module, name: str, residuals: nn.Module | None) -> Product:
    residual = None if residuals is None else parts_of(residuals).get(name)
    return Product(_chain(parts_of(owner)[name]), None if residual is None else _chain(residual))


class FastAttention:
    """What a `MultiHeadAttention` computes with SDPA, on rows instead of sentences: (B·T, d) → (B·T, d)."""

    def __init__(self, attention: nn.Module, residuals: nn.Module | None):
        if type(attention) is not MultiHeadAttention or attention.training or not is_plain(attention):
            raise NotPlainError
        names = ("qkv_proj",) if attention.joint_qkv else ("q_proj", "k_proj", "v_proj")
        self.projections = [_product(attention, name, residuals) for name in names]
        self.out = _product(attention, "out_proj", residuals)
        self.head_dim, self.scaling, self.joint_qkv = attention.head_dim, attention.scaling, attention.joint_qkv
        self.is_causal = attention.is_causal

    def __call__(
        self,
        rows: torch.Tensor,
        sentences: int,
        mask: torch.Tensor | None,
        past_key_values: Cache | None,
        slot: int,
        encoder_hidden_states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`rows` are those of so many sentences, `slot` is that of the cache; with encoder states (B, S, d) this is
        cross-attention."""

        def heads(states: torch.Tensor) -> torch.Tensor:
            return states.view(sentences, -1, states.shape[-1] // self.head_dim, self.head_dim).transpose(1, 2)

        if self.joint_qkv:
            query, key, value = (heads(part) for part in self.projections[0](rows).chunk(3, dim=-1))
            key, value = cached_states(past_key_values, slot, False, lambda: (key, value))
        else:
            project_query, project_key, project_value = self.projections
            query = heads(project_query(rows))
            is_cross_attention = encoder_hidden_states is not None
            source = encoder_hidden_states if is_cross_attention else rows
            key, value = cached_states(
                past_key_values,
                slot,
                is_cross_attention,
                lambda: (heads(project_key(source)), heads(project_value(source))),
            )
        is_causal = self.is_causal and mask is None and query.shape[2] > 1
        output = scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=self.scaling)
        return self.out(output.transpose(1, 2).reshape(len(rows), -1))


def _norm(module: nn.Module) -> Norm:
    if not is_plain(module):
        raise NotPlainError
    weights, shape = weights_of(module), module.normalized_shape
    if type(module) is nn.LayerNorm:
        return layer_norm, (shape, weights["weight"], weights["bias"], module.eps)
    if type(module) is RMSNorm:
        return rms_norm, (shape, weights["weight"], module.eps)
    raise NotPlainError


class FastLayer:
    """What a `TransformerLayer` computes in evaluation mode, on rows: (B·T, d) → (B·T, d)."""

    def __init__(self, layer: TransformerLayer, own: nn.Module | None):
        if layer.training or not is_plain(layer):
            raise NotPlainError
        parts, depth = parts_of(layer), {} if own is None else parts_of(own)
        residuals = depth.get("residuals")
        of_part = {} if residuals is None else parts_of(residuals)
        norms = parts if "final_layer_norm" in parts else depth
        self.self_attention = FastAttention(parts["self_attn"], of_part.get("self_attn"))
        self.self_norm = _norm(norms["self_attn_layer_norm"])
        if "encoder_attn" in parts:
            self.cross_attention = FastAttention(parts["encoder_attn"], of_part.get("encoder_attn"))
            self.cross_norm = _norm(norms["encoder_attn_layer_norm"])
        ffn = layer if "fc1" in parts else own
        self.fc1, self.fc2 = (_product(ffn, name, residuals) for name in ("fc1", "fc2"))
        self.fc_gate = _product(ffn, "fc_gate", residuals) if "fc_gate" in parts_of(ffn) else None
        self.ffn_norm = _norm(norms["final_layer_norm"])
        self.activation, self.normalize_before = layer.activation, layer.normalize_before
        self.relative_positions = parts.get("relative_positions")

    def add_positions(self, mask: torch.Tensor | None, distances: torch.Tensor | None) -> torch.Tensor | None:
        """The mask of self-attention with the layer's own biases in it, where it has some."""
        return mask if distances is None else self.relative_positions(distances, mask)

    def __call__(
        self,
        rows: torch.Tensor,
        sentences: int,
        mask: torch.Tensor | None,
        encoder_hidden_states: torch.Tensor | None,
        encoder_mask: torch.Tensor | None,
        past_key_values: Cache | None,
        layer_idx: int,
        cross_layer_idx: int,
    ) -> torch.Tensor:
        """Arguments as those of `TransformerLayer`, but `rows` for `sentences`."""

        def feed_forward(states: torch.Tensor) -> torch.Tensor:
            if self.fc_gate is not None:
                return self.fc2(self.activation(self.fc_gate(states)) * self.fc1(states))
            return self.fc2(self.activation(self.fc1(states)))

        def self_attention(states: torch.Tensor) -> torch.Tensor:
            return self.self_attention(states, sentences, mask, past_key_values, layer_idx)

        def cross_attention(states: torch.Tensor) -> torch.Tensor:
            cross = encoder_mask, past_key_values, cross_layer_idx, encoder_hidden_states
            return self.cross_attention(states, sentences, *cross)

        rows = self._sublayer(rows, self.self_norm, self_attention)
        if encoder_hidden_states is not None:
            rows = self._sublayer(rows, self.cross_norm, cross_attention)
        return self._sublayer(rows, self.ffn_norm, feed_forward)

    def _sublayer(
        self, rows: torch.Tensor, norm: Norm, compute: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        normalize, arguments = norm
        if self.normalize_before:
            return rows + compute(normalize(rows, *arguments))
        return normalize(rows + compute(rows), *arguments)


def run_layers_fast(
    depths: Iterable[tuple[TransformerLayer, dict]],
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None,
    encoder_hidden_states: torch.Tensor | None = None,
    encoder_attention_mask: torch.Tensor | None = None,
    *,
    config: FactorizedConfig,
    layer_class: type[TransformerLayer],
    past_key_values: Cache | None = None,
    use_cache: bool | None = None,
    distances: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor | None:
    """Apply a stack's layers, (B, T, d) → (B, T, d); `None` where that takes the modules themselves.

    It does with gradients, when compiled or exported, with an attention other than SDPA, in fp16, and where a module
    is not plain; dropout counts as that.

    Args:
        depths: layer and own arguments (`own`, `layer_idx`, `cross_layer_idx`) of every depth.
        layer_class: the layers are of exactly this class, whose `forward` is that of `TransformerLayer`.
        use_cache, distances, others: arguments of the layers; `others` are for their modules, once they are set.
    """
    if (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or hidden_states.dtype == torch.float16
        or any(value is not None and value is not False for value in others.values())
        or attention_of(config) != "sdpa"
        or ALL_ATTENTION_FUNCTIONS["sdpa"] is not sdpa_attention_forward
    ):
        return None
    built: dict[tuple[int, int], FastLayer] = {}
    try:
        calls: list[tuple[FastLayer, tuple[int, int]]] = []
        for layer, arguments in depths:
            if type(layer) is not layer_class:
                return None
            own, slots = arguments["own"], (arguments["layer_idx"], arguments["cross_layer_idx"])
            key = id(layer), id(own)
            if key not in built:
                built[key] = FastLayer(layer, own)
            calls.append((built[key], slots))
    except NotPlainError:
        return None
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    for fast, slots in calls:
        rows = fast(
            rows,
            len(hidden_states),
            fast.add_positions(attention_mask, distances),
            encoder_hidden_states,
            encoder_attention_mask,
            past_key_values,
            *slots,
        )
    return rows.view(hidden_states.shape)
