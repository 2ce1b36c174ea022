"""Properties of this machine: the type that it multiplies fastest, its speed, and its free memory."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch

# Instructions that multiply bfloat16, fastest first (x86: AMX, AVX-512; ARM: bf16), and the values of
# ONEDNN_MAX_CPU_ISA that keep oneDNN from using each.
_OLDER = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
BF16_INSTRUCTIONS: dict[str, set[str]] = {
    "amx_bf16": _OLDER | {"AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512"},
    "avx512_bf16": _OLDER,
    "bf16": set(),
}
# Rows of products that sum over them come in multiples of this.
ROWS = 128
# Rows that are scaled and rounded together, so that what lies between is in the processor's cache.
CACHED_ROWS = 64


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """PyTorch computes with so many threads inside, and with as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def give_back_memory() -> None:
    """Return freed memory to the system (glibc): after large tensors of many sizes, up to a third of a process."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def free_memory() -> float:
    """Bytes that a process can still have, of the machine's and of its container's (Linux, control groups)."""
    free = float(psutil.virtual_memory().available)
    for most, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit, taken = (float(Path("/sys/fs/cgroup", name).read_text()) for name in (most, used))
        except (OSError, ValueError):  # not there, or "max"
            continue
        free = min(free, limit - taken)
    return max(free, 0.0)


def has_fast_bf16() -> bool:
    """Whether this processor has instructions for products in bfloat16, which are faster than those for float32."""
    return bf16_support()[0]


def bf16_support() -> tuple[bool, str]:
    """Return whether products in bfloat16 are fast here, and the reason.

    The instructions decide, never a stopwatch: the same machine gives the same answer every time, idle or busy.
    `ATEN_CPU_CAPABILITY` has no influence, because it limits PyTorch's own kernels, not those of oneDNN.
    """
    if not torch.backends.mkldnn.is_available():
        return False, "this PyTorch is built without oneDNN"
    found = [name for name in BF16_INSTRUCTIONS if _instructions().get(name)]
    if not found:
        return False, f"the processor has none of {', '.join(BF16_INSTRUCTIONS)}"
    limit = _onednn_limit()
    usable = [name for name in found if limit not in BF16_INSTRUCTIONS[name]]
    return bool(usable), f"the processor has {usable[0]}" if usable else f"ONEDNN_MAX_CPU_ISA is {limit}"


def has_fast_rounding() -> bool:
    """Whether `rounded_products` of float32 are faster than exact ones: with AMX alone.

    Elsewhere the conversion to bfloat16 takes what the products save: with `avx512_bf16`, 512×512 matrices take
    2.4 ms instead of 2.6 (AMD Zen 4, one core).
    """
    return bf16_support() == (True, "the processor has amx_bf16")


@cache
def _instructions() -> Mapping[str, Any]:
    """Return the names of the processor's instruction sets, as `torch.cpu.get_capabilities` spells them."""
    if hasattr(torch.cpu, "get_capabilities"):
        return torch.cpu.get_capabilities()
    # Older versions of PyTorch have no public function for it.
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return dict.fromkeys(flags.partition(":")[2].split(), True)


def _onednn_limit() -> str:
    """Return the newest instruction set that the user lets oneDNN use; empty without a limit."""
    names = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
    return next((os.environ[name].upper() for name in names if os.environ.get(name)), "")


@contextmanager
def rounded_products() -> Iterator[None]:
    """Inside, a CPU's products of float32 matrices round their factors to bfloat16; sums and results are float32.

    It holds for all threads. PyTorch before 2.9 cannot: there nothing changes.
    """
    settings = _product_settings()
    if settings is None:
        yield
        return
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def factor_rows(rows: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
    """Rows in float32, each times one of `scales`, for a product that sums over them, and for their own sum.

    Within `rounded_products` these are the numbers that are multiplied, so that means fit second moments, with zeros
    below up to a multiple of `ROWS`: a product is a program, written for its sizes, in more time than it takes.
    """
    settings = _product_settings()
    if settings is None or settings.fp32_precision != "bf16" or rows.device.type != "cpu":
        return rows.float() if scales is None else rows.float() * scales[:, None]
    factors = torch.empty(-(-len(rows) // ROWS) * ROWS, *rows.shape[1:])
    factors[len(rows) :] = 0
    for start in range(0, len(rows), CACHED_ROWS):
        part, some = factors[start : min(start + CACHED_ROWS, len(rows))], rows[start : start + CACHED_ROWS]
        if scales is not None:
            some = torch.mul(some, scales[start : start + CACHED_ROWS, None], out=part)
        part.copy_(some.bfloat16())
    return factors


def _product_settings() -> Any:
    """PyTorch's own of products on a CPU; `None` where it has none."""
    return getattr(torch.backends.mkldnn, "matmul", None)


def product_seconds(dtype: torch.dtype) -> float:
    """What a product of two matrices 512×512 takes one core here, the shortest of ten, or of a tenth of a second's.

    Other programs take none of it: it is processor time, or where that is coarse, time on the clock.
    """
    x = torch.ones(512, 512, dtype=dtype)
    times: list[float] = []
    with use_threads(1):
        while len(times) < 10 and sum(times) < 0.1:  # in software, one in bfloat16 may take a quarter of a second
            start, worked = time.perf_counter(), time.process_time()
            x @ x
            times.append(time.process_time() - worked or time.perf_counter() - start)
    return min(times)
