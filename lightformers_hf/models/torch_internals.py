"""What is read of PyTorch's private parts, and nothing else of them. A test fails where one of them changes."""

from collections.abc import Callable
from operator import attrgetter

from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from .transformers_internals import only_idle_capture_hooks


def is_plain(module: nn.Module) -> bool:
    """Whether calling `module` is running its class's `forward`, and nothing else sees its inputs or its output.

    PyTorch has no public way to ask. It isn't with a hook, of its own or on all modules, with a `forward` of its own
    (accelerate's, which loads weights for each call), or compiled. Hooks that record outputs, while nothing is
    recorded, do not count.
    """
    own = module.__dict__  # not by getattr: it is asked of every module for every token
    return not (
        own["_forward_pre_hooks"]
        or "forward" in own
        or own.get("_compiled_call_impl") is not None
        or _global_forward_hooks
        or _global_forward_pre_hooks
        or (own["_forward_hooks"] and not only_idle_capture_hooks(own["_forward_hooks"].values()))
    )


# The modules and the parameters directly in a module. `getattr` finds them by a detour: a token needs some hundred.
parts_of: Callable[[nn.Module], dict[str, nn.Module]] = attrgetter("_modules")
weights_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
