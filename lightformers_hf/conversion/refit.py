"""Refit: every linear layer and norm learns to give the teacher's outputs from the inputs that it now gets.

Front to back in one pass, by fits on the calibration sentences; no labels, no back-propagation. In the same way
the layers that stay learn to do the work of removed ones. In the end the probabilities of tokens are balanced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..matrices import STACKS, Weight, bias_of, product_of
from ..models.configuration_lightformer import FactorizedConfig, LightFormerConfig
from ..processors import give_back_memory
from .forms import Form, all_forms, change_moment, change_outputs
from .moments import GRADIENT_DAMPING, ROOM, Damped, Metric, PairMoments, TensorStore, WeightedRows
from .options import StudyOptions
from .report import Agreement
from .sensitivity import (
    LOGIT_ROWS,
    SHRINKAGE,
    Batch,
    Calibration,
    adapt_share,
    cut_batches,
    encoder_inputs,
    memory_mask,
    model_inputs,
    predicted_mask,
    stream_of,
    target_states,
    token_mask,
)
from .sharing import find_matrices
from .workers import (
    AT_ONCE,
    Step,
    algebra_device,
    cast_weights,
    fast_passes,
    fast_products,
    map_in_threads,
    packed_attention,
)

# Weight of the layer's matrix in the fit, relative to the mean variance of its inputs.
RIDGE, SELF_GENERATED_RIDGE = 1e-2, 0.1
# The same for inputs from an encoder of sound, also in the metric: its positions are alike. Beside 1e-3, the
# divergence on other speech is 5 % lower in whisper-base, and 6 % in tiny.en.
SOUND_RIDGE = 0.1
# Share of the accumulated error of the hidden states that is corrected.
CORRECTED = 0.5
# At least this share of their mean square: the variance that rounding in float32 leaves for constant inputs.
CONSTANT = 1e-6
# Tokens of a batch.
TOKENS = 1024
# To compare candidates, every n-th batch is used, and so many at least.
THINNED, FEWEST_BATCHES = 4, 8
NORMS = (nn.LayerNorm, nn.RMSNorm)
# Parts of a layer, each with its norm and its residual connection, in the order of their calls.
SUBLAYERS = ("self_attn", "encoder_attn", "network")
# Target tokens whose probabilities are balanced, about; steps that balance them, occurrences of each that are added to
# those seen, and the nats per token that they must gain together.
BALANCED, BALANCING, SMOOTHING, WORTH_BALANCING = 8192, 4, 0.5, 0.04
# For `encoder` and `decoder`, indices of the teacher's layers that correspond to the layers of another model.
Depths = Mapping[str, Sequence[int]]


def can_refit(config: FactorizedConfig, study: StudyOptions) -> bool:
    """Whether layers are refitted to the teacher's outputs: by default, if no layer is shared."""
    possible = isinstance(config, LightFormerConfig) and not (config.encoder_groups or config.decoder_groups)
    if study.refit and not possible:
        raise ValueError(
            "refit is True, but shared layers have several places, which one fit cannot serve, and only a "
            "LightFormer's are known one by one: remove refit or the groups"
        )
    return possible and study.refit is not False


def find_refitted(model: PreTrainedModel) -> list[str]:
    """Return the names of the linear layers that are refitted, whose values before do not matter."""
    return _find_modules(model, *(f"model.{stack}.layers." for stack in STACKS))[0]


@torch.no_grad()
def refit(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    depths: Depths,
    calibration: Calibration,
    coordinates: Mapping[str, Tensor],
    returns: Mapping[str, Tensor],
    *,
    every: int = 1,
    maps: Mapping[str, Tensor],
) -> None:
    """Refit a smaller model's layers to the teacher's outputs by least squares, in place, and balance its logits.

    Only `every` so many batches are used. `maps`: see `width.output_maps`, empty unless features were removed.
    """
    store = TensorStore(teacher.device)
    batches = cut_batches(calibration.batches, TOKENS)
    given = coordinates, returns, 1 if maps else CORRECTED, calibration, every, maps
    regression = Regression(student, teacher, depths, batches, store, *given)
    regression.run(tuple(depths), "refitting")
    if student.final_logits_bias is not None:
        balance(student, teacher, regression.used, store)


