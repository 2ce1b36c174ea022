"""What stands at the logits in place of a loss's gradient, so that sums of squares are a model's Fisher matrix."""

from __future__ import annotations

import torch
from torch import Tensor

# Signs repeat after so many tokens: a prime, small enough for float32 to tell fractions of its multiples apart.
PERIOD = 4093


class Probes:
    """Random vectors z, one for each token, with E[zᵀz] = diag(p) − pᵀp, p the model's probabilities.

    That is the Fisher matrix of the logits, the curvature of the divergence from the model: what p − y has on average,
    y a label drawn from p. One label is far from the average: of a sure model most are as expected and say nothing,
    and the few others say all (RESULTS.md, "Probes"). Here z = ε√p − p Σ ε√p, of random signs ε, and every token says
    its share.

    Signs are a token's own, whatever batch it comes in: so are the sums of several processes.

    Args:
        size: of the vocabulary.
        device: where the probabilities are.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.phases = torch.rand(size, generator=torch.Generator().manual_seed(0)).to(device)

    def draw(self, logits: Tensor, keys: Tensor) -> Tensor:
        """z (N, V), of logits (N, V) and the tokens' `token_keys` (N)."""
        roots = logits.softmax(-1).sqrt_()
        probes = (keys[:, None] * self.phases).frac_().sub_(0.5).sign_().mul_(roots)
        return probes.sub_(roots.square_().mul_(probes.sum(-1, keepdim=True)))


def token_keys(batch: dict[str, Tensor]) -> Tensor:
    """A number from 1 to `PERIOD` for every target token (B, T), of its source sentence and its place."""
    sentences = (batch["input_ids"] * batch["attention_mask"]).sum(1, keepdim=True)
    places = torch.arange(batch["labels"].shape[1], device=sentences.device)
    return ((sentences * 7919 + places * 104_729) % PERIOD + 1).float()
