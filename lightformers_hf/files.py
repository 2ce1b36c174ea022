"""Writing: a folder or a file whole or not at all, JSON; and the names of files that more than one part knows."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

CARD_FILE = "README.md"
REPORT_FILE = "compression.json"
EXPORT_FILE = "export.json"
STATE_FILE = "trainer_state.json"  # transformers' Trainer writes it
WEIGHT_FILES = (  # the one that is loaded first
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.spm",
    "*.model",
)


def check_output(target: str | Path, *, overwrite: bool = False, forbidden: str | Path | None = None) -> Path:
    """The folder to write, as `atomic_output` will write it; what a dead process left beside it is cleaned up.

    To be called before work that takes long, which would be lost.

    Args, Raises: see `atomic_output`.
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
    return target


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
    target = check_output(target, overwrite=overwrite, forbidden=forbidden)
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


@contextmanager
def write_whole(path: Path) -> Iterator[BinaryIO]:
    """A binary file that takes the place of `path` when all is written; an error leaves `path` as it was."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_json(file: Path) -> dict[str, Any]:
    """The object that a file of JSON holds, an empty one where there is no such file.

    Raises `ValueError` for anything else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}): write it again, or remove it") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} is damaged (it holds no object): write it again, or remove it")
    return content


def write_json(content: dict | list, file: Path) -> None:
    """Write `content` as `file`, indented. Raises `ValueError` as `json_text`."""
    file.write_text(json_text(content, file.name), encoding="utf-8")


def json_text(content: dict | list, what: str) -> str:
    """`content` as indented JSON.

    Args:
        what: the name that an error gives to it.

    Raises:
        ValueError: a number in it is NaN or infinite, which JSON does not know.
    """
    try:
        return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    except ValueError:
        if place := find_not_finite(content):
            raise ValueError(
                f"{what}: {place} is NaN or infinite, which JSON cannot say, so nothing was written; it is an error "
                "of lightformers_hf, or of a model that computes such values"
            ) from None
        raise


def find_not_finite(content: object, place: str = "") -> str | None:
    """Where in nested lists and dictionaries the first number is NaN or infinite: `matrices[3].energy`."""
    if isinstance(content, dict):
        inner = ((value, f"{place}.{key}".lstrip(".")) for key, value in content.items())
    elif isinstance(content, list | tuple):
        inner = ((value, f"{place}[{index}]") for index, value in enumerate(content))
    else:
        return place if isinstance(content, float) and not math.isfinite(content) else None
    return next(filter(None, (find_not_finite(value, name) for value, name in inner)), None)
