#!/usr/bin/env python
r"""Count the parameters of recipes and models, without training or loading them; or print the papers' tables.

    python training/count_parameters.py training/recipes/multi30k/lightformer.yaml --vocab-size 8000
    python training/count_parameters.py --table PartialFormer

Shared and tied parameters count once. A table has the printed count, ours, and the difference. The script ends with
exit status 1 if a row differs by more than its tolerance.

`parameter_tables.json` has one entry for each row: the configuration in this package's fields, the printed millions,
the tolerance that the row is held to, and a note where the paper leaves something open.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
import transformers
from arguments import ScriptParser, positive_number, recipe_config, recipe_task
from common import print_answer, run_script
from rich import box
from rich.markup import escape
from rich.table import Table
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel

import lightformers_hf
from lightformers_hf.files import WEIGHT_FILES, find_folder
from lightformers_hf.loading import (
    DAMAGED,
    build_network,
    check_checkpoint,
    check_no_export,
    find_architecture,
    load_pretrained,
    unique_parameters,
)

# For recipes whose script does not train sequence-to-sequence models.
AUTO_CLASSES = {
    "clm": transformers.AutoModelForCausalLM,
    "classification": transformers.AutoModelForSequenceClassification,
}


@dataclass(frozen=True)
class ParameterRow:
    """One row of a paper's table."""

    table: str  # paper, table and row, as in `LightFormer T6 r4`
    model: str  # name of its class
    millions: float  # as printed; the decimals show its rounding
    tolerance: float  # largest accepted |ours − printed| / printed
    config: dict
    note: str = ""  # facts that the paper does not give, and their interpretation

    def build(self) -> PreTrainedModel:
        """The row's model, on torch's default device."""
        return getattr(lightformers_hf, self.model)(self.model_config())

    def model_config(self) -> PreTrainedConfig:
        """The row's configuration."""
        return getattr(lightformers_hf, self.model).config_class(**self.config)

    @property
    def largest_difference(self) -> float:
        """Millions that ours may differ by: the tolerance, and half a unit of the last printed digit at least."""
        decimals = len(str(self.millions).partition(".")[2])
        return max(self.tolerance * self.millions, 10.0**-decimals / 2)


@dataclass(frozen=True)
class ParameterCount:
    """A row of a paper's table and `ours`, the millions of parameters that its configuration gives."""

    row: ParameterRow
    ours: float

    @property
    def difference(self) -> float:
        """(ours − printed) / printed."""
        return self.ours / self.row.millions - 1

    @property
    def within(self) -> bool:
        """Whether ours is as near to the printed count as the row allows."""
        return abs(self.ours - self.row.millions) <= self.row.largest_difference

    def to_dict(self) -> dict:
        """Return everything for JSON."""
        return asdict(self.row) | {"ours": self.ours, "difference": self.difference, "within": self.within}


@cache
def parameter_rows() -> tuple[ParameterRow, ...]:
    """Return the rows of the papers' tables whose shape is printed or found by count."""
    text = Path(__file__).with_name("parameter_tables.json").read_text(encoding="utf-8")
    return tuple(ParameterRow(**row) for row in json.loads(text))


def find_row(table: str) -> ParameterRow:
    """The row of exactly that name, as in `LightFormer T6 r4`; `KeyError` where there is none."""
    return {row.table: row for row in parameter_rows()}[table]


def count_parameters(table: str = "") -> list[ParameterCount]:
    """Count every row whose name contains `table`, in any case, without memory for weights (`meta` device)."""
    rows = [row for row in parameter_rows() if table.casefold() in row.table.casefold()]
    if not rows:
        names = ", ".join(dict.fromkeys(" ".join(row.table.split()[:2]) for row in parameter_rows()))
        raise ValueError(f"no row of the papers' tables contains {table!r}; there are rows of {names}")
    counts: dict[str, float] = {}  # Several tables print the same model.
    with torch.device("meta"):
        for row in rows:
            if (key := f"{row.model} {row.config}") not in counts:
                counts[key] = unique_parameters(row.build()) / 1e6
    return [ParameterCount(row, counts[f"{row.model} {row.config}"]) for row in rows]


