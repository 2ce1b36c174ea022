"""What a conversion did: the plan table, `compression.json`, the model card."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import jinja2
import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import PreTrainedModel

from .teacher import Teacher, stored_tensors

REPORT_FILE = "compression.json"


@dataclass(frozen=True)
class MatrixReport:
    """One matrix.

    Attributes:
        name: its module, as `rank_pattern` has it.
        kind: `embedding`, `attention` or `ffn`.
        m, n: its shape; inputs×outputs, or V×d.
        rank: r, or `None` where it stays dense.
        energy: share of its squared singular values that is kept.
        relative_error: Frobenius norm of what is lost / of the matrix.
    """

    name: str
    kind: str
    m: int
    n: int
    rank: int | None
    energy: float
    relative_error: float

    @property
    def parameters_before(self) -> int:
        """Parameters of the dense matrix, mn."""
        return self.m * self.n

    @property
    def parameters_after(self) -> int:
        """Parameters kept: r(m + n), or mn."""
        return self.parameters_before if self.rank is None else self.rank * (self.m + self.n)


@dataclass(frozen=True)
class CompressionReport:
    """A whole conversion.

    Attributes:
        source: name of the source, without the path to it.
        family: `model_type` of the source.
        architecture: `model_type` of the result.
        auto_class: the Auto class that loads the result.
        options: the options that were set.
        groups: stored layers of the result and depths, {stack: [stored, depths]}.
        matrices: one a stored matrix of the result.
        parameters_before, parameters_after: unique parameters of the whole models.
        bytes_before, bytes_after: bytes of the tensors of both.
    """

    source: str
    family: str
    architecture: str
    auto_class: str
    options: dict
    groups: dict[str, list[int]]
    matrices: list[MatrixReport]
    parameters_before: int
    parameters_after: int
    bytes_before: int
    bytes_after: int

    @classmethod
    def of(cls, teacher: Teacher, model: PreTrainedModel, options: object, matrices: list[MatrixReport]):
        """The report of compressing `teacher` into `model`, whose skeletons give the totals."""
        config = model.config
        set_options = {name: value for name, value in asdict(options).items() if value is not None}
        if Path(set_options.get("calibration", "")).is_file():  # its name, without the path to it
            set_options["calibration"] = Path(set_options["calibration"]).name
        groups = {}
        for stack in ("encoder", "decoder"):
            depths = getattr(config, f"{stack}_layers")
            groups[stack] = [getattr(config, f"{stack}_groups", None) or depths, depths]
        auto_classes = {reference.split(".")[-1]: name for name, reference in config.auto_classes.items()}
        return cls(
            source=teacher.name,
            family=teacher.source_config.model_type,
            architecture=config.model_type,
            auto_class=auto_classes[type(model).__name__],
            options=set_options,
            groups=groups,
            matrices=matrices,
            parameters_before=teacher.model.num_parameters(),
            parameters_after=model.num_parameters(),
            bytes_before=tensor_bytes(teacher.model),
            bytes_after=tensor_bytes(model),
        )

    @property
    def ratio(self) -> float:
        """Dense parameters / kept parameters of the factorized matrices together (Eq. 12's p)."""
        factorized = [matrix for matrix in self.matrices if matrix.rank is not None]
        kept = sum(matrix.parameters_after for matrix in factorized)
        return sum(matrix.parameters_before for matrix in factorized) / kept if kept else 1.0

    def to_dict(self) -> dict:
        """Everything as JSON holds it, derived figures included."""
        matrices = [
            asdict(matrix)
            | {"parameters_before": matrix.parameters_before, "parameters_after": matrix.parameters_after}
            for matrix in self.matrices
        ]
        return asdict(self) | {"matrices": matrices, "ratio": self.ratio}


def tensor_bytes(model: PreTrainedModel) -> int:
    """Bytes of the tensors that a checkpoint of `model` holds, in the type its configuration names (else fp32)."""
    itemsize = (model.config.dtype or torch.float32).itemsize
    return itemsize * sum(tensor.numel() for tensor in stored_tensors(model).values())


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
                "dense" if matrix.rank is None else str(matrix.rank),
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
    dense = [matrix.name for matrix in report.matrices if matrix.rank is None]
    if dense:
        console.print(
            f"{len(dense)} of {len(report.matrices)} matrices stay dense: no rank was asked for, or the factors would "
            "hold as many parameters as the matrix.",
            highlight=False,
        )
    if "calibration" not in report.options and len(dense) < len(report.matrices):
        console.print(
            "Without calibration text every entry of a matrix counts alike, which costs most of the quality until the "
            "result is trained; --calibration keeps what the loss feels most.",
            highlight=False,
        )
    for stack, (stored, depths) in report.groups.items():
        if stored != depths:
            console.print(f"The {stack}'s {depths} layers share {stored} stored ones.", highlight=False)


CARD = jinja2.Environment(autoescape=False, trim_blocks=True, lstrip_blocks=True).from_string(
    """---
library_name: transformers
tags:
- {{ architecture }}
- compression
- low-rank
---
# {{ source }}, compressed

A `{{ architecture }}` model: `{{ source }}` (`{{ family }}`) with its matrices factorized by truncated SVD
{%- for stack, (stored, depths) in groups.items() if stored != depths %}, its {{ depths }} {{ stack }} layers sharing
{{ stored }} stored ones{% endfor %}.

| | before | after | ratio |
|---|---|---|---|
| unique parameters | {{ "{:,}".format(parameters_before) }} | {{ "{:,}".format(parameters_after) }} | {{
"%.2f" | format(parameters_before / parameters_after) }} |
| megabytes | {{ "%.1f" | format(bytes_before / 1e6) }} | {{ "%.1f" | format(bytes_after / 1e6) }} | {{
"%.2f" | format(bytes_before / bytes_after) }} |

Truncation alone costs quality; fine-tune it before use. Options of the conversion: `{{ options }}`.

```python
import lightformers_hf  # registers the architecture; without it, pass trust_remote_code=True
from transformers import {{ auto_class }}, AutoTokenizer

model = {{ auto_class }}.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```

## Every matrix

| matrix | shape | rank | energy kept | relative error |
|---|---|---|---|---|
{% for matrix in matrices %}
| `{{ matrix.name }}` | {{ matrix.m }}×{{ matrix.n }} | {{ matrix.rank or "dense" }} | {{
"%.1f" | format(100 * matrix.energy) }} % | {{ "%.4f" | format(matrix.relative_error) }} |
{% endfor %}
"""
)


def write_report(report: CompressionReport, folder: Path) -> None:
    """Write `compression.json` and the model card `README.md` into `folder`."""
    content = report.to_dict()
    (folder / REPORT_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    # A name from elsewhere must not end the code span it stands in.
    safe = {
        key: value.replace("`", "").replace("|", "") if isinstance(value, str) else value
        for key, value in content.items()
    }
    (folder / "README.md").write_text(CARD.render(safe), encoding="utf-8")
