"""What stands at the logits in place of a loss's gradient, so that sums of squares are a model's Fisher matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..workers import sum_over_all

# Signs repeat after so many tokens: a prime, small enough for float32 to tell fractions of its multiples apart.
PERIOD = 4093


class Probes:
    """Random vectors z, one for each token, with E[zᵀz] = diag(p) − pᵀp, p the softmax of the logits over T.

    With T = 1 this is the Fisher matrix of the logits: the curvature of the divergence from the model, and the
    covariance of p − y for a label y drawn from p. A single label is a poor estimate of it: most labels of a confident
    model are as expected and contribute nothing (RESULTS.md, "Probes"). Here z = ε√p − p Σ ε√p with random signs ε, to
    which every token contributes.

    The curvature at the model describes small errors. `find_temperature` gives the T for errors of a compression.

    Signs depend on the token alone, not on its batch: so the sums of several processes are those of one.

    Args:
        size: of the vocabulary.
        device: where the probabilities are.
        temperature: T.
    """

    def __init__(self, size: int, device: torch.device, temperature: float = 1.0) -> None:
        self.phases = torch.rand(size, generator=torch.Generator().manual_seed(0)).to(device)
        self.temperature = temperature

    def draw(self, logits: Tensor, keys: Tensor) -> Tensor:
        """z (N, V), of logits (N, V) and the tokens' `token_keys` (N)."""
        roots = logits.div(self.temperature).softmax(-1).sqrt_()
        probes = (keys[:, None] * self.phases).frac_().sub_(0.5).sign_().mul_(roots)
        return probes.sub_(roots.square_().mul_(probes.sum(-1, keepdim=True)))


def logit_variance(logits_of: Callable[[Tensor], Tensor], states: Sequence[Tensor], size: int) -> float:
    """Return how much the logits of one token vary over the text: V = Σ_v p_v Var(l_v), in nats².

    p is the mean probability, and l the logits less their mean under p, which no probability depends on. Each of
    several processes gives states of its own; the result is that of all.

    Args:
        logits_of: logits (tokens, V) of states. Called twice for each of them, to hold few logits at a time.
        states: decoder states (tokens, d).
        size: of the vocabulary.
    """
    count = sum_over_all(torch.tensor(float(sum(map(len, states)))))

    def moments(rows_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Mean and second moment of what a function makes of logits."""
        sums = torch.zeros(2, size, dtype=torch.float64)
        for part in states:
            rows = rows_of(logits_of(part).double())
            sums += torch.stack([rows.sum(0), rows.square().sum(0)]).cpu()
        return sum_over_all(sums) / count

    likely = moments(lambda logits: logits.softmax(-1))[0]
    mean, square = moments(lambda logits: logits - (logits @ likely.to(logits.device))[:, None])
    return (likely * (square - mean.square())).sum().item()


def temperature_of(variance: float, removed: float) -> float:
    """Return the temperature T at which probabilities have the sensitivity that finite errors meet.

    Let compression add noise of covariance Σ to the logits. The derivative of the expected divergence with respect to
    Σ is half the expected diag(q) − qᵀq, q the probabilities of the noisy logits, not of the exact ones (Price 1958).
    A probability expected under Gaussian noise is nearly that of a higher temperature: with s² the variance of the
    noise in the difference of two logits, T² = 1 + π s² / 8 (MacKay 1992). Compression removes all that varies in the
    directions that matter least, so the noise of a logit is taken as a share of its `logit_variance` V over the text:
    s² = 2 · `removed` · V. Teachers that are sure of their text have large logits, and get a large T.

    Args:
        removed: share of the matrices' parameters that compression removes, in [0, 1].
    """
    return math.sqrt(1 + math.pi / 4 * removed * variance)


def token_keys(batch: dict[str, Tensor]) -> Tensor:
    """A number from 1 to `PERIOD` for every target token (B, T), of its source sentence and its place."""
    sentences = (batch["input_ids"] * batch["attention_mask"]).sum(1, keepdim=True)
    places = torch.arange(batch["labels"].shape[1], device=sentences.device)
    return ((sentences * 7919 + places * 104_729) % PERIOD + 1).float()
