"""The parts of a model that get smaller, each by its own means: a matrix, the heads of an attention, the neurons of a
feed-forward network. Every part says what it can become, and makes the tensors of what it becomes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from ...models.attention import MultiHeadAttention
from ..choosing.budget import Choices, tails
from ..report import MatrixReport
from ..sharing.alignment import Linear, Turn, merge_linear
from ..sharing.merging import source_names
from ..statistics.calibration import Calibration, Metric
from ..teacher import Teacher
from .narrowing import Bottlenecks, Elimination, blocks
from .svd import Factors, Spectrum, Split, decompose, rescaled

# (module, m, n, r) → what it takes of the budget; m, n and r may be tensors, r `None` is dense.
Measure = Callable[[str, int | Tensor, int | Tensor, Tensor | None], Tensor | float]


def parameters(name: str, m: int | Tensor, n: int | Tensor, rank: Tensor | None) -> Tensor | float:
    """The `Measure` of size: mn, or r(m+n)."""
    return m * n if rank is None else rank * (m + n)


def bare(name: str) -> str:
    """A module's name as `rank_pattern` has it: without the head's `model.`."""
    return name.removeprefix("model.")


@dataclass(frozen=True, eq=False)
class Sources:
    """The teacher's matrices under the names of the result's modules, layers of a group merged, and what they carry.

    Attributes:
        teacher: where tensors come from.
        dense: skeleton of the result before anything gets smaller.
        start: how a group of layers is merged: `aligned`, `mean` or `first`.
        calibration: the moments, if any.
        weighting: what errors of a matrix are weighed by.
        device: where matrices and moments are, and everything is computed.
        turns: teacher module → bases in which it is merged.
    """

    teacher: Teacher
    dense: nn.Module
    start: str
    calibration: Calibration | None
    weighting: str
    device: torch.device
    turns: dict[str, Turn] = field(default_factory=dict)
    _merged: dict[str, Linear] = field(default_factory=dict)

    def modules(self, name: str) -> list[str]:
        """The teacher's modules that a module is made of."""
        names = source_names(f"{name}.", self.teacher.config, self.dense.config)
        return [module.rstrip(".") for module in names]

    def linear(self, name: str) -> Linear:
        """The layer, with the layers of a group merged."""
        if name not in self._merged:
            modules = self.modules(name)
            own = {module: self.teacher.linear(module).to(self.device) for module in modules}
            layers = [self.turns.get(module, Turn()).linear(own[module]) for module in modules]
            if len(layers) == 1 or self.start == "first":
                return layers[0]
            moments = None
            if self.start == "aligned" and self.calibration is not None:
                moments = [self.calibration.inputs([module]) for module in modules]
            self._merged[name] = merge_linear(layers, moments)
        return self._merged[name]

    def matrix(self, name: str) -> Tensor:
        """m×n, inputs×outputs, or V×d."""
        return self.linear(name).matrix

    def bias(self, name: str) -> Tensor | None:
        """(n), or `None`."""
        return self.linear(name).bias

    def metric(self, name: str, kind: str) -> Metric | None:
        """In which the matrix is truncated; `None` without calibration."""
        if self.calibration is None:
            return None
        modules = self.modules(name)
        has_bias = any(self.teacher.bias(module) is not None for module in modules)
        return self.calibration.metric(modules, kind, has_bias, self.weighting)

    def factors(self, name: str) -> tuple[Tensor, Tensor] | None:
        """The two factors of a module that is factorized in the teacher already, and not merged."""
        modules = self.modules(name)
        return self.teacher.factors(modules[0]) if len(set(modules)) == 1 else None

    def moments(self, name: str) -> tuple[Tensor, Tensor] | None:
        """E[xᵀx] and E[x] of the inputs; `None` without calibration."""
        return None if self.calibration is None else self.calibration.inputs(self.modules(name))

    def gradients(self, name: str) -> Tensor:
        """Σ gᵀg / target tokens at the outputs."""
        return self.calibration.gradients(self.modules(name))


