"""Parallel text as two string columns, from a local file or from the Hub.

The libraries that read it are imported when something is read. Data of a file is kept in the cache of the datasets
library under the hash of its content. A new file with the same path, size and time is read again.
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
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from .files import explain_unwritable
from .languages import split_language, split_prefix

if TYPE_CHECKING:
    from datasets import Dataset, Features
    from transformers import PreTrainedTokenizerBase

SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet")
CHECKED = 1000  # pairs whose tokens are looked at
BYTE_ORDER_MARK = "\ufeff"
DEEPEST = 100  # brackets in brackets; parsers recurse, and some thousand of them end the process
BLOCK = 1 << 24  # bytes looked at together
ROWS = 10_000  # of a Parquet file that are read together
# Messages of libraries about a file without rows.
NO_ROWS = ("corresponds to no data", "at least one example", "No columns to parse from file")
LARGEST_FIELD = 2**31 - 1  # characters of a cell; the csv module's own limit is 131,072
PLAIN_NAME = re.compile(r"[\w/. +,=@-]*")


# --- Columns of text


def load_parallel(
    data: str, *, source: str, target: str, split: str = "train", max_samples: int | None = None
) -> Dataset:
    """Load sentence pairs as a dataset of two string columns, `source` and `target`, in the order of the data.

    Args:
        data: a local file (.json, .jsonl, .csv, .tsv, the same with .gz, .parquet) or a dataset on the Hub, `name` or
            `name:configuration`. Cells of a .tsv file are taken as they stand (a quote is a character).
        source, target: names of columns, or languages inside a column `translation`:
            `{"translation": {"de": "Guten Tag.", "en": "Good day."}}`. A prefix for every source goes behind its
            column, as T5 asks for: `de=translate German to English: ` (see `split_prefix`).
        split: the split of a Hub dataset. A local file is one split, this argument does not matter to it.
        max_samples: keep the first so many pairs (default: all).

    Raises:
        FileNotFoundError: no such file, or no such dataset on the Hub.
        ValueError: an unknown file type, unreadable or empty data, columns that are missing, values that are not text.
    """
    (source, prefix), target = split_prefix(source), split_language(target)[0] or ""
    pairs = load_rows(data, split=split)
    pairs = _select_columns(pairs, data, source, target)
    pairs = take_rows(pairs, max_samples)
    _check_text(pairs, data, {"source": source, "target": target})
    return pairs.map(lambda pair: {"source": prefix + pair["source"]}) if prefix else pairs


def take_rows(rows: Dataset, max_samples: int | None) -> Dataset:
    """The first so many rows, or all. Raises `ValueError` for a number below 1."""
    if max_samples is None:
        return rows
    if max_samples < 1:
        raise ValueError(f"max_samples is {max_samples}: expected 1 or more, or None for all.")
    return rows.select(range(min(max_samples, len(rows))))


def load_text(
    data: str, *, source: str | None, target: str | None, default: tuple[str, str], split: str = "train"
) -> Dataset:
    """Sentence pairs as of `load_parallel`, or text of the source language alone: a dataset with no column `target`.

    Text alone is a .txt file (a line is a text, also with .gz), data of one column, and data without the column
    `default` names for the target where `source` is named and `target` is not.

    Args:
        data: a file, or a dataset on the Hub.
        source, target: the columns, or languages inside a column `translation`, that were asked for.
        default: what they are where they are `None`. The source's may bring a prefix, as in `load_parallel`.

    Raises:
        FileNotFoundError, ValueError: as `load_parallel`.
    """
    column, prefix = split_prefix(source or default[0])
    source, names = column if source else None, (column, target or default[1])
    if data.removesuffix(".gz").endswith(".txt"):
        rows, only = load_lines(Path(data)), "text"
        if len(rows) == 0:
            raise ValueError(f"{data} is empty: expected at least one line.")
    else:
        rows = _find_languages(load_rows(data, split=split), names)
        single = len(rows.column_names) == 1
        alone = single or (source in rows.column_names and target is None and default[1] not in rows.column_names)
        if not alone:
            return load_parallel(data, source=f"{column}={prefix}" if prefix else column, target=names[1], split=split)
        only = rows.column_names[0] if single and source not in rows.column_names else names[0]
        if (source is not None and only != source) or only == names[1]:
            raise ValueError(f"{data} has no column {names[0]!r}: it has {_shorten(only)} alone.")
    texts = rows.select_columns([only]).rename_columns({only: "source"} if only != "source" else {})
    _check_text(texts, data, {"source": only})
    return texts.map(lambda row: {"source": prefix + row["source"]}) if prefix else texts


def load_rows(data: str, *, split: str = "train") -> Dataset:
    """All columns of a file or a Hub dataset, as `load_parallel` finds them; at least one row.

    Raises:
        FileNotFoundError: no such file, or no such dataset on the Hub.
        ValueError: an unknown file type, unreadable or empty data.
    """
    rows = load_file(Path(data)) if is_file_name(data) else _load_hub(data, split)
    if len(rows) == 0:
        raise ValueError(f"{data} holds no rows: expected at least one.")
    return rows


def _load_hub(name: str, split: str) -> Dataset:
    """A split of the dataset `name` or `name:configuration`."""
    from datasets import load_dataset

    name, _, configuration = name.partition(":")
    if not name.strip("/ "):
        raise ValueError("the data has no name: give a file, or a dataset of the Hub")
    return load_dataset(name, configuration or None, split=split)


def _select_columns(pairs: Dataset, data: str, source: str, target: str) -> Dataset:
    """The columns `source` and `target` of `pairs`, wherever they stand."""
    pairs = _find_languages(pairs, (source, target))
    missing = [name for name in (source, target) if name not in pairs.column_names]
    if missing:
        wanted, there = " nor ".join(map(repr, missing)), ", ".join(map(_shorten, pairs.column_names))
        header = data.removesuffix(".gz").endswith((".csv", ".tsv"))
        raise ValueError(
            f"{data} has no column {wanted}: it has {there}. "
            + ("Its first line must name the columns. " if header else "")
            + "Name the columns (or the languages inside a column 'translation') that hold the two texts."
        )
    if source == target:
        raise ValueError(f"Source and target are both {source!r}: name two columns or languages.")
    return pairs.select_columns([source, target]).rename_columns({source: "source", target: "target"})


def _find_languages(pairs: Dataset, names: tuple[str, str]) -> Dataset:
    """The languages inside a column `translation` as columns of their own, unless there are columns of these names."""
    if "translation" in pairs.column_names and not {*names} <= set(pairs.column_names):
        pairs = pairs.flatten()
        languages = {n: n.removeprefix("translation.") for n in pairs.column_names if n.startswith("translation.")}
        if languages:
            pairs = pairs.select_columns(list(languages)).rename_columns(languages)
    return pairs


def _shorten(name: str) -> str:
    """A column's name; what stands there may be a sentence."""
    return repr(name if len(name) <= 30 else f"{name[:29]}…")


