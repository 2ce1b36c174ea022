#!/usr/bin/env python
r"""Time the papers' architectures, each beside the Transformer that its paper compares with: decoding and training.

    python training/benchmark_architectures.py --pair partialformer-36m --no-training

That is transformers' own Marian, of equal width and vocabulary; of equal depth, too, but for LightFormer, whose paper
compares with six layers in each stack.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
from arguments import ScriptParser, positive_number
from common import print_answer, run_script
from count_parameters import ParameterRow, find_row
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import MarianConfig, MarianMTModel, PreTrainedModel

from lightformers_hf.evaluation.speed import Speed, generation_speed, run_ratios, speed_of, speed_ratio, take_turns
from lightformers_hf.loading import unique_parameters
from lightformers_hf.processors import use_threads

SOURCE_TOKENS = TARGET_TOKENS = 25
TRAINING_SENTENCES = 16
DECODING = {"greedy": 1, "beam 4": 4}
TRAINING = "training"
# Fields that the Marian takes from the architecture it is compared with.
SAME_FIELDS = (
    *("vocab_size", "d_model", "encoder_layers", "decoder_layers", "scale_embedding"),
    *("dropout", "attention_dropout", "activation_dropout"),
    *("pad_token_id", "eos_token_id", "decoder_start_token_id"),
)


@dataclass(frozen=True)
class Pair:
    """A row of the papers' parameter tables, and the decoding speed that its paper prints relative to a Transformer.

    Subformer's and PartialFormer's are of batches on a GPU, LightFormer's of one sentence on one core, as here.
    """

    table: str  # name of the row's table
    paper_ratio: float | None = None  # as printed, where it is
    fields: dict[str, int] = field(default_factory=dict)  # fields of the configuration that differ from the row
    transformer_layers: int | None = None  # layers of each stack of the Transformer; `None`: as in the architecture

    @property
    def row(self) -> ParameterRow:
        """The row, with the fields of this pair."""
        row = find_row(self.table)
        return replace(row, config=row.config | self.fields)


PAIRS = {
    "partialformer-63m": Pair("PartialFormer T1 6-6 512/64 24-16"),
    "partialformer-61m": Pair("PartialFormer T1 24-6 360/45 24-16"),
    "partialformer-36m": Pair("PartialFormer T5 #3 without head scaling", 1.52),  # PartialFormer, Table 9
    "subformer-base": Pair("Subformer T3 base En-De", 0.75),  # Subformer, Table 8
    "sandwich-base": Pair("Subformer T2 sandwich", 1.26),  # Subformer, Table 8
    # LightFormer, Table 7: IWSLT'14 De-En, encoder-decoder layers; 12-1 is not in it.
    "lightformer-18-3": Pair("LightFormer T6 r6 / T8 6 groups", 2.1, transformer_layers=6),
    "lightformer-18-2": Pair("LightFormer T7 18-2", 2.4, transformer_layers=6),
    "lightformer-12-1": Pair(
        "LightFormer T7 18-2", fields={"encoder_layers": 12, "decoder_layers": 1}, transformer_layers=6
    ),
}


@dataclass(frozen=True)
class Comparison:
    """Measurements of a pair."""

    name: str
    parameters: int
    transformer_parameters: int
    # `greedy`, `beam 4`, `training` → speeds of the architecture and of the Transformer, in target tokens a second.
    # Run i of the one was beside run i of the other.
    speeds: dict[str, tuple[Speed, Speed]]
    paper_ratio: float | None
    # How many times as many multiplications the Transformer's training step has, if they were counted.
    arithmetic: float | None

    def quartiles(self, measure: str) -> list[float]:
        """First and third quartile over the runs of how many times faster than the Transformer."""
        ratios = run_ratios(*self.speeds[measure])
        return quantiles(ratios * (1 + (len(ratios) == 1)), method="inclusive")[::2]

    def to_dict(self) -> dict:
        """Everything as nested dictionaries, for JSON. Runs are target tokens a second."""
        measures = {
            measure: {"runs": ours.runs, "transformer_runs": other.runs}
            | {"ratio": speed_ratio(ours, other), "quartiles": self.quartiles(measure)}
            for measure, (ours, other) in self.speeds.items()
        }
        fields = {name: value for name, value in vars(self).items() if name != "speeds"}
        return fields | {"table": PAIRS[self.name].table, "measures": measures}


def transformer_beside(pair: Pair, positions: int) -> MarianMTModel:
    """A Marian with random weights, the row's width and vocabulary, 8 heads, ReLU, FFN as the row has or of 4·d."""
    config = pair.row.model_config()
    fields = {name: getattr(config, name) for name in SAME_FIELDS}
    ffn_dim = getattr(config, "decoder_ffn_dim", 4 * config.d_model)
    for stack in ("encoder", "decoder"):
        fields |= {f"{stack}_ffn_dim": ffn_dim, f"{stack}_attention_heads": 8}
        fields |= {f"{stack}_layers": pair.transformer_layers} if pair.transformer_layers else {}
    fields |= {"activation_function": "relu", "max_position_embeddings": positions, "forced_eos_token_id": None}
    return MarianMTModel(MarianConfig(**fields))


