"""Joint fit: all layers of a refitted model move together towards the teacher's predictions.

Least squares fit one layer after another, each to an output of the teacher. What they leave is fitted here at once, by
gradient descent on the KL divergence from the teacher: two passes over the calibration text and further text, or one
if the further text is more.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, get_cosine_schedule_with_warmup

from ..matrices import STACKS
from .refit import total_divergence
from .sensitivity import Batch, cut_batches, target_states
from .workers import AT_ONCE, Step, cast_weights, fast_passes, map_in_threads

TOKENS = 1024  # of a step, on both sides with padding
# The root mean square of a step at most, relative to that of the tensor, for a divergence of 1 nat a token, and the
# share of steps in which it rises.
RATE, RISE = 6e-3, 0.1
MAX_GRAD_NORM = 1.0
LARGE_VOCABULARY = 16_384  # tokens; of one at least n times as large, only every (n+1)-th position is compared


def fit_jointly(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    batches: Sequence[Batch],
    divergence: float,
    seed: int,
    passes: int = 2,
) -> list[Tensor]:
    """Fit the layers of a model to its teacher's predictions, by new tensors in their parameters.

    Steps are those of Adafactor (Shazeer and Stern 2018), relative to the size of each tensor, so that one rate fits
    all models. Errors of weights grow with the root of the `divergence` that they cause, and so do the steps: a large
    step would lead a student away from a teacher that is near. Their order is a function of the seed, in each of the
    `passes` over the batches. Embedding matrices stay: their fit takes most of the time and memory, without a gain.

    Returns: the tensors as they were, in the order of `layer_parameters`.
    """
    parameters = layer_parameters(student.requires_grad_(False))
    before = [parameter.data for parameter in parameters]
    for parameter in parameters:  # the teacher may share them
        parameter.data = parameter.data.clone()
        parameter.requires_grad_()
    every = 1 + student.config.decoder_vocab_size // LARGE_VOCABULARY
    halves = [half for batch in cut_batches(batches, TOKENS) for half in _halve(batch)]
    steps = range(0, len(halves), 2)
    order: list[int] = []
    for turn in range(passes):
        order += random.Random(seed + turn).sample(steps, len(steps))
    rate = RATE * math.sqrt(divergence)
    optimizer = torch.optim.Adafactor(parameters, lr=rate, weight_decay=0.0)
    rates = get_cosine_schedule_with_warmup(optimizer, int(RISE * len(order)), len(order))

    def look(half: Batch) -> Tensor:
        with torch.no_grad(), fast_passes(teacher.device):
            return target_states(teacher, half)[::every]

    def differentiate(index: int) -> tuple[Tensor, ...]:
        with torch.enable_grad(), fast_passes(student.device):
            predicted = student.logits_of(target_states(student, halves[index])[::every])
            with torch.no_grad():
                wanted = teacher.logits_of(states[index])
            return torch.autograd.grad(total_divergence(predicted, wanted), parameters, materialize_grads=True)

    with cast_weights(teacher), cast_weights(student.lm_head):
        states = list(map_in_threads(look, halves, teacher.device, AT_ONCE))
        for first in Step("fitting all", order, unit="step"):
            pair = range(first, min(first + 2, len(halves)))
            optimizer.zero_grad()  # before others of their size are made
            for gradients in map_in_threads(differentiate, pair, student.device, 2):
                for parameter, part in zip(parameters, gradients, strict=True):
                    parameter.grad = part if parameter.grad is None else parameter.grad.add_(part)
            count = sum(len(states[index]) for index in pair)
            for parameter in parameters:
                cast(Tensor, parameter.grad).div_(count)
            torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
            optimizer.step()
            rates.step()
    student.requires_grad_(False)
    student.zero_grad()
    return before


def layer_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """The parameters of a model's layers: not those of its tables and of the convolutions before its encoder."""
    return [parameter for stack in STACKS for parameter in getattr(model.model, stack).layers.parameters()]


def _halve(batch: Batch) -> list[Batch]:
    """Every other text of a batch, and the others: their gradients are computed at the same time."""
    count = min(2, len(batch["labels"]))
    return [{name: tensor[first::count] for name, tensor in batch.items()} for first in range(count)]
