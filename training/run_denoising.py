#!/usr/bin/env python
"""Pretrain an encoder-decoder as BART was: it reads noised text and writes the text (Lewis et al. 2020, 1910.13461).

    python training/build_tokenizer.py corpus.txt.gz --kind unigram --vocab-size 32000 --output tokenizer
    python training/run_denoising.py --config-name shapes.json --tokenizer-name tokenizer \
        --train-files corpus-*.txt.gz --validation-file held_out.txt --output-dir pretrained \
        --block-size 512 --per-device-train-batch-size 8 --max-steps 500000 --learning-rate 4e-4 \
        --lr-scheduler-type polynomial --warmup-steps 10000 --eval-strategy steps --eval-steps 10000

Text is read as a stream, so a corpus may be larger than memory: lines of .txt, or a column of .json, .jsonl or
.parquet files or of a Hub dataset. Consecutive sentences fill blocks of at most `--block-size` tokens. The sentences
of a block are put in random order. Then spans of tokens are each replaced by one `<mask>`: lengths are Poisson(3), and
30 % of the tokens are in spans. A span of length zero inserts a mask. The noise of a block
follows from `--seed`, the pass over the data and the block's number. The stream starts again at its end;
`--max-steps` ends it. An interrupted run resumes with `--resume-from-checkpoint`. The validation's
perplexity is that of its loss, which is the mean of the batches' means.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import torch
from arguments import ModelArguments, OutputArguments, parse_arguments
from common import (
    build_model,
    check_metric,
    check_output,
    check_positions,
    load_tokenizer,
    run_script,
    summarize,
    train_and_evaluate,
)
from datasets import Dataset, IterableDataset, load_dataset
from rich.console import Console
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerBase,
    Seq2SeqTrainingArguments,
    set_seed,
)

from lightformers_hf.recovery import RecoveryTrainer

BUILDERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
SENTENCE_END = re.compile(r"(?<=[.!?])(?=\s)")  # the space stays with the sentence behind it: so pieces stay words'
ROWS = 256  # tokenized at once
PLAIN_NAME = re.compile(r"[\w/. +,=@-]*")


@dataclass
class DataArguments:
    """Options of the data and of the noise."""

    train_files: list[str] = field(
        default_factory=list, metadata={"help": "One or more of .txt, .json, .jsonl (.gz) or .parquet."}
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "Hub dataset, name or name:configuration, to train on instead."}
    )
    train_split: str = field(default="train", metadata={"help": "Its training split."})
    validation_file: str | None = field(default=None, metadata={"help": "As train_files."})
    text_column: str = field(default="text", metadata={"help": "Column of the text, where data has columns."})
    max_eval_samples: int = field(default=1000, metadata={"help": "Use only the first so many validation blocks."})
    block_size: int = field(
        default=512, metadata={"help": "Tokens of a block, those of the tokenizer's ends counted."}
    )
    shuffle_buffer: int = field(
        default=10000, metadata={"help": "Rows that the next one is drawn from; 0 keeps the order of the data."}
    )
    mask_share: float = field(default=0.3, metadata={"help": "Share of tokens that masks replace."})
    mean_span: float = field(default=3.0, metadata={"help": "λ of the spans' lengths."})
    permute_sentences: bool = field(default=True, metadata={"help": "Put the sentences in random order."})


@dataclass
class TrainingArguments(OutputArguments, Seq2SeqTrainingArguments):
    """`Seq2SeqTrainingArguments`, with a resume that finds its checkpoint."""


def span_lengths(total: int, mean: float, random: np.random.Generator) -> np.ndarray:
    """Poisson(`mean`) lengths, as many as it takes to reach the sum `total`, in random order; one is cut to fit."""
    lengths = np.zeros(0, dtype=np.int64)
    while lengths.sum() < total:
        lengths = np.concatenate([lengths, random.poisson(mean, size=16)])
    ends = lengths.cumsum()
    lengths = lengths[: int(np.searchsorted(ends, total)) + 1]
    lengths[-1] -= lengths.sum() - total
    return random.permutation(lengths)  # the last one drawn is never zero


def infill(ids: list[int], mask: int, *, share: float, mean: float, random: np.random.Generator) -> list[int]:
    """Text infilling: round(`share` · n) of the n `ids` are in spans, and `mask` stands for each span.

    The spans' lengths are Poisson(`mean`); one of length zero puts a mask between two tokens. Every arrangement with
    a token between neighbouring spans is as likely as any other. The text does not become longer: there are at most as
    many spans as tokens in them.
    """
    masked = round(share * len(ids))
    if masked == 0:
        return ids
    lengths = span_lengths(masked, mean, random)
    lengths = np.delete(lengths, np.flatnonzero(lengths == 0)[: max(0, len(lengths) - masked)])
    places = len(ids) - masked + 1  # before, between and behind the tokens that stay
    before = np.sort(random.choice(places, len(lengths), replace=len(lengths) > places))
    starts = before + lengths.cumsum() - lengths
    noised, end = [], 0
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        noised += [*ids[end:start], mask]
        end = start + length
    return noised + ids[end:]


class NoisedBlocks(torch.utils.data.IterableDataset):
    """Blocks of `texts` (a stream with the column `text`): `input_ids` noised, `labels` not, both with end tokens.

    Args:
        repeat: begin anew, in another order and with other noise, whenever the texts end.
        seed: of the noise.

    With workers each block is one worker's. Raises `ValueError` when iterated if the texts hold no words.
    """

    def __init__(
        self, texts: IterableDataset, tokenizer: PreTrainedTokenizerBase, data: DataArguments, seed: int, repeat: bool
    ) -> None:
        self.texts, self.tokenizer, self.data, self.seed, self.repeat = texts, tokenizer, data, seed, repeat
        self.ends = end_tokens(tokenizer)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for epoch in itertools.count():
            self.texts.set_epoch(epoch)
            number = -1
            for number, block in enumerate(self.blocks()):
                if number % step == first:
                    yield self.noise(block, np.random.default_rng([self.seed, epoch, number]))
            if number < 0:
                raise ValueError("The training data holds no words: expected at least one.")
            if not self.repeat:
                return

    def blocks(self) -> Iterator[list[list[int]]]:
        """Consecutive sentences of at most `block_size` tokens together, the ends counted; longer ones are cut."""
        room = self.data.block_size - sum(map(len, self.ends))
        block, used = [], 0
        for sentence in self.sentences():
            for start in range(0, len(sentence), room):
                piece = sentence[start : start + room]
                if used + len(piece) > room:
                    yield block
                    block, used = [], 0
                block.append(piece)
                used += len(piece)
        if block:
            yield block

    def sentences(self) -> Iterator[list[int]]:
        """The ids of every sentence."""
        for rows in self.texts.iter(ROWS):
            if not all(isinstance(text, str) for text in rows["text"]):
                raise ValueError(f"Column {self.data.text_column!r}: expected a text in every row.")
            sentences = [part for text in rows["text"] for part in SENTENCE_END.split(text) if part.strip()]
            if sentences:
                yield from self.tokenizer(sentences, add_special_tokens=False, verbose=False)["input_ids"]

    def noise(self, sentences: list[list[int]], random: np.random.Generator) -> dict[str, list[int]]:
        """Inputs and targets of the model for a block."""
        data, (begin, end) = self.data, self.ends
        order = random.permutation(len(sentences)) if data.permute_sentences else range(len(sentences))
        ids = [token for i in order for token in sentences[i]]
        noised = infill(ids, self.tokenizer.mask_token_id, share=data.mask_share, mean=data.mean_span, random=random)
        noised = [*begin, *noised, *end]
        labels = [*begin, *itertools.chain.from_iterable(sentences), *end]
        return {"input_ids": noised, "attention_mask": [1] * len(noised), "labels": labels}


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Tokens that the tokenizer adds before and after a text."""
    bare, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    start = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    return whole[:start], whole[start + len(bare) :]


