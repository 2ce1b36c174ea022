"""Rows of a local file, checked before the libraries parse it: they take much for granted, and keep what they read.

What was read of a file is kept in the datasets library's cache under the file's content: another file that takes its
place, of the same path, size and time, is read anew.
"""

from __future__ import annotations

import atexit
import codecs
import csv
import gzip
import hashlib
import io
import json
import logging
import os
import re
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from .files import explain_unwritable

if TYPE_CHECKING:
    from datasets import Dataset, Features

SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet")
BYTE_ORDER_MARK = "\ufeff"
DEEPEST = 100  # brackets in brackets; parsers recurse, and some thousand of them end the process
BLOCK = 1 << 24  # bytes looked at together
ROWS = 10_000  # of a Parquet file that are read together
# What libraries say of a file without a row.
NO_ROWS = ("corresponds to no data", "at least one example", "No columns to parse from file")
LARGEST_FIELD = 2**31 - 1  # characters of a cell; the csv module's own limit is 131,072


def load_file(path: Path) -> Dataset:
    """All columns of a local file, those of .csv and .tsv as text; no row where it holds none.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a folder, an unknown type, or content that is damaged or not UTF-8; of .csv and .tsv also a line of
            more or fewer fields than the header names.
        OSError: the cache of the datasets library cannot be written.
    """
    path = Path(os.path.expanduser(path))
    return _load(path, _suffix_of(path))


def load_lines(path: Path) -> Dataset:
    """The lines of a local .txt file, which may be packed (.gz), as a column `text`; no row where it holds none.

    Raises: as `load_file`.
    """
    path = Path(os.path.expanduser(path))
    _check_there(path)
    lines = _load(path, ".txt")
    marked = len(lines) and lines[0]["text"].startswith(BYTE_ORDER_MARK)
    return lines.map(lambda row: {"text": row["text"].removeprefix(BYTE_ORDER_MARK)}) if marked else lines


def _load(path: Path, suffix: str) -> Dataset:
    """A file that is there, read as one of a type; no row where it holds none."""
    from datasets import Dataset
    from datasets.config import HF_DATASETS_CACHE
    from datasets.exceptions import DatasetGenerationError

    try:
        return _read(path, suffix)
    except StopIteration:
        return Dataset.from_dict({})
    except (DatasetGenerationError, ValueError, EOFError, OSError, zlib.error) as error:
        reason = error.__cause__ or error
        if any(words in f"{error} {reason}" for words in NO_ROWS):
            return Dataset.from_dict({})
        if trouble := explain_unwritable(reason, "datasets library", HF_DATASETS_CACHE):
            raise trouble from error
        if suffix in (".json", ".jsonl") and isinstance(error, DatasetGenerationError):
            reason = _explain_json(path, str(reason))
        raise ValueError(f"{path} cannot be read as {'text' if suffix == '.txt' else suffix[1:]}: {reason}") from error


def _read(path: Path, suffix: str) -> Dataset:
    """As `_load`; errors are the libraries', whose words for a file without a row are StopIteration or `NO_ROWS`."""
    import pandas
    from datasets import Dataset, Features, Value

    name, identity = exact_name(path), _identity(path, suffix)
    if suffix == ".parquet":
        return Dataset.from_parquet(name, config_id=identity, batch_size=ROWS)  # by default, as many as come first
    _check_encoding(path)
    if suffix == ".txt":
        return Dataset.from_text(name, config_id=identity)
    if suffix in (".json", ".jsonl"):
        _check_json(path)
        return _read_json(path, name, identity)
    # Every cell is text: without this "1984" becomes a number and "null", a German word, becomes a missing value.
    options = {"sep": "\t", "quoting": csv.QUOTE_NONE} if suffix == ".tsv" else {}
    header = pandas.read_csv(name, nrows=0, index_col=False, **options).columns
    _check_fields(path, len(header), tabs=suffix == ".tsv")
    features = Features({name: Value("string") for name in header})
    options |= {"keep_default_na": False, "index_col": False, "features": features}
    return Dataset.from_csv(name, config_id=identity, **options)


def _read_json(path: Path, name: str, identity: str) -> Dataset:
    """Rows of JSON, which may lack columns, or languages inside `translation`, that others have.

    The library takes columns from the first megabytes, and languages that differ there for objects of any kind.
    """
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError

    rows, error = None, None
    with _quiet_json_reader():
        try:
            rows = Dataset.from_json(name, config_id=identity)
        except DatasetGenerationError as raised:
            if "cast" not in f"{raised.__cause__}":
                raise
            error = raised
        if rows is not None and isinstance(rows.features.get("translation", {}), dict):
            return rows
        with suppress(json.JSONDecodeError, DatasetGenerationError):
            if features := _find_features(path):
                columns = hashlib.sha256(repr(features).encode()).hexdigest()[:16]
                return Dataset.from_json(name, config_id=f"{identity}-{columns}", features=features)
    if error is not None:
        raise error
    return rows


