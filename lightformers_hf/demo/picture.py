"""The demo's picture: how the two starts recover, and what the truncation leaves of the singular values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import BinaryIO

import torch
from matplotlib.axes import Axes
from safetensors import safe_open

from ..evaluation.pages.plots import save_picture
from ..evaluation.pages.report_plots import module_ranks

SHOWN = {  # matrix → what it is called
    "shared": "embedding",
    "encoder.layers.0.self_attn.q_proj": "encoder query",
    "decoder.layers.0.encoder_attn.v_proj": "cross-attention value",
    "decoder.layers.0.fc1": "decoder FFN",
}


def draw(file: BinaryIO, *, teacher: Path, compressed: Path, svd_start: Path, random_start: Path) -> None:
    """Write a PNG with two panels, to be read at 800 pixels' width.

    Left: training loss of the recovery from the SVD and from random weights, logarithmic. Right: singular values of
    some of the teacher's matrices, each relative to its largest, with a dot at the rank that was kept.
    """

    def paint(panels: list[Axes]) -> None:
        left, right = panels
        for folder, name in ((svd_start, "from the SVD"), (random_start, "from random weights")):
            losses = json.loads((folder / "losses.json").read_text(encoding="utf-8"))
            left.plot(*zip(*losses, strict=True), label=name)
        left.set(yscale="log", xlabel="step", ylabel="training loss, nats a token", title="Recovery at equal size")
        left.legend()

        ranks = module_ranks(compressed, SHOWN)
        with safe_open(teacher / "model.safetensors", "pt") as weights:
            for color, (module, name) in enumerate(SHOWN.items()):
                values = torch.linalg.svdvals(weights.get_tensor(f"model.{module}.weight").float())
                values = values / values[0]
                right.plot(range(1, len(values) + 1), values, label=name, linewidth=1.5)
                if rank := ranks[module]:
                    right.plot(rank, values[rank - 1], "o", color=f"C{color}", markersize=7)
        right.set(
            xlabel="number of the singular value",
            ylabel="relative to the largest",
            title="Singular values of the teacher (dot: rank kept)",
            ylim=(0, 1.02),
        )
        right.legend()

    save_picture(file, paint, columns=2)
