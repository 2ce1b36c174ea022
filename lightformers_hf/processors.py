"""Properties of this machine: its device, memory, and the fastest matrix multiplications."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .options import OptionError

# Instructions that multiply bfloat16, fastest first (x86: AMX, AVX-512; ARM: bf16), and the values of
# ONEDNN_MAX_CPU_ISA that keep oneDNN from using each.
_OLDER = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
BF16_INSTRUCTIONS: dict[str, set[str]] = {
    "amx_bf16": _OLDER | {"AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512"},
    "avx512_bf16": _OLDER,
    "bf16": set(),
}
# A product's sizes are made multiples of these: tokens, and both sides of a weight.
TOKENS, FEATURES = 128, 32
# Attention whose layers are alike: its two products in an encoder's layers, and four in a decoder's.
FIRST_SHAPES = 6
# Number of different matrices of a model; fewer recur within a batch, so that padding has no advantage.
MANY_SHAPES = 16
# Multiplications of a head above which a separate bfloat16 kernel is faster.
SMALL_HEAD = 64**3


def check_device(name: str | torch.device) -> torch.device:
    """The device of that name. Raises `ValueError`: there is none here, or it computes nothing (`meta`)."""
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it holds no values")
        torch.ones(1, device=device).sum().item()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise OptionError(
            "device", f" is {str(name)!r}, which can't be used here ({reason}): give cpu, or one there is"
        ) from None
    return device


@contextmanager
def usual_settings() -> Iterator[None]:
    """Record gradients and make tensors in float32 on the CPU within a block, whatever settings the caller has."""
    dtype, is_cpu = torch.get_default_dtype(), torch.get_default_device().type == "cpu"
    torch.set_default_dtype(torch.float32)
    try:  # a context of the CPU makes PyTorch slower; unlike set_default_device, it ends also a `with torch.device`
        with nullcontext() if is_cpu else torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)


_THREADS = threading.Lock()
_numbers: dict[object, int] = {}  # of each block of `use_threads` in all threads, after that before the first


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Set the number of PyTorch's threads for a block, and restore it afterwards.

    The number is that of the process. Blocks of several threads may overlap: the last one to end restores it.
    """
    block = object()
    with _THREADS:
        _numbers.setdefault(None, torch.get_num_threads())
        _numbers[block] = count
        torch.set_num_threads(count)
    try:
        yield
    finally:
        with _THREADS:
            del _numbers[block]
            torch.set_num_threads([*_numbers.values()][-1])
            if len(_numbers) == 1:
                _numbers.clear()


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
    """Return whether products in bfloat16 are fast here, and the reason: the instructions decide, never a stopwatch.

    `ATEN_CPU_CAPABILITY` has no influence, because it limits PyTorch's own kernels, not those of oneDNN.
    """
    if not torch.backends.mkldnn.is_available():
        return False, "this PyTorch is built without oneDNN"
    found = [name for name in BF16_INSTRUCTIONS if _instructions().get(name)]
    if not found:
        return False, f"the processor has none of {', '.join(BF16_INSTRUCTIONS)}"
    # The newest instruction set that the user lets oneDNN use.
    limits = (os.environ.get(name) for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"))
    limit = next((limit.upper() for limit in limits if limit), "")
    usable = [name for name in found if limit not in BF16_INSTRUCTIONS[name]]
    return bool(usable), f"the processor has {usable[0]}" if usable else f"ONEDNN_MAX_CPU_ISA is {limit}"


@cache
def _instructions() -> Mapping[str, Any]:
    """Return the names of the processor's instruction sets; older versions of PyTorch have no function for it."""
    return getattr(torch.cpu, "get_capabilities", dict)()


class EvenProducts(TorchFunctionMode):
    """A context, in which PyTorch's layers multiply matrices of few different shapes under bfloat16 autocast.

    A CPU compiles a kernel for each shape of a product in bfloat16 (oneDNN), which took half of a training step of
    low-rank models. Here linear layers get rows and columns of zeros that make
    their sizes multiples of `TOKENS` and `FEATURES`. Of attention's products, those of the first `shapes` are made as
    they are; small ones of other shapes (`SMALL_HEAD`) are made in float32. PyTorch leaves the context for a backward
    pass, so layers that are computed again for their gradients would be computed otherwise.
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


class PackedAttention(TorchFunctionMode):
    """A context in which fused attention of a CPU computes no scores between texts that are packed in one row."""

    def __torch_function__(
        self, function: Callable, types: tuple, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        mask = kwargs.get("attn_mask") if function is F.scaled_dot_product_attention else None
        if len(lengths := packed_lengths(mask)) < 2:
            return function(*args, **kwargs)
        kwargs = {**kwargs, "attn_mask": None, "is_causal": True}
        texts = zip(*(part.split(lengths, dim=-2) for part in args), strict=True)
        return torch.cat([function(*text, **kwargs) for text in texts], dim=-2)


def packed_lengths(mask: torch.Tensor | None) -> list[int]:
    """Lengths of the texts in a row, between which a causal mask (1, 1, T, T) hides all; empty for any other mask."""
    if mask is None or mask.dtype != torch.bool or mask.device.type != "cpu":
        return []
    if mask.shape[:2] != (1, 1) or mask.shape[-1] != mask.shape[-2]:
        return []
    positions = torch.arange(mask.shape[-1])
    first = mask[0, 0].byte().argmax(-1)  # that each position sees
    starts, lengths = first.unique_consecutive(return_counts=True)
    seen = (positions >= first[:, None]) & (positions <= positions[:, None])
    is_packed = torch.equal(starts, lengths.cumsum(0) - lengths) and torch.equal(mask[0, 0], seen)
    return lengths.tolist() if is_packed else []


@contextmanager
def cast_once(module: nn.Module) -> Iterator[None]:
    """Inside, the matrices of a frozen module are in bfloat16, except embedding matrices, also tied ones."""
    owners = [owner for owner in module.modules() if not isinstance(owner, nn.Embedding)]
    own = [(owner, name, weight) for owner in owners for name, weight in owner.named_parameters(recurse=False)]
    own = [(owner, name, weight) for owner, name, weight in own if weight.ndim == 2 and _is_plain(weight)]
    cast = {id(weight): weight for *_, weight in own}
    try:
        for key, weight in cast.items():
            cast[key] = nn.Parameter(weight.detach().bfloat16(), requires_grad=weight.requires_grad)
        for owner, name, weight in own:
            setattr(owner, name, cast[id(weight)])
        yield
    finally:
        for owner, name, weight in own:
            setattr(owner, name, weight)


@contextmanager
def without_plans() -> Iterator[None]:
    """Inside, fused attention on a GPU is PyTorch's own, not cuDNN's, which makes a plan for every shape of a batch.

    On an H100 training took four times as long until an epoch had shown all shapes.
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
