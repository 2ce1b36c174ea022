"""How often a compressed model predicts the token that its teacher predicts, on text that it was not fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, zip_longest

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .statistics.calibration import LOGIT_ROWS, cut_batches, token_mask
from .statistics.samples import FEWEST_SENTENCES, HELD_OUT
from .workers import cast_weights, fail_together, fast_products, gather_from_all, own_share, sum_over_all

Batch = dict[str, Tensor]


def hold_out(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch] | None]:
    """Split batches into those for calibration and those with every tenth sentence; of short texts, `None`.

    Several processes, which were dealt the batches in turn (`own_share`), hold out the sentences that one would.
    """
    counts = gather_from_all([len(batch["labels"]) for batch in batches])
    dealt = [count for row in zip_longest(*counts, fillvalue=0) for count in row]
    if sum(dealt) < FEWEST_SENTENCES:
        return list(batches), None
    kept, held = [], []
    for batch, seen in zip(batches, own_share(list(accumulate(dealt, initial=HELD_OUT // 2))), strict=False):
        aside = (torch.arange(len(batch["labels"])) + seen) % HELD_OUT == 0
        for rows, part in ((~aside, kept), (aside, held)):
            if rows.any():
                part.append({name: tensor[rows] for name, tensor in batch.items()})
    return kept, cut_batches(held)


@torch.no_grad()
def predict_tokens(model: PreTrainedModel, batches: Sequence[Batch]) -> list[Tensor]:
    """Return the likeliest token after every target prefix of each batch."""
    predicted = []
    with fail_together(), cast_weights(model), fast_products(model.device):
        for batch in batches:
            inputs = {name: tensor.to(model.device) for name, tensor in batch.items() if name != "labels"}
            states = model.model(**inputs, use_cache=False).last_hidden_state
            rows = states[token_mask(batch, "target").to(states.device)].split(LOGIT_ROWS)
            predicted.append(torch.cat([model.logits_of(part).argmax(-1) for part in rows]).cpu())
    return predicted


def share_of_equal(predicted: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[float, int]:
    """Return the share of equal tokens, over all processes, and their number."""
    equal = sum(int((one == other).sum()) for one, other in zip(predicted, expected, strict=True))
    sums = sum_over_all(torch.tensor([equal, sum(map(len, expected))]))
    return (sums[0] / sums[1].clamp(min=1)).item(), int(sums[1])
