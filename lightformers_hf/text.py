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
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .data_files import check_file_type, find_files, suffix_of
from .files import explain_unwritable, write_whole
from .languages import put_prefix, split_language, split_prefix, target_ids
from .options import OptionError

if TYPE_CHECKING:
    from datasets import Dataset, Features, IterableDataset
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
CHECKED = 1000  # pairs whose tokens are looked at
ROWS = 10_000  # read together
READING_ERRORS = (ValueError, EOFError, OSError, zlib.error, RecursionError)  # of files that are damaged
RETURN = "holds a carriage return (\\r) within a text, where a row ends for most programs: replace it"
Bad = dict[str, str] | None  # {place of a damaged line that is skipped: reason}; `None`: such lines are errors
LARGEST_FIELD = 2**31 - 1  # characters of a cell; the csv module's own limit is 131,072
LANGUAGE = r"[a-z]{2}([_-].*)?|[a-z]{3}_[A-Z][a-z]{3}"  # codes, also those of NLLB
OTHER_NAME = re.compile(rf"(?!({LANGUAGE})$)[\w.-]+")  # of a column: no language, and no sentence


# --- Columns of text


def load_parallel(
    data: str, *, source: str, target: str, split: str = "train", max_samples: int | None = None
) -> Dataset:
    """Load sentence pairs as a dataset of two string columns, `source` and `target`, in the order of the data.

    Args:
        data: a local file (.json, .jsonl, .csv, .tsv, the same with .gz, .parquet, .arrow), a folder of such files or
            of `save_to_disk`, a pattern (`train-*.jsonl.gz`), several of them, or a dataset on the Hub, `name` or
            `name:configuration`. Cells of a .tsv file are taken as they stand (a quote is a character).
        source, target: names of columns, or languages inside a column `translation`:
            `{"translation": {"de": "Guten Tag.", "en": "Good day."}}`. A prefix for every source goes behind its
            column, as T5 asks for: `de=translate German to English: ` (see `split_prefix`). If there are no other
            columns than two of text, and their names are no languages, they are source and target, with a warning.
        split: the split of a Hub dataset. A local file is one split, this argument does not matter to it.
        max_samples: read and keep only the first so many pairs (default: all).

    Raises:
        FileNotFoundError: no such file, or no such dataset on the Hub.
        ValueError: an unknown file type, unreadable or empty data, columns that are missing, values that are not text.
    """
    (source, prefix), target = split_prefix(source), split_language(target)[0] or ""
    pairs = load_rows(data, split=split, first=max_samples)
    pairs = select_texts(pairs, data, source, target)
    return pairs.map(lambda pair: {"source": put_prefix(prefix, pair["source"])}) if prefix else pairs


def take_rows(rows: Dataset, max_samples: int | None) -> Dataset:
    """The first so many rows, or all. Raises `ValueError` for a number below 1."""
    _check_number(max_samples)
    return rows if max_samples is None else rows.select(range(min(max_samples, len(rows))))


def _check_number(max_samples: int | None) -> None:
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"max_samples is {max_samples}: expected 1 or more, or None for all.")


def find_texts(
    rows: Dataset, data: str, *, source: str | None, target: str | None, default: tuple[str, str]
) -> tuple[str, str | None, str]:
    """Columns of source and target, and the prefix; a target of `None` is text of the source language alone.

    Text alone is a .txt file (a line is a text, also with .gz), data of one column, and data without the column
    `default` names for the target where `source` is named and `target` is not. `default`: columns for those that are
    `None`; the source's may bring a prefix. Raises `ValueError` where the rows have no such columns.
    """
    column, prefix = split_prefix(source or default[0])
    if rows.column_names == ["text"] and all(suffix_of(file) == ".txt" for file in find_files(data) or [""]):
        lines = [text for text in rows[:CHECKED]["text"] if text.strip()]
        if lines and all("\t" in text for text in lines):
            raise ValueError(
                f"{data} has a tab in every line: a .txt file is text of the source alone. Rename a table to .tsv, "
                "with the names of the columns as its first line"
            )
        return "text", None, prefix
    target = split_language(target)[0]
    source, names = column if source else None, (column, target or split_language(default[1])[0] or "")
    rows = find_languages(rows, names)
    single = len(rows.column_names) == 1
    alone = single or (source in rows.column_names and target is None and default[1] not in rows.column_names)
    if not alone:
        return *_pair_columns(rows, data, *names), prefix
    only = rows.column_names[0] if single and source not in rows.column_names else names[0]
    if (source is not None and only != source) or only == names[1]:
        raise ValueError(f"{data} has no column {names[0]!r}: it has {_shorten(only)} alone.")
    return only, None, prefix


