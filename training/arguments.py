"""Arguments of a training: from the command line and from recipes."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.markup import escape
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedConfig,
    SchedulerType,
    get_scheduler,
)

import lightformers_hf  # noqa: F401  registers the architectures, whose fields recipes name
from lightformers_hf.loading import load_pretrained
from lightformers_hf.processors import has_fast_bf16
from lightformers_hf.recovery import check_reports

NO_BF16 = (
    "bf16 has no effect, training is in float32: this processor multiplies matrices no faster in bfloat16 than in "
    "float32. Many do it in software, fifty times slower."
)
# Content of a recipe's head: its vocabulary, and the script that trains it.
VOCABULARY, SCRIPT = (
    re.compile(r"^#.*\(vocabulary (\d+)\)", re.MULTILINE),
    re.compile(r"^#.*\brun_(\w+)\.py", re.MULTILINE),
)


NO_FP16 = "fp16 has no effect on a CPU, training is in float32. On processors that support it, --bf16 is faster."
# Options of transformers 4, and of its example scripts: what to give now.
OLD_OPTIONS = {
    "group_by_length": "--train-sampling-strategy group_by_length, or --max-tokens",
    "evaluation_strategy": "--eval-strategy",
    "warmup_ratio": "--warmup-steps with a share below 1",
    "overwrite_output_dir": "--overwrite-output",
    "no_cuda": "--use-cpu",
    "per_gpu_train_batch_size": "--per-device-train-batch-size",
    "per_gpu_eval_batch_size": "--per-device-eval-batch-size",
    "push_to_hub_token": "--hub-token",
    "push_to_hub_model_id": "--hub-model-id",
    "dataset_config_name": "--dataset-name NAME:CONFIGURATION",
} | dict.fromkeys(("do_train", "do_eval", "do_predict"), "--train-file, --validation-file and --test-file as needed")
# Options of transformers 4 that need no other.
OLD_DEFAULTS = ("save_safetensors", "fp16_backend", "half_precision_backend", "overwrite_cache", "use_fast_tokenizer")


@dataclass
class ModelArguments:
    """Options of the model to train."""

    config: str | None = field(
        default=None,
        metadata={
            "help": "Recipe: a .yaml file of options, and below `model:` of fields of the model's configuration. The "
            "command line wins; it gives fields as --model.d_model 256."
        },
    )
    model: dict[str, object] = field(init=False, default_factory=dict)  # the fields, of the recipe and of --model.…
    model_name_or_path: str | None = field(default=None, metadata={"help": "Checkpoint: a folder or a Hub name."})
    config_name: str | None = field(
        default=None, metadata={"help": "Train from random weights: folder, Hub name or config.json of the shapes."}
    )
    from_scratch: bool = field(
        default=False, metadata={"help": "Take only the shapes of --model-name-or-path, and random weights."}
    )
    tokenizer_name: str | None = field(default=None, metadata={"help": "Default: the model's."})
    attn_implementation: str | None = field(
        default=None,
        metadata={"help": "eager, sdpa, flash_attention_2, …. With short sentences on a CPU, eager trains fastest."},
    )


@dataclass
class DataArguments:
    """The parts of a corpus, each a file or a split of one Hub dataset. A base of the scripts' own."""

    train_file: str | None = field(default=None, metadata={"help": ".json, .jsonl, .csv, .tsv (.gz) or .parquet."})
    validation_file: str | None = field(default=None, metadata={"help": "As --train-file."})
    test_file: list[str] | None = field(
        default=None, metadata={"help": "As --train-file; several are scored one by one, under their files' names."}
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "Hub dataset, name or name:configuration, for the parts that have no file."}
    )
    train_split: str = field(default="train", metadata={"help": "Its training split ('' for no training)."})
    validation_split: str = field(default="validation", metadata={"help": "Its validation split ('' for none)."})
    test_split: str = field(default="test", metadata={"help": "Its test split ('' for none)."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Use only the first so many rows."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "The same, of validation."})
    max_predict_samples: int | None = field(default=None, metadata={"help": "The same, of test."})


@dataclass
class OutputArguments:
    """A resume that finds its checkpoint; a base that comes before one of transformers' `TrainingArguments`."""

    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={
            "nargs": "?",
            "const": "last",
            "help": "Alone: resume from the last complete checkpoint in --output-dir.",
        },
    )
    overwrite_output: bool = field(
        default=False,
        metadata={"help": "Write into an --output-dir that holds files; its old checkpoints are deleted."},
    )
    early_stopping_patience: int | None = field(
        default=None,
        metadata={
            "help": "End when so many evaluations in a row, one every --eval-steps (500), have found no better model; "
            "the best is kept, by loss or by --metric-for-best-model. Each saves a checkpoint."
        },
    )

    def __post_init__(self) -> None:
        if self.early_stopping_patience is not None:
            self._stop_early()
        for name in ("seed", "data_seed"):
            if (value := getattr(self, name)) is not None:
                check_seed(value, f"--{name.replace('_', '-')} is ")
        # Without it, --bf16 is refused on a machine that has nothing but its CPU.
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        in_software = self.bf16 and self.use_cpu and not has_fast_bf16()
        self.bf16 = self.bf16 and not in_software
        no_fp16 = self.fp16 and self.use_cpu
        self.fp16 = self.fp16 and not no_fp16
        self._check_libraries()
        super().__post_init__()
        self._check_schedule()
        for text in [NO_BF16] * in_software + [NO_FP16] * no_fp16:
            note(text)

    def _check_libraries(self) -> None:
        """Raise an error where DeepSpeed or a service for logs is asked for, and its file or library is missing."""
        is_file = isinstance(self.deepspeed, str) and not self.deepspeed.lstrip().startswith("{")
        if is_file and not os.path.isfile(self.deepspeed):
            raise FileNotFoundError(f"deepspeed is {self.deepspeed}: there is no such file")
        if self.deepspeed and find_spec("deepspeed") is None:
            raise ValueError("deepspeed needs a library that is not installed: pip install deepspeed")
        named = [self.report_to] if isinstance(self.report_to, str) else self.report_to or []
        check_reports(name for name in named if name not in ("none", "all"))

    def _check_schedule(self) -> None:
        """Make the schedule once as a check: kinds differ in the arguments that they require or accept."""
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=self.learning_rate)
        steps = self.max_steps if self.max_steps > 0 else 10**9
        try:
            get_scheduler(self.lr_scheduler_type, optimizer, 0, steps, self.lr_scheduler_kwargs)
        except (TypeError, ValueError) as error:
            kind, given = SchedulerType(self.lr_scheduler_type).value, self.lr_scheduler_kwargs or "empty"
            raise ValueError(
                f"lr_scheduler_type is {kind}, which lr_scheduler_kwargs ({given}) does not fit: {error}. "
                "Remove what it does not support (recipe: null), and add what it requires, as transformers' "
                f"documentation of {kind} schedules does."
            ) from None

    def _stop_early(self) -> None:
        """Set the other options that early stopping requires; given options that suffice are kept."""
        if self.early_stopping_patience < 1:
            raise ValueError(f"early_stopping_patience is {self.early_stopping_patience}: expected 1 or more.")
        if self.eval_strategy == "no":
            self.eval_strategy, self.eval_steps = "steps", self.eval_steps or 500
        self.save_strategy, self.save_steps = self.eval_strategy, self.eval_steps
        self.save_total_limit = self.save_total_limit or 1
        self.load_best_model_at_end = True
        self.restore_callback_states_from_checkpoint = True  # how many found nothing better so far


