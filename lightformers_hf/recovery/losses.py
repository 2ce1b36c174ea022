"""What a student is compared with its teacher by: their predictions, and their layers' states."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F


def distillation_loss(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    """T² · Σ KL(teacher ‖ student) at temperature T (Hinton et al. 2015, arXiv 1503.02531, section 2), in nats.

    Args:
        student, teacher: logits (tokens, V), padding left out.

    The sum over the tokens; T² keeps the gradient's size the same at every temperature.
    """
    student, teacher = (F.log_softmax(logits / temperature, dim=-1) for logits in (student, teacher))
    return temperature**2 * F.kl_div(student, teacher, log_target=True, reduction="sum")


def hidden_loss(student: Sequence[torch.Tensor], teacher: Sequence[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    """Σ ‖s/‖s‖ − t/‖t‖‖² over tokens, a mean over layers (PKD: Sun et al. 2019, arXiv 1908.09355, Eq. 7).

    Args:
        student, teacher: states (B, T, d) before the first layer and after each, of equal d. Stacks of unequal depth
            are compared where both are equally far: with 6 and 3 layers after 2 and 1, 4 and 2, 6 and 3.
        mask: (B, T), true where there is a token.

    Raises:
        ValueError: the widths differ.
    """
    depths = [len(states) - 1 for states in (student, teacher)]
    stops = math.gcd(*depths)
    total = 0.0
    for stop in range(1, stops + 1):
        pair = [states[stop * depth // stops] for states, depth in zip((student, teacher), depths, strict=True)]
        if pair[0].shape != pair[1].shape:
            raise ValueError(
                f"The teacher's states are {pair[1].shape[-1]} wide, the model's {pair[0].shape[-1]}: hidden states "
                "compare where the widths agree, set hidden_weight to 0."
            )
        ours, theirs = (F.normalize(states[mask].float(), dim=-1) for states in pair)
        total = total + (ours - theirs).square().sum()
    return total / stops
