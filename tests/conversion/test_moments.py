"""Second moments, their roots and norms, and where sums are stored."""

import numpy as np
import torch
from conversion.metrics import weigh
from hypothesis import given, settings
from hypothesis import strategies as st

from lightformers_hf.conversion.forms.svd import singular_values
from lightformers_hf.conversion.moments import STRIP, Damped, Metric, Moments, PairMoments, TensorStore, WeightedRows


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    m=st.integers(1, STRIP + 9),
    n=st.integers(1, 9) | st.none(),
    centred=st.booleans(),
)
@settings(max_examples=40)
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
    sums.divide()

    x, y, w = (np.concatenate([rows.double().numpy() for rows in side]) for side in (lefts, rights, weights))
    x_mean, y_mean = (np.average(side, axis=0, weights=w) for side in (x, y))
    expected = x.T @ np.diag(w) @ y / w.sum() - (np.outer(x_mean, y_mean) if centred else 0)
    np.testing.assert_allclose(sums.moment(centred=centred).numpy(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sums.right.numpy(), y_mean, rtol=1e-5, atol=1e-6)


@given(sizes=st.lists(st.integers(1, 90), min_size=1, max_size=3), seed=st.integers(0, 10_000))
@settings(max_examples=20)
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


def drawn(m, n, seed, *, is_table, samples):
    """A matrix, m×n, and a metric of so few samples that its moments lack rank but for what is added."""
    generator = torch.Generator().manual_seed(seed)
    x, g, matrix = (torch.randn(k, size, generator=generator) for k, size in ((samples, m), (samples, n), (m, n)))
    x, g = x.double(), g.double()
    rows = x[0].abs() + 0.01 if is_table else Damped(x.T @ x, 1e-3)
    return matrix, Metric(rows, Damped(g.T @ g, 1e-2))


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 50), st.integers(0, 999), st.booleans())
def test_singular_values_need_one_root(m, n, samples, seed, is_table):
    """Those by the smaller Gram matrix are those of Lᵀ W R, and only the smaller side's root is taken."""
    matrix, metric = drawn(m, n, seed, is_table=is_table, samples=samples)
    found = singular_values(matrix, name="w", metric=metric)
    larger = metric.columns if m <= n else metric.rows
    assert "root" not in vars(larger)
    expected = torch.linalg.svdvals(weigh(metric, matrix))
    torch.testing.assert_close(found.square(), expected.square(), rtol=1e-9, atol=1e-9 * expected[0].item() ** 2)


def test_a_damped_moment_and_its_root():
    generator = torch.Generator().manual_seed(0)
    x, rows = (torch.randn(k, 30, generator=generator).double() for k in (20, 3))
    damped = x.T @ x
    moment = Damped(damped.clone(), 0.1)
    damped.diagonal().add_(0.1 * damped.diagonal().mean())
    torch.testing.assert_close(moment.between(rows), rows @ damped @ rows.T)
    torch.testing.assert_close(moment.root @ moment.root.T, damped)


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
