"""Properties of this machine: its device, memory, and the fastest matrix multiplications."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

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
# Rows that are scaled and rounded together, so that intermediate results stay in the processor's cache.
CACHED_ROWS = 64
# A product's sizes are made multiples of these: tokens, and both sides of a weight.
TOKENS, FEATURES = ROWS, 32
# Attention whose layers are alike: its two products in an encoder's layers, and four in a decoder's.
FIRST_SHAPES = 6
# Number of different matrices of a model; fewer recur within a batch, so that padding has no advantage.
MANY_SHAPES = 16
# Multiplications of a head above which a separate bfloat16 kernel is faster.
SMALL_HEAD = 64**3


def check_device(name: str | torch.device) -> torch.device:
    """The device of that name.

    Raises:
        ValueError: there is none here, or it computes nothing (`meta`).
    """
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it holds no values")
        torch.ones(1, device=device).sum().item()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"device is {str(name)!r}, which can't be used here ({reason}): give cpu, or one there is"
        ) from None
    return device


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Set the number of PyTorch's threads for a block, and restore it afterwards."""
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
    """Seconds of one core for a product of two 512×512 matrices: the minimum of ten runs, or of a tenth of a second.

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


class EvenProducts(TorchFunctionMode):
    """A context, in which PyTorch's layers multiply matrices of few different shapes under bfloat16 autocast.

    A CPU's product in bfloat16 is a program, written for its shapes (oneDNN). In models whose matrices all differ, as
    low-rank ones do, and with sentences, each batch of another number of tokens, writing them took half of a training
    step (RESULTS.md, "Products of few shapes"). Here

    - linear layers are multiplied with rows and columns of zeros that make their sizes multiples of `TOKENS` and
      `FEATURES`: the same numbers, up to rounding;
    - of attention's products those of the first shapes are made as they are, which is all there are where layers are
      alike; small ones of other shapes (`SMALL_HEAD`) are made in float32, which needs no programs.

    Elsewhere, and without autocast, nothing changes. Layers that are computed again for their gradients would be
    computed otherwise: PyTorch leaves the context for a backward pass.

    Args:
        shapes: of attention's products, how many are the first.
    """

    def __init__(self, shapes: int = FIRST_SHAPES) -> None:
        super().__init__()
        self.most = shapes
        self.shapes: set[tuple[torch.Size, torch.Size]] = set()

    def __torch_function__(
        self, function: Callable, types: tuple, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.linear and not kwargs and _is_cast(args[0]):
            return _linear(*args)
        if function is torch.matmul and not kwargs and _is_cast(args[0]):
            return self._multiply(*args)
        return function(*args, **kwargs)

    def _multiply(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """left · right, in float32 where they are heads, small, and of one shape too many."""
        if left.dim() != 4 or right.dim() != 4:
            return torch.matmul(left, right)
        shapes = (left.shape, right.shape)
        if len(self.shapes) < self.most:
            self.shapes.add(shapes)
        if shapes in self.shapes or left.shape[-2] * left.shape[-1] * right.shape[-1] > SMALL_HEAD:
            return torch.matmul(left, right)
        with torch.autocast("cpu", enabled=False):
            return torch.matmul(left.float(), right.float())


@contextmanager
def cast_once(model: nn.Module) -> Iterator[None]:
    """Inside, a frozen model's linear layers have weights in bfloat16: the same products under autocast, which keeps
    what it cast of weights that learn, and casts those of others anew for every product.

    Tables to look up in stay as they are, also where an output layer has them.
    """
    modules = list(model.modules())
    tables = {id(module.weight) for module in modules if isinstance(module, nn.Embedding)}
    weights = {id(module.weight): module.weight for module in modules if isinstance(module, nn.Linear)}
    own = [(weight, weight.data) for key, weight in weights.items() if key not in tables and _is_plain(weight)]
    try:
        for weight, data in own:
            weight.data = data.bfloat16()
        yield
    finally:
        for weight, data in own:
            weight.data = data


@contextmanager
def without_plans() -> Iterator[None]:
    """Inside, fused attention on a GPU is PyTorch's own, not cuDNN's, which makes a plan for every shape of a batch.

    Batches of sentences have hundreds of shapes, a step of generation has one of its own: on an H100 training took
    four times as long until an epoch had shown them all (RESULTS.md, "On a GPU").
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def has_many_shapes(model: nn.Module) -> bool:
    """Whether a model's matrices differ so much that `EvenProducts` are faster."""
    return len({parameter.shape for parameter in model.parameters() if parameter.dim() == 2}) > MANY_SHAPES


def _is_cast(states: torch.Tensor) -> bool:
    """Whether autocast would multiply these in bfloat16 on a CPU."""
    return (
        states.device.type == "cpu"
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
    )


def _linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear`; a weight that is more than a matrix of numbers (quantized, sharded) multiplies in its own way."""
    if weight.dim() != 2 or not states.numel() or not _is_plain(weight):
        return F.linear(states, weight, bias)
    return _EvenLinear.apply(states, weight, bias)


def _is_plain(weight: torch.Tensor) -> bool:
    """Whether it is numbers and nothing more, such as quantized or sharded ones."""
    return type(weight) in (torch.Tensor, nn.Parameter)


class _EvenLinear(torch.autograd.Function):
    """x·Wᵀ + b in bfloat16, and its gradients, of matrices that are filled up with zeros."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        n, m = weight.shape
        flat = states.reshape(-1, m)
        x = _fill_up(flat, _next(len(flat), TOKENS), _next(m, FEATURES))
        w = _fill_up(weight, _next(n, FEATURES), x.shape[1])
        b = None if bias is None else F.pad(bias.to(torch.bfloat16), (0, len(w) - n))
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w)
        ctx.rows = len(x)
        ctx.states, ctx.weight, ctx.bias = (
            None if part is None else (part.shape, part.dtype) for part in (states, weight, bias)
        )
        return F.linear(x, w, b)[: len(flat), :n].reshape(*states.shape[:-1], n)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w = ctx.saved_tensors
        (shape, dtype), (n, m) = ctx.states, ctx.weight[0]
        upstream = upstream.reshape(-1, n)
        g = _fill_up(upstream, ctx.rows, len(w))
        states = weight = bias = None
        if ctx.needs_input_grad[0]:
            states = torch.mm(g, w)[: len(upstream), :m].to(dtype).reshape(shape)
        if ctx.needs_input_grad[1]:
            weight = torch.mm(g.t(), x)[:n, :m].to(ctx.weight[1])
        if ctx.needs_input_grad[2]:
            bias = upstream.sum(0, dtype=ctx.bias[1])
        return states, weight, bias


def _next(size: int, step: int) -> int:
    """The next multiple of `step`; below it, the next power of two: a few tokens need not be many."""
    return -(-size // step) * step if size > step else 1 << (size - 1).bit_length()


def _fill_up(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """In bfloat16, with zeros below and at the right."""
    height, width = matrix.shape
    if matrix.dtype == torch.bfloat16 and (height, width) == (rows, columns) and matrix.is_contiguous():
        return matrix
    filled = torch.empty(rows, columns, dtype=torch.bfloat16)
    filled[:height, :width] = matrix
    filled[height:].zero_()
    filled[:height, width:].zero_()
    return filled
