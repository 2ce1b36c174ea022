"""One budget for a whole model: which size every part of it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

K = TypeVar("K")


@dataclass(frozen=True, eq=False)
class Choices:
    """What one part of a model can become.

    Attributes:
        settings: a rank or a width each; `None` leaves the part as it is.
        costs: what each loses, in one unit for all parts (K) float64.
        sizes: what each takes of the budget: parameters, or microseconds (K) float64.
    """

    settings: list[int | None]
    costs: Tensor
    sizes: Tensor

    def best(self, price: float) -> tuple[float, int]:
        """The least cost + price · size, and where it is."""
        value, index = (self.costs + price * self.sizes).min(0)
        return value.item(), int(index)


# Whoever can fill a slot, and what it can become: one of them is chosen.
Slot = Mapping[K, Choices]
# Slots that are filled independently.
Alternative = Sequence[Slot[K]]


def smallest(units: Sequence[Sequence[Alternative[K]]]) -> float:
    """The least size that the units can have together."""
    return sum(
        min(
            sum(min(choices.sizes.min().item() for choices in slot.values()) for slot in slots)
            for slots in alternatives
        )
        for alternatives in units
    )


def allocate(units: Sequence[Sequence[Alternative[K]]], budget: float) -> dict[K, int | None]:
    """One alternative of every unit, a part for each of its slots, and a setting for that: the least cost in `budget`.

    For a price λ of a parameter (or a microsecond) every unit takes what minimises cost + λ·size for itself, which is
    the best choice for the size that it comes to (Everett 1963); λ is bisected to the lowest that meets the budget.

    Args:
        units: e.g. an attention block: either narrower heads, or its four matrices by themselves, each in one form
            or another.

    Returns:
        {part: setting} of the parts chosen.

    Raises:
        ValueError: no choice is so small.
    """

    def best_of(slot: Slot[K], price: float) -> tuple[float, K, int | None, float]:
        best = [(*choices.best(price), part, choices) for part, choices in slot.items()]
        value, index, part, choices = min(best, key=lambda one: one[0])
        return value, part, choices.settings[index], choices.sizes[index].item()

    def choose(price: float) -> tuple[dict, float]:
        settings, total = {}, 0.0
        for alternatives in units:
            found = [[best_of(slot, price) for slot in slots] for slots in alternatives]
            for _, part, setting, size in min(found, key=lambda slots: sum(value for value, *_ in slots)):
                settings[part] = setting
                total += size
        return settings, total

    if budget < (least := smallest(units)):
        raise ValueError(f"a budget of {budget:,.0f} cannot be met: the smallest choices take {least:,.0f}")
    settings, total = choose(0.0)
    if total <= budget:
        return settings
    low, high = 1e-30, 1e-12
    while choose(high)[1] > budget:
        low, high = high, high * 16
    while high / low > 1 + 1e-9:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if choose(middle)[1] <= budget else (middle, high)
    return choose(high)[0]


def tail_energies(values: Tensor) -> Tensor:
    """Σ_{i>r} s_i² for r = 0 … K: what truncation at r loses."""
    squares = values.double().square()
    return torch.cat([squares.flip(0).cumsum(0).flip(0), squares.new_zeros(1)])
