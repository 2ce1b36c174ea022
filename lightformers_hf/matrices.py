"""The matrices of a model as they are stored: dense, or as low-rank factors."""

from collections.abc import Iterator

import torch
from torch import nn


def factors_of(module: nn.Module) -> tuple[torch.Tensor, ...]:
    """Return the matrices whose product is the weight of the module: one if it is dense, two if it is low-rank.

    The weight is as the paper writes it: m×n of a linear layer, V×d of an embedding and of its output layer (whose
    `kind` is `embedding`). Every class of `models/` that is not dense has a method `factors()`.
    """
    if hasattr(module, "factors"):
        return module.factors()
    is_table = isinstance(module, nn.Embedding) or getattr(module, "kind", None) == "embedding"
    return (module.weight if is_table else module.weight.T,)


def product_of(
    module: nn.Module, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """Return the weight of a module (m×n, or V×d), expanded to a full matrix in fp32 or better.

    Args:
        module: dense or low-rank.
        dtype: precision of the product and of the result; by default the result has the type of the module.
        device: computes the product, by default the module's device: not every device supports float64.
    """
    first, *others = (factor.to(device or factor.device) for factor in factors_of(module))
    precision = dtype or torch.promote_types(first.dtype, torch.float32)
    if not others:
        return first if dtype is None else first.to(dtype)
    product = torch.linalg.multi_dot([factor.to(precision) for factor in (first, *others)])
    return product if dtype else product.to(first.dtype)


def matrices_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of every stored matrix: linear layers, embeddings, output layers, dense or low-rank.

    A shared or tied matrix comes once; the two factors of a low-rank matrix come as one module.
    """
    seen: set[int] = set()
    for name, module in model.named_modules():
        if not (isinstance(module, nn.Linear | nn.Embedding) or hasattr(module, "factors")):
            continue
        parameters = {id(parameter) for parameter in module.parameters() if parameter.dim() > 1}
        if not parameters <= seen:
            seen |= parameters
            yield name, module


def bias_of(module: nn.Module) -> torch.Tensor | None:
    """Return the bias (n) of a linear layer; `None` if the module has none."""
    return getattr(getattr(module, "v", module), "bias", None)


def rank_of(module: nn.Module) -> int | None:
    """Return r of a low-rank module; `None` means dense."""
    left, *others = factors_of(module)
    return left.shape[1] if others else None


def low_rank_state(
    module: nn.Module, left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Return the state dict of the low-rank module that replaces `module`, or that `module` is.

    Args:
        module: a linear layer, an embedding or an output layer, dense or low-rank.
        left, right: factors, m×r and r×n (V×r and r×d), as `factors_of` returns them.
        bias: n, of a linear layer.

    Raises:
        ValueError: a bias for an embedding or an output layer, which have none.
    """
    if isinstance(module, nn.Embedding) or getattr(module, "kind", None) == "embedding":
        if bias is not None:
            raise ValueError(f"a bias of {len(bias)} numbers is given for an embedding or output layer: remove it")
        return {"weight" if isinstance(module, nn.Embedding) else "output.weight": left, "basis": right}
    return {"u.weight": left.T, "v.weight": right.T} | ({} if bias is None else {"v.bias": bias})
