"""Truncated factorization: the only linear algebra in the package.

LightFormer (Eq. 11) replaces a matrix W, m×n, used as y = x·W, by U_r (Σ_r V_rᵀ): a left factor m×r and a right factor
r×n. By Eckart and Young no pair of rank r is closer to W than the truncated singular value decomposition, and here no
pair is accepted whose Frobenius error is more than 1e-5 (relative) above that optimum.

A full SVD computes much that is thrown away. On the smaller side, n' = min(m, n), the eigenvectors of the Gram matrix
are the singular vectors, at a fraction of the cost, but squaring loses what lies far below the largest singular value.
So there are two routes:

- *fast*, where the rank is known and small: Gram matrix and eigenvectors in float32 give a space a little larger than
  needed, a Rayleigh-Ritz step in float64 picks the best r directions within it, and a certificate bounds what the
  float32 errors can have cost. Without certificate the result is thrown away.
- *exact*, for everything else: both in float64. The lost part lies 1e-8 below the largest singular value, beneath the
  rounding of float32 factors; at full rank W·V·Vᵀ = W holds whatever the spectrum.

In a metric, ‖Lᵀ Δ R‖ instead of ‖Δ‖, the exact route is taken with the Gram matrix of A = Lᵀ W R: with V its r leading
eigenvectors, A·V·Vᵀ is nearest to A, so that W·(R V)·(Vᵀ R⁻¹) is nearest to W, and neither A nor the larger of the two
roots is ever made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...loading import all_finite
from ..moments import Metric

# Share of the discarded energy that the fast route may lose: half of it is the relative excess of the error.
TOLERATED_LOSS = 2e-6
# Columns of random probes that measure the float32 error, and directions kept beyond the rank.
PROBES = 16
OVERSAMPLING = 32
# Rows taken to float64 at once: no matrix is held twice, and a piece stays in the processor's cache.
CHUNK_ROWS = 512
# Below this σ_r/σ_1, dividing by the singular values does not make columns orthonormal: the error grows as
# 1e-16·(σ_1/σ_r)².
ILL_CONDITIONED = 1e-4
# Below this, squares of float64 values are not exact; those of float32 values, even denormal ones, lie above it.
TINIEST_ENERGY = 1e-290


Split = Literal["sigma-right", "balanced"]


class Factors(NamedTuple):
    """A pair with left·right ≈ W: `left` is m×r, `right` r×n. float64 if the matrix was, else float32."""

    left: Tensor
    right: Tensor


def rescale_(factors: Factors, split: Split) -> Factors:
    """Return the factors with the lengths of columns of the left and rows of the right one that `split` asks for.

    `balanced`: equally long. `sigma-right`: the left one of length 1. Training takes steps of one size everywhere, and
    a factor a thousand times smaller than its partner would not survive the first. Beside a zero, what is no zero gets
    the length 1: the product is zero however long it is, but half precision has no 1e6.

    The factors themselves change: one of 256,206×999 is a gigabyte.
    """
    left, right = _column_norms(factors.left), _column_norms(factors.right.T)
    scale = left.where(left > 0, 1 / right.where(right > 0, 1))
    if split == "balanced":
        scale = (left / right).sqrt().where((left > 0) & (right > 0), scale)
    scale = scale.to(factors.left.dtype)
    factors.left.div_(scale)
    factors.right.mul_(scale[:, None])
    return factors


def _column_norms(factor: Tensor) -> Tensor:
    """In float64, a few rows at a time: in float32 squares of small numbers would be nothing.

    Norms of all parts are one tensor: each would lie where the part before it in float64 was, the next part would go
    behind it, and the C library's heap would hold all of a table in float64.
    """
    rows = factor.split(CHUNK_ROWS)
    norms = factor.new_empty(len(rows), factor.shape[1], dtype=torch.float64)
    for part, norm in zip(rows, norms, strict=True):
        torch.linalg.vector_norm(part, dim=0, dtype=torch.float64, out=norm)
    return torch.linalg.vector_norm(norms, dim=0)


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The decomposition of one matrix, ready to be truncated at any rank up to `max_rank`.

    Attributes:
        name: the matrix's name, for messages.
        singular_values: all min(m, n) of them, float64, descending. After the fast route those beyond `max_rank` are
            float32 estimates, scaled so that the sum of squares is exact.
        max_rank: the largest rank this decomposition can give.
    """

    name: str
    singular_values: Tensor
    max_rank: int
    weight: Tensor  # W, or Wᵀ where `transposed`: as many rows as columns, or more
    basis: Tensor  # V, n'×max_rank, orthonormal, float64; in a metric R·V
    projected: Tensor | None  # weight·basis where it is known already
    transposed: bool
    inverse: Tensor | None = None  # in a metric, VᵀR⁻¹, max_rank×n'

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
                U_r √Σ_r and √Σ_r V_rᵀ. In a metric, columns have these lengths (`rescale_`) but are not orthogonal.

        Raises:
            ValueError: the rank is out of range.
        """
        check_rank(self.name, rank, self.max_rank)
        basis, dtype = self.basis[:, :rank], torch.promote_types(self.weight.dtype, torch.float32)
        if self.inverse is not None:
            thin = _project(self.weight, basis, dtype), self.inverse[:rank].to(dtype, copy=True)
            return rescale_(Factors(*(factor.T for factor in thin[::-1]) if self.transposed else thin), split)
        known = self.projected is not None
        projected = self.projected[:, :rank] if known else _project(self.weight, basis, torch.float64)  # = U Σ
        sigma = torch.linalg.vector_norm(projected, dim=0)
        if split == "balanced":
            root = sigma.sqrt()
            # A direction W does not have gives 0·0: its column of `projected` is zero, and so is `root`.
            left, right = projected / root.where(root > 0, 1), basis * root
        elif self.transposed:
            left, right = projected, basis
        elif sigma.min() > ILL_CONDITIONED * sigma.max():
            left, right = projected / sigma, basis * sigma
        else:
            left, upper = torch.linalg.qr(projected)
            right = basis @ upper.T
        if self.transposed:
            left, right = right, left
        return Factors(left.to(dtype).contiguous(), right.T.to(dtype).contiguous())


def check_rank(name: str, rank: int, limit: int) -> None:
    """Raise a ValueError that names the matrix unless 1 <= rank <= limit."""
    if not 1 <= rank <= limit:
        raise ValueError(f"{name}: rank {rank} is not possible, expected 1 to {limit}")


@torch.no_grad()
def decompose(weight: Tensor, *, name: str, rank: int | None = None, metric: Metric | None = None) -> Spectrum:
    """Singular values and what is needed to truncate.

    Args:
        weight: W, m×n, any float type, on any device that knows float64. A torch `Linear.weight` is Wᵀ: the caller
            transposes.
        name: the tensor's name, for messages.
        rank: the largest rank that will be asked for, where it is known: allows the fast route.
        metric: in which factors are to be near to W. The singular values are then those of A = Lᵀ W R.

    Raises:
        ValueError: not a matrix, NaN or Inf in it, rank outside 1…min(m, n), eigenproblem without convergence, or
            float64 values whose squares are not in its range.
    """
    tall, limit = _stand_up(weight, name), min(weight.shape)
    if rank is not None:
        check_rank(name, rank, limit)
    # Above half of the size the fast route's float64 part costs as much as the exact route.
    may_be_fast = metric is None and rank is not None and rank + OVERSAMPLING <= limit // 2
    found = _certified(tall, rank) if may_be_fast else None
    if found is None:
        eigenvalues, vectors = _solve(torch.linalg.eigh, _square(weight, tall, metric), tall, name)
        found = eigenvalues.flip(0).clamp(min=0), vectors.flip(1), None
    energies, basis, projected = found
    transposed = weight.shape[0] <= weight.shape[1]
    values, most, inverse = _roots(energies, weight, name), basis.shape[1], None
    if metric is not None:
        most = rank or limit
        basis, inverse = metric.bases(basis[:, :most], rows=transposed)
    return Spectrum(name, values, most, tall, basis, projected, transposed, inverse)


@torch.no_grad()
def singular_values(weight: Tensor, *, name: str, metric: Metric | None = None) -> Tensor:
    """Return all singular values, exact, as `decompose` without a rank gives them: in half of the time.

    Raises:
        ValueError: as `decompose`.
    """
    tall = _stand_up(weight, name)
    energies = _solve(torch.linalg.eigvalsh, _square(weight, tall, metric), tall, name)
    return _roots(energies.flip(0).clamp(min=0), weight, name)


def _stand_up(weight: Tensor, name: str) -> Tensor:
    """W, or Wᵀ where it is wider than tall. Raises `ValueError` unless it is a matrix of finite floats."""
    if weight.ndim != 2 or not weight.is_floating_point() or weight.numel() == 0:
        raise ValueError(f"{name}: expected a matrix of floats, found {weight.dtype} of shape {tuple(weight.shape)}")
    if not all_finite(weight):
        raise ValueError(f"{name}: holds NaN or Inf; the checkpoint is damaged or its training diverged")
    return (weight.T if weight.shape[0] <= weight.shape[1] else weight).detach()


def _solve(solver: Callable[[Tensor], Any], gram: Tensor, tall: Tensor, name: str) -> Any:
    """Call one of torch's eigensolvers on W's Gram matrix. Raises `ValueError` where it does not converge."""
    _check_energy(gram.diagonal().max().item(), tall, name)
    try:
        return solver(gram)
    except torch.linalg.LinAlgError as error:
        raise ValueError(f"{name}: the singular value decomposition did not converge ({error})") from error


def _roots(energies: Tensor, weight: Tensor, name: str) -> Tensor:
    """Singular values of W from their squares. Raises `ValueError` where these are out of range."""
    _check_energy(energies[0].item(), weight, name)
    return energies.sqrt()


def _check_energy(largest: float, weight: Tensor, name: str) -> None:
    """Raise `ValueError` where the squares of W's values are out of range."""
    if not TINIEST_ENERGY <= largest < float("inf") and (weight != 0).any():
        size = "small" if largest < 1 else "large"
        raise ValueError(f"{name}: its values are too {size}, their squares are out of the range of float64")


