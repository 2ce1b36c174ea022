"""Functions of all training scripts: output folders, models from configurations, text, calls of other scripts.

The scripts are run as `python training/run_….py`, which puts this folder on the import path.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch
import transformers
from arguments import DataArguments, ModelArguments, check_model_fields, dash_option, note
from datasets import Dataset, Value, concatenate_datasets
from huggingface_hub.errors import StrictDataclassError
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerState,
)

import lightformers_hf  # noqa: F401  registers the architectures with the Auto classes
from lightformers_hf.conversion import copy_report
from lightformers_hf.evaluation.speed import end_with_parent
from lightformers_hf.files import write_json
from lightformers_hf.loading import build_network, load_pretrained, unique_parameters
from lightformers_hf.recovery import find_last_checkpoint, load_trainable, remove_checkpoints
from lightformers_hf.recovery import train as train_model
from lightformers_hf.results import print_parts
from lightformers_hf.text import load_lines, load_rows, take_rows

# Fields of configurations that speak of tokens by their ids.
OF_TOKENS = re.compile(r"\w*vocab_size|\w+_token_ids?|bad_words_ids|\w*suppress_tokens|sequence_bias|\w+_decoder_ids")
AutoModel = type[AutoModelForSeq2SeqLM] | type[AutoModelForCausalLM]

end_with_parent()  # a comparison that is killed leaves no training that nobody waits for


def check_metric(args: transformers.TrainingArguments, measures: Sequence[str]) -> None:
    """Raise a `ValueError` unless an evaluation computes the metric that chooses the best checkpoint."""
    names = ("loss", *measures)
    if args.metric_for_best_model and args.metric_for_best_model.removeprefix("eval_") not in names:
        raise ValueError(
            f"metric_for_best_model is {args.metric_for_best_model!r}: expected a computed one, {', '.join(names)}."
        )


def check_output(args: transformers.TrainingArguments, models: list[str | None]) -> str | None:
    """Check the output folder before any work, and return the checkpoint from which to resume, if any.

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
        raise ValueError("--resume-from-checkpoint and --overwrite-output contradict each other: give one of them.")
    goes_on = resume == "last"
    if resume and not goes_on:
        if not Path(resume, "trainer_state.json").is_file():
            raise FileNotFoundError(f"{resume} is not a complete checkpoint of a training run.")
        if output.resolve() in Path(resume).resolve().parents:
            return resume
    last = find_last_checkpoint(output) if goes_on else None
    files = [] if last or args.overwrite_output else [path.name for path in output.glob("*")]
    if goes_on:  # a run that was killed before its first checkpoint was complete leaves these, and starts anew
        files = [name for name in files if not re.fullmatch(r"checkpoint-\d+|runs", name)]
    if files:
        remedy = "holds no complete checkpoint" if goes_on else "--resume-from-checkpoint resumes an interrupted run"
        raise FileExistsError(
            f"output_dir {output} is not empty ({', '.join(sorted(files)[:3])}) and {remedy}: "
            "choose another folder, or write over it with --overwrite-output."
        )
    if goes_on and not last:
        note(f"{output} holds no complete checkpoint: the training begins at its first step.")
    return last if goes_on else resume


def load_parts(data: DataArguments, load: Callable[..., Dataset]) -> dict[str, Dataset]:
    """`load(file or Hub name, split=…, max_samples=…)` of `train`, `validation` and `test`, as far as they are given.

    Each of several test files is a part named `test_names`. Raises `ValueError` where there is no part at all.
    """
    files = data.test_file or [None]
    given = {
        "train": (data.train_file, data.train_split, data.max_train_samples),
        "validation": (data.validation_file, data.validation_split, data.max_eval_samples),
    } | {
        name: (file, data.test_split, data.max_predict_samples)
        for name, file in zip(test_names(files), files, strict=True)
    }
    parts = {}
    for part, (file, split, limit) in given.items():
        if name := file or (data.dataset_name if split else None):
            parts[part] = load(name, split=split, max_samples=limit)
    if not parts:
        raise ValueError("No data: give --train-file, --validation-file or --test-file, or --dataset-name.")
    return parts


def test_names(files: Sequence[str | None]) -> list[str]:
    """Return the names of the tests, which are prefixes of their scores: `test`, or the files' names of several tests.

    Raises `ValueError` where two of them have one name, or one that is taken.
    """
    if len(files) == 1:
        return ["test"]
    names = [Path(file or "test").name.partition(".")[0] for file in files]
    if twice := [name for name in names if [*names, "train", "validation"].count(name) > 1]:
        raise ValueError(f"--test-file: two parts are called {twice[0]!r}, give every file a name of its own.")
    return names


