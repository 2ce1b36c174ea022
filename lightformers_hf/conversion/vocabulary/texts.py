"""The text that decides which tokens stay: any number of files or data sets, a side of each or both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ...text import is_lines, load_lines, load_rows

BOTH = "both"
AT_ONCE = 1000


def read_texts(names: Sequence[str], columns: tuple[str | None, str | None]) -> Iterator[tuple[str, list[str]]]:
    """(`source`, `target` or `both`, some sentences) until all text is read.

    Args:
        names: files of data as `load_parallel` takes them, files of lines (any other ending), or names on the Hub.
        columns: those of source and target, or languages in a column `translation`. Where a data set has neither, all
            its columns of text are of both sides, and so are lines.

    Raises:
        FileNotFoundError: no such file or data set.
        ValueError: no text in one of them, or content that is none.
    """
    for name in names:
        found = False
        for side, texts in _read(name, columns):
            found = found or any(text.strip() for text in texts)
            yield side, texts
        if not found:
            raise ValueError(f"vocabulary {name} holds no text: give sentences like those that are to be translated")


def _read(name: str, columns: tuple[str | None, str | None]) -> Iterator[tuple[str, list[str]]]:
    rows = load_lines(Path(name)) if is_lines(name) else load_rows(name).flatten()
    short = {column.removeprefix("translation."): column for column in rows.column_names}
    named = zip(("source", "target"), columns, strict=True)
    sides = [(side, short[column]) for side, column in named if column in short]
    text = [name for name, kind in rows.features.items() if getattr(kind, "dtype", "") in ("string", "large_string")]
    sides = sides or [(BOTH, column) for column in text]
    for side, column in sides:
        values = rows[column]
        for start in range(0, len(rows), AT_ONCE):
            texts = values[start : start + AT_ONCE]
            bad = next((text for text in texts if not isinstance(text, str) or "\0" in text), None)
            if bad is not None or None in texts:
                raise ValueError(f"vocabulary {name}, {column!r}: expected text, found {bad!r:.40}")
            yield side, texts
