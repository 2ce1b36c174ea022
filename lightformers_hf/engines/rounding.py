"""Rounding of matrices to 4 bits in blocks, so that outputs change least: rotation of low-rank factors, then GPTQ.

A row is cut into blocks of `BLOCK` values. Each block has a scale in 16 bits, and values of −8 to 7 times this scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

BLOCK = 32  # values with one scale
LEAST, LEVELS = -8, 16
SCALES = np.linspace(1.0, 0.7, 13)  # tried shares of the scale that holds the largest value of a block
DAMPING = 0.01  # added to the diagonal of moments, relative to its mean
LOOKUPS = 1.0  # the same for an embedding matrix that is also the output layer: the weight of its lookups


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
    blocks = -(-width // BLOCK)
    left = torch.zeros(count, blocks * BLOCK, dtype=torch.float64)
    left[:, :width] = rows.double()
    factor = None if moments is None else inverse_factor(moments, damping)
    values, scales = torch.zeros_like(left), torch.zeros(count, blocks, dtype=torch.float64)
    for index in range(blocks):
        first, last = index * BLOCK, min((index + 1) * BLOCK, width)
        block = left[:, first:last].clone()
        scale = scales[:, index] = choose_scales(block)
        errors = torch.zeros_like(block)
        for column in range(last - first):
            rounded = (block[:, column] / scale).round().clamp(LEAST, LEAST + LEVELS - 1)
            values[:, first + column] = rounded
            if factor is not None:
                row = factor[first + column, first:last]
                error = errors[:, column] = (block[:, column] - rounded * scale) / row[column]
                block[:, column:] -= error[:, None] * row[column:]
        if factor is not None:
            left[:, last:width] -= errors @ factor[first:last, last:]
    codes = (values - LEAST).to(torch.uint8).numpy()
    return RoundedRows(codes[:, ::2] | codes[:, 1::2] << 4, scales.numpy().astype(np.float16), width)


def restore_rows(rounded: RoundedRows) -> Tensor:
    """Return the rounded values (n×k), fp32."""
    codes = np.stack([rounded.packed & LEVELS - 1, rounded.packed >> 4], axis=-1).reshape(len(rounded.packed), -1)
    values = (codes.astype(np.float32) + LEAST) * rounded.scales.astype(np.float32).repeat(BLOCK, axis=1)
    return torch.from_numpy(values[:, : rounded.width])


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
        scale = (largest * share).half().double()
        scale = torch.where(scale == 0, tiny, scale)
        rounded = (block / scale[:, None]).round().clamp(LEAST, LEAST + LEVELS - 1) * scale[:, None]
        error = (rounded - block).square().sum(1)
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
    """Second moments of the inputs of all matrices of a model, in the order in which states meet its factors.

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
        hooks = [module.register_forward_pre_hook(self._add) for module in chosen.values()]
        try:
            with torch.no_grad():
                for batch in batches:
                    model(**batch)
        finally:
            for hook in hooks:
                hook.remove()

    def of(self, matrix: Tensor) -> Tensor | None:
        """Return Σ x·xᵀ (m×m) of the states that are multiplied with a matrix (m×n), `None` where none was."""
        return self._sums.get(_key(matrix))

    def _add(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        (states, *_), factors = inputs, applied_factors(module)
        if isinstance(module, nn.Embedding):
            table, *factors = factors
            counts = torch.bincount(states.flatten(), minlength=len(table)).double()
            sums = table.double().T @ (counts[:, None] * table.double())
        else:
            states = states.reshape(-1, states.shape[-1]).double()
            sums = states.T @ states
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
