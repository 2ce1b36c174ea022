"""What layers are made of: dropout, which on a CPU draws its own numbers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models.cases import make_model
from torch import nn

from lightformers_hf.models.layers import apply_dropout


@given(share=st.floats(0.001, 0.999), seed=st.integers(0, 2**32 - 1))
def test_each_element_is_dropped_with_its_share_and_independently(share, seed):
    """Four elements have one random number: frequencies of all their 16 outcomes within 6 standard deviations."""
    torch.manual_seed(seed)
    kept = apply_dropout(torch.ones(40_000, 4), share, training=True).ne(0)
    outcomes = torch.bincount(kept.long() @ torch.tensor([1, 2, 4, 8]), minlength=16)
    for outcome, seen in enumerate(outcomes.tolist()):
        ones = outcome.bit_count()
        likely = (1 - share) ** ones * share ** (4 - ones)
        assert abs(seen - 40_000 * likely) <= 6 * (40_000 * likely * (1 - likely)) ** 0.5 + 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5, 7), (0, 4)])
def test_what_is_kept_is_scaled_and_so_is_its_gradient(shape, dtype):
    """1/(1 − p), as torch's own has it, so that the mean stays; any number of elements, and views of others."""
    states = torch.randn(shape, dtype=dtype).movedim(0, -1) if shape else torch.randn((), dtype=dtype)
    states.requires_grad_()
    dropped = apply_dropout(states, 0.25, training=True)
    assert dropped.shape == states.shape
    assert dropped.dtype == dtype
    (gradient,) = torch.autograd.grad(dropped.sum(), states)
    expected = torch.tensor(4 / 3, dtype=dtype)
    assert ((gradient == 0) | (gradient == expected)).all()
    torch.testing.assert_close(dropped, states * gradient)


def test_a_seed_repeats_it_and_evaluation_has_none():
    states = torch.ones(100)
    first, second = (apply_dropout(states, 0.5, training=bool(torch.manual_seed(7))) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, apply_dropout(states, 0.5, training=True))
    assert apply_dropout(states, 0.5, training=False) is states
    assert apply_dropout(states, 0.0, training=True) is states
    assert not apply_dropout(states, 1.0, training=True).any()


def test_it_compiles_without_a_break():
    compiled = torch.compile(lambda states: apply_dropout(states, 0.5, True), fullgraph=True, backend="eager")
    assert 0 < compiled(torch.ones(64)).ne(0).sum() < 64


def test_modules_that_drop_are_no_others():
    droppers = [
        module for module in make_model("Model", "subformer-sandwich").modules() if isinstance(module, nn.Dropout)
    ]
    assert droppers
    states = torch.ones(50)
    for dropper in droppers:
        dropper.train().p = 0.5
        torch.manual_seed(1)
        dropped = dropper(states)
        torch.manual_seed(1)
        assert torch.equal(dropped, apply_dropout(states, 0.5, training=True))
        assert dropper.eval()(states) is states
