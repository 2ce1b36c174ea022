"""The norm that errors of a matrix are measured in, and square roots of moments."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...loading import all_finite
from ..lazy import lazy_property

# Added to the diagonals, relative to their mean: directions that no sample showed are not free.
INPUT_DAMPING = 1e-6
GRADIENT_DAMPING = 1e-2
# The weight of every direction where no sample showed any: as good as none.
UNSEEN = 1e-6
# Rows of a table that are taken to float64 together, and columns of a triangle.
ROWS, STRIP = 4096, 512


@dataclass(frozen=True, eq=False)
class Damped:
    """A second moment, m×m, and how much is added to its diagonal, relative to the mean of that."""

    moment: Tensor
    damping: float

    @lazy_property
    def root(self) -> Tensor:
        """`damped_root` of it."""
        return damped_root(self.moment, self.damping)

    def between(self, rows: Tensor) -> Tensor:
        """X M Xᵀ, k×k, of rows X, k×m, and the damped moment M, of which one half is multiplied and no root taken."""
        level = self.moment.diagonal().mean()
        if not level > 0:  # as its root has it
            return rows @ rows.T * UNSEEN**2
        half = rows.new_zeros(len(rows), len(rows))
        for start in range(0, len(self.moment), STRIP):
            lower = self.moment[start:, start : start + STRIP].tril()
            lower.diagonal().mul_(0.5).add_(0.5 * self.damping * level)
            half.addmm_(rows[:, start:] @ lower, rows[:, start : start + STRIP].T)
        return half + half.T


@dataclass(frozen=True, eq=False)
class Metric:
    """The norm ‖Lᵀ Δ R‖_F that an error Δ of a matrix, m×n, is measured in; half its square is nats a target token.

    Attributes:
        rows: C, L is its root; or the square roots of row weights, m, for a token table.
        columns: G, R is its root.
        mean: E[x], m, where the error of the mean output goes into a bias.
    """

    rows: Damped | Tensor
    columns: Damped
    mean: Tensor | None = None

    @property
    def left(self) -> Tensor:
        """L, lower triangular with C = L Lᵀ, or the weights."""
        return self.rows.root if isinstance(self.rows, Damped) else self.rows

    @property
    def right(self) -> Tensor:
        """R, lower triangular with G = R Rᵀ."""
        return self.columns.root

    def gram(self, matrix: Tensor) -> Tensor:
        """AAᵀ or AᵀA, the smaller, of A = Lᵀ W R: without the larger one's root."""
        if len(matrix) <= matrix.shape[1]:
            inner = self.columns.between(matrix.double())
            if isinstance(self.rows, Damped):
                return self.left.T @ inner @ self.left
            return self.left[:, None] * inner * self.left
        if isinstance(self.rows, Damped):
            inner = self.rows.between(matrix.double().T)
        else:
            inner = self.left.new_zeros(matrix.shape[1], matrix.shape[1])
            for weights, rows in zip(self.left.split(ROWS), matrix.split(ROWS), strict=True):
                weighted = weights[:, None] * rows.double()
                inner.addmm_(weighted.T, weighted)
        return self.right.T @ inner @ self.right

    def bases(self, vectors: Tensor, *, rows: bool) -> tuple[Tensor, Tensor]:
        """R V and Vᵀ R⁻¹ of directions V, n×k; of directions among the `rows`, m×k, L V and Vᵀ L⁻¹."""
        root = self.left if rows else self.right
        if root.ndim == 1:
            return root[:, None] * vectors, (vectors / root[:, None]).T
        return root @ vectors, torch.linalg.solve_triangular(root, vectors.T, upper=False, left=False)


def damped_weights(squares: Tensor, damping: float) -> Tensor:
    """Square roots of row weights, damped; all alike where nothing was seen, as in `damped_root`."""
    level = squares.mean()
    return (squares + damping * level).sqrt() if level > 0 else torch.full_like(squares, UNSEEN)


def damped_root(moment: Tensor, damping: float) -> Tensor:
    """L with L·Lᵀ = `moment`, damped; a multiple of the identity where nothing was seen.

    Its diagonal is damped for a while, and then as it was: a copy would be as large.

    Raises:
        ValueError: it is not finite.
    """
    size, diagonal = moment.shape[0], moment.diagonal()
    own, level = diagonal.clone(), diagonal.mean().item()
    if not level > 0:
        return torch.eye(size, dtype=torch.float64, device=moment.device) * UNSEEN
    try:
        # More where rounding has made it indefinite.
        for factor in (1, 10, 100, 1000, 1e4):
            diagonal.copy_(own + factor * damping * level)
            root, failed = torch.linalg.cholesky_ex(moment)
            if not failed:
                return root
    finally:
        diagonal.copy_(own)
    if not all_finite(moment):
        raise ValueError("the calibration moments are not finite: the model's states or gradients are too large")
    # Where all samples are alike, what is left around their mean is rounding.
    values, vectors = torch.linalg.eigh(moment)
    return torch.linalg.cholesky(vectors * values.clamp(min=damping * values.abs().max()) @ vectors.T)
