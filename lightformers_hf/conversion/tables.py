"""What `plan` and `convert` print of a report."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .report import CLIFF, OWN_TEXT, CompressionReport


def print_report(report: CompressionReport, console: Console, *, matrices: bool = True) -> None:
    """The plan as tables: every matrix (unless `matrices` is false), then the totals, then what to know of them."""
    if matrices:
        console.print(matrix_table(report))
        print_line(
            console, "\nbefore, after: parameters. energy: share of Σσ² kept. error: norm of what is lost, relative."
        )
        print_line(console, f"Energy and error: {report.measure}; of a whole block where it got narrower.\n")
    console.print(totals_table(report))
    for line in remarks(report):
        print_line(console, line)


def print_line(console: Console, line: str) -> None:
    """A line of text that nothing in it colours."""
    console.print(escape(line), highlight=False)


def matrix_table(report: CompressionReport) -> Table:
    """A row a matrix; in 120 columns nothing wraps but a name of more than 40 letters."""
    title = f"{escape(report.source)}: every matrix"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for column in ("matrix", "kind"):
        table.add_column(column, overflow="fold")
    for column in ("shape", "becomes", "before", "after", "energy", "error"):
        table.add_column(column, justify="right")
    for matrix in report.matrices:
        table.add_row(
            escape(matrix.name),
            matrix.kind,
            f"{matrix.m}x{matrix.n}",
            escape(matrix.setting),
            f"{matrix.parameters_before:,}",
            f"{matrix.parameters_after:,}",
            f"{matrix.energy:.1%}",
            f"{matrix.relative_error:.4f}",
        )
    return table


def totals_table(report: CompressionReport) -> Table:
    """Parameters and megabytes of the whole models."""
    table = Table(title="totals", title_justify="left")
    for column in ("", "before", "after", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    for label, before, after, show in (
        ("unique parameters", report.parameters_before, report.parameters_after, "{:,}".format),
        ("megabytes", report.bytes_before, report.bytes_after, lambda size: f"{size / 1e6:,.1f}"),
    ):
        table.add_row(label, show(before), show(after), f"{before / after:.2f}")
    return table


def remarks(report: CompressionReport) -> Iterator[str]:
    """What to know of a report, a sentence or two each."""
    if sizes := report.vocabulary:
        (source, of_sources), (target, of_targets) = sizes["source"], sizes["target"]
        sides = f"{source:,} of {of_sources:,} tokens"
        if (source, of_sources) != (target, of_targets):
            sides = f"{sides} of the source and {target:,} of {of_targets:,} of the target"
        kept, before = sizes["parameters"]
        yield f"The vocabulary keeps {sides}, which alone spares {before - kept:,} parameters."
    yield f"Of {len(report.matrices)} matrices: {report.outcome}."
    if len(report.smaller) < len(report.matrices):
        yield "Those stay dense for which nothing smaller was asked, or whose factors would hold as many parameters."
    if report.agreement is not None:
        yield f"{report.agreement}.".capitalize()
        if report.agreement.share < CLIFF:
            remedies = ["train it with `lightformers recover`", "choose a smaller ratio"]
            if report.calibration == OWN_TEXT:
                remedies.append("give text like that it is for with --calibration")
            yield f"Below {CLIFF:.0%}, outputs differ from the teacher's: {', or '.join(remedies)}."
    if report.calibration is None and report.smaller:
        yield (
            "Without calibration every entry of a matrix counts alike, which costs most of the quality until the "
            "result is trained."
        )
    elif report.calibration == OWN_TEXT:
        yield (
            f"What counts was learned from {OWN_TEXT}; --calibration with a thousand sentence pairs, or "
            "sentences, like those it is for keeps more."
        )
    for stack, (kept, before) in report.fewer_layers.items():
        yield f"The {stack} keeps {kept} of {before} layers."
    for stack, (stored, depths) in report.groups.items():
        if stored != depths:
            yield f"The {stack}'s {depths} layers share {stored} stored ones."
