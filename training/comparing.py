"""Functions of the comparisons: runs of the training scripts, their outputs, tables and pictures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean, stdev
from typing import TypeVar

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from lightformers_hf.evaluation.quality import Difference, difference
from lightformers_hf.evaluation.speed import PARENT
from lightformers_hf.recovery import find_last_checkpoint, remove_checkpoints

ROOM = 160  # columns of a table in a file or a pipe


def show(*tables: Table) -> None:
    """Print tables, as wide as the terminal is; where there is none, wide enough for a comparison's columns."""
    console = Console()
    if not (console.is_terminal or "COLUMNS" in os.environ):
        console.width = ROOM
    console.print(*tables)


def compare_outputs(folder: Path, other: Path, name: str, references: list[str]) -> Difference:
    """How much higher the BLEU of the run in `folder` is than that of another, on the test `name`."""
    outputs = [
        Path(run, f"{name}_translations.txt").read_text(encoding="utf-8").split("\n")[:-1] for run in (folder, other)
    ]
    return difference(*outputs, references)


def score_key(test: str, score: str) -> str:
    """Name of a score in a row of a comparison; with the test's name if there are several tests."""
    return score if test == "test" else f"{test}_{score}"


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return the mean of the figures of several runs, and their standard deviation: `35.1 ± 0.2`."""
    return f"{fmean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


Key = TypeVar("Key")


def run_all(script: Path, runs: Mapping[Key, tuple[list[str], Path]], *, jobs: int) -> dict[Key, dict]:
    """The test results of `script` for {key: (options, output folder)}, each as `run_once` has it, `jobs` at once.

    When one fails, those under way are finished, none is begun any more, and its error is raised.
    """
    found = {}
    with ThreadPoolExecutor(jobs) as pool:
        begun = {pool.submit(run_once, script, *run, one_thread=jobs > 1): key for key, run in runs.items()}
        try:
            for job in tqdm(as_completed(begun), desc="runs", total=len(begun)):
                found[begun[job]] = job.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return found


def run_once(script: Path, options: list[str], folder: Path, *, one_thread: bool) -> dict:
    """The test results of `script` with `options` and the output folder `folder`; run only if they are not there yet.

    An interrupted run resumes from its last checkpoint, if its options let it write checkpoints.

    Args:
        one_thread: for several runs at once.

    The output of the script goes to `<folder>.log`. Raises `ChildProcessError` if it fails, and `ValueError` if the
    results in the folder are those of other options.
    """
    results, record = folder / "test_results.json", folder / "options.json"
    same = record.is_file() and json.loads(record.read_text(encoding="utf-8")) == options
    if results.is_file() and record.is_file() and not same:
        raise ValueError(f"{folder} holds the results of other options ({record}): choose another output folder.")
    if not results.is_file():
        begun = same and find_last_checkpoint(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if not begun:  # checkpoints of other options would pass for this run's, if it is interrupted early
            remove_checkpoints(folder)
        record.write_text(json.dumps(options, indent=1) + "\n", encoding="utf-8")
        how = ["--resume-from-checkpoint"] if begun else ["--overwrite-output"]
        command = [sys.executable, str(script), *options, "--output-dir", str(folder), *how]
        environment = os.environ | {PARENT: str(os.getpid())} | ({"OMP_NUM_THREADS": "1"} if one_thread else {})
        with open(folder.parent / f"{folder.name}.log", "a" if begun else "w", encoding="utf-8") as log:
            done = subprocess.run(command, stdout=log, stderr=log, env=environment, check=False)
        if done.returncode:
            raise ChildProcessError(f"{folder} failed; see {log.name}")
    return json.loads(results.read_text(encoding="utf-8"))


def save_pictures(picture: Path, paint: Callable[[list], None], *, rows: int = 1, columns: int = 1) -> None:
    """Write `<picture>.png` for light pages and `<picture>-dark.png` for dark ones; `paint` gets the panels."""
    from lightformers_hf.evaluation.plots import save_picture  # needs matplotlib

    for ending, dark in ((".png", False), ("-dark.png", True)):
        save_picture(
            picture.with_name(picture.name + ending), paint, rows=rows, columns=columns, height=1 + 4 * rows, dark=dark
        )