@dataclass(frozen=True, eq=False)
class Built:
    """What a part has become.

    Attributes:
        reports: of its matrices.
        tensors: under the names that the result's checkpoint has.
        coordinates: module → what its outputs are of the teacher's (n×n'), where they are fewer.
    """

    reports: list[MatrixReport]
    tensors: dict[str, Tensor]
    coordinates: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class MatrixPart:
    """One matrix by truncated SVD. Its setting is the rank, `None` is dense."""

    name: str
    kind: str
    sources: Sources
    split: Split

    def spectrum(self, rank: int | None = None) -> Spectrum:
        """Its singular values in the metric of the calibration; a rank known beforehand makes that cheaper."""
        metric, matrix = self.sources.metric(self.name, self.kind), self.sources.matrix(self.name)
        return decompose(matrix if metric is None else metric.weigh(matrix), name=bare(self.name), rank=rank)

    @cached_property
    def _singular_values(self) -> Tensor:
        return self.spectrum().singular_values.cpu()

    def size(self, rank: int | Tensor | None, measure: Measure) -> Tensor | float:
        """What the matrix takes of the budget at that rank."""
        return measure(self.name, *self.sources.matrix(self.name).shape, rank)

    def choices(self, measure: Measure) -> Choices:
        """Every rank, and dense."""
        ranks = torch.arange(1, len(self._singular_values) + 1)
        sizes = torch.as_tensor(self.size(ranks, measure)).double()
        dense = torch.as_tensor(self.size(None, measure)).double()
        pays = sizes < dense
        costs = torch.cat([tails(self._singular_values)[1:][pays], torch.zeros(1).double()])
        return Choices([*ranks[pays].tolist(), None], costs, torch.cat([sizes[pays], dense[None]]))

    def build(self, rank: int | None) -> Built:
        """The matrix at that rank."""
        matrix, bias = self.sources.matrix(self.name), self.sources.bias(self.name)
        metric = self.sources.metric(self.name, self.kind)
        report = {"energy": 1.0, "relative_error": 0.0}
        own = self.sources.factors(self.name)
        if own is not None and (rank is None or rank >= own[0].shape[1]):
            # A source that is factorized already, and would not get smaller, keeps the factors it has.
            left, right = own
            rank = left.shape[1]
        elif rank is not None:
            spectrum = self.spectrum(rank)
            factors = spectrum.truncate(rank, self.split)
            if metric is not None:
                factors = rescaled(metric.restore(factors), self.split)
                if metric.mean is not None:  # the bias takes the mean of what the factors lose
                    lost = metric.mean @ (matrix.double() - factors.left @ factors.right)
                    bias = (bias.double() + lost).to(bias.dtype)
            left, right = factors.left.to(matrix.dtype), factors.right.to(matrix.dtype)
            report = {"energy": spectrum.energy(rank), "relative_error": spectrum.relative_error(rank)}
            if self.kind == "embedding":
                left[(matrix == 0).all(dim=1)] = 0  # a padding row that is exactly zero stays so
        m, n = matrix.shape
        if rank is None:
            tensors = {"weight": matrix if self.kind == "embedding" else matrix.T, "bias": bias}
        elif isinstance(self.sources.dense.get_submodule(self.name), nn.Embedding):
            tensors = {"weight": left, "basis": right}
        elif self.kind == "embedding":  # an output layer that is not tied to a table
            tensors = {"output.weight": left, "basis": right}
        else:
            tensors = {"u.weight": left.T, "v.weight": right.T, "v.bias": bias}
        kept = m * n if rank is None else rank * (m + n)
        form = ("dense", "dense") if rank is None else ("low-rank", f"rank {rank}")
        report |= {"form": form[0], "size": rank, "setting": form[1]}
        reports = [MatrixReport(name=bare(self.name), kind=self.kind, m=m, n=n, parameters_after=kept, **report)]
        return Built(reports, stored({self.name: tensors}))


