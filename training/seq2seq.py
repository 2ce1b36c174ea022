"""A whole run of the sequence-to-sequence scripts, from arguments to scores. A `Task` has their differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import arguments
import numpy as np
from arguments import OutputArguments
from common import (
    build_model,
    check_metric,
    check_output,
    check_positions,
    load_parts,
    load_tokenizer,
    parts_of_tests,
    summarize,
    train_and_evaluate,
)
from datasets import Dataset
from rich.console import Console
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainingArguments,
    set_seed,
)

from lightformers_hf.corpus import Corpus
from lightformers_hf.decoding import repeated_start
from lightformers_hf.evaluation.quality import METRICS, choose_metrics, describe, metric_names, score, signatures
from lightformers_hf.languages import add_prefix, keep_prefix, language_code, split_prefix
from lightformers_hf.loading import load_pretrained
from lightformers_hf.recovery import RecoveryTrainer, ScoredPart, TokenBatches, TokenizedPool, load_distiller
from lightformers_hf.text import load_parallel, tokenize_pairs


@dataclass(frozen=True)
class Task:
    """Differences between the scripts.

    Attributes:
        columns: names of the columns of source and target, or languages within a column `translation`.
        outputs: name of the generated texts; those of the test go to `test_<outputs>.txt`, one per line.
        default: the kind of references whose metrics are the default (`choose_metrics`); `None`: as the data are.
        prepare: last changes to model and tokenizer.
    """

    columns: tuple[str, str]
    outputs: str
    default: str | None = None
    prepare: Callable[[PreTrainedModel, PreTrainedTokenizerBase], None] | None = None


@dataclass
class GenerationArguments:
    """Options of the generation; given values also become part of the saved model's generation configuration."""

    num_beams: int | None = field(default=None, metadata={"help": "Default, here and below: the model's own."})
    length_penalty: float | None = field(
        default=None, metadata={"help": "Beam scores are divided by length to the power of this: above 0 for longer."}
    )
    no_repeat_ngram_size: int | None = field(default=None, metadata={"help": "No n-gram of this size comes twice."})
    min_length: int | None = field(default=None, metadata={"help": "Tokens of an output, at least."})
    max_length: int | None = field(default=None, metadata={"help": "Tokens of an output, at most."})


@dataclass(kw_only=True)
class DataArguments(arguments.DataArguments):
    """Options of the data."""

    source_prefix: str = field(
        default="",
        metadata={
            "help": "Prefix of every source: T5's 'translate German to English: '. Default: the prefix in the "
            "checkpoint's configuration for the two languages, if any. The saved configuration contains it."
        },
    )
    max_source_length: int = field(default=128, metadata={"help": "Tokens, the prefix's too; longer texts are cut."})
    max_target_length: int = field(default=128, metadata={"help": "Tokens; longer texts are cut (in training)."})
    max_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Budget of a batch of one process: rows x (longest source + longest target) tokens, padding "
            "counted. Replaces --per-device-train-batch-size."
        },
    )
    stream: bool = field(
        default=False,
        metadata={
            "help": "Read, shuffle and tokenize the training text while the model trains, in pools of 32,768 pairs: a "
            "corpus of any size begins at once, and nothing is copied. Needs --max-steps and --max-tokens."
        },
    )
    metric: list[str] | None = field(
        default=None,
        metadata={
            "help": f"One or several of {', '.join(metric_names())}. Default: BLEU and chrF; for references of one "
            "word exact match and character error rate first; for summaries ROUGE."
        },
    )
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that tokenize."})


@dataclass
class DistillationArguments:
    """The teacher, if any."""

    teacher: str | None = field(default=None, metadata={"help": "Checkpoint whose predictions are the targets."})
    distillation_alpha: float = field(
        default=0.5, metadata={"help": "Weight of the teacher: 0 labels only, 1 teacher only."}
    )
    distillation_temperature: float = field(default=1.0, metadata={"help": "Divides both models' logits."})
    hidden_weight: float = field(
        default=0.0, metadata={"help": "Weight of the distance between the layers' states of model and teacher."}
    )


