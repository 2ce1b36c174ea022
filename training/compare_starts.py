#!/usr/bin/env python
r"""Measure how fast models with random weights learn to reverse random tokens: mean loss after some hundred steps.

The table also has the cause: the share of the initial encoder's last hidden states that distinguishes the tokens.

    python training/compare_starts.py
    python training/compare_starts.py --models transformer=lightformer,init_std=0.02 subformer --seeds 0 1 2

A model with a bad initialization learns nothing here for hundreds of steps, for any size. The information of a single
token must pass all layers of the encoder, and cross-attention must find it by its position. A model is a `model_type`
(`marian` is the Transformer of transformers) and, after commas, fields of its configuration. By default it has 6 + 6
layers of width 96. A model and seed takes minutes of one core.
"""

from __future__ import annotations

import argparse
from statistics import fmean

import torch
from arguments import ScriptParser, check_model_fields, positive_number, read_value, seed_number
from common import run_script
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedModel

import lightformers_hf  # noqa: F401  registers the architectures with the Auto classes
from lightformers_hf.loading import build_network

TOKENS, LENGTH, SENTENCES = 56, 12, 64  # in the vocabulary, in a sentence, in a batch
SPECIAL = 4  # padding and its like come before the tokens
WARMUP, LEARNING_RATE, MEASURED = 100, 1e-3, 10  # steps; Adam's; the last so many steps count
WIDTH, LAYERS = 96, 6

SHAPES: dict[str, dict[str, object]] = {
    "": {
        "vocab_size": TOKENS + SPECIAL,
        "d_model": WIDTH,
        "encoder_layers": LAYERS,
        "decoder_layers": LAYERS,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "dropout": 0.0,
        "max_position_embeddings": 32,
        "pad_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
    },
    "lightformer": {"encoder_ffn_dim": 4 * WIDTH, "decoder_ffn_dim": 4 * WIDTH},
    "marian": {"encoder_ffn_dim": 4 * WIDTH, "decoder_ffn_dim": 4 * WIDTH, "scale_embedding": True},
    "subformer": {"ffn_dim": 4 * WIDTH, "sandwich_attention_heads": 4, "embedding_attention_heads": 4},
    "partialformer": {
        "head_dim": 16,
        "encoder_attention_heads": 16,
        "decoder_attention_heads": 12,
        "base_attention_heads": 4,
    },
}
MODELS = (
    "transformer of transformers=marian",
    "dense LightFormer=lightformer",
    "low-rank LightFormer=lightformer,attention_rank=32,ffn_rank=48,embedding_rank=32",
    "2 + 2 groups=lightformer,encoder_groups=2,decoder_groups=2",
    "Subformer=subformer",
    "PartialFormer=partialformer",
)


def make_model(description: str, seed: int) -> PreTrainedModel:
    """A fresh model of `model_type,field=value,…`.

    Raises:
        ValueError: the type is none of SHAPES, or the configuration refuses a field.
    """
    kind, *changes = description.split(",")
    if kind not in SHAPES or not kind:
        raise ValueError(f"no model type {kind!r} here: choose {', '.join(filter(None, SHAPES))}")
    given = dict(field.split("=", 1) for field in changes)
    check_model_fields(given, kind, f"--models {description}")
    fields = SHAPES[""] | SHAPES[kind] | {name: read_value(value, name) for name, value in given.items()}
    config = AutoConfig.for_model(kind, **fields)
    torch.manual_seed(seed)
    return build_network(AutoModelForSeq2SeqLM, config)


@torch.no_grad()
def own_share(model: PreTrainedModel, seed: int) -> float:
    """Share of the mean square of the encoder's last states that distinguishes the tokens of a sentence."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(SPECIAL, SPECIAL + TOKENS, (SENTENCES, LENGTH), generator=generator)
    states = model.get_encoder()(input_ids=ids).last_hidden_state
    return ((states - states.mean(1, keepdim=True)).square().mean() / states.square().mean()).item()


def learn(model: PreTrainedModel, seed: int, checks: list[int], bar: tqdm) -> list[float]:
    """Train, and return the loss (nats a token, mean of the last steps) at each of `checks`, numbers of steps."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    losses = []
    model.train()
    for _ in range(max(checks)):
        source = torch.randint(SPECIAL, SPECIAL + TOKENS, (SENTENCES, LENGTH), generator=generator)
        loss = model(input_ids=source, labels=source.flip(1)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        bar.update()
    return [fmean(losses[max(0, check - MEASURED) : check]) for check in checks]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = ScriptParser(__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME=TYPE[,FIELD=VALUE…]")
    parser.add_argument("--seeds", nargs="+", type=seed_number, default=[0])
    parser.add_argument(
        "--steps", nargs="+", type=positive_number, default=[300, 500], help="when to look (%(default)s)"
    )
    parser.add_argument("--threads", type=positive_number, default=1)
    return parser.parse_args()


def main() -> None:
    """Train every model with every seed and print the table."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    models = dict(model.split("=", 1) if "=" in model.split(",")[0] else (model, model) for model in args.models)
    for description in models.values():  # before the first trains for a minute
        make_model(description, 0)
    table = Table(
        "model", "a token's own share, fresh", *(f"nats after {steps} steps" for steps in args.steps), "start"
    )
    with tqdm(total=len(models) * len(args.seeds) * max(args.steps), unit="step") as bar:
        for name, description in models.items():
            bar.set_description(name)
            runs = []
            for seed in args.seeds:
                model = make_model(description, seed)
                runs.append([own_share(model.eval(), seed), *learn(model, seed, args.steps, bar)])
            table.add_row(name, *(f"{fmean(values):.2f}" for values in zip(*runs, strict=True)), description)
    Console().print(table)


if __name__ == "__main__":
    run_script(main)
