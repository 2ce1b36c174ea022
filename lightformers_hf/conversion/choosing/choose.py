"""Which form every place of a model gets, and which setting: place by place by rules, or together under one budget."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

import torch

from ..forms.form import Form, Setting, all_forms
from ..options import CompressionOptions, StudyOptions
from ..sharing.originals import Originals, short_name
from ..workers import Step, share_work
from .budget import Choices
from .limits import Budget
from .rules import RankPolicy, Ratio

Result = TypeVar("Result")
# Forms of a place, of which one is chosen: all decide over the same matrices.
Slot = list[Form]
# Places that together have all matrices of a unit; of its alternatives one is chosen.
Alternative = list[Slot]
Unit = list[Alternative]


def spends_budget(options: CompressionOptions, study: StudyOptions) -> bool:
    """Whether all places are decided together, under one budget."""
    return options.spends_budget and study.allocation != "uniform"


def find_units(originals: Originals, options: CompressionOptions, study: StudyOptions) -> list[Unit]:
    """Every matrix, attention and network of a model, with the forms that may make it smaller.

    A matrix that the policy settles has the usual form alone; one that has a form in the source already, that form.
    So have all others of its attention or network.

    Raises:
        ValueError: a pattern that fits no matrix, or a method that is no form's.
    """
    dense, forms, policy = originals.dense, all_forms(), options.policy()
    _check_method(study, forms)
    places = {form: form.places(dense) for form in forms}
    names = [short_name(name) for name in places[forms[0]]]
    if unused := policy.unused_patterns(names):
        raise ValueError(
            f"pattern {unused[0]!r} matches no matrix of this model; its matrices have names like "
            f"{', '.join(names[:4])}"
        )

    def find_holder(name: str) -> type[Form] | None:
        own = originals.own_module(name)
        return next((form for form in forms if own is not None and name in places[form] and form.holds(own)), None)

    def is_settled(name: str) -> bool:
        return policy.settles(short_name(name), originals.module(name).kind)

    def find_alternatives(matrices: Sequence[str], wanted: Sequence[type[Form]]) -> Unit:
        slots: dict[tuple[str, ...], Slot] = {}
        for form in wanted:
            for place, parts in places[form].items():
                if set(parts) <= set(matrices):
                    slots.setdefault(parts, []).append(form(place, originals))
        return [[slots[parts] for parts in cover] for cover in _covers(matrices, slots)]

    units: list[Unit] = []
    taken: set[str] = set()
    unmet: dict[str, str] = {}  # what an attention or network is asked to become, which no part of the model can
    # Those of several matrices first: within them single ones are an alternative.
    for matrices in sorted((one for form in forms[::-1] for one in places[form].values()), key=len, reverse=True):
        if taken.intersection(matrices):
            continue
        taken.update(matrices)
        holders = {name: find_holder(name) for name in matrices}
        if any(holders.values()) or any(map(is_settled, matrices)):
            units.append([[[(form or forms[0])(name, originals)] for name, form in holders.items()]])
            continue
        method = getattr(study, f"{originals.module(matrices[0]).kind}_method", None)
        if method is None and not spends_budget(options, study):
            method = forms[0].method
        wanted = [form for form in forms if method in (None, form.method)]
        found = find_alternatives(matrices, wanted)
        if method is not None:
            kind = originals.module(matrices[0]).kind
            unmet[kind] = "" if found else unmet.get(kind, method)
        units.append(found or find_alternatives(matrices, forms[:1]))
    _check_met(unmet, dense.config.model_type)
    return units


def _check_method(study: StudyOptions, forms: Sequence[type[Form]]) -> None:
    """Raise `ValueError` for a method that is no form's."""
    methods = dict.fromkeys(form.method for form in forms)
    for field in ("attention_method", "ffn_method"):
        if (method := getattr(study, field)) is not None and method not in methods:
            raise ValueError(f"{field} is {method!r}, expected one of {', '.join(methods)}")


def _check_met(unmet: dict[str, str], model_type: str) -> None:
    """Raise `ValueError` where a kind of matrices was to become what none of them can."""
    for kind, method in unmet.items():
        if method:
            raise ValueError(
                f"{kind}_method is {method!r}, but no {kind} matrices of this {model_type} can become that: leave the "
                "method out"
            )


