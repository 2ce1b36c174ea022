"""Structural forms: ways to make a site of a model (a matrix, an attention block, a network) smaller.

A form is a class with the decorator `@register_form`, in one file of this folder. An instance is one site of one
model. No other part of the package names a form.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...matrices import Weight, product_of
from ..moments import Metric
from ..rules import RankPolicy
from ..sharing import Originals, find_matrices, short_name
from .svd import Split

# A rank or a width; or a width and the rank of each matrix. `None` keeps a site, or a matrix, unchanged.
Setting: TypeAlias = Any


@dataclass(frozen=True, eq=False)
class Choices:
    """The choices for one site."""

    settings: list[Setting]
    costs: Tensor  # cost of each, in one unit for all sites (K) float64
    sizes: Tensor  # parameters of each (K) float64
    whole: float = 0.0  # the cost of matrices of zeros
    details: Any = None  # what the form has computed besides, for `follow` and `shape`
    mixed: int = 0  # so many, the last ones, have a second form besides

    def alone(self) -> Choices:
        """Return the choices without the mixed ones."""
        count = len(self.settings) - self.mixed
        costs, sizes = self.costs[:count], self.sizes[:count]
        return Choices(self.settings[:count], costs, sizes, self.whole, self.details)

    def dense(self) -> Choices:
        """Return the choice to leave the site as it is, alone."""
        index = self.settings.index(None)
        return replace(self, settings=[None], costs=self.costs[[index]], sizes=self.sizes[[index]], mixed=0)

    def times(self, factor: float) -> Choices:
        """Return the choices with so many times the costs."""
        return replace(self, costs=self.costs * factor, whole=self.whole * factor)

    def best(self, price: float) -> tuple[float, int]:
        """Return the minimum of cost + price · size, and its index."""
        value, index = (self.costs + price * self.sizes).min(0)
        return value.item(), int(index)

    def cost_of(self, setting: Setting) -> float:
        """Return the cost of one of the settings."""
        return self.costs[self.settings.index(setting)].item()

    def relative_error(self, setting: Setting) -> float:
        """Norm of the error at a setting, divided by that of the matrices (0 for matrices of zeros)."""
        cost = self.cost_of(setting)
        return min(max(cost / self.whole, 0.0), 1.0) ** 0.5 if self.whole > 0 else 0.0


@dataclass(frozen=True, eq=False)
class Shaped:
    """The matrices of a site in the shapes of a setting, as near to the teacher's as these shapes allow.

    Attributes:
        weights: module → W and b, dense, or as the factors that the result keeps.
        coordinates: module → its outputs as a function of the teacher's, if they are fewer: for each head n' sums
            (h×n/h×n'/h), or, as whole numbers (n'), these of them.
        returns: module → of each head, the teacher's outputs, about, as a function of those (h×n'/h×n/h).
        error: their relative error, without that of factors that `Form.fit` still has to find.
    """

    weights: dict[str, Weight]
    coordinates: dict[str, Tensor] = field(default_factory=dict)
    returns: dict[str, Tensor] = field(default_factory=dict)
    error: float = 0.0


def change_outputs(outputs: Tensor, coordinates: Tensor | None) -> Tensor:
    """Return the outputs (rows×n) of a module that has fewer, in the `Shaped.coordinates` of these."""
    if coordinates is None:
        return outputs
    if not coordinates.is_floating_point():
        return outputs[:, coordinates.to(outputs.device)]
    heads = outputs.unflatten(1, coordinates.shape[:2]).transpose(0, 1) @ coordinates.to(outputs)
    return heads.transpose(0, 1).flatten(1)


def change_moment(moment: Tensor, kept: Tensor | None = None, back: Tensor | None = None) -> Tensor:
    """Return a second moment (n×n) of gradients at fewer outputs: those that are `kept`, or those of `back`.

    It serves for the inputs of the next matrix, too: there `back` are the coordinates, transposed.

    Args:
        kept, back: `Shaped.coordinates` and `Shaped.returns` of a module.
    """
    if back is not None:
        whole = torch.block_diag(*back.to(moment))
        return whole @ moment @ whole.T
    if kept is None or kept.is_floating_point():
        return moment
    kept = kept.to(moment.device)
    return moment[kept][:, kept]


@dataclass(frozen=True, eq=False)
class Form(ABC):
    """A site of a model, with its possible settings."""

    name: str  # name of the site's module, with the head's `model.`
    matrices: tuple[str, ...]  # those of the site, as of `sites`
    dense: PreTrainedModel  # skeleton of the model before anything gets smaller
    source: nn.Module | None = None  # the teacher's module of that name; `None` if layers are merged
    is_alone: bool = False  # whether its matrices have this form alone
    label: ClassVar[str]  # name of the form in reports
    wording: ClassVar[str]  # a setting in reports: `rank {}`
    method: ClassVar[str]  # the value of the option `method` that selects this form alone
    is_usual: ClassVar[bool] = False  # whether the form is the default; one form is

    @classmethod
    @abstractmethod
    def sites(cls, dense: PreTrainedModel) -> dict[str, tuple[str, ...]]:
        """{site: the matrices that it decides over} of an uncompressed model."""

    @classmethod
    @abstractmethod
    def fields(cls, sizes: Mapping[str, int], dense: PreTrainedModel) -> dict[str, object]:
        """The fields of the result's configuration for the matrices of this form, {matrix: its setting}."""

    @classmethod
    def holds(cls, module: nn.Module) -> bool:
        """Whether a module of the source has this form already: then `None` leaves it in it."""
        return False

    def parts(self, setting: Setting) -> Iterator[tuple[type[Form], str, int]]:
        """Yield (form, matrix, its rank or width there) for every matrix, and for every form of it."""
        for name in self.matrices:
            yield type(self), name, setting

    def describe(self, name: str, setting: Setting) -> tuple[int, str]:
        """Return the number of a matrix's form, and the setting in words."""
        return setting, self.wording.format(setting)

    @property
    def least(self) -> Setting:
        """The smallest setting."""
        return 1

    def kept(self, setting: Setting) -> Setting:
        """The setting that the source has and keeps, because this one is no smaller; `None` if it has none."""
        return None

    @abstractmethod
    def size(self, setting: Setting | Tensor) -> Tensor | float:
        """Parameters of the site's matrices at a setting, or at each of several in a tensor."""

    @abstractmethod
    def choices(self, originals: Originals) -> Choices:
        """All settings, each with its cost and its size."""

    def waits(self, policy: RankPolicy) -> bool:
        """Whether `follow` needs the choices."""
        return False

    @abstractmethod
    def follow(self, policy: RankPolicy, choices: Choices | None = None) -> Setting:
        """The setting that a rule gives to this site."""

    def shape(self, setting: Setting, originals: Originals, choices: Choices | None = None) -> Shaped:
        """The matrices for that setting, by default unchanged. `choices` that are given need no second computation."""
        return Shaped({name: originals.weight(name) for name in self.matrices})

    @classmethod
    def fit(
        cls,
        module: nn.Module,
        weight: Weight,
        find_metric: Callable[[], Metric | None],
        *,
        name: str,
        split: Split = "sigma-right",
    ) -> float:
        """Give a module of this form the nearest weight that it can have, and return the relative error.

        By default that of a dense module, which can have any. `find_metric` returns the norm of the distance.
        """
        weight.put(module)
        return 0.0

    def error(self, setting: Setting, originals: Originals, choices: Choices | None = None) -> float:
        """The relative error of the matrices that `shape` and `fit` make."""
        return 0.0 if self.kept(setting) else (choices or self.choices(originals)).relative_error(setting)

    def shape_of(self, name: str) -> tuple[int, int]:
        """(m, n) of a matrix."""
        return tuple(product_of(self.dense.get_submodule(name)).shape)

    def kind(self, name: str) -> str:
        """The kind of a matrix: `embedding`, `attention` or `ffn`."""
        return self.dense.get_submodule(name).kind


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


def split_widths(before: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[object, dict[str, int]]:
    """Return the commonest width of modules that had these widths, and {module: its width} of the others.

    `sizes` has the new widths of matrices within the modules.
    """
    found = {name.rpartition(".")[0]: size for name, size in sizes.items()}
    widths = {short_name(name): found.get(short_name(name), width) for name, width in before.items()}
    usual = commonest(list(widths.values()))
    return usual, {name: width for name, width in widths.items() if width != usual}


def find_blocks(dense: PreTrainedModel, names: Iterable[str], parts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """{module: its matrices} of those modules of an encoder-decoder whose `parts` are all matrices of their own."""
    matrices = dict(find_matrices(dense))
    blocks = {name: tuple(f"{name}.{part}" for part in parts) for name in names if name.startswith("model.")}
    return {name: own for name, own in blocks.items() if all(part in matrices for part in own)}
