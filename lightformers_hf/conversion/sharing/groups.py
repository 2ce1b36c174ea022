"""Layers of a trained model in groups that share one: which shapes come of it, and how they are made alike before."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from ...loading import skeleton
from ...models.configuration_lightformer import RELATIVE_POSITIONS, LightFormerConfig
from ..options import CompressionOptions, StudyOptions
from ..sensitivity import Calibration
from ..teacher import Teacher
from .alignment import Bases, align_bases, change_basis
from .merging import source_names

STACKS = ("encoder", "decoder")


def find_matrices(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """(module name, kind) of every matrix of a model that may become low-rank, each stored one once."""
    ties = model.get_expanded_tied_weights_keys(all_submodels=True)
    for name, module in model.named_modules():
        if hasattr(module, "kind") and f"{name}.weight" not in ties:
            yield name, module.kind


def new_groups(teacher: Teacher, options: CompressionOptions) -> dict[str, int]:
    """The fields of the configuration that ask for other groups than the teacher has.

    Raises:
        ValueError: layers that cannot be shared.
    """
    groups = {}
    for field in ("encoder_groups", "decoder_groups"):
        if (asked := getattr(options, field)) is not None:
            if not hasattr(teacher.config, field):
                raise ValueError(
                    f"{field} is {asked}, but layers of a {teacher.config.model_type} are shared as its training "
                    "had them: leave it out"
                )
            if asked != getattr(teacher.config, field):
                groups[field] = asked
    if groups and isinstance(teacher.config, LightFormerConfig):
        shapes = [field for field in teacher.config.patterns if field not in teacher.config.matrix_fields]
        if held := [field for field in shapes if getattr(teacher.config, field)]:
            raise ValueError(
                f"{next(iter(groups))} is {next(iter(groups.values()))}, but layers of {teacher.name} differ in "
                f"shape ({held[0]}) and can't be merged: share the layers of its own teacher"
            )
    return groups


def share_layers(teacher: Teacher, options: CompressionOptions, study: StudyOptions) -> PreTrainedModel:
    """Skeleton of the result before any matrix gets smaller: dense, its layers in the groups that are asked for.

    Raises:
        ValueError: layers that cannot be shared.
    """
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


def find_bases(
    teacher: Teacher, dense: PreTrainedModel, calibration: Calibration | None, device: torch.device
) -> dict[str, Bases]:
    """Teacher's module → bases in which the layers of each new group are alike.

    Args:
        dense: what `share_layers` gave.
        device: where they are computed.
    """
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
