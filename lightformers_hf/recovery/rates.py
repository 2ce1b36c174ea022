"""Learning rates of single matrices, where one rate does not suit all."""

from __future__ import annotations

import torch
from torch import nn

from ..models.layers import MultiHeadAttention


def slow_queries(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Let queries of attention whose scores nothing divides (T5's) learn as if the scores were divided by √d_k.

    Their matrices are smaller by that factor, but a step of Adam is as large as the learning rate: scores would grow
    √d_k times as fast as in other models, until every query looks at one key alone and learns no more. With the rate
    divided by √d_k, steps are exactly those of divided scores; the factors of a low-rank matrix share that divisor.
    Optimizers other than Adam and AdamW stay as they are: their steps are as large as gradients, or as what they move.
    """
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return
    shares: dict[nn.Parameter, float] = {}
    for module in model.modules():
        if isinstance(module, MultiHeadAttention) and module.scaling == 1 and not module.joint_qkv:
            learned = [weight for weight in module.q_proj.parameters() if weight.requires_grad and weight.dim() > 1]
            shares |= dict.fromkeys(learned, module.head_dim ** (-0.5 / max(len(learned), 1)))
    for group in list(optimizer.param_groups):
        for share in sorted({shares[weight] for weight in group["params"] if weight in shares}):
            slow = [weight for weight in group["params"] if shares.get(weight) == share]
            group["params"] = [weight for weight in group["params"] if shares.get(weight) != share]
            optimizer.add_param_group({**group, "params": slow, "lr": group["lr"] * share})
