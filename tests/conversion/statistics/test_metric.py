"""The norm of errors: what is computed without the larger root is what the definition says."""

import pytest
import torch
from conversion.metrics import weigh
from hypothesis import given, settings
from hypothesis import strategies as st

from lightformers_hf.conversion.forms.svd import decompose, singular_values
from lightformers_hf.conversion.statistics.metric import Damped, Metric


def drawn(m, n, seed, *, is_table, samples):
    """A matrix, m×n, and a metric of so few samples that its moments lack rank but for what is added."""
    generator = torch.Generator().manual_seed(seed)
    x, g, matrix = (torch.randn(k, size, generator=generator) for k, size in ((samples, m), (samples, n), (m, n)))
    rows = x[0].abs().double() + 0.01 if is_table else Damped((x.T @ x).double(), 1e-3)
    return matrix, Metric(rows, Damped((g.T @ g).double(), 1e-2))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 50), st.integers(0, 999), st.booleans())
def test_singular_values_need_one_root(m, n, samples, seed, is_table):
    """Those by the smaller Gram matrix are those of Lᵀ W R, and only the smaller side's root is taken."""
    matrix, metric = drawn(m, n, seed, is_table=is_table, samples=samples)
    found = singular_values(matrix, name="w", metric=metric)
    larger = metric.columns if m <= n else metric.rows
    assert "root" not in vars(larger)
    expected = torch.linalg.svdvals(weigh(metric, matrix))
    torch.testing.assert_close(found.square(), expected.square(), rtol=1e-9, atol=1e-9 * expected[0].item() ** 2)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 50), st.integers(0, 999), st.booleans(), st.booleans())
def test_factors_need_one_root(m, n, samples, seed, is_table, known):
    """They lose what the singular values beyond the rank say, and at full rank nothing."""
    for rank in (1 + seed % min(m, n), min(m, n)):
        matrix, metric = drawn(m, n, seed, is_table=is_table, samples=samples)
        spectrum = decompose(matrix, name="w", rank=rank if known else None, metric=metric)
        factors = spectrum.truncate(rank, "balanced")
        assert factors.left.dtype == factors.right.dtype == torch.float32
        assert "root" not in vars(metric.columns if m <= n else metric.rows)
        lost = weigh(metric, matrix.double() - factors.left.double() @ factors.right.double()).norm().item()
        values = torch.linalg.svdvals(weigh(metric, matrix))
        assert lost == pytest.approx(values[rank:].norm().item(), rel=1e-5, abs=1e-5 * values[0].item())


@pytest.mark.parametrize("width", [1, 511, 512, 513, 1100])
def test_strips_add_up(width):
    generator = torch.Generator().manual_seed(0)
    x, rows = (torch.randn(k, width, generator=generator).double() for k in (20, 3))
    damped = x.T @ x
    moment = Damped(damped.clone(), 0.1)
    damped.diagonal().add_(0.1 * damped.diagonal().mean())
    torch.testing.assert_close(moment.between(rows), rows @ damped @ rows.T)
    torch.testing.assert_close(moment.root @ moment.root.T, damped)


def test_what_no_sample_showed_counts_as_its_root_has_it():
    nothing, rows = Damped(torch.zeros(6, 6).double(), 1e-2), torch.randn(2, 6).double()
    torch.testing.assert_close(nothing.between(rows), (rows @ nothing.root) @ (rows @ nothing.root).T)
    assert (nothing.between(rows).diagonal() > 0).all()


def test_a_damaged_matrix_is_named():
    matrix, metric = drawn(4, 6, 0, is_table=False, samples=9)
    matrix[1, 2] = torch.nan
    with pytest.raises(ValueError, match="w: holds NaN"):
        singular_values(matrix, name="w", metric=metric)
