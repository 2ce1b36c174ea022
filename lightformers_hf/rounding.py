"""Rounding of matrices to 8 bits in rows, and to 4 bits in blocks: in exported files, and while a model is trained.

In int8 a row has one scale. In int4 a row is cut into blocks of `BLOCK` values. Each block has a scale in 16 bits, and
values of −8 to 7 times this scale. With moments of the inputs, outputs change least: rotation of low-rank factors,
then GPTQ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .matrices import STACKS

LARGEST = 127  # value in int8, and sum of two neighbours in a row before rounding, which adds one at most
BLOCK = 32  # values with one scale
LEAST, LEVELS = -8, 16
SCALES = np.linspace(1.0, 0.7, 13)  # tried shares of the scale that holds the largest value of a block
STORED = 0.01  # largest relative error by storing in 16 bits
DAMPING = 0.01  # added to the diagonal of moments, relative to its mean
LOOKUPS = 1.0  # the same for an embedding matrix that is also the output layer: the weight of its lookups
MEMORY = re.compile(r"encoder_attn\.[kv]_proj$")  # matrices of a decoder that get the encoder's states


def bits_of(quantization: str, width: int) -> int:
    """Bits of a matrix whose rows have so many values: in int4, rows of half a block or less have 8."""
    if quantization == "int4" and width > BLOCK // 2:
        return 4
    return 8 if quantization in ("int4", "int8") else 32


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in int8 with a scale for each row, fp32: values (n×m) and scales (n), so that values·scale ≈ rows.

    Without VNNI (Intel before Ice Lake and Alder Lake, AMD before Zen 4), x86 multiplies inputs of 0 to 255 by weights
    of −127 to 127 and adds the products of neighbours in 16 bits (`vpmaddubsw`). Larger values are cut off, without
    a word. 255·128 does not, so no pair 2j, 2j + 1 of a row adds up to more than 128. That costs a quarter of a scale
    or so, as two neighbours are hardly ever both the largest; halving it instead, as is usual, costs more.
    """
    rows = rows.detach().float()
    even = rows.shape[1] // 2 * 2
    largest, pairs = (
        numbers.abs().amax(1) if numbers.shape[1] else rows.new_zeros(len(rows))
        for numbers in (rows, rows[:, 0:even:2] + rows[:, 1:even:2])
    )
    scales = torch.maximum(largest, pairs) / LARGEST
    scales = torch.where(scales >= torch.finfo(torch.float32).tiny, scales, 1.0)
    return (rows / scales[:, None]).round().to(torch.int8), scales


@dataclass(frozen=True, eq=False)
class RoundedRows:
    """A matrix of n rows in 4 bits."""

    packed: np.ndarray  # n×(blocks·BLOCK/2), uint8: two values a byte, the first one in the lower half, each plus 8
    scales: np.ndarray  # n×blocks, float16
    width: int  # values of a row; the last block is filled with zeros