def compare(
    name: str,
    *,
    runs: int = 10,
    new_tokens: int = TARGET_TOKENS,
    training: bool = True,
    bf16: bool = False,
    progress: bool = False,
) -> Comparison:
    """Time decoding and training of a pair on one core; its two models take turns within the same runs.

    Both have random weights and the same random inputs. Decoding: greedy and beam 4, one source of 25 tokens, `</s>`
    ignored. A training step is forward, backward and AdamW's step on 16 sentences of 25 source and 25 target tokens.

    Args:
        name: name of the pair, a key of `PAIRS`.
        runs: how often each is measured; a first time that warms up does not count.
        new_tokens: that are generated.
        training: measure training steps, too.
        bf16: training under bfloat16 autocast instead of float32.
        progress: show a bar on stderr.

    Raises:
        ValueError: an unknown name, or `runs` or `new_tokens` below 1.
    """
    if name not in PAIRS:
        raise ValueError(f"unknown pair {name!r}, expected one of {', '.join(PAIRS)}")
    if runs < 1 or new_tokens < 1:
        raise ValueError(f"runs is {runs} and new_tokens is {new_tokens}, expected 1 or more")
    pair = PAIRS[name]
    row, positions = pair.row, max(new_tokens, SOURCE_TOKENS) + 1
    models = {name: row.build(), "transformer": transformer_beside(pair, positions)}
    batch = random_batch(row.config["vocab_size"])
    source = {field: batch[field][:1] for field in ("input_ids", "attention_mask")}
    inputs: dict[str, Any] = {key: [source] for key in models}
    arithmetic = None
    shown: dict[str, Any] = {"runs": runs, "progress": progress}
    searched: dict[str, Any] = {"forced_length": new_tokens, "do_sample": False} | shown
    speeds = {
        measure: generation_speed(models, inputs, num_beams=beams, **searched) for measure, beams in DECODING.items()
    }
    if training:
        ours, transformers = (training_flops(model, batch) for model in models.values())
        arithmetic = transformers / ours
        speeds[TRAINING] = training_speed(models, batch, bf16=bf16, **shown)
    compared = {measure: (speed[name], speed["transformer"]) for measure, speed in speeds.items()}
    sizes = [unique_parameters(model) for model in models.values()]
    return Comparison(name, sizes[0], sizes[1], compared, pair.paper_ratio, arithmetic)


