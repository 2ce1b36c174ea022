"""Second moments: sums over calibration samples at the modules of a model, their roots, and the norm they define."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..loading import all_finite

# Added to the diagonals, relative to their mean: directions that no sample showed are not free.
INPUT_DAMPING = 1e-6
GRADIENT_DAMPING = 1e-2
# The weight of every direction where no sample showed any: as good as none.
UNSEEN = 1e-6
# Rows of a symmetric sum that are computed and stored together, up to its diagonal.
STRIP = 256
# Rows of an embedding matrix that are taken to float64 together.
ROWS = 4096
# Bytes of tensors that a `TensorStore` holds in memory; on a GPU, a share of what is free there.
ROOM, FREE_SHARE = 2**26, 0.25
Value = TypeVar("Value")


class lazy_property(Generic[Value]):  # noqa: N801, used as `property` is
    """`functools.cached_property` without the lock that it has before Python 3.12: threads compute side by side."""

    def __init__(self, compute: Callable[[Any], Value]):
        self._compute = compute

    def __get__(self, instance: object, owner: type | None = None) -> Value:
        value = instance.__dict__[self._compute.__name__] = self._compute(instance)
        return value


class TensorStore:
    """Tensors by key, on `device`: in memory up to `room` bytes, beyond that in a temporary file, see `TMPDIR`.

    A memory map would be shorter, but its pages count as memory of the process, and a full disk ends the process
    without a message.

    Args:
        room: bytes held in memory; by default 64 MiB, or a quarter of the free memory of a GPU.
    """

    def __init__(self, device: torch.device | str = "cpu", room: int = ROOM):
        self.device, self.room = torch.device(device), room
        if self.device.type == "cuda":
            self.room = int(torch.cuda.mem_get_info(self.device)[0] * FREE_SHARE)
        self._tensors: dict[Hashable, Tensor] = {}
        self._places: dict[Hashable, tuple[int, torch.dtype, torch.Size]] = {}
        self._file, self._lock = tempfile.TemporaryFile(), Lock()  # noqa: SIM115, open as long as the store

    def __contains__(self, key: Hashable) -> bool:
        return key in self._tensors or key in self._places

    def __setitem__(self, key: Hashable, tensor: Tensor) -> None:
        with self._lock:
            if key in self._tensors:
                self.room += self._tensors.pop(key).nbytes
            if key not in self._places and tensor.nbytes <= self.room:
                self.room -= tensor.nbytes
                self._tensors[key] = tensor
                return
            offset, *kind = self._places.get(key, (0,))
            if kind != [tensor.dtype, tensor.shape]:
                offset = self._file.seek(0, os.SEEK_END)
            self._places[key] = offset, tensor.dtype, tensor.shape
            self._file.seek(offset)
            self._file.write(_as_bytes(tensor.detach().cpu().contiguous()))
            self._file.flush()

    def __getitem__(self, key: Hashable) -> Tensor:
        if key in self._tensors:
            return self._tensors[key]
        offset, dtype, shape = self._places[key]
        tensor = torch.empty(shape, dtype=dtype)
        with self._lock:
            self._file.seek(offset)
            self._file.readinto(_as_bytes(tensor))
        return tensor.to(self.device)

    def __delitem__(self, key: Hashable) -> None:
        if key in self._tensors:
            self.room += self._tensors.pop(key).nbytes
        else:
            del self._places[key]


def _as_bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


@dataclass(frozen=True, eq=False)
class WeightedRows:
    """Rows x with a weight w each; products of two such are weighted sums."""

    rows: Tensor  # √w x, tokens×m, float32
    roots: Tensor  # √w
    count: float  # Σ w

    @classmethod
    def of(cls, rows: Tensor, weights: Tensor, device: torch.device) -> WeightedRows:
        roots = weights.to(device).float().sqrt()
        return cls(rows.to(device).float() * roots[:, None], roots, weights.sum().item())

    def sum(self) -> Tensor:
        """Σ w x, m."""
        return (self.roots[:, None] * self.rows).sum(0)

    def mean(self) -> Tensor:
        """Σ w x / Σ w, m; 0 if all weights are."""
        return self.sum() / (self.count or 1.0)

    def less(self, origin: Tensor) -> Tensor:
        """√w (x − origin), tokens×m."""
        return torch.addcmul(self.rows, self.roots[:, None], origin, value=-1)


class Moments:
    """Sums over samples at one module, of weight w each; divided by `count`, those of the inputs x are means."""

    def __init__(self, name: str, store: TensorStore):
        self.count = 0.0  # Σ w
        # `mean`, Σ w x (m); of an output layer `squares`, Σ g² (n); of an embedding matrix `tokens`, its lookups (V).
        self.vectors: dict[str, Tensor] = {}
        self.sizes: dict[str, int] = {}  # sizes of `inputs`, Σ w xᵀx (m×m), and `gradients`, Σ gᵀg (n×n)
        self._name, self._store = name, store

    @property
    def inputs(self) -> Tensor:
        return self._square("inputs")

    @property
    def gradients(self) -> Tensor:
        return self._square("gradients")

    def add_inputs(self, rows: Tensor, weights: Tensor) -> None:
        """Add rows x, tokens×m, and their weights w to `count`, `mean` and `inputs`."""
        weighted = WeightedRows.of(rows, weights, self._store.device)
        self.count += weighted.count
        self.add("mean", weighted.sum())
        self._add_square("inputs", weighted.rows)

    def add_gradients(self, rows: Tensor) -> None:
        """Add to `gradients`."""
        self._add_square("gradients", rows.to(self._store.device).float())

    def add_squares(self, rows: Tensor) -> None:
        """Add gradients, tokens×n, to `squares`."""
        self.add("squares", rows.float().square().sum(0))

    def add_lookups(self, ids: Tensor, size: int) -> None:
        """Add ids of a vocabulary of that size to `tokens`."""
        self.add("tokens", torch.bincount(ids, minlength=size))
        self.count += ids.numel()

    def _add_square(self, what: str, rows: Tensor) -> None:
        """Add rowsᵀ·rows, of which the lower half is computed."""
        size = self.sizes.setdefault(what, rows.shape[1])
        flat = self._flat(what)
        for start, end, strip in _strips(flat, size):
            strip.addmm_(rows[:, start:end].T, rows[:, :end])
        self._store[self._name, what] = flat

    def copy(self, store: TensorStore) -> Moments:
        """Return the same sums in another store."""
        other = Moments(self._name, store)
        other.count, other.vectors, other.sizes = self.count, dict(self.vectors), dict(self.sizes)
        for what in self.sizes:
            store[self._name, what] = self._flat(what)
        return other

    def replace(self, what: str, matrix: Tensor) -> None:
        """Store another matrix as `inputs` or `gradients`."""
        self.sizes[what] = len(matrix)
        flat = self._flat(what).clone()
        for start, end, strip in _strips(flat, len(matrix)):
            strip.copy_(matrix[start:end, :end])
        self._store[self._name, what] = flat

    def add(self, what: str, vector: Tensor) -> None:
        """Add to one of the `vectors`."""
        vector = vector.to(self._store.device)
        self.vectors[what] = self.vectors[what] + vector if what in self.vectors else vector

    def finite(self, what: str) -> bool:
        """Whether all numbers of a sum are."""
        sums = self._flat(what) if what in self.sizes else self.vectors.get(what)
        return sums is None or all_finite(sums)

    def _flat(self, what: str) -> Tensor:
        """The strips of a sum, one behind the other; zeros before anything is added."""
        if (self._name, what) in self._store:
            return self._store[self._name, what]
        size = self.sizes[what]
        length = sum((min(start + STRIP, size) - start) * min(start + STRIP, size) for start in range(0, size, STRIP))
        return torch.zeros(length, device=self._store.device)

    def _square(self, what: str) -> Tensor:
        flat, size = self._flat(what), self.sizes[what]
        square = flat.new_empty(size, size, dtype=torch.float64)
        for start, end, strip in _strips(flat, size):
            square[start:end, :end] = strip
            square[:start, start:end] = strip[:, :start].T
        return square


def _strips(flat: Tensor, size: int) -> Iterator[tuple[int, int, Tensor]]:
    """(first row, row behind the last, the rows up to their last column) of a symmetric matrix, as views."""
    offset = 0
    for start in range(0, size, STRIP):
        end = min(start + STRIP, size)
        length = (end - start) * end
        yield start, end, flat[offset : offset + length].view(end - start, end)
        offset += length


def add_gram(total: Tensor, rows: Tensor) -> None:
    """Add rowsᵀ·rows to a matrix, of which only the blocks on and below the diagonal are computed."""
    for start in range(0, len(total), STRIP):
        end = start + STRIP
        total[start:end, :end].addmm_(rows[:, start:end].T, rows[:, :end])


class PairMoments:
    """Means and second moments of pairs of rows, m and n wide, each pair of some weight, in double precision.

    Until `divide` they are sums, the products in float32; if both of a pair are the same rows, only the lower half.
    Products are of rows less the mean of the first ones: otherwise rounding would exceed a small covariance.
    """

    def __init__(self, m: int, n: int, device: torch.device):
        self.count, self.symmetric = 0.0, False
        self.left, self.right = (torch.zeros(size, dtype=torch.float64, device=device) for size in (m, n))
        self.origins = self.left.float(), self.right.float()
        self.product = torch.zeros(m, n, device=device)

    def add(self, left: WeightedRows, right: WeightedRows) -> None:
        self.symmetric = left is right
        if not self.count:
            self.origins = left.mean(), right.mean()
        self.count += left.count
        self.left += left.sum()
        self.right += right.sum()
        first, second = self.origins
        rows = left.less(first)
        if self.symmetric:
            add_gram(self.product, rows)
        else:
            self.product.addmm_(rows.T, right.less(second))

    def divide(self) -> None:
        """Fill the upper half where only the lower one was computed, and make means of the sums."""
        if self.symmetric:
            for start in range(STRIP, len(self.product), STRIP):
                self.product[:start, start : start + STRIP] = self.product[start : start + STRIP, :start].T
        sums = (self.left, self.right, self.product)
        self.left, self.right, self.product = (each.double().div_(self.count) for each in sums)

    def moment(self, *, centred: bool) -> Tensor:
        """The covariance, or the second moment, m×n."""
        first, second = self.origins
        covariance = self.product - torch.outer(self.left - first, self.right - second)
        return covariance if centred else covariance + torch.outer(self.left, self.right)


@dataclass(frozen=True, eq=False)
class Damped:
    """A second moment, m×m, and the share of its mean diagonal that is added to the diagonal."""

    moment: Tensor
    damping: float

    @classmethod
    def identity(cls, size: int, like: Tensor) -> Damped:
        """The unit metric, with the type and the device of another tensor."""
        return cls(torch.eye(size).to(like), 0.0)

    @lazy_property
    def root(self) -> Tensor:
        """`damped_root` of it."""
        return damped_root(self.moment, self.damping)

    def between(self, rows: Tensor) -> Tensor:
        """X M Xᵀ, k×k, of rows X, k×m, and the damped moment M, without its root."""
        level = self.moment.diagonal().mean()
        if not level > 0:  # as its root has it
            return rows @ rows.T * UNSEEN**2
        return (rows @ self.moment).add_(rows, alpha=self.damping * level.item()) @ rows.T


@dataclass(frozen=True, eq=False)
class Metric:
    """The norm ‖Lᵀ Δ R‖_F of an error Δ of an m×n matrix; half of its square is nats per target token."""

    rows: Damped | Tensor  # C, L is its root; or the square roots of row weights, m, for an embedding matrix
    columns: Damped  # G, R is its root
    mean: Tensor | None = None  # E[x], m, where the error of the mean output goes into a bias

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
    """Square roots of row weights, damped; all equal without data, as in `damped_root`."""
    level = squares.mean()
    return (squares + damping * level).sqrt() if level > 0 else torch.full_like(squares, UNSEEN)


def damped_root(moment: Tensor, damping: float) -> Tensor:
    """L with L·Lᵀ = `moment`, damped; a multiple of the identity where nothing was seen."""
    level, damped = moment.diagonal().mean().item(), moment.clone()
    if not level > 0:
        return torch.eye(len(moment), dtype=torch.float64, device=moment.device) * UNSEEN
    for factor in (1, 10, 100, 1000, 1e4):  # more where rounding has made it indefinite
        damped.diagonal().copy_(moment.diagonal() + factor * damping * level)
        root, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            return root
    if not all_finite(moment):
        raise ValueError("the calibration moments are not finite: the model's states or gradients are too large")
    # If all samples are equal, the rest around their mean is rounding.
    values, vectors = torch.linalg.eigh(moment)
    return torch.linalg.cholesky(vectors * values.clamp(min=damping * values.abs().max()) @ vectors.T)
