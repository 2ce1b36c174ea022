"""The teacher's matrices under the names of the result's modules, and what sample text says of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...loading import stored_tensors
from ..linear import Linear
from ..moments import Metric
from ..sensitivity import Calibration
from ..teacher import Teacher
from .alignment import Bases, merge_linear
from .groups import find_matrices
from .merging import merge, source_names


def short_name(name: str) -> str:
    """A module's name as patterns have it: without the head's `model.`."""
    return name.removeprefix("model.")


@dataclass(frozen=True, eq=False)
class Originals:
    """The matrices that forms start from: layers of a group merged, in the type that they are stored in.

    Attributes:
        teacher: where tensors come from.
        dense: skeleton of the result before anything gets smaller.
        is_aligned: whether the layers of a group are merged by their inputs, after alignment; else their mean.
        calibration: the moments, if any.
        weighting: what errors of a matrix are weighed by, see `Calibration.metric`.
        device: where matrices and moments are, and everything is computed.
        bases: teacher's module → bases in which it is merged.
    """

    teacher: Teacher
    dense: PreTrainedModel
    is_aligned: bool = False
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

    def linear(self, name: str) -> Linear:
        """The layer, with the layers of a group merged."""
        if name not in self._merged:
            sources = self.sources(name)
            layers = [
                self.bases.get(source, Bases()).of(self.teacher.linear(source).to(self.device)) for source in sources
            ]
            if len(layers) == 1:
                return layers[0]
            moments = None
            if self.is_aligned and self.calibration is not None:
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

    def other_tensors(self) -> dict[str, Tensor]:
        """The tensors of the result that belong to no matrix: norms, positions, the classifier, the logits' bias."""
        matrices = dict(find_matrices(self.dense))
        return {
            name: merge([self.teacher.read(one) for one in source_names(name, self.teacher.config, self.dense.config)])
            for name in stored_tensors(self.dense)
            if name.rpartition(".")[0] not in matrices
        }
