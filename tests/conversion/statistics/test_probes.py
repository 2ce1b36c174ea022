"""Probes have the covariance of a label's gradient, and are a token's own; their temperature stands for noise."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightformers_hf.conversion.statistics.probes import PERIOD, Probes, logit_variance, temperature_of, token_keys


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 12), st.integers(0, 10_000), st.sampled_from([0.5, 3.0]), st.sampled_from([1.0, 2.5]))
def test_their_covariance_is_the_fisher_matrix_of_the_logits(size, seed, spread, temperature):
    """That of p − y, y a label drawn from p, summed over all labels; p the probabilities at a temperature."""
    logits = spread * torch.randn(size, generator=torch.Generator().manual_seed(seed))
    likely = (logits / temperature).softmax(-1)
    errors = likely - torch.eye(size)  # of every label
    expected = (errors * likely[:, None]).T @ errors
    keys = torch.arange(1.0, PERIOD)
    drawn = Probes(size, torch.device("cpu"), temperature).draw(logits.expand(len(keys), -1), keys)
    assert (drawn.T @ drawn / len(keys) - expected).abs().max() < 0.05
    # As of every gradient of a loss of probabilities: what is added to all logits changes none.
    torch.testing.assert_close(drawn.sum(-1), torch.zeros(len(keys)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [3, 50_000])
def test_signs_are_as_often_up_as_down(size):
    logits = torch.zeros(4, size)
    drawn = Probes(size, torch.device("cpu")).draw(logits, torch.tensor([1.0, 2.0, 77.0, 4092.0]))
    assert drawn.isfinite().all()
    if size > 1000:
        assert ((drawn > 0).float().mean(-1) - 0.5).abs().max() < 0.02
        signs = drawn.sign()
        assert (signs @ signs.T / size - torch.eye(4)).abs().max() < 0.05  # of two tokens they are independent


def test_keys_do_not_depend_on_the_batch():
    ids = torch.tensor([[5, 6, 7, 1], [9, 8, 1, 1]])
    mask, labels = (ids != 1).long(), torch.tensor([[3, 4, 2], [3, 2, -100]])
    together = token_keys({"input_ids": ids, "attention_mask": mask, "labels": labels})
    alone = token_keys({"input_ids": ids[1:, :2], "attention_mask": mask[1:, :2], "labels": labels[1:, :2]})
    assert torch.equal(together[1:, :2], alone)
    assert together.unique().numel() == together.numel()
    assert 1 <= together.min() <= together.max() <= PERIOD


def test_the_variance_of_logits_is_that_of_what_probabilities_depend_on():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(40, 6)) * [1, 2, 3, 1, 1, 0] + rng.normal(size=(40, 1)) * 50  # the last term moves none
    exponents = np.exp(logits - logits.max(1, keepdims=True))
    likely = (exponents / exponents.sum(1, keepdims=True)).mean(0)
    expected = (likely * (logits - logits @ likely[:, None]).var(0)).sum()
    parts = torch.tensor(logits).split(16)
    assert logit_variance(lambda states: states, parts, 6) == pytest.approx(expected, rel=1e-9)
    assert logit_variance(lambda states: states.float(), [torch.ones(5, 6)], 6) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("gap", [0.5, 4.0, 10.0])
def test_a_temperature_stands_for_noise_of_the_logits(gap):
    """The curvature p(1 − p) of two tokens, expected under Gaussian noise, is near the curvature at the temperature.

    By the exact logits, a confident model has no curvature left."""
    variance, removed = 9.0, 0.5
    noise = torch.randn(400_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noisy = torch.sigmoid(gap + math.sqrt(2 * removed * variance) * noise)
    exact = torch.sigmoid(torch.tensor(gap))
    warm = torch.sigmoid(torch.tensor(gap / temperature_of(variance, removed)))
    # The expected curvature is the derivative of the expected probability, which the approximation is of.
    slope = warm * (1 - warm) / temperature_of(variance, removed)
    expected = (noisy * (1 - noisy)).mean()
    error, without = (abs(math.log(curvature / expected)) for curvature in (slope, exact * (1 - exact)))
    assert error < math.log(2.2)
    assert error < 0.25 * without
    assert temperature_of(variance, 0.0) == 1.0
