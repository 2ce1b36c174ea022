"""Balancing: tokens' probabilities scaled until each is as likely on the whole as its teacher makes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..processors import keep_large
from .statistics.calibration import LOGIT_ROWS
from .statistics.shelf import Shelf
from .steps import Step
from .workers import algebra_device, cast_weights, fail_together, fast_products, sum_over_all

# Target tokens whose probabilities are balanced, about; steps that balance them, occurrences of each that are added to
# those seen, and how many nats a token they must win together.
BALANCED, BALANCING, SMOOTHING, WORTH_BALANCING = 8192, 4, 0.5, 0.04


@torch.no_grad()
def balance(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    batches: Sequence[dict[str, Tensor]],
    shelf: Shelf,
    *,
    progress: bool,
) -> None:
    """Scale tokens' probabilities by e^b until their means are the teacher's: then no b has a lower cross-entropy.

    Every step, b += log(teacher's mean / own mean), lowers it (Darroch and Ratcliff 1972), each by less than the one
    before. Where all of them win little, b stays: sentences become as short as the teacher's own, which then costs
    more than it gives; and where that is certain, the others are not computed.

    With p the student's probabilities as they are, b makes them p·e^b / Z, Z the sum of p·e^b over the tokens. Of the
    cross-entropy it changes log Z − b·(teacher's) alone: the teacher is needed once, and p where there is room for it.
    """
    device = algebra_device(shelf.device)
    tokens = torch.tensor(sum(int((batch["labels"] != -100).sum()) for batch in batches))
    every = max(1, int(sum_over_all(tokens)) // BALANCED)
    target = torch.zeros(student.final_logits_bias.numel(), dtype=torch.float64, device=device)
    rows = torch.empty(LOGIT_ROWS, len(target), device=student.device)  # for all: the largest thing besides the models
    with fail_together(), cast_weights(teacher.lm_head), keep_large():
        for states in _target_states("teacher", batches, shelf, every):
            target += _probabilities(teacher, states, rows).sum(0).to(device)
    target = sum_over_all(target)
    shift = torch.zeros_like(target)
    held: dict[int, Tensor] = {}
    losses: list[float] = []  # cross-entropy before and after each step, nats a token, but for a constant
    room, worth = shelf.room, True
    for step in Step("balancing", range(BALANCING + 1), unit="step", shown=progress):
        if not worth:
            continue
        own, log = torch.zeros_like(target), target.new_zeros(1)
        scale = shift.exp().float().to(student.device)
        with fail_together(), cast_weights(student.lm_head), keep_large():
            for number, states in enumerate(_target_states("student", batches, shelf, every)):
                if (weights := held.get(number)) is None:
                    weights = _probabilities(student, states, rows)
                    if (room := room - weights.nbytes) >= 0:
                        held[number] = weights.clone()
                sums = weights @ scale
                log += sums.log().sum().to(device)
                own += (sums.reciprocal() @ weights).mul_(scale).to(device)
        own, log = sum_over_all(own), sum_over_all(log)
        losses.append(((log - shift @ target) / target.sum()).item())
        if step:
            still = (BALANCING - step) * (losses[-2] - losses[-1])
            worth = losses[0] - losses[-1] + still >= WORTH_BALANCING
        if step < BALANCING:
            shift += ((target + SMOOTHING) / (own + SMOOTHING)).log()
    if worth:
        # A buffer of its own: the one that is there may be the teacher's.
        student.final_logits_bias = student.final_logits_bias + shift.float().to(student.device)


def _target_states(who: str, batches: Sequence[dict[str, Tensor]], shelf: Shelf, every: int) -> Iterator[Tensor]:
    """Decoder states at every n-th target token, a few at a time: they become rows as wide as the vocabulary."""
    for index, batch in enumerate(batches):
        states = shelf[who, "decoder", index]
        yield from states[(batch["labels"] != -100).to(states.device)][::every].split(LOGIT_ROWS)


def _probabilities(model: PreTrainedModel, states: Tensor, rows: Tensor) -> Tensor:
    """Of every token behind decoder states (tokens×d), tokens×V, in the first of these `rows`."""
    with fast_products(states.device):
        logits = model.logits_of(states)
    likely = rows[: len(states)]
    for own, row in zip(logits, likely, strict=True):  # one by one, in the processor's cache
        torch.softmax(own.float(), -1, out=row)
    return likely