def _find_features(path: Path) -> Features | None:
    """The columns of all rows of JSON, and all languages inside `translation`; `None` where one is no object.

    Raises:
        ValueError: `translation` holds something else than texts; names the row.
    """
    from datasets import Features, Json, Value

    kinds: dict[str, set[type]] = {}
    languages: dict[str, None] = {}
    with _open(path) as file:
        whole = file.read(1) == b"["
        file.seek(0)
        for number, row in enumerate(json.load(file) if whole else map(json.loads, filter(bytes.strip, file)), 1):
            if not isinstance(row, dict) or not isinstance(row.get("translation"), dict | None):
                return None
            for column, value in row.items():
                kinds.setdefault(column, set()).add(type(value))
            for language, text in (row.get("translation") or {}).items():
                if not isinstance(text, str | None):
                    raise ValueError(f"row {number}, {language!r}: expected text, found {text!r:.40}")
                languages[language] = None
    plain = {str: Value("string"), bool: Value("bool"), int: Value("int64"), float: Value("float64")}
    features: dict[str, object] = {"translation": {language: Value("string") for language in languages}}
    for column, found in kinds.items():
        (kind, *others) = found - {type(None)} or {str}
        features.setdefault(column, Json() if others else plain.get(kind, Json()))
    return Features({column: features[column] for column in kinds})


PLAIN_NAME = re.compile(r"[\w/. +,=@-]*")


def exact_name(path: Path) -> str:
    """A name by which the datasets library reads `path` and nothing else: that of a link, where it would take
    characters for a pattern, a variable or a chain of archives (`[`, `*`, `?`, `$`, `::`). Links go with this process.
    """
    path = Path(os.path.abspath(path))
    if PLAIN_NAME.fullmatch(str(path)):
        return str(path)
    link = Path(_links(), hashlib.sha256(os.fsencode(path)).hexdigest()[:16] + _endings(path))
    if not link.is_symlink():
        link.symlink_to(path)
    return str(link)


@cache
def _links() -> str:
    """A folder for links, which is removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="lightformers-")
    atexit.register(folder.cleanup)
    return folder.name


def _endings(path: Path) -> str:
    """`.jsonl` or `.jsonl.gz`."""
    packed = ".gz" * (path.suffix == ".gz")
    return Path(path.name.removesuffix(".gz")).suffix + packed


def check_data(data: str) -> None:
    """Raise `FileNotFoundError` or `ValueError` where `data` speaks of a file, and none is there."""
    if is_file_name(data):
        _check_there(Path(os.path.expanduser(data)))


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
    """What the cache knows a file by: its content, and how it is read. The library itself asks for path and time.

    "2" sets it apart from that of versions which could read another file than the one that was named.
    """
    with path.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()[:32]
    return f"{suffix[1:]}-2-{'gz-' * (path.suffix == '.gz')}{content}"


def _open(path: Path) -> gzip.GzipFile | io.BufferedReader:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _check_encoding(path: Path) -> None:
    """Raise a `ValueError` that names the first line that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with _open(path) as file:
        start = file.read(8)
        marked = start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        if marked or (len(start) >= 4 and not (any(start[::2]) and any(start[1::2]))):
            raise ValueError(f"it is in UTF-16, expected UTF-8: save it as UTF-8 (iconv -f UTF-16 -t UTF-8 {path})")
        file.seek(0)
        try:
            while block := file.read(BLOCK):
                decoder.decode(block)
            decoder.decode(b"", final=True)
            return
        except UnicodeDecodeError:
            file.seek(0)
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                place = f"byte {line[error.start]:#x} at character {len(line[: error.start].decode()) + 1}"
                raise ValueError(
                    f"line {number} is not UTF-8 ({place}): save it as UTF-8 (iconv -f LATIN1 -t UTF-8, if it was "
                    "Latin-1), or mend the line"
                ) from None


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
                _check_returns(path, first)
                raise ValueError(
                    f"line {first}: {fields}, the header names {expected}; look for a delimiter too many or too few "
                    f"there{'' if tabs else ', or a quote that is not closed'}"
                )
            first = rows.line_num + 1


def _check_returns(path: Path, last: int) -> None:
    """Raise a `ValueError` where one of the lines up to `last`, but not every, ends with a carriage return alone."""
    with _open(path) as packed, io.TextIOWrapper(packed, encoding="utf-8", newline="") as lines:
        returns = [line.endswith("\r") for line in islice(lines, last)]
    if any(returns) and not all(returns):
        raise ValueError(
            f"line {returns.index(True) + 1} holds a carriage return (\\r) within a text, where a row ends for most "
            "programs: replace it by a space"
        )


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
        for number, line in enumerate(file, start=1):
            if number == 1 and not line.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
                break
            try:
                json.dumps(json.loads(line.strip() or b"{}"), ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                half = f"\\u{ord(error.object[error.start]):x}"
                return f"line {number} holds the lone surrogate {half}: write the whole character, or remove it"
            except json.JSONDecodeError as error:
                return f"line {number} is no JSON object: {error.msg} at character {error.pos + 1}"
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
    path = Path(os.path.expanduser(data))
    return path.is_file() and Path(path.name.removesuffix(".gz")).suffix not in SUFFIXES


def is_file_name(data: str) -> bool:
    """Whether `data` speaks of a file: it is there, or it is written like a path or with a known ending."""
    known = data.removesuffix(".gz").endswith((*SUFFIXES, ".txt"))
    return os.path.exists(data) or data.startswith(("/", ".", "~")) or known