def _check_text(pairs: Dataset, data: str, names: dict[str, str]) -> None:
    """Raise a ValueError that names the first row where a column holds something else than text."""
    import pyarrow
    import pyarrow.compute as pc
    from datasets import Value

    for column, name in names.items():
        values = pairs.data.column(column)
        try:
            values.validate(full=True)
        except pyarrow.ArrowInvalid:
            row = next(i for i, value in enumerate(values.cast("large_binary")) if not _is_utf8(value.as_py()))
            raise ValueError(f"{data}, row {row + 1}, {name!r}: the text is not UTF-8: write it anew") from None
        if pairs.features[column] in (Value("string"), Value("large_string")):
            bad = pc.index(pc.is_null(values), True).as_py() if values.null_count else None
        else:
            bad = next((i for i, value in enumerate(pairs[column]) if not isinstance(value, str)), None)
        if bad is not None and pairs[bad][column] is None:
            raise ValueError(f"{data}, row {bad + 1} has no {name!r}: expected text in every row.")
        if bad is not None:
            raise ValueError(f"{data}, row {bad + 1}, {name!r}: expected text, found {pairs[bad][column]!r}.")


def _is_utf8(text: bytes | None) -> bool:
    try:
        (text or b"").decode()
    except UnicodeDecodeError:
        return False
    return True


def fingerprint(sentence: str) -> str:
    """Twelve hexadecimal digits that identify a sentence, without regard to letter case and spaces."""
    return hashlib.sha256(" ".join(sentence.casefold().split()).encode()).hexdigest()[:12]


# --- Tokens


def tokenize_pairs(
    pairs: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_source_length: int,
    max_target_length: int,
    num_proc: int | None = None,
) -> Dataset:
    """Tokenize the pairs of `load_parallel` into what a seq2seq model trains on.

    Columns: `input_ids`, `attention_mask`, `labels`, and their lengths in tokens, `source_length` and
    `target_length`, which `TokenBatchSampler` reads.

    Args:
        max_source_length, max_target_length: tokens, end-of-sentence token included, which always stays; longer texts
            are cut.
        num_proc: worker processes (default: none, in this process).

    Raises:
        ValueError: most of the text becomes unknown tokens.
    """
    tokens = pairs.map(
        _tokenize,
        fn_kwargs={"tokenizer": tokenizer, "limits": (max_source_length, max_target_length)},
        batched=True,
        remove_columns=pairs.column_names,
        num_proc=num_proc,
        desc="Tokenizing",
    )
    for column in ("input_ids", "labels"):
        check_known(tokens[:CHECKED][column], tokenizer)
    return tokens


