"""Properties of the machine, and rounded matrix multiplications."""

import platform
import time

import pytest
import torch

from lightformers_hf import processors

pytestmark = pytest.mark.quick


def test_what_a_product_takes_is_not_what_other_programs_take(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))  # a second goes by between two looks
    assert 0 < processors.product_seconds(torch.float32) < 0.5


def test_a_product_is_timed_on_one_core(monkeypatch):
    """However many threads there are: some clocks know nothing of what others than this one did."""
    seen, ones = [], torch.ones

    class Watched(torch.Tensor):
        def __matmul__(self, other):
            seen.append(torch.get_num_threads())
            return super().__matmul__(other)

    monkeypatch.setattr(torch, "ones", lambda *size, **options: ones(*size, **options).as_subclass(Watched))
    with processors.use_threads(2):
        processors.product_seconds(torch.float32)
        assert torch.get_num_threads() == 2
    assert set(seen) == {1}


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
    """No clock is read: the same processor and settings give the same answer every time."""
    monkeypatch.setattr(processors, "_instructions", lambda: instructions)
    monkeypatch.setattr(processors, "time", None)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert processors.bf16_support() == (bf16, reason)
    assert processors.has_fast_bf16() == bf16
    assert processors.has_fast_rounding() == reason.endswith("has amx_bf16")


def test_the_names_of_instructions_are_those_of_pytorch_and_of_the_kernel(monkeypatch, tmp_path):
    known = processors._instructions()
    if platform.machine() == "x86_64" and hasattr(torch.cpu, "get_capabilities"):
        assert {"avx512_bf16", "amx_bf16"} <= set(known)
    processors._instructions.cache_clear()
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    cpuinfo = "processor : 0\nflags\t\t: fpu avx512_bf16 amx_bf16\n"
    monkeypatch.setattr(processors.Path, "read_text", lambda path, **options: cpuinfo)
    assert processors.bf16_support() == (True, "the processor has amx_bf16")
    processors._instructions.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_rows_are_rounded_once(dtype):
    """Of 1, 2 and 3 parts that the processor's cache holds, and the last of them not full."""
    for count in (1, 64, 100, 150):
        rows, scales = torch.randn(count, 30).to(dtype), torch.rand(count)
        expected = rows.float() * scales[:, None]
        assert torch.equal(processors.factor_rows(rows, scales), expected)
        with processors.rounded_products():
            factors = processors.factor_rows(rows, scales)
        if hasattr(torch.backends.mkldnn, "matmul"):
            expected = expected.bfloat16().float()
        assert torch.equal(factors[:count], expected)
        assert not factors[count:].any()


def test_products_that_may_round_give_what_rounded_factors_do():
    rows = torch.randn(200, 30)
    assert torch.equal(processors.factor_rows(rows), rows)
    with processors.rounded_products():
        factors = processors.factor_rows(rows)
        product = factors.T @ factors
    if hasattr(torch.backends.mkldnn, "matmul"):
        assert torch.equal(factors[:200], rows.bfloat16().float())
        assert factors.shape == (256, 30)
        assert not factors[200:].any()
    assert product.dtype == torch.float32
    torch.testing.assert_close(product.double(), factors.double().T @ factors.double(), atol=1e-4, rtol=1e-5)
    with pytest.raises(ZeroDivisionError), processors.rounded_products():
        1 / 0  # noqa: B018, whatever fails inside
    assert torch.equal(processors.factor_rows(rows), rows)
