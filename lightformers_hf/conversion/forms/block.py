"""A block of several matrices with one inner width, such as heads or neurons, which may be low-rank besides.

The last directions of an inner width cost most, and so do the last ranks: both together cost less than one of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import Tensor

from ...matrices import Weight
from ..moments import Metric
from ..rules import RankPolicy
from ..sharing import Originals, short_name
from . import Choices, Form, Setting, Shaped
from .low_rank import LowRank, join_ranks, truncate

# The inner widths at which ranks get lower, too.
SHARES = (7 / 8, 3 / 4, 5 / 8, 1 / 2, 3 / 8, 1 / 4, 1 / 8)


@dataclass(frozen=True, eq=False)
class Block(Form):
    """Several matrices by a smaller inner width. A setting is the width, or the width and a rank for each matrix."""

    @property
    @abstractmethod
    def widths(self) -> list[int]:
        """All inner widths that are possible, the teacher's among them."""

    @abstractmethod
    def shapes_at(self, width: int) -> list[tuple[int, int]]:
        """(m, n) of the matrices at an inner width."""

    @abstractmethod
    def metrics_at(self, shaped: Shaped, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """The norm of every matrix of a smaller inner width, from those at the teacher's."""

    @abstractmethod
    def narrow(self, width: int, originals: Originals, choices: Choices) -> Shaped:
        """The matrices for an inner width, dense."""

    def follow(self, policy: RankPolicy, choices: Choices | None = None) -> Setting:
        return policy.choose_width(short_name(self.name), self.kind(self.matrices[0]), self.widths)

    def size(self, setting: Setting | Tensor) -> Tensor | float:
        width, *ranks = self._split(max(self.widths) if setting is None else setting)
        shapes = zip_longest(self.shapes_at(width), ranks)
        return sum(m * n if rank is None else rank * (m + n) for (m, n), rank in shapes)

    @staticmethod
    def _split(setting: Setting) -> tuple[int, ...]:
        return setting if isinstance(setting, tuple) else (setting,)

    def parts(self, setting: Setting) -> Iterator[tuple[type[Form], str, int]]:
        width, *ranks = self._split(setting)
        yield from super().parts(width)
        for name, rank in zip(self.matrices, ranks, strict=False):
            if rank is not None:
                yield LowRank, name, rank

    def describe(self, name: str, setting: Setting) -> tuple[int, str]:
        words = [form.wording.format(size) for form, matrix, size in self.parts(setting) if matrix == name]
        return self._split(setting)[0], ", ".join(words)

    def metrics(self, originals: Originals) -> dict[str, Metric]:
        """The norm of every matrix, from calibration."""
        found = {name: originals.metric(name, self.kind(name)) for name in self.matrices}
        return {name: metric for name, metric in found.items() if metric is not None}

    def watched(self, originals: Originals) -> list[int]:
        """The inner widths at which ranks get lower, too; none without calibration."""
        if self.is_alone or originals.calibration is None:
            return []
        full = max(self.widths)
        found = {min(self.widths, key=lambda width: abs(width - share * full)) for share in SHARES}
        return sorted(found - {full})

    def mix(self, plain: Choices, energies: Mapping[int, Sequence[Tensor]]) -> Choices:
        """Add the choices with low-rank matrices to those without.

        Args:
            energies: inner width → of each matrix, its squared singular values in its metric.
        """
        settings, costs, sizes = list(plain.settings), [plain.costs], [plain.sizes]
        for width, values in energies.items():
            ranks = join_ranks(self.shapes_at(width), [value.cpu() for value in values])
            settings += [(width, *each) for each in ranks.settings]
            costs.append(ranks.costs + plain.cost_of(width))
            sizes.append(ranks.sizes)
        mixed = len(settings) - len(plain.settings)
        return Choices(settings, torch.cat(costs), torch.cat(sizes), plain.whole, plain.details, mixed)

    def shape(self, setting: Setting, originals: Originals, choices: Choices | None = None) -> Shaped:
        if setting is None:
            return super().shape(setting, originals)
        width, *ranks = self._split(setting)
        choices = choices or self.choices(originals)
        shaped = self.narrow(width, originals, choices)
        if not any(ranks):
            return replace(shaped, error=choices.relative_error(setting))
        weights: dict[str, Weight] = dict(shaped.weights)
        metrics = self.metrics_at(shaped, self.metrics(originals))
        for name, rank in zip(self.matrices, ranks, strict=True):
            if rank is not None:
                weights[name], _ = truncate(weights[name], rank, metrics[name], name=short_name(name))
        return replace(shaped, weights=weights, error=choices.relative_error(setting))
