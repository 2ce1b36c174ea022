#!/usr/bin/env python
"""Train a causal language model: a checkpoint, or the shapes of a configuration from random weights.

    python training/build_tokenizer.py train.txt.gz --kind words --output words
    python training/run_clm.py --config-name shapes.json --tokenizer-name words --train-file train.txt.gz \
        --validation-file validation.txt --test-file test.txt --output-dir language_model \
        --block-size 512 --context-size 448 --per-device-train-batch-size 8 --max-steps 20000 \
        --learning-rate 1e-3 --lr-scheduler-type cosine --warmup-steps 1000 --eval-strategy steps --eval-steps 1000

The lines of a text become one stream of tokens, each ended by the tokenizer's end token, which also begins the stream.
The model reads it in blocks of `--block-size` tokens. In training and in evaluation every token is predicted once.
In evaluation the first `--context-size` tokens of a block repeat the block before, so that every token is predicted
from that many or more (Baevski & Auli 2019, arXiv 1809.10853). Perplexity is exp of the mean loss over all tokens of
the text, end tokens counted.

The data decide the steps: training, evaluation, test. All options of `TrainingArguments` work. In addition,
`--nesterov-momentum 0.99 --lr-scheduler-type cosine` is the optimizer of that paper. An interrupted run resumes with
`--resume-from-checkpoint` added to the same command. The tokenizer gives the token fields (`vocab_size`, ids of pad,
bos and eos) that a `shapes.json` lacks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import arguments
import numpy as np
import torch
import transformers
from arguments import ModelArguments, OutputArguments, parse_arguments
from common import (
    build_model,
    check_metric,
    check_output,
    check_positions,
    load_parts,
    load_texts,
    load_tokenizer,
    run_script,
    score_tests,
    summarize,
    train_and_evaluate,
)
from datasets import Dataset, Features, Value
from rich.console import Console
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import EvalLoopOutput

from lightformers_hf.recovery import FiniteTrainer

IGNORED = -100  # the label of a token that is only read


@dataclass
class DataArguments(arguments.DataArguments):
    """Options of the data."""

    text_column: str = field(default="text", metadata={"help": "Column of the text, where data has columns."})
    block_size: int = field(default=512, metadata={"help": "Tokens that the model reads at once."})
    context_size: int = field(
        default=1, metadata={"help": "Evaluation: tokens of a block that are predicted in the block before."}
    )
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that tokenize."})


@dataclass
class TrainingArguments(OutputArguments, transformers.TrainingArguments):
    """`TrainingArguments`, with a resume that finds its checkpoint."""

    nesterov_momentum: float | None = field(
        default=None, metadata={"help": "Train by SGD with so much Nesterov momentum, instead of optim."}
    )


class Blocks(torch.utils.data.Dataset):
    """A stream of tokens in overlapping blocks: `input_ids` and `labels`, both (block_size,).

    Every token but the first is the label of one block. The first `context` tokens of a block are none. They are the
    last ones of the block before. The first block has nothing before it, and begins with the stream's first
    token. The last block is filled with `pad`, ignored; causal models need no mask for it.

    Args:
        multiple: add blocks without labels until their number is a multiple of this. Several processes then need not
            repeat blocks to have as many for each.
    """

    def __init__(self, stream: Sequence[int], block_size: int, *, context: int, pad: int, multiple: int = 1):
        self.stream, self.block_size, self.context, self.pad = stream, block_size, context, pad
        blocks = 1 + max(0, math.ceil((len(stream) - block_size) / (block_size - context)))
        self.blocks = math.ceil(blocks / multiple) * multiple
        self.labels = len(stream) - 1

    def __len__(self) -> int:
        return self.blocks

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = index * (self.block_size - self.context)
        tokens = torch.from_numpy(self.stream[start : start + self.block_size].astype(np.int64))
        ids = torch.full((self.block_size,), self.pad)
        labels = torch.full((self.block_size,), IGNORED)
        read_only = self.context if index else 1
        ids[: len(tokens)] = tokens
        labels[read_only : len(tokens)] = tokens[read_only:]
        return {"input_ids": ids, "labels": labels}


class LanguageModelTrainer(FiniteTrainer):
    """`FiniteTrainer` with an exact evaluation of `Blocks`: `loss` in nats a token and `perplexity`, over all tokens.

    It needs nothing of the model but its mean loss, no logits: an adaptive softmax makes none in training.
    """

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """The sum of the loss over a batch's labels, divided by its blocks, because `Trainer` averages over blocks."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            mean = model(**inputs).loss
        labels = (inputs["labels"][:, 1:] != IGNORED).sum()
        total = torch.where(labels > 0, mean * labels, 0)  # the mean of no labels is not a number
        return total / len(inputs["labels"]), None, None

    def evaluation_loop(self, dataloader, *args, metric_key_prefix: str = "eval", **kwargs) -> EvalLoopOutput:
        """As `Trainer` does, with the loss taken from blocks to tokens."""
        output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        blocks = dataloader.dataset
        loss = output.metrics[f"{metric_key_prefix}_loss"] * len(blocks) / blocks.labels
        output.metrics[f"{metric_key_prefix}_loss"] = loss
        output.metrics[f"{metric_key_prefix}_perplexity"] = math.exp(loss) if loss < 700 else math.inf
        output.metrics[f"{metric_key_prefix}_tokens"] = blocks.labels
        return output


