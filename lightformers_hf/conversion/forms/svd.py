"""Truncated factorization: W, m×n, used as y = x·W, becomes U_r (Σ_r V_rᵀ), m×r and r×n (LightFormer, Eq. 11).

On the smaller side, min(m, n), the eigenvectors of the Gram matrix are the singular vectors, at a fraction of the cost
of a full SVD. In float64, the error of squaring lies beneath the rounding of float32 factors. In a metric, ‖Lᵀ Δ R‖
instead of ‖Δ‖, it is the Gram matrix of A = Lᵀ W R (docs/explanation/weighting.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...loading import all_finite
from ..moments import Metric, add_gram

# Rows taken to float64 at once: no matrix is held twice, and a piece stays in the processor's cache.
CHUNK_ROWS = 512
# Below this, squares of float64 values are not exact; those of float32 values, even denormal ones, lie above it.
TINIEST_ENERGY = 1e-290

Split = Literal["sigma-right", "balanced"]


class Factors(NamedTuple):
    """A pair with left·right ≈ W: `left` is m×r, `right` r×n. float64 if the matrix was, else float32."""

    left: Tensor
    right: Tensor


def rescale_(factors: Factors, split: Split) -> Factors:
    """Give columns of the left and rows of the right factor, in place, the sizes that `split` asks for.

    `balanced`: of equal mean squares, because Adam takes steps of one size for all entries, and a few would replace
    the small entries of a long column of length 1. `sigma-right`: the left one of length 1. Beside a zero, what is no
    zero gets the length 1, because half precision has no 1e6.
    """
    left, right = _column_norms(factors.left), _column_norms(factors.right.T)
    scale = left.where(left > 0, 1 / right.where(right > 0, 1))
    if split == "balanced":
        root = (factors.right.shape[1] / len(factors.left)) ** 0.5  # √(n/m)
        scale = (root * left / right).sqrt().where((left > 0) & (right > 0), scale)
    scale = scale.to(factors.left.dtype)
    factors.left.div_(scale)
    factors.right.mul_(scale[:, None])
    return factors


def _column_norms(factor: Tensor) -> Tensor:
    """In float64, a few rows at a time: in float32 squares of small numbers would be nothing."""
    squares = factor.new_zeros(factor.shape[1], dtype=torch.float64)
    for rows in factor.split(CHUNK_ROWS):
        squares += rows.double().square().sum(0)
    return squares.sqrt()


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The decomposition of one matrix, ready to be truncated at any rank up to `max_rank`."""

    name: str  # name of the matrix, for messages
    singular_values: Tensor  # all min(m, n) of them, float64, descending
    max_rank: int
    weight: Tensor  # W, or Wᵀ where `transposed`: as many rows as columns, or more
    basis: Tensor  # R·V, n'×max_rank, float64; V is orthonormal, and R the identity without a metric
    inverse: Tensor  # VᵀR⁻¹, max_rank×n'
    transposed: bool

    def relative_error(self, rank: int) -> float:
        """Frobenius error of the best approximation of that rank, divided by the norm of W (0 for a zero matrix)."""
        squares = self.singular_values.square()
        total = squares.sum().item()
        return (squares[rank:].sum().item() / total) ** 0.5 if total else 0.0

    def truncate(self, rank: int, split: Split = "sigma-right") -> Factors:
        """The best factors of a rank.

        Args:
            rank: r, from 1 to `max_rank`.
            split: `sigma-right` gives U_r and Σ_r V_rᵀ (Eq. 11; the left columns are orthonormal), `balanced` gives
                c U_r √Σ_r and √Σ_r V_rᵀ / c, c = (m/n)^¼ (`rescale_`). In a metric, columns are not orthogonal.
        """
        if not 1 <= rank <= self.max_rank:
            raise ValueError(f"{self.name}: rank {rank} is not possible, expected 1 to {self.max_rank}")
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        left = torch.empty(len(self.weight), rank, dtype=dtype, device=self.weight.device)
        for rows, target in zip(self.weight.split(CHUNK_ROWS), left.split(CHUNK_ROWS), strict=True):
            target.copy_(rows.double() @ self.basis[:, :rank])
        right = self.inverse[:rank].to(dtype, copy=True)
        return rescale_(Factors(right.T, left.T) if self.transposed else Factors(left, right), split)


@torch.no_grad()
def decompose(weight: Tensor, *, name: str, rank: int | None = None, metric: Metric | None = None) -> Spectrum:
    """Singular values and what is needed to truncate.

    Args:
        weight: W, m×n, any float type, on any device with float64. A torch `Linear.weight` is Wᵀ.
        name: the tensor's name, for messages.
        rank: the largest rank that will be required, if it is known.
        metric: in which factors are to be near to W. The singular values are then those of A = Lᵀ W R.

    Raises:
        ValueError: not a matrix, NaN or Inf in it, rank outside 1…min(m, n), eigenproblem without convergence, or
            float64 values whose squares are not in its range.
    """
    tall, energies, vectors = _solve(torch.linalg.eigh, weight, name, metric)
    transposed = weight.shape[0] <= weight.shape[1]
    if rank is not None and not 1 <= rank <= len(energies):
        raise ValueError(f"{name}: rank {rank} is not possible, expected 1 to {len(energies)}")
    basis = vectors.flip(1)[:, :rank]
    basis, inverse = (basis, basis.T) if metric is None else metric.bases(basis, rows=transposed)
    return Spectrum(name, energies.flip(0).clamp(min=0).sqrt(), basis.shape[1], tall, basis, inverse, transposed)


@torch.no_grad()
def singular_values(weight: Tensor, *, name: str, metric: Metric | None = None) -> Tensor:
    """Return all singular values, as `decompose` gives them: in half of the time."""
    return _solve(lambda gram: [torch.linalg.eigvalsh(gram)], weight, name, metric)[1].flip(0).clamp(min=0).sqrt()


def _solve(solver: Callable[[Tensor], Any], weight: Tensor, name: str, metric: Metric | None) -> tuple[Tensor, ...]:
    """W, or Wᵀ where it is wider than tall, and the result of a torch eigensolver for its Gram matrix."""
    if weight.ndim != 2 or not weight.is_floating_point() or weight.numel() == 0:
        raise ValueError(f"{name}: expected a matrix of floats, found {weight.dtype} of shape {tuple(weight.shape)}")
    if not all_finite(weight):
        raise ValueError(f"{name}: holds NaN or Inf; the checkpoint is damaged or its training diverged")
    tall = (weight.T if weight.shape[0] <= weight.shape[1] else weight).detach()
    if metric is None:
        gram = torch.zeros(tall.shape[1], tall.shape[1], dtype=torch.float64, device=tall.device)
        for rows in tall.split(8 * CHUNK_ROWS):
            add_gram(gram, rows.double())
    else:
        gram = metric.gram(weight)
    largest = gram.diagonal().max().item()
    if not TINIEST_ENERGY <= largest < float("inf") and (weight != 0).any():
        size = "small" if largest < 1 else "large"
        raise ValueError(f"{name}: its values are too {size}, their squares are out of the range of float64")
    try:
        return tall, *solver(gram)
    except torch.linalg.LinAlgError as error:
        raise ValueError(f"{name}: the singular value decomposition did not converge ({error})") from error


def tail_energies(values: Tensor) -> Tensor:
    """Σ_{i>r} s_i² for r = 0 … K: the error of truncation at r."""
    squares = values.double().square()
    return torch.cat([squares.flip(0).cumsum(0).flip(0), squares.new_zeros(1)])
