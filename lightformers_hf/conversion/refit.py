"""Refit: every linear layer learns to give the teacher's outputs from the inputs that it gets after compression.

Front to back in one pass, by regression on the calibration sentences; no labels, no back-propagation. What one layer
loses, the next ones make up for.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..models.low_rank import LowRankLinear
from .calibration import GRADIENT_DAMPING, INPUT_DAMPING, Calibration, Metric, damped_root, stream_of
from .svd import decompose, rescaled

# Weight of the layer's own matrix in the regression, relative to the mean variance of its inputs.
RIDGE = 1e-2
# Steps that balance the tokens' probabilities, occurrences of each that are added to those seen, and how many nats a
# token they must win together.
BALANCING, SMOOTHING, WORTH_BALANCING = 4, 0.5, 0.05


class _StopError(Exception):
    """Ends a forward pass where nothing that follows is wanted."""


@torch.no_grad()
def refit(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    calibration: Calibration,
    coordinates: dict[str, Tensor],
    *,
    progress: bool,
) -> None:
    """Change the linear layers of `student` in place; ranks, shapes, tables and LayerNorms stay.

    A layer's inputs x are the student's, with all layers before it refitted; its aim is the teacher's output y:
    W* = (E[xᵀx] + ρI)⁻¹ (E[xᵀy] + ρW), all centred, truncated in the metric of the calibration; the bias makes the
    means agree. W is the layer as it was in the teacher, ρ = 0.01 · the mean variance of x. Last, the bias of the
    logits makes every token as likely on average as the teacher finds it.

    Args:
        student, teacher: LightFormers of one depth without shared layers; the teacher dense or not.
        calibration: of the teacher.
        coordinates: module → what its outputs are of the teacher's (n×n'), where they are fewer.
    """
    memory: list[tuple] = [()] * len(calibration.batches)
    total = sum(len(model.layers) for model in (student.get_encoder(), student.get_decoder()))
    with tqdm(total=total, desc="refitting", unit="layer", disable=not progress) as bar:
        for stack in ("encoder", "decoder"):
            walks = [
                _Walk(getattr(model.model, stack), f"model.{stack}", calibration.batches, memory, index)
                for index, model in enumerate((student, teacher))
            ]
            for depth in range(len(walks[0].stack.layers)):
                _refit_layer(*walks, depth, calibration, coordinates)
                for walk in walks:
                    walk.advance(depth)
                bar.update()
            memory = list(zip(*(walk.outputs() for walk in walks), strict=True))
    _balance(student, teacher, calibration.batches, memory)


def _balance(student: PreTrainedModel, teacher: PreTrainedModel, batches: list, states: list[tuple]) -> None:
    """Scale tokens' probabilities by b until their means are the teacher's: then no b has a lower cross-entropy.

    Every step, b += log(teacher's mean / own mean), lowers it (Darroch and Ratcliff 1972). Where all of them win
    little, b stays: sentences become as short as the teacher's own, which then costs more than it gives.
    """
    kept = [batch["labels"] != -100 for batch in batches]
    bias, losses = student.final_logits_bias.clone(), []
    for step in range(BALANCING + 1):
        own = target = loss = 0.0
        for (student_states, teacher_states), mask in zip(states, kept, strict=True):
            logits = student.lm_head(student_states[mask]) + student.final_logits_bias
            wanted = (teacher.lm_head(teacher_states[mask]) + teacher.final_logits_bias).softmax(-1)
            loss -= (wanted * logits.log_softmax(-1)).sum().item()
            own, target = own + logits.softmax(-1).sum(0).double(), target + wanted.sum(0).double()
        losses.append(loss / sum(mask.sum().item() for mask in kept))
        if step < BALANCING:
            student.final_logits_bias += ((target + SMOOTHING) / (own + SMOOTHING)).log().float()
    if losses[0] - losses[-1] < WORTH_BALANCING:
        student.final_logits_bias.copy_(bias)


class _Walk:
    """The hidden states of all batches on their way through one stack of one model.

    Args:
        name: of the stack.
        memory: for every batch the encoder's outputs of all models, for a decoder; `which` is this model.
    """

    def __init__(self, stack: nn.Module, name: str, batches: list[dict[str, Tensor]], memory: list, which: int):
        self.stack, self.name = stack, name
        self.states: list[Tensor] = []
        self.calls: list[list[tuple]] = []
        for batch, encoded in zip(batches, memory, strict=True):
            calls: list[tuple] = []

            def record(module: nn.Module, args: tuple, kwargs: dict, calls: list = calls) -> None:
                if not calls:
                    self.states.append(args[0])
                calls.append((args[1:], kwargs))

            hooks = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in stack.layers]
            try:
                if encoded:
                    cross = {
                        "encoder_hidden_states": encoded[which],
                        "encoder_attention_mask": batch["attention_mask"],
                    }
                    stack(batch["decoder_input_ids"], None, use_cache=False, **cross)
                else:
                    stack(batch["input_ids"], batch["attention_mask"])
            finally:
                for hook in hooks:
                    hook.remove()
            self.calls.append(calls)

    def call(self, depth: int, batch: int) -> Tensor:
        """The layer's output for the states as they are."""
        args, kwargs = self.calls[batch][depth]
        return self.stack.layers[depth](self.states[batch], *args, **kwargs)

    def advance(self, depth: int) -> None:
        """Put the states behind the layer."""
        self.states = [self.call(depth, batch) for batch in range(len(self.states))]

    def outputs(self) -> list[Tensor]:
        """What the stack gives, once the last layer is passed."""
        return [self.stack.layer_norm(states) for states in self.states]

    def watch(self, depth: int, batch: int, names: list[str], *, before: bool) -> dict[str, Tensor]:
        """What goes into the modules `names` of a layer, or comes out of them, in the order of their calls.

        What follows the last of them is not computed.
        """
        seen: dict[str, Tensor] = {}

        def see(module: nn.Module, arguments: tuple, output: Tensor | None = None, *, name: str) -> None:
            seen[name] = arguments[0] if before else output
            if len(seen) == len(names):
                raise _StopError

        hooks = []
        for name in names:
            module = self.stack.get_submodule(name.removeprefix(f"{self.name}."))
            register = module.register_forward_pre_hook if before else module.register_forward_hook
            hooks.append(register(partial(see, name=name)))
        try:
            self.call(depth, batch)
        except _StopError:
            pass
        finally:
            for hook in hooks:
                hook.remove()
        return seen


def _refit_layer(student: _Walk, teacher: _Walk, depth: int, calibration: Calibration, coordinates: dict) -> None:
    names = [name for name in calibration.linear if name.startswith(f"{student.name}.layers.{depth}.")]
    groups: dict[int, list[str]] = {}  # those with one input are one regression
    for name, states in (seen := student.watch(depth, 0, names, before=True)).items():
        groups.setdefault(id(states), []).append(name)
    del seen
    for group in groups.values():
        inputs, outputs = _Sums(), {name: _Sums() for name in group}
        for index, batch in enumerate(calibration.batches):
            mask = calibration.mask(batch, stream_of(group[0]))
            x = student.watch(depth, index, group[:1], before=True)[group[0]][mask]
            y = teacher.watch(depth, index, group, before=False)
            inputs.add(x, x)
            for name in group:
                target = y[name][mask]
                if name in coordinates:
                    target = target @ coordinates[name].to(target.dtype)
                outputs[name].add(x, target)
        for name in group:
            modules = [walk.stack.get_submodule(name.removeprefix(f"{walk.name}.")) for walk in (student, teacher)]
            own = _matrix(modules[1])
            if name in coordinates:
                own = own @ coordinates[name]
            elif len(own) != len(inputs.left):
                own = _matrix(modules[0])
            _solve(name, modules[0], own, inputs, outputs[name], calibration.gradients([name]))


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


def _solve(name: str, module: nn.Module, own: Tensor, inputs: _Sums, outputs: _Sums, gradients: Tensor) -> None:
    """Give `module` the regression, shrunk towards the matrix `own`."""
    mean_in, _, covariance = inputs.centred()
    _, mean_out, cross = outputs.centred()
    ridge = RIDGE * covariance.diagonal().mean()
    matrix = torch.linalg.solve(covariance + ridge * torch.eye(len(covariance)).double(), cross + ridge * own)
    if isinstance(module, LowRankLinear):
        metric = Metric(damped_root(covariance, INPUT_DAMPING), damped_root(gradients, GRADIENT_DAMPING))
        rank = module.rank
        factors = metric.restore(decompose(metric.weigh(matrix), name=name, rank=rank).truncate(rank))
        left, right = rescaled(factors, "balanced")
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