def check_options(args: TrainingArguments, data: DataArguments) -> None:
    """Raise a `ValueError` for options that cannot be."""
    if data.block_size < 2:
        raise ValueError(f"block_size is {data.block_size}: expected at least 2.")
    if not 1 <= data.context_size < data.block_size:
        raise ValueError(f"context_size is {data.context_size}: expected from 1 to block_size - 1.")
    if args.label_smoothing_factor:
        raise ValueError("label_smoothing_factor is not for language models: perplexity is of the text as it is.")
    check_metric(args, ("perplexity",))
    if args.nesterov_momentum is not None and not 0 < args.nesterov_momentum < 1:
        raise ValueError(f"nesterov_momentum is {args.nesterov_momentum}: expected between 0 and 1.")


def token_stream(texts: Dataset, tokenizer: PreTrainedTokenizerBase, num_proc: int | None = None) -> Sequence[int]:
    """One stream of token ids: the end token, then each text followed by the end token.

    Slices of it are arrays. It lies in a file of the `datasets` cache that is mapped, not read, into memory.
    """
    end = tokenizer.eos_token_id

    def tokenize(batch: dict[str, list[str]], rows: list[int]) -> dict[str, list[int]]:
        ids = tokenizer(batch["text"], add_special_tokens=False, verbose=False)["input_ids"]
        first = [end] if rows[0] == 0 else []
        return {"id": first + [token for text in ids for token in (*text, end)]}

    tokens = texts.map(
        tokenize, batched=True, with_indices=True, remove_columns=texts.column_names, num_proc=num_proc,
        features=Features({"id": Value("int32")}), desc="Tokenizing",
    )  # fmt: skip
    return tokens.with_format("numpy")["id"]


def check_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, block_size: int) -> None:
    """Raise a `ValueError` if there is no end token, or a block has more tokens than the model has positions."""
    if tokenizer.eos_token_id is None:
        raise ValueError(f"The tokenizer {tokenizer.name_or_path} has no end token (eos_token): lines need one.")
    check_positions(model, block_size=block_size)


def main(argv: list[str] | None = None) -> None:
    """Train, evaluate, test, save, summarize."""
    model_args, data_args, args = parse_arguments((ModelArguments, DataArguments, TrainingArguments), argv)
    console = Console(quiet=not args.should_save)
    checkpoint = check_output(args, [model_args.model_name_or_path, model_args.config_name, model_args.tokenizer_name])
    check_options(args, data_args)
    parts = load_parts(data_args, partial(load_texts, columns=[data_args.text_column]))
    if args.eval_strategy != "no" and "validation" not in parts:
        raise ValueError(f"eval_strategy is {args.eval_strategy}: give --validation-file.")
    set_seed(args.seed)
    tokenizer = load_tokenizer(model_args)
    tokenizer.padding_side = tokenizer.init_kwargs.get("padding_side", "right")  # a decoder may have its own
    model = build_model(model_args, tokenizer, AutoModelForCausalLM)
    check_model(model, tokenizer, data_args.block_size)

    multiple = args.eval_batch_size * args.world_size
    blocks = {}
    with args.main_process_first():
        for part, texts in parts.items():
            stream = token_stream(texts, tokenizer, data_args.preprocessing_num_workers)
            layout = {"context": data_args.context_size, "multiple": multiple} if part != "train" else {"context": 1}
            blocks[part] = Blocks(stream, data_args.block_size, pad=tokenizer.eos_token_id, **layout)
    optimizer = None
    if args.nesterov_momentum is not None:
        sgd = {"lr": args.learning_rate, "momentum": args.nesterov_momentum, "nesterov": True}
        optimizer = (torch.optim.SGD, sgd)
    trainer = LanguageModelTrainer(
        model,
        args,
        train_dataset=blocks.get("train"),
        eval_dataset=blocks.get("validation"),
        data_collator=default_data_collator,
        processing_class=tokenizer,
        optimizer_cls_and_kwargs=optimizer,
    )
    score = partial(score_tests, trainer, blocks, ("loss", "perplexity", "tokens"))
    rows = train_and_evaluate(trainer, blocks, checkpoint, model_args, ("loss", "perplexity"), score)
    summarize(rows, console)


if __name__ == "__main__":
    run_script(main)
