"""Budgets as users give them, `ratio`, `params`, `size` or `speedup`: what each leaves for the places of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from transformers import PreTrainedConfig

from ...loading import stored_tensors, tensor_bytes
from ..forms.form import Form, Measure, Setting, count_parameters
from ..options import CompressionOptions, missing_unit, read_quantity
from ..sharing.groups import find_matrices
from ..sharing.originals import Originals
from .budget import Choices, allocate
from .latency import SentenceCosts, sentence_costs
from .rules import Ratio

# What a safetensors file spends on naming a tensor, about.
HEADER_BYTES = 130
# How often the time of a model is estimated anew: what a token reads decides how much of it stays in the cache.
ROUNDS = 4

# Of a unit's alternatives one is chosen, and of the places of each of its slots one.
Alternatives = Sequence[Sequence[Sequence[Form]]]


@dataclass(frozen=True)
class Budget(ABC):
    """What all places of a model may have together.

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

    @abstractmethod
    def check(self) -> None:
        """Raise `ValueError` where the budget cannot be met, or asks for nothing. Needs no statistics."""

    @property
    def removed(self) -> float:
        """Share of the free places' parameters that is removed, as far as it is known before anything is measured."""
        return 0.5

    @abstractmethod
    def spend(self, choices: Mapping[Form, Choices]) -> dict[Form, Setting]:
        """The settings of the free places that lose least within the budget. Needs `check` before.

        Args:
            choices: of every free place, with its sizes in parameters.
        """

    def _total(self, measure: Measure) -> tuple[float, float]:
        """What is fixed, and the least that the free places can have."""
        fixed = sum(float(place.size(setting, measure)) for place, setting in self.given.items())

        def least(place: Form) -> float:
            return min(float(place.size(setting, measure)) for setting in (place.least, None))

        return fixed, sum(min(sum(min(map(least, slot)) for slot in slots) for slots in unit) for unit in self.free)

    def _allocate(self, choices: Mapping[Form, Choices], available: float) -> dict[Form, Setting]:
        units = [
            [[{place: choices[place] for place in slot} for slot in slots] for slots in unit] for unit in self.free
        ]
        return allocate(units, available)


class ParameterBudget(Budget):
    """A ratio, a number of parameters, or of bytes: all of them a number of parameters."""

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
        fixed, _ = self._total(count_parameters)
        if name == "params":
            return asked - self._besides - fixed
        return (asked - self._overhead) / self._itemsize - self._besides - fixed

    @property
    def _dense(self) -> float:
        """Parameters of the free places as they are."""
        return sum(max(_dense(slots) for slots in unit) for unit in self.free)

    @property
    def removed(self) -> float:
        """As `Budget.removed`."""
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
        """Raise `ValueError` where not even the smallest settings fit, or where the model is as small already."""
        name, dense = self.options.budget, self.originals.dense
        asked, (fixed, least) = getattr(self.options, name), self._total(count_parameters)
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
        """As `Budget.spend`."""
        return self._allocate(choices, self.available)


class TimeBudget(Budget):
    """A speedup: microseconds of translating a sentence on this machine."""

    @cached_property
    def _whole(self) -> SentenceCosts:
        return sentence_costs(self.originals.dense.config)

    @cached_property
    def _teacher(self) -> float:
        return sentence_costs(self.originals.teacher.timed_config).total

    def check(self) -> None:
        """Raise `ValueError` where everything at its smallest is not as fast."""
        whole, wanted = self._whole, self.options.speedup
        read = whole.working_set / wanted
        self._check(replace(whole, working_set=read))

    def _check(self, measure: SentenceCosts) -> float:
        """Microseconds that the free places may have."""
        teacher, wanted = self._teacher, self.options.speedup
        fixed, least = self._total(measure)
        available = teacher / wanted - measure.overhead - fixed
        if least > available:
            most = teacher / (measure.overhead + fixed + least)
            raise ValueError(
                f"speedup is {wanted:g}, which cannot be met: with everything at its smallest this model is "
                f"estimated {most:.2g} times as fast as its teacher; decoder_layers would take it further"
            )
        return available

    def spend(self, choices: Mapping[Form, Choices]) -> dict[Form, Setting]:
        """As `Budget.spend`: what the places lose is as given, what they take is measured anew."""
        whole = self._whole
        read = whole.working_set / self.options.speedup
        settings: dict[Form, Setting] = {}
        for _ in range(ROUNDS):
            measure = replace(whole, working_set=read)
            timed = {place: place.choices(measure) for place in choices}
            settings = self._allocate(timed, self._check(measure))
            chosen = {**self.given, **settings}
            left = sum(float(place.size(value, whole.bytes_read)) for place, value in chosen.items())
            read = (read + left) / 2
        return settings


def _dense(slots: Sequence[Sequence[Form]]) -> float:
    return sum(float(slot[0].size(None, count_parameters)) for slot in slots)


def find_budget(
    originals: Originals,
    options: CompressionOptions,
    given: Mapping[Form, Setting],
    free: Sequence[Alternatives],
) -> Budget:
    """The budget that the options ask for."""
    budget = TimeBudget if options.budget == "speedup" else ParameterBudget
    return budget(originals, options, given, free)


def estimate_speedup(source: PreTrainedConfig, result: PreTrainedConfig) -> float:
    """How many times as fast as its source a result is, by the costs of this machine."""
    return sentence_costs(source).total / sentence_costs(result).total
