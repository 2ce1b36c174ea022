"""Recipes: YAML files with the options of a training and, below `model:`, the fields of the model's configuration."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PreTrainedConfig

from .loading import load_pretrained

# Content of a recipe's head: its vocabulary, and the script that trains it.
VOCABULARY, SCRIPT = (
    re.compile(r"^#.*\(vocabulary (\d+)\)", re.MULTILINE),
    re.compile(r"^#.*\brun_(\w+)\.py", re.MULTILINE),
)


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
