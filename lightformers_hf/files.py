"""Writing: a folder or a file whole or not at all; and the names of files that more than one part knows."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

CARD_FILE = "README.md"
REPORT_FILE = "compression.json"
EXPORT_FILE = "export.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "*.spm", "*.model")


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


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A binary file that takes the place of `path` when all is written; an error leaves `path` as it was."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
