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
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    GenerationConfig,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainingArguments,
    set_seed,
)

import lightformers_hf  # noqa: F401  registers the architectures with the Auto classes
from lightformers_hf.evaluation.quality import translation_quality
from lightformers_hf.training import RecoveryTrainer, find_last_checkpoint, load_parallel, tokenize_pairs


@dataclass
class ModelArguments:
    """What is trained."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Checkpoint: a folder or a Hub name."})
    config_name: str | None = field(
        default=None, metadata={"help": "Train from random weights: folder, Hub name or config.json of the shapes."}
    )
    from_scratch: bool = field(
        default=False, metadata={"help": "Take only the shapes of model_name_or_path, and random weights."}
    )
    tokenizer_name: str | None = field(default=None, metadata={"help": "Default: the model's."})
    attn_implementation: str | None = field(
        default=None,
        metadata={"help": "eager, sdpa, flash_attention_2, …. With short sentences on a CPU, eager trains fastest."},
    )
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


@dataclass
class TrainingArguments(Seq2SeqTrainingArguments):
    """`Seq2SeqTrainingArguments`, with generation in evaluation and a resume that finds its checkpoint."""

    predict_with_generate: bool = field(default=True, metadata={"help": "Evaluate by translating: BLEU and chrF."})
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={
            "nargs": "?",
            "const": "last",
            "help": "Alone: go on from the last complete checkpoint in output_dir.",
        },
    )
    overwrite_output: bool = field(
        default=False, metadata={"help": "Write into an output_dir that holds files; its old checkpoints are deleted."}
    )

    def __post_init__(self) -> None:
        # Without it, --bf16 is refused on a machine that has nothing but its CPU.
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        super().__post_init__()


def check_output(args: TrainingArguments, models: list[str | None]) -> str | None:
    """Check the output folder before any work is done, and return the checkpoint to go on from, if any.

    Files are never written over unasked, and a folder that holds a model this run reads is refused in any case.
    """
    output = Path(args.output_dir)
    if output.exists() and not output.is_dir():
        raise FileExistsError(f"output_dir {output} is a file: choose a folder.")
    for name in filter(None, models):
        if not Path(name).exists() and (name.startswith(("/", ".", "~")) or name.count("/") > 1):
            raise FileNotFoundError(f"No model {name}: give an existing folder, or a name on the Hub.")
        if Path(name).exists() and output.resolve() in (Path(name).resolve(), *Path(name).resolve().parents):
            raise ValueError(f"output_dir {output} holds {name}, which this run reads: choose another folder.")
    resume = args.resume_from_checkpoint
    if resume and args.overwrite_output:
        raise ValueError("--resume_from_checkpoint and --overwrite_output contradict each other: give one of them.")
    if resume and resume != "last":
        if not Path(resume, "trainer_state.json").is_file():
            raise FileNotFoundError(f"{resume} is not a complete checkpoint of a training run.")
        return resume
    last = find_last_checkpoint(output) if resume else None
    files = [] if last or args.overwrite_output else [path.name for path in output.glob("*")]
    if resume:  # a run that was killed before its first checkpoint was complete leaves these, and starts anew
        files = [name for name in files if not re.fullmatch(r"checkpoint-\d+|runs", name)]
    if files:
        remedy = (
            "holds no complete checkpoint" if resume else "an interrupted run goes on with --resume_from_checkpoint"
        )
        raise FileExistsError(
            f"output_dir {output} is not empty ({', '.join(sorted(files)[:3])}) and {remedy}: "
            "choose another folder, or write over it with --overwrite_output."
        )
    return last


def load_model(name: str, attention: str | None) -> PreTrainedModel:
    """A checkpoint in fp32, whatever it is stored in: fp16 weights do not train. Every weight must be there."""
    model, info = AutoModelForSeq2SeqLM.from_pretrained(
        name, dtype=torch.float32, attn_implementation=attention, output_loading_info=True
    )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{name} lacks {len(missing)} of the model's weights, such as {missing[0]}.")
    return model


def build_model(args: ModelArguments) -> PreTrainedModel:
    """The model to train: a checkpoint's weights, or random ones in the shapes of a config."""
    if (args.model_name_or_path is None) == (args.config_name is None):
        raise ValueError("Give one of --model_name_or_path (a checkpoint) and --config_name (random weights).")
    if args.model_name_or_path and not args.from_scratch:
        return load_model(args.model_name_or_path, args.attn_implementation)
    name = args.model_name_or_path or args.config_name
    config = AutoConfig.from_pretrained(name)
    model = AutoModelForSeq2SeqLM.from_config(
        config, dtype=torch.float32, attn_implementation=args.attn_implementation
    )
    if args.model_name_or_path:  # so that it is decoded just as the checkpoint it is compared with
        model.generation_config = GenerationConfig.from_pretrained(name)
    return model


