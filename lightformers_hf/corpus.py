"""Text of any size: a random sample of its rows, or all of them pool by pool in a random order.

A corpus is one file or thousands. Files are read in blocks, of which only those that are used are opened:

| data | a block |
|---|---|
| lines (.jsonl, .txt, .tsv) | the lines that begin in 64 KiB of the file |
| .parquet | a row group |
| .arrow | 4,096 rows |
| packed (.gz), .csv, a list in .json | the file, from its beginning |
| a data set of the Hub | a shard, as a stream |

Every row is in one block, and blocks are drawn by a random generator: with one seed the same rows are drawn, each with
the same probability.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from .data_files import check_file_type, find_files, list_files, suffix_of
from .languages import put_prefix
from .text import (
    READING_ERRORS,
    Bad,
    decode_line,
    find_row_languages,
    find_texts,
    load_file,
    load_rows,
    note_bad,
    open_hub,
    parse_line,
    read_header,
    read_lines,
    read_rows,
    select_texts,
    unreadable,
)

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = logging.getLogger(__name__)
BLOCK = 1 << 16  # bytes of a block of lines
ENDS = 1 << 16  # bytes at the beginning and the end of a file of which there is a digest
SHARD = 64  # blocks of lines of a shard
HEAD = 1000  # rows that show the columns
SPREAD = 1024  # blocks that a sample is drawn from, at most
MOST_ROWS = 4_000_000  # rows that a sample is drawn from, at most
POOL = 1 << 15  # rows that are shuffled, and sorted by length, together
AT_ONCE = 1 << 12  # rows that are read together
WAYS, TURN = 8, 256  # blocks that are read in turn, and rows of a turn
Pairs = dict[str, list[str]]  # {"source": texts, "target": texts}, or sources alone


class Shard(NamedTuple):
    """A part of a corpus: consecutive blocks of a file."""

    number: int
    source: int
    blocks: range


class Source(Protocol):
    """A file, or a part of a data set, whose blocks can be read apart."""

    name: str
    unit: str  # of a place: `line` or `row`
    blocks: int

    def read(self, block: int) -> Iterator[tuple[int, Any]]:
        """(position, row as it is stored) of the rows of a block."""

    def parse(self, stored: Any, position: int) -> dict[str, Any] | None:
        """The columns of a row; `None` for an empty line."""

    def number(self, position: int) -> int:
        """Number of the line or row at a position, from 1."""


class LineFile:
    """A file of lines, each of which is a row. Positions are bytes; in a packed file, numbers of lines."""

    unit = "line"

    def __init__(self, path: str):
        self.name, self.suffix, self.block = path, suffix_of(path), BLOCK
        self.is_packed, size = path.endswith(".gz"), os.path.getsize(path)
        self.blocks = min(1, size) if self.is_packed else -(-size // BLOCK)
        self.header, number = read_header(Path(path)) if self.suffix == ".tsv" else (None, 0)
        self.begin = number + 1 if self.is_packed else self._end(number)

    def read(self, block: int) -> Iterator[tuple[int, bytes | str]]:
        """(position, line); a line belongs to the block that its first byte is in."""
        start = block * self.block
        lines = read_lines(Path(self.name)) if self.is_packed else self.read_bytes(start, start + self.block)
        return (line for line in lines if line[0] >= self.begin)

    def read_bytes(self, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """(position, line) of the lines that begin from `start` on and before `end`."""
        with open(self.name, "rb") as file:
            if start:
                file.seek(start - 1)
                start += len(file.readline()) - 1
            text = file.read(max(0, end - start))
            if text and not text.endswith(b"\n"):
                text += file.readline()
        for line in text.split(b"\n"):
            if line:
                yield start, line
            start += len(line) + 1

    def parse(self, stored: bytes | str, position: int) -> dict[str, Any] | None:
        """The columns of a line. Raises `ValueError` that names the line."""
        try:
            return self._parse(stored, 0 if position else 1)
        except ValueError:
            return self._parse(stored, self.number(position))

    def _parse(self, stored: bytes | str, number: int) -> dict[str, Any] | None:
        line = stored if isinstance(stored, str) else decode_line(stored, number)
        return parse_line(line, self.suffix, number, self.header)

    def _end(self, number: int) -> int:
        """The byte behind so many lines."""
        with open(self.name, "rb") as file:
            return sum(map(len, islice(file, number)))

    def number(self, position: int) -> int:
        """The number of the line, for which all lines before are counted."""
        if self.is_packed:
            return position
        with open(self.name, "rb") as file:
            parts = [BLOCK] * (position // BLOCK) + [position % BLOCK]
            return 1 + sum(file.read(size).count(b"\n") for size in parts)


class RowFile:
    """A file that can only be read from its beginning: .csv, a list in .json."""

    unit, blocks = "row", 1

    def __init__(self, path: str, bad: Bad):
        self.name, self.suffix, self.bad = path, suffix_of(path), bad

    def read(self, block: int) -> Iterator[tuple[int, Any]]:
        """(number, row)."""
        return enumerate(read_rows(Path(self.name), self.suffix, self.bad))

    def parse(self, stored: Any, position: int) -> dict[str, Any]:
        """The row."""
        return stored

    def number(self, position: int) -> int:
        """The number of the row."""
        return position + 1


class ParquetFile(RowFile):
    """A .parquet file. A block is a row group, of which the columns of text are read."""

    def __init__(self, path: str, columns: Collection[str]):
        from pyarrow import parquet

        super().__init__(path, None)
        with parquet.ParquetFile(path) as file:
            self.columns = [name for name in file.schema_arrow.names if name in (*columns, "translation")]
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        self.blocks, self.before = len(sizes), np.concatenate([[0], np.cumsum(sizes)])

    def read(self, block: int) -> Iterator[tuple[int, tuple]]:
        """(number, values of the columns)."""
        from pyarrow import parquet

        with parquet.ParquetFile(self.name) as file:
            batches = file.iter_batches(batch_size=AT_ONCE, row_groups=[block], columns=self.columns)
            rows = chain.from_iterable(zip(*(c.to_pylist() for c in batch.columns), strict=True) for batch in batches)
            yield from enumerate(rows, start=int(self.before[block]))

    def parse(self, stored: Any, position: int) -> dict[str, Any]:
        """The row."""
        return dict(zip(self.columns, stored, strict=True))


class TableRows(RowFile):
    """Rows of a mapped table, or of a shard of a stream, which is one block."""

    def __init__(self, name: str, rows: Dataset | IterableDataset):
        super().__init__(name, None)
        self.rows, self.size = rows, len(rows) if hasattr(rows, "__len__") else 0
        self.blocks = -(-self.size // AT_ONCE) if self.size else 1

    def read(self, block: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """(number, row)."""
        if not self.size:
            return enumerate(self.rows)
        start, columns = block * AT_ONCE, self.rows[block * AT_ONCE : (block + 1) * AT_ONCE]
        return enumerate((dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)), start)


class Corpus:
    """Pairs of sentences, or text of the source language alone, of data of any size.

    Args:
        data, split: as for `load_rows`.
        source, target, default: as for `find_texts`.
        skip_bad: whether damaged lines are counted, in `bad`, and skipped; otherwise they end the reading.

    Attributes:
        files: the files of `data`; none of a data set of the Hub.
        has_targets: whether there are pairs.
        rows: number of rows, about; known after a first sample.
        bad: places of damaged lines that were skipped.

    Raises:
        FileNotFoundError, ValueError: as these, for the first rows of each file; the others are looked at when
            they are read.

    Example:
        >>> corpus = Corpus("train-*.jsonl.gz", source="de", target="en", default=("de", "en"))
        >>> corpus.sample(1000, seed=0)
    """

    def __init__(
        self,
        data: str,
        *,
        source: str | None,
        target: str | None,
        default: tuple[str, str],
        split: str = "train",
        skip_bad: bool = False,
    ):
        self.name, self.bad = data, {} if skip_bad else None
        names = find_files(data)
        # Every file is looked at below; rows of different types could not be put together.
        first = data if names is None else next((name for name in names if os.path.getsize(name)), data)
        head = load_rows(first, split=split, first=HEAD, bad={} if skip_bad else None)
        self.source, self.target, self.prefix = find_texts(head, data, source=source, target=target, default=default)
        head = head if skip_bad else select_texts(head, data, self.source, self.target)
        columns = [name for name in (self.source, self.target) if name]
        if names is None:
            self.files: list[str] = []
            self.sources: list[Source] = [TableRows(data, shard) for shard in _open_hub(data, split)]
        else:
            list_files(data, names)
            self.files = names
            self.sources = [self._open(name, columns) for name in names]
        self._start()

    @classmethod
    def of(cls, rows: Dataset, name: str = "text") -> Corpus:
        """The corpus that rows with columns `source` and maybe `target` are."""
        corpus = cls.__new__(cls)
        corpus.name, corpus.bad, corpus.files, corpus.sources = name, None, [], [TableRows(name, rows)]
        corpus.source, corpus.prefix = "source", ""
        corpus.target = "target" if "target" in rows.column_names else None
        corpus._start()
        return corpus

    def _start(self) -> None:
        self.rows, self.without = 0, frozenset[str]()
        self.table: Pairs | None = None
        self._last: tuple[tuple, Pairs] | None = None  # (seed, epoch, number, without), and the pool
        self._begins = np.concatenate([[0], np.cumsum([source.blocks for source in self.sources])]).astype(int)

    @property
    def blocks(self) -> int:
        """Number of blocks of all files."""
        return int(self._begins[-1])

    @property
    def has_targets(self) -> bool:
        return self.target is not None

    def describe_files(self) -> dict[str, list[int | str]]:
        """{file: [its size, a digest of its first and last 64 KiB]}, by which a change between two runs is noticed."""
        return {name: _describe(name) for name in self.files}

    def _open(self, name: str, columns: Collection[str]) -> Source:
        """A file as a source, whose first row is checked."""
        check_file_type(Path(name))
        suffix = suffix_of(name)
        try:
            if suffix == ".parquet":
                found: Source = ParquetFile(name, columns)
            elif suffix == ".arrow":
                found = TableRows(name, load_file(Path(name)))
            elif suffix == ".csv" or (suffix in (".json", ".jsonl") and _is_list(name)):
                found = RowFile(name, self.bad)
            else:
                found = LineFile(name)
            first = next(self.parse(self._read(found, 0)), None) if found.blocks else None
        except READING_ERRORS as error:
            raise error if name in str(error) else unreadable(name, suffix, error) from error
        if first is None and len(self.files) > 1:
            logger.warning(f"{name} is empty: it is skipped")
        return found

    # --- Reading

    def _read(self, source: Source, block: int) -> Iterator[tuple[Source, int, Any]]:
        """(source, position, row as it is stored) of a block."""
        try:
            for position, stored in source.read(block):
                yield source, position, stored
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{source.name} is gone since this work began: put it back, then give the same command"
            ) from None
        except READING_ERRORS as error:
            raise unreadable(source.name, suffix_of(source.name), error) from error

    def _read_block(self, number: int) -> Iterator[tuple[Source, int, Any]]:
        index = int(np.searchsorted(self._begins, number, side="right")) - 1
        return self._read(self.sources[index], number - int(self._begins[index]))

    def parse(self, rows: Iterable[tuple[Source, int, Any]]) -> Iterator[tuple[str, str]]:
        """(source, target) of rows, the source with its prefix, the target empty where there is none.

        Raises `ValueError` that names file and line of a damaged row, unless these are skipped.
        """
        names = [name for name in (self.source, self.target) if name]
        for source, position, stored in rows:
            try:
                row = source.parse(stored, position)
                if row is None:
                    continue
                row = find_row_languages(row, names)
                texts = [self._text(row, name) for name in names]
            except ValueError as error:
                where = f"{source.unit} {source.number(position)}"
                if self.bad is None and where in str(error):
                    raise unreadable(source.name, suffix_of(source.name), error) from None
                if self.bad is None:
                    raise ValueError(f"{source.name}, {where} {error}.") from None
                note_bad(f"{source.name}, {where}", error, self.bad)
                continue
            yield put_prefix(self.prefix, texts[0]), texts[1] if self.target else ""

    @staticmethod
    def _text(row: dict[str, Any], name: str) -> str:
        text = row.get(name)
        if isinstance(text, str):
            return text
        if text is None:
            raise ValueError(f"has no {name!r}: expected text in every row")
        raise ValueError(f"has a {name!r} that is no text: {text!r:.60}")

    # --- Samples

    def sample(self, number: int, seed: int, without: Collection[str] = ()) -> Dataset:
        """So many random rows, in a random order; fewer where there are not so many.

        They are drawn from all rows of up to `SPREAD` random blocks. `without`: sources that are not drawn. A small
        corpus, of one pool, is read whole, and an error in any of its lines is raised.
        """
        from datasets import Dataset

        found = self._draw(2 * number + len(without), seed)
        pairs = (pair for pair in self.parse(found) if pair[0] not in without)
        return Dataset.from_dict(self._columns(islice(pairs, number)))

    def _draw(self, number: int, seed: int) -> Iterator[tuple[Source, int, Any]]:
        """The stored rows with the smallest random keys."""
        random, number = np.random.default_rng(seed), max(number, POOL)
        chosen = np.sort(random.permutation(self.blocks)[:SPREAD])
        each = MOST_ROWS // max(1, len(chosen))
        keys, rows, seen, is_whole = np.empty(0), [], 0, len(chosen) == self.blocks
        for block in chosen:
            stored = islice(self._read_block(int(block)), each)
            taken = 0
            while part := list(islice(stored, AT_ONCE)):
                taken, drawn = taken + len(part), random.random(len(part))
                low = np.flatnonzero(drawn < keys.max()) if len(rows) > number else np.arange(len(part))
                keys = np.concatenate([keys, drawn[low]])
                rows.extend(part[index] for index in low)
                if len(rows) > 2 * number:
                    order = np.sort(np.argpartition(keys, number)[:number])
                    keys, rows = keys[order], [rows[index] for index in order]
            seen, is_whole = seen + taken, is_whole and taken < each
        self.rows = seen if is_whole else max(seen, round(seen * self.blocks / len(chosen)))
        if self.table is None and is_whole and seen <= POOL:
            self.table = self._columns(self.parse(rows))
            self.rows = len(self.table["source"])
            self.hold_out(self.without)
        return (rows[index] for index in np.argsort(keys, kind="stable")[:number])

    def shards(self) -> list[Shard]:
        """All blocks, in their order, as parts of the size of a file: of lines, `SHARD` blocks."""
        parts = (
            (index, range(first, min(first + size, source.blocks)))
            for index, source in enumerate(self.sources)
            for size in [SHARD if isinstance(source, LineFile) else 1]
            for first in range(0, source.blocks, size)
        )
        return [Shard(number, *part) for number, part in enumerate(parts)]

    def read_shard(self, shard: Shard) -> Iterator[tuple[Source, int, Any]]:
        """The rows of a shard in their order, for `parse`."""
        source = self.sources[shard.source]
        return chain.from_iterable(self._read(source, block) for block in shard.blocks)

    def hold_out(self, sources: Collection[str]) -> None:
        """Leave rows with these sources out of all pools."""
        self.without = self.without | frozenset(sources)
        if self.table is not None:
            kept = [index for index, text in enumerate(self.table["source"]) if text not in self.without]
            self.table = {name: [texts[index] for index in kept] for name, texts in self.table.items()}

    def pools(self, seed: int, epoch: int, first: int = 0) -> Iterator[tuple[int, Pairs]]:
        """(number, up to `POOL` rows) of all rows of an epoch in a random order, from the pool `first` on.

        Blocks come in a random order, `WAYS` of them in turn. A small corpus is always the same pool. The last pool is
        kept: a recovery reads its first one to count steps, to time them, and to train.
        """
        if self.table is not None:
            yield from [(0, self.table)][first:] if self.table["source"] else ()
            return
        order = np.random.default_rng([seed, epoch]).permutation(self.blocks)
        rows, number = take_turns(self._read_block(int(block)) for block in order), 0
        while part := list(islice(rows, POOL)):
            if number >= first:
                key = (seed, epoch, number, self.without)
                if self._last is None or self._last[0] != key:
                    pairs = self._columns(pair for pair in self.parse(part) if pair[0] not in self.without)
                    self._last = key, pairs
                if self._last[1]["source"]:
                    yield number, self._last[1]
            number += 1

    def _columns(self, pairs: Iterable[tuple[str, str]]) -> Pairs:
        found = list(pairs)
        columns = {"source": [source for source, _ in found]}
        return columns | ({"target": [target for _, target in found]} if self.target else {})


def take_turns(iterators: Iterator[Iterator]) -> Iterator:
    """The items of iterators, `TURN` of one after the other's, of `WAYS` at once."""
    active = deque(islice(iterators, WAYS))
    while active:
        rows = active.popleft()
        part = list(islice(rows, TURN))
        yield from part
        if len(part) == TURN:
            active.append(rows)
        else:
            active.extend(islice(iterators, 1))


def _is_list(name: str) -> bool:
    """Whether a file of JSON begins as a list."""
    opened: Callable = gzip.open if name.endswith(".gz") else open
    with opened(name, "rb") as file:
        return file.readline().removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _open_hub(data: str, split: str) -> list[Dataset | IterableDataset]:
    """The shards of a data set of the Hub as streams; offline, the copy that was downloaded."""
    from datasets import Dataset

    rows = open_hub(data, split)
    if isinstance(rows, Dataset):
        return [rows]
    return [rows.shard(num_shards=rows.num_shards, index=index) for index in range(rows.num_shards)]


def _describe(name: str) -> list[int | str]:
    with open(name, "rb") as file:
        digest, size = hashlib.blake2b(file.read(ENDS), digest_size=8), file.seek(0, os.SEEK_END)
        file.seek(max(0, size - ENDS))
        digest.update(file.read())
    return [size, digest.hexdigest()]
