"""Low rank: a matrix as the product of low-rank factors, by truncated SVD (LightFormer, Eq. 1 and 7-11)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...matrices import factors_of, low_rank_state, rank_of
from ..moments import Metric, lazy_property
from ..report import MatrixReport
from ..rules import RankPolicy
from ..sharing import STACKS, find_matrices, short_name
from . import Built, Choices, Form, Setting, commonest, register_form
from .svd import Factors, Spectrum, decompose, singular_values, tail_energies


@register_form
@dataclass(frozen=True, eq=False)
class LowRank(Form):
    """One matrix by truncated SVD. Its setting is the rank, `None` is dense."""

    label, method, is_usual = "low-rank", "low-rank", True
    _decomposed: list[Spectrum] = field(default_factory=list)

    @classmethod
    def places(cls, dense: PreTrainedModel) -> dict[str, tuple[str, ...]]:
        return {name: (name,) for name, _ in find_matrices(dense)}

    @classmethod
    def fields(cls, reports: Sequence[MatrixReport], dense: PreTrainedModel) -> dict[str, object]:
        """The commonest rank of each kind as a field, the others as patterns."""
        ranks = {report.name: report.size for report in reports}
        kinds = {short_name(name): kind for name, kind in find_matrices(dense)}
        fields: dict[str, object] = {}
        for kind in ("attention", "ffn"):
            encoder, decoder = (
                commonest([ranks.get(name) for name in kinds if kinds[name] == kind and f"{stack}." in name])
                for stack in STACKS
            )
            fields[f"{kind}_rank"] = encoder
            fields[f"decoder_{kind}_rank"] = None if decoder == encoder else decoder
        tables = [ranks.get(name) for name, kind in kinds.items() if kind == "embedding"]
        fields["embedding_rank"] = tables[0] if tables else None
        config = type(dense.config)(**{**dense.config.to_dict(), **fields})
        usual = {
            name: config.rank_of_kind("decoder" if "decoder." in name else "encoder", kind)
            for name, kind in kinds.items()
        }
        fields["rank_pattern"] = {name: ranks.get(name) for name in kinds if ranks.get(name) != usual[name]}
        return fields

    @classmethod
    def holds(cls, module: nn.Module) -> bool:
        return rank_of(module) is not None

    @property
    def least(self) -> Setting:
        m, n = self.shape(self.name)
        return 1 if m + n < m * n else None

    def size(self, setting: Setting | Tensor) -> Tensor | float:
        m, n = self.shape(self.name)
        return m * n if setting is None else m * setting + setting * n

    @property
    def _metric(self) -> Metric | None:
        return self.originals.metric(self.name, self.kind(self.name))

    @lazy_property
    def _singular_values(self) -> Tensor:
        matrix = self.originals.matrix(self.name)
        return singular_values(matrix, name=short_name(self.name), metric=self._metric).cpu()

    def choices(self) -> Choices:
        ranks = torch.arange(1, len(self._singular_values) + 1)
        sizes = torch.as_tensor(self.size(ranks)).double()
        dense = torch.as_tensor(self.size(None)).double()
        pays = sizes < dense
        costs = torch.cat([tail_energies(self._singular_values)[1:][pays], torch.zeros(1).double()])
        return Choices([*ranks[pays].tolist(), None], costs, torch.cat([sizes[pays], dense[None]]))

    def follow(self, policy: RankPolicy) -> Setting:
        name, kind = short_name(self.name), self.kind(self.name)
        values = None
        if policy.needs_spectrum(name, kind):
            self._decomposed.append(decompose(self.originals.matrix(self.name), name=name, metric=self._metric))
            values = self._decomposed[-1].singular_values
        return policy.choose(name, kind, *self.shape(self.name), values)

    def build(self, setting: Setting) -> Built:
        source = self.originals.own_module(self.name)
        if source is not None and self.holds(source):
            # A source that is factorized already, and would not get smaller, keeps the factors it has.
            own = factors_of(self.originals.teacher.module(self.originals.sources(self.name)[0]))
            if setting is None or setting >= own[0].shape[1]:
                return self._built(Factors(*own), self.originals.linear(self.name).bias, 0.0)
        if setting is None:
            return self.keep([self.name])
        (matrix, bias), metric, name = self.originals.linear(self.name), self._metric, short_name(self.name)
        spectrum = self._decomposed.pop() if self._decomposed else None
        if self.originals.is_truncated_first and source is None:
            # Layers of a group are truncated, then merged. Their own factors have no mean: bases and signs differ.
            pairs = [
                decompose(layer.matrix, name=name, rank=setting).truncate(setting)
                for layer in self.originals.layers(self.name)
            ]
            merged = torch.stack([left @ right for left, right in pairs]).mean(0)
            found = decompose(merged, name=name, rank=setting).truncate(setting)
            factors = Factors(*(factor.to(matrix.dtype) for factor in found))
            lost, whole = (each.double().norm().item() for each in (matrix - factors.left @ factors.right, matrix))
            return self._built(factors, bias, lost / whole if whole else 0.0)
        spectrum = spectrum or decompose(matrix, name=name, rank=setting, metric=metric)
        factors = spectrum.truncate(setting)
        if metric is not None and metric.mean is not None:  # the bias takes the mean error of the factors
            lost = metric.mean @ matrix.double() - metric.mean @ factors.left.double() @ factors.right.double()
            bias = (bias.double() + lost).to(bias.dtype)
        left, right = factors.left.to(matrix.dtype), factors.right.to(matrix.dtype)
        if self.kind(self.name) == "embedding":
            # A padding row that is exactly zero stays so. A mask of all elements would be a quarter of the table.
            left[torch.linalg.vector_norm(matrix, ord=torch.inf, dim=1) == 0] = 0
        return self._built(Factors(left, right), bias, spectrum.relative_error(setting))

    @classmethod
    def nearest_state(
        cls, module: nn.Module, matrix: Tensor, bias: Tensor | None, find_metric: Callable[[], Metric], *, name: str
    ) -> dict[str, Tensor]:
        rank = rank_of(module)
        factors = decompose(matrix, name=name, rank=rank, metric=find_metric()).truncate(rank, "balanced")
        return low_rank_state(module, factors.left, factors.right, bias)

    def _built(self, factors: Factors, bias: Tensor | None, error: float) -> Built:
        rank = factors.left.shape[1]
        state = low_rank_state(self.originals.module(self.name), *factors, bias)
        return self.built({self.name: state}, rank, f"rank {rank}", error)
