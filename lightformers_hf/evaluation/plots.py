"""Pictures in one style, legible 800 pixels wide on light and dark pages: those of `report`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, BinaryIO

import matplotlib
from cycler import cycler
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..matrices import STACKS
from .quality import METRICS, labels

if TYPE_CHECKING:
    from ..conversion.report import MatrixReport
    from .evaluate import Measurements

# Distinguishable for colour-blind readers (Okabe and Ito); lighter on a dark page. In a picture they are C0, C1, ….
LIGHT = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9")
DARK = ("#56b4e9", "#f0b93f", "#2fc79b", "#ff8a4c", "#e5a5c8", "#7c9cff")
WIDTH = 10  # inches of a picture
LETTERS = 105  # side by side in its legend
LINE = 0.27  # inches of each of the legend's further lines, which a picture grows by
BLOCKS = ("self-attention", "cross-attention", "feed-forward")
QUALITY = (*METRICS, "accuracy")  # measures that trainings log, 0 to 100
Paint = Callable[[list[Axes]], None]


def style(*, dark: bool = False) -> dict:
    """Matplotlib's settings for a white page, or for a dark one (GitHub's)."""
    page, ink = ("#0d1117", "#e6edf3") if dark else ("#ffffff", "#1f2328")
    ink_settings = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    return {
        **dict.fromkeys(ink_settings, ink),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), page),
        "axes.prop_cycle": cycler(color=DARK if dark else LIGHT),
        "axes.grid": True,
        "axes.grid.which": "both",
        "axes.formatter.min_exponent": 4,  # 2000, not 2×10³
        "axes.titlesize": "medium",
        "axes.axisbelow": True,
        "grid.color": ink,
        "grid.alpha": 0.2,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "font.size": 12,
        "lines.linewidth": 2,
    }


def as_text(name: str) -> str:
    """A name for a picture: its dollar signs are no formulas (which `text.parse_math` would forbid to axes, too)."""
    return name.replace("$", r"\$")


def save_picture(
    file: Path | BinaryIO,
    paint: Paint,
    *,
    rows: int = 1,
    columns: int = 1,
    height: float = 4.2,
    width: float = WIDTH,
    dark: bool = False,
) -> None:
    """Write a PNG of `width` by `height` inches with `rows`×`columns` panels, which `paint` gets as one list.

    A legend below names each label once, unless a panel has its own legend. A legend of several lines makes the
    picture higher.
    """
    with matplotlib.rc_context(style(dark=dark)):
        figure = Figure(figsize=(width, height), dpi=160, layout="constrained")
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        paint(panels)
        labels: dict[str, Artist] = {}
        for axes in panels:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                labels.setdefault(label, handle)
        if labels and not any(axes.get_legend() for axes in panels):
            letters = 8 + max(map(len, labels))  # its line, and the gap to the next
            abreast = max(1, min(len(labels), 4, int(LETTERS * width / WIDTH / letters)))
            figure.legend(list(labels.values()), list(labels), loc="outside lower center", ncols=abreast)
            figure.set_figheight(height + LINE * ((len(labels) - 1) // abreast))
        figure.savefig(file, format="png")


# --- Pictures of the page of `report`: functions that paint panels


def _places(matrices: Sequence[MatrixReport]) -> dict[str, dict[str, defaultdict[int, list[float]]]]:
    """{stack: {block: {layer, from 1: relative errors}}} of the matrices in layers."""
    found = {stack: {block: defaultdict(list) for block in BLOCKS} for stack in STACKS}
    for matrix in matrices:
        match = re.match(r"(encoder|decoder)\.layers\.(\d+)\.", matrix.name)
        if match and matrix.kind != "embedding":
            attention = "cross-attention" if "encoder_attn" in matrix.name else "self-attention"
            block = "feed-forward" if matrix.kind == "ffn" else attention
            found[match[1]][block][int(match[2]) + 1].append(matrix.relative_error)
    return found


def errors(panels: list[Axes], matrices: Sequence[MatrixReport]) -> None:
    """Two panels, encoder and decoder: the relative error of every matrix by its layer, and the mean of each block."""
    for axes, (stack, blocks) in zip(panels, _places(matrices).items(), strict=True):
        for color, (block, layers) in enumerate(blocks.items(), start=1):
            if layers:
                depths = sorted(layers)
                means = [fmean(layers[depth]) for depth in depths]
                axes.plot(depths, means, "-", color=f"C{color}", label=block)
                dots = [(depth, error) for depth in depths for error in layers[depth]]
                axes.plot(*zip(*dots, strict=True), "o", color=f"C{color}", markersize=5, alpha=0.7)
        for matrix in matrices:
            if matrix.kind == "embedding":
                axes.axhline(matrix.relative_error, color="C0", linestyle="--", label="embedding")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set(title=stack, xlabel="layer")
        axes.set_ylim(bottom=0)
    panels[0].set(ylabel="relative error")


def has_errors(matrices: Sequence[MatrixReport]) -> bool:
    """Whether `errors` would find a matrix in a layer of which something is lost."""
    layers = [layer for blocks in _places(matrices).values() for block in blocks.values() for layer in block.values()]
    return any(map(any, layers))


def trade_off(
    panels: list[Axes], points: Sequence[tuple[Measurements, float | None, bool]], *, metric: str, speed: str
) -> None:
    """One panel or two: quality against parameters, and against speed. The last value of a point marks a teacher."""
    by_size = [(point, point.parameters / 1e6, is_teacher) for point, _, is_teacher in points]
    by_speed = [point for point in points if point[1] is not None]
    parts: Any = zip(panels, (by_size, by_speed), ("million parameters", speed), strict=False)
    for axes, placed, label in parts:
        for point, x, is_teacher in placed:
            color, marker = ("C1", "s") if is_teacher else ("C0", "o")
            position = x, point.scores[metric]
            axes.plot(*position, marker, color=color, markersize=8, label="teacher" * is_teacher or None)
            # Away from the nearer edge, so that no name leaves the picture.
            left = x > sum(other for _, other, _ in placed) / len(placed)
            look: dict[str, Any] = {"xytext": (-8 if left else 8, 0), "ha": "right" if left else "left"}
            look |= {"va": "center", "textcoords": "offset points", "fontsize": 10}
            axes.annotate(as_text(point.name), position, **look)
        axes.margins(x=0.15, y=0.2)
        axes.set(xlabel=label)
    panels[0].set(ylabel=labels([metric])[metric])


def training_curves(log_history: Sequence[dict]) -> tuple[dict[str, list], dict[str, list]]:
    """{name: [(step, value), …]} of the losses that a training logged, and of its measures of quality."""
    losses, qualities = defaultdict(list), defaultdict(list)
    for entry in log_history:
        for name, value in entry.items():
            if name in ("loss", "eval_loss"):
                losses[name].append((entry["step"], value))
            elif name.removeprefix("eval_") in QUALITY:
                qualities[name.removeprefix("eval_")].append((entry["step"], value))
    return losses, qualities


def training(panels: list[Axes], losses: dict[str, list], qualities: dict[str, list]) -> None:
    """One panel or two: losses over steps, and metrics on the validation data."""
    # The training loss may contain more than the loss of the labels: the teacher's predictions and hidden states.
    names = {"loss": "training, all that is learned from", "eval_loss": "validation, labels alone"}
    for color, (name, curve) in enumerate(sorted(losses.items(), reverse=True)):
        marker = "o-" if len(curve) == 1 else "-"
        panels[0].plot(*zip(*curve, strict=True), marker, color=f"C{color}", label=names[name])
    panels[0].set(xlabel="step", ylabel="loss, nats a token")
    for axes in panels[1:]:
        for color, (name, curve) in enumerate(qualities.items(), start=2):
            axes.plot(*zip(*curve, strict=True), "o-", color=f"C{color}", markersize=5, label=name)
        axes.set(xlabel="step", ylabel="validation, quality")
