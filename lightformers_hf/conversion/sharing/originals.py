"""The teacher's matrices under the names of the result's modules, and what sample text says of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..linear import Linear
from ..statistics.calibration import Calibration
from ..statistics.metric import Metric
from ..teacher import Teacher
from .alignment import Bases, merge_linear
from .merging import source_names


def short_name(name: str) -> str:
    """A module's name as patterns have it: without the head's `model.`."""
    return name.removeprefix("model.")


@dataclass(frozen=True, eq=False)
class Originals:
    """The matrices that forms start from: layers of a group merged, in the type that they are stored in.

    Attributes:
        teacher: where tensors come from.
        dense: skeleton of the result before anything gets smaller.
        start: how a group of layers is merged: `aligned`, `mean` or `first`.
        calibration: the moments, if any.
        weighting: what errors of a matrix are weighed by, see `Calibration.metric`.
        device: where matrices and moments are, and everything is computed.
        bases: teacher's module → bases in which it is merged.
    """

    teacher: Teacher
    dense: PreTrainedModel
    start: str = "mean"
    calibration: Calibration | None = None
    weighting: str = "loss"
    device: torch.device = torch.device("cpu")  # noqa: RUF009, immutable
    bases: dict[str, Bases] = field(default_factory=dict)
    _merged: dict[str, Linear] = field(default_factory=dict)

    def module(self, name: str) -> nn.Module:
        """The module in the skeleton."""
        return self.dense.get_submodule(name)

    def sources(self, name: str) -> list[str]:
        """The teacher's modules that a module is made of."""
        names = source_names(f"{name}.", self.teacher.config, self.dense.config)
        return [module.rstrip(".") for module in names]

    def in_merging_bases(self, source: str) -> Linear:
        """A layer of the teacher, in the bases in which it is merged."""
        return self.bases.get(source, Bases()).of(self.teacher.linear(source).to(self.device))

    def linear(self, name: str) -> Linear:
        """The layer, with the layers of a group merged."""
        if name not in self._merged:
            sources = self.sources(name)
            layers = [self.in_merging_bases(source) for source in sources]
            if len(layers) == 1 or self.start == "first":
                return layers[0]
            moments = None
            if self.start == "aligned" and self.calibration is not None:
                moments = [self.calibration.inputs([source]) for source in sources]
            self._merged[name] = merge_linear(layers, moments)
        return self._merged[name]

    def matrix(self, name: str) -> Tensor:
        """m×n, inputs×outputs, or V×d."""
        return self.linear(name).matrix

    def bias(self, name: str) -> Tensor | None:
        """(n), or `None`."""
        return self.linear(name).bias

    def metric(self, name: str, kind: str) -> Metric | None:
        """In which the matrix is truncated; `None` without calibration."""
        if self.calibration is None:
            return None
        sources = self.sources(name)
        has_bias = any(self.teacher.has_bias(source) for source in sources)
        return self.calibration.metric(sources, kind, has_bias, self.weighting)

    def own_module(self, name: str) -> nn.Module | None:
        """The teacher's module, from its skeleton; `None` where layers are merged."""
        sources = set(self.sources(name))
        return self.teacher.model.get_submodule(sources.pop()) if len(sources) == 1 else None

    def factors(self, name: str) -> tuple[Tensor, ...]:
        """The factors that such a module has."""
        return self.teacher.factors(self.sources(name)[0])

    def moments(self, name: str) -> tuple[Tensor, Tensor] | None:
        """E[xᵀx] and E[x] of the inputs; `None` without calibration."""
        return None if self.calibration is None else self.calibration.inputs(self.sources(name))

    def gradients(self, name: str) -> Tensor:
        """Σ gᵀg / target tokens at the outputs."""
        return self.calibration.gradients(self.sources(name))
