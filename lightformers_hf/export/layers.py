"""A LightFormer as exporters read it: the matrices of each depth, shared or not, low-rank or not.

Symbols: a weight is m×n with y = x·W + b, d is `d_model`, H the number of heads, d_k the width of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..matrices import bias_of, factors_of
from ..models.layers import RelativePositions
from ..models.modeling_lightformer import LightFormerForConditionalGeneration


@dataclass(frozen=True)
class Linear:
    """One linear layer at one depth: y = x·W₁·W₂… + b.

    Attributes:
        factors: (W,) where it is dense, (U, V) where it is factorized.
        bias: b (n), or `None`.
        stored: the stored matrices; by default the factors themselves.
    """

    factors: tuple[Tensor, ...]
    bias: Tensor | None
    stored: tuple[Tensor, ...] = ()

    @property
    def is_dense(self) -> bool:
        return len(self.factors) == 1

    @property
    def parameters(self) -> int:
        """Number of stored values, without the bias."""
        return sum(tensor.numel() for tensor in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored matrices."""
        return self.stored or self.factors

    @property
    def out_features(self) -> int:
        return self.factors[-1].shape[1]

    def product(self) -> Tensor:
        """The one matrix W, m×n, in fp64: a product in fp32 would lose digits that a dense layer keeps."""
        factors = [factor.double() for factor in self.factors]
        return torch.linalg.multi_dot(factors) if len(factors) > 1 else factors[0]


@dataclass(frozen=True)
class Attention:
    """Attention at one depth.

    Attributes:
        inputs: the projections of queries, keys and values, or one for all three.
        output: the projection of the heads' outputs; `None` where there is none.
        heads, head_dim: H and d_k.
        scale: factor of q·k.
    """

    inputs: tuple[Linear, ...]
    output: Linear | None
    heads: int
    head_dim: int
    scale: float


@dataclass
class Expansion:
    """Matrices that were expanded because an engine does not support them, and their numbers before and after.

    Shared matrices count once, as they are stored. `encoder_table` are the numbers of the encoder's token
    table where it is among them.
    """

    matrices: int = 0
    parameters_before: int = 0
    parameters_after: int = 0
    narrowed_attentions: int = 0
    encoder_table: int = 0
    _seen: set = field(default_factory=set)

    def multiply(self, linear: Linear) -> Tensor:
        """The one matrix of a layer (m×n, fp64); one that is stored otherwise is counted."""
        matrix = linear.product()
        if not linear.is_dense or linear.parameters < matrix.numel():
            self._count(linear, matrix.numel())
        return matrix

    def write(self, linear: Linear) -> None:
        """Count a layer that is written factor by factor, if those take more than what is stored."""
        factors = sum(factor.numel() for factor in linear.factors)
        if linear.parameters < factors:
            self._count(linear, factors)

    def _count(self, linear: Linear, parameters: int) -> None:
        if self._is_new(linear):
            self.matrices += 1
            self.parameters_before += linear.parameters
            self.parameters_after += parameters

    def narrow(self, attention: Attention, spared: int) -> None:
        """Count an attention whose matrices need `spared` numbers less than when expanded."""
        if self._is_new(*attention.inputs):
            self.narrowed_attentions += 1
            self.parameters_after -= spared

    def _is_new(self, *linears: Linear) -> bool:
        place = tuple(tensor.data_ptr() for linear in linears for tensor in linear.tensors)
        is_new = place not in self._seen
        self._seen.add(place)
        return is_new


@dataclass(frozen=True)
class Norm:
    """A LayerNorm, or an RMSNorm, whose bias is `None`."""

    weight: Tensor
    bias: Tensor | None
    epsilon: float


@dataclass(frozen=True)
class Biases:
    """Biases of the scores of H heads by relative positions.

    Attributes:
        table: buckets×H, as the model stores it.
        furthest: F, the distance from which all are equal.
        by_distance: (2F+1)×H, of keys from F places before the query to F places behind it.
    """

    table: Tensor
    furthest: int
    by_distance: Tensor