def load_rows(data: str, *, split: str = "train", first: int | None = None, bad: Bad = None) -> Dataset:
    """All columns of files or a Hub dataset, as `load_parallel` finds them; at least one row.

    Args:
        first: read the first so many rows alone.
        bad: with `first`, note damaged lines here, and skip them.
    """
    from datasets import Dataset

    _check_number(first)
    files = find_files(data)
    rows = open_hub(str(data), split, streams=bool(first)) if files is None else _load_files(files, first, bad)
    if not isinstance(rows, Dataset):
        rows = Dataset.from_list(list(rows.take(first)), features=rows.features)
    if len(rows) == 0:
        raise ValueError(f"{data} holds no rows: it is empty, expected at least one.")
    return take_rows(rows, first)


def open_hub(data: str, split: str, *, streams: bool = True) -> Dataset | IterableDataset:
    """A dataset on the Hub, as a stream unless this is offline: then what was downloaded is there.

    Raises `ValueError` where the data has no name.
    """
    from datasets import load_dataset
    from datasets.config import HF_HUB_OFFLINE

    name, _, configuration = data.partition(":")
    if not name.strip("/ "):
        raise ValueError("the data has no name: give a file, or a dataset of the Hub")
    return load_dataset(name, configuration or None, split=split, streaming=streams and not HF_HUB_OFFLINE)


def _load_files(files: Sequence[str], first: int | None, bad: Bad) -> Dataset:
    """The rows of files of the same columns, one file after another; without any where no file has one."""
    from datasets import Dataset, concatenate_datasets

    parts: list[Dataset] = []
    for file in files:
        rows = load_file(Path(file), first, bad)
        rows = rows.flatten() if len(files) > 1 else rows  # datasets cannot flatten rows that are put together
        if len(rows):
            if parts and {*rows.column_names} != {*parts[0].column_names}:
                raise ValueError(
                    f"{file} has the columns {', '.join(rows.column_names)}, unlike {files[0]}, which has "
                    f"{', '.join(parts[0].column_names)}: give files of the same columns"
                )
            parts.append(rows)
        elif len(files) > 1 and first is None:
            logger.warning(f"{file} is empty: it is skipped")
        if first is not None and (first := first - len(rows)) <= 0:
            break
    if len(parts) < 2:
        return (*parts, Dataset.from_dict({}))[0]
    try:
        return concatenate_datasets(parts)
    except ValueError as error:
        raise ValueError(f"{files[0]} and the {len(files) - 1} files beside it have other types: {error}") from error


def select_texts(rows: Dataset, data: str, source: str, target: str | None) -> Dataset:
    """The columns `source` and `target` (unless that is `None`) under these names, checked to be text."""
    if target is not None:
        rows = find_languages(rows, (source, target))
        source, target = _pair_columns(rows, data, source, target)
    elif source not in rows.column_names:
        rows = find_languages(rows, (source,))
    names = {"source": source} | ({"target": target} if target is not None else {})
    texts = rows.select_columns([*names.values()])
    texts = texts.rename_columns({old: new for new, old in names.items() if old != new})
    _check_text(texts, data, names)
    return texts


def _pair_columns(rows: Dataset, data: str, source: str, target: str) -> tuple[str, str]:
    """Names of the columns `source` and `target`, or of the only two of text. Raises `ValueError` without either."""
    columns, source, target = (source, target), *choose_pair(rows, source, target)
    if (source, target) != columns:
        logger.warning(
            f"{data} has no columns {columns[0]!r} and {columns[1]!r}: its only columns, {_shorten(source)} and "
            f"{_shorten(target)}, are taken as source and target"
        )
    missing = [name for name in (source, target) if name not in rows.column_names]
    if missing:
        wanted, there = " nor ".join(map(repr, filter(None, missing))), ", ".join(map(_shorten, rows.column_names))
        header = data.removesuffix(".gz").endswith((".csv", ".tsv"))
        hint = "Its first line must name the columns. " if header else ""
        raise OptionError(
            "", f"{data} has no column {wanted}: it has {there}. {hint}Give ", "source_lang", " and ", "target_lang",
            ": the two columns of text, or two languages inside a column 'translation'.",
        )  # fmt: skip
    if source == target:
        raise ValueError(f"Source and target are both {source!r}: name two columns or languages.")
    return source, target


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


