"""What a training run is told: on the command line, and by recipes."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml
from transformers import CONFIG_MAPPING, HfArgumentParser

import lightformers_hf  # noqa: F401  registers the architectures, whose fields recipes name


@dataclass
class ModelArguments:
    """What is trained."""

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
        default=False, metadata={"help": "Take only the shapes of model_name_or_path, and random weights."}
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
    validation_file: str | None = field(default=None, metadata={"help": "As train_file."})
    test_file: str | None = field(default=None, metadata={"help": "As train_file."})
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


class _Parser(HfArgumentParser):
    def error(self, message: str) -> None:
        """One line instead of the usage of some hundred options."""
        raise ValueError(f"{message}. --help lists all options.")


def parse_arguments(classes: Iterable[type], argv: list[str] | None = None) -> tuple:
    """An object of each of the dataclasses, as of `HfArgumentParser`, from the command line and from its recipe.

    `--config recipe.yaml` names a YAML mapping of options; its mapping `model` goes to `ModelArguments.model`, with
    the fields given as `--model.d_model 256` (values in YAML, `--model.adaptive_cutoffs "[4000, 12000]"`). A recipe
    `base: other.yaml` changes only what it names of that file, which is looked for beside it. What the command line
    says wins.

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
            fields[name.removeprefix("--model.")] = yaml.safe_load(value if equals else next(arguments, ""))
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
    for name, value in recipe.items():
        if value is not None:
            values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
            given += [f"--{name}", *map(str, values)]
    parser = _Parser(tuple(classes), allow_abbrev=False)
    *parsed, rest = parser.parse_args_into_dataclasses([*given, *options], return_remaining_strings=True)
    check_names([text.partition("=")[0] for text in rest], [f"--{name}" for name in names], "There is no option")
    for each in parsed:
        if isinstance(each, ModelArguments):
            each.model = model | fields
    return tuple(parsed)


def load_recipe(path: str | Path) -> dict[str, object]:
    """The options of a recipe, its `model` a mapping of its own, laid over those of its `base`."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"No recipe {path}: give an existing .yaml file.")
    try:
        recipe = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(recipe, dict) or not isinstance(recipe.get("model", {}), dict):
        raise ValueError(f"{path}: expected a mapping of options, and below model: a mapping of fields.")
    base = recipe.pop("base", None)
    below = load_recipe(Path(path).parent / base) if base else {}
    return below | recipe | {"model": below.get("model", {}) | recipe.get("model", {})}


def check_model_fields(fields: Iterable[str], model_type: str, source: str) -> None:
    """Raise a `ValueError` that begins with `source` if there is no such type, or one of `fields` is not of its."""
    check_names([model_type], list(CONFIG_MAPPING), f"{source}: no model_type")
    config = CONFIG_MAPPING[model_type]
    names = ["model_type", "num_labels", *(f.name for f in dataclasses.fields(config)), *config.attribute_map]
    check_names(fields, names, f"{source}: no field of a {model_type}'s configuration is named")


def check_names(names: Iterable[str], known: list[str], what: str) -> None:
    """Raise a `ValueError` that begins with `what` at the first of `names` that is not `known`."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known)
            raise ValueError(f"{what} {name!r}" + (f"; did you mean {' or '.join(near)}?" if near else "."))
