"""An accelerator that is none: tensors that say they are elsewhere, and operations that refuse what a real one would.

Values are those of the CPU, so that results can be compared bit for bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

# A device that every build of torch knows; without the number it is what models without weights are made on.
ELSEWHERE = torch.device("meta:1")
# Its CPU arguments may be indices.
INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten._index_put_impl_.default}
MOVES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default, torch.ops.aten._copy_from.default}


class Elsewhere(torch.Tensor):
    """A tensor on the accelerator, which has none of the `refused` types."""

    refused: ClassVar[set[torch.dtype]] = set()

    @staticmethod
    def __new__(cls, values: torch.Tensor):
        kind = {"dtype": values.dtype, "device": ELSEWHERE, "strides": values.stride()}
        # Operations in place may change a shape: it is asked for each time.
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dispatch_sizes_strides_policy="sizes", **kind)

    def __init__(self, values: torch.Tensor):
        if values.dtype in self.refused:
            raise TypeError(f"the accelerator has no {values.dtype}")
        self.values = values

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        return computed(function, arguments, options or {}, set(), set())


def computed(function, arguments, options, there_ran, here_ran):
    """Run an operation on the values, where all its tensors are in one place."""
    tensors = [leaf for leaf in tree_flatten((arguments, options))[0] if isinstance(leaf, torch.Tensor)]
    away = [tensor for tensor in tensors if isinstance(tensor, Elsewhere)]
    here = [tensor for tensor in tensors if not isinstance(tensor, Elsewhere)]
    if away and function not in MOVES and function not in INDEXING and any(tensor.ndim for tensor in here):
        raise AssertionError(f"{function} of tensors on the accelerator and on the CPU: {[t.shape for t in tensors]}")
    device = options.get("device")
    to_there = torch.device(device) == ELSEWHERE if device is not None else bool(away)
    if function == torch.ops.aten.copy_.default:
        to_there = isinstance(arguments[0], Elsewhere)
    if device is not None and torch.device(device) == ELSEWHERE:
        options = {**options, "device": torch.device("cpu")}
    (there_ran if to_there else here_ran).add(str(function))
    unwrapped = tree_map(lambda leaf: leaf.values if isinstance(leaf, Elsewhere) else leaf, (arguments, options))
    result = function(*unwrapped[0], **unwrapped[1])
    if not to_there:
        return result
    for own in away:  # operations in place give their first argument back
        if any(leaf is own.values for leaf in tree_flatten(result)[0]):
            return own
    return tree_map(lambda leaf: Elsewhere(leaf) if isinstance(leaf, torch.Tensor) else leaf, result)


class Accelerator(TorchDispatchMode):
    """Makes new tensors where they are asked to be. Operations ran `there` or `here`, on the CPU."""

    def __init__(self):
        super().__init__()
        self.there: set[str] = set()
        self.here: set[str] = set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        return computed(function, arguments, options or {}, self.there, self.here)


@contextmanager
def accelerator(*refused: torch.dtype) -> Iterator[Accelerator]:
    """A device named `meta:1` that computes, but not in the types `refused`."""
    Elsewhere.refused = set(refused)
    try:
        with Accelerator() as mode:
            yield mode
    finally:
        Elsewhere.refused = set()
