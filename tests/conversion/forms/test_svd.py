"""Truncated factorization against `torch.linalg.svd` in float64."""

import pytest
import torch
from conversion.metrics import weigh
from hypothesis import given, settings
from hypothesis import strategies as st

from lightformers_hf.conversion.forms.svd import Factors, decompose, rescale_, singular_values
from lightformers_hf.conversion.moments import Damped, Metric

SPLITS = ("sigma-right", "balanced")

pytestmark = pytest.mark.quick

FLOAT32_ROUNDING = 1e-6


def matrix(m, n, singular_values, seed=0):
    """A float32 matrix with (nearly) the singular values given, fewer than min(m, n) where the rest is zero."""
    generator = torch.Generator().manual_seed(seed)
    k = len(singular_values)
    left = torch.linalg.qr(torch.randn(m, k, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(n, k, generator=generator, dtype=torch.float64)).Q
    return (left * torch.as_tensor(singular_values, dtype=torch.float64) @ right.T).float()


def assert_optimal(weight, rank, split="sigma-right", known=True):
    """The factors' error is within 1e-5 of the optimum, or is what float32 factors cannot help. Returns both."""
    spectrum = decompose(weight, name="w", rank=rank if known else None)
    left, right = spectrum.truncate(rank, split)
    true = torch.linalg.svd(weight.double(), full_matrices=False).S
    norm = true.norm().item()
    optimum = true[rank:].norm().item()
    error = torch.linalg.norm(weight.double() - left.double() @ right.double()).item()
    assert left.shape == (weight.shape[0], rank)
    assert right.shape == (rank, weight.shape[1])
    assert error <= (1 + 1e-5) * optimum + FLOAT32_ROUNDING * norm
    if optimum > 1e-3 * norm:
        assert error <= (1 + 1e-5) * optimum
    if norm:
        assert spectrum.relative_error(rank) == pytest.approx(optimum / norm, rel=1e-6, abs=1e-7)
    assert spectrum.singular_values.dtype == torch.float64
    assert len(spectrum.singular_values) == min(weight.shape)
    torch.testing.assert_close(spectrum.singular_values, true, rtol=1e-6, atol=1e-3 * norm)
    assert (spectrum.singular_values.diff() <= 0).all()
    return spectrum, left, right


@settings(max_examples=50)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 40),
    share=st.floats(0, 1),
    decay=st.floats(0, 6),
    zeros=st.floats(0, 1),
    split=st.sampled_from(SPLITS),
    known=st.booleans(),
    seed=st.integers(0, 99),
)
def test_error_is_the_optimum_for_every_shape_and_spectrum(m, n, share, decay, zeros, split, known, seed):
    size = min(m, n)
    singular_values = torch.arange(1, size + 1).double() ** -decay
    singular_values[size - int(zeros * size) :] = 0
    rank = 1 + int(share * (size - 1))
    assert_optimal(matrix(m, n, singular_values, seed), rank, split, known)