@dataclass
class TrainingArguments(OutputArguments, Seq2SeqTrainingArguments):
    """`Seq2SeqTrainingArguments`, with generation in evaluation and a resume that finds its checkpoint."""

    predict_with_generate: bool = field(
        default=True, metadata={"help": "Evaluate by generating texts, besides the loss."}
    )


def set_generation(
    model: PreTrainedModel, generation: GenerationArguments, args: arguments.ModelArguments, longest: int
):
    """Write the options that are given into the model's generation config, which is saved with it.

    A model without a limit of its own gets `longest`; transformers would stop after 20 tokens.

    Raises `ValueError` for options that cannot be, or not together.
    """
    config = model.generation_config
    if config.max_length is None and config.max_new_tokens is None:
        config.max_length = longest
    for name, value in vars(generation).items():
        if value is not None:
            setattr(config, name, value)
    shortest, most = config.min_length or 0, config.max_length
    for name, least in {"num_beams": 1, "no_repeat_ngram_size": 0, "min_length": 0, "max_length": 1}.items():
        if (value := getattr(generation, name)) is not None and value < least:
            raise ValueError(f"{name} is {value}: expected {least} or more.")
    if most is not None and shortest > most:
        raise ValueError(f"min_length is {shortest}, max_length {most}: expected no more than that.")
    if generation.length_penalty is not None and (config.num_beams or 1) == 1:
        raise ValueError("length_penalty chooses between the outputs of a beam: give --num-beams above 1 with it.")


def open_stream(data: DataArguments, args: TrainingArguments, source: str, target: str) -> Corpus:
    """The training text as a corpus. Raises `ValueError` where it cannot be a stream."""
    name = data.train_file or data.dataset_name
    if not name:
        raise ValueError("stream is set, but there is no text to train on: give --train-file or --dataset-name.")
    if args.max_steps < 1 or data.max_tokens is None:
        raise ValueError("stream needs --max-steps and --max-tokens: a stream has no end, and batches of tokens.")
    if data.max_train_samples is not None:
        raise ValueError("stream reads all text: remove --max-train-samples, or --stream.")
    split = data.train_split if not data.train_file else "train"
    return Corpus(name, source=source, target=target, default=(source, target), split=split)


def load_others(data: DataArguments, load: Callable[..., Dataset], corpus: Corpus) -> dict[str, Dataset]:
    """The parts but the training text, from which the sources of the validation are taken out."""
    files = [data.validation_file, *(data.test_file or ())]
    splits = [data.validation_split, data.test_split] if data.dataset_name else []
    if not any(files) and not any(splits):
        return {}
    parts = load_parts(replace(data, train_file=None, train_split=""), load)
    corpus.hold_out(parts["validation"]["source"] if "validation" in parts else ())
    return parts


