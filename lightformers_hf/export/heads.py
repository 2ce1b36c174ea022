"""An attention with heads no wider than their rank: exact, and smaller if its matrices are low-rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .layers import Attention, Expansion

# Singular values of a head's product below this share of the largest are rounding errors of zeros in fp32.
ZERO = 1e-6


@dataclass(frozen=True)
class Heads:
    """The four (matrix, bias) of an attention, fp64, and its d_k."""

    query: tuple[Tensor, Tensor | None]
    key: tuple[Tensor, Tensor | None]
    value: tuple[Tensor, Tensor | None]
    output: tuple[Tensor, Tensor | None]
    head_dim: int

    @property
    def parameters(self) -> int:
        """Number of parameters of the matrices."""
        return sum(matrix.numel() for matrix, _ in (self.query, self.key, self.value, self.output))


def narrow_heads(attention: Attention, expansion: Expansion) -> Heads:
    """An attention's matrices, expanded, with heads no wider than the rank of their products.

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
    wide = Heads(query, key, value, output, attention.head_dim)
    if attention.output is None or all(linear.is_dense for linear in (*attention.inputs, attention.output)):
        return wide

    H = attention.heads
    with_bias = torch.cat([query[0], bias_or_zero(query)[None]])
    scores = [_split(q, k) for q, k in zip(with_bias.chunk(H, dim=1), key[0].chunk(H, dim=1), strict=True)]
    values = [_split(v, o.T) for v, o in zip(value[0].chunk(H, dim=1), output[0].chunk(H), strict=True)]
    width = max(int((s > ZERO * s[0]).sum()) for _, s, _ in scores + values)
    if width >= attention.head_dim:
        return wide

    def side(products: list[tuple[Tensor, Tensor, Tensor]], index: int) -> Tensor:
        return torch.cat([product[index][:, :width] * product[1][:width].sqrt() for product in products], dim=1)

    queries = side(scores, 0)
    narrow = Heads(
        (queries[:-1], queries[-1]),
        (side(scores, 2), None),
        (side(values, 0), None),
        (side(values, 2).T, bias_or_zero(output) + bias_or_zero(value) @ output[0]),
        width,
    )
    expansion.narrow(attention, wide.parameters - narrow.parameters)
    return narrow


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
