"""Results of the public functions: text for a terminal, a table for a notebook, a dictionary for JSON."""

from __future__ import annotations

import html
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 120  # columns of a table in a file, a pipe or a string


class Result:
    """Base class of the data classes that the public functions return.

    `print(result)` prints tables and sentences, a notebook shows them, and `to_dict()` returns every field.
    """

    def parts(self) -> Sequence[Table | str]:
        """Return the tables and sentences that describe the result, in order."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as nested dictionaries and lists, as JSON holds them."""
        return asdict(self)  # type: ignore[call-overload]  # subclasses are data classes

    def __str__(self) -> str:
        file = io.StringIO()
        print_parts(self.parts(), file, WIDTH)
        return file.getvalue().rstrip("\n")

    def _repr_html_(self) -> str:
        return "\n".join(f"<p>{html.escape(p)}</p>" if isinstance(p, str) else _table_html(p) for p in self.parts())


def print_parts(parts: Sequence[Table | str], file: TextIO | None = None, width: int | None = None) -> None:
    """Print tables and sentences to a file, by default standard output, in `width` columns (see `make_console`)."""
    console = make_console(file, width)
    for part in parts:
        if isinstance(part, str):
            print(part, file=console.file)
        else:
            console.print(part)


def make_console(file: TextIO | None = None, width: int | None = None) -> Console:
    """Return a console of `width` columns, by default as wide as the terminal, and `WIDTH` in a file or a pipe.

    With a given width the text is plain, whatever the environment variables for terminals are (`COLUMNS`,
    `FORCE_COLOR`). Titles and captions are lines above and below a table. Rich would fold them to the table's width,
    within words.
    """
    from rich.console import Console
    from rich.table import Table

    class TableConsole(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            if not objects or not all(isinstance(value, Table) for value in objects):
                return super().print(*objects, **options)
            for table in objects:
                title, caption, table.title, table.caption = table.title, table.caption, None, None
                lines = {"soft_wrap": not self.is_terminal, "highlight": False}
                for part in (title, table, caption):
                    if part is not None:
                        super().print(part, **options, **({} if part is table else lines))

    in_notebook = None if file is None else False  # rich would display in the notebook what is for the file
    terminal = False if width else None
    console = TableConsole(file=file, width=width, force_terminal=terminal, force_jupyter=in_notebook)
    if not (width or console.is_terminal or os.environ.get("COLUMNS")):
        console.width = WIDTH
    return console


def _table_html(table: Table) -> str:
    """Return a table of rich as a table of HTML."""

    def rows() -> Iterator[str]:
        heads = [column.header for column in table.columns]
        if any(heads):
            yield "".join(f"<th>{_cell_html(head)}</th>" for head in heads)
        for row in zip(*(column.cells for column in table.columns), strict=True):
            yield "".join(f"<td>{_cell_html(cell)}</td>" for cell in row)

    caption = f"<caption>{_cell_html(table.title)}</caption>" if table.title else ""
    note = f"<p>{_cell_html(table.caption)}</p>" if table.caption else ""
    return f"<table>{caption}{''.join(f'<tr>{row}</tr>' for row in rows())}</table>{note}"


def _cell_html(cell: object) -> str:
    from rich.text import Text

    plain = Text.from_markup(cell).plain if isinstance(cell, str) else str(cell)
    return html.escape(plain).replace("\n", "<br>")