def note(text: str) -> None:
    """Print a notice for the user on stderr; only the first of several processes prints it."""
    if os.environ.get("RANK", "0") == "0":
        Console(stderr=True).print("[yellow]note:[/yellow]", escape(text), highlight=False, soft_wrap=True)


class _DashedOptions:
    """Options whose words are joined by dashes, in `--help` and in messages; underscores, as transformers' own
    scripts have them, are understood, too. A base that comes before a parser's class."""

    def add_argument(self, *names: str, **settings: object) -> argparse.Action:
        """As `ArgumentParser.add_argument`, of two spellings of a name that with dashes."""
        return super().add_argument(*dict.fromkeys(map(dash_option, names)), **settings)

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As `ArgumentParser.parse_known_args`; the rest has its names with dashes."""
        return super().parse_known_args(map(dash_option, sys.argv[1:] if args is None else args), namespace)


class ScriptParser(_DashedOptions, argparse.ArgumentParser):
    """Parser of a script that is no training run; `--help` begins with the docstring of the script."""

    def __init__(self, description: str | None) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=formatter, allow_abbrev=False)


class _RunParser(_DashedOptions, HfArgumentParser):
    def error(self, message: str) -> None:
        """One line instead of the usage of some hundred options."""
        raise ValueError(f"{message}. --help lists all options.")


def check_seed(value: int, what: str) -> None:
    """Raise a `ValueError` that begins with `what` at a number that numpy takes for no seed."""
    if not 0 <= value < 2**32:
        raise ValueError(f"{what}{value}: give a whole number from 0 to {2**32 - 1}")


def seed_number(text: str) -> int:
    """A seed of a script's command line, as the `type` of its option."""
    try:
        value = int(text)
        check_seed(value, "")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return value


