"""Units: every matrix once, whichever forms there are; rules are followed with one decomposition of each matrix."""

from collections import Counter

import pytest
from conversion.teachers import TEACHERS, make_teacher

from lightformers_hf import plan
from lightformers_hf.conversion.choosing.choose import find_units
from lightformers_hf.conversion.forms import low_rank
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
    return sorted(
        name for place in alternative.values() for name in type(place).places(place.originals.dense)[place.name]
    )


@pytest.mark.parametrize("name", TEACHERS)
@pytest.mark.parametrize("method", ["auto", "low-rank", "narrow", "paper"])
def test_every_matrix_is_in_one_unit_and_every_alternative_has_all_of_them(tmp_path, name, method):
    make_teacher(name, tmp_path)
    units, matrices = units_of(tmp_path, method=method)
    assert sorted(name for first, *_ in units for name in covered(first)) == sorted(matrices)
    for first, *others in units:
        assert all(covered(other) == covered(first) for other in others)
    methods = {place.method for unit in units for alternative in unit for place in alternative.values()}
    assert methods == ({"low-rank", "narrow"} if method in ("auto", "narrow") else {"low-rank"})
    assert (max(map(len, units)) == 2) == (method == "auto")


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

    def count(weight, *, name, rank=None):
        seen[name] += 1
        return decompose(weight, name=name, rank=rank)

    monkeypatch.setattr(low_rank, "decompose", count)
    report = plan(tmp_path, energy=0.5, method="paper", progress=False)
    assert seen == dict.fromkeys((matrix.name for matrix in report.matrices), 1)
    assert all(matrix.energy >= 0.5 for matrix in report.matrices)
