"""Threads on cores that other programs leave, and memory that is kept."""

import os
import platform
import subprocess
import sys
import time

import pytest
import torch

from lightformers_hf import convert, processors
from lightformers_hf.conversion.workers import count_workers
from lightformers_hf.processors import CACHES, IdleThreads, keep_programs

pytestmark = pytest.mark.quick


@pytest.fixture
def machine(monkeypatch):
    """Four cores of which `busy` are at work for others, and a PyTorch that may use three."""
    before, state = torch.get_num_threads(), {"busy": 0.0, "now": 0.0}

    def clocks():
        state["now"] += 1.0
        return state["now"], state["now"] * state["busy"], 0.0

    monkeypatch.setattr(processors, "_clocks", clocks)
    monkeypatch.setattr(processors.psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    torch.set_num_threads(3)
    yield state
    torch.set_num_threads(before)


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


@pytest.mark.parametrize(("busy", "left"), [(0, 3), (1, 3), (2.1, 2), (3, 1), (4, 1)])
def test_as_many_as_others_leave_and_as_are_allowed(machine, busy, left):
    machine["busy"] = busy
    with IdleThreads() as threads:
        assert torch.get_num_threads() == left
        machine["busy"], machine["now"] = 0, 0
        threads.seen = (0.0, 0.0, 0.0)
        threads.adapt()
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == 3


def test_one_thread_needs_no_look(machine, monkeypatch):
    monkeypatch.setattr(processors, "_clocks", None)
    torch.set_num_threads(1)
    with IdleThreads() as threads:
        threads.adapt()
        assert torch.get_num_threads() == 1


def test_conversions_leave_busy_cores_alone(machine, tiny_marian, tmp_path, monkeypatch):
    """As many workers as cores are idle, and one thread in each."""
    seen = []
    monkeypatch.setattr(
        "lightformers_hf.conversion.convert.compress",
        lambda *_, **__: seen.append((count_workers(), torch.get_num_threads())) or 1 / 0,
    )
    for busy in (4, 2, 0):
        machine["busy"] = busy
        with pytest.raises(ZeroDivisionError):
            convert(tiny_marian, tmp_path / "out", rank=2)
        assert torch.get_num_threads() == 3
    assert seen == [(1, 1), (2, 1), (3, 1)]


FAULTS = """
import resource
import sys
import torch
from lightformers_hf.processors import keep_large, keep_memory

def faults(size=2**24):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(size)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "all":
    before = faults()
    keep_memory()
    faults()
    print(before, faults())
else:
    keep_memory(largest=2**20, end=2**20)
    before = faults(2**22)
    with keep_large():
        faults(2**22)
        inside = faults(2**22)
    print(before, inside, faults(2**22))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep memory")
def test_freed_tensors_are_kept_for_the_next_ones():
    """64 MiB of new pages are 16,384 faults, or 32 of huge ones. In a process of its own, since it is for good."""
    run = subprocess.run([sys.executable, "-c", FAULTS, "all"], capture_output=True, text=True, check=True)
    new, kept = map(int, run.stdout.split())
    assert new >= 20 * 32
    assert kept < 20


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep memory")
def test_large_tensors_are_kept_for_a_while():
    run = subprocess.run([sys.executable, "-c", FAULTS, "large"], capture_output=True, text=True, check=True)
    before, inside, afterwards = map(int, run.stdout.split())
    assert min(before, afterwards) >= 20 * 8
    assert inside < 20


PROGRAMS = """
import sys
import psutil
import torch
from lightformers_hf.processors import keep_programs

if sys.argv[1] == "forget":
    keep_programs(128)
weight = torch.ones(256, 256, dtype=torch.bfloat16)
for rows in range(300, 1300):
    torch.ones(rows, 256, dtype=torch.bfloat16) @ weight
    if rows == 400:
        before = psutil.Process().memory_info().rss
print(psutil.Process().memory_info().rss - before)
"""


def test_programs_of_products_are_forgotten():
    """In processes of their own: the caches' sizes are read once."""

    def grown(how):
        own = {name: value for name, value in os.environ.items() if name not in CACHES}
        run = subprocess.run(
            [sys.executable, "-c", PROGRAMS, how], capture_output=True, text=True, check=True, env=own
        )
        return int(run.stdout)

    kept = grown("keep")
    if kept < 100e6:
        pytest.skip("this processor multiplies bfloat16 without programs for every shape")
    assert grown("forget") < 0.3 * kept


def test_the_user_s_own_limit_stays(monkeypatch):
    own, other = CACHES
    monkeypatch.setenv(own, "7")
    monkeypatch.delenv(other, raising=False)
    keep_programs()
    assert [os.environ[name] for name in CACHES] == ["7", "128"]


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