def parts_of_tests(parts: Mapping[str, object]) -> list[str]:
    """The names of those parts of the data that are tests."""
    return [name for name in parts if name not in ("train", "validation")]


def score_tests(trainer: Trainer, parts: Mapping[str, Dataset], measures: Sequence[str]) -> dict[str, float]:
    """Evaluate those parts that are tests, keep all that was measured as `test_results.json`; rows of the summary."""
    trainer.remove_callback(transformers.EarlyStoppingCallback)  # it looks for what a validation measures, and warns
    metrics: dict[str, float] = {}
    for part in parts_of_tests(parts):
        metrics |= trainer.evaluate(parts[part], metric_key_prefix=part)
    if metrics:
        trainer.save_metrics("test", metrics)
    return {f"{part} {name}": metrics[f"{part}_{name}"] for part in parts_of_tests(parts) for name in measures}


def load_tokenizer(args: ModelArguments) -> PreTrainedTokenizerBase:
    """The tokenizer that the arguments name, or the model's own."""
    given = [args.model_name_or_path, args.config_name, args.model or None]
    if not any(given) or all(given[:2]):
        raise ValueError(
            "Give one of --model-name-or-path (a checkpoint), and for random weights --config-name (shapes) or "
            "--config (a recipe with a model)."
        )
    name = args.tokenizer_name or args.model_name_or_path or args.config_name
    if name is None:
        raise ValueError("A recipe's model has no tokenizer of its own: give --tokenizer-name.")
    if Path(name).is_file():
        raise ValueError(f"{name} is a configuration without a tokenizer: give --tokenizer-name.")
    tokenizer = load_pretrained(AutoTokenizer, name)
    if args.tokenizer_name and args.model_name_or_path and not args.from_scratch:
        check_own_tokenizer(args.model_name_or_path, tokenizer)
    return tokenizer


