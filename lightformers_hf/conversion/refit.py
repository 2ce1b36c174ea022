"""Refit: every linear layer learns to give the teacher's outputs from the inputs that it gets after compression.

Front to back in one pass, by regression on the calibration sentences; no labels, no back-propagation. What one layer
loses, the next ones make up for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..loading import assemble
from ..models.configuration_base import FactorizedConfig
from ..models.configuration_lightformer import LightFormerConfig
from ..models.matrices import bias_of, product_of
from ..processors import give_back_memory
from .forms.form import Built, find_form
from .options import StudyOptions
from .sharing.originals import short_name
from .statistics.calibration import LOGIT_ROWS, Calibration, stream_of
from .statistics.metric import GRADIENT_DAMPING, INPUT_DAMPING, Damped, Metric
from .statistics.moments import PairMoments
from .statistics.shelf import Shelf
from .steps import Step
from .workers import cast_weights, fail_together, fast_products, gather_from_all, sum_over_all

# Weight of the layer's own matrix in the regression, relative to the mean variance of its inputs.
RIDGE = 1e-2
# At least this share of their mean square: what rounding in float32 may leave of the variance of constant inputs.
CONSTANT = 1e-6
# Target tokens whose probabilities are balanced, about; steps that balance them, occurrences of each that are added to
# those seen, and how many nats a token they must win together.
BALANCED, BALANCING, SMOOTHING, WORTH_BALANCING = 8192, 4, 0.5, 0.05


class _StopError(Exception):
    """Ends a forward pass where nothing that follows is wanted."""


def can_refit(config: FactorizedConfig, study: StudyOptions) -> bool:
    """Whether layers are to be regressed on the teacher's outputs: unless told otherwise, where none is shared.

    Raises:
        ValueError: it is asked for, and not possible.
    """
    possible = isinstance(config, LightFormerConfig) and not (config.encoder_groups or config.decoder_groups)
    if study.refit and not possible:
        raise ValueError(
            "refit is True, but layers that are shared serve several places, which one regression can't, and only a "
            "LightFormer's are known one by one: leave refit or the groups out"
        )
    return possible and study.refit is not False


def refit(
    model: PreTrainedModel,
    calibration: Calibration,
    tensors: dict[str, Tensor],
    built: Built,
    *,
    progress: bool,
) -> dict[str, Tensor]:
    """The tensors of a smaller model, its linear layers regressed on the teacher's outputs (`refit_layers`).

    Args:
        model: its skeleton.
        calibration: of the teacher, whose model it holds.
        tensors: before; those of its matrices are changed.
        built: what its matrices have become.
    """
    names = list(tensors)
    student = assemble(type(model), model.config, {name: tensors.pop(name).float() for name in names})
    student.to(calibration.model.device)
    refit_layers(student, calibration.model, calibration, built, progress=progress)
    state = student.state_dict()
    return {name: state[name].cpu() for name in names}


@torch.no_grad()
def refit_layers(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    calibration: Calibration,
    built: Built,
    *,
    progress: bool,
) -> None:
    """Change the linear layers of `student` in place; ranks, shapes, tables and LayerNorms stay.

    A layer's inputs x are the student's, with all layers before it refitted; its aim is the teacher's output y:
    W* = (E[xᵀx] + ρI)⁻¹ (E[xᵀy] + ρW), all centred, truncated in the metric of the calibration; the bias makes the
    means agree (without one, nothing is centred). W is the layer as it was in the teacher, ρ = 0.01 · the mean
    variance of x. Last, the bias of the logits makes every token as likely on average as the teacher finds it.

    Args:
        student, teacher: LightFormers of one depth without shared layers; the teacher dense or not.
        calibration: of the teacher.
        built: what the matrices have become: their forms, and the coordinates of outputs that are fewer.
    """
    shelf = Shelf(calibration.model.device)
    total = sum(len(model.layers) for model in (student.get_encoder(), student.get_decoder()))
    with Step("refitting", total=total, unit="layer", shown=progress) as bar:
        for stack in ("encoder", "decoder"):
            with fail_together():
                own, aim = walks = [
                    _Walk(who, stack, getattr(model.model, stack), calibration, shelf)
                    for who, model in (("student", student), ("teacher", teacher))
                ]
            for depth in range(len(walks[0].stack.layers)):
                _refit_layer(own, aim, depth, calibration, built)
                with fail_together():
                    own.advance(depth)
                bar.update()
            for walk in walks:
                walk.finish()
    calibration.forget("gradients")
    _balance(student, teacher, calibration, shelf, progress=progress)


def _balance(
    student: PreTrainedModel, teacher: PreTrainedModel, calibration: Calibration, shelf: Shelf, *, progress: bool
) -> None:
    """Scale tokens' probabilities by e^b until their means are the teacher's: then no b has a lower cross-entropy.

    Every step, b += log(teacher's mean / own mean), lowers it (Darroch and Ratcliff 1972), each by less than the one
    before. Where all of them win little, b stays: sentences become as short as the teacher's own, which then costs
    more than it gives; and where that is certain, the others are not computed.

    With p the student's probabilities as they are, b makes them p·e^b / Z, Z the sum of p·e^b over the tokens. Of the
    cross-entropy it changes log Z − b·(teacher's) alone: the teacher is needed once, and p where there is room for it.
    """
    size, device = student.final_logits_bias.numel(), calibration.device
    target = torch.zeros(size, dtype=torch.float64, device=device)
    with fail_together(), cast_weights(teacher.lm_head):
        for states in _target_states("teacher", calibration, shelf):
            target += _probabilities(teacher, states).sum(0).to(device)
    target = sum_over_all(target)
    shift = torch.zeros_like(target)
    held: dict[int, Tensor] = {}
    losses: list[float] = []  # cross-entropy before and after each step, nats a token, but for a constant
    room, worth = shelf.room, True
    for step in Step("balancing", range(BALANCING + 1), unit="step", shown=progress):
        if not worth:
            continue
        own, log = torch.zeros_like(target), target.new_zeros(1)
        scale = shift.exp().float().to(student.device)
        with fail_together(), cast_weights(student.lm_head):
            for number, states in enumerate(_target_states("student", calibration, shelf)):
                if (weights := held.get(number)) is None:
                    weights = _probabilities(student, states)
                    if (room := room - weights.nbytes) >= 0:
                        held[number] = weights
                sums = weights @ scale
                log += sums.log().sum().to(device)
                own += (sums.reciprocal() @ weights).mul_(scale).to(device)
        own, log = sum_over_all(own), sum_over_all(log)
        losses.append(((log - shift @ target) / target.sum()).item())
        if step:
            still = (BALANCING - step) * (losses[-2] - losses[-1])
            worth = losses[0] - losses[-1] + still >= WORTH_BALANCING
        if step < BALANCING:
            shift += ((target + SMOOTHING) / (own + SMOOTHING)).log()
    if worth:
        # A buffer of its own: the one that is there may be the teacher's.
        student.final_logits_bias = student.final_logits_bias + shift.float().to(student.device)


def _target_states(who: str, calibration: Calibration, shelf: Shelf) -> Iterator[Tensor]:
    """What the decoder gives at target tokens, a few at a time: they become rows as long as the vocabulary.

    Of many tokens, every n-th: about `BALANCED` of them.
    """
    step = max(1, calibration.target_tokens // BALANCED)
    for index, batch in enumerate(calibration.batches):
        states = shelf[who, "decoder", index]
        yield from states[(batch["labels"] != -100).to(states.device)][::step].split(LOGIT_ROWS)


def _probabilities(model: PreTrainedModel, states: Tensor) -> Tensor:
    """Of every token behind decoder states (tokens×d), tokens×V."""
    with fast_products(states.device):
        return model.logits_of(states).float().softmax(-1)


class _Walk:
    """The hidden states of all batches on their way through one stack of one model.

    Args:
        who: student or teacher.
        name: of the stack, `encoder` or `decoder`.
        shelf: has the states, and behind a decoder's those that its encoder gave.
    """

    def __init__(self, who: str, name: str, stack: nn.Module, calibration: Calibration, shelf: Shelf):
        self.who, self.name, self.stack = who, name, stack
        self.calibration, self.shelf = calibration, shelf
        for index in range(len(calibration.batches)):
            (states, *_), _ = self._arguments(index)
            shelf[who, name, index] = states

    @property
    def prefix(self) -> str:
        """What stands before the names of the stack's modules."""
        return f"model.{self.name}."

    def names(self, depth: int) -> list[str]:
        """Of a layer's linear layers."""
        return [name for name in self.calibration.linear if name.startswith(f"{self.prefix}layers.{depth}.")]

    def _arguments(self, index: int) -> tuple[tuple, dict]:
        """What the first layer is called with for a batch; to others, all but the states is the same."""
        batch, found = self.calibration.moved(self.calibration.batches[index]), []

        def see(module: nn.Module, args: tuple, kwargs: dict) -> None:
            found.append((args, kwargs))
            raise _StopError

        hook = self.stack.layers[0].register_forward_pre_hook(see, with_kwargs=True)
        try:
            if self.name == "decoder":
                memory = {
                    "encoder_hidden_states": self.shelf[self.who, "encoder", index],
                    "encoder_attention_mask": batch["attention_mask"],
                }
                self.stack(batch["decoder_input_ids"], None, use_cache=False, **memory)
            else:
                self.stack(batch["input_ids"], batch["attention_mask"])
        except _StopError:
            pass
        finally:
            hook.remove()
        return found[0]

    def call(self, depth: int, index: int) -> Tensor:
        """The layer's output for the states of a batch as they are."""
        (_, *args), kwargs = self._arguments(index)
        with fast_products(self.calibration.model.device):
            return self.stack.layers[depth](self.shelf[self.who, self.name, index], *args, **kwargs)

    def advance(self, depth: int) -> None:
        """Put the states behind the layer."""
        with cast_weights(self.stack.layers[depth]):
            for index in range(len(self.calibration.batches)):
                self.shelf[self.who, self.name, index] = self.call(depth, index)

    def finish(self) -> None:
        """Put the states behind the stack, once the last layer is passed, and forget what modules gave."""
        for index in range(len(self.calibration.batches)):
            self.shelf[self.who, self.name, index] = self.stack.layer_norm(self.shelf[self.who, self.name, index])
            for name in self.names(len(self.stack.layers) - 1):
                if (key := self._key(name, index)) in self.shelf:
                    del self.shelf[key]

    def inputs(self, depth: int, batch: int, names: list[str]) -> dict[str, Tensor]:
        """What goes into the modules `names` of a layer, in the order of their calls.

        What follows the last of them is not computed.
        """
        seen: dict[str, Tensor] = {}

        def see(module: nn.Module, arguments: tuple, *, name: str) -> None:
            seen[name] = arguments[0]
            if len(seen) == len(names):
                raise _StopError

        hooks = [self.module(name).register_forward_pre_hook(partial(see, name=name)) for name in names]
        try:
            self.call(depth, batch)
        except _StopError:
            pass
        finally:
            for hook in hooks:
                hook.remove()
        return seen

    def record(self, depth: int, names: list[str]) -> None:
        """Put the states behind the layer, and aside what comes out of its modules `names` at tokens that count."""

        def see(module: nn.Module, arguments: tuple, output: Tensor, *, name: str) -> None:
            self.shelf[self._key(name, index)] = output[masks[stream_of(name)]]

        hooks = [self.module(name).register_forward_hook(partial(see, name=name)) for name in names]
        try:
            with cast_weights(self.stack.layers[depth]):
                for index in range(len(self.calibration.batches)):
                    masks = {stream: self.mask(stream, index) for stream in ("source", "target")}
                    self.shelf[self.who, self.name, index] = self.call(depth, index)
        finally:
            for hook in hooks:
                hook.remove()

    def output(self, name: str, index: int) -> Tensor:
        """Of a module of the layer that was recorded last, tokens×n."""
        return self.shelf[self._key(name, index)]

    def module(self, name: str) -> nn.Module:
        """Of a name within the model."""
        return self.stack.get_submodule(name.removeprefix(self.prefix))

    def mask(self, stream: str, index: int) -> Tensor:
        """Where a batch has tokens, where the model is."""
        return self.calibration.mask(self.calibration.batches[index], stream).to(self.calibration.model.device)

    def _key(self, name: str, index: int) -> tuple[str, str, int]:
        """The same for all layers, so that one takes the room of the one before."""
        return self.who, name.removeprefix(self.prefix).split(".", 2)[2], index


def _refit_layer(student: _Walk, teacher: _Walk, depth: int, calibration: Calibration, built: Built) -> None:
    forms = {report.name: find_form(report.form) for report in built.reports}
    names = student.names(depth)
    with fail_together():
        teacher.record(depth, names)
    groups: dict[int, list[str]] = {}  # those with one input are one regression
    if calibration.batches:
        for name, states in (seen := student.inputs(depth, 0, names)).items():
            groups.setdefault(id(states), []).append(name)
        del seen
    for group in gather_from_all(list(groups.values()))[0]:  # the first process always has a batch
        pairs = {name: (student.module(name), teacher.module(name)) for name in group}
        outputs = {
            name: PairMoments(own.in_features, own.out_features, calibration.device)
            for name, (own, _) in pairs.items()
        }
        width = pairs[group[0]][0].in_features
        inputs = PairMoments(width, width, calibration.device)
        with fail_together(), cast_weights(student.stack.layers[depth]):
            for index in range(len(calibration.batches)):
                mask = student.mask(stream_of(group[0]), index)
                x = student.inputs(depth, index, group[:1])[group[0]][mask]
                inputs.add(x, x)
                for name in group:
                    outputs[name].add(x, built.of_teacher(name, teacher.output(name, index)))
        for sums in (inputs, *outputs.values()):
            sums.sum_over_all()
        for name, modules in pairs.items():
            own = built.of_teacher(name, _matrix(modules[1], calibration.device))
            if len(own) != len(inputs.left):  # its inputs are others
                own = _matrix(modules[0], calibration.device)
            nearest = partial(forms[short_name(name)].nearest_state, modules[0], name=name)
            _solve(nearest, modules[0], own, inputs, outputs.pop(name), partial(calibration.gradients, [name]))
    give_back_memory()


def _solve(
    nearest: Callable[..., dict[str, Tensor]],
    module: nn.Module,
    own: Tensor,
    inputs: PairMoments,
    outputs: PairMoments,
    find_gradients: Callable[[], Tensor],
) -> None:
    """Give `module` the regression, shrunk towards the matrix `own`, as near as its form can come (`nearest`)."""
    has_bias = bias_of(module) is not None
    covariance, cross = inputs.moment(centred=has_bias), outputs.moment(centred=has_bias)
    # Inputs that hardly vary leave a covariance of rounding; those that are always zero, behind what was pruned, none.
    seen = inputs.product.diagonal().mean() / inputs.count
    ridge = max(RIDGE * covariance.diagonal().mean(), CONSTANT * seen)
    matrix = own
    if ridge > 0:
        diagonal = covariance.diagonal()  # damped for a while: a second covariance is as large as the first
        own_diagonal = diagonal.clone()
        diagonal.add_(ridge)
        root, failed = torch.linalg.cholesky_ex(covariance)
        right = cross + ridge * own
        matrix = torch.linalg.solve(covariance, right) if failed else torch.cholesky_solve(right, root)
        diagonal.copy_(own_diagonal)
        del root

    def metric() -> Metric:
        return Metric(Damped(covariance, INPUT_DAMPING), Damped(find_gradients(), GRADIENT_DAMPING))

    module.load_state_dict(nearest(matrix, bias_of(module), metric))
    if (bias := bias_of(module)) is not None:
        mean_in, mean_out = outputs.means()
        bias.copy_(mean_out - mean_in @ _matrix(module, mean_in.device))


def _matrix(module: nn.Module, device: torch.device) -> Tensor:
    """W, inputs×outputs, double."""
    return product_of(module, torch.float64).to(device)