def find_languages(rows: Dataset, names: Collection[str | None]) -> Dataset:
    """The languages inside a column `translation` as columns of their own, unless there are columns of these names."""
    if not {*names} <= {*rows.column_names}:
        rows = rows.flatten() if "translation" in rows.column_names else rows
        languages = {n: n.removeprefix("translation.") for n in rows.column_names if n.startswith("translation.")}
        if languages:
            rows = rows.select_columns(list(languages)).rename_columns(languages)
    return rows


def find_row_languages(row: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """As `find_languages`, of a row that was read alone."""
    inner = row.get("translation")
    return inner if isinstance(inner, dict) and not {*names} <= row.keys() else row


def _shorten(name: str) -> str:
    """Shorten a column's name, which may be a sentence."""
    return repr(name if len(name) <= 30 else f"{name[:29]}…")


def _check_text(pairs: Dataset, data: str, names: dict[str, str]) -> None:
    """Raise a ValueError that names the first row where a column holds something else than text.

    Pairs of which one text is empty are counted in a warning.
    """
    import pyarrow
    import pyarrow.compute as pc
    from datasets import Value

    for column, name in names.items():
        values = pairs.data.column(column)
        try:
            values.validate(full=True)
        except pyarrow.ArrowInvalid:
            texts = (value.as_py() or b"" for value in values.cast("large_binary"))
            row = next(i for i, text in enumerate(texts) if text.decode(errors="ignore").encode() != text)
            raise ValueError(f"{data}, row {row + 1}, {name!r}: the text is not UTF-8: write it again") from None
        if pairs.features[column] in (Value("string"), Value("large_string")):
            bad = pc.index(pc.is_null(values), True).as_py() if values.null_count else None
        else:
            bad = next((i for i, value in enumerate(pairs[column]) if not isinstance(value, str)), None)
        if bad is not None and pairs[bad][column] is None:
            raise ValueError(f"{data}, row {bad + 1} has no {name!r}: expected text in every row.")
        if bad is not None:
            raise ValueError(f"{data}, row {bad + 1}, {name!r}: expected text, found {pairs[bad][column]!r:.60}")
        empty = pc.match_substring_regex(values, r"^[\s\p{Z}]*$")
        count = pc.sum(empty).as_py()
        if count == len(pairs):
            raise ValueError(f"{data}: {name!r} is empty in every row: give text")
        if count and len(names) > 1:
            logger.warning(
                f"{data}: {name!r} is empty in {count:,} of {len(pairs):,} rows, first in row "
                f"{pc.index(empty, True).as_py() + 1}: remove them"
            )


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
    start: int | None = None,
    num_proc: int | None = None,
) -> Dataset:
    """Tokenize the pairs of `load_parallel` for the training of a sequence-to-sequence model.

    Columns: `input_ids`, `attention_mask`, `labels`, and their lengths in tokens, `source_length` and
    `target_length`, which `TokenBatchSampler` reads.

    Args:
        max_source_length, max_target_length: tokens, end-of-sentence token included, which always stays; longer texts
            are cut.
        start: token that is left out at the beginning of targets, the `repeated_start` of a model.
        num_proc: worker processes (default: none, in this process).

    Raises:
        ValueError: most of the text becomes unknown tokens.
    """
    tokens = pairs.map(
        _tokenize,
        fn_kwargs={"tokenizer": tokenizer, "limits": (max_source_length, max_target_length), "start": start},
        batched=True,
        remove_columns=pairs.column_names,
        num_proc=num_proc,
        desc="Tokenizing",
    )
    for column in ("input_ids", "labels"):
        check_known(tokens[:CHECKED][column], tokenizer)
    return tokens


