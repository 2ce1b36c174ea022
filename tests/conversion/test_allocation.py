"""One budget over all matrices: the best choice, what it may spend, and what is refused before anything takes long."""

import itertools
import re
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from conversion.teachers import TEACHERS, make_teacher
from hypothesis import given, settings
from hypothesis import strategies as st
from models.cases import TINY

from lightformers_hf import StudyOptions, SubformerConfig, SubformerForConditionalGeneration, convert, plan
from lightformers_hf.checkpoints.teacher import read
from lightformers_hf.conversion import forms
from lightformers_hf.conversion.allocation import allocate, find_units
from lightformers_hf.conversion.forms import Choices, all_forms, low_rank
from lightformers_hf.conversion.options import CompressionOptions, resolve_study
from lightformers_hf.conversion.sharing import Originals, find_matrices, share_layers


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


@settings(max_examples=60)
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


def units_of(folder, **options):
    """The units, and the matrices of the model."""
    asked = CompressionOptions(**options)
    study, teacher = resolve_study(asked), read(folder)
    dense = share_layers(teacher, asked, study)
    units = find_units(Originals(teacher, dense, asked.policy), asked, study)
    return units, [name for name, _ in find_matrices(dense)]


def covered(alternative) -> list[str]:
    return sorted(name for site, *_ in alternative for name in type(site).sites(site.dense)[site.name])


@pytest.mark.parametrize("name", TEACHERS)
@pytest.mark.parametrize("method", ["auto", "low-rank", "narrow", "paper"])
def test_every_matrix_is_in_one_unit_and_every_alternative_has_all_of_them(tmp_path, name, method):
    make_teacher(name, tmp_path)
    units, matrices = units_of(tmp_path, method=method)
    assert sorted(name for first, *_ in units for name in covered(first)) == sorted(matrices)
    for first, *others in units:
        assert all(covered(other) == covered(first) for other in others)
    methods = {place.method for unit in units for alternative in unit for slot in alternative for place in slot}
    every = {form.method for form in all_forms()}
    assert methods == {"auto": every, "narrow": {"low-rank", "narrow"}}.get(method, {"low-rank"})
    assert (max(map(len, units)) > 1) == (method == "auto")


@dataclass(frozen=True, eq=False)
class Another(low_rank.LowRank):
    """A form of single matrices besides low rank."""

    label, method, is_usual = "another", "another", False


def test_another_form_of_matrices_leaves_what_there_is(tmp_path, monkeypatch):
    """Of attention: narrower heads, or four matrices, each in one of two forms."""
    monkeypatch.setattr(forms, "FORMS", [Another, *all_forms()])
    make_teacher("marian", tmp_path)
    units, matrices = units_of(tmp_path, ratio=2)
    assert sorted(name for first, *_ in units for name in covered(first)) == sorted(matrices)
    labels = [
        [sorted({place.label for place in slot}) for slot in alternative] for unit in units for alternative in unit
    ]
    assert labels.count([["narrower heads"]]) == 8
    assert labels.count([["another", "low-rank"]] * 4) == 8
    assert labels.count([["fewer neurons"]]) == 6
    assert labels.count([["another", "low-rank"]] * 2) == 6
    study = StudyOptions(attention_method="another", ffn_method="narrow", allocation="uniform", refit=False)
    report = plan(tmp_path, ratio=2, study=study, progress=False)
    assert {matrix.form for matrix in report.matrices if matrix.kind == "attention"} == {"another"}


def test_a_method_of_no_form_is_named(tmp_path):
    make_teacher("marian", tmp_path)
    with pytest.raises(ValueError, match="attention_method is 'heads', expected one of low-rank, narrow"):
        plan(tmp_path, study=StudyOptions(attention_method="heads"), progress=False)


def test_what_the_user_settles_has_the_usual_form_alone(tmp_path):
    make_teacher("marian", tmp_path)
    given = {"encoder.layers.0.fc1": 3, "attention": "dense"}
    units, _ = units_of(tmp_path, ratio=2, pattern=given)
    for first, *others in units:
        names = covered(first)
        settled = any("proj" in name or name.endswith("encoder.layers.0.fc1") for name in names)
        assert bool(others) == (not settled and any(".fc" in name for name in names))


def test_a_pattern_may_settle_every_matrix(tmp_path):
    make_teacher("marian", tmp_path)
    given = {"encoder.*": "dense", "decoder.*": "dense", "shared": 4}
    report = plan(tmp_path, ratio=2, pattern=given, progress=False)
    assert [(matrix.name, matrix.setting) for matrix in report.smaller] == [("shared", "rank 4")]