def positive_number(text: str) -> int:
    """A whole number above 0 of a script's command line, as the `type` of its option."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: give a whole number above 0")
    return int(text)


def dash_option(word: str) -> str:
    """`--train_file`, also before `=`, as `--train-file`; any other word, and `--model.field`, as it stands."""
    name, equals, value = word.partition("=")
    if not name.startswith("--") or name.startswith("--model."):
        return word
    return name.replace("_", "-") + equals + value


def parse_arguments(classes: Iterable[type], argv: list[str] | None = None) -> tuple:
    """An object of each of the dataclasses, as of `HfArgumentParser`, from the command line and from its recipe.

    `--config recipe.yaml` names a YAML mapping of options; its mapping `model` goes to `ModelArguments.model`, with
    the fields given as `--model.d_model 256` (values in YAML, `--model.adaptive_cutoffs "[4000, 12000]"`). A recipe
    with `base: other.yaml` changes only the options that it names; the other file lies beside it. The command line has
    priority.

    Args:
        classes: dataclasses, one of them a `ModelArguments`.
        argv: the command line; `None` means the script's.

    Raises:
        ValueError: an unknown option or field, with its file and the names that are like it; values of a wrong type.
        FileNotFoundError: no such recipe.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    known, argv = first.parse_known_args(argv)
    recipe = load_recipe(known.config) if known.config else {}
    fields, options, arguments = {}, [], iter(argv)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name.startswith("--model."):
            field_name = name.removeprefix("--model.").replace("-", "_")
            fields[field_name] = read_value(value if equals else next(arguments, ""), name)
        else:
            options.append(argument)
    model = recipe.pop("model", {})
    if model_type := (model | fields).get("model_type"):
        sources = [(fields, "The command line"), (model, known.config)]
        for given, source in sorted(sources, key=lambda pair: "model_type" not in pair[0]):  # who names it first
            check_model_fields(given, model_type, source)
    names = [f.name for each in classes for f in dataclasses.fields(each) if f.init]
    check_names(recipe, names, f"{known.config}: no option")
    given = ["--config", known.config] if known.config else []
    given += as_options(recipe)
    parser = _RunParser(tuple(classes), allow_abbrev=False)
    *parsed, rest = parser.parse_args_into_dataclasses([*given, *options], return_remaining_strings=True)
    known_options = [dash_option(f"--{name}") for name in names]
    for name in (text.partition("=")[0].removeprefix("--").replace("-", "_") for text in rest):
        if name in OLD_OPTIONS or name in OLD_DEFAULTS:
            remedy = f"give {OLD_OPTIONS[name]}" if name in OLD_OPTIONS else "remove it"
            raise ValueError(f"{dash_option(f'--{name}')} is an option of transformers 4: {remedy}.")
    check_names([text.partition("=")[0] for text in rest], known_options, "There is no option")
    for each in parsed:
        if isinstance(each, ModelArguments):
            each.model = model | fields
    return tuple(parsed)