def _tokenize(
    batch: dict[str, list], tokenizer: PreTrainedTokenizerBase, limits: tuple[int, int], start: int | None
) -> dict[str, list]:
    """The columns of `tokenize_pairs`; `limits` are the longest source and target."""
    source = tokenizer(batch["source"], max_length=limits[0], truncation=True)
    target = target_ids(batch["target"], tokenizer, limits[1], start)
    columns = {"input_ids": source["input_ids"], "attention_mask": source["attention_mask"], "labels": target}
    lengths = {"source_length": source["input_ids"], "target_length": target}
    return columns | {name: list(map(len, texts)) for name, texts in lengths.items()}


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


def cut_texts(lengths: Mapping[str, Sequence[int]], limit: int) -> list[str]:
    """Return a line about texts cut at `limit` tokens for each side, `source` and `target`, with these `lengths`."""
    cut = {side: sum(length >= limit for length in found) for side, found in lengths.items()}
    return [f"{n:,} of {len(lengths[side]):,} {side}s are cut after {limit:,} tokens" for side, n in cut.items() if n]


# --- Local files


def data_name(data: str | os.PathLike | Sequence[str | os.PathLike] | None) -> str | None:
    """Return the name of data, of several files with commas between.

    Raises `ValueError` for loaded rows, which would be taken for a name.
    """
    if data is None or isinstance(data, str | os.PathLike):
        return None if data is None else os.fspath(data)
    if isinstance(data, list | tuple) and data and all(isinstance(name, str | os.PathLike) for name in data):
        return ",".join(map(os.fspath, data))
    raise ValueError(
        f"the data is a {type(data).__name__}: expected a file, or the name of a data set on the Hub. Write loaded "
        "rows to a file: Dataset.from_list(rows).to_json('rows.jsonl')"
    )


def load_lines(path: Path) -> Dataset:
    """The lines of a local text file with any ending, also packed (.gz), as a column `text`: see `load_file`."""
    return load_file(path, suffix=".txt")


def load_file(path: Path, first: int | None = None, bad: Bad = None, *, suffix: str | None = None) -> Dataset:
    """All columns of a local file, those of .csv and .tsv as text and of .txt as `text`; no row where it holds none.

    `first`, `bad`: as for `load_rows`. `suffix`: the ending by which it is read, by default its own.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a folder, an unknown type, or content that is damaged or not UTF-8. In .csv and .tsv also a line of
            more or fewer fields than the header names.
        OSError: the cache of the datasets library cannot be written.
    """
    from datasets import Dataset
    from datasets.config import HF_DATASETS_CACHE

    path = Path(os.path.expanduser(path))
    if suffix is None or not path.is_file():
        check_file_type(path)
    suffix = suffix or suffix_of(path)
    try:
        if suffix == ".arrow":
            return take_rows(Dataset.from_file(str(path)), first)
        if first is not None:
            return _load_first(path, suffix, first, bad)
        with path.open("rb") as file:  # the key of the cache is the content and the reader
            content = hashlib.file_digest(file, "sha256").hexdigest()[:32]
        identity = f"{suffix[1:]}-4-{'gz-' * (path.suffix == '.gz')}{content}"
        target = Path(HF_DATASETS_CACHE, "lightformers", f"{identity}.arrow")
        if not target.is_file():
            _write_arrow(path, suffix, target)
        return Dataset.from_file(str(target))
    except StopIteration:
        return Dataset.from_dict({})
    except READING_ERRORS as error:
        if trouble := explain_unwritable(error, "datasets library", HF_DATASETS_CACHE):
            raise trouble from error
        raise unreadable(path, suffix, error) from error


def unreadable(path: str | Path, suffix: str, reason: object) -> ValueError:
    """The error about a file that cannot be read as one of its type."""
    return ValueError(f"{path} cannot be read as {'text' if suffix == '.txt' else suffix[1:]}: {reason}")


