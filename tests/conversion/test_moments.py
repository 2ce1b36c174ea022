"""Second moments, their roots and norms, and where sums are stored."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import torch
from conversion.metrics import weigh
from hypothesis import given, settings
from hypothesis import strategies as st

from lightformers_hf.conversion.forms.svd import decompose, singular_values
from lightformers_hf.conversion.moments import (
    STRIP,
    Damped,
    Metric,
    Moments,
    PairMoments,
    TensorStore,
    WeightedRows,
    lazy_property,
)
from lightformers_hf.conversion.refit import solve_all
from lightformers_hf.conversion.workers import map_in_order
from lightformers_hf.processors import factor_rows, rounded_products, use_threads


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    m=st.integers(1, STRIP + 9),
    n=st.integers(1, 9) | st.none(),
    centred=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_moments_are_those_of_all_rows(sizes, m, n, centred):
    """`n` is `None` where both sides are the same rows, of which only half is computed."""
    generator = torch.Generator().manual_seed(m)
    lefts = [torch.randn(size, m, generator=generator) + 1 for size in sizes]
    rights = lefts if n is None else [torch.randn(size, n, generator=generator) for size in sizes]
    weights = [torch.rand(size, generator=generator) + 0.1 for size in sizes]
    sums = PairMoments(m, n or m, torch.device("cpu"))
    for left, right, felt in zip(lefts, rights, weights, strict=True):
        weighed = WeightedRows.of(left, felt, torch.device("cpu"))
        sums.add(weighed, weighed if n is None else WeightedRows.of(right, felt, torch.device("cpu")))
    sums.sum_over_all()

    x, y, w = (np.concatenate([rows.double().numpy() for rows in side]) for side in (lefts, rights, weights))
    x_mean, y_mean = (np.average(side, axis=0, weights=w) for side in (x, y))
    expected = x.T @ np.diag(w) @ y / w.sum() - (np.outer(x_mean, y_mean) if centred else 0)
    np.testing.assert_allclose(sums.moment(centred=centred).numpy(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sums.right.numpy(), y_mean, rtol=1e-5, atol=1e-6)


@given(sizes=st.lists(st.integers(1, 90), min_size=1, max_size=3), seed=st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_weights_are_how_often_rows_come(sizes, seed):
    """Inputs of weights 0, 1, 2 … have the sums of as many copies."""
    generator = torch.Generator().manual_seed(seed)
    weighed, repeated = Moments("fc1", TensorStore()), Moments("fc1", TensorStore())
    for size in sizes:
        rows, times = torch.randn(size, 5, generator=generator), torch.randint(4, (size,), generator=generator)
        weighed.add_inputs(rows, times.float())
        repeated.add_inputs(rows.repeat_interleave(times, 0), torch.ones(int(times.sum())))
    assert weighed.count == repeated.count
    torch.testing.assert_close(weighed.inputs, repeated.inputs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(weighed.vectors["mean"], repeated.vectors["mean"], atol=1e-4, rtol=1e-4)


def test_rounded_rows_have_the_moments_of_their_means():
    """Of features that hardly vary, rounding leaves a covariance of what they are rounded to, not one of rounding."""
    rows = 10 + 1e-3 * torch.randn(300, 20, generator=torch.Generator().manual_seed(0))
    moments = Moments("fc1", TensorStore())
    with rounded_products():
        rounded = factor_rows(rows)[: len(rows)].double()
        for some in rows.split(70):
            moments.add_inputs(some, torch.ones(len(some)))
        moments.add_gradients(rows)
    assert moments.count == len(rows)
    mean = moments.vectors["mean"].double() / moments.count
    torch.testing.assert_close(mean, rounded.mean(0), atol=1e-5, rtol=1e-6)
    covariance = moments.inputs / moments.count - mean.outer(mean)
    torch.testing.assert_close(covariance, rounded.T.cov(correction=0), atol=1e-4, rtol=0)
    torch.testing.assert_close(moments.gradients, moments.inputs, atol=1e-1, rtol=1e-5)
    torch.testing.assert_close(rounded, rows.double(), atol=0, rtol=2**-8)


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


class Lazy:
    """Notes who computed."""

    def __init__(self, meeting):
        self.meeting, self.computed = meeting, 0

    @lazy_property
    def value(self) -> int:
        """A number."""
        self.computed += 1
        self.meeting.wait(20)
        return 7


def test_two_instances_are_computed_at_once_and_each_once():
    meeting = Barrier(2)  # broken, if the second comes only after the first
    both = [Lazy(meeting), Lazy(meeting)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda one: one.value, both)) == [7, 7]
    assert [one.value + one.computed for one in both] == [8, 8]
    assert Lazy.value.__doc__ == "A number."


@pytest.mark.parametrize("definite", [True, False])
def test_several_right_sides_are_solved_one_by_one_and_let_go(definite):
    """Also where there is no Cholesky root; the covariance is what it was."""
    torch.manual_seed(0)
    factor = torch.randn(6, 6, dtype=torch.float64)
    covariance = factor @ factor.T if definite else factor + factor.T
    sides = {name: torch.randn(6, width, dtype=torch.float64) for name, width in (("a", 2), ("b", 5))}
    before, left = covariance.clone(), list(sides.items())
    for number, (name, solution) in enumerate(solve_all(covariance, 0.5, left), start=1):
        ridged = before + 0.5 * torch.eye(6, dtype=torch.float64)
        torch.testing.assert_close(ridged @ solution, sides[name], rtol=0, atol=1e-9)
        assert len(left) == len(sides) - number
    assert number == len(sides)
    assert torch.equal(covariance, before)


def test_a_store_gives_back_what_it_got():
    """Whether it is in memory or in the file, after changes of values and of sizes."""
    store = TensorStore(room=100)
    tensors = {key: torch.randn(key + 1, 3) for key in range(8)}
    tensors["mask"] = torch.ones(300, dtype=torch.bool)
    for key, tensor in tensors.items():
        store[key] = tensor
    for key in (0, 3, 5):
        tensors[key] = torch.randn(tensors[key].shape).T
        store[key] = tensors[key]
    tensors[4] = torch.arange(1000)
    store[4] = tensors[4]
    for key, tensor in tensors.items():
        assert key in store
        assert torch.equal(store[key], tensor)
        assert store[key].dtype == tensor.dtype
    assert "other" not in store
    assert store.room < 100
    for key in tensors:
        del store[key]
        assert key not in store
    assert store.room == 100


def test_sums_do_not_depend_on_where_they_are_stored():
    rows = [torch.randn(20, 700) for _ in range(3)]
    for room in (0, 10**9):
        moments = Moments("fc1", TensorStore(room=room))
        for some in rows:
            moments.add_inputs(some, torch.ones(len(some)))
        together = torch.cat(rows)
        torch.testing.assert_close(moments.inputs.float(), together.T @ together, atol=1e-4, rtol=1e-4)
        moments.replace("inputs", torch.diag(torch.arange(700.0)))
        assert torch.equal(moments.inputs.float(), torch.diag(torch.arange(700.0)))
        moments.forget("inputs")
        assert moments.finite("inputs")
        moments.add_inputs(torch.ones(1, 700), torch.ones(1))
        assert torch.equal(moments.inputs.float(), torch.ones(700, 700))


def test_threads_at_once_find_what_they_stored():
    store = TensorStore(room=0)

    def work(number):
        for again in range(3):
            store[number] = torch.full((50_000,), float(number + again))
            assert store[number].unique().tolist() == [number + again]
        return number

    with use_threads(4):
        assert list(map_in_order(work, range(40), torch.device("cpu"))) == list(range(40))
    assert [store[number][0].item() for number in range(40)] == [number + 2 for number in range(40)]
