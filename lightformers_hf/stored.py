"""The tensors of a checkpoint folder, read from its files on demand."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .files import WEIGHT_FILES


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its shape, and the function that reads it."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


class CheckpointReader:
    """The tensors of a checkpoint folder: one file or several with an index, safetensors before `.bin`.

    Files are mapped: a tensor's bytes are read when it is used. The result of `read` may be shared between calls, so
    it must not be written to. Pickles are never run (`torch.load(weights_only=True)`).

    Raises:
        FileNotFoundError: no weights in the folder, or a shard that the index names is not there.
        ValueError: a file is damaged, an index disagrees with its files, or a pickle holds more than tensors.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        found = find_weights(self.folder)
        self._stored = _open_index(found) if found.suffix == ".json" else _open_file(found)

    def keys(self) -> list[str]:
        """The names of all tensors, sorted."""
        return sorted(self._stored)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """{name: shape} of all tensors, none of which is read."""
        return {name: stored.shape for name, stored in self._stored.items()}

    def read_all(self) -> dict[str, Tensor]:
        """{name: tensor} of all tensors, mapped."""
        return {name: self.read(name) for name in self.keys()}

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU, as stored. Raises ValueError if it is not there."""
        if name not in self._stored:
            raise ValueError(f"{self.folder} holds no tensor named {name}")
        return self._stored[name].read()


def find_weights(folder: Path) -> Path:
    """The file of weights that is loaded from a folder, or the index of several."""
    found = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    if found is None:
        raise FileNotFoundError(f"{folder} holds no weights: looked for {', '.join(WEIGHT_FILES)}")
    return found


def _open_file(path: Path) -> dict[str, Stored]:
    """{name: tensor} of one file."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as handle:
                shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise_unless_damaged(error, path)
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
        raise_unless_damaged(error, path)
        raise ValueError(f"{path} is damaged or incomplete, fetch it again ({error})") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ValueError(f"{path} is no checkpoint: expected a dictionary of tensors")
    return {name: Stored(tuple(tensor.shape), partial(tensors.get, name)) for name, tensor in tensors.items()}


def _read_mapped(path: Path, name: str) -> Tensor:
    # Each tensor gets a separate mapping: its pages leave the memory of the process when it is released.
    with safe_open(path, framework="pt") as handle:
        return handle.get_tensor(name)


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


def read_index(path: Path) -> dict[str, set[str]]:
    """Return {file: names of its tensors} of an index. Raises `ValueError` where the file holds no such map."""
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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means exhausted memory; torch has no class for this error on the CPU."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        text in str(error) for text in ("can't allocate memory", "Cannot allocate memory")
    )


def raise_unless_damaged(error: Exception, name: str | os.PathLike) -> None:
    """Raise an error whose cause is not the content of a file: exhausted memory, or a missing library."""
    if is_out_of_memory(error):
        raise error
    if isinstance(error, ImportError):
        raise ValueError(f"{name} cannot be loaded, because a library is missing: {error}") from error
