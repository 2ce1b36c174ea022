"""Reading a checkpoint's tensors one at a time, and checking what its configuration and its tokenizer say."""

from __future__ import annotations

import json
import math
import os
import pickle
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from .files import WEIGHT_FILES

# What tensors' names begin with where a wrapped model was saved: by what, and where the model itself is.
WRAPPERS = {
    "_orig_mod.": ("torch.compile", "model._orig_mod"),
    "module.": ("DataParallel", "model.module"),
    "base_model.model.": ("peft", "model.merge_and_unload()"),
}
QUANTIZED = (".SCB", ".absmax", ".quant_map", ".qweight", ".weight_format")  # what libraries add to their weights
POSITIONS, DEPTHS = 1 << 15, 1 << 8  # believed where no tensor is as long, or where layers are shared


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its shape, and what reads it."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


class CheckpointReader:
    """The tensors of a checkpoint folder: one file or several with an index, safetensors before `.bin`.

    Files are mapped: a tensor's bytes are read when it is used. What `read` returns may be shared between calls, so
    it must not be written to. Pickles are never run (`torch.load(weights_only=True)`).

    Raises:
        FileNotFoundError: no weights in the folder, or a shard that the index names is not there.
        ValueError: a file is damaged, an index disagrees with its files, or a pickle holds more than tensors.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        found = next((self.folder / name for name in WEIGHT_FILES if (self.folder / name).is_file()), None)
        if found is None:
            raise FileNotFoundError(f"{self.folder} holds no weights: looked for {', '.join(WEIGHT_FILES)}")
        self._stored = _open_index(found) if found.suffix == ".json" else _open_file(found)

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files. Tensors read before stay valid."""
        self._stored = {}

    def keys(self) -> list[str]:
        """The names of all tensors, sorted."""
        return sorted(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor. Raises ValueError if it is not there."""
        return self._find(name).shape

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """{name: shape} of all tensors, none of which is read."""
        return {name: stored.shape for name, stored in self._stored.items()}

    def dtype(self, name: str) -> torch.dtype:
        """The type a tensor is stored in. Raises ValueError if it is not there."""
        return self.read(name).dtype

    def main_dtype(self) -> torch.dtype:
        """The type that most numbers are stored in."""
        sizes: Counter[torch.dtype] = Counter()
        for name, shape in self.shapes().items():
            sizes[self.dtype(name)] += math.prod(shape)
        return sizes.most_common(1)[0][0]

    def hold(self, names: Iterable[str]) -> None:
        """Map these tensors once, for all who read them from now on: what stays in use would be counted again with
        every mapping. Those that are not float32 are not held: who computes with them has made copies."""
        held = {name: tensor for name in names if (tensor := self.read(name)).dtype == torch.float32}
        for name, tensor in held.items():
            self._stored[name] = Stored(tuple(tensor.shape), partial(held.__getitem__, name))

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU, as stored. Raises ValueError if it is not there."""
        return self._find(name).read()

    def _find(self, name: str) -> Stored:
        if name not in self._stored:
            raise ValueError(f"{self.folder} holds no tensor named {name}")
        return self._stored[name]


def _open_file(path: Path) -> dict[str, Stored]:
    """{name: tensor} of one file."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as handle:
                shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or incomplete, fetch it again ({error})") from error
        return {name: Stored(shape, partial(_read_mapped, path, name)) for name, shape in shapes.items()}
    try:
        # Files from before torch 1.6 are no zip archives and cannot be mapped.
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} is damaged, or holds more than tensors and would need unsafe loading, which can run any code. "
            "Where it is trusted, load it with the program that wrote it and save it as safetensors."
        ) from error
    except Exception as error:  # whatever a damaged pickle makes of the machine that reads it
        raise ValueError(f"{path} is damaged or incomplete, fetch it again ({error})") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ValueError(f"{path} is no checkpoint: expected a dictionary of tensors")
    return {name: Stored(tuple(tensor.shape), partial(tensors.get, name)) for name, tensor in tensors.items()}


def _read_mapped(path: Path, name: str) -> Tensor:
    # Each tensor gets a mapping of its own: the pages of those no longer used leave the process's memory with them.
    with safe_open(path, framework="pt") as handle:
        return handle.get_tensor(name)


def read_index(path: Path) -> dict[str, set[str]]:
    """{file: names of its tensors} of an index. Raises `ValueError` where it says nothing of the kind."""
    try:
        weight_map = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: expected JSON with a weight_map of names and files") from error
    names_of: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{path} puts {name} into {file!r}, expected a file name in the same folder")
        names_of.setdefault(file, set()).add(name)
    return names_of


def _open_index(path: Path) -> dict[str, Stored]:
    """{name: tensor} of all the files of an index."""
    names_of = read_index(path)
    if missing := [file for file in sorted(names_of) if not (path.parent / file).is_file()]:
        raise FileNotFoundError(f"{path} names files that are not there, fetch them: {', '.join(missing)}")
    stored = {}
    for file, names in names_of.items():
        held = _open_file(path.parent / file)
        if differing := sorted(names ^ held.keys()):
            where = f"promised but not in {file}" if differing[0] in names else f"in {file} but not promised for it"
            raise ValueError(f"{path} disagrees with its files: {differing[0]} is {where}; fetch the checkpoint again")
        stored |= held
    return stored


def check_stored(config: PreTrainedConfig, reader: CheckpointReader, name: str | os.PathLike) -> None:
    """Raise `ValueError` for weights that are quantized, or a wrapped model's; and as `check_sizes`."""
    names = reader.keys()
    said = getattr(config, "quantization_config", None)
    if said or any(key.endswith(QUANTIZED) for key in names):
        method = said.get("quant_method") if isinstance(said, dict) else None
        raise ValueError(
            f"{name} holds weights that were quantized{f' by {method}' if method else ''}: give the checkpoint before "
            "it was quantized"
        )
    for prefix, (wrapper, inner) in WRAPPERS.items():
        if 2 * sum(key.startswith(prefix) for key in names) > len(names):
            raise ValueError(
                f"the names of the tensors of {name} begin with {prefix!r}, because a model wrapped by {wrapper} was "
                f"saved. Save the model inside, with {inner}.save_pretrained(folder), and give that folder"
            )
    check_sizes(config, reader.shapes(), name)


def all_finite(tensor: Tensor) -> bool:
    """Whether nothing in a tensor is NaN or infinite: in one pass, with no other tensor as large, such as a mask."""
    return not tensor.numel() or all(bool(end.isfinite()) for end in torch.aminmax(tensor))


def check_finite(tensor: Tensor, tensor_name: str, name: str | os.PathLike) -> None:
    """Raise `ValueError` where a tensor of a checkpoint holds NaN or infinity."""
    if not all_finite(tensor):
        raise ValueError(
            f"{tensor_name} of {name} holds NaN or infinite values: the checkpoint is damaged, or its training "
            "diverged; take an earlier one"
        )


def check_sizes(config: PreTrainedConfig, shapes: Mapping[str, tuple[int, ...]], name: str | os.PathLike) -> None:
    """Raise `ValueError` where a configuration has a size that no tensor of its checkpoint has.

    A model is built before its tensors are put in place: depths and tables that nothing was stored for would take
    hours, or more memory than there is.

    Args:
        config: of a model, whose fields of sizes end in `layers`, `positions`, ….
        shapes: {name: shape} of all stored tensors.
        name: of the checkpoint.
    """
    longest = max((max(shape, default=1) for shape in shapes.values()), default=1)
    largest = max((math.prod(shape) for shape in shapes.values()), default=1)
    for field, value in vars(config).items():
        stack = field.partition("_")[0]
        if stack in ("encoder", "decoder") and not any(stack in stored for stored in shapes):
            continue  # what a single stack's configuration says of the other one is not built
        if field.endswith("layers"):
            most, what = max(DEPTHS, len(shapes)), f"{len(shapes)} tensors are stored"
        elif field.endswith("positions") or field == "max_position_embeddings":
            most, what = max(POSITIONS, longest), f"no stored tensor is longer than {longest}"
        elif field in ("d_model", "hidden_size"):
            most, what = longest, f"no stored tensor is longer than {longest}"
        elif field.endswith(("_dim", "_size", "_heads", "_rank", "_groups", "_buckets", "d_ff", "d_kv")):
            most, what = max(largest, DEPTHS), f"no stored tensor has more than {largest} numbers"
        else:
            continue
        if isinstance(value, int) and value > most:
            raise ValueError(f"config.json of {name} has {field!r} {value:,}, but {what}: they do not belong together")


def find_architecture(config: PreTrainedConfig, name: str | os.PathLike) -> str | None:
    """The name of the class that a checkpoint holds, if its configuration says it.

    Raises:
        ValueError: it says something else there than names.
    """
    names = config.architectures
    if names is None:
        return None
    if not isinstance(names, list) or not names or not all(isinstance(one, str) for one in names):
        raise ValueError(f"architectures in config.json of {name} is {names!r}: expected a list of names")
    return names[0]


def check_config(config: PreTrainedConfig, name: str | os.PathLike) -> None:
    """Raise `ValueError` where a type is not one of floats, or code and architectures are not named as they are."""
    dtype, code = config.dtype, getattr(config, "auto_map", None)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype in config.json of {name} is {dtype!r}: expected float32 or the like")
    if not isinstance(code, dict | None) or not all(isinstance(one, str | list) for one in (code or {}).values()):
        raise ValueError(f"auto_map in config.json of {name} is {code!r}: expected classes and their names")
    find_architecture(config, name)


def no_tokenizer(name: str | os.PathLike) -> ValueError:
    """The error where a checkpoint comes without a tokenizer."""
    return ValueError(
        f"{name} holds no tokenizer, or one without words (tokenizer_config.json and the files that it needs): give a "
        "folder with one, or put its files there"
    )


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, name: str | os.PathLike) -> None:
    """Raise `ValueError` where a token has no row in the embedding matrix that it is looked up in."""
    tables = {"vocab_size": tokenizer.get_vocab()}
    if getattr(config, "decoder_vocab_size", None) not in (None, config.vocab_size):
        tables["decoder_vocab_size"] = getattr(tokenizer, "target_encoder", tables["vocab_size"])
    for field, tokens in tables.items():
        last = max(tokens, key=tokens.get, default=None)
        if last is not None and tokens[last] >= (size := getattr(config, field)):
            raise ValueError(
                f"the tokenizer of {name} gives {last!r} the number {tokens[last]}, but {field} is {size}: give the "
                "checkpoint its own tokenizer, or a row for every token (resize_token_embeddings)"
            )


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str | os.PathLike) -> None:
    """Raise `ValueError` for a tokenizer without words, which transformers makes of nothing; for ids, or a number of
    tokens, that are not whole, and languages that are no text.

    Makes 5.0 the number 5.
    """
    if not tokenizer.get_vocab().keys() - {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab(), "▁", "Ġ"}:
        raise no_tokenizer(name)
    for side in ("source_lang", "target_lang"):
        if not isinstance(language := getattr(tokenizer, side, None), str | None):
            raise ValueError(f"tokenizer_config.json of {name} names {language!r} as a language: expected a word")
    if not all(type(number) is int for number in tokenizer.get_vocab().values()):
        raise ValueError(f"the tokenizer of {name} gives tokens other numbers than whole ones: fetch it again")
    longest: Any = tokenizer.model_max_length
    if type(longest) not in (int, float) or not longest >= 1 or longest != longest // 1:
        raise ValueError(
            f"model_max_length in tokenizer_config.json of {name} is {longest!r}: expected a whole number of tokens"
        )
    tokenizer.model_max_length = int(longest)
