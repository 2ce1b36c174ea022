"""What a student is trained by: the labels, its teacher's predictions, and its teacher's states."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

IGNORED = -100  # the label of padding


def training_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    teacher: torch.Tensor | None = None,
    *,
    alpha: float = 0.5,
    temperature: float = 1.0,
    smoothing: float = 0.0,
) -> torch.Tensor:
    """α T² Σ KL(teacher ‖ student) + (1 − α) Σ cross entropy, in nats, summed over the tokens that are no padding.

    The divergence is that at temperature T (Hinton et al. 2015, arXiv 1503.02531, section 2; T² keeps its gradient's
    size the same at every temperature), the cross entropy that of `torch.nn.functional.cross_entropy`.

    Args:
        logits: the student's (..., V), of any floating type; computed with in float32.
        labels: (...), -100 where there is padding.
        teacher: the teacher's logits (..., V), which no gradient reaches; `None`: the cross entropy alone.
        alpha: weight of the teacher, from 0 to 1.
        temperature: divides both models' logits.
        smoothing: share of the labels' probability that all tokens get in equal parts.
    """
    kept = labels != IGNORED
    logits, labels = logits[kept].float(), labels[kept]
    if teacher is None:
        return F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    expected_logs = (teacher[kept].float() / temperature).log_softmax(-1)
    expected = expected_logs.exp()
    entropy = -torch.linalg.vecdot(expected, expected_logs).sum()
    if temperature != 1:
        logs = (logits / temperature).log_softmax(-1)
        divergence = -torch.linalg.vecdot(expected, logs).sum() - entropy
        loss = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
        return alpha * temperature**2 * divergence + (1 - alpha) * loss
    # Both terms are cross entropies of the same log-probabilities: one mixed target halves the passes over memory.
    target = expected.mul_(alpha).add_((1 - alpha) * smoothing / expected.shape[-1])
    share = (1 - alpha) * (1 - smoothing)
    target.scatter_add_(-1, labels[:, None], target.new_full((len(target), 1), share))
    return -torch.linalg.vecdot(target, logits.log_softmax(-1)).sum() - alpha * entropy


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
    tokens = mask.flatten().nonzero()[:, 0]  # looked up once: each time, a GPU would be waited for
    total = 0.0
    for stop in range(1, stops + 1):
        pair = [states[stop * depth // stops] for states, depth in zip((student, teacher), depths, strict=True)]
        if pair[0].shape != pair[1].shape:
            raise ValueError(
                f"The teacher's states are {pair[1].shape[-1]} wide, the model's {pair[0].shape[-1]}: hidden states "
                "compare where the widths agree, set hidden_weight to 0."
            )
        ours, theirs = (F.normalize(one.flatten(0, 1).index_select(0, tokens).float(), dim=-1) for one in pair)
        total = total + (ours - theirs).square().sum()
    return total / stops
