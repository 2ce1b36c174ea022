"""Fewer neurons: a feed-forward network of which some neurons are left out.

Those whose removal costs least go, one after the other, while the last matrix of those that stay makes up for them
by regression (optimal brain surgeon, Hassibi and Stork 1993, for rows). In a gated network both matrices in front lose
the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..choosing.budget import Choices
from ..choosing.rules import RankPolicy
from ..lazy import lazy_property
from ..report import MatrixReport
from ..sharing.groups import STACKS
from ..sharing.originals import short_name
from ..statistics.metric import GRADIENT_DAMPING, INPUT_DAMPING, damped_root
from .form import Built, Form, Measure, Setting, commonest, find_blocks, register_form, to_store

# Matrices of a network, the last one behind its neurons; without a gate, and with one.
PARTS, GATED_PARTS = ("fc1", "fc2"), ("fc_gate", "fc1", "fc2")
# A network loses this share of its neurons between two updates of what the others would cost.
STEP = 1 / 128


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
        gone, kept = self.order.tensor_split([len(self.order) - width])
        kept, weight = kept.sort().values, weight.double()
        rows = moment[kept].double()
        root = damped_root(rows[:, kept], INPUT_DAMPING)  # as above: neurons that never fire leave C singular
        return kept, weight[kept] + torch.cholesky_solve(rows[:, gone] @ weight[gone], root)


@register_form
@dataclass(frozen=True, eq=False)
class FewerNeurons(Form):
    """A feed-forward network by fewer neurons. Its setting is their number, `None` is as it is."""

    label, method = "fewer neurons", "narrow"

    @classmethod
    def places(cls, dense: PreTrainedModel) -> dict[str, tuple[str, ...]]:
        """Every feed-forward network of an encoder-decoder LightFormer."""
        if not hasattr(dense.config, "ffn_dim_pattern"):
            return {}
        parts = GATED_PARTS if dense.config.gated_ffn else PARTS
        return find_blocks(dense, (name for name, one in dense.named_modules() if hasattr(one, "fc1")), parts)

    @classmethod
    def fields(cls, reports: Sequence[MatrixReport], dense: PreTrainedModel) -> dict[str, object]:
        """The commonest number of each stack as a field, the others as patterns."""
        if not reports:
            return {}
        found = {report.name.rpartition(".")[0]: report.size for report in reports}
        fields: dict[str, object] = {}
        patterns: dict[str, int] = {}
        for stack in STACKS:
            widths = {
                short_name(name): found.get(short_name(name), dense.get_submodule(name).fc1.out_features)
                for name in cls.places(dense)
                if f"{stack}.layers." in name
            }
            fields[f"{stack}_ffn_dim"] = usual = commonest(list(widths.values()))
            patterns |= {name: width for name, width in widths.items() if width != usual}
        return {**fields, "ffn_dim_pattern": patterns}

    @property
    def least(self) -> Setting:
        """One neuron."""
        return 1

    def _moments(self) -> tuple[Tensor, Tensor]:
        """Covariance and mean of the activations, or second moment and zero where the network adds no bias.

        Without calibration they are as long as their own weights.
        """
        moments = self.originals.moments(self._last)
        if moments is None:
            variance = math.prod(self._own_lengths(name) for name in self._first)
            return torch.diag(variance), torch.zeros_like(variance)
        second, mean = moments
        if self.originals.bias(self._last) is None:  # nothing takes the mean of what is lost
            mean = torch.zeros_like(mean)
        return second.addr_(mean, mean, alpha=-1), mean

    def _own_lengths(self, name: str) -> Tensor:
        """Squared lengths of a matrix's columns, biases below them."""
        matrix, bias = self.originals.linear(name)
        return matrix.double().square().sum(0) + (0 if bias is None else bias.double().square())

    @property
    def _first(self) -> list[str]:
        """The matrices in front of the neurons."""
        parts = GATED_PARTS if self.originals.dense.config.gated_ffn else PARTS
        return [f"{self.name}.{part}" for part in parts[:-1]]

    @property
    def _last(self) -> str:
        """The matrix behind them."""
        return f"{self.name}.fc2"

    @lazy_property
    def _elimination(self) -> Elimination:
        second = self.originals.matrix(self._last)
        known = self.originals.calibration is not None
        gradients = self.originals.gradients(self._last) if known else torch.eye(second.shape[1]).to(second)
        return Elimination.of(self._moments()[0], second, gradients)

    @property
    def widths(self) -> list[int]:
        """All numbers of neurons that the elimination stops at."""
        elimination = self._elimination
        return [len(elimination.order) - removed for removed in elimination.removed]

    def size(self, setting: Setting | Tensor, measure: Measure) -> Tensor | float:
        """What the network takes of the budget with so many neurons."""
        size, n = self.shape(self._last)
        width = size if setting is None else setting
        front = sum(measure(name, (self.shape(name)[0], width)) for name in self._first)
        return front + measure(self._last, (width, n))

    def choices(self, measure: Measure) -> Choices:
        """So many neurons as the elimination has a cost for."""
        sizes = torch.as_tensor(self.size(torch.tensor(self.widths), measure)).double()
        return Choices([None, *self.widths[1:]], self._elimination.costs, sizes)

    def follow(self, policy: RankPolicy) -> Setting:
        """The largest number that makes the network as small as a ratio asks for."""
        rule = policy.rule(short_name(self.name), "ffn")
        return None if rule is None else rule.choose_width(short_name(self.name), self.widths)

    def build(self, setting: Setting) -> Built:
        """The network with so many neurons."""
        if setting is None:
            return self.keep([*self._first, self._last])
        elimination, (moment, mean) = self._elimination, self._moments()
        matrix, bias = self.originals.linear(self._last)
        kept, new = elimination.at(setting, matrix, moment)
        if bias is not None:
            bias = (bias.double() + mean @ matrix.double() - mean[kept] @ new).to(bias.dtype)
        tensors = {self._last: {"weight": new.T.to(matrix.dtype), "bias": bias}}
        for name in self._first:
            own, own_bias = self.originals.linear(name)
            tensors[name] = {"weight": own.T[kept], "bias": None if own_bias is None else own_bias[kept]}
        size = len(matrix)
        cost, most = elimination.costs[elimination.removed.index(size - setting)], elimination.costs[-1]
        share = (cost / most).clamp(0, 1).item() if most > 0 else 0.0
        reports = []
        for name in (*self._first, self._last):
            m, n = self.shape(name)
            report = MatrixReport(
                name=short_name(name), kind=self.kind(name), m=m, n=n, form=self.label, size=setting,
                setting=f"{setting} neurons", parameters_after=m * n * setting // size, energy=1 - share,
                relative_error=share**0.5,
            )  # fmt: skip
            reports.append(report)
        return Built(reports, to_store(tensors), dict.fromkeys(self._first, kept.cpu()))
