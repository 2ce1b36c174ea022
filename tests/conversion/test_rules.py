"""How ranks are chosen."""

import re
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightformers_hf.conversion.rules import (
    Energy,
    FixedRank,
    RankPolicy,
    RankShare,
    Ratio,
    rank_for_energy,
    rank_for_ratio,
    rank_with_sharing,
    worth_factorizing,
)

pytestmark = pytest.mark.quick

sides = st.integers(1, 5000)


@given(m=sides, n=sides, ratio=st.fractions(Fraction(101, 100), 50))
def test_ratio_is_the_largest_rank_that_reaches_it(m, n, ratio):
    rank = rank_for_ratio(m, n, float(ratio))

    def reached(r):
        return r * (m + n) * ratio <= m * n * (1 + Fraction(1, 10**12))

    assert rank >= 1
    assert rank == 1 or reached(rank)
    assert not reached(rank + 1) or r_is_exact(m, n, ratio, rank + 1)


def r_is_exact(m, n, ratio, rank):
    """Equality in Eq. 12 up to the rounding of a float ratio."""
    return abs(rank * (m + n) * ratio - m * n) <= Fraction(m * n, 10**12)


def test_ratio_of_the_papers_shapes():
    assert rank_for_ratio(512, 512, 4) == 64
    assert rank_for_ratio(512, 2048, 4) == 102
    assert rank_for_ratio(58101, 512, 4) == 126


@given(
    values=st.lists(st.floats(0, 1000), min_size=1, max_size=30).filter(lambda values: max(values) > 1e-3),
    energy=st.floats(0.01, 1),
)
def test_energy_is_the_smallest_rank_that_holds_it(values, energy):
    values = torch.tensor(sorted(values, reverse=True)).double()
    rank = rank_for_energy(values, energy)
    shares = [(values[:r].square().sum() / values.square().sum()).item() for r in range(len(values) + 1)]
    assert 1 <= rank <= len(values)
    assert shares[rank] >= energy - 1e-12 if rank < len(values) else True
    assert shares[rank - 1] < energy + 1e-12


@given(m=sides, n=sides, percent=st.integers(1, 100))
def test_a_share_of_the_rank_counts_singular_values(m, n, percent):
    assert RankShare.read(str(percent)).find_rank("fc1", m, n, None) == max(1, min(m, n) * percent // 100)


@pytest.mark.parametrize(("ratio", "rank"), [(4.0, 2), (8.0, 1)])
def test_a_ratio_that_can_be_met(ratio, rank):
    assert RankPolicy(Ratio(ratio)).choose("fc1", "ffn", 16, 16) == rank
    assert Ratio(ratio).choose_width("attention", list(range(1, 9))) == rank


@pytest.mark.parametrize("ratio", [8.01, 1e9])
def test_a_ratio_that_cannot_be_met_is_refused_by_name(ratio):
    found = rf"ratio is {re.escape(f'{ratio:g}')}, which cannot be met: .* 8 times smaller"
    with pytest.raises(ValueError, match=f"fc1: {found}"):
        RankPolicy(Ratio(ratio)).choose("fc1", "ffn", 16, 16)
    with pytest.raises(ValueError, match=f"self_attn: {found}"):
        Ratio(ratio).choose_width("self_attn", list(range(1, 9)))


@pytest.mark.parametrize(
    ("rule", "number", "message"),
    [
        (Ratio, 1.0, "ratio is 1.0, expected a number above 1"),
        (Ratio, 0.5, "ratio is 0.5"),
        (Ratio, float("nan"), "ratio is nan"),
        (Ratio, float("inf"), "ratio is inf"),
        (FixedRank, 0, "rank is 0, expected a whole number, 1 or more"),
        (FixedRank, -3, "rank is -3"),
        (Energy, 0.0, "energy is 0.0, expected a share above 0"),
        (Energy, 1.01, "energy is 1.01"),
        (Energy, float("nan"), "energy is nan"),
    ],
)
def test_a_rule_out_of_range_is_refused(rule, number, message):
    with pytest.raises(ValueError, match=message):
        rule(number)


def test_a_matrix_that_would_not_get_smaller_stays_dense():
    assert RankPolicy(FixedRank(255)).choose("w", "ffn", 512, 512) == 255
    assert RankPolicy(FixedRank(256)).choose("w", "ffn", 512, 512) is None
    assert RankPolicy(Energy(1.0)).choose("w", "ffn", 8, 8, torch.ones(8)) is None
    assert RankPolicy(Ratio(2)).choose("w", "ffn", 1, 9) is None
    assert worth_factorizing(512, 512, 255)
    assert not worth_factorizing(512, 512, 256)


def test_a_rank_above_the_matrix_is_refused_by_name():
    with pytest.raises(ValueError, match=r"layers\.0\.fc1: rank 65 is above 64"):
        FixedRank(65).find_rank("layers.0.fc1", 64, 256, None)


POLICY = RankPolicy(
    FixedRank(10),
    {"embedding": Energy(0.5)},
    {
        r"encoder\.layers\.\d+\.self_attn\.[qk]_proj": FixedRank(3),
        "fc1": None,
        "fc.": FixedRank(7),
        "proj": FixedRank(5),
    },
)


@pytest.mark.parametrize(
    ("name", "kind", "rank"),
    [
        ("encoder.layers.0.self_attn.q_proj", "attention", 3),
        ("model.encoder.layers.12.self_attn.k_proj", "attention", 3),
        ("decoder.layers.0.self_attn.q_proj", "attention", 10),  # `proj` begins at no dot
        ("encoder.layers.0.fc1", "ffn", None),
        ("encoder.layers.0.fc2", "ffn", 7),
        ("encoder.layers.0.xfc2", "ffn", 10),
        ("shared", "embedding", 2),
    ],
)
def test_first_pattern_then_kind_then_default(name, kind, rank):
    assert POLICY.choose(name, kind, 64, 64, torch.ones(4)) == rank


def test_without_default_other_kinds_stay_dense():
    policy = RankPolicy(kinds={"ffn": FixedRank(4)})
    assert policy.choose("fc1", "ffn", 64, 64) == 4
    assert policy.choose("q_proj", "attention", 64, 64) is None


def test_patterns_that_fit_nothing_are_reported():
    assert POLICY.unused_patterns(["encoder.layers.0.fc2", "encoder.layers.0.proj"]) == [
        r"encoder\.layers\.\d+\.self_attn\.[qk]_proj",
        "fc1",
    ]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"kinds": {"norm": FixedRank(2)}}, "unknown kind 'norm'"),
        ({"names": {"fc(": FixedRank(4)}}, "pattern 'fc\\(' is not a regular expression"),
    ],
)
def test_a_policy_out_of_range_is_refused(policy, message):
    with pytest.raises(ValueError, match=message):
        RankPolicy(**policy)


@pytest.mark.parametrize(("layers", "groups"), [(18, 6), (6, 6), (18, 4)])
def test_sharing_has_the_parameters_of_its_smaller_rank(layers, groups):
    m, n, rank = 512, 1024, 30
    shared = rank_with_sharing(rank, layers, groups)
    assert groups * (m + n) * shared <= layers * (m + n) * rank < groups * (m + n) * (shared + 1)