def _load_first(path: Path, suffix: str, first: int, bad: Bad) -> Dataset:
    """The first so many rows of a file, in memory."""
    import pyarrow
    from datasets import Dataset
    from pyarrow import parquet

    if suffix == ".parquet":
        with parquet.ParquetFile(path) as file:
            batch = next(file.iter_batches(batch_size=first))
        return Dataset(pyarrow.Table.from_batches([batch]))
    features = _find_features(islice(read_rows(path, suffix, bad), first), suffix)
    rows = islice(_complete_rows(read_rows(path, suffix, bad), features), first)
    return Dataset.from_list(list(rows), features=features)


def _write_arrow(path: Path, suffix: str, target: Path) -> None:
    """Write the rows of a file as a mapped table."""
    import pyarrow
    from datasets import Dataset
    from pyarrow import parquet

    target.parent.mkdir(parents=True, exist_ok=True)
    if suffix == ".parquet":
        with (
            parquet.ParquetFile(path) as file,
            write_whole(target) as opened,
            pyarrow.ipc.new_stream(opened, file.schema_arrow) as writer,
        ):
            for batch in file.iter_batches(batch_size=ROWS):
                writer.write_batch(batch)
        return
    features = _find_features(read_rows(path, suffix), suffix)
    rows = _complete_rows(read_rows(path, suffix), features)
    with write_whole(target) as opened, pyarrow.ipc.new_stream(opened, features.arrow_schema) as writer:
        while chunk := list(islice(rows, ROWS)):
            writer.write_table(Dataset.from_list(chunk, features=features).data.table)


def _find_features(rows: Iterator[dict[str, Any]], suffix: str) -> Features:
    """The columns of a file's rows, of JSON those of all rows, and all languages inside `translation`."""
    from datasets import Features, Json, Value

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


def _complete_rows(rows: Iterable[dict[str, Any]], features: Features) -> Iterator[dict[str, Any]]:
    """Rows with every column, and of `translation` every language."""
    languages = features.get("translation")
    for row in rows:
        complete = {column: row.get(column) for column in features}
        if isinstance(languages, dict):
            texts = complete["translation"] or {}
            complete["translation"] = {language: texts.get(language) for language in languages}
        yield complete


def read_rows(path: Path, suffix: str, bad: Bad = None) -> Iterator[dict[str, Any]]:
    """The rows of a file of text, {column: value}.

    Raises `ValueError` that names the first line that is damaged; with `bad`, such lines are noted there and skipped.
    """
    if suffix == ".csv":
        yield from _read_table(path, bad)
        return
    header, begin = read_header(path) if suffix == ".tsv" else (None, 0)
    lines = read_lines(path, bad)
    for number, line in lines:
        if number == 1 and suffix in (".json", ".jsonl") and line.lstrip().startswith("["):
            rows = _parse("".join([line, *(rest for _, rest in lines)]), "its text")
            yield from (_check_object(row, f"row {index}") for index, row in enumerate(rows, 1))
        elif number > begin:
            with _noted(path, f"line {number}", bad):
                row = parse_line(line, suffix, number, header)
                if row is not None:
                    yield row


@contextmanager
def _noted(path: Path, where: str, bad: Bad) -> Iterator[None]:
    """Note an error about a line in `bad`, if there is one."""
    try:
        yield
    except ValueError as error:
        if bad is None:
            raise
        note_bad(f"{path}, {where}", error, bad)


def note_bad(where: str, error: ValueError, bad: dict[str, str]) -> None:
    """Note a damaged line that is skipped, and log the first."""
    if not bad:
        logger.warning(f"{where} is damaged ({error}): such lines are skipped and counted")
    bad[where] = str(error)


def parse_line(line: str, suffix: str, number: int, header: Sequence[str] | None = None) -> dict[str, Any] | None:
    """The columns of a line of text, `None` of an empty line. Raises `ValueError` that names the line."""
    if suffix == ".txt":
        return {"text": _strip_end(line, number)}
    if suffix == ".tsv":
        fields = _split_tabs(line, number)
        return None if header is None or fields is None else _name_fields(fields, header, f"line {number}")
    return _check_object(_parse(line, f"line {number}"), f"line {number}") if line.strip() else None


def _split_tabs(line: str, number: int) -> list[str] | None:
    """The fields of a line of .tsv, `None` of an empty line."""
    line = _strip_end(line, number)
    return line.split("\t") if line.strip(" ") else None


