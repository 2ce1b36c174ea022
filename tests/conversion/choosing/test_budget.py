"""One budget: against every other choice of so much."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightformers_hf.conversion.choosing.budget import Choices, allocate, smallest, tail_energies

pytestmark = pytest.mark.quick


def part(generator: torch.Generator, number: int) -> Choices:
    """Random choices, the last of which loses nothing."""
    costs = torch.rand(number, generator=generator).double().sort(descending=True).values
    costs[-1] = 0
    sizes = torch.randint(1, 30, (number,), generator=generator).double().sort().values
    return Choices([*range(1, number), None], costs, sizes)


def measure(units, picks) -> tuple[float, float]:
    chosen = [(alternatives[which], places) for alternatives, (which, places) in zip(units, picks, strict=True)]
    pairs = [
        (slot[name], index) for slots, places in chosen for slot, (name, index) in zip(slots, places, strict=True)
    ]
    return (
        sum(choices.sizes[index].item() for choices, index in pairs),
        sum(choices.costs[index].item() for choices, index in pairs),
    )


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.floats(0.05, 1.1))
def test_only_choices_within_reach_of_a_larger_budget_are_cheaper(seed, share):
    """The price alone is optimal for the size that it comes to, which one unit's range, at most, keeps from the
    budget: so no choice that takes that much less than the budget is cheaper."""
    generator = torch.Generator().manual_seed(seed)
    units = [
        [[{"heads": part(generator, 4)}], [{"q": part(generator, 3)}, {"k": part(generator, 3)}]],
        [[{"neurons": part(generator, 4)}], [{"fc": part(generator, 3), "fc in blocks": part(generator, 2)}]],
        [[{"table": part(generator, 5)}]],
    ]
    budget = share * sum(
        max(sum(choices.sizes.max().item() for slot in slots for choices in slot.values()) for slots in alternatives)
        for alternatives in units
    )
    options = [
        [
            (which, places)
            for which, slots in enumerate(alternatives)
            for places in itertools.product(
                *(
                    [(name, index) for name, choices in slot.items() for index in range(len(choices.settings))]
                    for slot in slots
                )
            )
        ]
        for alternatives in units
    ]
    every = [measure(units, picks) for picks in itertools.product(*options)]
    least = min(size for size, _ in every)
    assert smallest(units) == least
    if budget < least:
        with pytest.raises(ValueError, match="cannot be met"):
            allocate(units, budget)
        return
    chosen = allocate(units, budget)
    picks = []
    for alternatives in units:
        (which,) = [index for index, slots in enumerate(alternatives) if set(chosen).intersection(*slots[:1])]
        names = [next(name for name in slot if name in chosen) for slot in alternatives[which]]
        slots = zip(alternatives[which], names, strict=True)
        picks.append((which, [(name, slot[name].settings.index(chosen[name])) for slot, name in slots]))
    assert len(chosen) == sum(len(units[index][which]) for index, (which, _) in enumerate(picks))
    size, cost = measure(units, picks)
    assert size <= budget
    ranges = [
        max(sizes) - min(sizes)
        for sizes in (
            [measure([unit], [pick])[0] for pick in picks] for unit, picks in zip(units, options, strict=True)
        )
    ]
    assert all(other_size > budget - max(ranges) or other_cost >= cost - 1e-9 for other_size, other_cost in every)


def test_what_a_price_leaves_of_a_budget_is_spent():
    """Below the price of 1 the first part takes 10 more, and the 9 that are left go to the second part."""
    first = Choices([1, 2], torch.tensor([10.0, 0.0]).double(), torch.tensor([1.0, 11.0]).double())
    second = Choices([1, 2, 3], torch.tensor([4.0, 2.0, 0.5]).double(), torch.tensor([1.0, 5.0, 9.0]).double())
    assert allocate([[[{"first": first}]], [[{"second": second}]]], 11.0) == {"first": 1, "second": 3}


def test_a_budget_for_everything_loses_nothing():
    free = Choices([1, None], torch.tensor([1.0, 0.0]), torch.tensor([1.0, 5.0]))
    assert allocate([[[{"a": free}]], [[{"b": free}]]], 10) == {"a": None, "b": None}


def test_tails():
    assert tail_energies(torch.tensor([3.0, 2.0, 1.0])).tolist() == [14, 5, 1, 0]
