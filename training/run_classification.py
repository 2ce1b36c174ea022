#!/usr/bin/env python
"""Train a text classifier: on a training part, or by cross-validation on folds of one file (LightFormer, Table 5).

    python training/build_tokenizer.py reviews.jsonl --kind words --output words
    python training/run_classification.py --config-name shapes.json --tokenizer-name words \
        --train-file reviews.jsonl --num-folds 10 --word-vectors glove.6B.300d.txt --output-dir dense \
        --per-device-train-batch-size 50 --num-train-epochs 10 --learning-rate 3e-4 --save-strategy epoch \
        --eval-strategy epoch --load-best-model-at-end --metric-for-best-model accuracy
    for fold in 0 1 2 3 4 5 6 7 8 9; do lightformers convert dense/fold-$fold light/fold-$fold --rank 48; done
    python training/run_classification.py --model-name-or-path 'light/fold-{fold}' --train-file reviews.jsonl …

Data: a text and its class in two columns of a .json, .jsonl, .csv, .tsv or .parquet file or of a Hub dataset. Fold k
is tested by a model that is trained on all the others. With an `--eval-strategy`, fold k+1 is not trained on and
chooses the best checkpoint. Folds are those of `--fold-column`, or `--num-folds` drawn so that each has its share of
every class. Every fold begins with the same weights (`{fold}` in a model's name is the fold's number) and leaves its
model in `fold-<k>`. The result is the mean accuracy and the standard deviation over the folds; without folds it is the
accuracy on the test part. `--resume-from-checkpoint` resumes an interrupted run, and complete folds are kept.

The model may be a classifier, or a translation model that `lightformers convert` wrote: its encoder is then taken.
`--word-vectors` (GloVe or fastText text format) initializes an embedding matrix of the same width
(`"embedding_dim": 300`), or a low-rank one (`"embedding_rank"`) by SVD.
"""

from __future__ import annotations

import copy
import json
import re
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

import arguments
import numpy as np
import torch
import transformers
from arguments import ModelArguments, OutputArguments, parse_arguments
from common import (
    check_metric,
    check_output,
    check_positions,
    load_config,
    load_parts,
    load_tokenizer,
    remove_results,
    run_script,
    score_tests,
    summarize,
    train_and_evaluate,
)
from datasets import ClassLabel, Dataset
from rich.console import Console
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from word_vectors import start_embedding

from lightformers_hf.evaluation.quality import load_metric
from lightformers_hf.loading import build_network, load_pretrained
from lightformers_hf.recovery import FiniteTrainer
from lightformers_hf.text import load_rows, take_rows

HEADS = ("classifier.", "classification_head.", "pre_classifier.", "score.")
# Files of a cross-validation in its folder.
OF_FOLDS = r"fold-.+|options\.json|test_results\.json"


@dataclass
class DataArguments(arguments.DataArguments):
    """Options of the data."""

    text_column: str = field(default="text", metadata={"help": "Column of the text."})
    label_column: str = field(default="label", metadata={"help": "Column of its class, a number or a name."})
    num_folds: int | None = field(default=None, metadata={"help": "Cross-validation: folds to draw of train_file."})
    fold_column: str | None = field(default=None, metadata={"help": "Cross-validation: column of the fold, from 0."})
    max_length: int = field(default=256, metadata={"help": "Tokens; longer texts are cut."})
    word_vectors: str | None = field(
        default=None, metadata={"help": "Text file, a word and its vector a line (.gz): start of the embedding."}
    )


@dataclass
class TrainingArguments(OutputArguments, transformers.TrainingArguments):
    """`TrainingArguments`, with a resume that finds its checkpoint."""


def load_labelled(data: str, arguments: DataArguments, *, split: str = "train", max_samples: int | None) -> Dataset:
    """Columns `text` and `label` (class names as text), and `fold` where there is a fold column.

    Raises `ValueError` for columns that are missing, texts that are none, rows without a label.
    """
    rows = load_rows(data, split=split)
    columns = {"text": arguments.text_column, "label": arguments.label_column}
    if arguments.fold_column:
        columns["fold"] = arguments.fold_column
    if missing := [name for name in columns.values() if name not in rows.column_names]:
        there = ", ".join(map(repr, rows.column_names))
        raise ValueError(f"{data} has no column {missing[0]!r}: it has {there}.")
    rows = take_rows(rows, max_samples)
    texts, labels = rows[columns["text"]][:], rows[columns["label"]][:]
    for column, kinds, wanted in (("text", (str,), "text"), ("label", (str, int, bool), "a number or a name")):
        for number, value in enumerate(texts if column == "text" else labels, start=1):
            if not isinstance(value, kinds) or value == "":
                raise ValueError(f"{data}, row {number}, {columns[column]!r}: expected {wanted}, found {value!r}.")
    feature = rows.features[columns["label"]]
    names = feature.names if isinstance(feature, ClassLabel) else None
    for number, label in enumerate(labels if names else (), start=1):
        if not 0 <= label < len(names):
            raise ValueError(
                f"{data}, row {number}, {arguments.label_column!r}: there is no class {label}; a split without labels "
                "is omitted by an empty name, as in --test-split ''."
            )
    loaded = {"text": texts, "label": [names[label] if names else str(label) for label in labels]}
    if arguments.fold_column:
        loaded["fold"] = []
        for number, fold in enumerate(rows[columns["fold"]][:], start=1):
            try:
                loaded["fold"].append(int(fold))
            except (TypeError, ValueError):
                where = f"{data}, row {number}, {arguments.fold_column!r}"
                raise ValueError(f"{where}: expected a whole number, found {fold!r}.") from None
    return Dataset.from_dict(loaded)


