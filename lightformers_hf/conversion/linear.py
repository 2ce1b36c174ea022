"""A linear layer as two tensors."""

from __future__ import annotations

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
