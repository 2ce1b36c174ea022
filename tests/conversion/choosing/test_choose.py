"""Units: every matrix once, whichever forms there are; rules are followed with one decomposition of each matrix."""

from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from conversion.teachers import TEACHERS, make_teacher
from models.cases import TINY

from lightformers_hf import (
    StudyOptions,
    SubformerConfig,
    SubformerForConditionalGeneration,
    plan,
)
from lightformers_hf.conversion.choosing.choose import find_units, work_on_places
from lightformers_hf.conversion.forms import form as forms_of_form
from lightformers_hf.conversion.forms import low_rank
from lightformers_hf.conversion.forms.form import all_forms
from lightformers_hf.conversion.options import CompressionOptions, settle
from lightformers_hf.conversion.sharing.groups import find_matrices, share_layers
from lightformers_hf.conversion.sharing.originals import Originals
from lightformers_hf.conversion.teacher import Teacher


def units_of(folder, **options):
    """The units, and the matrices of the model."""
    asked = CompressionOptions(**options)
    study, teacher = settle(asked), Teacher(folder, str(folder))
    dense = share_layers(teacher, asked, study)
    return find_units(Originals(teacher, dense), asked, study), [name for name, _ in find_matrices(dense)]


def covered(alternative) -> list[str]:
    return sorted(name for place, *_ in alternative for name in type(place).places(place.originals.dense)[place.name])


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
    monkeypatch.setattr(forms_of_form, "FORMS", [Another, *all_forms()])
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


def test_a_rule_by_energy_decomposes_every_matrix_once(tmp_path, monkeypatch):
    make_teacher("marian", tmp_path)
    decompose, seen = low_rank.decompose, Counter()

    def count(weight, *, name, **options):
        seen[name] += 1
        return decompose(weight, name=name, **options)

    monkeypatch.setattr(low_rank, "decompose", count)
    report = plan(tmp_path, energy=0.5, method="paper", progress=False)
    assert seen == dict.fromkeys((matrix.name for matrix in report.matrices), 1)
    assert all(matrix.energy >= 0.5 for matrix in report.matrices)


def test_a_method_that_no_part_can_follow_is_refused(tmp_path):
    """Narrower heads and fewer neurons are a LightFormer's; silence would give low rank instead."""
    torch.manual_seed(0)
    SubformerForConditionalGeneration(SubformerConfig(**TINY["subformer"])).save_pretrained(tmp_path / "subformer")
    with pytest.raises(ValueError, match="attention_method is 'narrow', but no attention matrices of this subformer"):
        plan(tmp_path / "subformer", ratio=2, method="narrow", progress=False)


def test_work_is_done_on_every_place_under_a_bar_that_counts_parameters(capsys):
    places = [SimpleNamespace(size=lambda *_, n=n: 1e6 * n) for n in (3, 2, 1)]
    here = torch.device("cpu")
    found = list(work_on_places("weighing", lambda place: place.size() / 2, places, here, progress=True))
    assert sorted((places.index(place), result) for place, result in found) == [(0, 1.5e6), (1, 1e6), (2, 0.5e6)]
    assert "weighing: 100%" in (bar := capsys.readouterr().err)
    assert "6.00M/6.00M" in bar
