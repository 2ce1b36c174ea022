"""Choice of a form and a setting for every site of a model: by rules for each site, or together under one budget."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeVar

import torch
from transformers import PreTrainedModel

from ..loading import stored_tensors, tensor_bytes
from ..options import OptionError
from ..speech import reads_sound
from .forms import Choices, Form, Setting, all_forms
from .options import CompressionOptions, StudyOptions, missing_unit, read_quantity
from .rules import RankPolicy, Ratio
from .sharing import Originals, find_matrices, short_name
from .workers import Step, map_in_threads

# Bytes that a safetensors file needs for the name of a tensor, about.
HEADER_BYTES = 130
# If a model has more parameters, a form alone is tried if its predicted cost is at most so many times the mixture's.
LARGE, LIKELY = 20_000_000, 1.25
# Dense token tables take so much of a narrow model at most: with more, the layers lose more than the tables would.
MOST_IN_TABLES = 2 / 3
AUTO = "auto"  # the candidate that mixes all forms
# A few minutes of sound show little of an encoder. On other sound its errors cost more than predicted, beside those
# of the decoder: 8 times as much in whisper-base at ratio 1.5, 10 times in tiny.en at ratio 2.
UNHEARD = 8.0
K = TypeVar("K")
Result = TypeVar("Result")
# Choices of one slot of an alternative: forms for the same matrices, of which one is chosen.
Slot = list[Form]
# Slots that together have all matrices of a unit, filled independently; of a unit's alternatives one is chosen.
Alternative = list[Slot]
Unit = list[Alternative]


def spends_budget(options: CompressionOptions, study: StudyOptions) -> bool:
    """Whether all sites are decided together, under one budget."""
    return options.spends_budget and study.allocation != "uniform"


def find_units(originals: Originals, options: CompressionOptions, study: StudyOptions) -> list[Unit]:
    """Every matrix, attention and network of a model, with the forms that may make it smaller.

    A matrix whose rule is fixed gets the default form, and a matrix with a form in the source keeps that form. The
    same applies to all matrices of its attention block or network.
    """
    dense, forms, policy = originals.dense, all_forms(), originals.policy
    methods = dict.fromkeys(form.method for form in forms)
    for option in ("attention_method", "ffn_method"):
        if (asked := getattr(study, option)) is not None and asked not in methods:
            raise OptionError(option, f" is {asked!r}, expected one of {', '.join(methods)}")
    sites = {form: form.sites(dense) for form in forms}
    names = [short_name(name) for name in sites[forms[0]]]
    if unused := policy.unused_patterns(names):
        raise OptionError(
            "pattern",
            f" {unused[0]!r} matches no matrix of this model; its matrices have names like {', '.join(names[:4])}",
        )
    sources = {name: originals.own_module(name) for name in sites[forms[0]]}

    def find_holder(name: str) -> type[Form] | None:
        own = sources[name]
        return next((form for form in forms if own is not None and name in sites[form] and form.holds(own)), None)

    def is_settled(name: str) -> bool:
        return policy.fixes(short_name(name), dense.get_submodule(name).kind)

    def find_alternatives(matrices: Sequence[str], wanted: Sequence[type[Form]], is_alone: bool) -> Unit:
        slots: dict[tuple[str, ...], Slot] = {}
        for form in wanted:
            for name, parts in sites[form].items():
                if set(parts) <= set(matrices):
                    slots.setdefault(parts, []).append(form(name, parts, dense, sources.get(name), is_alone))
        return [[slots[parts] for parts in cover] for cover in _covers(matrices, slots)]

    units: list[Unit] = []
    taken: set[str] = set()
    unmet: dict[str, str] = {}  # requested forms that no part of the model supports
    # Those of several matrices first: within them single ones are an alternative.
    for matrices in sorted((group for form in forms[::-1] for group in sites[form].values()), key=len, reverse=True):
        if taken.intersection(matrices):
            continue
        taken.update(matrices)
        holders = {name: find_holder(name) for name in matrices}
        if any(holders.values()) or any(map(is_settled, matrices)):
            kept = {name: form or forms[0] for name, form in holders.items()}
            units.append([[[form(name, sites[form][name], dense, sources[name])] for name, form in kept.items()]])
            continue
        kind = dense.get_submodule(matrices[0]).kind
        method = getattr(study, f"{kind}_method", None)
        if method is None and not spends_budget(options, study):
            method = forms[0].method
        found = find_alternatives(
            matrices, [form for form in forms if method in (None, form.method)], method is not None
        )
        if method is not None:
            unmet[kind] = "" if found else unmet.get(kind, method)
        units.append(found or find_alternatives(matrices, forms[:1], True))
    for kind, method in unmet.items():
        if method:
            raise ValueError(
                f"{kind}_method is {method!r}, but no {kind} matrices of this {dense.config.model_type} can become "
                "that: remove the method"
            )
    return units


def _covers(matrices: Sequence[str], parts: Collection[tuple[str, ...]]) -> Iterator[list[tuple[str, ...]]]:
    """All ways to take each of the matrices once, in such parts."""
    if not matrices:
        yield []
    for part in parts:
        if matrices and matrices[0] in part and set(part) <= set(matrices):
            for others in _covers([name for name in matrices if name not in part], parts):
                yield [part, *others]


@dataclass(frozen=True, eq=False)
class Choice:
    """The setting of a site."""

    site: Form
    setting: Setting
    choices: Choices | None = None  # among which it was chosen, if their costs are known

    @property
    def size(self) -> Setting:
        """The setting that the site has in the result; `None` where it is dense."""
        return self.site.kept(self.setting) or self.setting


class Proposal(NamedTuple):
    """What a candidate chooses, largest site first, and its predicted cost; `None` where costs are not known."""

    chosen: list[Choice]
    cost: float | None = None


def choose(
    units: Sequence[Unit], originals: Originals, options: CompressionOptions, study: StudyOptions
) -> dict[str, Proposal]:
    """Return {candidate: its proposal}.

    The first candidate mixes all forms by their predicted costs. The others have one form wherever it is possible,
    because predictions are sometimes wrong. A large model has only those that cost at most `LIKELY` times the first.
    """
    policy = originals.policy
    if originals.calibration is None or not spends_budget(options, study):
        sites = sort_by_size(first_sites(units))
        costs = weigh([site for site in sites if site.waits(policy)], originals)
        chosen = [Choice(site, site.follow(policy, costs.get(site)), costs.get(site)) for site in sites]
        return {AUTO: Proposal(chosen)}
    given, free = split_units(units, policy)
    offered = sort_by_size([site for unit in free for alternative in unit for slot in alternative for site in slot])
    costs = weigh([*filter(lambda site: site.waits(policy), given), *offered], originals)
    fixed = {site: site.follow(policy, costs.get(site)) for site in given}
    available, _ = find_budget(originals, options, fixed, free)

    def spend(known: Mapping[Form, Choices], units: Sequence[Unit]) -> dict[Form, Setting]:
        slots = [[[{site: known[site] for site in slot} for slot in slots] for slots in unit] for unit in units]
        return allocate(slots, available)

    if originals.narrowed != 1 and study.attention_method == study.ffn_method == "narrow":
        # The engines for which parts are narrow expand low-rank tables: narrower ones stay dense, where that fits.
        tables = [site for site in costs if site.kind(site.matrices[0]) == "embedding"]
        whole = {site: cost.dense() if site in tables else cost for site, cost in costs.items()}
        if sum(site.size(None) for site in tables) <= MOST_IN_TABLES * available:
            with suppress(ValueError):
                spend(whole, free)
                costs = whole
    found: dict[str, tuple[dict[Form, Setting], float]] = {}
    most = LIKELY if originals.dense.num_parameters() > LARGE else torch.inf
    for method in (AUTO, *dict.fromkeys(form.method for form in all_forms())):
        known = costs if method == AUTO else {site: choices.alone() for site, choices in costs.items()}
        try:
            allocated = spend(known, [keep_form(unit, method) for unit in free])
        except ValueError:
            if method == AUTO:
                raise
            continue  # this form alone does not become so small
        cost = sum(costs[site].cost_of(setting) for site, setting in allocated.items())
        settings = fixed | allocated
        is_likely = method == AUTO or cost <= most * found[AUTO][1]
        if is_likely and settings not in [each for each, _ in found.values()]:
            found[method] = settings, cost
    return {
        method: Proposal([Choice(site, settings[site], costs.get(site)) for site in sort_by_size([*settings])], cost)
        for method, (settings, cost) in found.items()
    }


def keep_form(unit: Unit, method: str) -> Unit:
    """Return a unit with the forms of one method alone, if these decide over all its matrices."""
    if method == AUTO:
        return unit
    alternatives = [[[site for site in slot if site.method == method] for slot in slots] for slots in unit]
    return [slots for slots in alternatives if all(slots)] or unit


def weigh(sites: Sequence[Form], originals: Originals) -> dict[Form, Choices]:
    """The choices of every site, and their costs."""
    found = dict(work_on_sites("weighting", lambda site: site.choices(originals), sites, originals.device))
    if not reads_sound(originals.dense.config):
        return found
    return {site: cost.times(UNHEARD) if ".encoder." in site.name else cost for site, cost in found.items()}


def find_errors(chosen: Sequence[Choice], originals: Originals) -> dict[Form, float]:
    """{site: relative error of the best matrices at its setting}."""
    by_site = {choice.site: choice for choice in chosen}

    def find(site: Form) -> float:
        return site.error(by_site[site].setting, originals, by_site[site].choices)

    return dict(work_on_sites("weighting", find, list(by_site), originals.device))


def check_choices(
    units: Sequence[Unit], originals: Originals, options: CompressionOptions, study: StudyOptions
) -> float:
    """Return the share of the matrices' parameters that is removed, about; one half where rules give no ratio."""
    policy = originals.policy

    def fewest(site: Form) -> Setting:
        return site.least if site.waits(policy) else site.follow(policy)

    if spends_budget(options, study):
        given, free = split_units(units, policy)
        return find_budget(originals, options, {site: fewest(site) for site in given}, free)[1]
    for site in first_sites(units):
        fewest(site)
    return 1 - 1 / policy.default.ratio if isinstance(policy.default, Ratio) else 0.5


