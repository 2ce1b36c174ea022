"""Sums over calibration samples at the modules of a model, kept where there is room."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ...loading import all_finite
from ...processors import factor_rows
from ..workers import sum_over_all
from .shelf import Shelf

# Rows of a symmetric sum that are computed and kept together, up to its diagonal.
STRIP = 256


@dataclass(frozen=True, eq=False)
class Weighed:
    """Rows x of some weight w each: products of two such are weighed sums."""

    rows: Tensor  # √w x, tokens×m, as `factor_rows` has them
    roots: Tensor  # √w, of as many
    count: float  # Σ w

    def sum(self) -> Tensor:
        """Σ w x, m."""
        return (self.roots[:, None] * self.rows).sum(0)


def weigh(rows: Tensor, weights: Tensor, device: torch.device) -> Weighed:
    """Rows x, tokens×m, and their weights w, on a device."""
    roots = weights.to(device).float().sqrt()
    factors = factor_rows(rows.to(device), roots)
    return Weighed(factors, F.pad(roots, (0, len(factors) - len(roots))), weights.sum().item())


class Moments:
    """Sums over samples at one module, of weight w each; divided by `count`, those of the inputs x are means.

    Attributes:
        count: Σ w.
        vectors: `mean`, Σ w x (m); at an output layer `squares`, Σ g² (n); at a table `tokens`, how often each token
            was looked up (V).
        sizes: of `inputs`, Σ w xᵀx (m×m), and `gradients`, Σ gᵀg (n×n).
    """

    def __init__(self, name: str, shelf: Shelf):
        self.count = 0.0
        self.vectors: dict[str, Tensor] = {}
        self.sizes: dict[str, int] = {}
        self._name, self._shelf = name, shelf

    @property
    def inputs(self) -> Tensor:
        """Σ w xᵀx, m×m, double."""
        return self._square("inputs")

    @inputs.setter
    def inputs(self, matrix: Tensor) -> None:
        self._put("inputs", matrix)

    @property
    def gradients(self) -> Tensor:
        """Σ gᵀg, n×n, double."""
        return self._square("gradients")

    @gradients.setter
    def gradients(self, matrix: Tensor) -> None:
        self._put("gradients", matrix)

    def add_inputs(self, rows: Tensor, weights: Tensor) -> None:
        """Add rows x, tokens×m, and their weights w to `count`, `mean` and `inputs`."""
        weighed = weigh(rows, weights, self._shelf.device)
        self.count += weighed.count
        self.add("mean", weighed.sum())
        self._add_square("inputs", weighed.rows)

    def add_gradients(self, rows: Tensor) -> None:
        """Add to `gradients`."""
        self._add_square("gradients", factor_rows(rows.to(self._shelf.device)))

    def _add_square(self, what: str, rows: Tensor) -> None:
        """Add rowsᵀ·rows, of which the lower half is computed."""
        size = self.sizes.setdefault(what, rows.shape[1])
        with self._shelf.changing((self._name, what), partial(self._zeros, size)) as flat:
            for start, end, strip in _strips(flat, size):
                strip.addmm_(rows[:, start:end].T, rows[:, :end])

    def forget(self, what: str) -> None:
        """Let go of the `inputs` or `gradients`, if there are any."""
        if self.sizes.pop(what, None) is not None and (self._name, what) in self._shelf:
            del self._shelf[self._name, what]

    def add(self, what: str, vector: Tensor) -> None:
        """Add to one of the `vectors`."""
        vector = vector.to(self._shelf.device)
        self.vectors[what] = self.vectors[what] + vector if what in self.vectors else vector

    def finite(self, what: str) -> bool:
        """Whether all numbers of a sum are."""
        sums = self._flat(what) if what in self.sizes else self.vectors.get(what)
        return sums is None or all_finite(sums)

    def shapes(self) -> tuple[dict, dict]:
        """Sizes of the squares, and shapes and types of the vectors."""
        return self.sizes, {what: (vector.shape, vector.dtype) for what, vector in self.vectors.items()}

    def sum_over_all(self, shapes: tuple[dict, dict]) -> None:
        """Sum over all processes, of which some saw no sample; `shapes` are those of one that did."""
        self.sizes = shapes[0]
        for what in self.sizes:
            self._shelf[self._name, what] = sum_over_all(self._flat(what))
        for what, (shape, dtype) in shapes[1].items():
            own = self.vectors.get(what)
            own = torch.zeros(shape, dtype=dtype, device=self._shelf.device) if own is None else own
            self.vectors[what] = sum_over_all(own)
        self.count = sum_over_all(torch.tensor(self.count, dtype=torch.float64)).item()

    def _flat(self, what: str) -> Tensor:
        """The strips of a sum, one behind the other."""
        if (self._name, what) in self._shelf:
            return self._shelf[self._name, what]
        return self._zeros(self.sizes[what])

    def _zeros(self, size: int) -> Tensor:
        """The strips of a matrix of zeros."""
        length = sum((min(start + STRIP, size) - start) * min(start + STRIP, size) for start in range(0, size, STRIP))
        return torch.zeros(length, device=self._shelf.device)

    def _square(self, what: str) -> Tensor:
        flat, size = self._flat(what), self.sizes[what]
        square = flat.new_empty(size, size, dtype=torch.float64)
        for start, end, strip in _strips(flat, size):
            square[start:end, :end] = strip
            square[:start, start:end] = strip[:, :start].T
        return square

    def _put(self, what: str, matrix: Tensor) -> None:
        self.sizes[what] = len(matrix)
        flat = self._flat(what).clone()
        for start, end, strip in _strips(flat, len(matrix)):
            strip.copy_(matrix[start:end, :end])
        self._shelf[self._name, what] = flat


class PairMoments:
    """Means and second moments of pairs of rows, m and n wide, each pair of some weight, in double precision.

    Until `sum_over_all` they are sums, those of products in float32, and where both of a pair are the same rows, only
    the lower half is there.
    """

    def __init__(self, m: int, n: int, device: torch.device):
        self.count, self.symmetric, self._centred = 0.0, False, False
        self.left, self.right = (torch.zeros(size, dtype=torch.float64, device=device) for size in (m, n))
        self.product = torch.zeros(m, n, device=device)

    def add(self, left: Weighed, right: Weighed) -> None:
        """Add rows, tokens×m and tokens×n, each pair of one weight."""
        self.symmetric = left is right
        self.count += left.count
        self.left += left.sum()
        self.right += right.sum()
        for start in range(0, left.rows.shape[1], STRIP):
            rows, columns = slice(start, start + STRIP), slice(start + STRIP if self.symmetric else None)
            self.product[rows, columns].addmm_(left.rows[:, rows].T, right.rows[:, columns])

    def sum_over_all(self) -> None:
        """Sum over all processes, fill the upper half where only the lower one was computed, and divide."""
        if self.symmetric:
            for start in range(STRIP, len(self.product), STRIP):
                self.product[:start, start : start + STRIP] = self.product[start : start + STRIP, :start].T
        self.count = sum_over_all(torch.tensor(self.count, dtype=torch.float64)).item()
        sums = (self.left, self.right, self.product)
        self.left, self.right, self.product = (sum_over_all(each).double().div_(self.count) for each in sums)

    def means(self) -> tuple[Tensor, Tensor]:
        """Of both sides."""
        return self.left, self.right

    def moment(self, *, centred: bool) -> Tensor:
        """The covariance, or the second moment, m×n, until it is asked for the other: both have one place."""
        if centred != self._centred:
            self.product.addr_(*self.means(), alpha=-1 if centred else 1)
            self._centred = centred
        return self.product


def _strips(flat: Tensor, size: int) -> Iterator[tuple[int, int, Tensor]]:
    """(first row, row behind the last, the rows up to their last column) of a symmetric matrix, as views."""
    offset = 0
    for start in range(0, size, STRIP):
        end = min(start + STRIP, size)
        length = (end - start) * end
        yield start, end, flat[offset : offset + length].view(end - start, end)
        offset += length
