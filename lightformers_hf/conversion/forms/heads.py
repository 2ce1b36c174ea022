"""Narrower heads: an attention whose heads are less wide (docs/explanation/narrowing.md).

A bottleneck z → z·X·Y, d_k → k → d_k, on the queries of a head goes into W_Q and W_K; one on its context, the mix of
values, into W_V and W_O. P = X·Y costs ‖Lᵀ (I − P) R‖²_F, with L·Lᵀ = C the second moment of z and R·Rᵀ = G that of
the gradient there. Without calibration C and G are those of inputs that are equally long in every direction: the error
is then that of the products W_Q·W_Kᵀ and W_V·W_O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...matrices import Weight
from ...models.layers import MultiHeadAttention
from ..moments import GRADIENT_DAMPING, INPUT_DAMPING, Damped, Metric, damped_root
from ..sharing import Originals, short_name
from . import Choices, Shaped, change_moment, change_outputs, find_blocks, register_form, split_widths
from .block import Block
from .svd import Factors, rescale_, singular_values, tail_energies

PARTS = ("q_proj", "k_proj", "v_proj", "out_proj")


@dataclass(frozen=True, eq=False)
class Bottlenecks:
    """The best maps X·Y of every inner width on the signals of H heads, each d_k wide."""

    into: Tensor  # L⁻ᵀ·U (H, d_k, d_k)
    out_of: Tensor  # Vᵀ·R⁻¹ (H, d_k, d_k)
    singular_values: Tensor  # those of Lᵀ·R (H, d_k), descending

    @classmethod
    def of(cls, second_moments: Tensor, gradient_moments: Tensor) -> Bottlenecks:
        left = torch.stack([damped_root(moment, INPUT_DAMPING) for moment in second_moments.double()])
        right = torch.stack([damped_root(moment, GRADIENT_DAMPING) for moment in gradient_moments.double()])
        u, values, v = torch.linalg.svd(left.mT @ right)
        into = torch.linalg.solve_triangular(left.mT, u, upper=True)
        out_of = torch.linalg.solve_triangular(right, v, upper=False, left=False)
        return cls(into, out_of, values)

    def costs(self) -> Tensor:
        """Return the cost of all heads together at inner widths 0 … d_k."""
        return torch.stack([tail_energies(values) for values in self.singular_values]).sum(0)

    def at(self, width: int) -> tuple[Tensor, Tensor]:
        """X (H, d_k, k) and Y (H, k, d_k)."""
        roots = self.singular_values[:, :width].sqrt()
        return self.into[..., :width] * roots[:, None], roots[..., None] * self.out_of[:, :width]


def diagonal_blocks(moment: Tensor, heads: int) -> Tensor:
    """The diagonal blocks (H, d_k, d_k) of a matrix (H·d_k, H·d_k)."""
    return moment.unflatten(0, (heads, -1)).unflatten(2, (heads, -1)).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def head_fields(model: PreTrainedModel, sizes: Mapping[str, int]) -> dict[str, object]:
    """Return the fields of the widths of a model's heads, of which `sizes` has the new ones."""
    modules = model.named_modules()
    before = {name: module.head_dim for name, module in modules if isinstance(module, MultiHeadAttention)}
    return dict(zip(("head_dim", "head_dim_pattern"), split_widths(before, sizes), strict=True))