@pytest.mark.parametrize(
    ("options", "weighed"),
    [
        ({"ratio": 2, "method": "paper"}, False),
        ({"energy": 0.5, "method": "paper"}, True),
        ({"ratio": 2, "method": "low-rank", "calibration_samples": 8}, True),
    ],
)
def test_no_values_are_made_twice(tmp_path, monkeypatch, options, weighed):
    """Every matrix is weighed once, and factorized once if it becomes low-rank."""
    make_teacher("marian", tmp_path / "teacher")
    seen = {name: Counter() for name in ("decompose", "singular_values")}

    def count(work, name, **options):
        seen[work][name.removeprefix("model.")] += 1
        return originals[work](name=name, **options)

    originals = {work: getattr(low_rank, work) for work in seen}
    for work in seen:
        monkeypatch.setattr(low_rank, work, lambda weight, work=work, **options: count(work, weight=weight, **options))
    report = convert(tmp_path / "teacher", tmp_path / "light", **options, progress=False)
    matrices = Counter(matrix.name for matrix in report.matrices)
    smaller = Counter(matrix.name for matrix in report.smaller)
    assert seen["decompose"] == smaller
    assert seen["singular_values"] == (matrices if weighed else Counter())
    if "energy" in options:
        assert all(matrix.energy >= 0.5 for matrix in report.matrices)


def test_a_method_that_no_part_can_follow_is_refused(tmp_path):
    """Narrower heads and fewer neurons are a LightFormer's; silence would give low rank instead."""
    torch.manual_seed(0)
    SubformerForConditionalGeneration(SubformerConfig(**TINY["subformer"])).save_pretrained(tmp_path / "subformer")
    with pytest.raises(ValueError, match="attention_method is 'narrow', but no attention matrices of this subformer"):
        plan(tmp_path / "subformer", ratio=2, method="narrow", progress=False)


@pytest.fixture
def nothing_measured(monkeypatch):
    """A conversion that gets as far as its sample text fails."""

    def measure(*arguments, **options):
        raise AssertionError("the budget was not checked before")

    monkeypatch.setattr("lightformers_hf.conversion.convert.sample_text", measure)


@pytest.mark.usefixtures("nothing_measured")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": "40"}, r"size is 40, which cannot be met: .* [\d,]+ bytes are left; .*is 40MB meant\?"),
        ({"size": "40GB"}, r"size is 40GB, and .* has 0\.\d MB already: give less"),
        ({"params": "10"}, r"params is 10, which cannot be met: .* [\d,]+ parameters are left"),
        ({"params": "40M"}, r"params is 40M, and .* has [\d,]+ parameters already"),
        ({"ratio": 1000.0}, r"ratio is 1000.0, which cannot be met: .* [\d,]+ parameters are left"),
        ({"ratio": 2.0, "pattern": {"nothing": 4}}, "pattern 'nothing' matches no matrix of this model"),
        ({"encoder_groups": 3}, r"encoder_groups is 3, but 2 layers .*\[1, 2\]"),
        ({"decoder_groups": 0}, "decoder_groups is 0"),
        ({"rank": 100_000}, r"[\w.]+: rank 100000 is above .*, the largest that"),
        ({"pattern": {"ffn": 100_000}}, r"encoder\.layers\.0\.fc1: rank 100000 is above .*, the largest that"),
        ({"pattern": {"ffn": "1000x"}}, r"encoder\.layers\.0\.fc1: ratio is 1000, which cannot be met"),
    ],
)
def test_what_cannot_be_met_is_said_at_once(tiny_marian, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        convert(tiny_marian, tmp_path / "light", progress=False, **options)
    assert not (tmp_path / "light").exists()


def test_the_smallest_size_that_is_named_can_be_had(tiny_marian, tmp_path):
    with pytest.raises(ValueError, match="bytes are left") as error:
        convert(tiny_marian, tmp_path / "light", size="1kB", progress=False)
    least = int(re.search(r"([\d,]+) bytes", str(error.value))[1].replace(",", ""))
    options = {"calibration_samples": 4, "progress": False}
    convert(tiny_marian, tmp_path / "light", size=str(least + 8), **options)
    assert (tmp_path / "light" / "model.safetensors").stat().st_size <= least + 8
    with pytest.raises(ValueError, match="cannot be met"):
        convert(tiny_marian, tmp_path / "less", size=str(least - 400), **options)


@pytest.mark.parametrize("share", [0.9, 0.6, 0.5])
def test_a_size_has_space_for_the_names_of_factors(share, tiny_marian, tmp_path):
    size = int(share * (tiny_marian / "model.safetensors").stat().st_size)
    convert(tiny_marian, tmp_path, size=str(size), method="low-rank", calibration_samples=4, progress=False)
    assert 0.9 * size < (tmp_path / "model.safetensors").stat().st_size <= size


@pytest.mark.usefixtures("nothing_measured")
def test_a_plan_of_fewer_layers_alone_needs_no_text(tiny_marian):
    assert plan(tiny_marian, decoder_layers=1, progress=False).layers["decoder"] == [1, 2]