def stratified_folds(labels: list[str], folds: int, seed: int) -> np.ndarray:
    """A fold from 0 for each of `labels`: every fold has its share of every class, to one row, and of all, to one.

    Raises `ValueError` for fewer than two folds, or more than the rarest class has rows.
    """
    classes, members = np.unique(labels, return_inverse=True)
    rarest = np.bincount(members).argmin()
    most = (members == rarest).sum()
    if not 2 <= folds <= most:
        raise ValueError(f"num_folds is {folds}: expected from 2 to {most}, the rows of class '{classes[rarest]}'.")
    # Class by class, in random order within each, rows are dealt out in turn.
    order = np.random.default_rng(seed).permutation(len(members))
    order = order[np.argsort(members[order], kind="stable")]
    assigned = np.empty(len(members), dtype=np.int64)
    assigned[order] = np.arange(len(members)) % folds
    return assigned


def find_classes(args: ModelArguments, parts: dict[str, Dataset]) -> list[str]:
    """The names of the classes: those of a trained classifier, else those of the training part, in order.

    Raises `ValueError` for rows of other classes, and for fewer than two.
    """
    classes, source = None, "the training data"
    if args.model_name_or_path and not args.from_scratch:
        content, _ = transformers.PreTrainedConfig.get_config_dict(args.model_name_or_path)
        if "ForSequenceClassification" in "".join(content.get("architectures") or ""):
            labels = load_pretrained(transformers.AutoConfig, args.model_name_or_path).id2label
            classes, source = [labels[i] for i in sorted(labels)], args.model_name_or_path
    if classes is None:
        if "train" not in parts:
            raise ValueError(f"{args.model_name_or_path} is no trained classifier: give --train-file.")
        found = set(parts["train"]["label"])
        classes = sorted(found, key=int if all(name.lstrip("-").isdecimal() for name in found) else None)
    for part, rows in parts.items():
        for number, label in enumerate(rows["label"], start=1):
            if label not in classes:
                known = ", ".join(map(repr, classes[:10]))
                raise ValueError(f"The {part} data, row {number}, is of class {label!r}; {source} has {known}.")
    if len(classes) < 2 or args.model.get("num_labels", len(classes)) != len(classes):
        wanted = args.model.get("num_labels", "at least 2")
        raise ValueError(f"{source} has {len(classes)} classes ({', '.join(classes[:10])}): expected {wanted}.")
    return classes


def build_classifier(
    args: ModelArguments, tokenizer: PreTrainedTokenizerBase, classes: list[str], vectors: str | None
) -> PreTrainedModel:
    """The classifier to train: random weights, a trained classifier, or one on the encoder of an encoder-decoder."""
    args = copy.deepcopy(args)
    args.model |= {"id2label": dict(enumerate(classes)), "label2id": {name: i for i, name in enumerate(classes)}}
    args.model["problem_type"] = "single_label_classification"  # as the first batch would set it
    args.model.pop("num_labels", None)
    config = load_config(args, tokenizer, AutoModelForSequenceClassification)
    if type(config) not in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ValueError(f"There is no classifier of type {config.model_type}: choose another, such as a lightformer.")
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"The tokenizer has {len(tokenizer)} entries, the model takes {config.vocab_size}: choose a tokenizer and "
            "a model that belong together."
        )
    name, options = args.model_name_or_path, {"attn_implementation": args.attn_implementation, "dtype": torch.float32}
    if name and not args.from_scratch:
        if vectors:
            raise ValueError(f"{name} has an embedding already: --word-vectors is for random weights.")
        options |= {"config": config, "output_loading_info": True}
        model, info = load_pretrained(AutoModelForSequenceClassification, name, **options)
        if missing := sorted(key for key in info["missing_keys"] if not key.startswith(HEADS)):
            raise ValueError(f"{name} lacks {len(missing)} of the encoder's weights, such as {missing[0]}.")
        return model
    model = build_network(AutoModelForSequenceClassification, config, **options)
    if vectors:
        start_embedding(model, tokenizer, vectors)
    return model


