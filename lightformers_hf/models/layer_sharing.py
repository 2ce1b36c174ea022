"""Depth → module: which stored layer runs at which depth (group-wise sharing, LightFormer §3.2, Eq. 4-6)."""

from collections.abc import Callable, Iterator

from torch import nn


def group_of_depth(depth: int, layers: int, groups: int | None) -> int:
    """Index of the stored layer at `depth`: `layers` depths in `groups` contiguous groups of equal size."""
    return depth if groups is None else depth * groups // layers


def group_layers(layers: int, groups: int | None) -> list[int]:
    """Index of the stored layer at every depth, `groups` contiguous groups sharing one each."""
    return [group_of_depth(depth, layers, groups) for depth in range(layers)]


def check_groups(field: str, groups: int | None, layers: int) -> None:
    """Raise `ValueError` naming `field` unless `groups` divides `layers`."""
    if groups is not None and (groups < 1 or groups > layers or layers % groups):
        divisors = [n for n in range(1, layers + 1) if layers % n == 0]
        raise ValueError(f"{field} is {groups}, but {layers} layers form equal groups only for {divisors}")


class LayerStack(nn.ModuleList):
    """A stack of depths, each served by one of fewer layers, each stored once.

    Args:
        build: index of the stored layer → the layer.
        stored_at: index of the stored layer of every depth.
    """

    def __init__(self, build: Callable[[int], nn.Module], stored_at: list[int]):
        super().__init__(build(index) for index in range(max(stored_at) + 1))
        self.stored_at = stored_at

    def by_depth(self) -> Iterator[tuple[nn.Module, dict[str, int]]]:
        """Every depth's layer, and the cache slots of that depth, as arguments of its call.

        `layer_idx` is the depth: self-attention's slot belongs to it, whichever layer serves it. `cross_layer_idx` is
        the first depth of the layer: cross-attention's keys and values are made of the encoder's states alone, so that
        all depths of one layer have the same.
        """
        for depth, index in enumerate(self.stored_at):
            yield self[index], {"layer_idx": depth, "cross_layer_idx": self.stored_at.index(index)}
