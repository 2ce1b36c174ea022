"""What a conversion did: the plan table, `compression.json`, the model card."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import PreTrainedModel
from transformers.utils import cached_file

from ..files import CARD_FILE, REPORT_FILE
from ..loading import tensor_bytes
from .card import inherited_metadata, model_card
from .options import CompressionOptions
from .teacher import Teacher

OWN_TEXT = "text that the model made itself"


@dataclass(frozen=True, kw_only=True)
class MatrixReport:
    """One matrix.

    Attributes:
        name: its module, as `rank_pattern` has it.
        kind: `embedding`, `attention` or `ffn`.
        m, n: its shape; inputs×outputs, or V×d.
        rank: r of its factors, or `None` where it has none.
        parameters_after: parameters kept: r(m + n), those of a narrower matrix, or mn.
        energy: share of its squared singular values that is kept.
        relative_error: norm of what is lost / of the matrix: Frobenius, or in the metric of the calibration.
        width: neurons that stay, or width of the heads that stay, where there are fewer; energy and error are then
            those of the whole network or block.
    """

    name: str
    kind: str
    m: int
    n: int
    rank: int | None = None
    parameters_after: int
    energy: float
    relative_error: float
    width: int | None = None

    @property
    def parameters_before(self) -> int:
        """Parameters of the dense matrix, mn."""
        return self.m * self.n

    @property
    def form(self) -> str:
        """What has become of it, in a word: `dense`, a rank, a width."""
        if self.width is not None:
            return f"{'heads' if self.kind == 'attention' else 'neurons'} {self.width}"
        return "dense" if self.rank is None else str(self.rank)


@dataclass(frozen=True)
class CompressionReport:
    """A whole conversion.

    Attributes:
        source: name of the source, without the path to it.
        family: `model_type` of the source.
        architecture: `model_type` of the result.
        auto_class: the Auto class that loads the result.
        options: the options that were set.
        calibration: the text that errors were weighed on; `None`: all entries of a matrix alike.
        calibrated_on: fingerprints of its sentences, so that an evaluation can tell whether it sees them again.
        estimated_speedup: how many times as fast as the teacher, where that was asked for: on the machine of the
            conversion, one core, batch 1, greedy, through `generate()`.
        layers: layers of the result and of the source, {stack: [kept, before]}.
        groups: stored layers of the result and depths, {stack: [stored, depths]}.
        matrices: one a stored matrix of the result.
        parameters_before, parameters_after: unique parameters of the whole models.
        bytes_before, bytes_after: bytes of the tensors of both.
        inherited: what the result's card takes over from the source's: licence, languages, task, its name on the Hub.
    """

    source: str
    family: str
    architecture: str
    auto_class: str
    options: dict
    calibration: str | None
    calibrated_on: list[str]
    estimated_speedup: float | None
    layers: dict[str, list[int]]
    groups: dict[str, list[int]]
    matrices: list[MatrixReport]
    parameters_before: int
    parameters_after: int
    bytes_before: int
    bytes_after: int
    inherited: dict

    @classmethod
    def of(
        cls,
        teacher: Teacher,
        model: PreTrainedModel,
        options: CompressionOptions,
        matrices: list[MatrixReport],
        *,
        calibration: str | None,
        calibrated_on: list[str],
        estimated_speedup: float | None,
    ):
        """The report of compressing `teacher` into `model`, whose skeletons give the totals."""
        config = model.config
        set_options = {name: value for name, value in asdict(options).items() if value is not None}
        del set_options["device"]  # where it was computed, not what
        if calibration is not None and Path(calibration).is_file():  # its name, without the path to it
            set_options["calibration"] = calibration = Path(calibration).name
        layers, groups = {}, {}
        for stack in ("encoder", "decoder"):
            depths = getattr(config, f"{stack}_layers")
            layers[stack] = [depths, getattr(teacher.config, f"{stack}_layers")]
            groups[stack] = [getattr(config, f"{stack}_groups", None) or depths, depths]
        auto_classes = {reference.split(".")[-1]: name for name, reference in config.auto_classes.items()}
        return cls(
            source=teacher.name,
            family=teacher.source_config.model_type,
            architecture=config.model_type,
            auto_class=auto_classes[type(model).__name__],
            options=set_options,
            calibration=calibration,
            calibrated_on=calibrated_on,
            estimated_speedup=estimated_speedup,
            layers=layers,
            groups=groups,
            matrices=matrices,
            parameters_before=teacher.model.num_parameters(),
            parameters_after=model.num_parameters(),
            bytes_before=tensor_bytes(teacher.model),
            bytes_after=tensor_bytes(model),
            inherited=inherited_metadata(
                teacher.folder, teacher.name if teacher.name != teacher.folder.name else None
            ),
        )

    @property
    def ratio(self) -> float:
        """Dense parameters / kept parameters of the matrices that got smaller, together (Eq. 12's p)."""
        factorized = [matrix for matrix in self.matrices if matrix.form != "dense"]
        kept = sum(matrix.parameters_after for matrix in factorized)
        return sum(matrix.parameters_before for matrix in factorized) / kept if kept else 1.0

    def to_dict(self) -> dict:
        """Everything as JSON holds it, derived figures included."""
        matrices = [
            asdict(matrix) | {"form": matrix.form, "parameters_before": matrix.parameters_before}
            for matrix in self.matrices
        ]
        return asdict(self) | {"matrices": matrices, "ratio": self.ratio}


def print_report(report: CompressionReport, console: Console, *, matrices: bool = True) -> None:
    """The plan as tables: every matrix (unless `matrices` is false), then the totals."""
    if not console.is_terminal:
        console.width = 120  # a file or a pipe has room
    if matrices:
        table = Table(title=f"{escape(report.source)}: every matrix", title_justify="left", box=box.SIMPLE_HEAD)
        for column in ("matrix", "kind"):
            table.add_column(column, overflow="fold")
        for column in ("shape", "rank", "before", "after", "energy", "error"):
            table.add_column(column, justify="right")
        for matrix in report.matrices:
            table.add_row(
                escape(matrix.name),
                matrix.kind,
                f"{matrix.m}x{matrix.n}",
                matrix.form,
                f"{matrix.parameters_before:,}",
                f"{matrix.parameters_after:,}",
                f"{matrix.energy:.1%}",
                f"{matrix.relative_error:.4f}",
            )
        console.print(table)
        console.print("before, after: parameters. energy: share of Σσ² kept. error: relative, Frobenius.\n")
    totals = Table(title="totals", title_justify="left")
    for column in ("", "before", "after", "ratio"):
        totals.add_column(column, justify="left" if not column else "right")
    for label, before, after, unit in (
        ("unique parameters", report.parameters_before, report.parameters_after, 1),
        ("megabytes", report.bytes_before, report.bytes_after, 1e6),
    ):
        shown = [f"{value:,}" if unit == 1 else f"{value / unit:,.1f}" for value in (before, after)]
        totals.add_row(label, *shown, f"{before / after:.2f}")
    console.print(totals)
    if report.estimated_speedup is not None:
        console.print(
            f"Estimated {report.estimated_speedup:.2f} times as fast as {escape(report.source)} on this machine: "
            "greedy, one sentence at a time, one core, through generate(). `lightformers evaluate --teacher` measures "
            "it.",
            highlight=False,
        )
    dense = [matrix.name for matrix in report.matrices if matrix.form == "dense"]
    if dense:
        console.print(
            f"{len(dense)} of {len(report.matrices)} matrices stay dense: no rank was asked for, or the factors would "
            "hold as many parameters as the matrix.",
            highlight=False,
        )
    if report.calibration is None and len(dense) < len(report.matrices):
        console.print(
            "Without calibration every entry of a matrix counts alike, which costs most of the quality until the "
            "result is trained.",
            highlight=False,
        )
    elif report.calibration == OWN_TEXT:
        console.print(
            f"Errors were weighed on {OWN_TEXT}; --calibration with a thousand sentence pairs like those it is for "
            "keeps more.",
            highlight=False,
        )
    for stack, (kept, before) in report.layers.items():
        if kept != before:
            console.print(f"The {stack} keeps {kept} of {before} layers.", highlight=False)
    for stack, (stored, depths) in report.groups.items():
        if stored != depths:
            console.print(f"The {stack}'s {depths} layers share {stored} stored ones.", highlight=False)


def write_report(report: CompressionReport, folder: Path) -> None:
    """Write `compression.json` and the model card `README.md` into `folder`."""
    content = report.to_dict()
    (folder / REPORT_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (folder / CARD_FILE).write_text(model_card(content), encoding="utf-8")


def copy_report(source: str, folder: str | Path) -> None:
    """Put the `compression.json` of a checkpoint beside what training made of it, so that a card can tell of it.

    Args:
        source: the checkpoint that training started from, a folder or a name on the Hub. It may have none.
        folder: where the result lies.
    """
    found = cached_file(
        source,
        REPORT_FILE,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if found is not None:
        shutil.copyfile(found, Path(folder, REPORT_FILE))
