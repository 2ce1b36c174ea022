"""Probes have the covariance of a label's gradient, and are a token's own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightformers_hf.conversion.statistics.probes import PERIOD, Probes, token_keys


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 12), st.integers(0, 10_000), st.sampled_from([0.5, 3.0]))
def test_their_covariance_is_the_fisher_matrix_of_the_logits(size, seed, spread):
    """That of p − y, y a label drawn from p, summed over all labels."""
    logits = spread * torch.randn(size, generator=torch.Generator().manual_seed(seed))
    likely = logits.softmax(-1)
    errors = likely - torch.eye(size)  # of every label
    expected = (errors * likely[:, None]).T @ errors
    keys = torch.arange(1.0, PERIOD)
    drawn = Probes(size, torch.device("cpu")).draw(logits.expand(len(keys), -1), keys)
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