@dataclass(frozen=True, eq=False)
class HeadsPart:
    """An attention block by narrower heads. Its setting is their width, `None` is as it is."""

    name: str
    sources: Sources
    kind, method = "attention", "product"
    matrices = ("q_proj", "k_proj", "v_proj", "out_proj")

    @property
    def heads(self) -> int:
        """H."""
        attention: MultiHeadAttention = self.sources.dense.get_submodule(self.name)
        return attention.q_proj.out_features // attention.head_dim

    @cached_property
    def _bottlenecks(self) -> tuple[Bottlenecks, Bottlenecks, Tensor]:
        """Of queries, of contexts, and the mean of the context."""
        query, key, value, out = (f"{self.name}.{part}_proj" for part in ("q", "k", "v", "out"))
        q, bias = self.sources.matrix(query).double(), self.sources.bias(query).double()
        moments, heads = self.sources.moments(query), self.heads
        w_out = self.sources.matrix(out).double()
        if moments is None:
            k, v = self.sources.matrix(key).double(), self.sources.matrix(value).double()
            second, gradients = q.T @ q + torch.outer(bias, bias), k.T @ k
            mean, contexts, at_output = self.sources.bias(value).double(), v.T @ v, None
        else:
            x, mean_x = moments
            means = torch.outer(mean_x @ q, bias)
            second = q.T @ x @ q + means + means.T + torch.outer(bias, bias)
            gradients = self.sources.gradients(query)
            contexts, mean = self.sources.moments(out)
            contexts = contexts - torch.outer(mean, mean)
            at_output = self.sources.gradients(out)
        of_contexts = w_out @ (w_out.T if at_output is None else at_output @ w_out.T)
        queries = Bottlenecks.of(blocks(second, heads), blocks(gradients, heads))
        return queries, Bottlenecks.of(blocks(contexts, heads), blocks(of_contexts, heads)), mean

    def _scaled(self, maps: tuple[Tensor, Tensor], first: str, second: str) -> tuple[Tensor, Tensor]:
        """X and Y of every head, scaled for columns of W·X to be as long as what Y makes of the second matrix."""
        left = self._with_bias(first)
        behind = second == "out_proj"  # whose rows are those of the heads
        right = self.sources.matrix(f"{self.name}.{second}").double() if behind else self._with_bias(second).T
        scaled = []
        for head, (into, out_of) in enumerate(zip(*maps, strict=True)):
            own = slice(head * len(into), (head + 1) * len(into))
            pair = Factors(left[:, own] @ into, out_of @ right[own])
            scale = (rescaled(pair, "balanced").left.norm(dim=0) / pair.left.norm(dim=0)).nan_to_num(nan=1.0)
            scaled.append((into * scale, out_of / scale[:, None]))
        return tuple(torch.stack(side) for side in zip(*scaled, strict=True))

    def _with_bias(self, part: str) -> Tensor:
        """W with b below it: where W is nearly zero, its bias tells how large what comes out is."""
        name = f"{self.name}.{part}"
        return torch.cat([self.sources.matrix(name), self.sources.bias(name)[None]]).double()

    @property
    def widths(self) -> list[int]:
        """All that its heads can have, that of the teacher's included."""
        return list(range(1, self.sources.dense.get_submodule(self.name).head_dim + 1))

    def size(self, width: int | Tensor | None, measure: Measure) -> Tensor | float:
        """What the block takes of the budget with heads of that width."""
        inner = self.heads * (max(self.widths) if width is None else width)
        total = 0.0
        for part in self.matrices:
            m, n = self.sources.matrix(f"{self.name}.{part}").shape
            shape = (inner, n) if part == "out_proj" else (m, inner)
            total = total + measure(f"{self.name}.{part}", *shape, None)
        return total

    def choices(self, measure: Measure) -> Choices:
        """Every width below that of the teacher's heads, and that."""
        queries, contexts, _ = self._bottlenecks
        costs = (queries.costs() + contexts.costs()).cpu()[1:]
        costs[-1] = 0.0  # as it is
        sizes = torch.as_tensor(self.size(torch.tensor(self.widths), measure)).double()
        return Choices([*self.widths[:-1], None], costs, sizes)

    def build(self, width: int) -> Built:
        """The block with heads of that width."""
        queries, contexts, mean = self._bottlenecks
        full = queries.into.shape[-1]
        # As long as each other: inside a head, any basis and scale computes the same.
        into_q, out_of_q = self._scaled(queries.at(width), "q_proj", "k_proj")
        into_v, out_of_v = self._scaled(contexts.at(width), "v_proj", "out_proj")
        coordinates = {
            "q_proj": torch.block_diag(*(into_q * (width / full) ** 0.5)),  # scores are divided by the root of it
            "k_proj": torch.block_diag(*out_of_q.mT),
            "v_proj": torch.block_diag(*into_v),
        }
        spread = torch.block_diag(*out_of_v)
        tensors, reports = {}, []
        costs = queries.costs() + contexts.costs()
        share = (costs[width] / costs[0]).item() if costs[0] > 0 else 0.0
        for part in self.matrices:
            name = f"{self.name}.{part}"
            matrix, bias = self.sources.matrix(name), self.sources.bias(name)
            if part == "out_proj":
                lost = mean - mean @ coordinates["v_proj"] @ spread
                new, new_bias = spread @ matrix.double(), bias.double() + lost @ matrix.double()
            else:
                new, new_bias = matrix.double() @ coordinates[part], bias.double() @ coordinates[part]
            tensors[name] = {"weight": new.T.to(matrix.dtype), "bias": new_bias.to(bias.dtype)}
            reports.append(
                MatrixReport(
                    name=bare(name), kind=self.kind, m=matrix.shape[0], n=matrix.shape[1],
                    form="narrower heads", size=width, setting=f"heads {width} wide",
                    parameters_after=new.numel(), energy=1 - share, relative_error=share**0.5,
                )
            )  # fmt: skip
        coordinates = {f"{self.name}.{part}": matrix.cpu() for part, matrix in coordinates.items()}
        return Built(reports, stored(tensors), coordinates)


