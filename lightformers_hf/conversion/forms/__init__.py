"""Structural forms: ways to make a place of a model (a matrix, an attention block, a network) smaller.

A form is a class with the decorator `@register_form`, in one file of this folder. An instance is one place of one
model. No other part of the package names a form.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...matrices import product_of
from ..moments import Metric
from ..report import DENSE, MatrixReport
from ..rules import RankPolicy
from ..sharing import Originals, find_matrices, short_name

# A rank or a width; `None` keeps a place unchanged.
Setting = int | None


@dataclass(frozen=True, eq=False)
class Choices:
    """The choices for one part of a model."""

    settings: list[int | None]  # a rank or a width each; `None` keeps the part
    costs: Tensor  # cost of each, in one unit for all parts (K) float64
    sizes: Tensor  # parameters of each (K) float64

    def best(self, price: float) -> tuple[float, int]:
        """Return the minimum of cost + price · size, and its index."""
        value, index = (self.costs + price * self.sizes).min(0)
        return value.item(), int(index)


@dataclass(frozen=True, eq=False)
class Built:
    """Tensors and reports of a place at a setting.

    Attributes:
        coordinates: module → its outputs as a function of the teacher's, if they are fewer: for each head n' sums
            (h×n/h×n'/h), or, as whole numbers (n'), these of them.
    """

    reports: list[MatrixReport]  # of its matrices
    tensors: dict[str, Tensor]  # under the names of the result's checkpoint
    coordinates: dict[str, Tensor] = field(default_factory=dict)

    def of_teacher(self, name: str, outputs: Tensor) -> Tensor:
        """Return the targets of a module from the teacher's outputs (rows×n)."""
        coordinates = self.coordinates.get(name)
        if coordinates is None:
            return outputs
        if not coordinates.is_floating_point():
            return outputs[:, coordinates.to(outputs.device)]
        heads = outputs.unflatten(1, coordinates.shape[:2]).transpose(0, 1) @ coordinates.to(outputs)
        return heads.transpose(0, 1).flatten(1)


@dataclass(frozen=True, eq=False)
class Form(ABC):
    """A place of a model, with its possible settings."""

    name: str  # name of the place's module, with the head's `model.`
    originals: Originals  # the matrices to start from
    label: ClassVar[str]  # name of the form in reports
    method: ClassVar[str]  # the value of the option `method` that selects this form alone
    is_usual: ClassVar[bool] = False  # whether the form is the default; one form is

    @classmethod
    @abstractmethod
    def places(cls, dense: PreTrainedModel) -> dict[str, tuple[str, ...]]:
        """{place: the matrices that it decides over} of an uncompressed model."""

    @classmethod
    @abstractmethod
    def fields(cls, reports: Sequence[MatrixReport], dense: PreTrainedModel) -> dict[str, object]:
        """The fields of the result's configuration for the shapes that matrices of this form (`reports`) became."""

    @classmethod
    def holds(cls, module: nn.Module) -> bool:
        """Whether a module of the source has this form already: then `build(None)` leaves it in it."""
        return False

    @property
    def least(self) -> Setting:
        """The smallest setting."""
        return 1

    @abstractmethod
    def size(self, setting: Setting | Tensor) -> Tensor | float:
        """Parameters of the place's matrices at a setting, or at each of several in a tensor."""

    @abstractmethod
    def choices(self) -> Choices:
        """All settings, each with its cost and its size."""

    @abstractmethod
    def follow(self, policy: RankPolicy) -> Setting:
        """The setting that a rule gives to this place."""

    @abstractmethod
    def build(self, setting: Setting) -> Built:
        """The place at that setting."""

    @classmethod
    def nearest_state(
        cls, module: nn.Module, matrix: Tensor, bias: Tensor | None, find_metric: Callable[[], Metric], *, name: str
    ) -> dict[str, Tensor]:
        """State of a linear layer of this form whose matrix is the nearest to W, m×n, float64, that it can have.

        By default that of an `nn.Linear`, which can have W. `find_metric` returns the norm of the distance.
        """
        return {"weight": matrix.T} | ({} if bias is None else {"bias": bias})

    def shape(self, name: str) -> tuple[int, int]:
        """(m, n) of a matrix, from the skeleton."""
        return tuple(product_of(self.originals.module(name)).shape)

    def kind(self, name: str) -> str:
        """The kind of a matrix: `embedding`, `attention` or `ffn`."""
        return self.originals.module(name).kind

    def built(
        self,
        tensors: Mapping[str, Mapping[str, Tensor | None]],
        size: int | None,
        setting: str,
        error: float,
        coordinates: dict[str, Tensor] | None = None,
    ) -> Built:
        """Return modules ({name: {leaf: tensor}}) in this form, dense if `size` is `None`, with a relative error."""
        reports, stored = [], {}
        for name, leaves in tensors.items():
            given = {leaf: tensor for leaf, tensor in leaves.items() if tensor is not None}
            for leaf, tensor in given.items():  # copies, so that no source stays mapped
                stored[f"{name}.{leaf}"] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
            (m, n), parameters = self.shape(name), sum(one.numel() for one in given.values() if one.ndim == 2)
            reports.append(MatrixReport(
                name=short_name(name), kind=self.kind(name), m=m, n=n, form=DENSE if size is None else self.label,
                size=size, setting=setting, parameters_after=parameters, energy=1 - error**2, relative_error=error,
            ))  # fmt: skip
        return Built(reports, stored, coordinates or {})

    def keep(self, names: Sequence[str]) -> Built:
        """Return the matrices unchanged."""
        tensors = {}
        for name in names:
            matrix, bias = self.originals.linear(name)
            tensors[name] = {"weight": matrix if self.kind(name) == "embedding" else matrix.T, "bias": bias}
        return self.built(tensors, None, DENSE, 0.0)


FORMS: list[type[Form]] = []


def register_form(form: type[Form]) -> type[Form]:
    """Register a class as a form."""
    FORMS.append(form)
    return form


def all_forms() -> list[type[Form]]:
    """Return all forms, the default form first."""
    for file in pkgutil.iter_modules(__path__):  # each registers itself
        importlib.import_module(f"{__name__}.{file.name}")
    return sorted(FORMS, key=lambda form: not form.is_usual)


def commonest(values: list) -> object:
    """Return the most frequent value of a list, or `None` for an empty list."""
    return Counter(values).most_common(1)[0][0] if values else None


def split_widths(before: Mapping[str, int], reports: Sequence[MatrixReport]) -> tuple[object, dict[str, int]]:
    """Return the commonest width of modules that had these widths, and {module: its width} of the others."""
    found = {report.name.rpartition(".")[0]: report.size for report in reports}
    widths = {short_name(name): found.get(short_name(name), width) for name, width in before.items()}
    usual = commonest(list(widths.values()))
    return usual, {name: width for name, width in widths.items() if width != usual}


def find_blocks(dense: PreTrainedModel, names: Iterable[str], parts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """{module: its matrices} of those modules of an encoder-decoder whose `parts` are all matrices of their own."""
    matrices = dict(find_matrices(dense))
    blocks = {name: tuple(f"{name}.{part}" for part in parts) for name in names if name.startswith("model.")}
    return {name: own for name, own in blocks.items() if all(part in matrices for part in own)}
