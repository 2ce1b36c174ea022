"""Rows of a local file, checked before the libraries parse it: they take much for granted, and keep what they read.

What was read of a file is kept in the datasets library's cache under the file's content: another file that takes its
place, of the same path, size and time, is read anew.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import logging
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset

SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet")
BYTE_ORDER_MARK = "\ufeff"
DEEPEST = 100  # brackets in brackets; parsers recurse, and some thousand of them end the process
BLOCK = 1 << 24  # bytes looked at together
LARGEST_FIELD = 2**31 - 1  # characters of a cell; the csv module's own limit is 131,072


def load_file(path: Path) -> Dataset:
    """All columns of a local file, those of .csv and .tsv as text; no row where it holds none.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a folder, an unknown type, or content that is damaged; of .csv and .tsv also a line of more or
            fewer fields than the header names.
    """
    import pandas
    from datasets import Dataset, Features, Value
    from datasets.exceptions import DatasetGenerationError

    path = path.expanduser()
    suffix = _suffix_of(path)
    # The library's words for a file without a row are StopIteration, "corresponds to no data" or EmptyDataError.
    try:
        if suffix == ".parquet":
            return Dataset.from_parquet(str(path), config_id=_identity(path, suffix))
        if suffix in (".json", ".jsonl"):
            _check_json(path)
            with _quiet_json_reader():
                return Dataset.from_json(str(path), config_id=_identity(path, suffix))
        # Every cell is text: without this "1984" becomes a number and "null", a German word, becomes a missing value.
        options = {"sep": "\t", "quoting": csv.QUOTE_NONE} if suffix == ".tsv" else {}
        header = pandas.read_csv(path, nrows=0, index_col=False, **options).columns
        _check_fields(path, len(header), tabs=suffix == ".tsv")
        features = Features({name: Value("string") for name in header})
        options |= {"keep_default_na": False, "index_col": False, "features": features}
        return Dataset.from_csv(str(path), config_id=_identity(path, suffix), **options)
    except (StopIteration, pandas.errors.EmptyDataError):
        return Dataset.from_dict({})
    except (DatasetGenerationError, ValueError, EOFError, OSError, zlib.error) as error:
        if "corresponds to no data" in str(error):
            return Dataset.from_dict({})
        reason = error.__cause__ or error
        if suffix in (".json", ".jsonl") and isinstance(error, DatasetGenerationError):
            reason = _explain_json(path, str(reason))
        raise ValueError(f"{path} cannot be read as {suffix[1:]}: {reason}") from error


def load_lines(path: Path) -> Dataset:
    """The lines of a local .txt file, which may be packed (.gz), as a column `text`; no row where it holds none.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is damaged.
    """
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError

    path = path.expanduser()
    _check_there(path)
    try:
        lines = Dataset.from_text(str(path), config_id=_identity(path, ".txt"))
        marked = len(lines) and lines[0]["text"].startswith(BYTE_ORDER_MARK)
        return lines.map(lambda row: {"text": row["text"].removeprefix(BYTE_ORDER_MARK)}) if marked else lines
    except StopIteration:
        return Dataset.from_dict({})
    except (DatasetGenerationError, ValueError, EOFError, OSError, zlib.error) as error:
        if "at least one example" in f"{error} {error.__cause__}":  # the library's words for a file without a line
            return Dataset.from_dict({})
        raise ValueError(f"{path} cannot be read as text: {error.__cause__ or error}") from error


def check_data(data: str) -> None:
    """Raise `FileNotFoundError` or `ValueError` where `data` speaks of a file, and none is there."""
    if is_file_name(data):
        _check_there(Path(data).expanduser())


def _check_there(path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give one of its files, or the name of a dataset on the Hub.")
    if not path.is_file():
        raise FileNotFoundError(f"No data file {path}: give an existing file, or the name of a dataset on the Hub.")


def _suffix_of(path: Path) -> str:
    """The ending of a file that is there, `.gz` aside."""
    _check_there(path)
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix not in SUFFIXES:
        raise ValueError(
            f"{path} has an unknown type {suffix!r}: expected one of {', '.join(SUFFIXES)} (.gz allowed)."
        )
    return suffix


def _identity(path: Path, suffix: str) -> str:
    """What the cache knows a file by: its content, and how it is read. The library itself asks for path and time."""
    with path.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()[:32]
    return f"{suffix[1:]}-{'gz-' * (path.suffix == '.gz')}{content}"


def _open(path: Path) -> gzip.GzipFile | io.BufferedReader:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _check_fields(path: Path, expected: int, *, tabs: bool) -> None:
    """Raise a `ValueError` that names the first line with more or fewer fields than the header.

    Where all lines have more, pandas takes the first field for a name of the row and shifts the columns; where one has
    fewer, it fills it up with empty text.
    """
    with _open(path) as packed, io.TextIOWrapper(packed, encoding="utf-8-sig", newline="") as lines, _large_fields():
        rows = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE) if tabs else csv.reader(lines)
        first = 1
        for row in rows:
            empty = not row or (len(row) == 1 and not row[0].strip(" \t"))  # which pandas skips
            if len(row) != expected and not empty:
                fields = f"{len(row)} field{'s' * (len(row) != 1)}"
                raise ValueError(
                    f"line {first}: {fields}, the header names {expected}; look for a delimiter too many or too few "
                    f"there{'' if tabs else ', or a quote that is not closed'}"
                )
            first = rows.line_num + 1


@contextmanager
def _quiet_json_reader() -> Iterator[None]:
    """The library does not print what it raises, too."""
    logger = logging.getLogger("datasets.packaged_modules.json.json")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def _explain_json(path: Path, reason: str) -> str:
    """What a parser said of a file, or the first line that is no JSON: parsers count rows of a part, from 0."""
    with suppress(OSError, EOFError, zlib.error, RecursionError), _open(path) as file:
        lines = file.read(BLOCK).splitlines()
        if lines and lines[0].lstrip().startswith(b"{"):
            for number, line in enumerate(lines[:-1] if file.read(1) else lines, start=1):
                try:
                    json.loads(line or b"{}")
                except ValueError as error:
                    said = str(error)
                    if isinstance(error, json.JSONDecodeError):
                        said = f"{error.msg} at character {error.pos + 1}"
                    return f"line {number} is no JSON object: {said}"
    return re.sub(r" in row \d+", "", reason)


@contextmanager
def _large_fields() -> Iterator[None]:
    """The csv module reads cells of any size inside."""
    before = csv.field_size_limit(LARGEST_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _check_json(path: Path) -> None:
    """Raise a `ValueError` for JSON that would end the process: brackets in brackets in brackets…, `null` as a row.

    Only brackets, quotes and the n of null are looked at; what stands between quotes is text. A file that is no JSON
    is the parsers'.
    """
    import numpy

    others = bytes(sorted(set(range(256)) - set(b'[]{}"n')))
    step = numpy.zeros(256, numpy.int64)
    step[list(b"[{")], step[list(b"]}")] = 1, -1
    depth, quoted, rest = 0, 0, b""
    with _open(path) as file:
        while block := file.read(BLOCK):
            block = rest + block
            # A pair of characters that begins with a backslash is none of these, wherever the block ends.
            kept = len(block) - (len(block) - len(block.rstrip(b"\\"))) % 2
            block, rest = block[:kept], block[kept:]
            block = block.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, others)
            signs = numpy.frombuffer(block, numpy.uint8)
            inside = (numpy.cumsum(signs == ord('"')) + quoted) % 2
            depths = numpy.cumsum(numpy.where(inside, 0, step[signs])) + depth
            if len(depths):
                if depths.max() > DEEPEST:
                    raise ValueError(f"it is nested more than {DEEPEST} brackets deep")
                if ((signs == ord("n")) & (depths == 0) & (inside == 0)).any():
                    _check_rows(path)
                depth, quoted = int(depths[-1]), int(inside[-1])


def _check_rows(path: Path) -> None:
    """Raise a `ValueError` that names the first line that begins with `null`, outside of all brackets."""
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if re.match(rb"(\xef\xbb\xbf)?\s*null", line):
                raise ValueError(f"line {number} is null, expected an object")


def is_lines(data: str) -> bool:
    """Whether `data` is a file of plain lines: it is there, and its ending is none of data's."""
    path = Path(data).expanduser()
    return path.is_file() and Path(path.name.removesuffix(".gz")).suffix not in SUFFIXES


def is_file_name(data: str) -> bool:
    """Whether `data` speaks of a file: it is there, or it is written like a path or with a known ending."""
    known = data.removesuffix(".gz").endswith((*SUFFIXES, ".txt"))
    return os.path.exists(data) or data.startswith(("/", ".", "~")) or known