def build_tokenizer(args: ModelArguments, data: DataArguments, model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """The tokenizer, checked against the model's vocabulary and positions; language codes go to it and the model."""
    name = args.tokenizer_name or args.model_name_or_path or args.config_name
    if Path(name).is_file():
        raise ValueError(f"{name} is a configuration without a tokenizer: give --tokenizer_name.")
    tokenizer = AutoTokenizer.from_pretrained(name)
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ValueError(f"The tokenizer {name} has {len(tokenizer)} entries, the model's embedding {rows}.")
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions and max(data.max_source_length, data.max_target_length) > positions:
        raise ValueError(f"The model has {positions} positions: lower --max_source_length and --max_target_length.")
    if data.source_code or data.target_code:
        if not (data.source_code and data.target_code and hasattr(tokenizer, "src_lang")):
            raise ValueError("--source_code and --target_code go together, and with a multilingual tokenizer only.")
        tokenizer.src_lang, tokenizer.tgt_lang = data.source_code, data.target_code
        model.generation_config.forced_bos_token_id = tokenizer.convert_tokens_to_ids(data.target_code)
    return tokenizer


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


def summarize(rows: dict[str, object], console: Console) -> None:
    """Print what came out of the run."""
    table = Table("what", Column("value", overflow="fold"), title="Summary", show_header=False)
    for name, value in rows.items():
        table.add_row(name, escape(f"{value:,.2f}" if isinstance(value, float) else f"{value}"))
    console.print(table)


def main(argv: list[str] | None = None) -> None:
    """Train, evaluate, test, save, summarize."""
    parser = HfArgumentParser((ModelArguments, DataArguments, DistillationArguments, TrainingArguments))
    model_args, data_args, distillation, args = parser.parse_args_into_dataclasses(argv)
    console = Console(quiet=not args.should_save)
    reads = [model_args.model_name_or_path, model_args.config_name, model_args.tokenizer_name, distillation.teacher]
    checkpoint = check_output(args, reads)
    parts = load_parts(data_args)
    if args.eval_strategy != "no" and "validation" not in parts:
        raise ValueError(f"eval_strategy is {args.eval_strategy}: give --validation_file.")
    set_seed(args.seed)
    model = build_model(model_args)
    tokenizer = build_tokenizer(model_args, data_args, model)
    teacher = None
    if distillation.teacher:
        teacher = load_teacher(distillation.teacher, tokenizer, model_args.attn_implementation)
    generation_config = copy.deepcopy(model.generation_config)  # evaluation fills in its own defaults
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
    )
    rows = {"unique parameters": f"{sum(p.numel() for p in model.parameters()):,}"}  # shared ones come once
    if "train" in tokens:
        if args.should_save and checkpoint is None:
            for stale in Path(args.output_dir).glob("checkpoint-*"):
                if re.fullmatch(r"checkpoint-\d+", stale.name):
                    shutil.rmtree(stale)
        result = trainer.train(resume_from_checkpoint=checkpoint)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        rows["steps"] = trainer.state.global_step
        rows["time"] = f"{result.metrics['train_runtime']:.0f} s" + (" since the resume" if checkpoint else "")
        rows["last training loss"] = losses[-1] if losses else result.training_loss
        model.generation_config = generation_config
        trainer.save_model()
        trainer.save_state()
    if "validation" in tokens:
        metrics = trainer.evaluate()
        trainer.save_metrics("eval", metrics)
        best = args.load_best_model_at_end and trainer.state.best_model_checkpoint
        rows |= {f"validation {k}": metrics[f"eval_{k}"] for k in ("loss", "bleu", "chrf") if f"eval_{k}" in metrics}
        rows["checkpoint"] = f"best, {best}" if best else "last"
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
    try:
        main()
    except (ValueError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":
            Console(stderr=True).print("[red]error:[/red]", escape(str(error)), highlight=False, soft_wrap=True)
        sys.exit(1)
