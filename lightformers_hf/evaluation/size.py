"""How large a checkpoint is: parameters, bytes on disk, memory while it translates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def unique_parameters(model: PreTrainedModel) -> int:
    """The number of scalars that were learned: a shared or tied tensor counts once, buffers do not count."""
    return sum(parameter.numel() for _, parameter in learned_parameters(model))


def learned_parameters(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Name and tensor of every parameter that was learned, a shared or tied one once.

    Tables that the class computes instead of storing them (Marian's sinusoidal positions are `nn.Parameter`s) are not
    among them, so that two ways of holding the same positions give the same number.
    """
    computed = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    yield from ((name, parameter) for name, parameter in model.named_parameters() if name not in computed)


def weight_bytes(name: str | os.PathLike) -> int:
    """Bytes of the weight files that `from_pretrained` reads for a local folder or a model of the Hub.

    Of several formats side by side only the one that is loaded counts, of shards those that the index names.
    """
    name = os.fspath(name)
    for candidate in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
        found = cached_file(name, candidate, _raise_exceptions_for_missing_entries=False)
        if found is None:
            continue
        files = [Path(found)]
        if candidate.endswith(".index.json"):
            shards = set(json.loads(Path(found).read_text())["weight_map"].values())
            files = [Path(found).parent / shard for shard in sorted(shards)]
        return sum(file.stat().st_size for file in files)
    raise FileNotFoundError(f"{name} has no weight file: expected {SAFE_WEIGHTS_NAME} or {SAFE_WEIGHTS_INDEX_NAME}.")


def peak_memory() -> int:
    """The largest resident memory this process ever had, in bytes, mapped files included.

    Linux: VmHWM, because `ru_maxrss` starts from the size of the process that started this one.
    """
    status = Path("/proc/self/status")
    if status.exists():
        kibibytes = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(kibibytes.split()[1]) * 1024
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def translation_memory(name: str | os.PathLike, sentences: list[str], **generation) -> tuple[int, int]:
    """Peak memory in bytes of a fresh process that loads a checkpoint and translates, and the libraries' part of it.

    The process has one thread and translates `sentences` one at a time; the second number is its peak before the
    checkpoint is loaded (Python, PyTorch, Transformers).
    """
    program = "from lightformers_hf.evaluation.size import _measure; _measure()"
    task = json.dumps({"name": os.fspath(name), "sentences": sentences, "generation": generation})
    child = subprocess.run(
        [sys.executable, "-c", program],
        input=task,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    if child.returncode:
        raise ValueError(f"{name} could not be measured in a process of its own: {child.stderr.strip()[-500:]}")
    peak, libraries = json.loads(child.stdout)
    return peak, libraries


def _measure() -> None:
    """The process of `translation_memory`: a task on stdin, `[peak, libraries]` on stdout."""
    from .translate import load_model, translate

    task = json.load(sys.stdin)
    libraries = peak_memory()
    translate(task["sentences"], *load_model(task["name"]), batch_size=1, **task["generation"])
    print(json.dumps([peak_memory(), libraries]))
