"""Layers of a group made alike before they are merged.

What a layer computes depends neither on the order of its heads and neurons, nor on the basis inside a head: two layers
that compute the same may have matrices whose mean computes nothing. `align_bases` gives each layer of a group the
order and the bases of the first one, `merge_linear` merges them where their inputs are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from ..linear import Linear
from ..moments import INPUT_DAMPING, damped_root


class Bases(NamedTuple):
    """Other bases for the inputs and outputs of a linear layer, each as `change_basis` takes them."""

    inputs: Tensor | None = None
    outputs: Tensor | None = None

    def of(self, layer: Linear) -> Linear:
        """The layer between them."""
        bias = None if layer.bias is None else change_basis(layer.bias, self.outputs)
        return Linear(change_basis(layer.matrix, self.inputs, self.outputs), bias)


def change_basis(tensor: Tensor, *bases: Tensor | None) -> Tensor:
    """`tensor` with every axis in another orthonormal basis.

    Args:
        bases: one an axis: a matrix whose columns are the new basis, or the old indices in a new order, or `None`.
            E[xᵀx] and E[x] take a `Bases`'s `inputs` for every axis, E[gᵀg] its `outputs`.
    """
    for axis, basis in enumerate(bases):
        if basis is None:
            continue
        if basis.ndim == 1:
            tensor = tensor.index_select(axis, basis)
        else:
            tensor = torch.tensordot(tensor, basis.to(tensor.dtype), dims=([axis], [0])).movedim(-1, axis)
    return tensor


@torch.no_grad()
def align_bases(
    layers: Sequence[Mapping[str, Linear]],
    heads: int,
    moments: Sequence[Mapping[str, Tensor]] | None = None,
    ordered: Collection[str] = (),
) -> list[dict[str, Bases]]:
    """For each layer of a group, bases that bring it near to the first one and leave what it computes as it is.

    Heads are matched by what they compute, W_Q W_Kᵀ and W_V W_O, neurons by what goes in, W_1 and b_1, and what comes
    out, W_2: the assignment of the least sum of squared distances, each kind relative to its size. W_Q and W_K share a
    basis inside each head, and so do W_V and W_O: those are turned by the rotations nearest to the first layer's
    (orthogonal Procrustes problem), because a mean is taken of matrices, not of products.

    Args:
        layers: the linear layers by their names within the layer: `self_attn.q_proj`, …, `fc2`. Others are left alone.
        heads: H of each attention.
        moments: E[xᵀx] of the inputs of every linear layer, for distances between outputs; `None`: between matrices.
        ordered: attentions, `self_attn.`, whose heads stay where they are: biases of relative positions are theirs.

    Returns:
        of every layer, linear layer → `Bases`, where it has one; the first layer has none.

    Raises:
        ValueError: heads that can't be turned, for joint projections or want of one behind them.
    """
    attentions = [name.removesuffix("out_proj") for name in layers[0] if name.endswith("out_proj")]
    if any(f"{name}q_proj" not in layers[0] for name in attentions) or (
        not attentions and any(name.endswith(("q_proj", "qkv_proj")) for name in layers[0])
    ):
        raise ValueError(
            "layers with joint_qkv=True or attention_output_projection=False can't be aligned: their heads have no "
            "matrices of their own; merge them as they are"
        )
    bases: list[dict[str, Bases]] = [{}]
    for number in range(1, len(layers)):
        pair = layers[0], layers[number]
        inputs: dict[str, Tensor | None] = dict.fromkeys(layers[0])
        if moments is not None:
            inputs = {name: (moments[0][name] + moments[number][name]).double() / 2 for name in layers[0]}
        own: dict[str, Bases] = {}
        for name in attentions:
            own |= _head_bases(name, pair, heads, inputs, keep_order=name in ordered)
        if "fc1" in layers[0]:
            first, second = pair
            front = [part for part in ("fc_gate", "fc1") if part in first]
            alike = _relative(first["fc2"].matrix.double().T, second["fc2"].matrix.double().T)
            for part in front:
                alike += _relative(_rows(first[part]), _rows(second[part]), inputs[part])
            order = _match(alike)
            own |= {**dict.fromkeys(front, Bases(outputs=order)), "fc2": Bases(inputs=order)}
        bases.append(own)
    return bases


def weighted_mean(matrices: Sequence[Tensor], moments: Sequence[Tensor] | None = None) -> Tensor:
    """W̄ = (Σ C_l)⁻¹ Σ C_l W_l, m×n: the least Σ E‖x_l (W_l − W̄)‖², with C_l = E[x_lᵀx_l]. Double precision.

    It is computed as the plain mean and a correction, so that directions without inputs have the plain mean.
    """
    mean = torch.stack([matrix.double() for matrix in matrices]).mean(0)
    if moments is None:
        return mean
    pull = sum(moment.double() @ (matrix - mean) for matrix, moment in zip(matrices, moments, strict=True))
    root = damped_root(sum(moment.double() for moment in moments), INPUT_DAMPING)
    return mean + torch.cholesky_solve(pull, root)


def merge_linear(layers: Sequence[Linear], moments: Sequence[tuple[Tensor, Tensor]] | None = None) -> Linear:
    """One layer for several: the least Σ E‖y_l − y‖² over W and b together, in the matrices' own precision.

    Args:
        layers: all with a bias, or none.
        moments: E[xᵀx] and E[x] of each one's inputs; `None` gives the plain mean.
    """
    matrix, bias = layers[0]
    if bias is None:
        return Linear(
            weighted_mean([layer.matrix for layer in layers], moments and [c for c, _ in moments]).to(matrix.dtype),
            None,
        )
    augmented = moments and [
        torch.cat([torch.cat([second, mean[:, None]], 1), torch.cat([mean, mean.new_ones(1)])[None]])
        for second, mean in moments
    ]
    both = weighted_mean([_rows(layer) for layer in layers], augmented)
    return Linear(both[:-1].to(matrix.dtype), both[-1].to(bias.dtype))


def _rows(layer: Linear) -> Tensor:
    """W with b below it, (m+1)×n."""
    return torch.cat([layer.matrix, layer.bias[None]]).double() if layer.bias is not None else layer.matrix.double()


def _weighed(matrix: Tensor, moment: Tensor | None) -> Tensor:
    """C·W; a row below those of C (a bias) has the weight 1."""
    if moment is None:
        return matrix
    return torch.cat([moment @ matrix[: len(moment)], matrix[len(moment) :]])


def _relative(first: Tensor, second: Tensor, moment: Tensor | None = None) -> Tensor:
    """Inner products of the columns of two matrices, relative to the size of both."""
    weighed = _weighed(second, moment)
    sizes = (first * _weighed(first, moment)).sum() * (second * weighed).sum()
    return first.T @ weighed / sizes.sqrt().clamp(min=torch.finfo(torch.float64).tiny)


def _match(alike: Tensor) -> Tensor:
    """For every row, the column that is matched to it."""
    return torch.from_numpy(linear_sum_assignment(alike.cpu().numpy(), maximize=True)[1]).to(alike.device)


def _head_bases(
    name: str,
    pair: Sequence[Mapping[str, Linear]],
    heads: int,
    inputs: Mapping[str, Tensor | None],
    *,
    keep_order: bool,
) -> dict[str, Bases]:
    """The bases of one attention, from the matrices that each belongs to: both have it as their columns.

    A key's bias adds the same to all scores of a query, which softmax takes away again.
    """
    query, key, value, out = (f"{name}{part}_proj" for part in ("q", "k", "v", "out"))
    scores = [(_rows(layer[query]), layer[key].matrix.double()) for layer in pair], (inputs[query], inputs[key])
    values = [(_rows(layer[value]), layer[out].matrix.double().T) for layer in pair], (inputs[value], None)
    crosses: list[Tensor] = []
    alike = torch.zeros((), dtype=torch.float64, device=pair[0][out].matrix.device)
    for (first, second), moments in (scores, values):
        between, *own = (
            [_relative(a, b, moment) for a, b, moment in zip(left, right, moments, strict=True)]
            for left, right in ((first, second), (first, first), (second, second))
        )
        sizes = [_blocks(one * other, heads).sum((2, 3)).trace() for one, other in own]
        size = torch.stack(sizes).prod().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
        alike = alike + _blocks(between[0] * between[1], heads).sum((2, 3)) / size
        crosses.append(_blocks(between[0] + between[1], heads))
    order = torch.arange(heads, device=alike.device) if keep_order else _match(alike)
    bases = []
    for cross in crosses:
        each = torch.arange(heads, device=order.device)
        left, _, right = torch.linalg.svd(cross[each, order])
        width = left.shape[-1]
        basis = left.new_zeros(heads, width, heads, width)
        basis[order, :, each] = (left @ right).mT
        bases.append(basis.flatten(0, 1).flatten(1))
    return {
        query: Bases(outputs=bases[0]),
        key: Bases(outputs=bases[0]),
        value: Bases(outputs=bases[1]),
        out: Bases(inputs=bases[1]),
    }


def _blocks(cross: Tensor, heads: int) -> Tensor:
    """(H·w)×(H·w) → H×H×w×w."""
    return cross.unflatten(0, (heads, -1)).unflatten(2, (heads, -1)).transpose(1, 2)
