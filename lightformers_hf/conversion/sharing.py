"""Several layers of a trained model become one that they share (docs/explanation/sharing.md; LightFormer, §3.2).

`align_bases` gives each layer of a group the order of heads and neurons and the bases of the first one, `merge_linear`
merges them where their inputs are. `Originals` are the matrices that result, from which every form starts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..checkpoints.teacher import Teacher
from ..loading import skeleton, stored_tensors
from ..matrices import STACKS, Weight, bias_of
from ..models.configuration_lightformer import RELATIVE_POSITIONS, LightFormerConfig, check_groups
from ..models.stack import group_layers
from ..options import OptionError
from .moments import INPUT_DAMPING, Metric, damped_root
from .options import GROUPS, CompressionOptions, StudyOptions
from .rules import RankPolicy
from .sensitivity import Calibration


def short_name(name: str) -> str:
    """A module's name as patterns have it: without the head's `model.`."""
    return name.removeprefix("model.")


def find_matrices(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """(module name, kind) of every matrix of a model that may become low-rank, each stored one once."""
    ties = model.get_expanded_tied_weights_keys(all_submodels=True)
    for name, module in model.named_modules():
        if hasattr(module, "kind") and f"{name}.weight" not in ties:
            yield name, module.kind


def source_names(name: str, source: PreTrainedConfig, target: PreTrainedConfig) -> list[str]:
    """Names of the source's tensors that the target's tensor `name` is made of, one for every depth it serves.

    `source` and `target` are configurations of one family, with `{stack}_layers` and maybe `{stack}_groups`.
    """
    match = re.match(r"(.*)(encoder|decoder)\.(layers|depths)\.(\d+)\.(.+)", name)
    if match is None:
        return [name]
    head, stack, part, index, rest = match.groups()
    layers = getattr(target, f"{stack}_layers")
    source_groups, target_groups = (getattr(config, f"{stack}_groups", None) for config in (source, target))
    if source_groups == target_groups:
        return [name]
    if part == "depths":  # separate for each depth, also in the source, unless all of its layers are separate
        return [f"{head}{stack}.{'layers' if source_groups is None else 'depths'}.{index}.{rest}"]
    depths = [depth for depth, group in enumerate(group_layers(layers, target_groups)) if group == int(index)]
    stored = [group_layers(layers, source_groups)[depth] for depth in depths]
    return [f"{head}{stack}.layers.{layer}.{rest}" for layer in stored]


def share_layers(
    teacher: Teacher, options: CompressionOptions, study: StudyOptions, others: Mapping[str, object] | None = None
) -> PreTrainedModel:
    """Skeleton of the result before any matrix gets smaller: dense, its layers in the groups that are asked for.

    `others` are more fields of its configuration.
    """
    own, fields = teacher.config, {}
    for name in GROUPS:
        if (asked := getattr(options, name)) is not None and not hasattr(own, name):
            raise OptionError(
                name, f" is {asked}, but layers of a {own.model_type} are shared as its training had them: remove it"
            )
        if asked is not None and asked != getattr(own, name):
            try:
                check_groups(name, asked, getattr(own, name.replace("groups", "layers")))
            except ValueError as error:
                raise OptionError(name, str(error).removeprefix(name)) from None
            fields[name] = asked
    if fields and isinstance(own, LightFormerConfig):
        name, asked = next(iter(fields.items()))
        shapes = [field for field in own.patterns if field not in own.matrix_fields]
        if held := [field for field in shapes if getattr(own, field)]:
            raise OptionError(
                name,
                f" is {asked}, but layers of {teacher.name} differ in shape ({held[0]}) and can't be merged: "
                "share the layers of its own teacher",
            )
        if (own.encoder_groups or own.decoder_groups) and own.share_layer_norms != study.share_layer_norms:
            raise OptionError(
                name,
                f" is asked with share_layer_norms={study.share_layer_norms}, but layers of {teacher.name} are "
                f"shared with share_layer_norms={own.share_layer_norms}: leave the groups as they are, or share the "
                "layers of its own teacher",
            )
        fields["share_layer_norms"] = study.share_layer_norms
    dense = dict.fromkeys((*own.matrix_fields, "architectures"))
    return skeleton(type(teacher.model), type(own)(**{**own.to_dict(), **(others or {}), **fields, **dense}))


def can_align(teacher: Teacher, dense: PreTrainedModel, options: CompressionOptions) -> bool:
    """Whether layers of new groups are aligned before they are merged: their attention has a matrix for each part."""
    own = teacher.config
    if options.method == "paper" or not isinstance(own, LightFormerConfig):
        return False
    is_new = any(getattr(own, name) != getattr(dense.config, name) for name in GROUPS)
    return is_new and own.attention_output_projection and not own.joint_qkv


class Bases(NamedTuple):
    """Other bases for the inputs and outputs of a linear layer, each as `change_basis` takes them."""

    inputs: Tensor | None = None
    outputs: Tensor | None = None

    def of(self, layer: Weight) -> Weight:
        """The layer between them; itself where neither basis changes."""
        if self.inputs is None and self.outputs is None:
            return layer
        bias = None if layer.bias is None else change_basis(layer.bias, self.outputs)
        return Weight(change_basis(layer.product(), self.inputs, self.outputs), None, bias)


def change_basis(tensor: Tensor, *bases: Tensor | None) -> Tensor:
    """`tensor` with every axis in another orthonormal basis.

    Args:
        bases: one an axis: a matrix whose columns are the new basis, or the old indices in a new order, or `None`.
    """
    for axis, basis in enumerate(bases):
        if basis is not None and basis.ndim == 1:
            tensor = tensor.index_select(axis, basis)
        elif basis is not None:
            tensor = torch.tensordot(tensor, basis.to(tensor.dtype), dims=([axis], [0])).movedim(-1, axis)
    return tensor


@torch.no_grad()
def align_bases(
    layers: Sequence[Mapping[str, Weight]],
    heads: int,
    moments: Sequence[Mapping[str, Tensor]] | None = None,
    ordered: Collection[str] = (),
) -> list[dict[str, Bases]]:
    """For each layer of a group, bases that bring it near to the first one and do not change its outputs.

    Heads are matched by their functions, W_Q W_Kᵀ and W_V W_O, neurons by W_1, b_1 and W_2: the assignment of the
    least sum of squared distances, each kind relative to its size. W_Q and W_K share a basis inside each head, and so
    do W_V and W_O, turned by the rotations nearest to the first layer's (orthogonal Procrustes problem).

    Args:
        layers: the linear layers by their names within the layer: `self_attn.q_proj`, …, `fc2`. Others are left alone.
        heads: H of each attention.
        moments: E[xᵀx] of the inputs of every linear layer, for distances between outputs; `None`: between matrices.
        ordered: attentions, `self_attn.`, whose heads stay where they are: biases of relative positions are theirs.
    """
    attentions = [name.removesuffix("out_proj") for name in layers[0] if name.endswith("out_proj")]
    bases: list[dict[str, Bases]] = [{}]
    first = layers[0]
    for number, second in enumerate(layers[1:], 1):
        inputs: dict[str, Tensor | None] = dict.fromkeys(first)
        if moments is not None:
            inputs = {name: (moments[0][name] + moments[number][name]).double() / 2 for name in first}
        own: dict[str, Bases] = {}
        for name in attentions:
            own |= _head_bases(name, (first, second), heads, inputs, keep_order=name in ordered)
        if "fc1" in first:
            front = [part for part in ("fc_gate", "fc1") if part in first]
            alike = _relative(first["fc2"].product(torch.float64).T, second["fc2"].product(torch.float64).T)
            for part in front:
                alike += _relative(_rows(first[part]), _rows(second[part]), inputs[part])
            order = _match(alike)
            own |= {**dict.fromkeys(front, Bases(outputs=order)), "fc2": Bases(inputs=order)}
        bases.append(own)
    return bases


def merge_linear(layers: Sequence[Weight], moments: Sequence[tuple[Tensor, Tensor]] | None = None) -> Weight:
    """One layer for several, all with a bias or none: the least Σ E‖y_l − y‖² over W and b together.

    W̄ = (Σ C_l)⁻¹ Σ C_l W_l is computed as the plain mean and a correction: directions without inputs have the mean.
    The `moments` are E[xᵀx] and E[x] of each one's inputs; `None` gives the plain mean.
    """
    dtype, bias, stacked = layers[0].left.dtype, layers[0].bias, [_rows(layer) for layer in layers]
    merged = torch.stack(stacked).mean(0)
    if moments is not None:
        seconds = [second.double() for second, _ in moments]
        if bias is not None:  # as one more input, which is 1
            seconds = [
                torch.cat([torch.cat([second, mean[:, None]], 1), torch.cat([mean, mean.new_ones(1)])[None]]).double()
                for second, mean in moments
            ]
        pull = sum(second @ (weight - merged) for weight, second in zip(stacked, seconds, strict=True))
        merged = merged + torch.cholesky_solve(pull, damped_root(sum(seconds), INPUT_DAMPING))
    if bias is None:
        return Weight(merged.to(dtype))
    return Weight(merged[:-1].to(dtype), None, merged[-1].to(bias.dtype))


def _rows(layer: Weight) -> Tensor:
    """W with b below it, (m+1)×n."""
    matrix = layer.product(torch.float64)
    return matrix if layer.bias is None else torch.cat([matrix, layer.bias[None].double()])


def _relative(first: Tensor, second: Tensor, moment: Tensor | None = None) -> Tensor:
    """Inner products of the columns of two matrices, relative to the size of both, weighted by C (a bias by 1)."""
    weighted = [first, second]
    if moment is not None:
        weighted = [torch.cat([moment @ weight[: len(moment)], weight[len(moment) :]]) for weight in weighted]
    sizes = (first * weighted[0]).sum() * (second * weighted[1]).sum()
    return first.T @ weighted[1] / sizes.sqrt().clamp(min=torch.finfo(torch.float64).tiny)


def _match(alike: Tensor) -> Tensor:
    """For every row, the column that is matched to it."""
    return torch.from_numpy(linear_sum_assignment(alike.cpu().numpy(), maximize=True)[1]).to(alike.device)


def _head_bases(
    name: str,
    pair: Sequence[Mapping[str, Weight]],
    heads: int,
    inputs: Mapping[str, Tensor | None],
    *,
    keep_order: bool,
) -> dict[str, Bases]:
    """The bases of one attention, from the matrices that each belongs to. Softmax ignores a key's bias."""
    query, key, value, out = (f"{name}{part}_proj" for part in ("q", "k", "v", "out"))
    scores = [(_rows(layer[query]), layer[key].product(torch.float64)) for layer in pair], (inputs[query], inputs[key])
    values = [(_rows(layer[value]), layer[out].product(torch.float64).T) for layer in pair], (inputs[value], None)
    crosses: list[Tensor] = []
    alike = torch.zeros((), dtype=torch.float64, device=pair[0][out].left.device)
    for (first, second), moments in (scores, values):
        between, *own = (
            [_relative(a, b, moment) for a, b, moment in zip(left, right, moments, strict=True)]
            for left, right in ((first, second), (first, first), (second, second))
        )
        sizes = [_blocks(first * other, heads).sum((2, 3)).trace() for first, other in own]
        size = torch.stack(sizes).prod().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
        alike = alike + _blocks(between[0] * between[1], heads).sum((2, 3)) / size
        crosses.append(_blocks(between[0] + between[1], heads))
    order = torch.arange(heads, device=alike.device) if keep_order else _match(alike)
    bases = []
    for cross in crosses:
        each = torch.arange(heads, device=order.device)
        left, _, right = torch.linalg.svd(cross[each, order])
        width = left.shape[-1]
        basis = left.new_zeros(heads, width, heads, width)
        basis[order, :, each] = (left @ right).mT
        bases.append(basis.flatten(0, 1).flatten(1))
    of_scores, of_values = bases
    values_of = {value: Bases(outputs=of_values), out: Bases(inputs=of_values)}
    return {**dict.fromkeys((query, key), Bases(outputs=of_scores)), **values_of}


