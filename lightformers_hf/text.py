"""Parallel text as two string columns, from a local file or from the Hub.

The libraries that read it are imported when something is read. Data of a file is kept in the cache of the datasets
library under the hash of its content. A new file with the same path, size and time is read again.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import json
import logging
import os
import re
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import explain_unwritable, write_whole
from .languages import split_language, split_prefix

if TYPE_CHECKING:
    from datasets import Dataset, Features
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet")
CHECKED = 1000  # pairs whose tokens are looked at
ROWS = 10_000  # read together
NO_ROWS = ("corresponds to no data", "at least one example")  # messages of the library for a file without rows
LARGEST_FIELD = 2**31 - 1  # characters of a cell; the csv module's own limit is 131,072
HUB_NAME = re.compile(r"(\w[\w.-]*(/\w[\w.-]*)?)?(:.*)?")  # of a dataset and its configuration
LANGUAGE = r"[a-z]{2}([_-].*)?|[a-z]{3}_[A-Z][a-z]{3}"  # codes, also those of NLLB
OTHER_NAME = re.compile(rf"(?!({LANGUAGE})$)[\w.-]+")  # of a column: no language, and no sentence
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
            column, as T5 asks for: `de=translate German to English: ` (see `split_prefix`). If there are no other
            columns than two of text, and their names are no languages, they are source and target, with a warning.
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
    `default` names for the target where `source` is named and `target` is not. `default`: columns for those that are
    `None`; the source's may bring a prefix.
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
    """All columns of a file or a Hub dataset, as `load_parallel` finds them; at least one row."""
    if is_file_name(data):
        rows = load_file(Path(data))
    else:
        from datasets import load_dataset

        name, _, configuration = data.partition(":")
        if not name.strip("/ "):
            raise ValueError("the data has no name: give a file, or a dataset of the Hub")
        rows = load_dataset(name, configuration or None, split=split)
    if len(rows) == 0:
        raise ValueError(f"{data} holds no rows: expected at least one.")
    return rows


def _select_columns(pairs: Dataset, data: str, source: str, target: str) -> Dataset:
    """The columns `source` and `target` of `pairs`, wherever they stand, or the only two of text."""
    pairs = _find_languages(pairs, (source, target))
    columns, source, target = (source, target), *choose_pair(pairs, source, target)
    if (source, target) != columns:
        logger.warning(
            f"{data} has no columns {columns[0]!r} and {columns[1]!r}: its only columns, {_shorten(source)} and "
            f"{_shorten(target)}, are taken as source and target"
        )
    missing = [name for name in (source, target) if name not in pairs.column_names]
    if missing:
        wanted, there = " nor ".join(map(repr, missing)), ", ".join(map(_shorten, pairs.column_names))
        header = data.removesuffix(".gz").endswith((".csv", ".tsv"))
        raise ValueError(
            f"{data} has no column {wanted}: it has {there}. "
            + ("Its first line must name the columns. " if header else "")
            + "Give source_lang and target_lang: the two columns of text, or two languages inside a column "
            "'translation'."
        )
    if source == target:
        raise ValueError(f"Source and target are both {source!r}: name two columns or languages.")
    return pairs.select_columns([source, target]).rename_columns({source: "source", target: "target"})


def choose_pair(pairs: Dataset, source: str, target: str) -> tuple[str, str]:
    """Return the names of the two columns of text: those given, or those of a dataset that has two others.

    The others must hold words. Their names may be no languages, which are other ones than asked for, and no sentences,
    as where the first line of a table does not name the columns.
    """
    names = pairs.column_names
    if len(names) != 2 or {source, target} & {*names} or source == target or not all(map(OTHER_NAME.fullmatch, names)):
        return source, target
    texts = [pairs[:CHECKED][name] for name in names]
    words = all(any(isinstance(text, str) and re.search(r"[^\W\d_]", text) for text in column) for column in texts)
    return (names[0], names[1]) if words else (source, target)


def _find_languages(pairs: Dataset, names: tuple[str, str]) -> Dataset:
    """The languages inside a column `translation` as columns of their own, unless there are columns of these names."""
    if "translation" in pairs.column_names and not {*names} <= set(pairs.column_names):
        pairs = pairs.flatten()
        languages = {n: n.removeprefix("translation.") for n in pairs.column_names if n.startswith("translation.")}
        if languages:
            pairs = pairs.select_columns(list(languages)).rename_columns(languages)
    return pairs


def _shorten(name: str) -> str:
    """Shorten a column's name, which may be a sentence."""
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
            raise ValueError(f"{data}, row {row + 1}, {name!r}: the text is not UTF-8: write it again") from None
        if pairs.features[column] in (Value("string"), Value("large_string")):
            bad = pc.index(pc.is_null(values), True).as_py() if values.null_count else None
        else:
            bad = next((i for i, value in enumerate(pairs[column]) if not isinstance(value, str)), None)
        if bad is not None and pairs[bad][column] is None:
            raise ValueError(f"{data}, row {bad + 1} has no {name!r}: expected text in every row.")
        if bad is not None:
            raise ValueError(f"{data}, row {bad + 1}, {name!r}: expected text, found {pairs[bad][column]!r:.60}")


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
    """Tokenize the pairs of `load_parallel` for the training of a sequence-to-sequence model.

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
    target = tokenizer(text_target=batch["target"], max_length=limits[1], truncation=True)["input_ids"]
    columns = {name: source[name] for name in ("input_ids", "attention_mask")} | {"labels": target}
    lengths = {"source_length": source["input_ids"], "target_length": target}
    return columns | {name: [len(ids) for ids in texts] for name, texts in lengths.items()}


def check_known(token_ids: Iterable[Sequence[int]], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ValueError` where a tokenizer maps most of a text to its unknown token."""
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
    """Return one line per side about the texts that `tokenize_pairs` cut at a number of tokens, or none."""
    lengths = {side: tokens[f"{side}_length"][:] for side in ("source", "target")}
    cut = {side: sum(length >= limit for length in found) for side, found in lengths.items()}
    return [f"{n:,} of {len(tokens):,} {side}s are cut after {limit:,} tokens" for side, n in cut.items() if n]


