"""The demo's picture: how the training goes, and what is left of size, time and quality."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

from matplotlib.axes import Axes

from ..evaluation.pages.plots import save_picture


def draw(file: BinaryIO, *, losses: Sequence[tuple[int, float]], comparison: Mapping[str, Any]) -> None:
    """Write a PNG with two panels, to be read at 800 pixels' width.

    Left: training loss of the recovery by step, logarithmic. Right: size, time for a token and BLEU as shares of the
    teacher's in transformers, of an `EngineComparison`.
    """

    def paint(panels: list[Axes]) -> None:
        left, right = panels
        left.plot(*zip(*losses, strict=True), color="C2")
        left.set(yscale="log", xlabel="step", ylabel="training loss, nats a token", title="Training after conversion")
        draw_shares(right, comparison)
        right.set(title="What is left of the teacher's")

    save_picture(file, paint, columns=2)


def draw_shares(axes: Axes, comparison: Mapping[str, Any]) -> None:
    """Bars of size, time and BLEU relative to the first row of the comparison, and each value."""
    places = {(place["model"], place["form"]): place for place in comparison["deployed"]}
    rows = [
        (places[timing["model"], timing["form"]], timing["speed"]["tokens_per_second"])
        for timing in comparison["timings"]
    ]
    measures: dict[str, Callable[[Mapping[str, Any], float], float]] = {
        "MB": lambda place, speed: place["disk_bytes"] / 1e6,
        "ms a token": lambda place, speed: 1000 / speed,
        "BLEU": lambda place, speed: place["bleu"],
    }
    for group, (measure, read) in enumerate(measures.items()):
        full = read(*rows[0])
        for index, (place, speed) in enumerate(rows):
            value, y = read(place, speed), group + 0.2 * (index - (len(rows) - 1) / 2)
            share = value / full if full else 0
            label = f"{place['model']}, {place['form']}" if measure == "BLEU" else None
            axes.barh(y, share, height=0.18, color=f"C{index}", label=label)
            axes.annotate(f" {value:.3g}", (share, y), va="center", fontsize=10)
    axes.set(yticks=range(len(measures)), yticklabels=measures, xlim=(0, 1.15), xticks=(0, 0.25, 0.5, 0.75, 1))
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.legend(fontsize=10, loc="center right", bbox_to_anchor=(1, 0.79))