@dataclass(frozen=True)
class Layer:
    """One depth. `cross` is `None` in an encoder, `gate` in a network without one.

    `cross_source` is the first depth whose cross-attention has the same keys and values, which are then made once.
    """

    attention: Attention
    attention_norm: Norm
    biases: Biases | None
    cross: Attention | None
    cross_norm: Norm | None
    cross_source: int
    gate: Linear | None
    fc1: Linear
    fc2: Linear
    ffn_norm: Norm


@dataclass(frozen=True)
class Stack:
    """Encoder or decoder. `positions` is the table from position 0 on, `None` where positions are relative; norms that
    the model lacks are `None`."""

    embedding: Linear
    scale: float
    positions: Tensor | None
    embedding_norm: Norm | None
    layers: tuple[Layer, ...]
    final_norm: Norm | None

    @property
    def linears(self) -> Iterator[Linear]:
        """The linear layers of all depths."""
        for layer in self.layers:
            for attention in filter(None, (layer.attention, layer.cross)):
                yield from attention.inputs
                if attention.output is not None:
                    yield attention.output
            yield from filter(None, (layer.gate, layer.fc1, layer.fc2))


def read_linear(module: nn.Module) -> Linear:
    """A dense or low-rank layer of the model."""
    stored = tuple(tensor for tensor in module.parameters() if tensor.dim() > 1)
    return Linear(factors_of(module), bias_of(module), stored)


def read_table(table: nn.Module) -> Linear:
    """A token table (V×d) as the matrix that one-hot rows are multiplied by."""
    return Linear(factors_of(table), None)


def read_output(model: LightFormerForConditionalGeneration) -> Linear:
    """The output layer (d×V) with the fixed bias of the logits, `None` where that is zero."""
    bias = model.final_logits_bias.flatten() if model.final_logits_bias is not None else None
    bias = bias if bias is not None and bias.any() else None
    factors = factors_of(model.lm_head)  # V×d
    return Linear(tuple(factor.T for factor in reversed(factors)), bias)


def read_stack(stack: nn.Module) -> Stack:
    """The layers of a stack of the model, depth by depth."""
    layers: list[Layer] = []
    for depth, (layer, slots) in enumerate(stack.layers.by_depth()):
        own = None if stack.depths is None else stack.depths[depth]
        norms = layer if hasattr(layer, "final_layer_norm") else own
        has_cross = hasattr(layer, "encoder_attn")
        gate, fc1, fc2 = (
            read_linear(getattr(layer, name)) if hasattr(layer, name) else None for name in ("fc_gate", "fc1", "fc2")
        )
        layers.append(
            Layer(
                _attention(layer.self_attn),
                _norm(norms.self_attn_layer_norm),
                _biases(stack.relative_positions or getattr(layer, "relative_positions", None)),
                _attention(layer.encoder_attn) if has_cross else None,
                _norm(norms.encoder_attn_layer_norm) if has_cross else None,
                slots["cross_layer_idx"],
                gate,
                fc1,
                fc2,
                _norm(norms.final_layer_norm),
            )
        )
    return Stack(
        read_table(stack.embed_tokens),
        float(stack.embed_scale),
        _positions(stack.embed_positions),
        _norm(stack.layernorm_embedding),
        tuple(layers),
        _norm(stack.layer_norm),
    )


def _attention(module: nn.Module) -> Attention:
    names = ("qkv_proj",) if module.joint_qkv else ("q_proj", "k_proj", "v_proj")
    inputs = tuple(read_linear(getattr(module, name)) for name in names)
    inner = sum(linear.out_features for linear in inputs) // 3
    has_output = not isinstance(module.out_proj, nn.Identity)
    return Attention(
        inputs,
        read_linear(module.out_proj) if has_output else None,
        inner // module.head_dim,
        module.head_dim,
        module.scaling,
    )


def _positions(module: nn.Module | None) -> Tensor | None:
    if module is None:
        return None
    return (module.weight if hasattr(module, "weight") else module.table)[module.offset :]


def _biases(module: RelativePositions | None) -> Biases | None:
    if module is None:
        return None
    distances = torch.arange(-module.furthest, module.furthest + 1)
    return Biases(module.weight, module.furthest, module.weight[module.find_buckets(distances)])


def _norm(module: nn.Module) -> Norm | None:
    if isinstance(module, nn.Identity):
        return None
    return Norm(module.weight, getattr(module, "bias", None), module.eps)
