"""A linear layer as two tensors, systems of equations, and whether tensors hold numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Linear(NamedTuple):
    """y = x·W + b."""

    matrix: Tensor  # W, m×n
    bias: Tensor | None  # b, n

    def to(self, device: torch.device) -> Linear:
        """The same on a device."""
        return Linear(self.matrix.to(device), None if self.bias is None else self.bias.to(device))


def solved(covariance: Tensor, ridge: Tensor, rights: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(covariance + ridge·I)⁻¹ · each of the matrices under their names, which are let go one by one."""
    diagonal = covariance.diagonal()  # damped for a while: a second covariance is as large as the first
    own_diagonal = diagonal.clone()
    diagonal.add_(ridge)
    root, failed = torch.linalg.cholesky_ex(covariance)
    while rights:
        name, right = rights.pop(0)
        if failed:
            yield name, torch.linalg.solve(covariance, right)
        else:  # as `cholesky_solve`, which copies the root
            right = torch.linalg.solve_triangular(root, right, upper=False)
            yield name, torch.linalg.solve_triangular(root.mT, right, upper=True)
    diagonal.copy_(own_diagonal)
