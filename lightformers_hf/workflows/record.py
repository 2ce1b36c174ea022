"""What a recovery writes down of itself, so that it goes on where it was interrupted."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..evaluation.quality import labels
from ..files import RECORD_FILE, check_output, find_foreign, list_entries, open_to_readers, read_json, write_json
from ..recovery import remove_checkpoints

if TYPE_CHECKING:
    from rich.table import Table

TRANSLATIONS_FILE = "translations.json"  # the teacher's, and their sources: data may change before it goes on
CHECKPOINTS = r"checkpoint-\d+(/.*)?"  # of the training, until it ends


def show_scores(scores: dict[str, float]) -> str:
    """Scores of a model on the validation text, greedy: `BLEU 12.3, chrF 45.6`."""
    return ", ".join(f"{label} {scores[name]:.1f}" for name, label in labels(scores).items())


@dataclass(frozen=True)
class Recovery:
    """What came of a recovery.

    Attributes:
        output: the folder of the model.
        parameters, ratio: unique ones, and how many times as many the teacher has.
        before, after, teacher: {metric: score} on the validation text: as it was, as it is, and the teacher's.
        best_by: the metric by which the model that was kept is the best.
        sentences: of that text.
        with_teacher: whether its references are the teacher's own translations, as there are no others.
        steps, best_step: trained, and after how many the model is that was kept; 0: none was better than at first.
        minutes: the training took, without what was lost where it was interrupted.
        translations: how many sources the teacher translated first.
        settings: how it was trained.
    """

    output: str
    parameters: int
    ratio: float
    before: dict[str, float]
    after: dict[str, float]
    teacher: dict[str, float]
    best_by: str
    sentences: int
    with_teacher: bool
    steps: int
    best_step: int
    minutes: float
    translations: int
    settings: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The same for machines."""
        return asdict(self)

    def table(self) -> Table:
        """The same for people."""
        from rich.table import Table

        table = Table(title="Recovery", show_header=False)
        what = "the teacher as reference" if self.with_teacher else "validation"
        table.add_row(f"{what}, before", show_scores(self.before))
        table.add_row(f"{what}, after", show_scores(self.after))
        table.add_row("the teacher's", f"{show_scores(self.teacher)}, greedy, {self.sentences} sentences")
        table.add_row("the best was chosen by", labels([self.best_by])[self.best_by])
        table.add_row("parameters", f"{self.parameters:,}, the teacher's / {self.ratio:.1f}")
        best = f"best after {self.best_step:,}" if self.best_step else "none better than it was: more minutes help"
        table.add_row("trained", f"{self.steps:,} steps in {self.minutes:.1f} minutes, {best}")
        if self.translations:
            table.add_row("the teacher's translations", f"{self.translations:,}")
        return table


def claim(
    output: Path,
    asked: dict[str, Any],
    *,
    overwrite: bool,
    inputs: list[str | Path | None],
    file: str = RECORD_FILE,
) -> dict[str, Any]:
    """The record, by the name of `file`, of the interrupted work that `output` holds, or a new one.

    Raises:
        FileExistsError, ValueError: see `recover`.
    """
    record = read_json(output / file) if output.is_dir() else {}
    if record and not overwrite:
        before = record.get("asked", {})
        if name := next((name for name, value in asked.items() if not _is_same(value, before.get(name))), None):
            raise FileExistsError(
                f"{output} holds one with another {name}, {before.get(name)!r}: give the same options to go on with "
                "it, another folder, or --overwrite"
            )
        if "result" in record:
            raise FileExistsError(f"{output} holds this, complete: give another folder, or --overwrite")
        return record
    if not record and output.exists():
        check_output(output, inputs=inputs)
    there = [
        path.resolve() for name in inputs if name is not None and (path := Path(os.path.expanduser(name))).exists()
    ]
    place = output.resolve()
    if any(place in (path, *path.parents) or (path in place.parents and path.is_dir()) for path in there):
        raise ValueError(f"output {output} is, holds, or lies in, what is read: give another folder")
    return {"asked": asked}


def _is_same(value: Any, before: Any) -> bool:
    """Whether two values are equal, or paths of one place."""
    if isinstance(value, str) and isinstance(before, str):
        return value == before or os.path.abspath(value) == os.path.abspath(before)
    return value == before


def find_added(folder: Path) -> list[str]:
    """What lies in the folder of a recovery, whole or interrupted, that is not of it, in alphabetical order."""
    own = rf"{re.escape(TRANSLATIONS_FILE)}|{CHECKPOINTS}|runs(/.*)?|\..*\.partial"  # while it trains
    return [name for name in find_foreign(folder, RECORD_FILE) if not re.fullmatch(own, name)]


def begin(output: Path, record: dict[str, Any]) -> None:
    """Write the record of a recovery that begins; what an earlier one left goes."""
    output.mkdir(parents=True, exist_ok=True)
    remove_checkpoints(output)
    (output / TRANSLATIONS_FILE).unlink(missing_ok=True)
    write_json(record, output / RECORD_FILE)


def finish(output: Path, record: dict[str, Any], found: Recovery) -> Recovery:
    """Write down, and return, what came of a recovery; its checkpoints go."""
    left = [name for name in list_entries(output, RECORD_FILE) if not re.fullmatch(CHECKPOINTS, name)]
    write_json(record | {"result": asdict(found), "files": left}, output / RECORD_FILE)
    open_to_readers(output, RECORD_FILE)
    remove_checkpoints(output)
    return found