def thin_out(calibration: Calibration) -> int:
    """Return n, so that every n-th batch of a refit is enough to compare models: a quarter, or `FEWEST_BATCHES`."""
    return max(1, min(THINNED, len(cut_batches(calibration.batches, TOKENS)) // FEWEST_BATCHES))


@torch.no_grad()
def bridge(
    shorter: PreTrainedModel,
    teacher: PreTrainedModel,
    depths: Depths,
    batches: Sequence[Batch],
    maps: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Refit a teacher with fewer layers so that each also replaces the removed ones, by new tensors in its modules.

    A stack that has all its layers (`depths`) is unchanged, unless it reads the outputs of a shorter one. So does a
    teacher with fewer features (`maps`, see `width.output_maps`), in both stacks.
    """
    is_shorter = len(depths["encoder"]) < len(teacher.get_encoder().layers)
    stacks = tuple(depths) if maps or is_shorter else ("decoder",)
    store = TensorStore(teacher.device)
    regression = Regression(shorter, teacher, depths, cut_batches(batches, TOKENS), store, {}, {}, share=1, maps=maps)
    regression.run(stacks, "fitting layers")
    if shorter.final_logits_bias is not None:
        balance(shorter, teacher, regression.batches, store)


@dataclass(frozen=True, eq=False)
class Regression:
    """Least squares that change the linear layers and norms of `student` in place; ranks and shapes stay.

    A layer's inputs x are the student's, with all layers before it refitted. Its target y is the teacher's output, and
    where that is added to states r, of which the student has r', y + β(r − r'). W* = (E[xᵀx] + ρI)⁻¹ (E[xᵀy] + ρW),
    all centred if there is a bias. W is the layer as it was in the teacher. W* is truncated in the metric of E[xᵀx]
    and the calibration's G. The gain g of a norm becomes g + β(g* − g), with g* fitted by least squares, feature by
    feature. The norm before the output layer stays where β < 1. See docs/explanation/weighting.md.
    """

    student: PreTrainedModel  # a LightFormer without shared layers
    teacher: PreTrainedModel  # the same, dense or not
    depths: Depths  # of `encoder` and `decoder`, the teacher's layer for each of the student's
    batches: Sequence[Batch]
    store: TensorStore  # gets the states
    coordinates: Mapping[str, Tensor]  # as of `forms.Shaped`
    returns: Mapping[str, Tensor]
    share: float  # β
    # Of a model that the student was made of: it has the layers as they were, and gradients for the metric. `None`:
    # the student is that model itself, and errors of all outputs have equal weight.
    calibration: Calibration | None = None
    every: int = 1  # only every n-th batch is used
    maps: Mapping[str, Tensor] = field(default_factory=dict)  # of outputs to fewer features, as of `output_maps`

    @property
    def used(self) -> Sequence[Batch]:
        return self.batches[:: self.every]

    @property
    def device(self) -> torch.device:
        return algebra_device(self.store.device)

    @property
    def ridge(self) -> float:
        return SELF_GENERATED_RIDGE if self.calibration and self.calibration.self_generated else RIDGE

    def _adapt(self, share: float, name: str, features: int = 0) -> float:
        return adapt_share(share, self.used, name, features, SOUND_RIDGE)

    def run(self, stacks: Sequence[str], what: str) -> None:
        """Refit the layers of these stacks; for the others, only hidden states are computed."""
        total = sum(len(self.depths[stack]) for stack in stacks)
        with Step(what, total=total, unit="layer") as bar:
            for stack, depths in self.depths.items():
                student = HiddenStates("student", stack, self.student, self.used, self.store)
                teacher = HiddenStates("teacher", stack, self.teacher, self.used, self.store)
                passed = 0  # layers of the teacher
                for depth, teacher_depth in enumerate(depths):
                    for between in range(passed, teacher_depth + (stack not in stacks)):
                        teacher.advance(between)
                    passed = teacher_depth + 1
                    if stack in stacks:
                        self._regress_layer(student, teacher, depth, teacher_depth)
                        bar.update()
                    else:
                        student.advance(depth)
                if stack in stacks and self._changes(last := f"model.{stack}.layer_norm"):
                    self._fit_norm(last, student, teacher)
                student.finish()
                teacher.finish()

    def _regress_layer(self, student: HiddenStates, teacher: HiddenStates, depth: int, teacher_depth: int) -> None:
        linear, norms = _find_modules(self.student, f"model.{student.name}.layers.{depth}.")
        norms = list(filter(self._changes, norms))
        names = linear + norms
        teacher.advance(teacher_depth, names, self.share)
        for part in SUBLAYERS:
            if not (own := [name for name in names if sublayer_of(name) == part]):
                continue
            groups: dict[int, list[str]] = {}  # layers with one input are one fit, in the order of their calls
            for name, states in (seen := student.inputs(depth, 0, own)).items():
                groups.setdefault(id(states), []).append(name)
            del seen
            for group in groups.values():
                if group[0] in norms:
                    with cast_weights(student.stack.layers[depth]):
                        self._fit_norm(group[0], student, teacher, depth)
                    continue
                layers = {name: self.student.get_submodule(name) for name in group}
                with cast_weights(student.stack.layers[depth]):
                    inputs, outputs = self._sums(student, teacher, depth, layers)
                give_back_memory()
                for sums in (inputs, *outputs.values()):
                    sums.divide()
                self._solve(layers, inputs, outputs)
            student.advance(depth, part=part)
        give_back_memory()

    def _sums(
        self, student: HiddenStates, teacher: HiddenStates, depth: int, layers: dict[str, nn.Module]
    ) -> tuple[PairMoments, dict[str, PairMoments]]:
        """Sums over all batches: of the inputs of layers that share them, and of inputs with each layer's target."""
        group, width = list(layers), next(iter(layers.values())).in_features
        inputs = PairMoments(width, width, self.device)
        outputs = {name: PairMoments(width, layer.out_features, self.device) for name, layer in layers.items()}
        stream, residual = stream_of(group[0]), student.residual_of(group[0])
        counts = [int(token_mask(batch, stream).sum()) for batch in self.batches]
        if self.calibration is None:
            weights = [torch.ones(count) for count in counts]
        else:
            weights = self.calibration.token_weights(group).split(counts)
        weights = weights[:: self.every]

        def look(index: int) -> list[WeightedRows]:
            mask = student.mask(stream, index)
            found = student.inputs(depth, index, [group[0]] if residual is None else [group[0], residual])
            if group[0].endswith(".out_proj"):
                student.keep_heads(sublayer_of(group[0]), index, found[group[0]])
            rows = [found[group[0]][mask]]
            for name in group:
                aim = change_outputs(self._target(teacher, name, index), self.coordinates.get(name))
                rows.append(aim if residual is None else aim - self.share * found[residual][mask])
            return [WeightedRows.of(each, weights[index], self.device) for each in rows]

        for x, *aims in map_in_threads(look, range(len(self.used)), self.store.device, AT_ONCE):
            inputs.add(x, x)
            for name, aim in zip(group, aims, strict=True):
                outputs[name].add(x, aim)
        return inputs, outputs

    def _target(self, teacher: HiddenStates, name: str, index: int) -> Tensor:
        """Return the teacher's outputs of a module, of those features that the student has."""
        return change_outputs(teacher.output(name, index), self.maps.get(name))

    def _changes(self, name: str) -> bool:
        """Whether there is a norm of that name that is refitted."""
        module, decoder = self.student.get_submodule(name), self.student.model.decoder
        last = decoder.layer_norm
        if isinstance(last, nn.Identity) and not decoder.layers[-1].normalize_before:
            last = decoder.layers[-1].final_layer_norm
        return isinstance(module, NORMS) and (self.share == 1 or module is not last)

    def _fit_norm(self, name: str, student: HiddenStates, teacher: HiddenStates, depth: int | None = None) -> None:
        """Give a norm, of the layer at that depth or behind the stack, the regression of its gain, and its bias."""
        norm, stream = self.student.get_submodule(name), stream_of(name)
        centred = bias_of(norm) is not None
        sums = torch.zeros(5, len(norm.weight), dtype=torch.float64, device=self.device)

        def add_up(index: int) -> Tensor:
            mask = student.mask(stream, index)
            if depth is None:
                found = change_outputs(teacher.result(index)[mask], self.maps.get(name))
                outputs = student.result(index)[mask], found
            else:
                found = norm(student.inputs(depth, index, [name])[name][mask])
                outputs = found, self._target(teacher, name, index)
            x, y = (output.to(sums.device).double() for output in outputs)
            return torch.stack([x.new_full((x.shape[1],), len(x)), x.sum(0), y.sum(0), (x * x).sum(0), (x * y).sum(0)])

        for part in map_in_threads(add_up, range(len(self.used)), self.store.device, AT_ONCE):
            sums += part
        count, *others = sums
        mean_in, mean_out, square, product = (other / count for other in others)
        if not centred:
            mean_in, mean_out = torch.zeros_like(mean_in), torch.zeros_like(mean_out)
        variance, covariance = square - mean_in**2, product - mean_in * mean_out
        # Weights from the outputs of the norm, so that features count equally, whatever their gain.
        ridge = self._adapt(self.ridge, name)
        scale = (covariance / variance + ridge) / (1 + ridge)
        scale = 1 + self.share * (torch.where(variance > CONSTANT * square, scale, 1) - 1)
        scale, shift = (each.float().to(norm.weight.device) for each in (scale, mean_out - mean_in * scale))
        new = {"weight": norm.weight * scale} | ({"bias": norm.bias * scale + shift} if centred else {})
        for leaf, tensor in new.items():  # not in place, because the teacher may share the tensor
            setattr(norm, leaf, nn.Parameter(tensor.to(norm.weight.dtype), requires_grad=False))

    def _solve(self, layers: dict[str, nn.Module], inputs: PairMoments, outputs: dict[str, PairMoments]) -> None:
        """Refit layers of one input, as near as their forms can come. Removes used `outputs`."""
        before = self.student if self.calibration is None else self.calibration.model
        for centred in (False, True):
            some = {name: layer for name, layer in layers.items() if (bias_of(layer) is not None) == centred}
            if not some:
                continue
            # Nearly constant inputs leave a covariance of rounding errors; inputs that are always zero leave none.
            seen = inputs.moment(centred=False).diagonal().mean()
            covariance = inputs.moment(centred=centred)
            share = self._adapt(self.ridge, next(iter(some)), len(covariance))
            ridge = max(share * covariance.diagonal().mean(), CONSTANT * seen)
            matrices = {}  # the fit is shrunk towards them: the teacher's if its layer has these inputs
            for name, layer in some.items():
                own = change_outputs(_matrix(before.get_submodule(name), self.device), self.coordinates.get(name))
                matrices[name] = own if len(own) == len(covariance) else _matrix(layer, self.device)
            if ridge > 0:
                damped = covariance + ridge * torch.eye(len(covariance)).to(covariance)
                root, failed = torch.linalg.cholesky_ex(damped)
                rights = {name: outputs[name].moment(centred=centred) + ridge * own for name, own in matrices.items()}
                matrices = {
                    name: torch.linalg.solve(damped, right) if failed else torch.cholesky_solve(right, root)
                    for name, right in rights.items()
                }
            for name, layer in some.items():
                metric = partial(self._metric, name, covariance, matrices[name].shape[1])
                form = next((form for form in all_forms() if form.holds(layer)), Form)
                weight = Weight(matrices.pop(name), None, outputs[name].right if centred else None)
                form.fit(layer, weight, metric, name=name, split="balanced")
                if (bias := bias_of(layer)) is not None:
                    mean_in, mean_out = outputs[name].left, outputs[name].right
                    bias.copy_(mean_out - mean_in @ _matrix(layer, mean_in.device))
                del outputs[name]

    def _metric(self, name: str, covariance: Tensor, width: int) -> Metric:
        """Return the norm of errors of a matrix with such inputs and `width` outputs."""
        if self.calibration is None:
            return Metric(Damped(covariance, SHRINKAGE), Damped.identity(width, covariance))
        gradients = self.calibration.gradients([name])
        gradients = change_moment(gradients, self.coordinates.get(name), self.returns.get(name))
        columns = Damped(gradients, GRADIENT_DAMPING)
        share = self._adapt(self.calibration.shrinkage, name)
        return Metric(Damped(covariance, share), columns)


def _find_modules(model: PreTrainedModel, *paths: str) -> tuple[list[str], list[str]]:
    """Return the names of linear layers and norms that begin with one of the paths."""
    linear = [name for name, kind in find_matrices(model) if kind != "embedding" and name.startswith(paths)]
    norms = [name for name, module in model.named_modules() if name.startswith(paths) and isinstance(module, NORMS)]
    return linear, norms


def _matrix(module: nn.Module, device: torch.device) -> Tensor:
    """W, inputs×outputs, double."""
    return product_of(module, torch.float64, device)


class _StopError(Exception):
    """Ends a forward pass after the last layer that is needed."""


class HiddenStates:
    """The hidden states of all batches on their way through one stack of one model, several batches at a time."""

    def __init__(self, who: str, name: str, model: PreTrainedModel, batches: Sequence[Batch], store: TensorStore):
        self.who, self.name, self.stack, self.device = who, name, getattr(model.model, name), model.device
        self.batches, self.store = batches, store
        self.recorded: set[str] = set()  # modules within a layer
        self._kept: dict[int, tuple[list[Tensor | None], dict[str, Any]]] = {}
        self._attended: dict[int, str] = {}  # of each batch the sublayer whose heads' outputs are stored
        self._room = ROOM
        self._each_batch(lambda index: self._put(index, self._arguments(index)[0][0]))

    def _each_batch(self, work: Callable[[int], None]) -> None:
        for _ in map_in_threads(work, range(len(self.batches)), self.device, AT_ONCE):
            pass

    def _put(self, index: int, states: Tensor) -> None:
        self.store[self.who, self.name, index] = states

    def _arguments(self, index: int, states: Tensor | None = None) -> list[Any]:
        """Return the first layer's arguments for a batch: hidden states and common arguments; then those by name.

        If only the others are needed, the `states` of the batch replace its embeddings, which take longer.
        """
        batch = model_inputs(self.batches[index], self.device)
        found: list[Any] = []

        def see(module: nn.Module, args: tuple, kwargs: dict) -> None:
            found.extend((args, kwargs))
            raise _StopError

        given: dict[str, Any] = encoder_inputs(batch)
        if self.name == "decoder":
            memory, mask = self.store[self.who, "encoder", index], memory_mask(batch)
            given = {"encoder_hidden_states": memory, "encoder_attention_mask": mask, "use_cache": False}
            given["input_ids"] = batch["decoder_input_ids"]
            if "decoder_position_ids" in batch:
                given["position_ids"] = batch["decoder_position_ids"]
        if states is not None:
            given |= {self.stack.main_input_name: None, "inputs_embeds": states}
        register = partial(self.stack.layers[0].register_forward_pre_hook, with_kwargs=True)
        _run_with([(register, see)], partial(self.stack, **given))
        return found

    def _common(self, index: int, states: Tensor) -> tuple[list[Tensor | None], dict[str, Any]]:
        """Return the arguments of every layer for a batch besides its states. Small ones are computed once."""
        if index not in self._kept:
            (_, *args), kwargs = self._arguments(index, states)
            own = [args[0], *args[2:]]  # the second are the encoder's states
            size = sum(value.nbytes for value in (*own, *kwargs.values()) if isinstance(value, Tensor))
            if size > self._room:
                return args, kwargs
            self._room -= size
            self._kept[index] = own, kwargs
        (mask, *others), kwargs = self._kept[index]
        memory = [self.store[self.who, "encoder", index]] if self.name == "decoder" else []
        return [mask, *memory, *others], kwargs

    def call(self, depth: int, index: int, part: str | None = None) -> Tensor:
        """Pass a batch from in front of a layer, or a sublayer of it, through it, and return its states."""
        states, layer = self.store[self.who, self.name, index], self.stack.layers[depth]
        (mask, *cross), options = self._common(index, states)
        with fast_passes(self.device), packed_attention(self.batches[index]):
            if part is None:
                return layer(states, mask, *cross, **options)
            if part == "network":
                return layer.feed_forward(states, layer.final_layer_norm, layer)
            options = {name: value for name, value in options.items() if name not in ("private", "cross_layer_idx")}
            if part == "encoder_attn":
                mask, options["key_value_states"] = cross[1], cross[0]
            distances = options.pop("distances", None)
            if distances is not None and part == "self_attn":
                mask = layer.relative_positions(distances, mask)
            norm, attention = layer.get_submodule(f"{part}_layer_norm"), layer.get_submodule(part)
            if self._attended.get(index) == part:
                return layer.add(states, attention.out_proj(self.store[self.who, "heads", index]), norm)
            return layer.attend(states, norm, attention, attention_mask=mask, **options)

    def keep_heads(self, part: str, index: int, outputs: Tensor) -> None:
        """Store what the heads of a sublayer give for a batch, until its states are behind the sublayer."""
        self.store[self.who, "heads", index] = outputs
        self._attended[index] = part

    def result(self, index: int) -> Tensor:
        """Return the output of the stack for a batch that has passed the last layer."""
        return self.stack.layer_norm(self.store[self.who, self.name, index])

    def finish(self) -> None:
        """Put the states behind the stack, and remove outputs of modules, and after a decoder the encoder's states."""
        for index in range(len(self.batches)):
            self._put(index, self.result(index))
            for key in [(self.who, name, index) for name in self.recorded]:
                if key in self.store:
                    del self.store[key]
            if self.name == "decoder":
                del self.store[self.who, "encoder", index]

    def residual_of(self, name: str) -> str | None:
        """Return the module to whose input the output of the module `name` is added; `None` without one."""
        path, _, part = name.rpartition(".")
        before = self.stack.layers[0].normalize_before
        if part == "fc2":
            return f"{path}.final_layer_norm" if before else f"{path}.fc1"
        if part == "out_proj":
            return f"{path}_layer_norm" if before else path
        return None

    def inputs(self, depth: int, index: int, names: list[str]) -> dict[str, Tensor]:
        """Return the inputs of modules of one sublayer, in front of which the states are, in the order of their calls.

        The pass ends there.
        """
        found: dict[str, Tensor] = {}

        def see(name: str, module: nn.Module, arguments: tuple) -> None:
            found[name] = arguments[0]
            if len(found) == len(names):
                raise _StopError

        hooks = [(self.module(name, depth).register_forward_pre_hook, partial(see, name)) for name in names]
        _run_with(hooks, partial(self.call, depth, index, sublayer_of(names[0])))
        return found

    def advance(self, depth: int, names: Sequence[str] = (), share: float = 0.0, *, part: str | None = None) -> None:
        """Put the states behind the layer, or one of its sublayers, and store the outputs of its modules `names`.

        Outputs are stored where tokens count. The names may be of a model with other depths. A `share` of what an
        output is added to is added to what is stored.
        """

        def pass_batch(index: int) -> None:
            added: dict[str, Tensor] = {}

            def see_input(name: str, module: nn.Module, arguments: tuple) -> None:
                added[name] = arguments[0]

            def see(name: str, module: nn.Module, arguments: tuple, output: Tensor) -> None:
                output = output + share * added.pop(name) if name in added else output
                self.store[self._key(name, index)] = output[self.mask(stream_of(name), index)]

            hooks = [(self.module(name, depth).register_forward_hook, partial(see, name)) for name in names]
            for name in names:
                if (residual := self.residual_of(name)) is not None:
                    hooks.append((self.module(residual, depth).register_forward_pre_hook, partial(see_input, name)))
            self._put(index, _run_with(hooks, partial(self.call, depth, index, part)))
            self._attended.pop(index, None)

        with cast_weights(self.stack.layers[depth]):
            self._each_batch(pass_batch)
        self.recorded.update(map(_within_layer, names))

    def output(self, name: str, index: int) -> Tensor:
        """Return the output of a module of the layer that was recorded last, tokens×n."""
        return self.store[self._key(name, index)]

    def module(self, name: str, depth: int) -> nn.Module:
        """Return the module of that name within a layer, at another depth."""
        return self.stack.layers[depth].get_submodule(_within_layer(name))

    def mask(self, stream: str, index: int) -> Tensor:
        """Return the mask of a batch's tokens, on the device of the model."""
        return token_mask(self.batches[index], stream).to(self.device)

    def _key(self, name: str, index: int) -> tuple[str, str, int]:
        """Key of a module's output: equal for all layers, so that each replaces the one before."""
        return self.who, _within_layer(name), index


def _run_with(hooks: Sequence[tuple[Callable, Callable]], run: Callable[[], Any]) -> Any:
    """Return the result of `run`, or `None` if a hook raises `_StopError`.

    Each hook has the method of a module that registers it, and sees the passes of this thread alone.
    """
    thread = get_ident()

    def only_here(hook: Callable) -> Callable:
        return lambda *arguments: hook(*arguments) if get_ident() == thread else None

    handles = [register(only_here(hook)) for register, hook in hooks]
    try:
        return run()
    except _StopError:
        return None
    finally:
        for handle in handles:
            handle.remove()


def sublayer_of(name: str) -> str:
    """Return the sublayer, one of `SUBLAYERS`, of a module of a layer."""
    return next((part for part in SUBLAYERS if f".{part}" in name), SUBLAYERS[-1])


def _within_layer(name: str) -> str:
    """`model.decoder.layers.3.self_attn.q_proj` → `self_attn.q_proj`."""
    return name.split(".", 4)[4]


@torch.no_grad()
def balance(student: PreTrainedModel, teacher: PreTrainedModel, batches: Sequence[Batch], store: TensorStore) -> None:
    """Scale tokens' probabilities by e^b until their means are the teacher's: then no b has a lower cross-entropy.

    Every step, b += log(teacher's mean / own mean), lowers it (Darroch and Ratcliff 1972), each by less than the one
    before. If all gain little, b stays. The probabilities p become p·e^b / Z, Z the sum of p·e^b over the
    tokens: in the cross-entropy, only log Z − b·(teacher's) changes.
    """
    device = algebra_device(store.device)
    every = max(1, sum(int(predicted_mask(batch).sum()) for batch in batches) // BALANCED)
    target = torch.zeros(student.final_logits_bias.numel(), dtype=torch.float64, device=device)
    with cast_weights(teacher.lm_head):
        for probabilities in _probabilities("teacher", teacher, batches, store, every):
            target += probabilities.sum(0).to(device)
    shift = torch.zeros_like(target)
    losses: list[float] = []  # cross-entropy before and after each step, nats a token, but for a constant
    worth = True
    for step in Step("balancing", range(BALANCING + 1), unit="step"):
        if not worth:
            continue
        own, log = torch.zeros_like(target), target.new_zeros(1)
        scale = shift.exp().float().to(student.device)
        with cast_weights(student.lm_head):
            for weights in _probabilities("student", student, batches, store, every):
                sums = weights @ scale
                log += sums.log().sum().to(device)
                own += (sums.reciprocal() @ weights).mul_(scale).to(device)
        losses.append(((log - shift @ target) / target.sum()).item())
        if step:
            still = (BALANCING - step) * (losses[-2] - losses[-1])
            worth = losses[0] - losses[-1] + still >= WORTH_BALANCING
        if step < BALANCING:
            shift += ((target + SMOOTHING) / (own + SMOOTHING)).log()
    if worth:
        # A new buffer, because the teacher may share the existing one.
        student.final_logits_bias = student.final_logits_bias + shift.float().to(student.device)


def _probabilities(
    who: str, model: PreTrainedModel, batches: Sequence[Batch], store: TensorStore, every: int
) -> Iterator[Tensor]:
    """Yield the probabilities of all tokens at every n-th target token, tokens×V, a few tokens at a time."""
    for index, batch in enumerate(batches):
        states = store[who, "decoder", index]
        for part in states[predicted_mask(batch).to(states.device)][::every].split(LOGIT_ROWS):
            with fast_products(part.device):
                logits = model.logits_of(part)
            yield logits.float().softmax(-1)


@torch.no_grad()
def compare(
    student: PreTrainedModel, teacher: PreTrainedModel, batches: Sequence[Batch], outputs: Sequence[Batch] = ()
) -> Agreement:
    """Compare the predictions of two models after every target prefix of some batches.

    `outputs` are batches whose targets are the teacher's greedy outputs. The model gives such an output exactly if it
    predicts every one of its tokens. Tokens that the teacher does not predict are forced by its rules.
    """
    equal, tokens, divergence, exact = 0, 0, 0.0, 0
    with cast_weights(student), cast_weights(teacher), fast_products(teacher.device):
        for batch in batches:
            for predicted, wanted in _both_logits(student, teacher, batch):
                equal += int((predicted.argmax(-1) == wanted.argmax(-1)).sum())
                tokens += len(wanted)
                divergence += total_divergence(predicted, wanted).item()
        for batch in outputs:
            pairs = [[each.argmax(-1) for each in both] for both in _both_logits(student, teacher, batch)]
            predicted, wanted = (torch.cat(side).cpu() for side in zip(*pairs, strict=True))
            mask = predicted_mask(batch)
            differs = (predicted != wanted) & (wanted == batch["labels"][mask])
            exact += len(mask) - len(mask.nonzero()[differs, 0].unique())
    texts = sum(len(batch["labels"]) for batch in outputs)
    share = exact / texts if texts else None
    nats = max(divergence / tokens, 0.0)  # rounding may leave less; NaN stays NaN
    return Agreement(share=equal / tokens, tokens=tokens, held_out=False, divergence=nats, exact=share, texts=texts)


def total_divergence(predicted: Tensor, wanted: Tensor) -> Tensor:
    """The sum of the KL divergences of predictions from those wanted, both logits at tokens (tokens×V), in nats."""
    log_q, log_p = (logits.float().log_softmax(-1) for logits in (predicted, wanted))
    # Where tokens are forbidden both are minus infinity.
    return torch.where(log_p.isfinite(), log_p.exp() * (log_p - log_q), 0).sum()


def _both_logits(
    student: PreTrainedModel, teacher: PreTrainedModel, batch: Batch
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the logits of both models at the target tokens of a batch, some rows at a time."""
    states = [target_states(model, batch).split(LOGIT_ROWS) for model in (student, teacher)]
    for found, expected in zip(*states, strict=True):
        yield student.logits_of(found), teacher.logits_of(expected)
