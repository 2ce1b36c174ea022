"""int8 weights: near what they stand for, and multiplied exactly where neighbours' products are added in 16 bits."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from lightformers_hf.rounding import quantize_rows as quantize

floats = st.floats(-1e4, 1e4, width=32, allow_subnormal=True)
matrices = arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=9), elements=floats)


def quantize_rows(matrix):
    return [found.numpy() for found in quantize(torch.from_numpy(matrix))]


def multiply_in_16_bits(inputs, weights):
    """As x86 without VNNI: products of neighbours are added with saturation, and those sums in 32 bits."""
    weights = np.pad(weights, [(0, 0), (0, weights.shape[1] % 2)]).astype(np.int64)
    inputs = np.pad(inputs, (0, len(inputs) % 2)).astype(np.int64)
    products = weights * inputs
    return (products[:, ::2] + products[:, 1::2]).clip(-(2**15), 2**15 - 1).sum(1)


@given(matrices, st.integers(0, 2**32 - 1))
def test_no_processor_cuts_anything_off(matrix, seed):
    values, scales = quantize_rows(matrix)
    assert values.dtype == np.int8
    assert scales.dtype == np.float32
    some = np.random.default_rng(seed).choice([0, 1, 128, 255], matrix.shape[1])
    for inputs in (some, np.where(values[0] > 0, 255, 0), np.where(values[0] < 0, 255, 0)):
        exact = values.astype(np.int64) @ inputs
        np.testing.assert_array_equal(multiply_in_16_bits(inputs, values), exact)


@given(matrices)
def test_values_are_the_nearest_of_their_scale(matrix):
    values, scales = quantize_rows(matrix)
    seen = np.abs(matrix).max(1) >= 1e-36  # rows of less than fp32 holds as a normal number's 127th are zero
    error = np.abs(values * scales[:, None].astype(np.float64) - matrix)
    assert (error[seen] <= scales[seen, None] * 0.501).all()
    assert (error[~seen] <= 1e-36).all()


def test_lone_large_values_have_the_whole_range():
    matrix = np.array([[1.0, 0.0, 0.0, -1.0], [0.5, -0.5, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]], dtype=np.float32)
    values, scales = quantize_rows(matrix)
    np.testing.assert_array_equal(values, [[127, 0, 0, -127], [127, -127, 0, 0], [64, 64, 0, 0]])
    np.testing.assert_allclose(scales, [1 / 127, 0.5 / 127, 2 / 127], rtol=1e-6)


@pytest.mark.parametrize("shape", [(3, 1), (1, 4), (2, 0)])
def test_small_and_empty_rows(shape):
    values, scales = quantize_rows(np.zeros(shape, dtype=np.float32))
    assert values.shape == shape
    assert (values == 0).all()
    assert (scales == 1).all()
