"""Low rank: a matrix as the product of low-rank factors, by truncated SVD (LightFormer, Eq. 1 and 7-11)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...matrices import STACKS, Weight, rank_of
from ..moments import Metric
from ..rules import RankPolicy
from ..sharing import Originals, find_matrices, short_name
from . import Choices, Form, Setting, Shaped, commonest, register_form
from .svd import Split, decompose, singular_values, tail_energies


@register_form
@dataclass(frozen=True, eq=False)
class LowRank(Form):
    """One matrix by truncated SVD. Its setting is the rank, `None` is dense."""

    label, wording, method, is_usual = "low-rank", "rank {}", "low-rank", True

    @classmethod
    def sites(cls, dense: PreTrainedModel) -> dict[str, tuple[str, ...]]:
        return {name: (name,) for name, _ in find_matrices(dense)}

    @classmethod
    def fields(cls, sizes: Mapping[str, int], dense: PreTrainedModel) -> dict[str, object]:
        """The commonest rank of each kind as a field, the others as patterns."""
        kinds = {short_name(name): kind for name, kind in find_matrices(dense)}
        fields: dict[str, object] = {}
        for kind in ("attention", "ffn"):
            encoder, decoder = (
                commonest([sizes.get(name) for name in kinds if kinds[name] == kind and f"{stack}." in name])
                for stack in STACKS
            )
            fields[f"{kind}_rank"] = encoder
            fields[f"decoder_{kind}_rank"] = None if decoder == encoder else decoder
        tables = [sizes.get(name) for name, kind in kinds.items() if kind == "embedding"]
        fields["embedding_rank"] = tables[0] if tables else None
        config = type(dense.config)(**{**dense.config.to_dict(), **fields})
        usual = {
            name: config.rank_of_kind("decoder" if "decoder." in name else "encoder", kind)
            for name, kind in kinds.items()
        }
        fields["rank_pattern"] = {name: sizes.get(name) for name in kinds if sizes.get(name) != usual[name]}
        return fields

    @classmethod
    def holds(cls, module: nn.Module) -> bool:
        return rank_of(module) is not None

    @property
    def least(self) -> Setting:
        m, n = self.shape_of(self.name)
        return 1 if m + n < m * n else None

    def kept(self, setting: Setting) -> Setting:
        """A source that is factorized already, and would not get smaller, keeps the factors it has."""
        own = None if self.source is None else rank_of(self.source)
        return own if own is not None and (setting is None or setting >= own) else None

    def size(self, setting: Setting | Tensor) -> Tensor | float:
        m, n = self.shape_of(self.name)
        return m * n if setting is None else m * setting + setting * n

    def choices(self, originals: Originals) -> Choices:
        name, metric = short_name(self.name), originals.metric(self.name, self.kind(self.name))
        values = singular_values(originals.weight(self.name).product(), name=name, metric=metric).cpu()
        ranks = torch.arange(1, len(values) + 1)
        sizes = torch.as_tensor(self.size(ranks)).double()
        dense = torch.as_tensor(self.size(None)).double()
        pays, energies = sizes < dense, tail_energies(values)
        costs = torch.cat([energies[1:][pays], torch.zeros(1).double()])
        settings = [*ranks[pays].tolist(), None]
        return Choices(settings, costs, torch.cat([sizes[pays], dense[None]]), energies[0].item(), values)

    def waits(self, policy: RankPolicy) -> bool:
        return policy.needs_spectrum(short_name(self.name), self.kind(self.name))

    def follow(self, policy: RankPolicy, choices: Choices | None = None) -> Setting:
        values = None if choices is None else choices.details
        return policy.choose(short_name(self.name), self.kind(self.name), *self.shape_of(self.name), values)

    def error(self, setting: Setting, originals: Originals, choices: Choices | None = None) -> float:
        if originals.is_truncated_first and self.source is None:
            return self.shape(setting, originals).error
        return super().error(setting, originals, choices)

    def shape(self, setting: Setting, originals: Originals, choices: Choices | None = None) -> Shaped:
        if setting is None or self.source is not None or not originals.is_truncated_first:
            return super().shape(setting, originals, choices)
        # Layers of a group are truncated, then merged. Their own factors have no mean: bases and signs differ.
        name, weight = short_name(self.name), originals.weight(self.name)
        pairs = [
            decompose(layer.product(), name=name, rank=setting).truncate(setting)
            for layer in originals.layers(self.name)
        ]
        merged = torch.stack([left @ right for left, right in pairs]).mean(0)
        found = decompose(merged, name=name, rank=setting).truncate(setting)
        factors = Weight(found.left.to(weight.left.dtype), found.right.to(weight.left.dtype), weight.bias)
        lost, whole = (matrix.double().norm().item() for matrix in (weight.left - factors.product(), weight.left))
        return Shaped({self.name: factors}, error=lost / whole if whole else 0.0)

    @classmethod
    def fit(
        cls,
        module: nn.Module,
        weight: Weight,
        find_metric: Callable[[], Metric | None],
        *,
        name: str,
        split: Split = "sigma-right",
    ) -> float:
        rank = cast(int, rank_of(module))
        if weight.rank == rank:
            weight.put(module)
            return 0.0
        factors, error = truncate(weight, rank, find_metric(), name=name, split=split)
        if module.kind == "embedding":
            # A padding row that is exactly zero stays so. A mask of all elements would be a quarter of the table.
            factors.left[torch.linalg.vector_norm(weight.product(), ord=torch.inf, dim=1) == 0] = 0
        factors.put(module)
        return error


def truncate(
    weight: Weight, rank: int, metric: Metric | None, *, name: str, split: Split = "sigma-right"
) -> tuple[Weight, float]:
    """Return the nearest factors of a rank, with a bias that takes the mean of their error, and the relative error."""
    matrix, bias = weight.product(), weight.bias
    spectrum = decompose(matrix, name=name, rank=rank, metric=metric)
    left, right = spectrum.truncate(rank, split)
    if metric is not None and metric.mean is not None and bias is not None:
        lost = metric.mean @ matrix.double() - metric.mean @ left.double() @ right.double()
        bias = (bias.double() + lost).to(bias.dtype)
    return Weight(left, right, bias), spectrum.relative_error(rank)


class Ranks(NamedTuple):
    """Ranks of several matrices that are truncated together."""

    settings: list[tuple[int | None, ...]]  # a rank for each matrix, `None` where factors would not be smaller
    costs: Tensor  # float64
    sizes: Tensor


def join_ranks(shapes: Sequence[tuple[int, int]], energies: Sequence[Tensor]) -> Ranks:
    """Return the ranks of matrices of such shapes (m, n) that lose least together, for every sum of ranks.

    Args:
        energies: the squared singular values of each matrix, descending.
    """
    owners = torch.cat([torch.full((len(values),), index) for index, values in enumerate(energies)])
    order = torch.cat(list(energies)).argsort(descending=True, stable=True)
    counts = F.one_hot(owners[order], len(shapes)).cumsum(0)
    counts = counts[(counts > 0).all(1)]
    costs, sizes = (torch.zeros(len(counts), dtype=torch.float64) for _ in range(2))
    pays = torch.zeros_like(counts, dtype=torch.bool)
    for index, ((m, n), values) in enumerate(zip(shapes, energies, strict=True)):
        ranks = counts[:, index]
        pays[:, index] = smaller = ranks * (m + n) < m * n
        costs += torch.where(smaller, tail_energies(values.sqrt())[ranks], 0)
        sizes += torch.where(smaller, ranks * (m + n), m * n)
    settings = [
        tuple(rank if smaller else None for rank, smaller in zip(*row, strict=True))
        for row in zip(counts.tolist(), pays.tolist(), strict=True)
    ]
    return Ranks(settings, costs, sizes)