def as_options(named: Mapping[str, object]) -> list[str]:
    """{option: its value} as a command line; options without a value are omitted."""
    words = []
    for name, value in named.items():
        if value is not None:
            values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
            words += [f"--{name}", *map(str, values)]
    return words


# --- Recipes: YAML files with the options of a training and, below `model:`, fields of the model's configuration


def read_value(text: str, what: str) -> Any:
    """The value that YAML reads in a text. Raises `ValueError` naming `what` it is of where that is no YAML."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{what}: {' '.join(str(error).split())}") from None


def load_recipe(path: str | Path) -> dict[str, Any]:
    """Return the options of a recipe laid over those of its `base`, in `model` field by field.

    Raises:
        ValueError: no YAML, or a model of another type than the base's.
        FileNotFoundError: no such recipe.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"No recipe {path}: give an existing .yaml file.")
    try:
        recipe = read_value(Path(path).read_text(encoding="utf-8"), f"{path} is not YAML")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(recipe, dict) or not isinstance(recipe.get("model", {}), dict):
        raise ValueError(f"{path}: expected a mapping of options, and below model: a mapping of fields.")
    base = recipe.pop("base", None)
    below = load_recipe(Path(path).parent / base) if base else {}
    types = [each["model"]["model_type"] for each in (recipe, below) if "model_type" in each.get("model", {})]
    if len(set(types)) > 1:
        raise ValueError(f"{path} has a {types[0]}, but its base {base} has a {types[1]}: use a base without model")
    return below | recipe | {"model": below.get("model", {}) | recipe.get("model", {})}


def recipe_config(path: str | Path, vocab_size: int | None = None) -> PreTrainedConfig:
    """The configuration of a recipe's model, as it is trained from random weights.

    Args:
        path: path of the recipe.
        vocab_size: tokens. By default those of the recipe's model or tokenizer, or the number in its head:
            `(vocabulary 8001)`.

    Raises:
        ValueError: no YAML, no model, an unknown field, or an unknown vocabulary.
        FileNotFoundError: no such recipe.
    """
    recipe = load_recipe(path)
    model = dict(recipe["model"])
    if "model_type" not in model:
        raise ValueError(f"{path} names no model_type below model: add one, such as lightformer")
    model_type = model.pop("model_type")
    check_model_fields(model, model_type, str(path))
    head = VOCABULARY.search(Path(path).read_text(encoding="utf-8"))
    if vocab_size is None and "vocab_size" not in model:
        if tokenizer := recipe.get("tokenizer_name"):
            vocab_size = len(load_pretrained(AutoTokenizer, tokenizer))
        elif head:
            vocab_size = int(head[1])
        else:
            raise ValueError(f"{path} names neither a tokenizer nor the size of a vocabulary: give vocab_size")
    return AutoConfig.for_model(model_type, **model | ({} if vocab_size is None else {"vocab_size": vocab_size}))


def recipe_task(path: str | Path) -> str:
    """Kind of model that the script in a recipe's head trains: `translation`, `clm`, …; by default `translation`."""
    found = SCRIPT.search(Path(path).read_text(encoding="utf-8"))
    return found[1] if found else "translation"


def check_model_fields(fields: Iterable[str], model_type: str, source: str) -> None:
    """Raise a `ValueError` that begins with `source` if there is no such type, or one of `fields` is not of its."""
    if model_type == "transformer":
        raise ValueError(f"{source}: no model_type 'transformer'; a lightformer without ranks is a plain Transformer")
    check_names([model_type], list(CONFIG_MAPPING), f"{source}: no model_type")
    config = CONFIG_MAPPING[model_type]
    names = ["model_type", "num_labels", *(f.name for f in dataclasses.fields(config)), *config.attribute_map]
    check_names(fields, names, f"{source}: no field of a {model_type}'s configuration is named")


def check_names(names: Iterable[str], known: list[str], what: str) -> None:
    """Raise a `ValueError` that begins with `what` for the first of `names` that is not in `known`."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known)
            raise ValueError(f"{what} {name!r}" + (f"; did you mean {' or '.join(near)}?" if near else "."))
