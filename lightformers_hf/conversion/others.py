"""What belongs to no matrix: norms, positions, the classifier, the bias of the logits; and residuals of depths."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import Tensor
from transformers import PreTrainedModel

from ..loading import stored_tensors
from ..models.matrices import product_of
from .sharing.groups import find_matrices
from .sharing.merging import merge, source_names
from .sharing.originals import Originals
from .sharing.residuals import residual_tensors


def other_tensors(model: PreTrainedModel, originals: Originals, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `model` that are none of its matrices.

    Args:
        model: skeleton of the result.
        tensors: of its matrices.
    """
    teacher, dense = originals.teacher, originals.dense
    matrices = dict(find_matrices(dense))
    there = stored_tensors(teacher.model)
    found: dict[str, Tensor] = {}
    for name in stored_tensors(dense):
        if name.rpartition(".")[0] in matrices:
            continue
        if ".residuals." not in name or name in there:
            sources = source_names(name, teacher.config, dense.config)
            found[name] = merge([teacher.read(source) for source in sources], originals.start)
    if any(".residuals." in name and name not in there for name in stored_tensors(dense)):
        shared = {name: stored_matrix(model, name, tensors) for name, kind in matrices.items() if kind != "embedding"}
        for name, module in dense.named_modules():
            if ".residuals." in name and hasattr(module, "factors"):
                found |= residual_tensors(name, originals, shared)
    return found


def stored_matrix(model: PreTrainedModel, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """The matrix of a module (m×n, or V×d) whose tensors are given."""
    module = copy.deepcopy(model.get_submodule(name))
    module.load_state_dict({leaf: tensors[f"{name}.{leaf}"] for leaf in module.state_dict()}, assign=True)
    return product_of(module.requires_grad_(False))