def has_other_words(model: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the checkpoint `model` comes with a tokenizer of another vocabulary."""
    try:
        own = load_pretrained(AutoTokenizer, model)
    except (OSError, ValueError):  # it has none
        return False
    return own.get_vocab() != tokenizer.get_vocab()


def check_own_tokenizer(model: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a `ValueError` if the checkpoint `model` comes with a tokenizer of another vocabulary."""
    if has_other_words(model, tokenizer):
        raise ValueError(
            f"The tokenizer {tokenizer.name_or_path} has other entries than that of {model}, which fits its weights: "
            "remove --tokenizer-name, or train from random weights (--from-scratch)."
        )


def load_config(args: ModelArguments, tokenizer: PreTrainedTokenizerBase, auto_model: AutoModel) -> PreTrainedConfig:
    """The configuration of the checkpoint or of `config_name` with the fields `model` laid over it, or those alone.

    The tokenizer gives fields that a model of random weights lacks. These are `vocab_size` and the ids of pad, bos and
    eos. A sequence-to-sequence model also needs `decoder_start_token_id`: bos, or pad if the tokenizer has no bos
    (Marian), or eos if it has neither.

    Raises:
        ValueError: no model_type, another one than the checkpoint's, an unknown field, a value of a wrong type.
    """
    name = args.model_name_or_path or args.config_name
    content = PreTrainedConfig.get_config_dict(name)[0] if name else {}
    source = args.config or name or "--model"
    model_type = (content | args.model).get("model_type")
    if model_type is None:
        raise ValueError(f"{source} names no model_type: add one, such as 'lightformer'.")
    if name and model_type != content.get("model_type", model_type):
        raise ValueError(f"{source} is of a {model_type}, but {name} is a {content['model_type']}.")
    check_model_fields(args.model, model_type, source)
    tokens = {"vocab_size": len(tokenizer)}
    tokens |= {f"{token}_token_id": getattr(tokenizer, f"{token}_token_id") for token in ("pad", "bos", "eos")}
    if auto_model is AutoModelForSeq2SeqLM:
        starts = (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id)
        tokens["decoder_start_token_id"] = next((token for token in starts if token is not None), None)
    if args.from_scratch and args.model_name_or_path and has_other_words(args.model_name_or_path, tokenizer):
        # The token ids of the checkpoint do not apply to this tokenizer.
        content = {name: value for name, value in content.items() if not OF_TOKENS.fullmatch(name)} | tokens
        content["forced_eos_token_id"] = None  # the default of Marian and BART is a number
    elif not args.model and (args.model_name_or_path or content.keys() >= tokens.keys()):
        return load_pretrained(AutoConfig, name)
    # Given to the constructor, so that fields that follow from them follow, and fields that must fit are checked.
    fields = ({} if args.model_name_or_path else tokens) | content | args.model
    check_size(args, tokenizer, fields.get("vocab_size"))
    try:
        return AutoConfig.for_model(**fields)
    except StrictDataclassError as error:  # not a ValueError, though it is about a value
        raise ValueError(f"{source}: {' '.join(str(error).split())}") from error


def check_size(args: ModelArguments, tokenizer: PreTrainedTokenizerBase, size: object) -> None:
    """Raise `ValueError` where a model has fewer tokens than its tokenizer."""
    if isinstance(size, int) and len(tokenizer) > size:
        source = args.model_name_or_path or args.config_name or args.config or "--model"
        raise ValueError(
            f"The tokenizer {tokenizer.name_or_path} has {len(tokenizer)} entries, the model {source} takes "
            f"{size}: choose a tokenizer and a model that belong together."
        )


def build_model(args: ModelArguments, tokenizer: PreTrainedTokenizerBase, auto_model: AutoModel) -> PreTrainedModel:
    """The model to train, a checkpoint's weights or random ones in the shapes of a config; it must fit `tokenizer`."""
    name = args.model_name_or_path
    config = load_config(args, tokenizer, auto_model)
    check_size(args, tokenizer, config.vocab_size)
    if name and not args.from_scratch:
        return load_trainable(name, args.attn_implementation, auto_model, config if args.model else None)
    model = build_network(auto_model, config, dtype=torch.float32, attn_implementation=args.attn_implementation)
    if name:  # so that it is decoded just as the checkpoint it is compared with
        take_generation(model, name, tokens=not has_other_words(name, tokenizer))
    return model


def take_generation(model: PreTrainedModel, name: str, *, tokens: bool) -> None:
    """Copy the generation options of the checkpoint `name` to a model, and its special tokens if `tokens` is set."""
    try:
        taken = GenerationConfig.from_pretrained(name)
    except OSError:
        return
    for field in [] if tokens else filter(OF_TOKENS.fullmatch, taken.to_dict()):
        setattr(taken, field, getattr(model.generation_config, field, None))
    model.generation_config = taken


def remove_results(output: str | Path) -> None:
    """Delete checkpoints and scores of an earlier run in a folder, which would pass for the next run's."""
    remove_checkpoints(output)
    for pattern in ("*_results.json", "trainer_state.json", "*_translations.txt", "*_summaries.txt"):
        for stale in Path(output).glob(pattern):
            stale.unlink()


def check_positions(model: PreTrainedModel, **lengths: int) -> None:
    """Raise a `ValueError` for every option that allows texts with more tokens than the model has positions."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions and (long := {name: tokens for name, tokens in lengths.items() if tokens > positions}):
        given = " and ".join(f"{dash_option(f'--{name}')} from {tokens}" for name, tokens in long.items())
        raise ValueError(f"The model has {positions} positions: lower {given}.")


def load_texts(data: str, columns: list[str], *, split: str = "train", max_samples: int | None = None) -> Dataset:
    """The texts of a file or a Hub dataset as one column `text`, in their order; one column after another.

    Args:
        data: a local .txt file (a line is a text, empty ones too), also with .gz; or whatever `text.load_rows` reads.
        columns: names of columns, or languages within a column `translation`. A .txt file has none.
        split: the split of a Hub dataset.
        max_samples: keep the first so many rows (default: all).

    Raises `FileNotFoundError` for no such file, `ValueError` for an unknown type, empty data, columns that are
    missing or hold something else than text.
    """
    if data.removesuffix(".gz").endswith(".txt"):
        rows, columns = _load_lines(Path(data)), ["text"]
    else:
        rows = load_rows(data, split=split)
    if "translation" in rows.column_names:
        rows = rows.flatten()
    rows = take_rows(rows, max_samples)
    return concatenate_datasets([_text_column(rows, column, data) for column in columns])


def _load_lines(path: Path) -> Dataset:
    rows = load_lines(path)
    if len(rows) == 0:
        raise ValueError(f"{path} is empty: expected at least one line.")
    return rows


def _text_column(rows: Dataset, column: str, data: str) -> Dataset:
    name = column if column in rows.column_names else f"translation.{column}"
    if name not in rows.column_names:
        there = ", ".join(repr(name.removeprefix("translation.")) for name in rows.column_names)
        raise ValueError(f"{data} has no column {column!r}: it has {there}.")
    text = rows.select_columns([name])
    if text.features[name] not in (Value("string"), Value("large_string")) or text.data.column(name).null_count:
        raise ValueError(f"{data}, column {column!r}: expected a text in every row.")
    return text if name == "text" else text.rename_column(name, "text")


class WarmUpCallback(TrainerCallback):
    """Print a note where the learning rate would rise until after the end of the training."""

    def on_train_begin(self, args: transformers.TrainingArguments, state: TrainerState, *_: object, **__: object):
        """Compare the numbers of steps."""
        if state.max_steps <= (steps := args.get_warmup_steps(state.max_steps)):
            note(
                f"The warm-up of {steps:,} steps is no shorter than the training of {state.max_steps:,}: the learning "
                f"rate does not stay at {args.learning_rate:g}. Lower --warmup-steps, or train longer."
            )


def train(trainer: Trainer, checkpoint: str | None, model_args: ModelArguments) -> dict[str, object]:
    """Train from the beginning, or resume from `checkpoint`; save model and state; return its entries of the summary.

    The report of the conversion of the checkpoint in `model_args` is copied, too.
    """
    args = trainer.args
    if checkpoint is None and args.should_save:
        remove_results(args.output_dir)
    if args.early_stopping_patience is not None:
        trainer.add_callback(EarlyStoppingCallback(args.early_stopping_patience))
    trainer.add_callback(WarmUpCallback())
    state = Path(checkpoint, "trainer_state.json") if checkpoint else None
    begun = json.loads(state.read_text(encoding="utf-8"))["global_step"] if state else 0
    result = train_model(trainer, checkpoint)
    steps = trainer.state.global_step
    if steps > begun:
        trainer.save_metrics("train", result.metrics)
    else:
        note(
            f"{checkpoint} has all {steps:,} steps: nothing was trained, and options that were changed had no effect. "
            "Start again with --overwrite-output instead of --resume-from-checkpoint."
        )
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    mean = {} if steps == begun else {"training loss, mean of all steps": result.training_loss}
    if args.should_save and model_args.model_name_or_path and not model_args.from_scratch:
        copy_report(model_args.model_name_or_path, args.output_dir)
    return {
        "steps": steps,
        "time": f"{result.metrics['train_runtime']:.0f} s" + (" since the resume" if checkpoint else ""),
        **({"last training loss": losses[-1]} if losses else mean),
    }


def train_and_evaluate(
    trainer: Trainer,
    parts: Collection[str],
    checkpoint: str | None,
    model_args: ModelArguments,
    measures: Sequence[str],
    score: Callable[[], dict[str, object]] = dict,
) -> dict[str, object]:
    """Train, evaluate and `score` the tests, each if there are such `parts`; return the rows of the summary."""
    # Learned parameters, shared ones once, as `lightformers evaluate` counts them.
    rows: dict[str, object] = {"unique parameters": f"{unique_parameters(trainer.model):,}"}
    if "train" in parts:
        rows |= train(trainer, checkpoint, model_args)
    if "validation" in parts:
        metrics = trainer.evaluate()
        trainer.save_metrics("eval", metrics)
        rows |= {f"validation {name}": metrics[f"eval_{name}"] for name in measures if f"eval_{name}" in metrics}
        best = trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint
        rows["checkpoint"] = f"best, {best}" if best else "last"
    rows |= score()
    if "train" in parts:
        rows["saved in"] = trainer.args.output_dir
    return rows


def summarize(rows: dict[str, object], console: Console) -> None:
    """Print the results of the run."""
    table = Table("what", Column("value", overflow="fold"), title="Summary", show_header=False)
    for name, value in rows.items():
        table.add_row(name, escape(f"{value:,.2f}" if isinstance(value, float) else f"{value}"))
    console.print(table)


def print_answer(parts: Sequence[Table | str], data: dict | list, json_file: str | None) -> None:
    """Print tables and sentences, and write the data to a file of JSON; with `-`, stdout gets the JSON alone."""
    if json_file == "-":
        print(json.dumps(data, indent=1, ensure_ascii=False))
        return
    print_parts(parts)
    if json_file:
        write_json(data, Path(json_file))


def run_script(main: Callable[[], None]) -> None:
    """Run a script's `main`; an error that the user can mend becomes one line on stderr and exit status 1.

    Ctrl-C becomes one line and exit status 130.
    """
    try:
        main()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError, ImportError) as error:  # a library that an option needs
        if os.environ.get("RANK", "0") == "0":
            Console(stderr=True).print("[red]error:[/red]", escape(str(error)), highlight=False, soft_wrap=True)
        sys.exit(1)
