"""Narrower heads: an attention whose heads are less wide (docs/explanation/narrowing.md).

A bottleneck z → z·X·Y, d_k → k → d_k, on the queries of a head goes into W_Q and W_K; one on its context, the mix of
values, into W_V and W_O. P = X·Y costs ‖Lᵀ (I − P) R‖²_F, with L·Lᵀ = C the second moment of z and R·Rᵀ = G that of
the gradient there. Without calibration C and G are those of inputs that are equally long in every direction: the error
is then that of the products W_Q·W_Kᵀ and W_V·W_O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...models.layers import MultiHeadAttention
from ..moments import GRADIENT_DAMPING, INPUT_DAMPING, damped_root, lazy_property
from ..report import MatrixReport
from ..rules import RankPolicy
from ..sharing import short_name
from . import Built, Choices, Form, Setting, find_blocks, register_form, split_widths
from .svd import Factors, rescale_, tail_energies

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


@register_form
@dataclass(frozen=True, eq=False)
class NarrowerHeads(Form):
    """An attention block by narrower heads. Its setting is their width, `None` is as it is."""

    label, method = "narrower heads", "narrow"

    @classmethod
    def places(cls, dense: PreTrainedModel) -> dict[str, tuple[str, ...]]:
        if not hasattr(dense.config, "head_dim_pattern"):
            return {}
        modules = dense.named_modules()
        return find_blocks(dense, (name for name, one in modules if isinstance(one, MultiHeadAttention)), PARTS)

    @classmethod
    def fields(cls, reports: Sequence[MatrixReport], dense: PreTrainedModel) -> dict[str, object]:
        if not reports:
            return {}
        modules = dense.named_modules()
        before = {name: one.head_dim for name, one in modules if isinstance(one, MultiHeadAttention)}
        return dict(zip(("head_dim", "head_dim_pattern"), split_widths(before, reports), strict=True))

    @property
    def widths(self) -> list[int]:
        """All widths that its heads can have, the teacher's last."""
        return list(range(1, self.originals.module(self.name).head_dim + 1))

    @property
    def heads(self) -> int:
        attention = self.originals.module(self.name)
        return attention.q_proj.out_features // attention.head_dim

    @lazy_property
    def _bottlenecks(self) -> tuple[Bottlenecks, Bottlenecks, Tensor]:
        """The bottlenecks of queries and of contexts, and the mean of the context."""
        query, key, value, out = (f"{self.name}.{part}_proj" for part in ("q", "k", "v", "out"))
        q, bias = self.originals.matrix(query).double(), self._bias(query)
        moments, heads = self.originals.moments(query), self.heads
        w_out = self.originals.matrix(out).double()
        if moments is None:
            k, v = self.originals.matrix(key).double(), self.originals.matrix(value).double()
            second, gradients = q.T @ q + torch.outer(bias, bias), k.T @ k
            mean, contexts, at_output = self._bias(value), v.T @ v, None
        else:
            x, mean_x = moments
            means = torch.outer(mean_x @ q, bias)
            second = q.T @ x @ q + means + means.T + torch.outer(bias, bias)
            gradients = self.originals.gradients(query)
            contexts, mean = self.originals.moments(out)
            if self.originals.linear(out).bias is None:  # no bias takes the mean error
                mean = torch.zeros_like(mean)
            contexts = contexts - torch.outer(mean, mean)
            at_output = self.originals.gradients(out)
        of_contexts = w_out @ (w_out.T if at_output is None else at_output @ w_out.T)
        queries = Bottlenecks.of(diagonal_blocks(second, heads), diagonal_blocks(gradients, heads))
        return queries, Bottlenecks.of(diagonal_blocks(contexts, heads), diagonal_blocks(of_contexts, heads)), mean

    def _bias(self, name: str) -> Tensor:
        """Return the bias of a matrix (n), double; zeros where it has none."""
        matrix, bias = self.originals.linear(name)
        return matrix.new_zeros(matrix.shape[1], dtype=torch.float64) if bias is None else bias.double()

    def _scaled(self, maps: tuple[Tensor, Tensor], first: str, second: str) -> tuple[Tensor, Tensor]:
        """X and Y of every head, scaled so that columns of W·X are as long as those of the second matrix times Y."""
        left = self._with_bias(first)
        behind = second == "out_proj"  # rows of this matrix belong to the heads
        right = self.originals.matrix(f"{self.name}.{second}").double() if behind else self._with_bias(second).T
        scaled = []
        for head, (into, out_of) in enumerate(zip(*maps, strict=True)):
            own = slice(head * len(into), (head + 1) * len(into))
            pair = Factors(left[:, own] @ into, out_of @ right[own])
            length = pair.left.norm(dim=0)
            scale = (rescale_(pair, "balanced").left.norm(dim=0) / length).nan_to_num(nan=1.0)
            scaled.append((into * scale, out_of / scale[:, None]))
        return tuple(torch.stack(side) for side in zip(*scaled, strict=True))

    def _with_bias(self, part: str) -> Tensor:
        """W with b below it: where W is nearly zero, its bias gives the size of the outputs."""
        name = f"{self.name}.{part}"
        return torch.cat([self.originals.matrix(name).double(), self._bias(name)[None]])

    def size(self, setting: Setting | Tensor) -> Tensor | float:
        inner = self.heads * (max(self.widths) if setting is None else setting)
        shapes = {part: self.shape(f"{self.name}.{part}") for part in PARTS}
        return inner * sum(n if part == "out_proj" else m for part, (m, n) in shapes.items())

    def choices(self) -> Choices:
        queries, contexts, _ = self._bottlenecks
        costs = (queries.costs() + contexts.costs()).cpu()[1:]
        costs[-1] = 0.0  # unchanged
        sizes = torch.as_tensor(self.size(torch.tensor(self.widths))).double()
        return Choices([*self.widths[:-1], None], costs, sizes)

    def follow(self, policy: RankPolicy) -> Setting:
        return policy.choose_width(short_name(self.name), "attention", self.widths)

    def build(self, setting: Setting) -> Built:
        if setting is None:
            return self.keep([f"{self.name}.{part}" for part in PARTS])
        queries, contexts, mean = self._bottlenecks
        full = queries.into.shape[-1]
        # As long as each other: inside a head, any basis and scale computes the same.
        into_q, out_of_q = self._scaled(queries.at(setting), "q_proj", "k_proj")
        into_v, out_of_v = self._scaled(contexts.at(setting), "v_proj", "out_proj")
        # Scores are divided by the root of the width.
        scale = (setting / full) ** 0.5 if self.originals.dense.config.scale_attention else 1.0
        coordinates = {"q_proj": into_q * scale, "k_proj": out_of_q.mT, "v_proj": into_v}
        whole = {part: torch.block_diag(*heads) for part, heads in coordinates.items()}
        spread = torch.block_diag(*out_of_v)
        costs = queries.costs() + contexts.costs()
        share = (costs[setting] / costs[0]).item() if costs[0] > 0 else 0.0
        tensors = {}
        for part in PARTS:
            name = f"{self.name}.{part}"
            matrix, bias = self.originals.linear(name)
            if part == "out_proj":
                lost = mean - mean @ whole["v_proj"] @ spread
                new, new_bias = spread @ matrix.double(), self._bias(name) + lost @ matrix.double()
            else:
                new, new_bias = matrix.double() @ whole[part], self._bias(name) @ whole[part]
            tensors[name] = {"weight": new.T.to(matrix.dtype), "bias": None if bias is None else new_bias.to(bias)}
        coordinates = {f"{self.name}.{part}": heads.cpu() for part, heads in coordinates.items()}
        return self.built(tensors, setting, f"heads {setting} wide", share**0.5, coordinates)
