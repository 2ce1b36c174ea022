"""What a comparison of engines found, as data, as JSON and as tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from ...files import as_kind
from ...results import Result
from ..quality import describe, labels
from ..speed import Speed

BASELINE = "ctranslate2-int8"  # of the teacher: what its users deploy


@dataclass
class Deployed:
    """A model in one form: bytes on disk, and its quality where it was measured."""

    model: str
    form: str
    folder: str
    disk_bytes: int
    scores: dict[str, float] = field(default_factory=dict)  # {metric: 0 to 100}

    @property
    def key(self) -> str:
        return f"{self.model} {self.form}"


@dataclass
class Timing:
    """Speed of a deployed model: median ratios over runs to the teacher in the same form, and in the baseline's."""

    model: str
    form: str
    cores: int
    batch_size: int
    beams: int
    speed: Speed
    to_teacher: float | None = None
    to_baseline: float | None = None

    @property
    def key(self) -> str:
        """Of what was timed, as `Deployed.key`."""
        return f"{self.model} {self.form}"


@dataclass
class EngineComparison(Result):
    """What `compare_engines` measured, and how."""

    models: list[str]
    deployed: list[Deployed]
    timings: list[Timing]
    new_tokens: int
    sentences: int
    data: str | None = None
    quality_beams: int | None = None
    quality_sentences: int | None = None
    signatures: dict[str, str] = field(default_factory=dict)  # {metric: the variant of it that was computed}

    def parts(self) -> list[Table]:
        """Return the tables."""
        return self.tables()

    @classmethod
    def read(cls, content: Any) -> EngineComparison:
        """From what `to_dict` made, read from a file that anybody may have written.

        Raises:
            ValueError: it is something else; names what is missing or wrong.
        """
        found = as_kind(content, cls, "it")
        deployed = {place.key for place in found.deployed}
        if not found.timings or any(timing.key not in deployed for timing in found.timings):
            raise ValueError("no timings, or some of models that were not deployed")
        return found

    def rows(self) -> dict[str, list[list[str]]]:
        """{setting: its table's rows, the head first}: a row a form and model, in the order of the timings."""
        deployed = {place.key: place for place in self.deployed}
        scores = labels(self.deployed[0].scores).values()
        head = ["engine", "model", "tokens/s", "same", *(("int8",) if self.has_baseline else ()), "MB", *scores]
        found: dict[str, list[list[str]]] = {}
        for timing in self.timings:
            place = deployed[timing.key]
            ratios = [timing.to_teacher, *((timing.to_baseline,) if self.has_baseline else ())]
            row = [timing.form, timing.model, f"{timing.speed.tokens_per_second:,.0f}"]
            row += ["" if ratio is None else f"{ratio:.2f}x" for ratio in ratios]
            row += [f"{place.disk_bytes / 1e6:,.1f}"]
            row += [f"{score:.1f}" for score in place.scores.values()]
            cores = f"{timing.cores} core{'s' * (timing.cores > 1)}"
            found.setdefault(f"{cores}, batch {timing.batch_size}, beam {timing.beams}", [head]).append(row)
        return found

    def notes(self) -> list[str]:
        """What the numbers mean."""
        notes = [
            f"{self.new_tokens} tokens for every sentence; ratios are medians over {self.runs} interleaved runs:",
            "'same' to the teacher in the same engine"
            + (f", 'int8' to the teacher in {BASELINE}." if self.has_baseline else "."),
        ]
        if self.data:
            quality = f"{self.quality_sentences} sentences of {Path(self.data).name}, beam {self.quality_beams}"
            notes.append(f"Quality: {quality}.")
        return [*notes, *describe(self.signatures)]

    def tables(self) -> list[Table]:
        """One table a setting, one row a model and form; what they mean is said below the last."""
        tables = []
        for setting, (head, *rows) in self.rows().items():
            table = Table(title=setting, box=box.SIMPLE_HEAD, padding=0, show_edge=False)
            table.add_column(head[0], overflow="fold", min_width=len(BASELINE))
            table.add_column(head[1], overflow="fold", min_width=8)
            for column in head[2:]:
                table.add_column(column, justify="right", no_wrap=True)
            for form, model, *numbers in rows:
                table.add_row(form, escape(model), *numbers)
            tables.append(table)
        tables[-1].caption = escape("\n".join(self.notes()))
        return tables

    @property
    def has_baseline(self) -> bool:
        """Whether the teacher was timed in that engine, too."""
        return any(timing.to_baseline is not None for timing in self.timings)

    @property
    def runs(self) -> int:
        return len(self.timings[0].speed.runs)
