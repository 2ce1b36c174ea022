"""Depth → module: which stored layer runs at which depth (group-wise sharing, LightFormer §3.2, Eq. 4-6)."""

from collections.abc import Callable, Iterator

from torch import nn


def group_of_depth(depth: int, layers: int, groups: int | None) -> int:
    """Index of the stored layer at `depth`: `layers` depths in `groups` contiguous groups of equal size."""
    return depth if groups is None else depth * groups // layers


def check_groups(field: str, groups: int | None, layers: int) -> None:
    """Raise `ValueError` naming `field` unless `groups` divides `layers`."""
    if groups is not None and (groups < 1 or groups > layers or layers % groups):
        divisors = [n for n in range(1, layers + 1) if layers % n == 0]
        raise ValueError(f"{field} is {groups}, but {layers} layers form equal groups only for {divisors}")


class LayerStack(nn.ModuleList):
    """`layers` applications of `groups` stored layers, each stored once.

    Args:
        build: index of the stored layer → the layer.
        layers: L, the number of depths.
        groups: N, the number of stored layers; `None` means one a depth.
    """

    def __init__(self, build: Callable[[int], nn.Module], layers: int, groups: int | None):
        super().__init__(build(index) for index in range(layers if groups is None else groups))
        self.stored_at = [group_of_depth(depth, layers, groups) for depth in range(layers)]

    def by_depth(self) -> Iterator[tuple[int, nn.Module]]:
        """(depth, layer) from the first depth to the last; a shared layer comes once for every depth it serves."""
        for depth, index in enumerate(self.stored_at):
            yield depth, self[index]