def first_sites(units: Sequence[Unit]) -> list[Form]:
    """Return the first form of each slot of the first alternatives."""
    return [site for alternative, *_ in units for site, *_ in alternative]


def split_units(units: Sequence[Unit], policy: RankPolicy) -> tuple[list[Form], list[Unit]]:
    """Sites whose matrix the policy settles, and the units without them."""

    def is_given(site: Form) -> bool:
        module = site.dense.get_submodule(site.name)
        return hasattr(module, "kind") and policy.fixes(short_name(site.name), module.kind)

    given = [site for site in first_sites(units) if is_given(site)]
    free = [[[slot for slot in alternative if not is_given(slot[0])] for alternative in unit] for unit in units]
    return given, [unit for unit in free if any(unit)]


def work_on_sites(
    name: str, work: Callable[[Form], Result], sites: Sequence[Form], device: torch.device
) -> Iterator[tuple[Form, Result]]:
    """The sites, largest first, each with the result of `work`. The progress bar counts parameters."""
    if not sites:
        return
    sizes = [int(site.size(None)) for site in sites]
    with Step(name, unit="parameter", total=sum(sizes)) as bar:
        for site, size, result in zip(sites, sizes, map_in_threads(work, sites, device), strict=True):
            yield site, result
            bar.update(size)