def training_flops(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> int:
    """Floating-point operations of the matrix products in one training step of `model`, whose gradients go."""
    model.train()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # fused attention is not counted
        model(**batch).loss.backward()
    model.zero_grad()
    return counter.get_total_flops()


def random_batch(vocab_size: int) -> dict[str, torch.Tensor]:
    """16 sentences of 25 tokens and as many labels, no special tokens, no padding: each (16, 25)."""
    generator = torch.Generator().manual_seed(0)
    shape = (TRAINING_SENTENCES, SOURCE_TOKENS)
    return {
        "input_ids": torch.randint(3, vocab_size, shape, generator=generator),
        "attention_mask": torch.ones(shape, dtype=torch.long),
        "labels": torch.randint(3, vocab_size, (TRAINING_SENTENCES, TARGET_TOKENS), generator=generator),
    }


def training_speed(
    models: dict[str, PreTrainedModel],
    batch: dict[str, torch.Tensor],
    *,
    runs: int = 10,
    bf16: bool = False,
    progress: bool = False,
) -> dict[str, Speed]:
    """Target tokens a second of a training step (forward, backward, AdamW) of each model in turn, on one core.

    The models are trained: their weights change. `batch` holds the arguments of their forward, `labels` among them.
    """

    def step(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> tuple[int, float]:
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return batch["labels"].numel(), time.perf_counter() - start

    steps = {
        name: partial(step, model.train(), torch.optim.AdamW(model.parameters())) for name, model in models.items()
    }
    with use_threads(1):
        for first in steps.values():  # which also makes AdamW's moments
            first()
        timed = take_turns(steps, runs=runs, progress=progress, what="training steps")
    return {name: speed_of(results) for name, results in timed.items()}


def comparison_table(comparisons: list[Comparison]) -> Table:
    """A rich table: three rows a pair, medians over the runs, ratios with quartiles, the paper's, arithmetic's."""
    table = Table(
        title="Beside Marian of equal width and vocabulary: one core, batch 1, random weights",
        caption="medians of interleaved runs; speed: how many times as fast as the Transformer (quartiles); "
        "arithmetic: how many times as many multiplications the Transformer has",
    )
    for heading in ("pair", "parameters", "", "ours", "Transformer", "speed", "paper", "arithmetic"):
        table.add_column(heading, justify="left" if heading in ("pair", "") else "right")
    for comparison in comparisons:
        sizes = f"{comparison.parameters / 1e6:.1f} / {comparison.transformer_parameters / 1e6:.1f}M"
        first = [comparison.name, sizes]
        for measure, speeds in comparison.speeds.items():
            rates = [median(speed.runs) for speed in speeds]
            if measure == TRAINING:
                cells = [f"{speed.tokens / rate:.2f} s/step" for speed, rate in zip(speeds, rates, strict=True)]
            else:
                cells = [f"{rate:,.1f} tokens/s" for rate in rates]
            low, high = comparison.quartiles(measure)
            ratio = f"{speed_ratio(*speeds):.2f}x ({low:.2f}–{high:.2f})"
            printed = comparison.paper_ratio if measure != TRAINING else None
            limit = f"{comparison.arithmetic:.2f}x" if measure == TRAINING and comparison.arithmetic else ""
            table.add_row(*first, measure, *cells, ratio, f"{printed}x" if printed else "", limit)
            first = ["", ""]
        table.add_section()
    return table


def main() -> None:
    """Print the table of all pairs that were asked for."""
    parser = ScriptParser(__doc__)
    parser.add_argument("--pair", action="append", help=f"only this one: {', '.join(PAIRS)}. Repeatable")
    parser.add_argument("--runs", type=positive_number, default=10, help="interleaved runs; medians are shown")
    parser.add_argument("--new-tokens", type=positive_number, default=TARGET_TOKENS, help="tokens generated in a run")
    parser.add_argument("--training", action=argparse.BooleanOptionalAction, default=True, help="time training, too")
    parser.add_argument("--bf16", action="store_true", help="train under bfloat16 autocast")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON; -: to stdout, and nothing else")
    args = parser.parse_args()
    settings = {"runs": args.runs, "new_tokens": args.new_tokens, "training": args.training, "bf16": args.bf16}
    comparisons = [compare(name, **settings, progress=True) for name in args.pair or PAIRS]
    print_answer([comparison_table(comparisons)], [comparison.to_dict() for comparison in comparisons], args.json)


if __name__ == "__main__":
    run_script(main)