def _square(weight: Tensor, tall: Tensor, metric: Metric | None) -> Tensor:
    """The smaller Gram matrix of W, or of A = Lᵀ W R, of which the lower triangle counts, float64."""
    return _gram(tall, torch.float64) if metric is None else metric.gram(weight)


def _gram(tall: Tensor, dtype: torch.dtype, block: int = 256) -> Tensor:
    """Lower triangle of WᵀW, accumulated in `dtype`; what stands above the diagonal blocks stays zero."""
    size = tall.shape[1]
    gram = torch.zeros(size, size, dtype=dtype, device=tall.device)
    for chunk in tall.split(8 * CHUNK_ROWS):
        rows = chunk.to(dtype)
        for start in range(0, size, block):
            gram[start:, start : start + block].addmm_(rows[:, start:].T, rows[:, start : start + block])
    return gram


def _project(tall: Tensor, basis: Tensor, dtype: torch.dtype) -> Tensor:
    """W·basis, multiplied in float64 a few rows at a time."""
    product = torch.empty(len(tall), basis.shape[1], dtype=dtype, device=tall.device)
    for rows, target in zip(tall.split(CHUNK_ROWS), product.split(CHUNK_ROWS), strict=True):
        target.copy_(rows.double() @ basis)
    return product


def _certified(tall: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """The fast route: squared singular values, V_r and W·V_r, or None where the certificate fails.

    Let Z be the k > r leading float32 eigenvectors, orthonormal, Θ the Ritz values of G = WᵀW in their span, and
    B = Z⊥ᵀ G Z the coupling to the rest. For any δ > 0, G (in that basis) is below diag(Θ + BᵀB/δ, Z⊥ᵀ G Z⊥ + δ).
    With δ = θ_r − λ_max(Z⊥ᵀ G Z⊥) the r largest eigenvalues of the bound are those of the first block, so that the
    energy the optimum captures beyond Σ_{i≤r} θ_i is at most ‖B‖²_F / δ. Both ‖B‖_F and the excess of λ_max over the
    float32 eigenvalue λ_{k+1} are at most ε = ‖G − VΛVᵀ‖_F, which random probes estimate.
    """
    size = tall.shape[1]
    kept = rank + OVERSAMPLING
    try:
        estimates, vectors = torch.linalg.eigh(_gram(tall, torch.float32))
    except torch.linalg.LinAlgError:
        return None
    space = vectors[:, -kept:].flip(1).double()
    # One Newton-Schulz step: orthonormal to 1e-6 becomes orthonormal to 1e-12.
    space = 1.5 * space - 0.5 * space @ (space.T @ space)
    probes = torch.randn(size, PROBES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    both = torch.cat([space, probes.to(space.device)], dim=1)
    image = torch.empty(tall.shape[0], kept, dtype=torch.float64, device=tall.device)
    gram_probes = torch.zeros(PROBES, size, dtype=torch.float64, device=tall.device)
    total = torch.zeros((), dtype=torch.float64, device=tall.device)
    for chunk, target in zip(tall.split(CHUNK_ROWS), image.split(CHUNK_ROWS), strict=True):
        rows = chunk.double()
        total += torch.linalg.vector_norm(rows).square()
        product = rows @ both
        target.copy_(product[:, :kept])
        gram_probes.addmm_(product[:, kept:].T, rows)
    # In float32: its rounding adds to ε, and makes the certificate stricter.
    residual = gram_probes.T - vectors @ (estimates[:, None] * (vectors.T @ probes.float()))
    estimates = estimates.double()
    # E‖Ex‖² = ‖E‖²_F; doubled, because 16 probes of an error of rank one may come out low.
    epsilon = 2 * torch.linalg.matrix_norm(residual) / PROBES**0.5
    try:
        ritz, rotation = torch.linalg.eigh(image.T @ image)
    except torch.linalg.LinAlgError:
        return None
    # Below the true rank of W, which pruning leaves, rounding gives values of either sign.
    ritz, rotation = ritz.flip(0).clamp(min=0), rotation.flip(1)[:, :rank]
    gap = ritz[rank - 1] - estimates[-kept - 1] - epsilon
    # Comparisons with NaN are false: an overflow in float32 ends here, too.
    if not (gap > 0 and epsilon.square() / gap <= TOLERATED_LOSS * (total - ritz[:rank].sum())):
        return None
    rest = estimates[:-kept].flip(0).clamp(min=0)
    known = rest.sum() > 0  # otherwise below float32 accuracy: the rest is distributed evenly
    rest = torch.where(known, rest / rest.sum(), 1 / len(rest)) * (total - ritz.sum()).clamp(min=0)
    if rest[0] > ritz[rank - 1]:  # the estimates are rounding
        return None
    tail = torch.cat([ritz[rank:], rest]).sort(descending=True).values
    return torch.cat([ritz[:rank], tail]), space @ rotation, image @ rotation


def tail_energies(values: Tensor) -> Tensor:
    """Σ_{i>r} s_i² for r = 0 … K: what truncation at r loses."""
    squares = values.double().square()
    return torch.cat([squares.flip(0).cumsum(0).flip(0), squares.new_zeros(1)])
