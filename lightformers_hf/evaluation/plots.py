"""Pictures in one style, legible 800 pixels wide on light and dark pages: those of `analyze` and `report`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, BinaryIO

import matplotlib
from cycler import cycler
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .quality import METRICS, labels

if TYPE_CHECKING:
    from ..conversion.report import MatrixReport
    from .analysis import Analysis, Footprint, Macs
    from .evaluate import Measurements

# Distinguishable for colour-blind readers (Okabe and Ito); lighter on a dark page. In a picture they are C0, C1, ….
LIGHT = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9")
DARK = ("#56b4e9", "#f0b93f", "#2fc79b", "#ff8a4c", "#e5a5c8", "#7c9cff")
WIDTH = 10  # inches of a picture
LETTERS = 105  # side by side in its legend
LINE = 0.27  # inches of each of the legend's further lines, which a picture grows by
FAR_APART = 20  # times: more than this, and an axis is logarithmic
KINDS = {"embedding": "embedding", "attention": "attention", "ffn": "feed-forward"}
STACKS = ("encoder", "decoder")
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


def draw_spectrum(axes: Axes, values: Sequence[float], *, color: str) -> None:
    """Draw the singular values (descending) of a matrix, relative to the largest."""
    if values[0] > 0:
        heights = [value / values[0] for value in values]
        axes.plot(range(1, len(values) + 1), heights, color=color, linewidth=1, alpha=0.6)


# --- Pictures of `analyze`


def draw_analyses(analyses: list[Analysis], folder: Path) -> list[Path]:
    """Draw every measure that was taken, `<measure>.png` and `<measure>-dark.png`, and return the paths."""
    curves = [analysis for analysis in analyses if analysis.loss_curve]
    bars = {"columns": 2, "height": 1.9 + 0.55 * len(analyses)}
    pictures: dict[str, tuple[Callable[..., None], dict]] = {
        "head-diversity": (_head_diversity, {"columns": 3}),
        "token-uniformity": (_token_uniformity, {"columns": 2}),
        "ffn-activation": (_ffn_activation, {"rows": 2, "columns": 3, "height": 6.5}),
        "macs": (_macs, bars),
        "memory": (_memory, bars),
        "spectra": (_spectra, {"rows": len(analyses), "columns": 3, "height": 1.4 + 2.4 * len(analyses)}),
    }
    pictures |= {"convergence": (_convergence, {})} if curves else {}
    paths = []
    for name, (paint, options) in pictures.items():
        drawn = partial(paint, analyses=curves if name == "convergence" else analyses)
        for suffix, dark in (("", False), ("-dark", True)):
            paths.append(folder / f"{name}{suffix}.png")
            save_picture(paths[-1], drawn, dark=dark, **options)
    return paths


def _by_depth(axes: Axes, analyses: list[Analysis], lines: list[list[float]], **labels: str) -> None:
    """The line of each model, over the depths of a stack; none where it is empty."""
    for color, (analysis, values) in enumerate(zip(analyses, lines, strict=True)):
        if values:
            line: dict[str, Any] = {"color": f"C{color}", "markersize": 5, "label": as_text(analysis.label)}
            axes.plot(range(1, len(values) + 1), values, "o-", **line)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set(**{"xlabel": "layer"} | labels)


def _head_diversity(panels: list[Axes], analyses: list[Analysis]) -> None:
    titles = {"encoder": "encoder", "decoder": "decoder, self-attention", "cross": "cross-attention"}
    for axes, (site, title) in zip(panels, titles.items(), strict=True):
        if axes is not panels[0]:
            axes.sharey(panels[0])
        _by_depth(axes, analyses, [one.head_diversity[site] for one in analyses], title=title)
    panels[0].set(ylabel="head diversity, Eq. 7 (higher: more)")


def _token_uniformity(panels: list[Axes], analyses: list[Analysis]) -> None:
    for axes, stack in zip(panels, STACKS, strict=True):
        _by_depth(axes, analyses, [one.token_uniformity[stack] for one in analyses], title=stack)
    panels[0].set(ylabel="correlation of tokens (lower: better)")


def _ffn_activation(panels: list[Axes], analyses: list[Analysis]) -> None:
    measures = {"activated": "activated neurons", "ratio": "share of the neurons", "efficiency": "per 1000 parameters"}
    for row, stack in enumerate(STACKS):
        for axes, (measure, title) in zip(panels[3 * row : 3 * row + 3], measures.items(), strict=True):
            scale = 1000 if measure == "efficiency" else 1
            lines = [[getattr(layer, measure) * scale for layer in one.ffn[stack]] for one in analyses]
            _by_depth(axes, analyses, lines, xlabel="layer" if row else "", title="" if row else title)
            drawn = [value for line in axes.lines for value in line.get_ydata()]
            if measure == "efficiency" and max(drawn, default=0) > FAR_APART * min(drawn, default=0):
                axes.set_yscale("log")
            else:
                axes.margins(y=0.15)
                axes.set_ylim(bottom=0)
        panels[3 * row].set(ylabel=stack)


def _draw_bars(axes: Axes, labels: list[str], bars: list[dict[str, float]], color: int = 0, **settings: str) -> None:
    """A horizontal bar a model, of its parts one after another, and their sum; the first part has that colour."""
    for row, parts in enumerate(bars):
        start = 0.0
        for index, (part, size) in enumerate(parts.items(), start=color):
            axes.barh(row, size, left=start, color=f"C{index}", height=0.6, label=part)
            start += size
        total = f"{start:,.0f}" if start >= 100 else f"{start:.1f}"
        axes.annotate(total, (start, row), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set(yticks=range(len(bars)), yticklabels=labels, **settings)
    axes.margins(x=0.16)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.xaxis.set_major_locator(MaxNLocator(5))


def _parts(measure: Macs | Footprint, unit: float) -> dict[str, float]:
    """The parts of a measure, in millions of a unit."""
    sizes = {part: number * unit / 1e6 for part, number in vars(measure).items()}
    output = sizes.pop("output")
    return sizes | ({"output layer": output} if output else {})


def _macs(panels: list[Axes], analyses: list[Analysis]) -> None:
    labels, unit = [as_text(one.label) for one in analyses], "million MACs, 20 source, 20 target tokens"
    titles = {"macs": "nothing kept, as the papers count", "macs_cached": "with a cache"}
    for axes, (field, title) in zip(panels, titles.items(), strict=True):
        _draw_bars(axes, labels, [_parts(getattr(one, field), 1) for one in analyses], xlabel=unit, title=title)
    panels[1].set(yticklabels=[])


def _memory(panels: list[Axes], analyses: list[Analysis]) -> None:
    labels, peaks = [as_text(one.label) for one in analyses], [{"_": one.own_memory_bytes / 1e6} for one in analyses]
    matrices = [_parts(one.footprint, 4) for one in analyses]
    _draw_bars(panels[0], labels, matrices, xlabel="MB, float32", title="matrices")
    _draw_bars(panels[1], labels, peaks, color=4, xlabel="MB", title="peak while translating, libraries aside")
    panels[1].set(yticklabels=[])


def _spectra(panels: list[Axes], analyses: list[Analysis]) -> None:
    kinds = ("embedding", "attention", "feed-forward")
    for row, analysis in enumerate(analyses):
        for column, kind in enumerate(kinds):
            axes = panels[3 * row + column]
            if row:
                axes.sharex(panels[column])
            for name, values in analysis.spectra.items():
                if analysis.kind_of(name) == kind:
                    draw_spectrum(axes, values, color=f"C{row}")
            axes.set(title="" if row else kind, ylim=(0, 1.02))
            if row == len(analyses) - 1:
                axes.set(xlabel="number of the singular value")
        panels[3 * row].set(ylabel=f"{as_text(analysis.label)}\nrelative to largest")


def _convergence(panels: list[Axes], analyses: list[Analysis]) -> None:
    for color, analysis in enumerate(analyses):
        panels[0].plot(*zip(*analysis.loss_curve, strict=True), color=f"C{color}", label=as_text(analysis.label))
        if analysis.convergence_step is not None:
            reached = dict(analysis.loss_curve)[analysis.convergence_step]
            panels[0].plot(analysis.convergence_step, reached, "o", color=f"C{color}", markersize=8)
    names = " or ".join(dict.fromkeys(analysis.loss_name for analysis in analyses))
    panels[0].set(xlabel="step", ylabel=f"{names}, nats a token")
    panels[0].set(title="Dot: within 1 % of the lowest, before the end")


# --- Pictures of the page of `report`: functions that paint panels


def _places(matrices: Sequence[MatrixReport]) -> dict[str, dict[str, defaultdict[int, list[float]]]]:
    """{stack: {block: {layer, from 1: relative errors}}} of the matrices in layers."""
    found = {stack: {block: defaultdict(list) for block in BLOCKS} for stack in STACKS}
    for matrix in matrices:
        place = re.match(r"(encoder|decoder)\.layers\.(\d+)\.", matrix.name)
        if place and matrix.kind != "embedding":
            attention = "cross-attention" if "encoder_attn" in matrix.name else "self-attention"
            block = "feed-forward" if matrix.kind == "ffn" else attention
            found[place[1]][block][int(place[2]) + 1].append(matrix.relative_error)
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
    by_size = [(one, one.parameters / 1e6, is_teacher) for one, _, is_teacher in points]
    by_speed = [point for point in points if point[1] is not None]
    for axes, placed, label in zip(panels, (by_size, by_speed), ("million parameters", speed), strict=False):
        for one, x, is_teacher in placed:
            color, marker = ("C1", "s") if is_teacher else ("C0", "o")
            position = x, one.scores[metric]
            axes.plot(*position, marker, color=color, markersize=8, label="teacher" * is_teacher or None)
            # Away from the nearer edge, so that no name leaves the picture.
            left = x > sum(other for _, other, _ in placed) / len(placed)
            place: dict[str, Any] = {"xytext": (-8 if left else 8, 0), "ha": "right" if left else "left"}
            place |= {"va": "center", "textcoords": "offset points", "fontsize": 10}
            axes.annotate(as_text(one.name), position, **place)
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
