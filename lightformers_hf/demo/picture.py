"""The demo's picture: how the two starts recover, and what is left of size, time and quality."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from matplotlib.axes import Axes

from ..evaluation.pages.plots import save_picture

BARS = {  # row of the results → how the picture calls it
    "teacher": "teacher, transformers",
    "teacher-deployed": "teacher, int8",
    "deployed": "recovered, int8",
    "recovered-random": "random weights, trained as long",
}


def draw(file: BinaryIO, *, starts: Mapping[str, Path], results: Mapping[str, Any]) -> None:
    """Write a PNG with two panels, to be read at 800 pixels' width.

    Left: training loss of the recovery from each start, {name: folder}, logarithmic. Right: size, time for a token and
    BLEU as shares of the teacher's, of `results.json`.
    """

    def paint(panels: list[Axes]) -> None:
        left, right = panels
        for color, (name, folder) in zip(("C2", "C3"), starts.items(), strict=True):
            losses = json.loads((folder / "losses.json").read_text(encoding="utf-8"))
            left.plot(*zip(*losses, strict=True), label=name, color=color)
        left.set(yscale="log", xlabel="step", ylabel="training loss, nats a token", title="Training at equal size")
        left.legend()
        draw_shares(right, results["models"])
        right.set(title="What is left of the teacher's")

    save_picture(file, paint, columns=2)


def draw_shares(axes: Axes, models: Mapping[str, Mapping[str, float]]) -> None:
    """Bars of size, time and BLEU relative to the row `teacher`, and each value; of what is not timed BLEU alone."""
    measures: dict[str, Callable[[Mapping[str, float]], float]] = {
        "MB": lambda row: row["bytes"] / 1e6,
        "ms a token": lambda row: 1000 / row["tokens_per_second"],
        "BLEU": lambda row: row["bleu"],
    }
    for group, (measure, read) in enumerate(measures.items()):
        full = read(models["teacher"])
        for place, (name, label) in enumerate(BARS.items()):
            if measure != "BLEU" and "tokens_per_second" not in models[name]:
                continue
            value, y = read(models[name]), group + 0.2 * (place - 1.5)
            share = value / full if full else 0
            axes.barh(y, share, height=0.18, color=f"C{place}", label=label if measure == "BLEU" else None)
            axes.annotate(f" {value:.3g}", (share, y), va="center", fontsize=10)
    axes.set(yticks=range(len(measures)), yticklabels=measures, xlim=(0, 1.15), xticks=(0, 0.25, 0.5, 0.75, 1))
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.legend(fontsize=10, loc="center right", bbox_to_anchor=(1, 0.44))
