"""The checkpoints that a training run writes: which of them can be gone on from."""

from __future__ import annotations

import json
import re
from pathlib import Path


def find_last_checkpoint(output_dir: str | Path) -> str | None:
    """The newest `checkpoint-<step>` folder of `output_dir` that was written to the end, or None.

    `trainer_state.json` is the last file Trainer writes: a folder without it, or with a torn one, was cut off by a
    kill. A folder whose weights or optimizer are gone (a kill while it was being deleted) does not count either.
    """
    folders = [f for f in Path(output_dir).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", f.name)]
    complete = filter(_is_complete, sorted(folders, key=lambda f: int(f.name.split("-")[1]), reverse=True))
    return next(map(str, complete), None)


def _is_complete(checkpoint: Path) -> bool:
    """Whether a run can go on from the folder."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    weights = any(checkpoint.glob("*.safetensors"))
    optimizer = any((checkpoint / name).is_file() for name in ("optimizer.pt", "optimizer.bin"))  # .bin is of FSDP
    return weights and optimizer and all((checkpoint / name).is_file() for name in ("config.json", "scheduler.pt"))
