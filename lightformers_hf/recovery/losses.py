"""What a student is trained by: the labels, its teacher's predictions, and its teacher's states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

IGNORED = -100  # the label of padding
# Entries of the logits that are worked on at a time: of a processor's, as many as its caches hold a few copies of.
CPU_ENTRIES, OTHER_ENTRIES = 2**18, 2**26


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

    Value and gradient are computed together, some tokens at a time: PyTorch's functions, one after another, would each
    go through memory with all logits, and most would leave a copy.

    Args:
        logits: the student's (..., V), of any floating type; computed with in float32.
        labels: (...), -100 where there is padding.
        teacher: the teacher's logits (..., V), which no gradient reaches; `None`: the cross entropy alone.
        alpha: weight of the teacher, from 0 to 1.
        temperature: divides both models' logits.
        smoothing: share of the labels' probability that all tokens get in equal parts.
    """
    return _TrainingLoss.apply(logits, labels, teacher, alpha if teacher is not None else 0.0, temperature, smoothing)


class _TrainingLoss(torch.autograd.Function):
    """`training_loss`, which makes its gradient while it has the probabilities at hand."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        teacher: torch.Tensor | None,
        alpha: float,
        temperature: float,
        smoothing: float,
    ) -> torch.Tensor:
        size = logits.shape[-1]
        ours, labels = logits.reshape(-1, size), labels.reshape(-1)
        gradient = torch.zeros_like(ours) if ctx.needs_input_grad[0] else None
        total = torch.zeros((), device=ours.device)
        entries = CPU_ENTRIES if ours.device.type == "cpu" else OTHER_ENTRIES
        for rows in (labels != IGNORED).nonzero()[:, 0].split(max(1, entries // size)):
            targets, student = labels[rows, None], ours[rows].float()
            likely, logs = _softmax(student)
            wanted = (1 - smoothing) * student.gather(-1, targets).sum()
            if smoothing:  # else a token that cannot be, with a logit of minus infinity, is no harm
                wanted += smoothing * student.mean(-1).sum()
            total += (1 - alpha) * (logs.sum() - wanted)
            change = (likely - smoothing / size).mul_(1 - alpha)
            change.scatter_add_(-1, targets, change.new_full(targets.shape, (1 - alpha) * (smoothing - 1)))
            if teacher is not None:
                theirs = teacher.reshape(-1, size)[rows].float()
                if temperature != 1:
                    student, theirs = student / temperature, theirs / temperature
                    likely, logs = _softmax(student)
                expected, their_logs = _softmax(theirs)
                far = torch.linalg.vecdot(expected, theirs.sub_(student)) + (logs - their_logs)[:, 0]
                total += alpha * temperature**2 * far.sum()
                change.add_(likely.sub_(expected), alpha=alpha * temperature)
            if gradient is not None:
                gradient[rows] = change.to(gradient.dtype)
        if gradient is not None:
            ctx.save_for_backward(gradient.view(logits.shape))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None, None, None, None


def _softmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities (N, V), and the logarithm of what they were divided by (N, 1): each exponential once."""
    largest = logits.amax(-1, keepdim=True)
    likely = (logits - largest).exp_()
    total = likely.sum(-1, keepdim=True)
    return likely.div_(total), total.log() + largest


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