def sort_by_size(sites: list[Form]) -> list[Form]:
    """Sort sites by parameters, largest first, so that no large site is computed last."""
    return sorted(sites, key=lambda site: site.size(None), reverse=True)


def count_besides(model: PreTrainedModel) -> int:
    """Return the number of parameters that are in no matrix."""
    return model.num_parameters() - sum(model.get_submodule(name).weight.numel() for name, _ in find_matrices(model))


def find_budget(
    originals: Originals, options: CompressionOptions, given: Mapping[Form, Setting], free: Sequence[Unit]
) -> tuple[float, float]:
    """Return the parameters that the free units may have together, and the share of theirs that is removed.

    Raises `ValueError` if not even the smallest settings fit, or the model is as small already.
    """
    name, dense, tensors = options.budget, originals.dense, stored_tensors(originals.dense)
    asked, rule = getattr(options, name), originals.policy.default
    besides = count_besides(dense) + sum(int(site.size(setting)) for site, setting in given.items())
    whole = sum(max(sum(float(slot[0].size(None)) for slot in slots) for slots in unit) for unit in free)

    def least(site: Form) -> float:
        return min(float(site.size(setting)) for setting in (site.least, None))

    fewest = sum(min(sum(min(map(least, slot)) for slot in slots) for slots in unit) for unit in free)
    itemsize = (originals.teacher.config.dtype or torch.float32).itemsize
    # Bytes that are no parameters: buffers, and a header that names every tensor. A matrix may become two factors.
    buffers = sum(tensor.numel() for tensor in tensors.values()) - dense.num_parameters()
    overhead = HEADER_BYTES * (len(tensors) + len([*find_matrices(dense)])) + buffers * itemsize
    if name == "ratio":
        assert isinstance(rule, Ratio), "a budget is one number"
        asked, available = asked or rule.ratio, whole * originals.narrowed / rule.ratio - originals.added
    elif name == "params":
        available = read_quantity(name, asked) - besides
    else:
        available = (read_quantity(name, asked) - overhead) / itemsize - besides
    if fewest > available:
        left, hint = f"{besides + fewest:,.0f} parameters", ""
        if name == "size":
            left, hint = f"{(besides + fewest) * itemsize + overhead:,.0f} bytes", missing_unit(asked)
        raise OptionError(
            name,
            f" is {asked}, which cannot be met: with everything at its smallest {left} are left"
            + (f"; {hint}" if hint else ""),
        )
    stored = originals.teacher.model.num_parameters() - besides
    if name == "ratio" and not given and originals.narrowed == 1 and available >= stored > 0:
        raise OptionError(
            name,
            f" is {asked}, and the matrices of {originals.teacher.name} are as small already, because a ratio "
            f"counts from dense matrices: give more than {whole / stored:.2f}",
        )
    held = dense.num_parameters() if name == "params" else tensor_bytes(dense)
    if name != "ratio" and read_quantity(name, asked) >= held:
        has = f"{held:,} parameters" if name == "params" else f"{held / 1e6:,.1f} MB"
        raise OptionError(name, f" is {asked}, and {originals.teacher.name} has {has} already: give less than that")
    removed = 1 - min(available, whole) / (whole * originals.narrowed) if whole else 0.0
    return available, max(0.0, removed)


