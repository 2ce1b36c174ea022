"""Narrower heads and narrower feed-forward networks: the same kind of layer, smaller.

**Heads.** What a head computes depends on W_Q·W_Kᵀ and W_V·W_O alone. A bottleneck z → z·X·Y, d_k → k → d_k, on its
queries changes the scores to q·X·(k·Yᵀ)ᵀ, so X goes into W_Q and Y into W_K; one on its context, the mix of values,
goes into W_V and W_O. Nothing is added: the result is ordinary attention with heads of width k, which keeps as much of
the product as four separate factorizations with half as many parameters.

With C the second moment of z and G that of the loss's gradient there, P = X·Y costs ‖Lᵀ (I − P) R‖²_F, C = L·Lᵀ and
G = R·Rᵀ (see `calibration`), which the truncated SVD of Lᵀ·R minimises over all P of rank k. Without calibration C and
G are those of inputs that are equally long in every direction: then the error is that of the products themselves, and
no pair of that inner width is closer to W_Q·W_Kᵀ (the query's bias as one more row; softmax ignores the key's) and to
W_V·W_O, by Eckart and Young.

**Neurons** of a feed-forward network: those whose removal costs least go, one after the other, while the second matrix
of those that stay makes up for them by regression (optimal brain surgeon, Hassibi and Stork 1993, for rows).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..choosing.budget import tails
from ..statistics.calibration import GRADIENT_DAMPING, INPUT_DAMPING, damped_root

# A network loses this share of its neurons between two updates of what the others would cost.
STEP = 1 / 128


@dataclass(frozen=True, eq=False)
class Bottlenecks:
    """The best maps X·Y of every inner width on the signals of H heads, each d_k wide.

    Attributes:
        into: L⁻ᵀ·U, and `out_of`: Vᵀ·R⁻¹ (H, d_k, d_k) each.
        singular_values: of Lᵀ·R (H, d_k), descending.
    """

    into: Tensor
    out_of: Tensor
    singular_values: Tensor

    @classmethod
    def of(cls, second_moments: Tensor, gradient_moments: Tensor) -> Bottlenecks:
        """From C and G, (H, d_k, d_k) each."""
        left = torch.stack([damped_root(moment, INPUT_DAMPING) for moment in second_moments.double()])
        right = torch.stack([damped_root(moment, GRADIENT_DAMPING) for moment in gradient_moments.double()])
        u, values, v = torch.linalg.svd(left.mT @ right)
        into = torch.linalg.solve_triangular(left.mT, u, upper=True)
        out_of = torch.linalg.solve_triangular(right, v, upper=False, left=False)
        return cls(into, out_of, values)

    def costs(self) -> Tensor:
        """What all heads together lose at inner widths 0 … d_k."""
        return torch.stack([tails(values) for values in self.singular_values]).sum(0)

    def at(self, width: int) -> tuple[Tensor, Tensor]:
        """X (H, d_k, k) and Y (H, k, d_k)."""
        roots = self.singular_values[:, :width].sqrt()
        return self.into[..., :width] * roots[:, None], roots[..., None] * self.out_of[:, :width]


def blocks(moment: Tensor, heads: int) -> Tensor:
    """The diagonal blocks (H, d_k, d_k) of a matrix (H·d_k, H·d_k)."""
    width = moment.shape[0] // heads
    return torch.stack(
        [moment[start : start + width, start : start + width] for start in range(0, len(moment), width)]
    )


@dataclass(frozen=True, eq=False)
class Elimination:
    """In which order the neurons of a feed-forward network go, and what that costs.

    Attributes:
        order: all f neurons, those that go first in front.
        removed: numbers of neurons removed for which the cost is known, ascending from 0.
        costs: what is lost with so many removed.
    """

    order: Tensor
    removed: list[int]
    costs: Tensor

    @classmethod
    def of(cls, moment: Tensor, weight: Tensor, gradient_moment: Tensor) -> Elimination:
        """Remove neuron after neuron.

        Args:
            moment: C, second moment of the activations, f×f.
            weight: the second matrix, f×n.
            gradient_moment: G at the network's output, n×n.
        """
        size = len(moment)
        root = damped_root(gradient_moment.double(), GRADIENT_DAMPING)
        rows = weight.double() @ root
        inverse = torch.cholesky_inverse(damped_root(moment.double(), INPUT_DAMPING))
        step = max(1, round(size * STEP))
        ids = torch.arange(size, device=moment.device)
        order, removed, costs, alive = [], [0], [0.0], size
        # The first `alive` rows are of the neurons that stay: to copy them at every step would take longest.
        while alive > 1:
            # Down to a multiple of the step, but never to nothing.
            count = min(alive - 1, (alive - 1) % step + 1)
            own, block = rows[:alive], inverse[:alive, :alive]
            price = own.square().sum(1) / block.diagonal()
            goes = price.topk(count, largest=False).indices
            across = block[goes]
            solved = torch.linalg.solve(across[:, goes], torch.cat([own[goes], across], 1))
            shares, columns = solved[:, : rows.shape[1]], solved[:, rows.shape[1] :]
            costs.append(costs[-1] + (own[goes] * shares).sum().item())
            own.addmm_(across.T, shares, alpha=-1)
            block.addmm_(across.T, columns, alpha=-1)
            order.append(ids[goes[price[goes].argsort()]])
            # Those behind the new end that stay take the places of those that go.
            alive -= count
            last = torch.ones(count, dtype=torch.bool, device=moment.device)
            last[goes[goes >= alive] - alive] = False
            places, movers = goes[goes < alive], alive + last.nonzero().squeeze(1)
            for tensor in (rows, inverse, inverse.T, ids):
                tensor[places] = tensor[movers]
            removed.append(removed[-1] + count)
        return cls(torch.cat([*order, ids[:1]]), removed, torch.tensor(costs).double())

    def at(self, width: int, weight: Tensor, moment: Tensor) -> tuple[Tensor, Tensor]:
        """The `width` neurons that stay, ascending, and the second matrix regressed onto them (width×n)."""
        kept = self.order[len(self.order) - width :].sort().values
        root = damped_root(moment.double(), INPUT_DAMPING)  # as above: neurons that never fire leave C singular
        across = root[kept] @ root.T
        return kept, torch.linalg.solve(across[:, kept], across @ weight.double())