def _tokenize(batch: dict[str, list], tokenizer: PreTrainedTokenizerBase, limits: tuple[int, int]) -> dict[str, list]:
    """The columns of `tokenize_pairs`; `limits` are the longest source and target."""
    source = tokenizer(batch["source"], max_length=limits[0], truncation=True)
    target = tokenizer(text_target=batch["target"], max_length=limits[1], truncation=True)
    return {
        "input_ids": source["input_ids"],
        "attention_mask": source["attention_mask"],
        "labels": target["input_ids"],
        "source_length": [len(ids) for ids in source["input_ids"]],
        "target_length": [len(ids) for ids in target["input_ids"]],
    }


def check_known(token_ids: Iterable[Sequence[int]], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ValueError` where a tokenizer maps most of a text to its unknown token.

    Args:
        token_ids: ids of texts. Special tokens and spaces do not count.
    """
    unknown = tokenizer.unk_token_id
    if unknown is None:
        return
    others = {*tokenizer.all_special_ids, *tokenizer.convert_tokens_to_ids(["▁", "Ġ"])} - {unknown}
    words = [token for ids in token_ids for token in ids if token not in others]
    if (count := words.count(unknown)) > len(words) / 2:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path} maps {count:,} of {len(words):,} tokens of the text to its "
            f"unknown token {tokenizer.unk_token!r}: give text in its languages, or the checkpoint its own tokenizer"
        )


def cut_texts(tokens: Dataset, limit: int) -> list[str]:
    """What there is to say of the texts that `tokenize_pairs` cut after so many tokens: a line a side, or none."""
    lengths = {side: tokens[f"{side}_length"][:] for side in ("source", "target")}
    cut = {side: sum(length >= limit for length in found) for side, found in lengths.items()}
    return [f"{n:,} of {len(tokens):,} {side}s are cut after {limit:,} tokens" for side, n in cut.items() if n]


# --- Local files, checked before the libraries parse them, which take much for granted


def is_lines(data: str) -> bool:
    """Whether `data` is a file of plain lines: it is there, and its ending is none of data's."""
    path = Path(os.path.expanduser(data))
    return path.is_file() and Path(path.name.removesuffix(".gz")).suffix not in SUFFIXES


def is_file_name(data: str) -> bool:
    """Whether `data` speaks of a file: it is there, or it is written like a path or with a known ending."""
    known = data.removesuffix(".gz").endswith((*SUFFIXES, ".txt"))
    return os.path.exists(data) or data.startswith(("/", ".", "~")) or known


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
    logger = logging.getLogger("datasets.packaged_modules.json.json")  # also prints the errors that it raises
    with ExitStack() as stack:
        stack.callback(setattr, logger, "disabled", logger.disabled)
        logger.disabled = True
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


def exact_name(path: Path) -> str:
    """A name by which the datasets library reads `path` and nothing else: that of a link, where it would take
    characters for a pattern, a variable or a chain of archives (`[`, `*`, `?`, `$`, `::`). Links go with this process.
    """
    path = Path(os.path.abspath(path))
    if PLAIN_NAME.fullmatch(str(path)):
        return str(path)
    endings = "".join(path.suffixes[-2:] if path.suffix == ".gz" else path.suffixes[-1:])  # `.jsonl`, `.jsonl.gz`
    link = Path(_links(), hashlib.sha256(os.fsencode(path)).hexdigest()[:16] + endings)
    if not link.is_symlink():
        link.symlink_to(path)
    return str(link)


@cache
def _links() -> str:
    """A folder for links, which is removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="lightformers-")
    atexit.register(folder.cleanup)
    return folder.name


def _identity(path: Path, suffix: str) -> str:
    """Identity of a file in the cache: its content, and the way it is read. The library itself asks for path and time.

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
    with (
        ExitStack() as stack,
        _open(path) as packed,
        io.TextIOWrapper(packed, encoding="utf-8-sig", newline="") as lines,
    ):
        stack.callback(csv.field_size_limit, csv.field_size_limit(LARGEST_FIELD))
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


def _explain_json(path: Path, reason: str) -> str:
    """The message of a parser, or the first line that is not JSON: parsers count the rows of a part, from 0."""
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