def _covers(matrices: Sequence[str], parts: Collection[tuple[str, ...]]) -> Iterator[list[tuple[str, ...]]]:
    """All ways to take each of the matrices once, in such parts."""
    if not matrices:
        yield []
    for part in parts:
        if matrices and matrices[0] in part and set(part) <= set(matrices):
            for others in _covers([name for name in matrices if name not in part], parts):
                yield [part, *others]


def choose(
    units: Sequence[Unit], originals: Originals, options: CompressionOptions, study: StudyOptions, *, progress: bool
) -> tuple[list[Form], Callable[[Form], Setting]]:
    """The places in the forms that are chosen, largest first, and what says the setting of each.

    By rules, a setting is found only when it is asked for, which may take a decomposition.

    Raises:
        ValueError: a budget that cannot be met.
    """
    policy = options.policy()
    if originals.calibration is None or not spends_budget(options, study):
        chosen = [place for alternative, *_ in units for place, *_ in alternative]
        return sort_by_size(chosen), lambda place: place.follow(policy)
    given, free = split_units(units, policy)
    fixed = {place: place.follow(policy) for place in given}
    budget = Budget(originals, options, fixed, free)
    budget.check()
    places = sort_by_size([place for unit in free for alternative in unit for slot in alternative for place in slot])

    def weigh(place: Form) -> Choices:
        return place.choices()

    choices = dict(work_on_places("weighing", weigh, places, originals.device, progress=progress))
    settings = fixed | budget.spend(choices)
    return sort_by_size(list(settings)), settings.__getitem__


def check_choices(
    units: Sequence[Unit], originals: Originals, options: CompressionOptions, study: StudyOptions
) -> float:
    """Return the share of the matrices' parameters that is removed, about: one half where each follows a rule.

    Raises:
        ValueError: a rule or a budget cannot be met, or asks for nothing. Known before anything takes long.
    """
    policy = options.policy()

    def fewest(place: Form) -> Setting:
        waits = policy.needs_spectrum(short_name(place.name), place.kind(place.name))
        return place.least if waits else place.follow(policy)

    if spends_budget(options, study):
        given, free = split_units(units, policy)
        budget = Budget(originals, options, {place: fewest(place) for place in given}, free)
        budget.check()
        return budget.removed
    for place in (place for alternative, *_ in units for place, *_ in alternative):
        if place.is_usual:  # the others need statistics
            fewest(place)
    return 1 - 1 / policy.default.ratio if isinstance(policy.default, Ratio) else 0.5


def split_units(units: Sequence[Unit], policy: RankPolicy) -> tuple[list[Form], list[Unit]]:
    """Places whose matrix the policy settles, and the units without them."""

    def is_given(place: Form) -> bool:
        module = place.originals.module(place.name)
        return hasattr(module, "kind") and policy.settles(short_name(place.name), module.kind)

    given = [place for alternative, *_ in units for place, *_ in alternative if is_given(place)]
    free = [[[slot for slot in alternative if not is_given(slot[0])] for alternative in unit] for unit in units]
    return given, [unit for unit in free if any(unit)]


def work_on_places(
    name: str, work: Callable[[Form], Result], places: Sequence[Form], device: torch.device, *, progress: bool
) -> Iterator[tuple[Form, Result]]:
    """The places, each as soon as one of the workers has done its `work`, with what that returned.

    The bar counts parameters: a large place takes far longer than a small one.

    Args:
        name: of the step.
        places: the largest first.
    """
    sizes = [int(place.size(None)) for place in places]

    def work_on(index: int) -> tuple[int, Result]:
        return index, work(places[index])

    with Step(name, unit="parameter", total=sum(sizes), shown=progress) as bar:
        for index, result in share_work(work_on, range(len(places)), device):
            yield places[index], result
            bar.update(sizes[index])


def sort_by_size(places: list[Form]) -> list[Form]:
    """The places with most parameters first, so that none of them is left for the end."""
    return sorted(places, key=lambda place: place.size(None), reverse=True)