def load_stream(names: list[str], column: str, *, hub: bool = False, split: str = "train") -> IterableDataset:
    """The texts of files of one kind, or of a Hub dataset, as a stream with the column `text`.

    Raises `FileNotFoundError` for a missing file, `ValueError` for unknown or different types, for data without a
    row or the column, or without text in its first row.
    """
    if hub:
        name, _, configuration = names[0].partition(":")
        rows = load_dataset(name, configuration or None, split=split, streaming=True)
    else:
        if missing := [name for name in names if not Path(name).is_file()]:
            raise FileNotFoundError(f"No data file {missing[0]}: give existing files.")
        kinds = {BUILDERS.get(Path(name.removesuffix(".gz")).suffix) for name in names}
        if len(kinds) != 1 or None in kinds:
            raise ValueError(
                f"{', '.join(names)}: expected files of one kind, of {', '.join(BUILDERS)} (.gz allowed)."
            )
        rows = load_dataset(
            kinds.pop(), data_files=[exact_name(Path(name)) for name in names], split="train", streaming=True
        )
        column = "text" if Path(names[0].removesuffix(".gz")).suffix == ".txt" else column
    first = next(iter(rows), None)
    if first is None:
        raise ValueError(f"{', '.join(names)}: no rows, expected at least one text.")
    if column not in first:
        raise ValueError(f"{', '.join(names)}: no column {column!r}; there are {', '.join(map(repr, first))}.")
    if not isinstance(first[column], str):
        raise ValueError(f"{names[0]}, column {column!r}: expected text, found {first[column]!r}.")
    rows = rows.select_columns([column])
    return rows if column == "text" else rows.rename_column(column, "text")


