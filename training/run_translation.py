#!/usr/bin/env python
"""Train a translation model: a converted checkpoint, a dense one, or the same shapes from random weights.

    python training/run_translation.py --model_name_or_path converted --teacher opus-mt-de-en \
        --train_file train.jsonl --validation_file validation.jsonl --test_file test.jsonl \
        --source_lang de --target_lang en --output_dir recovered \
        --max_tokens 4096 --num_train_epochs 3 --label_smoothing_factor 0.1 --bf16 \
        --learning_rate 3e-4 --lr_scheduler_type inverse_sqrt --warmup_steps 500 --eval_strategy epoch \
        --save_strategy epoch --load_best_model_at_end --metric_for_best_model bleu

What data is given for is done: training, evaluation, test. All options of `Seq2SeqTrainingArguments` work.
An interrupted run goes on with `--resume_from_checkpoint` added to the same command.

Any architecture trains from random weights: `--config_name shapes.json --tokenizer_name opus-mt-de-en`, where the file
holds `{"model_type": "lightformer", "d_model": 192, …}`. What it leaves out about tokens is the tokenizer's:
`vocab_size`, the ids of pad, bos and eos, and `decoder_start_token_id` (bos; pad where there is none, as in Marian).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import common
import numpy as np
from common import (
    OutputArguments,
    build_model,
    check_output,
    chosen_checkpoint,
    load_model,
    load_tokenizer,
    parameter_count,
    parse_arguments,
    run_script,
    summarize,
    train,
)
from datasets import Dataset
from rich.console import Console
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainingArguments,
    set_seed,
)

from lightformers_hf.evaluation.quality import translation_quality
from lightformers_hf.training import RecoveryTrainer, load_parallel, tokenize_pairs


@dataclass
class ModelArguments(common.ModelArguments):
    """What is trained."""

    num_beams: int | None = field(
        default=None, metadata={"help": "Beams in evaluation. Default: the model's generation config."}
    )


@dataclass
class DataArguments:
    """What it is trained and measured on."""

    source_lang: str = field(
        metadata={"help": "Column, or language within a column 'translation', to translate from."}
    )
    target_lang: str = field(metadata={"help": "Column, or language within a column 'translation', to translate to."})
    train_file: str | None = field(default=None, metadata={"help": ".json, .jsonl, .csv, .tsv (.gz) or .parquet."})
    validation_file: str | None = field(default=None, metadata={"help": "As train_file."})
    test_file: str | None = field(default=None, metadata={"help": "As train_file."})
    dataset_name: str | None = field(
        default=None, metadata={"help": "Hub dataset, name or name:configuration, for the parts that have no file."}
    )
    train_split: str = field(default="train", metadata={"help": "Its training split ('' for no training)."})
    validation_split: str = field(default="validation", metadata={"help": "Its validation split ('' for none)."})
    test_split: str = field(default="test", metadata={"help": "Its test split ('' for none)."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Use only the first so many pairs."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "The same, of validation."})
    max_predict_samples: int | None = field(default=None, metadata={"help": "The same, of test."})
    max_source_length: int = field(default=128, metadata={"help": "Tokens; longer texts are cut."})
    max_target_length: int = field(default=128, metadata={"help": "Tokens; longer texts are cut (in training)."})
    max_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Budget of a batch of one process: rows x (longest source + longest target) tokens, padding "
            "counted. Replaces per_device_train_batch_size."
        },
    )
    source_code: str | None = field(
        default=None, metadata={"help": "Multilingual tokenizers: language code of the source, such as de_DE."}
    )
    target_code: str | None = field(default=None, metadata={"help": "The same of the target, such as en_XX."})
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that tokenize."})


@dataclass
class DistillationArguments:
    """The teacher, if any."""

    teacher: str | None = field(default=None, metadata={"help": "Checkpoint whose predictions are imitated."})
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

    predict_with_generate: bool = field(default=True, metadata={"help": "Evaluate by translating: BLEU and chrF."})


def prepare(
    args: ModelArguments, data: DataArguments, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Check the model's positions, bound what a fresh model generates, give language codes to tokenizer and model."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions and max(data.max_source_length, data.max_target_length) > positions:
        raise ValueError(f"The model has {positions} positions: lower --max_source_length and --max_target_length.")
    if args.config_name and model.generation_config.max_length is None:  # transformers would stop after 20 tokens
        model.generation_config.max_length = data.max_target_length
    if data.source_code or data.target_code:
        if not (data.source_code and data.target_code and hasattr(tokenizer, "src_lang")):
            raise ValueError("--source_code and --target_code go together, and with a multilingual tokenizer only.")
        tokenizer.src_lang, tokenizer.tgt_lang = data.source_code, data.target_code
        model.generation_config.forced_bos_token_id = tokenizer.convert_tokens_to_ids(data.target_code)


def load_parts(data: DataArguments) -> dict[str, Dataset]:
    """The sentence pairs of `train`, `validation` and `test`, as far as they are given."""
    given = {
        "train": (data.train_file, data.train_split, data.max_train_samples),
        "validation": (data.validation_file, data.validation_split, data.max_eval_samples),
        "test": (data.test_file, data.test_split, data.max_predict_samples),
    }
    parts = {}
    for part, (file, split, limit) in given.items():
        name = file or (data.dataset_name if split else None)
        if name:
            languages = {"source": data.source_lang, "target": data.target_lang}
            parts[part] = load_parallel(name, **languages, split=split, max_samples=limit)
    if not parts:
        raise ValueError("No data: give --train_file, --validation_file or --test_file, or --dataset_name.")
    return parts


def load_teacher(name: str, tokenizer: PreTrainedTokenizerBase, attention: str | None) -> PreTrainedModel:
    """The teacher; a ValueError if its words are not those of `tokenizer`."""
    if AutoTokenizer.from_pretrained(name).get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"The teacher {name} has another vocabulary than the model's tokenizer: distillation compares their "
            "predictions word by word, choose a teacher with the same tokenizer."
        )
    return load_model(name, attention)


def main(argv: list[str] | None = None) -> None:
    """Train, evaluate, test, save, summarize."""
    model_args, data_args, distillation, args = parse_arguments(
        (ModelArguments, DataArguments, DistillationArguments, TrainingArguments), argv
    )
    console = Console(quiet=not args.should_save)
    reads = [model_args.model_name_or_path, model_args.config_name, model_args.tokenizer_name, distillation.teacher]
    checkpoint = check_output(args, reads)
    parts = load_parts(data_args)
    if args.eval_strategy != "no" and "validation" not in parts:
        raise ValueError(f"eval_strategy is {args.eval_strategy}: give --validation_file.")
    set_seed(args.seed)
    tokenizer = load_tokenizer(model_args)
    model = build_model(model_args, tokenizer, AutoModelForSeq2SeqLM)
    prepare(model_args, data_args, model, tokenizer)
    teacher = None
    if distillation.teacher:
        teacher = load_teacher(distillation.teacher, tokenizer, model_args.attn_implementation)
    if model_args.num_beams:
        args.generation_num_beams = model_args.num_beams

    with args.main_process_first():
        lengths = {k: getattr(data_args, k) for k in ("max_source_length", "max_target_length")}
        workers = data_args.preprocessing_num_workers
        tokens = {part: tokenize_pairs(pairs, tokenizer, num_proc=workers, **lengths) for part, pairs in parts.items()}
    # Sentences of similar length are translated together. Texts are scored against the untouched references.
    order = {part: np.argsort(tokens[part]["source_length"][:], kind="stable") for part in tokens if part != "train"}
    references = {part: [parts[part][int(i)]["target"] for i in order[part]] for part in order}

    def decode(predictions: np.ndarray, part: str) -> list[str]:
        # With several processes Seq2SeqTrainer appends sentences from the beginning, to have as many for each.
        predictions = predictions[: len(references[part])]
        predictions = np.where(predictions < 0, tokenizer.pad_token_id, predictions)
        return tokenizer.batch_decode(predictions, skip_special_tokens=True)

    def score_validation(prediction: EvalPrediction) -> dict[str, float]:
        scores = translation_quality(decode(prediction.predictions, "validation"), references["validation"])
        return {name: scores[name] for name in ("bleu", "chrf")}

    trainer = RecoveryTrainer(
        model,
        args,
        train_dataset=tokens.get("train"),
        eval_dataset=tokens["validation"].select(order["validation"]) if "validation" in tokens else None,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        compute_metrics=score_validation if args.predict_with_generate else None,
        max_tokens=data_args.max_tokens,
        teacher=teacher,
        distillation_alpha=distillation.distillation_alpha,
        distillation_temperature=distillation.distillation_temperature,
        hidden_weight=distillation.hidden_weight,
    )
    rows = {"unique parameters": parameter_count(model)}
    if "train" in tokens:
        rows |= train(trainer, checkpoint)
    if "validation" in tokens:
        metrics = trainer.evaluate()
        trainer.save_metrics("eval", metrics)
        rows |= {f"validation {k}": metrics[f"eval_{k}"] for k in ("loss", "bleu", "chrf") if f"eval_{k}" in metrics}
        rows["checkpoint"] = chosen_checkpoint(trainer)
    if "test" in tokens:
        args.predict_with_generate, trainer.compute_metrics = True, None
        result = trainer.predict(tokens["test"].select(order["test"]), metric_key_prefix="test")
        texts = decode(result.predictions, "test")
        scores = translation_quality(texts, references["test"])
        rows |= {f"test {name}": value for name, value in scores.items()}
        trainer.save_metrics("test", {f"test_{name}": value for name, value in scores.items()})
        if args.should_save:
            lines = "".join(f"{texts[i]}\n" for i in np.argsort(order["test"]))
            Path(args.output_dir, "test_translations.txt").write_text(lines, encoding="utf-8")
    if "train" in tokens:
        rows["saved in"] = args.output_dir
    summarize(rows, console)


if __name__ == "__main__":
    run_script(main)