def deficient(m, n, true_rank, seed, *, zero_rows=0, zero_columns=0, scattered=False):
    """A matrix of small integers, so that its rank is exact in every type, with rows and columns of zeros."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.randint(-2, 3, (m, true_rank), generator=generator).float()
    right = torch.randint(-1, 2, (true_rank, n), generator=generator).float()
    for factor, axis, count in ((left, 0, zero_rows), (right, 1, zero_columns)):
        size = factor.shape[axis]
        where = torch.randperm(size, generator=generator) if scattered else torch.arange(size).flip(0)
        factor.index_fill_(axis, where[:count], 0)
    return left @ right


def some_metric(m, n, kind, seed):
    """A metric for m×n matrices: of a token table, whose rows have weights, or of a linear layer; or none."""
    generator = torch.Generator().manual_seed(seed)
    roots = [
        torch.linalg.qr(torch.randn(size, size, generator=generator).double()).R.T + torch.eye(size).double()
        for size in (m, n)
    ]
    rows, columns = (Damped(root @ root.T, 0.0) for root in roots)
    if kind == "rows":
        rows = torch.rand(m, generator=generator).double() + 0.01
    return Metric(rows, columns) if kind else None


@settings(max_examples=60)
@given(
    small=st.integers(66, 120),
    more=st.integers(0, 60),
    tall=st.booleans(),
    true_rank=st.floats(0, 1),
    rank=st.floats(0, 1),
    zero_rows=st.floats(0, 1),
    zero_columns=st.floats(0, 1),
    scattered=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    exponent=st.integers(-100, 100),
    metric=st.sampled_from([None, "rows", "linear"]),
    split=st.sampled_from(SPLITS),
    known=st.booleans(),
    seed=st.integers(0, 99),
)
def test_matrices_that_lack_rank(
    small, more, tall, true_rank, rank, zero_rows, zero_columns, scattered, dtype, exponent, metric, split, known, seed
):
    """Pruned heads, dead neurons, tokens never seen: no NaN, no refusal, and the optimum as for any other matrix."""
    m, n = (small + more, small) if tall else (small, small + more)
    rank = 1 + round(rank * (small // 2 - 1))
    zeros = {"zero_rows": round(zero_rows * m), "zero_columns": round(zero_columns * n)}
    weight = deficient(m, n, round(true_rank * small), seed, **zeros, scattered=scattered)
    weight = (weight * 2.0**exponent).to(dtype)
    metric = some_metric(m, n, metric, seed)
    weighed = weight if metric is None else weigh(metric, weight)
    true = torch.linalg.svdvals(weighed.double())
    norm, optimum = true.norm().item(), true[rank:].norm().item()

    spectrum = decompose(weight, name="w", rank=rank if known else None, metric=metric)
    assert (spectrum.singular_values >= 0).all()
    assert (spectrum.singular_values.diff() <= 0).all()
    assert spectrum.singular_values.norm().item() == pytest.approx(norm, rel=1e-6)
    torch.testing.assert_close(spectrum.singular_values[:rank], true[:rank], rtol=1e-6, atol=1e-6 * norm)
    lost = optimum / norm if norm else 0.0
    assert spectrum.relative_error(rank) == pytest.approx(lost, rel=1e-6, abs=1e-6)

    factors = spectrum.truncate(rank, split)
    assert torch.isfinite(factors.left).all()
    assert torch.isfinite(factors.right).all()
    lost = weight.double() - factors.left.double() @ factors.right.double()
    error = torch.linalg.norm(lost if metric is None else weigh(metric, lost)).item()
    assert error <= (1 + 1e-5) * optimum + FLOAT32_ROUNDING * norm


def test_denormal_values_are_values():
    smallest = torch.finfo(torch.float32).tiny / 2**10
    weight = torch.randn(70, 66, generator=torch.Generator().manual_seed(0)) * smallest
    assert_optimal(weight, 20)


@settings(max_examples=20)
@given(m=st.integers(1, 40), n=st.integers(1, 40), zeros=st.integers(0, 10), seed=st.integers(0, 99))
def test_singular_values_alone_are_those_of_the_decomposition(m, n, zeros, seed):
    weight = torch.randn(m, n, generator=torch.Generator().manual_seed(seed))
    weight[:zeros] = 0
    true = torch.linalg.svdvals(weight.double())
    torch.testing.assert_close(singular_values(weight, name="w"), true, rtol=1e-7, atol=1e-6 * true[0].item())


@pytest.mark.parametrize(("scale", "size"), [(1e200, "large"), (1e-200, "small")])
@pytest.mark.parametrize("rank", [None, 1])
def test_values_whose_squares_leave_float64_are_refused_by_name(scale, size, rank):
    weight = torch.randn(70, 66, generator=torch.Generator().manual_seed(0)).double() * scale
    with pytest.raises(ValueError, match=f"fc1: its values are too {size}"):
        decompose(weight, name="fc1", rank=rank)
    with pytest.raises(ValueError, match=f"fc1: its values are too {size}"):
        singular_values(weight, name="fc1")


@pytest.mark.parametrize("shape", [(60, 40), (40, 60)])
@pytest.mark.parametrize("zeros", [0, 25])
def test_splits_place_the_singular_values(shape, zeros):
    true = torch.linspace(3, 1, 40 - zeros).double()
    spectrum = decompose(matrix(*shape, true), name="w")
    rank = 20
    left, right = (factor.double() for factor in spectrum.truncate(rank, "sigma-right"))
    known = left[:, : len(true)]  # beyond them columns are rounding
    torch.testing.assert_close(known.T @ known, torch.eye(known.shape[1]).double(), rtol=0, atol=1e-6)
    expected = torch.zeros(rank).double()
    expected[: len(true)] = true[:rank]
    torch.testing.assert_close(torch.linalg.svdvals(right), expected, rtol=1e-6, atol=1e-6)
    left, right = (factor.double() for factor in spectrum.truncate(rank, "balanced"))
    torch.testing.assert_close(left.norm(dim=0) * right.norm(dim=1), expected, rtol=1e-6, atol=2e-3)
    torch.testing.assert_close(right.square().mean(1), left.square().mean(0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_damaged_values_are_refused_by_name(bad):
    weight = torch.ones(4, 4)
    weight[2, 1] = bad
    with pytest.raises(ValueError, match=r"layers\.0\.fc1: holds NaN or Inf"):
        decompose(weight, name="layers.0.fc1")


@pytest.mark.parametrize("rank", [0, -1, 5])
def test_rank_out_of_range_is_refused_by_name(rank):
    with pytest.raises(ValueError, match=rf"fc1: rank {rank} is not possible, expected 1 to 4"):
        decompose(torch.ones(4, 9), name="fc1", rank=rank)
    with pytest.raises(ValueError, match=rf"fc1: rank {rank} is not possible, expected 1 to 4"):
        decompose(torch.ones(4, 9), name="fc1").truncate(rank)


def test_truncating_beyond_what_was_decomposed_is_refused():
    with pytest.raises(ValueError, match="expected 1 to 10"):
        decompose(torch.randn(200, 150), name="w", rank=10).truncate(11)


@pytest.mark.parametrize("weight", [torch.ones(3), torch.ones(2, 2, dtype=torch.int64), torch.ones(0, 3)])
def test_no_matrix_is_refused(weight):
    with pytest.raises(ValueError, match="w: expected a matrix of floats"):
        decompose(weight, name="w")


def test_missing_convergence_is_an_error_with_the_name(monkeypatch):
    def fail(*_):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    with pytest.raises(ValueError, match="fc2: the singular value decomposition did not converge"):
        decompose(torch.randn(200, 150), name="fc2", rank=10)


@pytest.mark.parametrize("split", ["balanced", "sigma-right"])
def test_rescaled_factors_have_the_same_product(split):
    left, right = torch.randn(7, 3) * torch.tensor([1e-3, 5.0, 0.0]), torch.randn(3, 5)
    new = rescale_(Factors(left.clone(), right.clone()), split)
    torch.testing.assert_close(new.left @ new.right, left @ right)
    squares = new.left.square().mean(0)[:2], new.right.square().mean(1)[:2]
    torch.testing.assert_close(squares[0], squares[1] if split == "balanced" else torch.full((2,), 1 / 7))
    assert torch.isfinite(new.left).all()
    assert torch.isfinite(new.right).all()
