"""Refit: every linear layer and norm learns to give the teacher's outputs from the inputs that it now gets.

Front to back in one pass, by regression on the calibration sentences; no labels, no back-propagation. What one layer
loses, the next ones make up for. In the same way the layers that stay learn to do the work of those that are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..matrices import bias_of, product_of
from ..models.configuration_lightformer import FactorizedConfig, LightFormerConfig
from ..processors import give_back_memory
from .balance import balance
from .forms.form import Built, Form, all_forms, find_form
from .linear import solved
from .options import StudyOptions
from .sharing.groups import find_matrices
from .sharing.originals import short_name
from .statistics.calibration import SHRINKAGE, Calibration, cut_batches, stream_of, token_mask
from .statistics.metric import GRADIENT_DAMPING, Damped, Metric
from .statistics.moments import PairMoments, weigh
from .statistics.shelf import Shelf
from .steps import Step
from .walk import Walk
from .workers import (
    Turns,
    algebra_device,
    cast_weights,
    fail_together,
    fast_sums,
    gather_from_all,
    map_in_order,
    sum_over_all,
)

# Weight of the layer's own matrix in the regression, relative to the mean variance of its inputs, which are of sample
# sentences or of self-generated text.
RIDGE, SELF_GENERATED_RIDGE = 1e-2, 0.1
# Of what states lack, so much is made up for: more helps on the sample alone (RESULTS.md, "What states lack").
MADE_UP_FOR = 0.5
# At least this share of their mean square: what rounding in float32 may leave of the variance of constant inputs.
CONSTANT = 1e-6
# Tokens of a batch: nothing is kept for gradients, and of few the passes take less time than what is around them.
TOKENS = 1024
NORMS = (nn.LayerNorm, nn.RMSNorm)
# Of `encoder` and `decoder`, which layers of a teacher those of another model stand for.
Depths = Mapping[str, Sequence[int]]


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


@torch.no_grad()
def refit(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    depths: Depths,
    calibration: Calibration,
    built: Built,
    *,
    progress: bool,
) -> None:
    """Refit the layers of a smaller model to the teacher's outputs by least squares, in place, and balance its logits.

    Args:
        student: in float32, where the teacher is. Its matrices, norms and the bias of its logits are replaced.
        teacher: with all its layers.
        depths: which of them the student's stand for, see `Regression`.
        calibration: of the teacher, or of one with as many layers as the student.
        built: what its matrices have become.
    """
    shelf = Shelf(teacher.device)
    batches = cut_batches(calibration.batches, TOKENS)
    regression = Regression(student, teacher, depths, batches, shelf, built, MADE_UP_FOR, calibration)
    regression.run(tuple(depths), "refitting", progress=progress)
    calibration.forget("gradients")
    balance(student, teacher, batches, shelf, progress=progress)


@torch.no_grad()
def bridge(
    shorter: PreTrainedModel,
    teacher: PreTrainedModel,
    depths: Depths,
    batches: Sequence[dict[str, Tensor]],
    *,
    progress: bool,
) -> dict[str, Tensor]:
    """Tensors of a teacher with fewer layers, regressed so that each does what those before it did, too.

    A stack that has them all is left as it is, unless it reads what a shorter one wrote.

    Args:
        shorter: that teacher; what is regressed gets new tensors.
        teacher: with all its layers.
        depths: those that stay: the last of each part of a stack.
        batches: as of `Calibration`.

    Returns: the new tensors under their names.
    """
    stacks = tuple(depths) if len(depths["encoder"]) < len(teacher.get_encoder().layers) else ("decoder",)
    linear = [name for stack in stacks for name, _ in _linear_layers(shorter, stack)]
    names = [*linear, *(name for stack in stacks for name in _norms(shorter, stack))]
    for name in linear:  # files' pages, or the teacher's own
        for weight in shorter.get_submodule(name).parameters():
            weight.data = weight.data.clone()
    shelf, unchanged = Shelf(teacher.device), Built([], {})
    regression = Regression(shorter, teacher, depths, cut_batches(batches, TOKENS), shelf, unchanged, share=1)
    regression.run(stacks, "bridging", progress=progress)
    balance(shorter, teacher, regression.batches, shelf, progress=progress)
    state = shorter.state_dict()
    changed = [f"{name}.{leaf}" for name in names for leaf in shorter.get_submodule(name).state_dict()]
    return {name: state[name].cpu() for name in (*changed, "final_logits_bias")}


@dataclass(frozen=True, eq=False)
class Regression:
    """What changes the linear layers and norms of `student` in place; ranks, shapes and tables stay.

    A layer's inputs x are the student's, with all layers before it regressed; its aim y is the teacher's output, and
    where that is added to states r, of which the student's r' lack some, y + β(r − r'). So what one sublayer loses,
    the next ones make up for: all of it (β = 1) where layers were left out, half of it where matrices got smaller.
    W* = (E[xᵀx] + ρI)⁻¹ (E[xᵀy] + ρW), all centred, truncated in the metric of the calibration; the bias makes the
    means agree (without one, nothing is centred). W is the layer as it was in the teacher, ρ = `ridge` ·
    the mean variance of x. Tokens have the weights of the calibration, or without one all the same.

    Norms put states that have lost something back to their full size, errors with them. The gain g of each becomes
    g + β(g* − g), g* regressed likewise on what the teacher's gives, each feature by itself, and its bias makes the
    means agree. The one before the output layer stays where β < 1: it would make the model less sure than it is.

    Attributes:
        student, teacher: LightFormers without shared layers; the teacher dense or not.
        depths: of `encoder` and `decoder`, which of the teacher's layers each of the student's stands for.
        batches: as of `Calibration`.
        shelf: gets the states.
        built: what the matrices have become: their forms, and the coordinates of outputs that are fewer.
        share: β.
        calibration: of a model that the student was made of: that has the layers as they were, and gradients for the
            metric. `None`: the student is that model itself, and errors of all outputs are alike.
    """

    student: PreTrainedModel
    teacher: PreTrainedModel
    depths: Depths
    batches: Sequence[dict[str, Tensor]]
    shelf: Shelf
    built: Built
    share: float
    calibration: Calibration | None = None

    @property
    def device(self) -> torch.device:
        """Where sums are, and what is solved."""
        return algebra_device(self.shelf.device)

    @property
    def ridge(self) -> float:
        """ρ, relative to the mean variance of a layer's inputs."""
        return SELF_GENERATED_RIDGE if self.calibration and self.calibration.self_generated else RIDGE

    def run(self, stacks: Sequence[str], what: str, *, progress: bool) -> None:
        """Regress the layers of these stacks; the others' states are computed."""
        total = sum(len(self.depths[stack]) for stack in stacks)
        with Step(what, total=total, unit="layer", shown=progress) as bar:
            for stack, depths in self.depths.items():
                with fail_together():
                    own, aim = walks = [
                        Walk(who, stack, model, self.batches, self.shelf)
                        for who, model in (("student", self.student), ("teacher", self.teacher))
                    ]
                passed = 0
                for depth, aimed in enumerate(depths):
                    with fail_together():
                        for between in range(passed, aimed):
                            aim.advance(between)
                    passed = aimed + 1
                    if stack in stacks:
                        self._regress_layer(own, aim, depth, aimed)
                        bar.update()
                    else:
                        with fail_together():
                            aim.advance(aimed)
                    with fail_together():
                        own.advance(depth)
                if stack in stacks and self._changes(last := f"model.{stack}.layer_norm"):
                    self._fit_norm(last, partial(_results, walks))
                with fail_together():
                    for walk in walks:
                        walk.finish()

    def _regress_layer(self, student: Walk, teacher: Walk, depth: int, aimed: int) -> None:
        linear = [name for name, place in _linear_layers(self.student, student.name) if place == depth]
        path = f"model.{student.name}.layers.{depth}."
        norms = [name for name in _norms(self.student, student.name) if name.startswith(path) and self._changes(name)]
        names = linear + norms
        with fail_together():
            teacher.record(aimed, names, self.share)
        groups: dict[int, list[str]] = {}  # those with one input are one regression, in the order of their calls
        if self.batches:
            for name, states in (seen := student.inputs(depth, 0, names)).items():
                groups.setdefault(id(states), []).append(name)
            del seen
        for group in gather_from_all(list(groups.values()))[0]:  # the first process always has a batch
            with fail_together():
                student.reach(group[0], depth)
            if group[0] in norms:
                with cast_weights(student.stack.layers[depth]):
                    self._fit_norm(group[0], partial(_outputs, student, teacher, group[0], depth))
                continue
            layers = {name: self.student.get_submodule(name) for name in group}
            with fail_together(), cast_weights(student.stack.layers[depth]), fast_sums(self.shelf.device):
                inputs, outputs = self._sums(student, teacher, depth, layers)
            give_back_memory()
            for sums in (inputs, *outputs.values()):
                sums.sum_over_all()
            self._solve(layers, inputs, outputs)
        give_back_memory()

    def _sums(
        self, student: Walk, teacher: Walk, depth: int, layers: dict[str, nn.Module]
    ) -> tuple[PairMoments, dict[str, PairMoments]]:
        """Over all batches, of what goes into layers of one input, and of that with what is to come out of each."""
        group, width = list(layers), next(iter(layers.values())).in_features
        inputs = PairMoments(width, width, self.device)
        outputs = {name: PairMoments(width, layer.out_features, self.device) for name, layer in layers.items()}
        weights, added_to = self._token_weights(group), student.added_to(group[0])
        turns = Turns()  # each is added to by one batch after the other: so it does not depend on what is at once

        def add_up(index: int) -> None:
            with turns.noticing():
                looked = self._look(student, teacher, depth, group, added_to, index)
                x, *aims = (weigh(rows, weights[index], self.device) for rows in looked)
            with turns.take("inputs", index):
                inputs.add(x, x)
            for name, aim in zip(group, aims, strict=True):
                with turns.take(name, index):
                    outputs[name].add(x, aim)

        for _ in map_in_order(add_up, range(len(self.batches)), self.shelf.device):
            pass
        return inputs, outputs

    def _token_weights(self, group: list[str]) -> Sequence[Tensor]:
        """Of each batch, the weights of its tokens in the regression of layers with one input."""
        stream = stream_of(group[0])
        counts = [int(token_mask(batch, stream).sum()) for batch in self.batches]
        if self.calibration is None:
            return [torch.ones(count) for count in counts]
        return self.calibration.token_weights(group).split(counts)

    def _look(
        self, student: Walk, teacher: Walk, depth: int, group: list[str], added_to: str | None, index: int
    ) -> Iterator[Tensor]:
        """Of a batch, what goes into the layers of a group, tokens×m, then for each what is to come out, tokens×n."""
        mask = student.mask(stream_of(group[0]), index)
        seen = student.inputs(depth, index, [group[0]] if added_to is None else [group[0], added_to])
        yield seen[group[0]][mask]
        for name in group:
            aim = self.built.of_teacher(name, teacher.output(name, index))
            yield aim if added_to is None else aim - self.share * seen[added_to][mask]

    def _changes(self, name: str) -> bool:
        """Whether there is a norm of that name, and it is to be regressed."""
        module, decoder = self.student.get_submodule(name), self.student.model.decoder
        last = decoder.layer_norm
        if isinstance(last, nn.Identity) and not decoder.layers[-1].normalize_before:
            last = decoder.layers[-1].final_layer_norm
        return isinstance(module, NORMS) and (self.share == 1 or module is not last)

    def _fit_norm(self, name: str, outputs: Callable[[int], tuple[Tensor, Tensor]]) -> None:
        """Give a norm the regression of its gain, and its bias; `outputs` of a batch are its and the teacher's."""
        norm = self.student.get_submodule(name)
        centred = bias_of(norm) is not None
        sums = torch.zeros(5, len(norm.weight), dtype=torch.float64, device=self.device)

        def add_up(index: int) -> Tensor:
            x, y = (output.to(sums.device).double() for output in outputs(index))
            return torch.stack([x.new_full((x.shape[1],), len(x)), x.sum(0), y.sum(0), (x * x).sum(0), (x * y).sum(0)])

        with fail_together():
            for part in map_in_order(add_up, range(len(self.batches)), self.shelf.device):
                sums += part
        count, *others = sum_over_all(sums)
        mean_in, mean_out, square, product = (other / count for other in others)
        if not centred:
            mean_in, mean_out = torch.zeros_like(mean_in), torch.zeros_like(mean_out)
        variance, covariance = square - mean_in**2, product - mean_in * mean_out
        # Of what the norm gave: so that features count alike, whatever their gain.
        scale = (covariance / variance + self.ridge) / (1 + self.ridge)
        scale = 1 + self.share * (torch.where(variance > CONSTANT * square, scale, 1) - 1)
        scale, shift = (each.float().to(norm.weight.device) for each in (scale, mean_out - mean_in * scale))
        new = {"weight": norm.weight * scale} | ({"bias": norm.bias * scale + shift} if centred else {})
        for leaf, tensor in new.items():  # not in place: its own may be the teacher's, too
            setattr(norm, leaf, nn.Parameter(tensor.to(norm.weight.dtype), requires_grad=False))

    def _solve(self, layers: dict[str, nn.Module], inputs: PairMoments, outputs: dict[str, PairMoments]) -> None:
        """Give layers of one input the regression, shrunk towards their own matrices, as near as their forms can come.

        Args:
            outputs: of each layer, its aims; what is done with is let go.
        """
        for centred in (False, True):
            some = {name: layer for name, layer in layers.items() if (bias_of(layer) is not None) == centred}
            if not some:
                continue
            # Inputs that hardly vary leave a covariance of rounding; those always zero, behind what was pruned, none.
            seen = inputs.moment(centred=False).diagonal().mean()
            covariance = inputs.moment(centred=centred)
            ridge = max(self.ridge * covariance.diagonal().mean(), CONSTANT * seen)
            matrices = {name: self._own_matrix(name, layer, len(covariance)) for name, layer in some.items()}
            if ridge > 0:
                rights = [
                    (name, outputs[name].moment(centred=centred) + ridge * own) for name, own in matrices.items()
                ]
                matrices = dict(solved(covariance, ridge, rights))
            for name, layer in some.items():
                metric = partial(self._metric, name, covariance, matrices[name].shape[1])
                form = self._form(name, layer)
                layer.load_state_dict(form.nearest_state(layer, matrices.pop(name), bias_of(layer), metric, name=name))
                if (bias := bias_of(layer)) is not None:
                    mean_in, mean_out = outputs[name].means()
                    bias.copy_(mean_out - mean_in @ _matrix(layer, mean_in.device))
                del outputs[name]

    def _own_matrix(self, name: str, layer: nn.Module, inputs: int) -> Tensor:
        """What a layer's regression is shrunk towards, for so many inputs: itself, as it was in the teacher."""
        before = self.student if self.calibration is None else self.calibration.model
        own = self.built.of_teacher(name, _matrix(before.get_submodule(name), self.device))
        return own if len(own) == inputs else _matrix(layer, self.device)  # its inputs are others

    def _metric(self, name: str, covariance: Tensor, width: int) -> Metric:
        """What errors of a matrix with such inputs and so many outputs cost."""
        if self.calibration is None:
            columns, damping = (
                Damped(torch.eye(width, dtype=covariance.dtype, device=covariance.device), 0.0),
                SHRINKAGE,
            )
        else:
            columns = Damped(self.calibration.gradients([name]), GRADIENT_DAMPING)
            damping = self.calibration.shrinkage
        return Metric(Damped(covariance, damping), columns)

    def _form(self, name: str, layer: nn.Module) -> type[Form]:
        """What a layer has become, or was before."""
        for report in self.built.reports:
            if report.name == short_name(name):
                return find_form(report.form)
        return next((form for form in all_forms() if form.holds(layer)), Form)


def _outputs(student: Walk, teacher: Walk, name: str, depth: int, index: int) -> tuple[Tensor, Tensor]:
    """What two walks' norms within a layer give of a batch, tokens×d."""
    states = student.inputs(depth, index, [name])[name][student.mask(stream_of(name), index)]
    return student.module(name, depth)(states), teacher.output(name, index)


def _results(walks: Sequence[Walk], index: int) -> tuple[Tensor, ...]:
    """What two walks' stacks give of a batch, tokens×d."""
    return tuple(walk.result(index)[walk.mask(stream_of(f"model.{walk.name}."), index)] for walk in walks)


def _norms(model: PreTrainedModel, stack: str) -> list[str]:
    """Names of a stack's, but for that of the embeddings."""
    places = (f"model.{stack}.layers.", f"model.{stack}.layer_norm")
    return [name for name, module in model.named_modules() if name.startswith(places) and isinstance(module, NORMS)]


def _linear_layers(model: PreTrainedModel, stack: str) -> list[tuple[str, int]]:
    """Names of a stack's, and the depths of their layers."""
    prefix = f"model.{stack}.layers."
    names = [name for name, kind in find_matrices(model) if kind != "embedding" and name.startswith(prefix)]
    return [(name, int(name.removeprefix(prefix).partition(".")[0])) for name in names]


def _matrix(module: nn.Module, device: torch.device) -> Tensor:
    """W, inputs×outputs, double."""
    return product_of(module, torch.float64, device)
