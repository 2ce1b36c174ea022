"""Properties of the machine, and matrix multiplications of few shapes."""

import platform

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from lightformers_hf import processors
from lightformers_hf.processors import (
    FIRST_SHAPES,
    MANY_SHAPES,
    EvenProducts,
    PackedAttention,
    cast_once,
    has_many_shapes,
    packed_lengths,
    use_threads,
)

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("instructions", "limit", "bf16", "reason"),
    [
        ({"avx512_bf16": True, "amx_bf16": False}, "", True, "the processor has avx512_bf16"),
        ({"avx512_bf16": True, "amx_bf16": True}, "", True, "the processor has amx_bf16"),
        ({"avx512_bf16": True, "amx_bf16": True}, "avx512_core_bf16", True, "the processor has avx512_bf16"),
        ({"avx512_bf16": True, "amx_bf16": True}, "AVX512_CORE_AMX", True, "the processor has amx_bf16"),
        ({"avx512_bf16": True}, "AVX2", False, "ONEDNN_MAX_CPU_ISA is AVX2"),
        ({"neon": True, "bf16": True}, "", True, "the processor has bf16"),
        ({"avx512_f": True}, "", False, "the processor has none of amx_bf16, avx512_bf16, bf16"),
    ],
)
def test_instructions_decide_whether_bfloat16_is_fast(monkeypatch, instructions, limit, bf16, reason):
    monkeypatch.setattr(processors, "_instructions", lambda: instructions)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert processors.bf16_support() == (bf16, reason)
    assert processors.has_fast_bf16() == bf16


def test_the_names_of_instructions_are_those_of_pytorch():
    if platform.machine() == "x86_64" and hasattr(torch.cpu, "get_capabilities"):
        assert {"avx512_bf16", "amx_bf16"} <= set(processors._instructions())


def gradients(function, *tensors):
    """What a function makes of copies of the tensors under autocast, and the gradients of a weighed sum of it."""
    copies = [tensor.clone().requires_grad_() for tensor in tensors]
    with torch.autocast("cpu", torch.bfloat16):
        output = function(*copies)
    weights = torch.linspace(0.1, 1, output.numel()).view(output.shape)
    (output.float() * weights).sum().backward()
    return output, *(copy.grad for copy in copies)


@pytest.mark.parametrize("learns", [True, False])
def test_states_are_kept_for_weights_that_learn_alone(learns):
    kept = []
    layer = nn.Linear(40, 24).requires_grad_(learns)
    states = torch.rand(3, 50, 40, requires_grad=True)
    with (
        EvenProducts(),
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(
            lambda each: kept.append(tuple(each.shape)) or each, lambda each: each
        ),
    ):
        output = layer(states)
    output.float().sum().backward()
    assert kept == [(256, 64), (32, 64)][0 if learns else 1 :]
    expected = layer.weight.detach().sum(0).expand_as(states)
    torch.testing.assert_close(states.grad, expected, rtol=0.02, atol=0.02)


@settings(max_examples=30)
@given(
    shape=st.lists(st.integers(1, 21), max_size=3),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_layer_and_its_gradients(shape, sizes, bias, seed):
    torch.manual_seed(seed)
    m, n = sizes
    # Of positive numbers, whose sums do not cancel out.
    tensors = [torch.rand(*shape, m), torch.rand(n, m), *([torch.rand(n)] if bias else [])]
    plain = gradients(F.linear, *tensors)
    with EvenProducts():
        even = gradients(F.linear, *tensors)
    assert even[0].dtype == torch.bfloat16
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    output = F.linear(*exact)
    weights = torch.linspace(0.1, 1, output.numel(), dtype=torch.float64).view(output.shape)
    (output * weights).sum().backward()
    for ours, theirs, true in zip(even, plain, [output, *(tensor.grad for tensor in exact)], strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.double(), true.detach(), rtol=0.02, atol=0)


def test_products_have_few_shapes(monkeypatch):
    """Ranks and numbers of tokens that all differ, and yet as few products as with one rank and one number."""
    made, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *parts: made.append(tuple(part.shape for part in parts)) or mm(*parts))
    with EvenProducts(), torch.autocast("cpu", torch.bfloat16):
        for tokens, rank in zip(range(130, 250, 10), range(33, 64, 2), strict=False):
            F.linear(torch.randn(tokens, 64, requires_grad=True), torch.randn(rank, 64)).float().sum().backward()
        assert {tuple(sorted(left + right)) for left, right in made} == {(64, 64, 64, 256)}
        made.clear()  # a sum of few tokens is not made much larger
        F.linear(torch.randn(5, 64, requires_grad=True), torch.randn(32, 64)).float().sum().backward()
    assert [left for left, _ in made] == [(8, 32)]


