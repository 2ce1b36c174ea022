"""The matrices of a model as they are stored: dense, or as low-rank factors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

NOWHERE = torch.device("meta")  # of a skeleton's tensors
STACKS = ("encoder", "decoder")  # as in the names of modules and fields


@dataclass(frozen=True, eq=False)
class Weight:
    """The weight of a module as the paper writes it: y = x·W + b, with W = left, or left·right.

    W is m×n, inputs×outputs; V×d of an embedding and of its output layer.
    """

    left: Tensor  # W (m×n), or its first factor (m×r)
    right: Tensor | None = None  # the second factor (r×n); `None` of a dense one
    bias: Tensor | None = None  # b (n)
    stored: tuple[Tensor, ...] = ()  # the matrices of the module, if W is computed from them; else empty

    @classmethod
    def of(cls, module: nn.Module) -> Weight:
        """Return the weight of a module, whose tensors are not copied."""
        left, *others = factors_of(module)
        stored = tuple(weight for weight in module.parameters() if weight.dim() > 1)
        own = {factor.data_ptr() for factor in (left, *others)}
        is_computed = not left.is_meta and own != {weight.data_ptr() for weight in stored}
        return cls(left, others[0] if others else None, bias_of(module), stored if is_computed else ())

    @property
    def rank(self) -> int | None:
        """r; `None` means dense."""
        return None if self.right is None else self.left.shape[1]

    @property
    def is_dense(self) -> bool:
        """Whether W is one matrix."""
        return self.right is None

    @property
    def factors(self) -> tuple[Tensor, ...]:
        """W, or its two factors."""
        return (self.left,) if self.right is None else (self.left, self.right)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored matrices: the factors, or those that W is computed from."""
        return self.stored or self.factors

    @property
    def parameters(self) -> int:
        """Number of stored values, without the bias."""
        return sum(tensor.numel() for tensor in self.tensors)

    def transpose(self) -> Weight:
        """Wᵀ, without a bias."""
        left, *others = (factor.T for factor in reversed(self.factors))
        return Weight(left, others[0] if others else None, None, self.stored)

    def to(self, device: torch.device) -> Weight:
        """Return the weight on a device."""
        right, bias = (None if part is None else part.to(device) for part in (self.right, self.bias))
        return Weight(self.left.to(device), right, bias)

    def product(self, dtype: torch.dtype | None = None) -> Tensor:
        """W as one matrix, multiplied in float32 or better. By default it has the type of the factors."""
        if self.right is None:
            return self.left if dtype is None else self.left.to(dtype)
        precision = dtype or torch.promote_types(self.left.dtype, torch.float32)
        return (self.left.to(precision) @ self.right.to(precision)).to(dtype or self.left.dtype)

    def state(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the state dict of a module with this weight: dense or low-rank, as the module is."""
        if rank_of(module) is not None:
            return low_rank_state(module, self.left, self.right, self.bias)
        weight = self.product() if is_table(module) else self.product().T
        return {"weight": weight} | ({} if self.bias is None else {"bias": self.bias})

    def put(self, module: nn.Module) -> None:
        """Let a module have this weight, in the type of its parameters, which may be on `meta`. Gradients are off."""
        own = module.state_dict()
        state = {
            name: tensor.to(own[name].dtype if own[name].device == NOWHERE else own[name]).contiguous()
            for name, tensor in self.state(module).items()
        }
        module.load_state_dict(state, assign=True)
        module.requires_grad_(False)


def is_table(module: nn.Module) -> bool:
    """Whether a module is an embedding or an output layer, whose weight is V×d."""
    return isinstance(module, nn.Embedding) or getattr(module, "kind", None) == "embedding"


def factors_of(module: nn.Module) -> tuple[torch.Tensor, ...]:
    """Return the matrices whose product is the weight of the module: one if it is dense, two if it is low-rank.

    The weight is as the paper writes it: m×n of a linear layer, V×d of an embedding and of its output layer (whose
    `kind` is `embedding`). Every class of `models/` that is not dense has a method `factors()`.
    """
    if hasattr(module, "factors"):
        return module.factors()
    return (module.weight if is_table(module) else module.weight.T,)


def product_of(
    module: nn.Module, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """Return the weight of a module (m×n, or V×d), expanded to a full matrix in fp32 or better.

    Args:
        module: dense or low-rank.
        dtype: precision of the product and of the result; by default the result has the type of the module.
        device: computes the product, by default the module's device: not every device supports float64.
    """
    return Weight(*(factor.to(device or factor.device) for factor in factors_of(module))).product(dtype)


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
    if is_table(module):
        if bias is not None:
            raise ValueError(f"a bias of {len(bias)} numbers is given for an embedding or output layer: remove it")
        return {"weight" if isinstance(module, nn.Embedding) else "output.weight": left, "basis": right}
    return {"u.weight": left.T, "v.weight": right.T} | ({} if bias is None else {"v.bias": bias})