@register_form
@dataclass(frozen=True, eq=False)
class NarrowerHeads(Block):
    """An attention block by narrower heads. Its setting is their width, `None` is as it is."""

    label, wording, method = "narrower heads", "heads {} wide", "narrow"

    @classmethod
    def sites(cls, dense: PreTrainedModel) -> dict[str, tuple[str, ...]]:
        if not hasattr(dense.config, "head_dim_pattern"):
            return {}
        modules = dense.named_modules()
        return find_blocks(dense, (name for name, module in modules if isinstance(module, MultiHeadAttention)), PARTS)

    @classmethod
    def fields(cls, sizes: Mapping[str, int], dense: PreTrainedModel) -> dict[str, object]:
        return head_fields(dense, sizes) if sizes else {}

    @property
    def widths(self) -> list[int]:
        """All widths that its heads can have, the teacher's last."""
        return list(range(1, self.dense.get_submodule(self.name).head_dim + 1))

    @property
    def heads(self) -> int:
        attention = self.dense.get_submodule(self.name)
        return attention.q_proj.out_features // attention.head_dim

    def _find_bottlenecks(self, originals: Originals) -> tuple[Bottlenecks, Bottlenecks, Tensor]:
        """Find the bottlenecks of queries and of contexts, and the mean of the context."""
        (q, bias), (k, _), (v, value_bias), (w_out, _) = (_read(originals, name) for name in self.matrices)
        query, _, _, out = self.matrices
        moments, heads = originals.moments(query), self.heads
        if moments is None:
            second, gradients = q.T @ q + torch.outer(bias, bias), k.T @ k
            mean, contexts, at_output = value_bias, v.T @ v, None
        else:
            x, mean_x = moments
            means = torch.outer(mean_x @ q, bias)
            second = q.T @ x @ q + means + means.T + torch.outer(bias, bias)
            gradients = originals.gradients(query)
            contexts, mean = cast(tuple, originals.moments(out))
            if originals.weight(out).bias is None:  # no bias takes the mean error
                mean = torch.zeros_like(mean)
            contexts = contexts - torch.outer(mean, mean)
            at_output = originals.gradients(out)
        of_contexts = w_out @ (w_out.T if at_output is None else at_output @ w_out.T)
        queries = Bottlenecks.of(diagonal_blocks(second, heads), diagonal_blocks(gradients, heads))
        return queries, Bottlenecks.of(diagonal_blocks(contexts, heads), diagonal_blocks(of_contexts, heads)), mean

    def shapes_at(self, width: int) -> list[tuple[int, int]]:
        *first, last = map(self.shape_of, self.matrices)
        inner = self.heads * width
        return [*((m, inner) for m, _ in first), (inner, last[1])]

    def choices(self, originals: Originals) -> Choices:
        found = queries, contexts, _ = self._find_bottlenecks(originals)
        whole, *costs = (queries.costs() + contexts.costs()).cpu()
        costs[-1] = torch.zeros_like(whole)  # unchanged
        sizes = torch.as_tensor(self.size(torch.tensor(self.widths))).double()
        plain = Choices([*self.widths[:-1], None], torch.stack(costs), sizes, whole.item(), found)
        if not (watched := self.watched(originals)):
            return plain
        energies: dict[int, list[Tensor]] = {}
        whole_metrics = self.metrics(originals)
        for width in watched:
            shaped = self.narrow(width, originals, plain)
            metrics = self.metrics_at(shaped, whole_metrics)
            energies[width] = [
                singular_values(weight.product(), name=short_name(name), metric=metrics[name]).square()
                for name, weight in shaped.weights.items()
            ]
        return self.mix(plain, energies)

    def narrow(self, width: int, originals: Originals, choices: Choices) -> Shaped:
        queries, contexts, mean = choices.details
        full = queries.into.shape[-1]
        parts = {part: _read(originals, name) for part, name in zip(PARTS, self.matrices, strict=True)}
        rows = {part: torch.cat([matrix, bias[None]]) for part, (matrix, bias) in parts.items()}
        # As long as each other: inside a head, any basis and scale computes the same.
        into_q, out_of_q = _scaled(queries.at(width), rows["q_proj"], rows["k_proj"].T)
        into_v, out_of_v = _scaled(contexts.at(width), rows["v_proj"], parts["out_proj"][0])
        # Scores are divided by the root of the width.
        scale = (width / full) ** 0.5 if self.dense.config.scale_attention else 1.0
        coordinates = {"q_proj": into_q * scale, "k_proj": out_of_q.mT, "v_proj": into_v}
        returns = {"q_proj": out_of_q / scale, "k_proj": into_q.mT, "v_proj": out_of_v}
        whole = {part: torch.block_diag(*heads) for part, heads in coordinates.items()}
        spread = torch.block_diag(*out_of_v)
        weights = {}
        for name, (part, (matrix, bias)) in zip(self.matrices, parts.items(), strict=True):
            if part == "out_proj":
                lost = mean - mean @ whole["v_proj"] @ spread
                new, new_bias = spread @ matrix, bias + lost @ matrix
            else:
                new, new_bias = matrix @ whole[part], bias @ whole[part]
            own = originals.weight(name)
            new_bias = None if own.bias is None else new_bias.to(own.bias.dtype)
            weights[name] = Weight(new.to(own.left.dtype), None, new_bias)
        into, back = (
            {f"{self.name}.{part}": heads.cpu() for part, heads in maps.items()} for maps in (coordinates, returns)
        )
        return Shaped(weights, into, back)

    def metrics_at(self, shaped: Shaped, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        metrics = dict(metrics)
        for name, back in shaped.returns.items():
            columns = Damped(change_moment(metrics[name].columns.moment, back=back), GRADIENT_DAMPING)
            metrics[name] = replace(metrics[name], columns=columns)
        value, out = self.matrices[2:]
        into, metric = shaped.coordinates[value], metrics[out]
        rows = Damped(change_moment(metric.rows.moment, back=into.mT), INPUT_DAMPING)
        mean = None if metric.mean is None else change_outputs(metric.mean[None], into)[0]
        return metrics | {out: replace(metric, rows=rows, mean=mean)}


def _read(originals: Originals, name: str) -> tuple[Tensor, Tensor]:
    """Return a matrix (m×n) and its bias (n), double; zeros where it has none."""
    weight = originals.weight(name)
    matrix, bias = weight.product(torch.float64), weight.bias
    return matrix, matrix.new_zeros(matrix.shape[1]) if bias is None else bias.double()


def _scaled(maps: tuple[Tensor, Tensor], left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """X and Y of every head, scaled so that columns of left·X are as long as rows of Y·right.

    The matrices have their biases: where W is nearly zero, the bias gives the size of the outputs.
    """
    scaled = []
    for head, (into, out_of) in enumerate(zip(*maps, strict=True)):
        own = slice(head * len(into), (head + 1) * len(into))
        pair = Factors(left[:, own] @ into, out_of @ right[own])
        length = pair.left.norm(dim=0)
        scale = (rescale_(pair, "balanced").left.norm(dim=0) / length).nan_to_num(nan=1.0)
        scaled.append((into * scale, out_of / scale[:, None]))
    return tuple(torch.stack(side) for side in zip(*scaled, strict=True))
