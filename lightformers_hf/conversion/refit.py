"""Refit: every linear layer learns to give the teacher's outputs from the inputs that it gets after compression.

Front to back, layer by layer, by regression on the calibration sentences; no labels, no back-propagation. What one
layer loses, the next ones make up for.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..models.low_rank import LowRankLinear
from .calibration import INPUT_DAMPING, Calibration, Metric, damped_root, stream_of
from .svd import decompose

# Weight of the layer's own matrix in the regression, relative to the mean variance of its inputs.
RIDGE = 1e-2
SHARED = "serves several layers, and one regression can't serve two places; leave refit or the groups out"


class _StopError(Exception):
    """Ends a forward pass where nothing that follows is wanted."""


@torch.no_grad()
def refit(student: PreTrainedModel, teacher: PreTrainedModel, calibration: Calibration, *, progress: bool) -> None:
    """Change the linear layers of `student` in place; ranks, shapes, tables and LayerNorms stay.

    A layer's inputs x are the student's, with all layers before it refitted; its aim is the teacher's output y:
    W* = (E[xᵀx] + ρI)⁻¹ (E[xᵀy] + ρW), all centred, truncated in the metric of the calibration; the bias makes the
    means agree. W is the layer as it was in the teacher, ρ = 0.01 · the mean variance of x.

    Args:
        student, teacher: of one class and depth; the teacher dense or not.
        calibration: of the teacher.
    """
    groups = _groups(student, calibration)
    of_encoder = [names[0].startswith("model.encoder.") for names in groups]
    memory: list[tuple] = [(None, None)] * len(calibration.batches)
    for index, names in enumerate(tqdm(groups, desc="refitting", unit="group", disable=not progress)):
        if not of_encoder[index] and of_encoder[index - 1]:  # the encoder is done: its states are what they will be
            memory = [
                tuple(model.get_encoder()(batch["input_ids"], batch["attention_mask"]) for model in (student, teacher))
                for batch in calibration.batches
            ]
        inputs = _Sums()
        outputs = {name: _Sums() for name in names}
        for batch, states in zip(calibration.batches, memory, strict=True):
            mask = calibration.mask(batch, stream_of(names[0]))
            x = _pass(student, batch, names, mask, states[0], before=True)[names[0]]
            y = _pass(teacher, batch, names, mask, states[1], before=False)
            inputs.add(x, x)
            for name in names:
                outputs[name].add(x, y[name])
        for name in names:
            _solve(student.get_submodule(name), teacher.get_submodule(name), inputs, outputs[name], calibration, name)


class _Sums:
    """Means and second moments of pairs of rows, accumulated in double precision."""

    def __init__(self) -> None:
        self.count, self.left, self.right, self.product = 0, 0.0, 0.0, 0.0

    def add(self, left: Tensor, right: Tensor) -> None:
        self.count += left.shape[0]
        self.left = self.left + left.sum(0).double()
        self.right = self.right + right.sum(0).double()
        self.product = self.product + (left.T @ right).double()

    def centred(self) -> tuple[Tensor, Tensor, Tensor]:
        """Both means, and the covariance."""
        left, right = self.left / self.count, self.right / self.count
        return left, right, self.product / self.count - torch.outer(left, right)


def _solve(
    module: nn.Module, dense: nn.Module, inputs: _Sums, outputs: _Sums, calibration: Calibration, name: str
) -> None:
    mean_in, _, covariance = inputs.centred()
    _, mean_out, cross = outputs.centred()
    own = _matrix(dense)
    ridge = RIDGE * covariance.diagonal().mean()
    matrix = torch.linalg.solve(
        covariance + ridge * torch.eye(len(covariance)).double(), cross + ridge * own, left=True
    )
    if isinstance(module, LowRankLinear):
        metric = Metric(damped_root(covariance, INPUT_DAMPING), calibration.gradient_root([name]))
        rank = module.rank
        left, right = metric.restore(decompose(metric.weigh(matrix), name=name, rank=rank).truncate(rank, "balanced"))
        module.u.weight.copy_(left.T)
        module.v.weight.copy_(right.T)
        matrix = left @ right
    else:
        module.weight.copy_(matrix.T)
    bias = module.v.bias if isinstance(module, LowRankLinear) else module.bias
    if bias is not None:
        bias.copy_(mean_out - mean_in @ matrix)


def _matrix(module: nn.Module) -> Tensor:
    """W, inputs×outputs, double."""
    if isinstance(module, LowRankLinear):
        return module.u.weight.T.double() @ module.v.weight.T.double()
    return module.weight.T.double()


def _pass(
    model: PreTrainedModel, batch: dict[str, Tensor], names: list[str], mask: Tensor, states, *, before: bool
) -> dict[str, Tensor]:
    """What goes into the modules `names`, or comes out of them, one row a token; what follows is not computed.

    `states` are those of the encoder where they are known.
    """
    seen: dict[str, Tensor] = {}

    def see(module: nn.Module, arguments: tuple, output: Tensor | None = None, *, name: str) -> None:
        seen[name] = (arguments[0] if before else output)[mask].flatten(0, -2)
        if len(seen) == len(names):
            raise _StopError

    hooks = []
    for name in names:
        module = model.get_submodule(name)
        register = module.register_forward_pre_hook if before else module.register_forward_hook
        hooks.append(register(partial(see, name=name)))
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    if states is not None:
        inputs["encoder_outputs"] = states
    try:
        model(**inputs, use_cache=False)
    except _StopError:
        return seen
    finally:
        for hook in hooks:
            hook.remove()
    raise RuntimeError(f"the model never called {', '.join(names)}")


def _groups(model: PreTrainedModel, calibration: Calibration) -> list[list[str]]:
    """Linear layers in the order of their calls, those with one input together.

    Raises:
        ValueError: a layer is shared.
    """
    calls: list[tuple[str, int]] = []
    kept: list[Tensor] = []  # so that no address is used twice
    hooks = []
    modules = dict(model.named_modules())
    for name in calibration.linear:
        if name not in modules:
            raise ValueError(f"refit: the layer of {name} {SHARED}")

        def record(module: nn.Module, arguments: tuple, name: str = name) -> None:
            kept.append(arguments[0])
            calls.append((name, id(arguments[0])))

        hooks.append(modules[name].register_forward_pre_hook(record))
    try:
        batch = {key: value for key, value in calibration.batches[0].items() if key != "labels"}
        model(**batch, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    names = [name for name, _ in calls]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"refit: {twice[0]} {SHARED}")
    groups: dict[tuple[int, str], list[str]] = {}
    for name, address in calls:
        groups.setdefault((address, stream_of(name)), []).append(name)
    return list(groups.values())
