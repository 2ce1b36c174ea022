"""Memory of a checkpoint while it translates, and processes of their own to measure in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

# Variable of the environment: id of the process that a measuring process works for.
PARENT = "LIGHTFORMERS_PARENT"


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


def child_environment(**variables: str) -> dict[str, str]:
    """Environment of a Python process that finds the modules that this one does: no files of the user's folder are."""
    own = {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(sys.path), PARENT: str(os.getpid())}
    return {**os.environ, **own, **variables}


def child_command(code: str, *arguments: str) -> list[str]:
    """Return the command of a Python process that runs `code` in `child_environment` and ends with this process."""
    guard = "from lightformers_hf.evaluation.memory import end_with_parent\nend_with_parent()\n"
    return [sys.executable, "-c", guard + code, *arguments]


def end_with_parent() -> None:
    """Have this process end as soon as the one that started it has ended, also by SIGKILL.

    Without `LIGHTFORMERS_PARENT` in the environment, nothing is done.
    """
    if parent := os.environ.pop(PARENT, None):  # processes that this one starts have another parent

        def wait() -> None:
            with suppress(psutil.NoSuchProcess):
                psutil.Process(int(parent)).wait()
            psutil.Process().kill()

        threading.Thread(target=wait, daemon=True).start()


def translation_memory(name: str | os.PathLike, sentences: list[str], **generation: Any) -> tuple[int, int]:
    """Peak memory in bytes of a fresh process that loads a checkpoint and translates, and the libraries' part of it.

    The process has one thread and translates `sentences` one at a time; the second number is its peak before the
    checkpoint is loaded (Python, PyTorch, Transformers).
    """
    program = "from lightformers_hf.evaluation.memory import _measure; _measure()"
    task = json.dumps({"name": os.fspath(name), "sentences": sentences, "generation": generation})
    child = subprocess.run(
        child_command(program),
        input=task,
        capture_output=True,
        text=True,
        env=child_environment(OMP_NUM_THREADS="1"),
    )
    if child.returncode:
        raise ValueError(f"{name} could not be measured in a process of its own: {child.stderr.strip()[-500:]}")
    peak, libraries = json.loads(child.stdout)
    return peak, libraries


def _measure() -> None:
    """The process of `translation_memory`: a task on stdin, `[peak, libraries]` on stdout."""
    from ..loading import load_model
    from .translate import translate

    task = json.load(sys.stdin)
    libraries = peak_memory()
    translate(task["sentences"], *load_model(task["name"]), batch_size=1, **task["generation"])
    print(json.dumps([peak_memory(), libraries]))