def model_parameters(source: str, vocab_size: int | None = None) -> int:
    """Learned parameters of a checkpoint, or of the model that a recipe trains, without memory for weights.

    Args:
        place: a recipe (`.yaml`); or a folder, or a name on the Hub, of which `config.json` is read.
        vocab_size: tokens of a recipe's model; see `recipe_config`.

    Raises:
        ValueError: no model of a supported kind, or a vocabulary for a checkpoint, or a recipe without one.
        FileNotFoundError: no such recipe or checkpoint.
    """
    if re.search(r"\.ya?ml,\w+=", source):
        raise ValueError(f"{source}: no fields can follow a recipe. Write them below model: in a copy of the recipe")
    try:
        if source.endswith((".yaml", ".yml")):
            config = recipe_config(source, vocab_size)
            auto = AUTO_CLASSES.get(recipe_task(source), AutoModelForSeq2SeqLM)
        elif vocab_size is not None:
            raise ValueError(f"vocab_size is given, but {source} is no recipe: remove vocab_size")
        else:
            folder = find_folder(source)
            check_no_export(folder or source)  # its config.json is for other programs
            stored = folder and any((folder / name).is_file() for name in WEIGHT_FILES)
            config = check_checkpoint(folder) if stored else load_pretrained(AutoConfig, folder or source)
            name = find_architecture(config, source)
            found = getattr(lightformers_hf, str(name), None) or getattr(transformers, str(name), None)
            auto = found if isinstance(found, type) and issubclass(found, PreTrainedModel) else AutoModelForSeq2SeqLM
        with torch.device("meta"):
            is_model = issubclass(auto, PreTrainedModel)
            return unique_parameters(auto(config) if is_model else build_network(auto, config))
    except DAMAGED as error:
        raise ValueError(f"{source} describes no model: {error}") from error


def parameter_table(counts: list[ParameterCount]) -> Table:
    """A rich table of the counts: paper, ours, difference, tolerance, and whether the one is within the other."""
    notes = list(dict.fromkeys(count.row.note for count in counts if count.row.note))  # below, each once
    lines = [f"{sum(count.within for count in counts)} of {len(counts)} rows within their tolerance"]
    lines += [f"{number}: {escape(note)}" for number, note in enumerate(notes, 1)]
    table = Table(title="Parameters, millions", caption="\n".join(lines), caption_justify="left")
    table.box, table.padding, table.show_edge = box.SIMPLE_HEAD, (0,), False
    for heading in ("row", "paper", "ours", "difference", "tolerance", "within", "note"):
        table.add_column(heading, justify="left" if heading in ("row", "within") else "right", overflow="fold")
    for count in counts:
        row = count.row
        cells = [escape(row.table), f"{row.millions}", f"{count.ours:.2f}", f"{count.difference:+.1%}"]
        cells += [f"±{row.largest_difference / row.millions:.1%}", "yes" if count.within else "[red]no[/red]"]
        table.add_row(*cells, str(notes.index(row.note) + 1) if row.note else "")
    return table


def main() -> None:
    """Print counts of models, or the papers' tables."""
    parser = ScriptParser(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="recipes (.yaml), folders or Hub names")
    parser.add_argument("--vocab-size", type=positive_number, metavar="N", help="tokens of a recipe's model")
    parser.add_argument("--table", default="", help="only rows whose name contains this: 'Subformer T2'")
    parser.add_argument("--json", metavar="FILE", help="write the counts as JSON; -: to stdout, and nothing else")
    args = parser.parse_args()
    if args.models:
        if args.table:
            raise ValueError("--table is for the papers' tables: remove it, or the models")
        found = {name: model_parameters(name, args.vocab_size) for name in args.models}
        print_answer([f"{count:15,}  {name}" for name, count in found.items()], found, args.json)
        return
    if args.vocab_size is not None:
        raise ValueError("--vocab-size is of a recipe's model: name a recipe")
    counts = count_parameters(args.table)
    print_answer([parameter_table(counts)], [count.to_dict() for count in counts], args.json)
    if not all(count.within for count in counts):
        sys.exit(1)


if __name__ == "__main__":
    run_script(main)
