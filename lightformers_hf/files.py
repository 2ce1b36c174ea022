"""Files: written whole or not at all, JSON, and the names of those that more than one part knows."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, BinaryIO, Union, cast, get_args, get_origin, get_type_hints

CARD_FILE = "README.md"
REPORT_FILE = "compression.json"
EXPORT_FILE = "export.json"
RECORD_FILE = "recovery.json"  # of a recovery: what was asked for, what was chosen, what came out
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
MANIFEST_FILE = ".lightformers.json"  # in every folder that the package wrote: the names of what it wrote there
UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)  # of a folder: nothing goes into it
LARGEST = 2.0**63  # of what is measured, nothing is more
LONGEST_NAME = 255  # bytes, of a file's name


def beside(path: Path, word: str) -> Path:
    """The path `.NAME.WORD` beside a file or folder; NAME is a digest of a name that would be too long."""
    name = path.name
    if len(os.fsencode(name)) > LONGEST_NAME - 32:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
    return path.with_name(f".{name}.{word}")


@contextmanager
def write_whole(path: Path) -> Iterator[BinaryIO]:
    """A binary file that takes the place of `path` when all is written; an error leaves `path` as it was.

    A link stays one, to what is written; a device or a pipe is written to.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    path = path.resolve()
    partial = beside(path, secrets.token_hex(4) + ".partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def explain_unwritable(error: BaseException, library: str, folder: str | os.PathLike) -> OSError | None:
    """The error to raise where a library's cache in `folder` takes nothing more; `None` for any other `error`."""
    if not isinstance(error, OSError) or error.errno not in UNWRITABLE:
        return None
    return OSError(
        f"the cache of the {library}, {folder}, cannot be written ({error.strerror}): make room or give rights there, "
        "or let the environment variable HF_HOME name another folder"
    )


def read_json(file: Path) -> dict[str, Any]:
    """The object that a file of JSON holds, an empty one where there is no such file.

    Raises `ValueError` for anything else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged ({error}): write it again, or remove it") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} is damaged (it holds no object): write it again, or remove it")
    return content


def as_kind(content: Any, kind: Any, place: str) -> Any:
    """What JSON holds, as a type hint says that it should be: a data class of an object, anything else as it is.

    Args:
        content: of a file that anybody may have written.
        kind: `int`, `float` (whole numbers, too), `str`, `Any`, a data class, and lists, dictionaries, unions of them.
        place: where it stands, for the message.

    Raises:
        ValueError: it is something else, or a number without end; names the place.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return content
    if origin in (Union, UnionType):
        if content is None and NoneType in inner:
            return None
        return as_kind(content, next(one for one in inner if one is not NoneType), place)
    if is_dataclass(kind) and isinstance(content, dict):
        hints, make = get_type_hints(kind), cast(type, kind)
        missing = [field.name for field in fields(kind) if field.name not in content and field.default is MISSING]
        if missing:
            raise ValueError(f"{missing[0]!r} is missing in {place}")
        return make(**{n: as_kind(content[n], hint, f"{place}.{n}") for n, hint in hints.items() if n in content})
    if origin is list and isinstance(content, list):
        return [as_kind(value, inner[0], f"{place}[{index}]") for index, value in enumerate(content)]
    if origin is dict and isinstance(content, dict):
        return {key: as_kind(value, inner[1], f"{place}.{key}") for key, value in content.items()}
    kinds = {float: (int, float)}.get(kind, kind) if origin is None and not is_dataclass(kind) else ()
    if not isinstance(content, kinds) or (isinstance(content, bool) and kind is not bool):
        expected = getattr(kind, "__name__", str(kind)) if origin is None else str(kind)
        raise ValueError(f"{place} is {str(content)[:40]!r}, expected {expected}")
    if isinstance(content, int | float) and not abs(content) < LARGEST:
        raise ValueError(f"{place} is no number that is measured")
    return content


def write_json(content: dict | list, file: Path) -> None:
    """Write `content` as `file`, indented, whole or not at all. Raises `ValueError` as `json_text`."""
    text = json_text(content, file.name)
    with write_whole(file) as opened:
        opened.write(text.encode())


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