def _blocks(cross: Tensor, heads: int) -> Tensor:
    """(H·w)×(H·w) → H×H×w×w."""
    return cross.unflatten(0, (heads, -1)).unflatten(2, (heads, -1)).transpose(1, 2)


@dataclass(frozen=True, eq=False)
class Originals:
    """The matrices that forms start from: layers of a group merged."""

    teacher: Teacher
    dense: PreTrainedModel  # skeleton of the result before anything gets smaller
    policy: RankPolicy  # the rules of its matrices
    is_aligned: bool = False  # layers of a group are merged by their inputs, after alignment; else their mean
    calibration: Calibration | None = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009, immutable
    bases: dict[str, Bases] = field(default_factory=dict)  # bases of a teacher's module, in which it is merged
    narrowed: float = 1.0  # features of the hidden states before and after some are removed, as a quotient
    added: int = 0  # parameters that no matrix has and the teacher has not: positions, if features are removed
    is_truncated_first: bool = False  # low-rank matrices of a group are truncated one by one, before they are merged
    _merged: dict[str, Weight] = field(default_factory=dict)

    def sources(self, name: str) -> list[str]:
        """The teacher's modules that a module is made of."""
        names = source_names(f"{name}.", self.teacher.config, self.dense.config)
        return [module.rstrip(".") for module in names]

    def layers(self, name: str) -> list[Weight]:
        """The teacher's layers that a layer is made of, in the bases in which they are merged."""
        return [
            self.bases.get(source, Bases()).of(Weight.of(self.teacher.model.get_submodule(source)).to(self.device))
            for source in self.sources(name)
        ]

    def weight(self, name: str) -> Weight:
        """The layer, with the layers of a group merged; a single one as the teacher has it, dense or factorized."""
        if name not in self._merged:
            layers = self.layers(name)
            if len(layers) == 1:
                return layers[0]
            moments = None
            if self.is_aligned and self.calibration is not None:
                moments = [self.calibration.inputs([source]) for source in self.sources(name)]
            self._merged[name] = merge_linear(layers, moments)
        return self._merged[name]

    def metric(self, name: str, kind: str) -> Metric | None:
        """In which the matrix is truncated; `None` without calibration."""
        if self.calibration is None:
            return None
        sources = self.sources(name)
        has_bias = any(bias_of(self.teacher.model.get_submodule(source)) is not None for source in sources)
        return self.calibration.metric(sources, kind, has_bias)

    def own_module(self, name: str) -> nn.Module | None:
        """The teacher's module, from its skeleton; `None` where layers are merged."""
        sources = set(self.sources(name))
        return self.teacher.model.get_submodule(sources.pop()) if len(sources) == 1 else None

    def moments(self, name: str) -> tuple[Tensor, Tensor] | None:
        """E[xᵀx] and E[x] of the inputs; `None` without calibration."""
        return None if self.calibration is None else self.calibration.inputs(self.sources(name))

    def gradients(self, name: str) -> Tensor:
        """Σ gᵀg / target tokens at the outputs."""
        return cast(Calibration, self.calibration).gradients(self.sources(name))

    def other_tensors(self) -> dict[str, Tensor]:
        """The tensors of the result that belong to no matrix, of groups their mean: norms, positions and the like."""
        matrices, found = dict(find_matrices(self.dense)), {}
        stored = stored_tensors(self.teacher.model)
        for name in stored_tensors(self.dense):
            if name.rpartition(".")[0] not in matrices:
                sources = source_names(name, self.teacher.config, self.dense.config)
                first, *others = (stored[source] for source in sources)
                found[name] = torch.stack([first, *others]).mean(0) if others else first
        return found


