"""Output layers on few rows, which is what decoding asks of them, by the fastest route on a CPU."""

import torch
from torch import nn

# Where it pays: tall matrices too large for a core's own cache, up to so many rows (fp32, one core: 1.5 to 4 times).
MOST_ROWS = 8
MANY_WEIGHTS = 1_000_000
TALL = 8


def wide_linear(layer: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """`layer(states)`, (…, m) → (…, n), for the layer that makes logits.

    BLAS reads a large W at half the memory's speed when it multiplies a few rows by Wᵀ, and at full speed when it
    multiplies W by as many columns. A single row is worst of all: it goes through as two. Only an `nn.Linear` with
    nothing attached to it, without gradients, in fp32 and on a CPU, takes this route; the numbers are the same up to
    rounding.
    """
    rows = states.numel() // states.shape[-1]
    other_route = (
        0 < rows <= MOST_ROWS
        and type(layer) is nn.Linear
        and layer.weight.numel() >= MANY_WEIGHTS
        and layer.out_features >= TALL * layer.in_features
        and states.dtype == layer.weight.dtype == torch.float32
        and states.device.type == "cpu"
        and layer.weight.device == states.device  # a weight that is loaded for each call is not
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not (layer._forward_hooks or layer._forward_pre_hooks)
    )
    if not other_route:
        return layer(states)
    columns = states.reshape(rows, -1).expand(max(rows, 2), -1)
    output = torch.mm(layer.weight, columns.contiguous().t()).t()[:rows]
    if layer.bias is not None:
        output = output + layer.bias
    return output.reshape(*states.shape[:-1], layer.out_features)