def exact_name(path: Path) -> str:
    """A name by which the datasets library reads `path` and nothing else: that of a link, where it would take
    characters for a pattern, a variable or a chain of archives (`[`, `*`, `?`, `$`, `::`). Links go with this process.
    """
    path = Path(os.path.abspath(path))
    if PLAIN_NAME.fullmatch(str(path)):
        return str(path)
    endings = "".join(path.suffixes[-2:] if path.suffix == ".gz" else path.suffixes[-1:])  # `.jsonl`, `.jsonl.gz`
    link = Path(_links().name, hashlib.sha256(os.fsencode(path)).hexdigest()[:16] + endings)
    if not link.is_symlink():
        link.symlink_to(path)
    return str(link)


@cache
def _links() -> tempfile.TemporaryDirectory:
    """A folder for links, which is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="lightformers-")


class DenoisingTrainer(RecoveryTrainer):
    """`RecoveryTrainer` whose evaluation also has the perplexity."""

    def evaluate(self, *args: object, **kwargs: object) -> dict[str, float]:
        """As in `RecoveryTrainer`."""
        metrics = super().evaluate(*args, **kwargs)
        return metrics | {"eval_perplexity": math.exp(min(metrics["eval_loss"], 700))}


def check_options(args: TrainingArguments, data: DataArguments) -> None:
    """Raise a `ValueError` for options that cannot be."""
    if bool(data.train_files) == bool(data.dataset_name):
        raise ValueError("Give the text to train on: one of --train-files and --dataset-name.")
    if args.max_steps < 1:
        raise ValueError("A stream has no end: give --max-steps.")
    if args.eval_strategy != "no" and not data.validation_file:
        raise ValueError(f"eval_strategy is {args.eval_strategy}: give --validation-file.")
    check_metric(args, ())
    if args.label_smoothing_factor:
        raise ValueError("label_smoothing_factor is not for denoising: perplexity is of the text as it is.")
    if not 0 < data.mask_share < 1:
        raise ValueError(f"mask_share is {data.mask_share}: expected between 0 and 1.")
    if data.mean_span <= 0:
        raise ValueError(f"mean_span is {data.mean_span}: expected above 0.")


def prepare_tokenizer(args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a tokenizer that has no mask one, for a model of random weights. Raises `ValueError` for a checkpoint."""
    if tokenizer.mask_token_id is None:
        if args.model_name_or_path and not args.from_scratch:
            raise ValueError(f"The tokenizer {tokenizer.name_or_path} has no mask token. Choose a tokenizer with one.")
        tokenizer.add_special_tokens({"mask_token": "<mask>"})


def main(argv: list[str] | None = None) -> None:
    """Train, evaluate, save, summarize."""
    model_args, data_args, args = parse_arguments((ModelArguments, DataArguments, TrainingArguments), argv)
    console = Console(quiet=not args.should_save)
    checkpoint = check_output(args, [model_args.model_name_or_path, model_args.config_name, model_args.tokenizer_name])
    check_options(args, data_args)
    hub = {"hub": True, "split": data_args.train_split} if data_args.dataset_name else {}
    texts = load_stream(data_args.train_files or [data_args.dataset_name], data_args.text_column, **hub)
    if data_args.shuffle_buffer:
        texts = texts.shuffle(seed=args.seed, buffer_size=data_args.shuffle_buffer)
    held_out = None
    if data_args.validation_file:
        held_out = load_stream([data_args.validation_file], data_args.text_column)
    set_seed(args.seed)
    tokenizer = load_tokenizer(model_args)
    prepare_tokenizer(model_args, tokenizer)
    model = build_model(model_args, tokenizer, AutoModelForSeq2SeqLM)
    if data_args.block_size < 8:
        raise ValueError(f"block_size is {data_args.block_size}: expected at least 8.")
    check_positions(model, block_size=data_args.block_size)
    if held_out is not None:
        held_out = NoisedBlocks(held_out, tokenizer, data_args, args.seed, repeat=False)
        held_out = Dataset.from_list(list(itertools.islice(held_out, data_args.max_eval_samples)))
    # Every process reads the stream and takes its part: batches of unlike lengths cannot be sent from one to all.
    args.accelerator_config.dispatch_batches = False
    trainer = DenoisingTrainer(
        model,
        args,
        train_dataset=NoisedBlocks(texts, tokenizer, data_args, args.seed, repeat=True),
        eval_dataset=held_out,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
    )
    parts = ("train",) if held_out is None else ("train", "validation")
    summarize(train_and_evaluate(trainer, parts, checkpoint, model_args, ("loss", "perplexity")), console)


if __name__ == "__main__":
    run_script(main)
