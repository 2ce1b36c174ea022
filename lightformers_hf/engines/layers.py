"""A checkpoint as exporters read it: the matrices of each depth, shared or not, low-rank or not.

Symbols: a weight is m×n with y = x·W + b, d is `d_model`, H the number of heads, d_k the width of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.families import OwnFamily, all_families
from ..checkpoints.teacher import Teacher, read
from ..in_memory import AnyModel, AnyTokenizer, check_tokenizer_of, model_name
from ..matrices import Weight
from ..models.configuration_lightformer import RELATIVE_POSITIONS
from ..models.layers import RelativePositions
from ..models.modeling_lightformer import LightFormerForConditionalGeneration
from ..models.modeling_lightformer_speech import LightFormerForSpeechSeq2Seq
from ..speech import reads_sound
from .search import Search

# Singular values of a head's product below this share of the largest are rounding errors of zeros in fp32.
ZERO = 1e-6


@dataclass(frozen=True, eq=False)
class Source(Teacher):
    """A model to export."""

    calibration: tuple[dict[str, Tensor], ...] = ()  # batches of sentences by which matrices are rounded to int4


def model_type(source: Teacher) -> str:
    """`model_type` of the family in transformers whose inputs, tokenizer, or positions, a model has."""
    if reads_sound(source.model.config):
        return "whisper"
    if source.model.config.position_embedding_type in RELATIVE_POSITIONS:
        return "t5"
    kind = type(source.tokenizer).__name__.removesuffix("Fast")
    # Those that optimum and transformers.js have classes for; another one is run as BART.
    return next((name for name, family in all_families().items() if kind in family.tokenizers), "bart")


def read_source(
    model: AnyModel,
    engine: str,
    tokenizer: AnyTokenizer | None = None,
    languages: tuple[str | None, str | None] = (None, None),
) -> Source:
    """Read a LightFormer, or a dense model of a family that this package converts, as the equal LightFormer.

    Raises errors as `checkpoints.teacher.read`; also a `ValueError` for an architecture, a head or options of the
    generation that no engine supports.
    """
    check_tokenizer_of(tokenizer, model)
    source, name = Source(**vars(read(model, tokenizer, languages))), model_name(model)
    source.model.requires_grad_(False)
    if type(source.model) is LightFormerForSpeechSeq2Seq:
        return source
    if type(source.model) is not LightFormerForConditionalGeneration:
        others = (name for name, family in all_families().items() if not issubclass(family, OwnFamily))
        raise ValueError(
            f"{name} holds a {type(source.model).__name__}, which {engine} does not support: exported models "
            f"are LightFormers for text or speech, and the dense models that become one ({', '.join(others)}). "
            "Run it in transformers, or convert its dense teacher and export that."
        )
    try:
        Search.of(source.generation_config)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return source


# --- Layers of a model


@dataclass(frozen=True)
class Attention:
    """Attention at one depth."""

    inputs: tuple[Weight, ...]  # the projections of queries, keys and values, or one for all three
    output: Weight | None  # the projection of the heads' outputs
    heads: int
    head_dim: int
    scale: float  # factor of q·k


@dataclass(frozen=True)
class Biases:
    """Biases of the scores of H heads by relative positions."""

    table: Tensor  # buckets×H, as the model stores it
    furthest: int  # F, the distance from which all are equal
    by_distance: Tensor  # (2F+1)×H, of keys from F places before the query to F places behind it


@dataclass(frozen=True)
class Layer:
    """One depth. `cross` is `None` in an encoder, `gate` in a network without one.

    `cross_source` is the first depth whose cross-attention has the same keys and values, which are then made once.
    Norms are modules, LayerNorms or RMSNorms without a bias.
    """

    attention: Attention
    attention_norm: nn.Module
    biases: Biases | None
    cross: Attention | None
    cross_norm: nn.Module | None
    cross_source: int
    gate: Weight | None
    fc1: Weight
    fc2: Weight
    ffn_norm: nn.Module


@dataclass(frozen=True)
class Stack:
    """Encoder or decoder. `positions` is the table from position 0 on, `None` where positions are relative; norms that
    the model lacks are `None`, and so is the embedding of an encoder that reads sound."""

    embedding: Weight | None
    scale: float
    positions: Tensor | None
    embedding_norm: nn.Module | None
    layers: tuple[Layer, ...]
    final_norm: nn.Module | None

    @property
    def linears(self) -> Iterator[Weight]:
        """The linear layers of all depths."""
        for layer in self.layers:
            for attention in filter(None, (layer.attention, layer.cross)):
                yield from filter(None, (*attention.inputs, attention.output))
            yield from filter(None, (layer.gate, layer.fc1, layer.fc2))


def read_output(model: LightFormerForConditionalGeneration) -> Weight:
    """The output layer (d×V) with the fixed bias of the logits, `None` where that is zero."""
    bias = model.final_logits_bias.flatten() if model.final_logits_bias is not None else None
    bias = bias if bias is not None and bias.any() else None
    return replace(Weight.of(model.lm_head).transpose(), bias=bias)


def read_stack(stack: nn.Module) -> Stack:
    """The layers of a stack of the model, depth by depth."""
    layers: list[Layer] = []
    for depth, (layer, slots) in enumerate(stack.layers.by_depth()):
        own = None if stack.depths is None else stack.depths[depth]
        norms: Any = layer if hasattr(layer, "final_layer_norm") else own
        has_cross = hasattr(layer, "encoder_attn")
        layers.append(
            Layer(
                _attention(layer.self_attn),
                norms.self_attn_layer_norm,
                _biases(stack.relative_positions or getattr(layer, "relative_positions", None)),
                _attention(layer.encoder_attn) if has_cross else None,
                norms.encoder_attn_layer_norm if has_cross else None,
                slots["cross_layer_idx"],
                Weight.of(layer.fc_gate) if hasattr(layer, "fc_gate") else None,
                Weight.of(layer.fc1),
                Weight.of(layer.fc2),
                norms.final_layer_norm,
            )
        )
    table, places = getattr(stack, "embed_tokens", None), stack.embed_positions
    embedding = None if table is None else Weight.of(table)
    if places is not None:
        places = (places.weight if hasattr(places, "weight") else places.table)[places.offset :]
    first, last = (
        None if isinstance(norm, nn.Identity) else norm for norm in (stack.layernorm_embedding, stack.layer_norm)
    )
    return Stack(embedding, float(stack.embed_scale), places, first, tuple(layers), last)


def _attention(module: nn.Module) -> Attention:
    names = ("qkv_proj",) if module.joint_qkv else ("q_proj", "k_proj", "v_proj")
    inputs = tuple(Weight.of(getattr(module, name)) for name in names)
    heads = sum(linear.factors[-1].shape[1] for linear in inputs) // 3 // module.head_dim
    output = None if isinstance(module.out_proj, nn.Identity) else Weight.of(module.out_proj)
    return Attention(inputs, output, heads, module.head_dim, module.scaling)


def _biases(module: RelativePositions | None) -> Biases | None:
    if module is None:
        return None
    distances = torch.arange(-module.furthest, module.furthest + 1)
    return Biases(module.weight, module.furthest, module.weight[module.find_buckets(distances)])


# --- Matrices that an engine does not support


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

    def multiply(self, linear: Weight) -> Tensor:
        """The one matrix of a layer (m×n, fp64); one that is stored otherwise is counted."""
        matrix = linear.product(torch.float64)
        if not linear.is_dense or linear.parameters < matrix.numel():
            self._count(linear, matrix.numel())
        return matrix

    def write(self, linear: Weight) -> None:
        """Count a layer that is written factor by factor, if those take more than what is stored."""
        factors = sum(factor.numel() for factor in linear.factors)
        if linear.parameters < factors:
            self._count(linear, factors)

    def _count(self, linear: Weight, parameters: int) -> None:
        if self._is_new(linear):
            self.matrices += 1
            self.parameters_before += linear.parameters
            self.parameters_after += parameters

    def narrow(self, attention: Attention, spared: int) -> None:
        """Count an attention whose matrices need `spared` numbers less than when expanded."""
        if self._is_new(*attention.inputs):
            self.narrowed_attentions += 1
            self.parameters_after -= spared

    def _is_new(self, *linears: Weight) -> bool:
        key = tuple(tensor.data_ptr() for linear in linears for tensor in linear.tensors)
        is_new = key not in self._seen
        self._seen.add(key)
        return is_new


def narrow_heads(attention: Attention, expansion: Expansion) -> tuple[list[tuple[Tensor, Tensor | None]], int]:
    """(Matrix, bias) of queries, keys, values and output, in fp64, and d_k, no wider than the rank of the products.

    Exact: q·k = (x·W_Q + b_Q)·(y·W_K)ᵀ up to a term that is equal for every y, which softmax ignores. The weights
    of the values add to 1, so that b_V·W_O goes to the output's bias. Each product is split evenly, √Σ to either side.
    """
    parts = []
    for linear in attention.inputs:
        matrix, count = expansion.multiply(linear), 3 if len(attention.inputs) == 1 else 1
        biases = [None] * count if linear.bias is None else linear.bias.double().chunk(count)
        parts += zip(matrix.chunk(count, dim=1), biases, strict=True)
    query, key, value = parts
    if attention.output is None:
        output = (torch.eye(value[0].shape[1], dtype=torch.float64), None)
    else:
        bias = attention.output.bias
        output = (expansion.multiply(attention.output), None if bias is None else bias.double())
    wide = [query, key, value, output]
    if attention.output is None or all(linear.is_dense for linear in (*attention.inputs, attention.output)):
        return wide, attention.head_dim

    H = attention.heads
    with_bias = torch.cat([query[0], bias_or_zero(query)[None]])
    scores = [_split(q, k) for q, k in zip(with_bias.chunk(H, dim=1), key[0].chunk(H, dim=1), strict=True)]
    values = [_split(v, o.T) for v, o in zip(value[0].chunk(H, dim=1), output[0].chunk(H), strict=True)]
    width = max(int((s > ZERO * s[0]).sum()) for _, s, _ in scores + values)
    if width >= attention.head_dim:
        return wide, attention.head_dim

    def side(products: list[tuple[Tensor, Tensor, Tensor]], index: int) -> Tensor:
        return torch.cat([product[index][:, :width] * product[1][:width].sqrt() for product in products], dim=1)

    queries, bias = side(scores, 0), bias_or_zero(output) + bias_or_zero(value) @ output[0]
    narrow = [(queries[:-1], queries[-1]), (side(scores, 2), None), (side(values, 0), None), (side(values, 2).T, bias)]
    before, after = (sum(matrix.numel() for matrix, _ in heads) for heads in (wide, narrow))
    expansion.narrow(attention, before - after)
    return narrow, width


def _split(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, σ, V of left·rightᵀ (m×k and n×k): from matrices with as many columns as both have, not from m×n."""
    q1, r1 = torch.linalg.qr(left)
    q2, r2 = torch.linalg.qr(right)
    u, s, vh = torch.linalg.svd(r1 @ r2.T, full_matrices=False)
    return q1 @ u, s, q2 @ vh.T


def bias_or_zero(linear: tuple[Tensor, Tensor | None]) -> Tensor:
    """b of a (matrix, bias), zeros where it has none."""
    matrix, bias = linear
    return matrix.new_zeros(matrix.shape[1]) if bias is None else bias