class Pick(NamedTuple):
    """The choice for one unit."""

    cost: float
    size: float
    parts: dict  # part → index of its setting


def allocate(units: Sequence[Sequence[Sequence[Mapping[K, Choices]]]], budget: float) -> dict[K, int | None]:
    """Choose one alternative of every unit, a part for each of its slots, and a setting of each part, within `budget`.

    For a price λ of a parameter, every unit minimizes cost + λ·size by itself. No other choice of this
    total size is cheaper (Everett 1963). λ is bisected to the lowest that meets the budget. The sizes for all prices
    have gaps. The rest of the budget goes to the units whose cost decreases most per parameter.

    A unit is e.g. an attention block: either narrower heads, or its four matrices by themselves, each in one form or
    another. Raises `ValueError` if no choice meets the budget.
    """

    def fill(slots: Sequence[Mapping[K, Choices]], price: float) -> Pick:
        """Find the best parts and settings of one alternative at a price."""
        cost, size, parts = 0.0, 0.0, {}
        for slot in slots:
            best = [(*choices.best(price), part, choices) for part, choices in slot.items()]
            _, index, part, choices = min(best, key=lambda candidate: candidate[0])
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

    def smallest(slots: Sequence[Mapping[K, Choices]]) -> float:
        return sum(min(choices.sizes.min().item() for choices in slot.values()) for slot in slots)

    if budget < (least := sum(min(map(smallest, alternatives)) for alternatives in units)):
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
            _, unit, picks[unit] = max(upgrades, key=lambda candidate: candidate[0])
    choices = {part: choice for slots in chain(*units) for slot in slots for part, choice in slot.items()}
    return {part: choices[part].settings[index] for pick in picks for part, index in pick.parts.items()}