# --- Local files


def is_lines(data: str) -> bool:
    """Whether `data` is a file of plain lines: it is there, and its ending is none of data's."""
    path = Path(os.path.expanduser(data))
    return path.is_file() and Path(path.name.removesuffix(".gz")).suffix not in SUFFIXES


def is_file_name(data: str) -> bool:
    """Whether `data` is the name of a file: it exists, has a known suffix, or is no name of a dataset on the Hub."""
    known = data.removesuffix(".gz").endswith((*SUFFIXES, ".txt"))
    return os.path.exists(data) or known or not HUB_NAME.fullmatch(data)


def data_name(data: str | os.PathLike | None) -> str | None:
    """Return the file or Hub name of data. Raises `ValueError` for loaded rows, which would be taken for a name."""
    if data is None or isinstance(data, str | os.PathLike):
        return None if data is None else os.fspath(data)
    raise ValueError(
        f"the data is a {type(data).__name__}: expected a file, or the name of a data set on the Hub. Write loaded "
        "rows to a file: Dataset.from_list(rows).to_json('rows.jsonl')"
    )


def check_data(data: str) -> None:
    """Raise `FileNotFoundError` or `ValueError` where `data` speaks of a file, and none is there."""
    if is_file_name(data):
        _check_there(Path(os.path.expanduser(data)))


