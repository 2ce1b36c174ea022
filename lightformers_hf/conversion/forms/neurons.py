"""Fewer neurons: a feed-forward network from which some neurons are removed (docs/explanation/narrowing.md).

Those whose removal costs least go, while the last matrix of those that stay makes up for them by regression (optimal
brain surgeon, Hassibi and Stork 1993, for rows). In a gated network both matrices in front lose the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...matrices import Weight
from ..moments import GRADIENT_DAMPING, INPUT_DAMPING, damped_root
from ..rules import RankPolicy
from ..sharing import STACKS, Originals, short_name
from . import Choices, Form, Setting, Shaped, find_blocks, register_form, split_widths

# Matrices of a network, the last one behind its neurons; without a gate, and with one.
PARTS, GATED_PARTS = ("fc1", "fc2"), ("fc_gate", "fc1", "fc2")
STEP = 1 / 128  # share of its neurons that a network loses between two updates of the costs
UPDATES = 8  # that change the inverse together: to read and write it takes longer than to multiply
ROWS = 512  # rows of the inverse that are moved together
ROUNDING = 1e-12  # relative, below which a square in float64 may be negative


def find_widths(size: int) -> list[int]:
    """Return the numbers of neurons that an elimination stops at, descending from all."""
    step = max(1, round(size * STEP))
    return [*dict.fromkeys((size, *range((size - 1) // step * step, 0, -step), 1))]


@dataclass(frozen=True, eq=False)
class Elimination:
    """Order in which the neurons of a feed-forward network are removed, and the cost."""

    order: Tensor  # all f neurons, those that go first in front
    removed: list[int]  # numbers of neurons removed for which the cost is known, ascending from 0
    costs: Tensor  # loss of quality for each number

    @classmethod
    def of(cls, moment: Tensor, weight: Tensor, gradient_moment: Tensor) -> Elimination:
        """Remove neuron after neuron, by C of the activations (f×f), the second matrix (f×n) and G behind it (n×n)."""
        size = len(moment)
        root = damped_root(gradient_moment.double(), GRADIENT_DAMPING)
        rows = weight.double() @ root
        # Symmetric, in LAPACK's column order: after transposition, rows are contiguous.
        inverse = torch.cholesky_inverse(damped_root(moment.double(), INPUT_DAMPING)).mT
        widths = find_widths(size)
        ids = torch.arange(size, device=moment.device)
        order, costs = [], [0.0]
        for known in range(0, len(widths) - 1, UPDATES):
            # Rows and columns of those that are left are in front: the others would be multiplied, too.
            own, block = rows[: len(ids)], inverse[: len(ids), : len(ids)]
            diagonal, stay = block.diagonal().clone(), torch.ones_like(ids, dtype=torch.bool)
            change = block.new_empty(0, len(ids))  # D: the inverse is the block less DᵀD, where it is looked at
            for width in widths[known + 1 : known + 1 + UPDATES]:
                price = torch.linalg.vector_norm(own, dim=1).square() / diagonal
                count = len(ids) - len(change) - width
                goes = price.masked_fill(~stay, torch.inf).topk(count, largest=False).indices
                across = block[goes].addmm_(change[:, goes].T, change, alpha=-1)
                root = damped_root(across[:, goes], ROUNDING)
                solved = torch.linalg.solve_triangular(root, torch.cat([own[goes], across], 1), upper=False)
                shares, columns = solved.tensor_split([own.shape[1]], 1)
                costs.append(costs[-1] + shares.square().sum().item())
                own.addmm_(columns.T, shares, alpha=-1)
                diagonal -= columns.square().sum(0)
                change = torch.cat([change, columns])
                stay[goes] = False
                order.append(ids[goes[price[goes].argsort()]])
            block.addmm_(change.T, change, alpha=-1)
            places = stay.nonzero().squeeze(1)
            for start in range(0, len(places), ROWS):  # each to a place that was read before, or its own
                part = places[start : start + ROWS]
                rows[start : start + len(part)] = rows[part]
                inverse[start : start + len(part), : len(places)] = inverse[part].gather(
                    1, places.expand(len(part), -1)
                )
            ids = ids[places]
        removed = [size - width for width in widths]
        return cls(torch.cat([*order, ids]), removed, torch.tensor(costs, dtype=torch.float64))

    def at(self, width: int, weight: Tensor, moment: Tensor) -> tuple[Tensor, Tensor]:
        """The `width` neurons that stay, ascending, and the second matrix refitted to them (width×n)."""
        gone, kept = self.order.tensor_split([len(self.order) - width])
        kept, weight = kept.sort().values, weight.double()
        rows = moment[kept].double()
        root = damped_root(rows[:, kept], INPUT_DAMPING)  # as above: neurons that never fire leave C singular
        return kept, weight[kept] + torch.cholesky_solve(rows[:, gone] @ weight[gone], root)


@register_form
@dataclass(frozen=True, eq=False)
class FewerNeurons(Form):
    """A feed-forward network by fewer neurons. Its setting is their number, `None` is as it is."""

    label, wording, method = "fewer neurons", "{} neurons", "narrow"

    @classmethod
    def sites(cls, dense: PreTrainedModel) -> dict[str, tuple[str, ...]]:
        if not hasattr(dense.config, "ffn_dim_pattern"):
            return {}
        parts = GATED_PARTS if dense.config.gated_ffn else PARTS
        return find_blocks(dense, (name for name, one in dense.named_modules() if hasattr(one, "fc1")), parts)

    @classmethod
    def fields(cls, sizes: Mapping[str, int], dense: PreTrainedModel) -> dict[str, object]:
        if not sizes:
            return {}
        fields: dict[str, object] = {}
        patterns: dict[str, int] = {}
        for stack in STACKS:
            names = [name for name in cls.sites(dense) if f"{stack}.layers." in name]
            before = {name: dense.get_submodule(name).fc1.out_features for name in names}
            fields[f"{stack}_ffn_dim"], pattern = split_widths(before, sizes)
            patterns |= pattern
        return {**fields, "ffn_dim_pattern": patterns}

    @property
    def matrices(self) -> tuple[str, ...]:
        return tuple(f"{self.name}.{part}" for part in (GATED_PARTS if self.dense.config.gated_ffn else PARTS))

    def _moments(self, originals: Originals) -> tuple[Tensor, Tensor]:
        """Covariance and mean of the activations, or second moment and zero where the network adds no bias.

        Without calibration they are as long as their own weights.
        """
        *first, last = self.matrices
        moments = originals.moments(last)
        if moments is None:
            weights = map(originals.weight, first)
            lengths = [
                weight.product(torch.float64).square().sum(0)
                + (0 if weight.bias is None else weight.bias.double().square())
                for weight in weights
            ]
            return torch.diag(math.prod(lengths)), torch.zeros_like(lengths[0])
        second, mean = moments
        if originals.weight(last).bias is None:  # no bias takes the mean error
            mean = torch.zeros_like(mean)
        return second.addr_(mean, mean, alpha=-1), mean

    @property
    def widths(self) -> list[int]:
        """All numbers of neurons that the elimination stops at."""
        return find_widths(self.shape_of(self.matrices[-1])[0])

    def size(self, setting: Setting | Tensor) -> Tensor | float:
        *first, last = self.matrices
        size, n = self.shape_of(last)
        return (sum(self.shape_of(name)[0] for name in first) + n) * (size if setting is None else setting)

    def choices(self, originals: Originals) -> Choices:
        last = self.matrices[-1]
        second = originals.weight(last).product()
        known = originals.calibration is not None
        gradients = originals.gradients(last) if known else torch.eye(second.shape[1]).to(second)
        elimination = Elimination.of(self._moments(originals)[0], second, gradients)
        sizes = torch.as_tensor(self.size(torch.tensor(self.widths))).double()
        costs = elimination.costs
        return Choices([None, *self.widths[1:]], costs, sizes, costs[-1].item(), elimination)

    def follow(self, policy: RankPolicy, choices: Choices | None = None) -> Setting:
        return policy.choose_width(short_name(self.name), "ffn", self.widths)

    def shape(self, setting: Setting, originals: Originals, choices: Choices | None = None) -> Shaped:
        if setting is None:
            return super().shape(setting, originals)
        choices, (moment, mean) = choices or self.choices(originals), self._moments(originals)
        *first, last = self.matrices
        weight = originals.weight(last)
        matrix, bias = weight.product(), weight.bias
        kept, new = choices.details.at(setting, matrix, moment)
        if bias is not None:
            bias = (bias.double() + mean @ matrix.double() - mean[kept] @ new).to(bias.dtype)
        weights = {}
        for name in first:
            own = originals.weight(name)
            own_bias = None if own.bias is None else own.bias[kept]
            weights[name] = Weight(own.product()[:, kept], None, own_bias)
        weights[last] = Weight(new.to(matrix.dtype), None, bias)
        return Shaped(weights, dict.fromkeys(first, kept.cpu()), choices.relative_error(setting))
