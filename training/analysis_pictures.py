"""Pictures of the measures that `analyze.py` takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from lightformers_hf.evaluation.plots import as_text, save_picture

if TYPE_CHECKING:
    from analyze import Analysis, Footprint, Macs

FAR_APART = 20  # times: more than this, and an axis is logarithmic
STACKS = ("encoder", "decoder")


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
        _by_depth(axes, analyses, [analysis.head_diversity[site] for analysis in analyses], title=title)
    panels[0].set(ylabel="head diversity, Eq. 7 (higher: more)")


def _token_uniformity(panels: list[Axes], analyses: list[Analysis]) -> None:
    for axes, stack in zip(panels, STACKS, strict=True):
        _by_depth(axes, analyses, [analysis.token_uniformity[stack] for analysis in analyses], title=stack)
    panels[0].set(ylabel="correlation of tokens (lower: better)")


def _ffn_activation(panels: list[Axes], analyses: list[Analysis]) -> None:
    measures = {"activated": "activated neurons", "ratio": "share of the neurons", "efficiency": "per 1000 parameters"}
    for row, stack in enumerate(STACKS):
        for axes, (measure, title) in zip(panels[3 * row : 3 * row + 3], measures.items(), strict=True):
            scale = 1000 if measure == "efficiency" else 1
            lines = [[getattr(layer, measure) * scale for layer in analysis.ffn[stack]] for analysis in analyses]
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
    labels, unit = [as_text(analysis.label) for analysis in analyses], "million MACs, 20 source, 20 target tokens"
    titles = {"macs": "nothing kept, as the papers count", "macs_cached": "with a cache"}
    for axes, (field, title) in zip(panels, titles.items(), strict=True):
        _draw_bars(
            axes, labels, [_parts(getattr(analysis, field), 1) for analysis in analyses], xlabel=unit, title=title
        )
    panels[1].set(yticklabels=[])


def _memory(panels: list[Axes], analyses: list[Analysis]) -> None:
    labels, peaks = (
        [as_text(analysis.label) for analysis in analyses],
        [{"_": analysis.own_memory_bytes / 1e6} for analysis in analyses],
    )
    matrices = [_parts(analysis.footprint, 4) for analysis in analyses]
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


def draw_spectrum(axes: Axes, values: Sequence[float], *, color: str) -> None:
    """Draw the singular values (descending) of a matrix, relative to the largest."""
    if values[0] > 0:
        heights = [value / values[0] for value in values]
        axes.plot(range(1, len(values) + 1), heights, color=color, linewidth=1, alpha=0.6)
