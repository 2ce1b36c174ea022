"""Fewer neurons: a feed-forward network from which some neurons are removed (docs/explanation/narrowing.md).

Those whose removal costs least go, while the last matrix of those that stay makes up for them by regression (optimal
brain surgeon, Hassibi and Stork 1993, for rows). In a gated network both matrices in front lose the same ones. The
matrices of those that stay may be low-rank besides: the last neurons and the last ranks cost most.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...matrices import STACKS, Weight
from ..moments import GRADIENT_DAMPING, INPUT_DAMPING, Damped, Metric, damped_root
from ..sharing import Originals
from . import Choices, Shaped, change_moment, find_blocks, register_form, split_widths
from .block import Block

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
    costs: Tensor  # loss of quality with as many neurons as each of `find_widths`
    energies: dict[int, Tensor]  # neurons that stay → what each direction of the refitted second matrix is worth

    @classmethod
    def of(cls, moment: Tensor, weight: Tensor, gradient_moment: Tensor, watched: Collection[int] = ()) -> Elimination:
        """Remove neuron after neuron, by C of the activations (f×f), the second matrix (f×n) and G behind it (n×n).

        Args:
            watched: numbers of neurons for which `energies` are computed, some of `find_widths`.
        """
        root = damped_root(gradient_moment.double(), GRADIENT_DAMPING)
        rows = weight.double() @ root
        # Symmetric, in LAPACK's column order: after transposition, rows are contiguous.
        inverse = torch.cholesky_inverse(damped_root(moment.double(), INPUT_DAMPING)).mT
        explained = rows.T @ moment.double() @ rows if watched else rows.new_zeros(0)
        energies: dict[int, Tensor] = {}
        widths = find_widths(len(moment))
        ids = torch.arange(len(moment), device=moment.device)
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
                if watched:
                    explained.addmm_(shares.T, shares, alpha=-1)
                if width in watched:
                    energies[width] = torch.linalg.eigvalsh(explained).flip(0).clamp(min=0)[:width]
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
        return cls(torch.cat([*order, ids]), torch.tensor(costs, dtype=torch.float64), energies)

    def at(self, width: int, weight: Tensor, moment: Tensor) -> tuple[Tensor, Tensor]:
        """The `width` neurons that stay, ascending, and the second matrix refitted to them (width×n)."""
        gone, kept = self.order.tensor_split([len(self.order) - width])
        kept, weight = kept.sort().values, weight.double()
        rows = moment[kept].double()
        root = damped_root(rows[:, kept], INPUT_DAMPING)  # as above: neurons that never fire leave C singular
        return kept, weight[kept] + torch.cholesky_solve(rows[:, gone] @ weight[gone], root)


def nested_energies(weight: Weight, metric: Metric, order: Tensor, widths: Collection[int]) -> dict[int, Tensor]:
    """{n: squared singular values, in the metric, of the columns of a matrix for the first n neurons of an order}."""
    matrix, gradients = weight.product(torch.float64)[:, order], metric.columns.moment[order][:, order].double()
    gradients.diagonal().add_(metric.columns.damping * gradients.diagonal().mean())
    found, start = {}, 0
    inner = matrix.new_zeros(len(matrix), len(matrix))
    for end in sorted(widths):
        new, before = matrix[:, start:end], matrix[:, :start]
        cross = before @ gradients[:start, start:end] @ new.T
        inner += new @ gradients[start:end, start:end] @ new.T + cross + cross.T
        energies = torch.linalg.eigvalsh(metric.left.T @ inner @ metric.left)
        found[end], start = energies.flip(0).clamp(min=0)[:end], end
    return found


@register_form
@dataclass(frozen=True, eq=False)
class FewerNeurons(Block):
    """A feed-forward network by fewer neurons. Its setting is their number, `None` is as it is."""

    label, wording, method = "fewer neurons", "{} neurons", "narrow"

    @classmethod
    def sites(cls, dense: PreTrainedModel) -> dict[str, tuple[str, ...]]:
        if not hasattr(dense.config, "ffn_dim_pattern"):
            return {}
        parts = GATED_PARTS if dense.config.gated_ffn else PARTS
        return find_blocks(dense, (name for name, module in dense.named_modules() if hasattr(module, "fc1")), parts)

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

    def shapes_at(self, width: int) -> list[tuple[int, int]]:
        *first, last = map(self.shape_of, self.matrices)
        return [*((m, width) for m, _ in first), (width, last[1])]

    def choices(self, originals: Originals) -> Choices:
        *first, last = self.matrices
        second = originals.weight(last).product()
        known = originals.calibration is not None
        gradients = originals.gradients(last) if known else torch.eye(second.shape[1]).to(second)
        watched = self.watched(originals)
        elimination = Elimination.of(self._moments(originals)[0], second, gradients, watched)
        sizes = torch.as_tensor(self.size(torch.tensor(self.widths))).double()
        costs = elimination.costs
        plain = Choices([None, *self.widths[1:]], costs, sizes, costs[-1].item(), elimination)
        if not watched:
            return plain
        order = elimination.order.flip(0)
        metrics = self.metrics(originals)
        found = [nested_energies(originals.weight(name), metrics[name], order, watched) for name in first]
        found.append(elimination.energies)
        return self.mix(plain, {width: [own[width] for own in found] for width in watched})

    def narrow(self, width: int, originals: Originals, choices: Choices) -> Shaped:
        moment, mean = self._moments(originals)
        *first, last = self.matrices
        weight = originals.weight(last)
        matrix, bias = weight.product(), weight.bias
        kept, new = choices.details.at(width, matrix, moment)
        if bias is not None:
            bias = (bias.double() + mean @ matrix.double() - mean[kept] @ new).to(bias.dtype)
        weights = {}
        for name in first:
            own = originals.weight(name)
            own_bias = None if own.bias is None else own.bias[kept]
            weights[name] = Weight(own.product()[:, kept], None, own_bias)
        weights[last] = Weight(new.to(matrix.dtype), None, bias)
        return Shaped(weights, dict.fromkeys(first, kept.cpu()))

    def metrics_at(self, shaped: Shaped, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        *first, last = self.matrices
        found, kept = {}, shaped.coordinates[first[0]]
        for name in first:
            columns = metrics[name].columns
            columns = Damped(change_moment(columns.moment, kept), columns.damping)
            found[name] = replace(metrics[name], columns=columns)
        whole = metrics[last]
        rows = Damped(change_moment(whole.rows.moment, kept), whole.rows.damping)
        return found | {last: replace(whole, rows=rows, mean=None if whole.mean is None else whole.mean[kept])}
