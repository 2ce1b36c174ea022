"""Relative positions of T5: a trained number for every bucket of distances, added to the scores of attention.

Raffel et al. 2020, §2.1. Shapes: B batch, H heads, T queries, S keys.
"""

import math

import torch
from torch import nn
from transformers.cache_utils import Cache


def find_distances(
    hidden_states: torch.Tensor, mask: torch.Tensor | None, past_key_values: Cache | None
) -> torch.Tensor:
    """Position of every key minus that of every query (T, S), before the cache takes the new keys.

    Args:
        hidden_states: of the queries, (B, T, d).
        mask: (…, S), or `None` where all keys there are may be seen.
        past_key_values: the decoder's cache.
    """
    length, past, device = hidden_states.shape[1], 0, hidden_states.device
    keys: int | torch.Tensor = length
    if past_key_values is not None:
        past = past_key_values.get_seq_length()
        keys = past_key_values.get_mask_sizes(length, 0)[0]
    if mask is not None:
        keys = mask.shape[-1]
    return torch.arange(keys, device=device) - (torch.arange(length, device=device) + past).unsqueeze(-1)


class RelativePositions(nn.Embedding):
    """The biases of one stack or one layer: `weight` is buckets×H.

    The nearest distances have a bucket each; farther ones share buckets whose width grows as the distance does, and
    from `furthest` on there is one. An encoder has half of its buckets for what comes after.

    Args:
        num_buckets: of all distances.
        num_heads: H.
        furthest: distance from which all are alike.
        is_causal: whether keys after the query are hidden.
    """

    def __init__(self, num_buckets: int, num_heads: int, furthest: int, *, is_causal: bool):
        super().__init__(num_buckets, num_heads)
        self.furthest, self.is_causal = furthest, is_causal

    def find_buckets(self, distances: torch.Tensor) -> torch.Tensor:
        """Number of the bucket of each distance; the same shape."""
        if self.is_causal:
            buckets, start, far = self.num_embeddings, 0, (-distances).clamp(min=0)
        else:
            buckets = self.num_embeddings // 2
            start, far = (distances > 0).long() * buckets, distances.abs()
        exact = buckets // 2
        # In fp32 and in this order, which decides at the boundaries. The logarithm of 0 is not used.
        wide = torch.log(far.float() / exact) / math.log(self.furthest / exact) * (buckets - exact)
        wide = (exact + wide.clamp(min=0).long()).clamp(max=buckets - 1)
        return start + torch.where(far < exact, far, wide)

    def forward(self, distances: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """What is added to scores: the biases, and far below them what `mask` hides. (T, S) → (B or 1, H, T, S).

        `mask` is boolean, (B, 1, T, S), true where a key is seen, or a summand; `None` hides nothing but, in a
        decoder, what comes after the query.
        """
        biases = super().forward(self.find_buckets(distances)).permute(2, 0, 1).unsqueeze(0)
        # Not infinity: a row of padding sees nothing, and would be NaN. Half of fp16's least leaves room for scores.
        lowest = torch.finfo(biases.dtype).min / (2 if biases.dtype == torch.float16 else 1)
        if mask is None:
            return biases.masked_fill(distances > 0, lowest) if self.is_causal else biases
        if mask.dtype == torch.bool:
            return torch.where(mask, biases, lowest)
        return biases + mask
