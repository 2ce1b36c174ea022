"""Reading a checkpoint's tensors one at a time, and writing a folder whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import secrets
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor

# In order of preference.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


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
        self._read = _open_index(found) if found.suffix == ".json" else _open_file(found)

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files. Tensors read before stay valid."""
        self._read = {}

    def keys(self) -> list[str]:
        """The names of all tensors, sorted."""
        return sorted(self._read)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor. Raises ValueError if it is not there."""
        return tuple(self.read(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """The type a tensor is stored in. Raises ValueError if it is not there."""
        return self.read(name).dtype

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU, as stored. Raises ValueError if it is not there."""
        if name not in self._read:
            raise ValueError(f"{self.folder} holds no tensor named {name}")
        return self._read[name]()


def _open_file(path: Path) -> dict[str, Callable[[], Tensor]]:
    """{name: function that reads it} for one file."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as handle:
                names = list(handle.keys())
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or incomplete, fetch it again ({error})") from error
        return {name: partial(_read_mapped, path, name) for name in names}
    try:
        # Files from before torch 1.6 are no zip archives and cannot be mapped.
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} is damaged, or holds more than tensors and would need unsafe loading, which can run any code. "
            "Where it is trusted, load it with the program that wrote it and save it as safetensors."
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"{path} is damaged or incomplete, fetch it again ({error})") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ValueError(f"{path} is no checkpoint: expected a dictionary of tensors")
    return {name: partial(tensors.__getitem__, name) for name in tensors}


def _read_mapped(path: Path, name: str) -> Tensor:
    # Each tensor gets a mapping of its own: the pages of those no longer used leave the process's memory with them.
    with safe_open(path, framework="pt") as handle:
        return handle.get_tensor(name)


def _open_index(path: Path) -> dict[str, Callable[[], Tensor]]:
    """{name: function that reads it} for all the files of an index."""
    try:
        weight_map = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: expected JSON with a weight_map of names and files") from error
    names_of: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{path} puts {name} into {file!r}, expected a file name in the same folder")
        names_of.setdefault(file, set()).add(name)
    if missing := [file for file in sorted(names_of) if not (path.parent / file).is_file()]:
        raise FileNotFoundError(f"{path} names files that are not there, fetch them: {', '.join(missing)}")
    read = {}
    for file, names in names_of.items():
        held = _open_file(path.parent / file)
        if differing := sorted(names ^ held.keys()):
            where = f"promised but not in {file}" if differing[0] in names else f"in {file} but not promised for it"
            raise ValueError(f"{path} disagrees with its files: {differing[0]} is {where}; fetch the checkpoint again")
        read |= held
    return read


def resolve_source(source: str | Path) -> Path:
    """The local folder of a checkpoint: `source` itself, or the snapshot of a Hub model of that name.

    Of a Hub model only configuration, tokenizer, card and weights are fetched, and `.bin` weights only where there
    are no safetensors. Without network, a snapshot fetched before is used.

    Raises:
        FileNotFoundError: no such folder, no such model, or the Hub is out of reach.
        ValueError: a file instead of a folder.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"{source} is a file, expected the folder of a checkpoint")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", str(source)):
        raise FileNotFoundError(f"{source} is no folder: expected the folder of a checkpoint, or a model's Hub name")
    wanted = ["*.json", "model*.safetensors", "*.spm", "*.model", "*.txt", "README.md"]
    try:
        folder = Path(snapshot_download(str(source), allow_patterns=wanted))
        if not any(folder.glob("model*.safetensors")):
            folder = Path(snapshot_download(str(source), allow_patterns=[*wanted, "pytorch_model*.bin"]))
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{source} is neither a folder here nor a model on the Hub (or it is private: log in with `hf auth login`)"
        ) from error
    except OSError as error:
        reason = str(error).partition("\n")[0]
        raise FileNotFoundError(
            f"{source} is no folder here, and the Hub could not be asked for it ({reason}). "
            "Without network, give the folder of a checkpoint."
        ) from error
    return folder


@contextmanager
def atomic_output(
    target: str | Path, *, overwrite: bool = False, forbidden: str | Path | None = None
) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its place when the block ends without an exception.

    Otherwise, Ctrl-C included, it is removed and `target` stays as it was. What a killed process left is cleaned up
    by the next run for the same target.

    Args:
        target: the folder to write; folders above it are made.
        overwrite: replace what `target` holds.
        forbidden: a folder (the source) that `target` must neither be, contain, nor lie in.

    Raises:
        FileExistsError: `target` is a file, or a folder that is not empty and `overwrite` is not set.
        ValueError: `target` lies at a forbidden place.
        OSError: the disk is full, or the place cannot be written.
    """
    target = Path(target).expanduser().resolve()
    if forbidden is not None:
        source = Path(forbidden).expanduser().resolve()
        if target == source or source in target.parents or target in source.parents:
            raise ValueError(f"the output {target} must be apart from the source {source}: give another folder")
    if target == Path.cwd() or target in Path.cwd().parents:
        raise ValueError(f"the output {target} holds the current folder and would be replaced: give another folder")
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"{target} is a file, expected a folder to write")
    _clean_up(target)
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise FileExistsError(f"{target} is not empty: give another folder, or --overwrite to replace it")
    made = [folder for folder in target.parents if not folder.exists()]
    temporary, old = (
        target.parent / f".{target.name}.{word}-{os.getpid()}-{secrets.token_hex(4)}" for word in ("tmp", "old")
    )
    try:
        temporary.mkdir(parents=True)
        yield temporary
        _synchronize(temporary)
        try:
            if target.exists():
                target.rename(old)
            temporary.rename(target)
        finally:
            if old.exists() and not target.exists():
                old.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        # Writers of tensors wrap the system's error in their own.
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left on device" in str(error):
            raise OSError(f"the disk is full: {target} could not be written, and nothing was changed") from error
        raise


def _synchronize(folder: Path) -> None:
    """Make sure that the disk holds every file of a folder, so that no power cut after the rename loses them."""
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _clean_up(target: Path) -> None:
    """Remove what dead processes left beside `target`; put the old output back if one died while replacing it."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.(tmp|old)-(\d+)-[0-9a-f]{{8}}")
    for path in list(target.parent.iterdir()) if target.parent.is_dir() else []:
        match = pattern.fullmatch(path.name)
        if match is None or _alive(int(match[2])):
            continue
        if match[1] == "old" and not target.exists():
            path.rename(target)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
