"""Sums of pairs of rows, beside those of NumPy in double precision."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightformers_hf.conversion.statistics.moments import STRIP, Moments, PairMoments, weigh
from lightformers_hf.conversion.statistics.shelf import Shelf
from lightformers_hf.processors import factor_rows, rounded_products

pytestmark = pytest.mark.quick


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
        weighed = weigh(left, felt, torch.device("cpu"))
        sums.add(weighed, weighed if n is None else weigh(right, felt, torch.device("cpu")))
    sums.sum_over_all()

    x, y, w = (np.concatenate([rows.double().numpy() for rows in side]) for side in (lefts, rights, weights))
    x_mean, y_mean = (np.average(side, axis=0, weights=w) for side in (x, y))
    expected = x.T @ np.diag(w) @ y / w.sum() - (np.outer(x_mean, y_mean) if centred else 0)
    np.testing.assert_allclose(sums.moment(centred=centred).numpy(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sums.means()[1].numpy(), y_mean, rtol=1e-5, atol=1e-6)


@given(sizes=st.lists(st.integers(1, 90), min_size=1, max_size=3), seed=st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_weights_are_how_often_rows_come(sizes, seed):
    """Inputs of weights 0, 1, 2 … have the sums of as many copies."""
    generator = torch.Generator().manual_seed(seed)
    weighed, repeated = Moments("fc1", Shelf()), Moments("fc1", Shelf())
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
    moments = Moments("fc1", Shelf())
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
