"""What a checkpoint costs before it runs: multiply-additions, and the memory that its matrices take.

Both follow from the configuration: they are counted on models without storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel

from ..loading import build_network, learned_parameters

TOKENS = 20  # of source and of target: PartialFormer, Table 5


@dataclass(frozen=True)
class Macs:
    """Multiply-additions of the matrix products that translate one sentence; `output` is the layer of the logits."""

    encoder: int
    decoder: int
    output: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.encoder + self.decoder + self.output


@dataclass(frozen=True)
class Footprint:
    """Stored entries of the matrices, each counted once: Subformer, Table 9.

    Attributes:
        embedding: token and position tables, and what makes a stack's first input of them (SAFE of each stack).
        encoder, decoder: the layers, and projections between layers of different widths.
        output: what the output layer does not share with the token table.
    """

    embedding: int
    encoder: int
    decoder: int
    output: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + self.encoder + self.decoder + self.output


def without_storage(config: PreTrainedConfig) -> PreTrainedModel:
    """The sequence-to-sequence model of a configuration on the `meta` device: shapes, no weights, eager attention.

    Raises:
        ValueError: not the configuration of a sequence-to-sequence model.
    """
    with torch.device("meta"):
        return build_network(AutoModelForSeq2SeqLM, config, attn_implementation="eager").eval()


def generation_macs(
    config: PreTrainedConfig, *, source_tokens: int = TOKENS, target_tokens: int = TOKENS, use_cache: bool = False
) -> Macs:
    """Multiply-additions to generate `target_tokens` greedily from `source_tokens` (PartialFormer, §5.1).

    The printed figures ("20 source and target tokens", Tables 5 and 10) fit a decoder that keeps nothing: for its k-th
    token it computes all k positions again, their logits too, and the keys and values of the source. That is what is
    counted here; with `use_cache` what `generate()` computes. All matrix products count, those of attention among
    them; sums, norms and activations do not. Printed rows are met within 1.5 %, but PartialFormer with head scaling
    (Table 5, #4) comes to 7.2 billion, 5 % above what is printed.

    Raises:
        ValueError: not the configuration of a sequence-to-sequence model, or fewer than one token of either.
    """
    if source_tokens < 1 or target_tokens < 1:
        raise ValueError(f"{source_tokens} source and {target_tokens} target tokens: expected 1 or more of each")
    model = without_storage(config)
    steps, cache = [], None
    with torch.device("meta"), torch.inference_mode():
        with FlopCounterMode(display=False) as counter:
            states = model.get_encoder()(torch.zeros(1, source_tokens, dtype=torch.long))
        encoder = counter.get_total_flops() // 2  # a multiply-addition is two operations
        for length in (1, 2, 3, 4):
            ids = torch.zeros(1, 1 if use_cache else length, dtype=torch.long)
            with FlopCounterMode(display=False) as counter:
                found = model(
                    encoder_outputs=states, decoder_input_ids=ids, past_key_values=cache, use_cache=use_cache
                )
            cache = found.past_key_values
            output = sum(counter.get_flop_counts()[f"{type(model).__name__}.lm_head"].values()) // 2
            steps.append((counter.get_total_flops() // 2 - output, output))
    return Macs(encoder, *(_sum_over_steps(counts, target_tokens) for counts in zip(*steps, strict=True)))


def _sum_over_steps(counts: tuple[int, ...], steps: int) -> int:
    """Operations of so many steps, from those of the first four.

    A step's are a polynomial of degree 2 in its number; but the first may also fill the cache of cross-attention.
    """
    first, a, b, c = counts
    rest = steps - 1
    return first + rest * a + comb(rest, 2) * (b - a) + comb(rest, 3) * (c - 2 * b + a)


def memory_footprint(model: PreTrainedModel) -> Footprint:
    """How many entries the matrices of an encoder-decoder have, part by part (Subformer, Appendix A, Table 9).

    As in the table, vectors (biases, LayerNorms) do not count. Its last term has 4·d_s·d_m for the way up to the
    sandwich and down again; two matrices d_m×d_s are what the architecture has, and what is counted here.
    """
    parts = dict.fromkeys(("embedding", "encoder", "decoder", "output"), 0)
    for name, parameter in learned_parameters(model):
        if parameter.dim() < 2:
            continue
        stack, _, rest = name.removeprefix("model.").partition(".")
        if stack == "lm_head":
            part = "output"
        else:
            part = "embedding" if stack == "shared" or rest.startswith(("embed_", "safe.")) else stack
        parts[part] += parameter.numel()
    return Footprint(**parts)