@dataclass(frozen=True, eq=False)
class NeuronsPart:
    """A feed-forward network by fewer neurons. Its setting is their number, `None` is as it is."""

    name: str
    sources: Sources
    kind, method = "ffn", "neurons"
    matrices = ("fc1", "fc2")

    def _moments(self) -> tuple[Tensor, Tensor]:
        """Covariance and mean of the activations; without calibration they are as long as their own weights."""
        moments = self.sources.moments(f"{self.name}.fc2")
        if moments is None:
            first, bias = self.sources.matrix(f"{self.name}.fc1"), self.sources.bias(f"{self.name}.fc1")
            variance = first.double().square().sum(0) + bias.double().square()
            return torch.diag(variance), torch.zeros_like(variance)
        second, mean = moments
        return second - torch.outer(mean, mean), mean

    @cached_property
    def _elimination(self) -> Elimination:
        second = self.sources.matrix(f"{self.name}.fc2")
        known = self.sources.calibration is not None
        gradients = self.sources.gradients(f"{self.name}.fc2") if known else torch.eye(second.shape[1]).to(second)
        return Elimination.of(self._moments()[0], second, gradients)

    @property
    def widths(self) -> list[int]:
        """All numbers of neurons that the elimination stops at."""
        elimination = self._elimination
        return [len(elimination.order) - removed for removed in elimination.removed]

    def size(self, width: int | Tensor | None, measure: Measure) -> Tensor | float:
        """What the network takes of the budget with so many neurons."""
        first, second = (f"{self.name}.{part}" for part in self.matrices)
        m, size = self.sources.matrix(first).shape
        width = size if width is None else width
        return measure(first, m, width, None) + measure(second, width, self.sources.matrix(second).shape[1], None)

    def choices(self, measure: Measure) -> Choices:
        """So many neurons as the elimination has a cost for."""
        sizes = torch.as_tensor(self.size(torch.tensor(self.widths), measure)).double()
        return Choices([None, *self.widths[1:]], self._elimination.costs, sizes)

    def build(self, width: int) -> Built:
        """The network with so many neurons."""
        elimination, (moment, mean) = self._elimination, self._moments()
        first, second = (f"{self.name}.{part}" for part in ("fc1", "fc2"))
        w_1, b_1, w_2, b_2 = (
            source(name) for name in (first, second) for source in (self.sources.matrix, self.sources.bias)
        )
        kept, new = elimination.at(width, w_2, moment)
        bias = b_2.double() + mean @ w_2.double() - mean[kept] @ new
        tensors = {
            first: {"weight": w_1.T[kept], "bias": b_1[kept]},
            second: {"weight": new.T.to(w_2.dtype), "bias": bias.to(b_2.dtype)},
        }
        size = len(w_2)
        cost = elimination.costs[elimination.removed.index(size - width)]
        whole = elimination.costs[-1]
        share = (cost / whole).clamp(0, 1).item() if whole > 0 else 0.0
        reports = [
            MatrixReport(
                name=bare(name), kind=self.kind, m=shape[0], n=shape[1], form="fewer neurons", size=width,
                setting=f"{width} neurons", parameters_after=width * other, energy=1 - share,
                relative_error=share**0.5,
            )
            for name, shape, other in ((first, w_1.shape, len(w_1)), (second, w_2.shape, w_2.shape[1]))
        ]  # fmt: skip
        coordinates = {first: torch.eye(size).double()[:, kept.cpu()]}
        return Built(reports, stored(tensors), coordinates)


Part = MatrixPart | HeadsPart | NeuronsPart


def stored(tensors: dict[str, dict[str, Tensor | None]]) -> dict[str, Tensor]:
    """{module: {leaf: tensor}} → {name: tensor} on the CPU, without what is `None`.

    A copy where it is a view, so that no source stays mapped and nothing is copied a second time on writing.
    """
    return {
        f"{name}.{leaf}": tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, leaves in tensors.items()
        for leaf, tensor in leaves.items()
        if tensor is not None
    }
