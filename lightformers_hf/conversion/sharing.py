"""Several layers of a trained model become one that they share (LightFormer, §3.2).

The output of a layer depends neither on the order of its heads and neurons, nor on the basis inside a head: two layers
that compute the same may have matrices whose mean computes nothing. `align_bases` gives each layer of a group the
order and the bases of the first one, `merge_linear` merges them where their inputs are. `Originals` are the matrices
that result, from which every form starts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..loading import skeleton, stored_tensors
from ..models.configuration_lightformer import RELATIVE_POSITIONS, LightFormerConfig
from ..models.stack import group_layers
from .moments import INPUT_DAMPING, Metric, damped_root
from .options import CompressionOptions, StudyOptions
from .sensitivity import Calibration
from .teacher import Linear, Teacher

STACKS = ("encoder", "decoder")


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
    match = re.match(
        r"(?P<head>.*)(?P<stack>encoder|decoder)\.(?P<part>layers|depths)\.(?P<index>\d+)\.(?P<rest>.+)", name
    )
    if match is None:
        return [name]
    head, stack, part, rest = match["head"], match["stack"], match["part"], match["rest"]
    layers = getattr(target, f"{stack}_layers")
    source_groups, target_groups = (getattr(config, f"{stack}_groups", None) for config in (source, target))
    if source_groups == target_groups:
        return [name]
    index = int(match["index"])
    if part == "depths":  # separate for each depth, also in the source, unless all of its layers are separate
        return [f"{head}{stack}.{'layers' if source_groups is None else 'depths'}.{index}.{rest}"]
    depths = [depth for depth, group in enumerate(group_layers(layers, target_groups)) if group == index]
    stored = [group_layers(layers, source_groups)[depth] for depth in depths]
    return [f"{head}{stack}.layers.{layer}.{rest}" for layer in stored]


def merge(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One tensor for a group: the mean of its layers' tensors in fp32, or the only one as it is."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.stack([tensor.float() for tensor in tensors]).mean(dim=0)


def new_groups(teacher: Teacher, options: CompressionOptions) -> dict[str, int]:
    """The fields of the configuration that ask for other groups than the teacher has."""
    groups = {}
    for name in ("encoder_groups", "decoder_groups"):
        if (asked := getattr(options, name)) is not None:
            if not hasattr(teacher.config, name):
                raise ValueError(
                    f"{name} is {asked}, but layers of a {teacher.config.model_type} are shared as its training "
                    "had them: remove it"
                )
            if asked != getattr(teacher.config, name):
                groups[name] = asked
    if groups and isinstance(teacher.config, LightFormerConfig):
        shapes = [field for field in teacher.config.patterns if field not in teacher.config.matrix_fields]
        if held := [field for field in shapes if getattr(teacher.config, field)]:
            raise ValueError(
                f"{next(iter(groups))} is {next(iter(groups.values()))}, but layers of {teacher.name} differ in "
                f"shape ({held[0]}) and can't be merged: share the layers of its own teacher"
            )
    return groups


def share_layers(teacher: Teacher, options: CompressionOptions, study: StudyOptions) -> PreTrainedModel:
    """Skeleton of the result before any matrix gets smaller: dense, its layers in the groups that are asked for."""
    fields: dict[str, object] = dict(new_groups(teacher, options))
    if fields and isinstance(teacher.config, LightFormerConfig):
        own = teacher.config
        if (own.encoder_groups or own.decoder_groups) and own.share_layer_norms != study.share_layer_norms:
            raise ValueError(
                f"{next(iter(fields))} is asked with share_layer_norms={study.share_layer_norms}, but layers of "
                f"{teacher.name} are shared with share_layer_norms={own.share_layer_norms}: leave the groups as they "
                "are, or share the layers of its own teacher"
            )
        fields["share_layer_norms"] = study.share_layer_norms
    dense = dict.fromkeys((*teacher.config.matrix_fields, "architectures"))
    config = type(teacher.config)(**{**teacher.config.to_dict(), **fields, **dense})
    return skeleton(teacher.model_class, config)


def can_align(teacher: Teacher, options: CompressionOptions) -> bool:
    """Whether layers of new groups are aligned before they are merged: their attention has a matrix for each part."""
    config = teacher.config
    if not (new_groups(teacher, options) and options.method != "paper" and isinstance(config, LightFormerConfig)):
        return False
    return config.attention_output_projection and not config.joint_qkv


class Bases(NamedTuple):
    """Other bases for the inputs and outputs of a linear layer, each as `change_basis` takes them."""

    inputs: Tensor | None = None
    outputs: Tensor | None = None

    def of(self, layer: Linear) -> Linear:
        """The layer between them."""
        bias = None if layer.bias is None else change_basis(layer.bias, self.outputs)
        return Linear(change_basis(layer.matrix, self.inputs, self.outputs), bias)


def change_basis(tensor: Tensor, *bases: Tensor | None) -> Tensor:
    """`tensor` with every axis in another orthonormal basis.

    Args:
        bases: one an axis: a matrix whose columns are the new basis, or the old indices in a new order, or `None`.
            E[xᵀx] and E[x] take a `Bases`'s `inputs` for every axis, E[gᵀg] its `outputs`.
    """
    for axis, basis in enumerate(bases):
        if basis is None:
            continue
        if basis.ndim == 1:
            tensor = tensor.index_select(axis, basis)
        else:
            tensor = torch.tensordot(tensor, basis.to(tensor.dtype), dims=([axis], [0])).movedim(-1, axis)
    return tensor


@torch.no_grad()
def align_bases(
    layers: Sequence[Mapping[str, Linear]],
    heads: int,
    moments: Sequence[Mapping[str, Tensor]] | None = None,
    ordered: Collection[str] = (),
) -> list[dict[str, Bases]]:
    """For each layer of a group, bases that bring it near to the first one and do not change its outputs.

    Heads are matched by their functions, W_Q W_Kᵀ and W_V W_O, neurons by their inputs, W_1 and b_1, and by what comes
    out, W_2: the assignment of the least sum of squared distances, each kind relative to its size. W_Q and W_K share a
    basis inside each head, and so do W_V and W_O: those are turned by the rotations nearest to the first layer's
    (orthogonal Procrustes problem), because a mean is taken of matrices, not of products.

    Args:
        layers: the linear layers by their names within the layer: `self_attn.q_proj`, …, `fc2`. Others are left alone.
        heads: H of each attention.
        moments: E[xᵀx] of the inputs of every linear layer, for distances between outputs; `None`: between matrices.
        ordered: attentions, `self_attn.`, whose heads stay where they are: biases of relative positions are theirs.

    Returns:
        of every layer, linear layer → `Bases`, where it has one; the first layer has none.
    """
    attentions = [name.removesuffix("out_proj") for name in layers[0] if name.endswith("out_proj")]
    bases: list[dict[str, Bases]] = [{}]
    for number in range(1, len(layers)):
        pair = layers[0], layers[number]
        inputs: dict[str, Tensor | None] = dict.fromkeys(layers[0])
        if moments is not None:
            inputs = {name: (moments[0][name] + moments[number][name]).double() / 2 for name in layers[0]}
        own: dict[str, Bases] = {}
        for name in attentions:
            own |= _head_bases(name, pair, heads, inputs, keep_order=name in ordered)
        if "fc1" in layers[0]:
            first, second = pair
            front = [part for part in ("fc_gate", "fc1") if part in first]
            alike = _relative(first["fc2"].matrix.double().T, second["fc2"].matrix.double().T)
            for part in front:
                alike += _relative(_rows(first[part]), _rows(second[part]), inputs[part])
            order = _match(alike)
            own |= {**dict.fromkeys(front, Bases(outputs=order)), "fc2": Bases(inputs=order)}
        bases.append(own)
    return bases


def weighted_mean(matrices: Sequence[Tensor], moments: Sequence[Tensor] | None = None) -> Tensor:
    """W̄ = (Σ C_l)⁻¹ Σ C_l W_l, m×n: the least Σ E‖x_l (W_l − W̄)‖², with C_l = E[x_lᵀx_l]. Double precision.

    It is computed as the plain mean and a correction, so that directions without inputs have the plain mean.
    """
    mean = torch.stack([matrix.double() for matrix in matrices]).mean(0)
    if moments is None:
        return mean
    pull = sum(moment.double() @ (matrix - mean) for matrix, moment in zip(matrices, moments, strict=True))
    root = damped_root(sum(moment.double() for moment in moments), INPUT_DAMPING)
    return mean + torch.cholesky_solve(pull, root)


def merge_linear(layers: Sequence[Linear], moments: Sequence[tuple[Tensor, Tensor]] | None = None) -> Linear:
    """One layer for several: the least Σ E‖y_l − y‖² over W and b together, in the matrices' own precision.

    Args:
        layers: all with a bias, or none.
        moments: E[xᵀx] and E[x] of each one's inputs; `None` gives the plain mean.
    """
    matrix, bias = layers[0]
    if bias is None:
        mean = weighted_mean([layer.matrix for layer in layers], moments and [second for second, _ in moments])
        return Linear(mean.to(matrix.dtype), None)
    augmented = moments and [
        torch.cat([torch.cat([second, mean[:, None]], 1), torch.cat([mean, mean.new_ones(1)])[None]])
        for second, mean in moments
    ]
    both = weighted_mean([_rows(layer) for layer in layers], augmented)
    return Linear(both[:-1].to(matrix.dtype), both[-1].to(bias.dtype))


def _rows(layer: Linear) -> Tensor:
    """W with b below it, (m+1)×n."""
    return torch.cat([layer.matrix, layer.bias[None]]).double() if layer.bias is not None else layer.matrix.double()


def _weighed(matrix: Tensor, moment: Tensor | None) -> Tensor:
    """C·W; a row below those of C (a bias) has the weight 1."""
    if moment is None:
        return matrix
    return torch.cat([moment @ matrix[: len(moment)], matrix[len(moment) :]])


def _relative(first: Tensor, second: Tensor, moment: Tensor | None = None) -> Tensor:
    """Inner products of the columns of two matrices, relative to the size of both."""
    weighed = _weighed(second, moment)
    sizes = (first * _weighed(first, moment)).sum() * (second * weighed).sum()
    return first.T @ weighed / sizes.sqrt().clamp(min=torch.finfo(torch.float64).tiny)


def _match(alike: Tensor) -> Tensor:
    """For every row, the column that is matched to it."""
    return torch.from_numpy(linear_sum_assignment(alike.cpu().numpy(), maximize=True)[1]).to(alike.device)


def _head_bases(
    name: str,
    pair: Sequence[Mapping[str, Linear]],
    heads: int,
    inputs: Mapping[str, Tensor | None],
    *,
    keep_order: bool,
) -> dict[str, Bases]:
    """The bases of one attention, from the matrices that each belongs to: both have it as their columns.

    A key's bias adds the same to all scores of a query, which softmax takes away again.
    """
    query, key, value, out = (f"{name}{part}_proj" for part in ("q", "k", "v", "out"))
    scores = [(_rows(layer[query]), layer[key].matrix.double()) for layer in pair], (inputs[query], inputs[key])
    values = [(_rows(layer[value]), layer[out].matrix.double().T) for layer in pair], (inputs[value], None)
    crosses: list[Tensor] = []
    alike = torch.zeros((), dtype=torch.float64, device=pair[0][out].matrix.device)
    for (first, second), moments in (scores, values):
        between, *own = (
            [_relative(a, b, moment) for a, b, moment in zip(left, right, moments, strict=True)]
            for left, right in ((first, second), (first, first), (second, second))
        )
        sizes = [_blocks(one * other, heads).sum((2, 3)).trace() for one, other in own]
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
    return {
        query: Bases(outputs=bases[0]),
        key: Bases(outputs=bases[0]),
        value: Bases(outputs=bases[1]),
        out: Bases(inputs=bases[1]),
    }


def _blocks(cross: Tensor, heads: int) -> Tensor:
    """(H·w)×(H·w) → H×H×w×w."""
    return cross.unflatten(0, (heads, -1)).unflatten(2, (heads, -1)).transpose(1, 2)


def find_bases(
    teacher: Teacher, dense: PreTrainedModel, calibration: Calibration | None, device: torch.device
) -> dict[str, Bases]:
    """Teacher's module → bases in which the layers of each new group are similar."""
    bases: dict[str, Bases] = {}
    config, matrices = teacher.config, dict(find_matrices(dense))
    for stack in STACKS:
        prefix, groups = f"model.{stack}.layers.", getattr(dense.config, f"{stack}_groups")
        names = [name.removeprefix(f"{prefix}0.") for name in matrices if name.startswith(f"{prefix}0.")]
        for group in range(groups or 0):
            sources = source_names(f"{prefix}{group}.{names[0]}", config, dense.config)
            layers = list(dict.fromkeys(source.removesuffix(names[0]) for source in sources))
            if len(layers) == 1:
                continue
            linear = [{name: teacher.linear(layer + name).to(device) for name in names} for layer in layers]
            seen = calibration and [
                {name: calibration.inputs([layer + name])[0] for name in names} for layer in layers
            ]
            ordered = ("self_attn.",) if config.position_embedding_type in RELATIVE_POSITIONS else ()
            own = align_bases(linear, getattr(config, f"{stack}_attention_heads"), seen, ordered)
            for layer, found in zip(layers, own, strict=True):
                bases |= {layer + name: turn for name, turn in found.items()}
    return bases