def round_rows(rows: Tensor, moments: Tensor | None = None, damping: float = DAMPING) -> RoundedRows:
    """Round a matrix (n×k) whose rows are multiplied with states x (k), to 4 bits.

    Args:
        rows: n×k.
        moments: E[x·xᵀ] (k×k). The rounding then minimizes the error of the products: an error in one column is
            compensated in the columns behind it (GPTQ, Frantar et al. 2023, Algorithm 1). `None`: round to nearest.
        damping: added to the diagonal of the moments, relative to its mean.
    """
    count, width = rows.shape
    if moments is None:
        values, scales = nearest_blocks(rows)
        return pack(values, scales, width)
    blocks = -(-width // BLOCK)
    left = torch.zeros(count, blocks * BLOCK, dtype=torch.float64)
    left[:, :width] = rows.double()
    factor = inverse_factor(moments, damping)
    values, scales = torch.zeros_like(left), torch.zeros(count, blocks, dtype=torch.float64)
    for index in range(blocks):
        first, last = index * BLOCK, min((index + 1) * BLOCK, width)
        block = left[:, first:last].clone()
        scale = scales[:, index] = choose_scales(block)
        errors = torch.zeros_like(block)
        for column in range(last - first):
            rounded = values[:, first + column] = round_to(scale, block[:, column])
            row = factor[first + column, first:last]
            error = errors[:, column] = (block[:, column] - rounded * scale) / row[column]
            block[:, column:] -= error[:, None] * row[column:]
        left[:, last:width] -= errors @ factor[first:last, last:]
    return pack(values, scales, width)


def nearest_blocks(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest values (n×(blocks·BLOCK), −8 to 7) of a matrix (n×k) and their scales (n×blocks), fp32."""
    padded = nn.functional.pad(rows.detach().float(), (0, -rows.shape[1] % BLOCK))
    blocks = padded.reshape(-1, BLOCK)
    scales = choose_scales(blocks)
    return round_to(scales[:, None], blocks).reshape(padded.shape), scales.reshape(len(rows), -1)


def round_to(scale: Tensor, values: Tensor) -> Tensor:
    """Return the nearest multiples of a scale, −8 to 7."""
    return (values / scale).round_().clamp_(LEAST, LEAST + LEVELS - 1)


def pack(values: Tensor, scales: Tensor, width: int) -> RoundedRows:
    """Return values of −8 to 7 (n×(blocks·BLOCK)) as they are stored."""
    codes = (values - LEAST).to(torch.uint8).numpy()
    return RoundedRows(codes[:, ::2] | codes[:, 1::2] << 4, scales.numpy().astype(np.float16), width)


def round_matrix(rows: Tensor, quantization: str) -> Tensor:
    """Return a matrix (n×k) with the values that an export to the nearest numbers gives its rows."""
    if bits_of(quantization, rows.shape[1]) == 8:
        values, scales = quantize_rows(rows)
        return values * scales[:, None]
    values, scales = nearest_blocks(rows)
    return (values * scales.repeat_interleave(BLOCK, 1))[:, : rows.shape[1]]


class _StraightThrough(torch.autograd.Function):
    """A rounded matrix, whose gradient is that of the matrix (Bengio et al. 2013, arXiv 1308.3432, section 4)."""

    @staticmethod
    def forward(context: Any, matrix: Tensor, quantization: str, by_columns: bool) -> Tensor:
        return round_matrix(matrix.T, quantization).T if by_columns else round_matrix(matrix, quantization)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


def list_matrices(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter, bool]]:
    """Yield every matrix of a LightFormer that its exports round: module, name, matrix, whether by its columns.

    These are matrices of linear layers, embeddings and output layers; positions and norms stay as they are. The second
    factor of an embedding is multiplied by its columns, that of its output layer, which may be the same, by its rows.
    """
    for site in [module for module in model.modules() if hasattr(module, "kind")]:
        for module in site.modules():
            for name, matrix in [*module.named_parameters(recurse=False)]:
                if matrix.dim() == 2:
                    yield module, name, matrix, name == "basis" and isinstance(module, nn.Embedding)


@contextmanager
def rounded_matrices(model: nn.Module, quantization: str) -> Iterator[None]:
    """Inside, the matrices of a LightFormer have the values of its export to ONNX, to the nearest numbers.

    Gradients reach the stored matrices as if nothing was rounded. A shared matrix is rounded once for each direction.
    """
    stored: dict[nn.Module, dict[str, nn.Parameter]] = {}
    made: dict[tuple[int, bool], Tensor] = {}
    try:
        for module, name, matrix, by_columns in [*list_matrices(model)]:
            stored.setdefault(module, dict(module.named_parameters(recurse=False)))
            key = id(matrix), by_columns
            if key not in made:
                made[key] = _StraightThrough.apply(matrix, quantization, by_columns)
            delattr(module, name)
            setattr(module, name, made[key])
        yield
    finally:
        for module, parameters in stored.items():  # all of a module, which keeps their order
            for name in parameters:
                delattr(module, name)
            for name, parameter in parameters.items():
                module.register_parameter(name, parameter)


@torch.no_grad()
def round_model(model: nn.Module, quantization: str) -> None:
    """Round the matrices of a LightFormer, in place, but for second factors, whose two directions differ."""
    for _, name, matrix, _ in list_matrices(model):
        if name != "basis":
            matrix.copy_(round_matrix(matrix, quantization))


@torch.no_grad()
def is_rounded(model: nn.Module) -> bool:
    """Whether the matrices of a LightFormer are those of `round_model` to int4, stored in any type of numbers."""
    return all(
        bool(((round_matrix(matrix, "int4") - matrix).abs() <= STORED * matrix.abs()).all())
        for _, name, matrix, _ in list_matrices(model)
        if name != "basis" and bits_of("int4", matrix.shape[1]) == 4
    )


def inverse_factor(moments: Tensor, damping: float) -> Tensor:
    """Return the upper triangular R with RᵀR = H⁻¹, for moments H with a damped diagonal; k×k, fp64."""
    damped = moments.double()
    mean = damped.diagonal().mean()
    damped = damped + torch.eye(len(damped), dtype=torch.float64) * (damping * mean if mean > 0 else 1)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True)


def choose_scales(block: Tensor) -> Tensor:
    """Return the scale (n) of each row of a block, of those tried the one with the smallest squared error."""
    largest = block.gather(1, block.abs().argmax(1, keepdim=True))[:, 0] / LEAST
    tiny = float(np.finfo(np.float16).smallest_subnormal)
    best, chosen = torch.full_like(largest, torch.inf), largest
    for share in SCALES:
        scale = (largest * share).half().to(block.dtype)
        scale = torch.where(scale == 0, tiny, scale)
        error = torch.linalg.vector_norm(round_to(scale[:, None], block).mul_(scale[:, None]).sub_(block), dim=1)
        chosen, best = torch.where(error < best, scale, chosen), torch.minimum(error, best)
    return chosen


@torch.no_grad()
def rotate_factors(model: nn.Module) -> None:
    """Rotate low-rank factors, in place: W₁·W₂ = (W₁·R)·(R⁻¹·W₂), where the rows of R⁻¹·W₂ are orthonormal.

    R ends in a random rotation, the same at every call. It spreads large values over all columns, so that no
    direction of the r dimensions between the factors is rounded worse than another.
    """
    seen: set[int] = set()
    for module in model.modules():
        if not hasattr(module, "factors") or len(factors := module.factors()) != 2:
            continue
        first, second = factors
        if first.data_ptr() in seen:
            continue
        seen.add(first.data_ptr())
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(first.shape[1], first.shape[1], generator=generator, dtype=torch.float64)
        rotation = torch.linalg.qr(noise)[0]
        basis, triangle = torch.linalg.qr(second.double().T)  # second = triangleᵀ·basisᵀ
        first.copy_(first.double() @ triangle.T @ rotation)
        second.copy_(rotation.T @ basis.T)


class Moments:
    """Second moments of the inputs of all matrices at tokens, in the order in which states meet a matrix's factors.

    Args:
        model: in evaluation mode.
        batches: source and target tokens of sentences, see `collate`.
    """

    def __init__(self, model: PreTrainedModel, batches: Iterable[dict[str, Tensor]]):
        self._sums: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        factorized = [module for module in model.modules() if hasattr(module, "factors")]
        inside = {id(part) for module in factorized for part in module.modules() if part is not module}
        plain = [module for module in model.modules() if isinstance(module, nn.Linear)]
        chosen = {id(module): module for module in (*factorized, *plain) if id(module) not in inside}
        memory = {id(module) for name, module in model.named_modules() if MEMORY.search(name)}
        masks: dict[str, Tensor] = {}  # where tokens are, not padding; `own`: of the stack that states pass through

        def enter(stack: str, *_: Any) -> None:
            masks["own"] = masks[stack]

        def add(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self._add(module, inputs[0][masks["encoder" if id(module) in memory else "own"]])

        hooks = [module.register_forward_pre_hook(add) for module in chosen.values()]
        for stack in STACKS:
            hooks.append(getattr(model.model, stack).register_forward_pre_hook(partial(enter, stack)))
        try:
            with torch.no_grad():
                for batch in batches:
                    masks |= {"encoder": batch["attention_mask"] > 0, "decoder": batch["labels"] >= 0}
                    model(**batch)
        finally:
            for hook in hooks:
                hook.remove()

    def of(self, matrix: Tensor) -> Tensor | None:
        """Return Σ x·xᵀ (m×m) of the states that are multiplied with a matrix (m×n), `None` where none was."""
        return self._sums.get(_key(matrix))

    def _add(self, module: nn.Module, states: Tensor) -> None:
        """Add states (tokens×m), of an embedding ids."""
        factors = applied_factors(module)
        if isinstance(module, nn.Embedding):
            table, *factors = factors
            counts = torch.bincount(states, minlength=len(table)).double()
            sums = table.double().T @ (counts[:, None] * table.double())
        else:
            sums = states.double().T @ states.double()
        for factor in factors:
            known = self._sums.get(_key(factor))
            self._sums[_key(factor)] = sums if known is None else known + sums
            sums = factor.double().T @ sums @ factor.double()


def _key(matrix: Tensor) -> tuple[int, tuple[int, ...]]:
    """Identify a stored matrix and its direction."""
    return matrix.data_ptr(), matrix.stride()


def applied_factors(module: nn.Module) -> list[Tensor]:
    """Return the matrices that a module multiplies states with, in their order; of an embedding its table first."""
    factors = list(module.factors()) if hasattr(module, "factors") else [module.weight]
    if isinstance(module, nn.Embedding):
        return factors
    if getattr(module, "kind", None) == "embedding":  # an output layer stores V×d
        return [factor.T for factor in reversed(factors)]
    return factors if hasattr(module, "factors") else [module.weight.T]


def collate(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], pad: int) -> dict[str, Tensor]:
    """Return a batch of sentences for `forward`, padded on the right."""
    ids, labels = (
        nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=-100)
        for rows in (sources, targets)
    )
    return {"input_ids": ids.masked_fill(ids < 0, pad), "attention_mask": (ids >= 0).long(), "labels": labels}
