"""Few rows take another route through a linear layer, and come out the same."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightformers_hf.models import matrices as module
from lightformers_hf.models.matrices import wide_linear


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.integers(0, 4), min_size=0, max_size=2),
    in_features=st.integers(1, 9),
    out_features=st.integers(1, 160),
    bias=st.booleans(),
)
def test_same_numbers(rows, in_features, out_features, bias):
    layer = nn.Linear(in_features, out_features, bias=bias)
    states = torch.randn(*rows, in_features)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(module, "MANY_WEIGHTS", 1)
        output = wide_linear(layer, states)
        expected = states.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
    assert output.shape == expected.shape
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)


def product_calls(layer, states, monkeypatch) -> int:
    """How often the other route is taken."""
    calls = []
    real = torch.mm
    monkeypatch.setattr(module, "MANY_WEIGHTS", 500)
    monkeypatch.setattr(module.torch, "mm", lambda *arguments: calls.append(1) or real(*arguments))
    wide_linear(layer, states)
    return len(calls)


def test_the_other_route_is_for_plain_layers_alone(monkeypatch):
    """Not where a layer was replaced or watched, nor where gradients or half precision need the usual."""
    states = torch.randn(3, 8)
    with torch.no_grad():
        assert product_calls(nn.Linear(8, 64), states, monkeypatch) == 1
        assert product_calls(nn.Linear(8, 62), states, monkeypatch) == 0  # small
        assert product_calls(nn.Linear(32, 64), torch.randn(3, 32), monkeypatch) == 0  # not tall
        assert product_calls(nn.Linear(8, 64), torch.randn(9, 8), monkeypatch) == 0
        assert product_calls(nn.Linear(8, 64).bfloat16(), states.bfloat16(), monkeypatch) == 0

        class Quantized(nn.Linear):
            def forward(self, states):
                return torch.zeros(3, 64)

        assert torch.equal(wide_linear(Quantized(8, 64), states), torch.zeros(3, 64))
        watched = nn.Linear(8, 64)
        seen = []
        watched.register_forward_hook(lambda layer, inputs, output: seen.append(output))
        assert product_calls(watched, states, monkeypatch) == 0
        assert len(seen) == 1
    assert product_calls(nn.Linear(8, 64), states, monkeypatch) == 0


def test_gradients():
    layer, states = nn.Linear(8, 64), torch.randn(2, 8, requires_grad=True)
    wide_linear(layer, states).sum().backward()
    torch.testing.assert_close(states.grad, layer.weight.sum(0).expand(2, 8))