def change_moments(calibration: Calibration, bases: dict[str, Bases]) -> None:
    """Bring the moments of every module into the bases in which it is merged."""
    for name, own in bases.items():
        moments = calibration.moments[name]
        moments.replace("inputs", change_basis(moments.inputs, own.inputs, own.inputs))
        moments.vectors["mean"] = change_basis(moments.vectors["mean"], own.inputs)
        moments.replace("gradients", change_basis(moments.gradients, own.outputs, own.outputs))


@dataclass(frozen=True, eq=False)
class Originals:
    """The matrices that forms start from: layers of a group merged, in the type that they are stored in.

    Attributes:
        teacher: where tensors come from.
        dense: skeleton of the result before anything gets smaller.
        is_aligned: whether the layers of a group are merged by their inputs, after alignment; else their mean.
        calibration: the moments, if any.
        weighting: weights of errors of a matrix, see `Calibration.metric`.
        device: where matrices and moments are, and everything is computed.
        bases: teacher's module → bases in which it is merged.
        is_truncated_first: whether low-rank matrices of a group are truncated layer by layer, before they are merged.
    """

    teacher: Teacher
    dense: PreTrainedModel
    is_aligned: bool = False
    calibration: Calibration | None = None
    weighting: str = "loss"
    device: torch.device = torch.device("cpu")  # noqa: RUF009, immutable
    bases: dict[str, Bases] = field(default_factory=dict)
    is_truncated_first: bool = False
    _merged: dict[str, Linear] = field(default_factory=dict)

    def module(self, name: str) -> nn.Module:
        """The module in the skeleton."""
        return self.dense.get_submodule(name)

    def sources(self, name: str) -> list[str]:
        """The teacher's modules that a module is made of."""
        names = source_names(f"{name}.", self.teacher.config, self.dense.config)
        return [module.rstrip(".") for module in names]

    def layers(self, name: str) -> list[Linear]:
        """The teacher's layers that a layer is made of, in the bases in which they are merged."""
        return [
            self.bases.get(source, Bases()).of(self.teacher.linear(source).to(self.device))
            for source in self.sources(name)
        ]

    def linear(self, name: str) -> Linear:
        """The layer, with the layers of a group merged."""
        if name not in self._merged:
            layers = self.layers(name)
            if len(layers) == 1:
                return layers[0]
            moments = None
            if self.is_aligned and self.calibration is not None:
                moments = [self.calibration.inputs([source]) for source in self.sources(name)]
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