def _strip_end(line: str, number: int) -> str:
    """A line without its end. Raises `ValueError` where a carriage return stands within it."""
    line = line.rstrip("\r\n")
    if "\r" in line:
        raise ValueError(f"line {number}: {RETURN}")
    return line


def read_header(path: Path) -> tuple[list[str] | None, int]:
    """The columns that the first line of a .tsv file names, and the number of that line."""
    for number, line in read_lines(path):
        if (fields := _split_tabs(line, number)) is not None:
            return _name_columns(fields, number), number
    return None, 0


def _name_columns(fields: Sequence[str], number: int) -> list[str]:
    """Names of columns, those without a name by their number."""
    header = [name or f"column {index}" for index, name in enumerate(fields, 1)]
    if len(set(header)) < len(header):
        raise ValueError(f"line {number} names a column twice: give every column its own name")
    if len(header) == 1 and re.search(r"[,;|\t]", header[0]):
        raise ValueError(
            f"line {number} names one column, {_shorten(header[0])}: put a comma between the columns of .csv, and a "
            "tab between those of .tsv"
        )
    return header


def _name_fields(fields: Sequence[str], header: Sequence[str], where: str, quotes: str = "") -> dict[str, str]:
    if len(fields) != len(header):
        found = f"{len(fields)} field{'s' * (len(fields) != 1)}, the header names {len(header)}"
        raise ValueError(f"{where}: {found}; look for a delimiter too many or too few there{quotes}")
    return dict(zip(header, fields, strict=True))


def _check_object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"{where} is {json.dumps(row)[:40]}, expected an object")
    return row


def _parse(text: str, where: str) -> Any:
    try:
        value = json.loads(text)
        if "\\u" in text:  # an escaped half of a character
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where} is no JSON object: {error.msg.removesuffix(' at')} at character {error.pos + 1}"
        ) from None
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):x}"
        raise ValueError(f"{where} holds the lone surrogate {half}: write the whole character, or remove it") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deep") from None
    return value


def _read_table(path: Path, bad: Bad) -> Iterator[dict[str, str]]:
    """Rows of .csv. Every cell is text: neither "1984" is a number nor "null", a German word, missing."""
    lines, first = (line for _, line in read_lines(path, bad)), 1
    with ExitStack() as stack:
        stack.callback(csv.field_size_limit, csv.field_size_limit(LARGEST_FIELD))
        table = csv.reader(lines, strict=True)
        header: list[str] | None = None
        try:
            for row in table:
                is_blank = len(row) < 2 and not "".join(row).strip(" \t")
                if header is None:
                    header = None if is_blank else _name_columns(row, first)
                elif not is_blank:
                    with _noted(path, f"line {first}", bad):
                        yield _name_fields(row, header, f"line {first}", ", or a quote that is not closed")
                first = table.line_num + 1
        except csv.Error as error:
            reason = {"unexpected end of data": "a quote is not closed"}.get(str(error), str(error))
            reason = RETURN if "new-line" in reason else reason
            raise ValueError(f"line {table.line_num if reason == RETURN else first}: {reason}") from None


def read_lines(path: Path, bad: Bad = None) -> Iterator[tuple[int, str]]:
    """Number and text of every line. Raises `ValueError` that names the first line that is not UTF-8."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        start = file.read(8)
        marked = start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        if marked or (len(start) >= 4 and not (any(start[::2]) and any(start[1::2]))):
            raise ValueError(f"it is in UTF-16, expected UTF-8: save it as UTF-8 (iconv -f UTF-16 -t UTF-8 {path})")
        file.seek(0)
        for number, line in enumerate(file, start=1):
            with _noted(path, f"line {number}", bad):
                yield number, decode_line(line, number)


def decode_line(line: bytes, number: int) -> str:
    """The text of a line, without the byte order mark of its file. Raises `ValueError` where it is not UTF-8."""
    try:
        return line.decode("utf-8-sig")  # files that were put together have a mark each
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode()
        where = f"byte {error.object[error.start]:#x} at character {len(before) + 1}"
        raise ValueError(
            f"line {number} is not UTF-8 ({where}): save it as UTF-8 (iconv -f LATIN1 -t UTF-8, if it was Latin-1), "
            "or mend the line"
        ) from None