def _check_there(path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give one of its files, or the name of a dataset on the Hub.")
    if not path.is_file():
        raise FileNotFoundError(f"No data file {path}: give an existing file, or the name of a dataset on the Hub.")


def load_file(path: Path) -> Dataset:
    """All columns of a local file, those of .csv and .tsv as text; no row where it holds none.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a folder, an unknown type, or content that is damaged or not UTF-8. In .csv and .tsv also a line of
            more or fewer fields than the header names.
        OSError: the cache of the datasets library cannot be written.
    """
    path = Path(os.path.expanduser(path))
    _check_there(path)
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix not in SUFFIXES:
        raise ValueError(
            f"{path} has an unknown type {suffix!r}: expected one of {', '.join(SUFFIXES)} (.gz allowed)."
        )
    return _load(path, suffix)


def load_lines(path: Path) -> Dataset:
    """The lines of a local .txt file, which may be packed (.gz), as a column `text`; no row where it holds none.

    Raises: as `load_file`.
    """
    path = Path(os.path.expanduser(path))
    _check_there(path)
    return _load(path, ".txt")


def _load(path: Path, suffix: str) -> Dataset:
    """A file that is there, read as one of a type; no row where it holds none."""
    import pyarrow
    from datasets import Dataset
    from datasets.config import HF_DATASETS_CACHE
    from datasets.exceptions import DatasetGenerationError

    try:
        with path.open("rb") as file:  # the key of the cache is the content and the reader
            content = hashlib.file_digest(file, "sha256").hexdigest()[:32]
        identity = f"{suffix[1:]}-3-{'gz-' * (path.suffix == '.gz')}{content}"
        if suffix == ".parquet":  # by default, as many rows are read together as come first
            return Dataset.from_parquet(exact_name(path), config_id=identity, batch_size=ROWS)
        target = Path(HF_DATASETS_CACHE, "lightformers", f"{identity}.arrow")
        if not target.is_file():
            features = _find_features(path, suffix)
            rows = _complete_rows(path, suffix, features)
            target.parent.mkdir(parents=True, exist_ok=True)
            with write_whole(target) as opened, pyarrow.ipc.new_stream(opened, features.arrow_schema) as writer:
                while chunk := list(islice(rows, ROWS)):
                    writer.write_table(Dataset.from_list(chunk, features=features).data.table)
        return Dataset.from_file(str(target))
    except StopIteration:
        return Dataset.from_dict({})
    except (DatasetGenerationError, ValueError, EOFError, OSError, zlib.error, RecursionError) as error:
        reason = error.__cause__ or error
        if any(words in f"{error} {reason}" for words in NO_ROWS):
            return Dataset.from_dict({})
        if trouble := explain_unwritable(reason, "datasets library", HF_DATASETS_CACHE):
            raise trouble from error
        raise ValueError(f"{path} cannot be read as {'text' if suffix == '.txt' else suffix[1:]}: {reason}") from error


def _find_features(path: Path, suffix: str) -> Features:
    """The columns of a file, of JSON those of all rows, and all languages inside `translation`."""
    from datasets import Features, Json, Value

    rows = _read_rows(path, suffix)
    first = next(rows)
    if suffix not in (".json", ".jsonl"):
        return Features({column: Value("string") for column in first})
    plain = {str: Value("string"), bool: Value("bool"), int: Value("int64"), float: Value("float64")}
    kinds: dict[str, set[type]] = {}
    languages: dict[str, set[type]] = {}
    for row in chain([first], rows):
        for column, value in row.items():
            is_huge = isinstance(value, int) and abs(value) >= 2**63
            kinds.setdefault(column, set()).add(object if is_huge else type(value))
        inner = row.get("translation")
        for language, text in inner.items() if isinstance(inner, dict) else ():
            languages.setdefault(language, set()).add(type(text))

    def feature(found: set[type]) -> Any:
        (kind, *others) = found - {type(None)} or {str}
        return Json() if others else plain.get(kind, Json())

    features = {column: feature(found) for column, found in kinds.items()}
    if kinds.get("translation", {None}) <= {dict, type(None)}:
        features["translation"] = {language: feature(found) for language, found in languages.items()}
    return Features(features)


def _complete_rows(path: Path, suffix: str, features: Features) -> Iterator[dict[str, Any]]:
    """The rows of a file with every column, and of `translation` every language."""
    languages = features.get("translation")
    for row in _read_rows(path, suffix):
        complete = {column: row.get(column) for column in features}
        if isinstance(languages, dict):
            texts = complete["translation"] or {}
            complete["translation"] = {language: texts.get(language) for language in languages}
        yield complete


def _read_rows(path: Path, suffix: str) -> Iterator[dict[str, Any]]:
    """The rows of a file of text, {column: value}. Raises `ValueError` that names the first line that is damaged."""
    if suffix == ".txt":
        for _, line in _read_lines(path):
            yield {"text": line.rstrip("\r\n")}
    elif suffix in (".json", ".jsonl"):
        yield from _read_json(path)
    else:
        yield from _read_table(path, tabs=suffix == ".tsv")


def _read_json(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of JSON: one list of objects, or an object a line."""
    lines = _read_lines(path)
    for number, line in lines:
        if number == 1 and line.lstrip().startswith("["):
            whole = "".join([line, *(rest for _, rest in lines)])
            rows = [(f"row {index}", row) for index, row in enumerate(_parse(whole, "its text"), 1)]
        else:
            rows = [(f"line {number}", _parse(line, f"line {number}"))] if line.strip() else []
        for place, row in rows:
            if not isinstance(row, dict):
                raise ValueError(f"{place} is {json.dumps(row)[:40]}, expected an object")
            yield row


def _parse(text: str, place: str) -> Any:
    try:
        value = json.loads(text)
        if "\\u" in text:  # an escaped half of a character
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is no JSON object: {error.msg} at character {error.pos + 1}") from None
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):x}"
        raise ValueError(f"{place} holds the lone surrogate {half}: write the whole character, or remove it") from None
    except RecursionError:
        raise ValueError(f"{place} is nested too deep") from None
    return value


def _read_table(path: Path, *, tabs: bool) -> Iterator[dict[str, str]]:
    """Rows of .csv or .tsv. Every cell is text: neither "1984" is a number nor "null", a German word, missing."""
    lines, first = (line for _, line in _read_lines(path)), 1
    with ExitStack() as stack:
        stack.callback(csv.field_size_limit, csv.field_size_limit(LARGEST_FIELD))
        table = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE) if tabs else csv.reader(lines, strict=True)
        header: list[str] | None = None
        try:
            for row in table:
                is_blank = len(row) < 2 and not "".join(row).strip(" \t")
                if header is None:
                    header = None if is_blank else [name or f"column {place}" for place, name in enumerate(row, 1)]
                    if header and len(set(header)) < len(header):
                        raise ValueError(f"line {first} names a column twice: give every column its own name")
                elif len(row) == len(header) and not is_blank:
                    yield dict(zip(header, row, strict=True))
                elif not is_blank:
                    fields = f"{len(row)} field{'s' * (len(row) != 1)}, the header names {len(header)}"
                    raise ValueError(
                        f"line {first}: {fields}; look for a delimiter too many or too few there"
                        + ("" if tabs else ", or a quote that is not closed")
                    )
                first = table.line_num + 1
        except csv.Error as error:
            reason = {"unexpected end of data": "a quote is not closed"}.get(str(error), str(error))
            if "new-line" in reason:
                reason = "holds a carriage return (\\r) within a text, where a row ends for most programs: replace it"
            raise ValueError(f"line {table.line_num if 'carriage' in reason else first}: {reason}") from None


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of every line. Raises `ValueError` that names the first line that is not UTF-8."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        start = file.read(8)
        marked = start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        if marked or (len(start) >= 4 and not (any(start[::2]) and any(start[1::2]))):
            raise ValueError(f"it is in UTF-16, expected UTF-8: save it as UTF-8 (iconv -f UTF-16 -t UTF-8 {path})")
        file.seek(0)
        for number, line in enumerate(file, start=1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                place = f"byte {line[error.start]:#x} at character {len(line[: error.start].decode()) + 1}"
                raise ValueError(
                    f"line {number} is not UTF-8 ({place}): save it as UTF-8 (iconv -f LATIN1 -t UTF-8, if it was "
                    "Latin-1), or mend the line"
                ) from None


def exact_name(path: Path) -> str:
    """A name by which the datasets library reads `path` and nothing else: that of a link, where it would take
    characters for a pattern, a variable or a chain of archives (`[`, `*`, `?`, `$`, `::`). Links go with this process.
    """
    path = Path(os.path.abspath(path))
    if PLAIN_NAME.fullmatch(str(path)):
        return str(path)
    endings = "".join(path.suffixes[-2:] if path.suffix == ".gz" else path.suffixes[-1:])  # `.jsonl`, `.jsonl.gz`
    link = Path(_links().name, hashlib.sha256(os.fsencode(path)).hexdigest()[:16] + endings)
    if not link.is_symlink():
        link.symlink_to(path)
    return str(link)


@cache
def _links() -> tempfile.TemporaryDirectory:
    """A folder for links, which is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="lightformers-")
