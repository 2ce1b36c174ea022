"""One budget for a whole model: which size every part of it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

K = TypeVar("K")


@dataclass(frozen=True, eq=False)
class Choices:
    """What one part of a model can become.

    Attributes:
        settings: a rank or a width each; `None` leaves the part as it is.
        costs: what each loses, in one unit for all parts (K) float64.
        sizes: parameters of each (K) float64.
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


class Pick(NamedTuple):
    """What a unit becomes: its cost, its size, and the index of the setting of each part."""

    cost: float
    size: float
    parts: dict


def allocate(units: Sequence[Sequence[Alternative[K]]], budget: float) -> dict[K, int | None]:
    """Choose one alternative of every unit, a part for each of its slots, and a setting of each part, within `budget`.

    For a price λ of a parameter, every unit takes what minimizes cost + λ·size by itself. This is the best choice of
    all for the size that it comes to (Everett 1963). λ is bisected to the lowest that meets the budget. Sizes that
    belong to a price have gaps, which are wide in small models: the rest of the budget then goes to the units whose
    cost falls most for each parameter.

    Args:
        units: e.g. an attention block: either narrower heads, or its four matrices by themselves, each in one form
            or another.

    Returns:
        {part: setting} of the parts chosen.

    Raises:
        ValueError: no choice is so small.
    """

    def fill(slots: Alternative[K], price: float) -> Pick:
        """Find the best parts and settings of one alternative at a price."""
        cost, size, parts = 0.0, 0.0, {}
        for slot in slots:
            best = [(*choices.best(price), part, choices) for part, choices in slot.items()]
            _, index, part, choices = min(best, key=lambda one: one[0])
            cost, size = cost + choices.costs[index].item(), size + choices.sizes[index].item()
            parts[part] = index
        return Pick(cost, size, parts)

    def choose(price: float) -> list[Pick]:
        return [
            min((fill(slots, price) for slots in alternatives), key=lambda pick: pick.cost + price * pick.size)
            for alternatives in units
        ]

    def total(picks: Sequence[Pick]) -> float:
        return sum(pick.size for pick in picks)

    if budget < (least := smallest(units)):
        raise ValueError(f"a budget of {budget:,.0f} cannot be met: the smallest choices take {least:,.0f}")
    picks = choose(0.0)
    if total(picks) > budget:
        low, high = 1e-30, 1e-12
        while total(choose(high)) > budget:
            low, high = high, high * 16
        while high / low > 1 + 1e-9:
            middle = (low * high) ** 0.5
            low, high = (low, middle) if total(choose(middle)) <= budget else (middle, high)
        picks = choose(high)
        prices = [high * 2 ** (step / 4) for step in range(-48, 25)]
        larger = [[fill(slots, price) for slots in alternatives for price in prices] for alternatives in units]
        while True:
            left = budget - total(picks)
            upgrades = [
                ((pick.cost - other.cost) / (other.size - pick.size), unit, other)
                for unit, pick in enumerate(picks)
                for other in larger[unit]
                if other.cost < pick.cost and 0 < other.size - pick.size <= left
            ]
            if not upgrades:
                break
            _, unit, picks[unit] = max(upgrades, key=lambda one: one[0])
    choices = {part: one for slots in chain(*units) for slot in slots for part, one in slot.items()}
    return {part: choices[part].settings[index] for pick in picks for part, index in pick.parts.items()}


def tail_energies(values: Tensor) -> Tensor:
    """Σ_{i>r} s_i² for r = 0 … K: what truncation at r loses."""
    squares = values.double().square()
    return torch.cat([squares.flip(0).cumsum(0).flip(0), squares.new_zeros(1)])
