"""Several layers → one: how a group of shared layers starts (LightFormer, §3.2)."""

from __future__ import annotations

import re

import torch
from transformers import PreTrainedConfig

from ...models.stack import group_layers


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
    if part == "depths":  # private to a depth; in the source too, unless each of its layers has its own anyway
        return [f"{head}{stack}.{'layers' if source_groups is None else 'depths'}.{index}.{rest}"]
    depths = [depth for depth, group in enumerate(group_layers(layers, target_groups)) if group == index]
    stored = [group_layers(layers, source_groups)[depth] for depth in depths]
    return [f"{head}{stack}.layers.{layer}.{rest}" for layer in stored]


def merge(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One tensor for a group: the mean of its layers' tensors in fp32, or the only one as it is."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.stack([tensor.float() for tensor in tensors]).mean(dim=0)