def tokenize(rows: Dataset, tokenizer: PreTrainedTokenizerBase, classes: list[str], max_length: int) -> Dataset:
    """`input_ids`, `attention_mask` and `labels` of each row. Raises `ValueError` for a text without a token."""
    number_of = {name: i for i, name in enumerate(classes)}

    def encode(batch: dict[str, list]) -> dict[str, list]:
        tokens = tokenizer(batch["text"], truncation=True, max_length=max_length, return_token_type_ids=False)
        empty = [text for text, ids in zip(batch["text"], tokens["input_ids"], strict=True) if not ids]
        if empty:
            raise ValueError(f"The text {empty[0]!r} has no token: remove it.")
        return {**tokens, "labels": [number_of[label] for label in batch["label"]]}

    return rows.map(encode, batched=True, remove_columns=rows.column_names, desc="Tokenizing")


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Share of rows whose class has the highest logit, in percent: exact matches of one word each."""
    both = prediction.predictions.argmax(axis=-1), prediction.label_ids
    chosen, labels = ([str(label) for label in part] for part in both)
    with tempfile.TemporaryDirectory() as folder:  # no cache of the user's is needed
        metric = load_metric("exact-match", cache_dir=folder)
        return {"accuracy": metric.compute(predictions=chosen, references=labels)["exact-match"]}


def run(
    model_args: ModelArguments,
    data_args: DataArguments,
    args: TrainingArguments,
    parts: dict[str, Dataset],
    classes: list[str],
    checkpoint: str | None,
) -> dict[str, object]:
    """Train, evaluate and test, each where there is data for it; the rows of the summary."""
    set_seed(args.seed)
    tokenizer = load_tokenizer(model_args)
    model = build_classifier(model_args, tokenizer, classes, data_args.word_vectors)
    check_positions(model, max_length=data_args.max_length)
    with args.main_process_first():
        tokens = {part: tokenize(rows, tokenizer, classes, data_args.max_length) for part, rows in parts.items()}
    trainer = FiniteTrainer(
        model,
        args,
        train_dataset=tokens.get("train"),
        eval_dataset=tokens.get("validation"),
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=accuracy,
    )
    table = sum(parameter.numel() for parameter in model.get_input_embeddings().parameters())
    score = partial(score_tests, trainer, tokens, ("loss", "accuracy"))
    rows = train_and_evaluate(trainer, tokens, checkpoint, model_args, ("loss", "accuracy"), score)
    return {"unique parameters": rows["unique parameters"], "in the embedding matrix": f"{table:,}"} | rows


def fold_parts(rows: Dataset, fold: int, folds: np.ndarray, *, validate: bool) -> dict[str, Dataset]:
    """The parts of a round of cross-validation: `fold` is the test, the next one the validation if `validate`."""
    numbers = np.unique(folds)
    following = numbers[(np.searchsorted(numbers, fold) + 1) % len(numbers)]
    chosen = {"test": folds == fold, "validation": (folds == following) & validate}
    chosen["train"] = ~(chosen["test"] | chosen["validation"])
    return {part: rows.select(np.flatnonzero(mask)) for part, mask in chosen.items() if mask.any()}


def check_record(record: Path, options: dict, resume: bool, write: bool) -> None:
    """Keep the options of a run in `record`. Raises `ValueError` if a resumed run has other options."""
    options = json.loads(json.dumps(options, default=str))
    if resume and record.is_file():
        before = json.loads(record.read_text(encoding="utf-8"))
        if differing := [name for name in options if before.get(name) != options[name]]:
            raise ValueError(
                f"{record.parent} was begun with {differing[0]} {before.get(differing[0])!r}, not "
                f"{options[differing[0]]!r}: give the same options to resume, or choose another output_dir."
            )
    elif write:
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(options, indent=1) + "\n", encoding="utf-8")


def choose_folds(rows: Dataset, data: DataArguments, seed: int) -> np.ndarray:
    """The fold of each row: that of its column, or drawn. Raises `ValueError` where there are not two or more."""
    if not data.fold_column:
        return stratified_folds(rows["label"][:], data.num_folds, seed)
    folds = np.array(rows["fold"][:])
    count = len(np.unique(folds))
    if count < 2:
        raise ValueError(f"Column {data.fold_column!r} has one fold only: expected two or more.")
    if data.num_folds not in (None, count):
        raise ValueError(
            f"Column {data.fold_column!r} has {count} folds, num_folds is {data.num_folds}: give one of the two."
        )
    return folds


def cross_validate(model_args: ModelArguments, data_args: DataArguments, args: TrainingArguments) -> dict[str, object]:
    """A round of `run` for each fold; the rows of the summary. `test_results.json` has the same figures."""
    if data_args.validation_file or data_args.test_file:
        raise ValueError(
            "Folds are parts of the training data: give --num-folds or --fold-column, and only that data."
        )
    data_args = copy.copy(data_args)
    data_args.validation_split = data_args.test_split = ""
    rows = load_parts(data_args, partial(load_labelled, arguments=data_args)).get("train")
    if rows is None:
        raise ValueError("No data: give --train-file, or --dataset-name.")
    folds = choose_folds(rows, data_args, args.seed)
    validate = args.eval_strategy != "no"
    if validate and len(np.unique(folds)) < 3:
        raise ValueError("Three folds or more are needed where one of them chooses the checkpoint (eval_strategy).")
    resume = args.resume_from_checkpoint
    if resume not in (None, "last"):
        raise ValueError("--resume-from-checkpoint stands alone in cross-validation: every fold has its checkpoints.")

    output, rounds = Path(args.output_dir), {}
    foreign = [path.name for path in output.glob("*") if not re.fullmatch(OF_FOLDS, path.name)]
    if foreign and not args.overwrite_output:
        raise FileExistsError(
            f"output_dir {output} holds other things than folds ({', '.join(sorted(foreign)[:3])}): choose another "
            "folder, or write over it with --overwrite-output."
        )
    for fold in np.unique(folds).tolist():
        fold_args, fold_model = copy.copy(args), copy.deepcopy(model_args)
        fold_args.output_dir = str(output / f"fold-{fold}")
        for name in ("model_name_or_path", "config_name", "tokenizer_name"):
            setattr(fold_model, name, (getattr(fold_model, name) or "").replace("{fold}", str(fold)) or None)
        done = bool(resume) and Path(fold_args.output_dir, "test_results.json").is_file()
        reads = [fold_model.model_name_or_path, fold_model.config_name, fold_model.tokenizer_name]
        rounds[fold] = fold_args, fold_model, done, None if done else check_output(fold_args, reads)
    classes = find_classes(next(iter(rounds.values()))[1], {"train": rows})
    passing = ("output_dir", "resume_from_checkpoint", "overwrite_output", "logging_dir", "run_name", "local_rank")
    training = {name: value for name, value in args.to_dict().items() if name not in passing}
    check_record(
        output / "options.json", vars(model_args) | vars(data_args) | training, bool(resume), args.should_save
    )

    if args.should_save:  # now: where this run is interrupted, those of an earlier one would be its own
        begun = {
            Path(fold_args.output_dir) for fold_args, _, done, checkpoint in rounds.values() if done or checkpoint
        }
        for folder in {output, *output.glob("fold-*")} - begun:
            remove_results(folder)
    summary, accuracies = {}, []
    for fold, (fold_args, fold_model, done, checkpoint) in rounds.items():
        if done:
            results = json.loads(Path(fold_args.output_dir, "test_results.json").read_text(encoding="utf-8"))
            accuracies.append(results["test_accuracy"])
            continue
        parts = fold_parts(rows, fold, folds, validate=validate)
        summary |= run(fold_model, data_args, fold_args, parts, classes, checkpoint)
        accuracies.append(summary["test accuracy"])
    spread = {"test_accuracy": fmean(accuracies), "test_accuracy_std": stdev(accuracies)}
    if args.should_save:
        results = json.dumps(spread | {"test_accuracies": accuracies}, indent=4)
        (output / "test_results.json").write_text(results, encoding="utf-8")
    shown = {name: summary[name] for name in ("unique parameters", "in the embedding matrix") if name in summary}
    shown |= {f"fold {fold} accuracy": value for fold, value in zip(rounds, accuracies, strict=True)}
    shown |= {"mean accuracy": spread["test_accuracy"], "standard deviation": spread["test_accuracy_std"]}
    return shown | {"saved in": args.output_dir}


def main(argv: list[str] | None = None) -> None:
    """Train, evaluate, test, save, summarize: once, or for every fold."""
    model_args, data_args, args = parse_arguments((ModelArguments, DataArguments, TrainingArguments), argv)
    console = Console(quiet=not args.should_save)
    check_metric(args, ("accuracy",))
    if data_args.num_folds is not None or data_args.fold_column:
        summarize(cross_validate(model_args, data_args, args), console)
        return
    checkpoint = check_output(args, [model_args.model_name_or_path, model_args.config_name, model_args.tokenizer_name])
    parts = load_parts(data_args, partial(load_labelled, arguments=data_args))
    if args.eval_strategy != "no" and "validation" not in parts:
        raise ValueError(f"eval_strategy is {args.eval_strategy}: give --validation-file.")
    classes = find_classes(model_args, parts)
    summarize(run(model_args, data_args, args, parts, classes, checkpoint), console)


if __name__ == "__main__":
    run_script(main)