def test_attention_of_one_shape_too_many_is_in_float32():
    with EvenProducts(), torch.autocast("cpu", torch.bfloat16):
        for width in range(1, FIRST_SHAPES + 3):
            heads = torch.randn(2, 3, 5, width), torch.randn(2, 3, width, 7)
            found = [torch.matmul(*heads) for _ in range(2)]
            expected = torch.bfloat16 if width <= FIRST_SHAPES else torch.float32
            assert [each.dtype for each in found] == [expected] * 2
            torch.testing.assert_close(found[0].float(), heads[0] @ heads[1], rtol=0.05, atol=0.1, check_dtype=False)
        large = torch.randn(1, 1, 100, 64), torch.randn(1, 1, 64, 100)  # bfloat16 is worth its program
        assert torch.matmul(*large).dtype == torch.bfloat16
    with EvenProducts(shapes=0), torch.autocast("cpu", torch.bfloat16):  # none is to be in bfloat16
        assert torch.matmul(torch.randn(2, 3, 5, 8), torch.randn(2, 3, 8, 5)).dtype == torch.float32


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 6), min_size=2, max_size=5))
def test_packed_texts_attend_to_themselves_alone(lengths):
    text = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    mask = (text[:, None] == text).tril()[None, None]
    heads = torch.randn(3, 1, 2, len(text), 4, generator=torch.Generator().manual_seed(0))
    assert packed_lengths(mask) == lengths
    expected = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=0.3)
    with PackedAttention():
        found = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(found, expected)
    blind = mask.clone()
    blind[..., -1, -1] = False  # a token that does not see itself
    others = [mask.expand(2, 1, -1, -1), mask.float(), mask[..., :-1], blind, None]
    assert [packed_lengths(other) for other in others] == [[]] * 5


def test_nothing_changes_without_autocast(monkeypatch):
    monkeypatch.setattr(processors._EvenLinear, "apply", None)  # would fail
    layer, states = nn.Linear(33, 17), torch.randn(5, 33)
    expected = layer(states)
    with EvenProducts():
        assert torch.equal(layer(states), expected)
        with torch.autocast("cpu", torch.float16):
            layer(states)


class Quantized(torch.Tensor):
    """A weight that multiplies in its own way."""


def test_weights_of_their_own_kind_are_left_alone(monkeypatch):
    monkeypatch.setattr(processors._EvenLinear, "apply", None)
    weight = torch.randn(4, 3).as_subclass(Quantized)
    with EvenProducts(), torch.autocast("cpu", torch.bfloat16):
        assert F.linear(torch.randn(2, 3), weight).shape == (2, 4)
        assert F.linear(torch.randn(0, 3), torch.randn(4, 3)).shape == (0, 4)


def test_only_matrices_of_numbers_are_cast():
    quantized = nn.Linear(3, 4)
    quantized.weight = nn.Parameter(torch.randn(4, 3).as_subclass(Quantized), requires_grad=False)
    layers = nn.ModuleList([nn.Linear(3, 4), nn.LayerNorm(3), quantized])
    with cast_once(layers):
        assert [layer.weight.dtype == torch.bfloat16 for layer in layers] == [True, False, False]
    assert {layer.weight.dtype for layer in layers} == {torch.float32}


def test_models_whose_layers_are_alike_have_few_shapes():
    assert not has_many_shapes(nn.ModuleList(nn.Linear(5, 3) for _ in range(50)))
    assert has_many_shapes(nn.ModuleList(nn.Linear(5, 1 + n) for n in range(MANY_SHAPES + 1)))


def test_blocks_of_threads_may_nest_and_overlap():
    before = torch.get_num_threads()
    first, second = use_threads(before + 1), use_threads(before + 2)
    with first:
        second.__enter__()
        assert torch.get_num_threads() == before + 2
    assert torch.get_num_threads() == before + 2
    second.__exit__(None, None, None)
    assert torch.get_num_threads() == before
    with use_threads(before + 1):
        with use_threads(before + 2):
            pass
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
