"""Budgets as users give them, `ratio`, `params` or `size`: what each leaves for the places of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...loading import stored_tensors, tensor_bytes
from ..forms.form import Form, Setting
from ..options import CompressionOptions, missing_unit, read_quantity
from ..sharing.groups import find_matrices
from ..sharing.originals import Originals
from .budget import Choices, allocate
from .rules import Ratio

# What a safetensors file spends on naming a tensor, about.
HEADER_BYTES = 130

# Of a unit's alternatives one is chosen, and of the places of each of its slots one.
Alternatives = Sequence[Sequence[Sequence[Form]]]


@dataclass(frozen=True)
class Budget:
    """The parameters that all places of a model may have together, given as a ratio, a number, or bytes.

    Attributes:
        originals: the model.
        options: give the budget.
        given: settings that are fixed already.
        free: the units that the rest is for.
    """

    originals: Originals
    options: CompressionOptions
    given: Mapping[Form, Setting]
    free: Sequence[Alternatives]

    def _total(self) -> tuple[float, float]:
        """Parameters of what is fixed, and the fewest that the free places can have."""
        fixed = sum(float(place.size(setting)) for place, setting in self.given.items())

        def least(place: Form) -> float:
            return min(float(place.size(setting)) for setting in (place.least, None))

        return fixed, sum(min(sum(min(map(least, slot)) for slot in slots) for slots in unit) for unit in self.free)

    @property
    def _besides(self) -> int:
        """Parameters that are in no matrix."""
        dense = self.originals.dense
        matrices = (dense.get_submodule(name).weight for name, _ in find_matrices(dense))
        return dense.num_parameters() - sum(matrix.numel() for matrix in matrices)

    @property
    def available(self) -> float:
        """Parameters that the free places may have."""
        name = self.options.budget
        if name == "ratio":
            return self._dense / self._ratio
        asked = read_quantity(name, getattr(self.options, name))
        fixed, _ = self._total()
        if name == "params":
            return asked - self._besides - fixed
        return (asked - self._overhead) / self._itemsize - self._besides - fixed

    @property
    def _dense(self) -> float:
        """Parameters of the free places as they are."""
        return sum(max(_dense(slots) for slots in unit) for unit in self.free)

    @property
    def removed(self) -> float:
        """Share of the free places' parameters that is removed."""
        return max(0.0, 1 - self.available / self._dense)

    @property
    def _ratio(self) -> float:
        """p where the budget is a ratio, given or the default's."""
        rule = self.options.policy().default
        assert isinstance(rule, Ratio), f"the budget is {self.options.budget}, no ratio"
        return rule.ratio

    @property
    def _itemsize(self) -> int:
        return (self.originals.teacher.config.dtype or torch.float32).itemsize

    @property
    def _overhead(self) -> int:
        """Bytes of a checkpoint that are no parameters: buffers, and a header that names every tensor."""
        tensors = stored_tensors(self.originals.dense)
        buffers = sum(tensor.numel() for tensor in tensors.values()) - self.originals.dense.num_parameters()
        return HEADER_BYTES * len(tensors) + buffers * self._itemsize

    def check(self) -> None:
        """Raise `ValueError` if not even the smallest settings fit, or if the model is as small already.

        This needs no statistics.
        """
        name, dense = self.options.budget, self.originals.dense
        asked, (fixed, least) = getattr(self.options, name), self._total()
        least_parameters = self._besides + fixed + least
        if least > self.available:
            left = f"{least_parameters:,.0f} parameters"
            hint = ""
            if name == "size":
                left = f"{least_parameters * self._itemsize + self._overhead:,.0f} bytes"
                hint = missing_unit(asked)
            raise ValueError(
                f"{name} is {asked or self._ratio}, which cannot be met: with everything at "
                f"its smallest {left} are left" + (f"; {hint}" if hint else "")
            )
        if name == "ratio":
            return
        held = dense.num_parameters() if name == "params" else tensor_bytes(dense)
        if read_quantity(name, asked) >= held:
            has = f"{held:,} parameters" if name == "params" else f"{held / 1e6:,.1f} MB"
            raise ValueError(
                f"{name} is {asked}, and {self.originals.teacher.name} has {has} already: give less than that"
            )

    def spend(self, choices: Mapping[Form, Choices]) -> dict[Form, Setting]:
        """Return the settings of the free places that lose least within the budget. Needs `check` before.

        Args:
            choices: of every free place.
        """
        units = [
            [[{place: choices[place] for place in slot} for slot in slots] for slots in unit] for unit in self.free
        ]
        return allocate(units, self.available)


def _dense(slots: Sequence[Sequence[Form]]) -> float:
    return sum(float(slot[0].size(None)) for slot in slots)