def run(
    task: Task,
    model_args: arguments.ModelArguments,
    generation: GenerationArguments,
    data_args: DataArguments,
    distillation: DistillationArguments,
    args: TrainingArguments,
) -> None:
    """Train, evaluate, test, save, summarize: each where there is data for it."""
    console = Console(quiet=not args.should_save)
    reads = [model_args.model_name_or_path, model_args.config_name, model_args.tokenizer_name, distillation.teacher]
    checkpoint = check_output(args, reads)
    source, target = task.columns
    tokenizer = load_tokenizer(model_args)
    if data_args.source_prefix:
        if split_prefix(source)[1]:
            raise ValueError(f"source_lang is {source!r}, which has a prefix: remove --source-prefix.")
        source = f"{source}={data_args.source_prefix.rstrip()} "
    elif model_args.model_name_or_path:
        config = load_pretrained(AutoConfig, model_args.model_name_or_path)
        source = add_prefix(config, source, getattr(data_args, "target_lang", target), tokenizer)
    corpus = open_stream(data_args, args, source, target) if data_args.stream else None
    load = partial(load_parallel, source=source, target=target)
    parts = load_parts(data_args, load) if corpus is None else load_others(data_args, load, corpus)
    if args.eval_strategy != "no" and "validation" not in parts:
        raise ValueError(f"eval_strategy is {args.eval_strategy}: give --validation-file.")
    scored_pairs = (
        parts[next((part for part in parts if part != "train"), "train")] if parts else corpus.sample(1000, 0)
    )
    metrics = choose_metrics(
        data_args.metric or (), scored_pairs["source"][:], scored_pairs["target"][:], default=task.default
    )
    check_metric(args, metrics if args.predict_with_generate else ())
    if data_args.max_tokens and args.train_sampling_strategy != "random":
        raise ValueError(
            f"train_sampling_strategy is {args.train_sampling_strategy}, which has no effect with --max-tokens, whose "
            "batches are of similar length: remove one of them."
        )
    best_by = (args.metric_for_best_model or "").removeprefix("eval_")
    if best_by in METRICS:
        args.greater_is_better = METRICS[best_by].higher_is_better
    set_seed(args.seed)
    model = build_model(model_args, tokenizer, AutoModelForSeq2SeqLM)
    check_positions(
        model, max_source_length=data_args.max_source_length, max_target_length=data_args.max_target_length
    )
    keep_prefix(model.config, source, target)
    set_generation(model, generation, model_args, data_args.max_target_length)
    if task.prepare is not None:
        task.prepare(model, tokenizer)
    teacher = None
    if distillation.teacher:
        teacher = load_distiller(distillation.teacher, tokenizer, model_args.attn_implementation, model.config)

    with args.main_process_first():
        lengths = {k: getattr(data_args, k) for k in ("max_source_length", "max_target_length")}
        workers = data_args.preprocessing_num_workers
        start = repeated_start(model if teacher is None else teacher, tokenizer)
        shared = {"num_proc": workers, "start": start}
        tokens = {part: tokenize_pairs(pairs, tokenizer, **lengths, **shared) for part, pairs in parts.items()}
    if corpus is not None:
        limits = {"longest": tuple(lengths.values()), "max_tokens": data_args.max_tokens}
        seed = args.seed if args.data_seed is None else args.data_seed
        pool = partial(TokenizedPool, tokenizer=tokenizer, **limits, start=start)
        tokens["train"] = TokenBatches(corpus, pool, data_args.max_tokens, seed)
    scored = {part: ScoredPart(parts[part], tokens[part], tokenizer) for part in tokens if part != "train"}

    language = language_code(target, tokenizer)
    measure = partial(score, metrics=metrics, language=language)

    def score_validation(prediction: EvalPrediction) -> dict[str, float]:
        part = scored["validation"]
        return measure(part.decode(prediction.predictions), part.references)

    trainer = RecoveryTrainer(
        model,
        args,
        train_dataset=tokens.get("train"),
        eval_dataset=scored["validation"].tokens if "validation" in scored else None,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        compute_metrics=score_validation if args.predict_with_generate else None,
        max_tokens=data_args.max_tokens,
        teacher=teacher,
        distillation_alpha=distillation.distillation_alpha,
        distillation_temperature=distillation.distillation_temperature,
        hidden_weight=distillation.hidden_weight,
    )

    def score_tests() -> dict[str, object]:
        results, rows = {}, {}
        for name in parts_of_tests(tokens):
            texts, references = generate_test(trainer, task.outputs, scored[name], name), scored[name].references
            scores, variants = measure(texts, references), signatures(metrics, references, language=language)
            results |= {f"{name}_{metric}": value for metric, value in scores.items()}
            results |= {f"{name}_{metric}_signature": variant for metric, variant in variants.items()}
            rows |= {f"{name} {metric}": value for metric, value in scores.items()}
            rows["scored by"] = "; ".join(describe(variants))
        if results:
            trainer.save_metrics("test", results)
        return rows

    rows = train_and_evaluate(trainer, tokens, checkpoint, model_args, ("loss", *metrics), score_tests)
    summarize(rows, console)


def generate_test(trainer: RecoveryTrainer, outputs: str, part: ScoredPart, name: str) -> list[str]:
    """Generate the texts of the test `name`, write them in the data's order, and return them in that of `part`."""
    args = trainer.args
    args.predict_with_generate, trainer.compute_metrics = True, None
    texts = part.decode(trainer.predict(part.tokens, metric_key_prefix=name).predictions)
    if args.should_save:
        lines = "".join(f"{' '.join(texts[i].splitlines())}\n" for i in np.argsort(part.order))
        Path(args.output_dir, f"{name}_{outputs}.txt").write_text(lines, encoding="utf-8")
    return texts
