"""One budget for a whole model: which size every part of it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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


# Names of parts and what they can become; the parts are chosen independently.
Alternative = Mapping[str, Choices]


def smallest(units: Sequence[Sequence[Alternative]]) -> float:
    """The least size that the units can have together."""
    return sum(
        min(sum(choices.sizes.min().item() for choices in parts.values()) for parts in alternatives)
        for alternatives in units
    )


def allocate(units: Sequence[Sequence[Alternative]], budget: float) -> dict[str, int | None]:
    """One alternative of every unit and a setting of each of its parts: the least total cost within `budget`.

    For a price λ of a parameter (or a microsecond) every unit takes what minimises cost + λ·size for itself, which is
    the best choice for the size that it comes to (Everett 1963); λ is bisected to the lowest that meets the budget.

    Args:
        units: e.g. an attention block: either narrower heads, or its four matrices by themselves.

    Returns:
        {name of a part: setting} of the alternatives chosen.

    Raises:
        ValueError: no choice is so small.
    """

    def choose(price: float) -> tuple[dict, float]:
        settings, total = {}, 0.0
        for alternatives in units:
            found = [{name: choices.best(price) for name, choices in parts.items()} for parts in alternatives]
            least = min(range(len(found)), key=lambda index: sum(value for value, _ in found[index].values()))
            for name, (_, index) in found[least].items():
                choices = alternatives[least][name]
                settings[name] = choices.settings[index]
                total += choices.sizes[index].item()
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
