"""Products of many shapes, for each of which a library would write a program, in more time than it takes to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .processors import ROWS

# A product's sizes are made multiples of these: tokens, and both sides of a weight.
TOKENS, FEATURES = ROWS, 32
# Attention whose layers are alike: its two products in an encoder's layers, and four in a decoder's.
FIRST_SHAPES = 6
# Of a model's matrices; fewer, as where layers are alike, recur within a batch, and are not worth filling up.
MANY_SHAPES = 16
# Multiplications of a head above which bfloat16 is worth a program of its own.
SMALL_HEAD = 64**3


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