def merge_layers(originals: Originals, calibration: Calibration | None) -> Originals:
    """Return the matrices with their measurements; the layers of a new group are aligned to equal bases."""
    bases: dict[str, Bases] = {}
    teacher, dense, config = originals.teacher, originals.dense, originals.teacher.config
    matrices = dict(find_matrices(dense))
    for stack in STACKS if originals.is_aligned else ():
        prefix, groups = f"model.{stack}.layers.", getattr(dense.config, f"{stack}_groups")
        names = [name.removeprefix(f"{prefix}0.") for name in matrices if name.startswith(f"{prefix}0.")]
        for group in range(groups or 0):
            sources = source_names(f"{prefix}{group}.{names[0]}", config, dense.config)
            layers = list(dict.fromkeys(source.removesuffix(names[0]) for source in sources))
            if len(layers) == 1:
                continue
            linear = [
                {name: Weight.of(teacher.model.get_submodule(layer + name)).to(originals.device) for name in names}
                for layer in layers
            ]
            seen = calibration and [
                {name: calibration.inputs([layer + name])[0] for name in names} for layer in layers
            ]
            ordered = ("self_attn.",) if config.position_embedding_type in RELATIVE_POSITIONS else ()
            own = align_bases(linear, getattr(config, f"{stack}_attention_heads"), seen, ordered)
            for layer, found in zip(layers, own, strict=True):
                bases |= {layer + name: turn for name, turn in found.items()}
    for name, own in bases.items() if calibration is not None else ():
        moments = cast(Calibration, calibration).moments[name]
        moments.replace("inputs", change_basis(moments.inputs, own.inputs, own.inputs))
        moments.vectors["mean"] = change_basis(moments.vectors["mean"], own.inputs)
        moments.replace("gradients", change_basis(moments.gradients, own.outputs, own.outputs))
    return replace(originals, calibration=calibration, bases=bases, _merged={})
