"""What the page of `lightformers report` shows: functions that paint panels, in the style of `plots`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ...conversion.report import MatrixReport
from ...loading import load_skeleton
from ...matrices import rank_of
from ..quality import METRICS
from .plots import as_text, draw_spectrum

KINDS = {"embedding": "embedding", "attention": "attention", "ffn": "feed-forward"}
PLACES = ("self-attention", "cross-attention", "feed-forward")
QUALITY = (*METRICS, "accuracy")  # measures that trainings log, 0 to 100


@dataclass(frozen=True)
class Point:
    """A model in the picture of quality against size and speed."""

    name: str
    quality: float
    parameters: int
    speed: float | None
    is_teacher: bool = False


def module_ranks(folder: Path, names: Iterable[str]) -> dict[str, int | None]:
    """r of matrices of the model in a folder, by their names in a report; `None` for those that are no product of two.

    Raises `KeyError` for a name that the model has no module of.
    """
    modules = {name.removeprefix("model."): module for name, module in load_skeleton(folder).named_modules()}
    return {name: rank_of(modules[name]) for name in names}


def spectra(
    panels: list[Axes],
    matrices: Sequence[MatrixReport],
    values: dict[str, Sequence[float]],
    ranks: dict[str, int | None],
) -> None:
    """Three panels, a kind of matrix each: the teacher's singular values, with a dot at the rank that was kept.

    Args:
        values: singular values by the names of `matrices`; a matrix without any is not drawn.
        ranks: of those that became products of two; the others have no dot.
    """
    for color, (axes, (kind, title)) in enumerate(zip(panels, KINDS.items(), strict=True)):
        for matrix in matrices:
            if matrix.kind == kind and matrix.name in values:
                draw_spectrum(axes, values[matrix.name], color=f"C{color}", rank=ranks.get(matrix.name))
        axes.set(title=title, ylim=(0, 1.02), xlabel="number of the singular value")
    panels[0].set(ylabel="relative to the largest")


def errors(panels: list[Axes], matrices: Sequence[MatrixReport]) -> None:
    """Two panels, encoder and decoder: the relative error of every matrix by its layer, and the mean of each block."""
    for axes, stack in zip(panels, ("encoder", "decoder"), strict=True):
        places = {place: defaultdict(list) for place in PLACES}
        for matrix in matrices:
            if place := _place(matrix, stack):
                layer, block = place
                places[block][layer].append(matrix.relative_error)
        for color, (block, layers) in enumerate(places.items(), start=1):
            if layers:
                depths = sorted(layers)
                means = [fmean(layers[depth]) for depth in depths]
                axes.plot([depth + 1 for depth in depths], means, "-", color=f"C{color}", label=block)
                dots = [(depth + 1, error) for depth in depths for error in layers[depth]]
                axes.plot(*zip(*dots, strict=True), "o", color=f"C{color}", markersize=5, alpha=0.7)
        for matrix in matrices:
            if matrix.kind == "embedding":
                axes.axhline(matrix.relative_error, color="C0", linestyle="--", label="embedding")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set(title=stack, xlabel="layer")
        axes.set_ylim(bottom=0)
    panels[0].set(ylabel="relative error")


def _place(matrix: MatrixReport, stack: str) -> tuple[int, str] | None:
    """Layer (from 0) and block of a matrix of that stack, `None` for one of neither."""
    found = re.match(rf"{stack}\.layers\.(\d+)\.", matrix.name)
    if found is None or matrix.kind == "embedding":
        return None
    if matrix.kind == "ffn":
        return int(found[1]), "feed-forward"
    return int(found[1]), "cross-attention" if "encoder_attn" in matrix.name else "self-attention"


def has_errors(matrices: Sequence[MatrixReport]) -> bool:
    """Whether `errors` would find a matrix in a layer of which something is lost."""
    return any(
        matrix.relative_error and (_place(matrix, "encoder") or _place(matrix, "decoder")) for matrix in matrices
    )


def trade_off(panels: list[Axes], points: Sequence[Point], *, quality: str, speed: str) -> None:
    """One panel or two: quality against parameters, and against speed, of models and of their teacher (a square).

    Args:
        quality, speed: what the axes are called.
    """
    by_size = [(point, point.parameters / 1e6) for point in points]
    by_speed = [(point, point.speed) for point in points if point.speed is not None]
    for axes, placed, label in zip(panels, (by_size, by_speed), ("million parameters", speed), strict=False):
        for point, x in placed:
            color, marker = ("C1", "s") if point.is_teacher else ("C0", "o")
            axes.plot(x, point.quality, marker, color=color, markersize=8, label="teacher" * point.is_teacher or None)
            # Away from the nearer edge, so that no name leaves the picture.
            left = x > sum(other for _, other in placed) / len(placed)
            axes.annotate(
                as_text(point.name),
                (x, point.quality),
                xytext=(-8 if left else 8, 0),
                textcoords="offset points",
                ha="right" if left else "left",
                va="center",
                fontsize=10,
            )
        axes.margins(x=0.15, y=0.2)
        axes.set(xlabel=label)
    panels[0].set(ylabel=quality)


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
    """One panel or two: losses over steps, and what else was measured on the validation data."""
    # What is trained by may hold more than the labels' loss: the teacher's predictions, and its states.
    names = {"loss": "training, all that is learned from", "eval_loss": "validation, labels alone"}
    for color, (name, curve) in enumerate(sorted(losses.items(), reverse=True)):
        marker = "o-" if len(curve) == 1 else "-"
        panels[0].plot(*zip(*curve, strict=True), marker, color=f"C{color}", label=names[name])
    panels[0].set(xlabel="step", ylabel="loss, nats a token")
    for axes in panels[1:]:
        for color, (name, curve) in enumerate(qualities.items(), start=2):
            axes.plot(*zip(*curve, strict=True), "o-", color=f"C{color}", markersize=5, label=name)
        axes.set(xlabel="step", ylabel="validation, quality")
