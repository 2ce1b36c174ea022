"""What matrix products cost on this machine: microseconds on one core, batch 1, fp32.

A token reads every weight of the decoder once. What stays in the processor's cache until the next token is read
several times faster than what does not, so that a model with a quarter of the weights can be ten times as fast.
Products are timed with their weights in the cache and out of it; so is how large a model may be before it drops out.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor, nn

from ... import __version__
from ...files import write_whole
from ...processors import use_threads

Number: TypeAlias = int | float | Tensor
# A timer: what is to be timed → seconds that it takes once.
Timer = Callable[[Callable[[], object]], float]

CACHED_WIDTHS = (8, 64, 256, 512)
WIDTHS = (*CACHED_WIDTHS, 2048)
CACHED, UNCACHED = 3e6, 80e6  # bytes of weights that are in the cache of any machine, and of none
BETWEEN = (6e6, 10e6, 14e6, 20e6, 28e6, 40e6)
SENTENCE_ROWS = 24  # rows of the products of a whole sentence; longer and shorter ones are proportional
MOST_MATRICES = 2000
ROUNDS, LEAST_SECONDS = 7, 2e-3
VERSION = 4  # of the file, and of how products are timed


# The processor's time, where the system counts it finely: while other work has the core, it stands still.
clock = time.thread_time if time.get_clock_info("thread_time").resolution < 1e-5 else time.perf_counter


def median_seconds(run: Callable[[], object]) -> float:
    """Seconds of a call: the median of some rounds, each as many calls as fill two milliseconds."""
    run()
    start = clock()
    run()
    calls = max(1, round(LEAST_SECONDS / max(clock() - start, 1e-9)))
    rounds = []
    for _ in range(ROUNDS):
        start = clock()
        for _ in range(calls):
            run()
        rounds.append((clock() - start) / calls)
    return median(rounds)


@contextmanager
def one_core() -> Iterator[None]:
    """One thread and no gradients inside."""
    with use_threads(1), torch.inference_mode():
        yield


def time_product(m: int, n: int, working_set: float, *, rows: int = 1, timer: Timer = median_seconds) -> float:
    """Microseconds of (rows×m)·(m×n), going round as many matrices as fill `working_set` bytes."""
    count = min(max(1, int(working_set / (4 * m * n))), MOST_MATRICES)
    states, weights = torch.ones(rows, m), torch.full((count, n, m), 0.01).unbind()

    def run() -> None:
        for weight in weights:
            nn.functional.linear(states, weight)

    return timer(run) / count * 1e6


def _between(grid: Sequence[float], value: Number) -> tuple[Tensor, Tensor]:
    """Index of the grid's point below `value`, and the share of the way to the next (outside: below 0, above 1)."""
    points, value = torch.tensor(grid, dtype=torch.float64), torch.as_tensor(value, dtype=torch.float64)
    index = (torch.searchsorted(points, value.contiguous(), right=True) - 1).clamp(0, len(grid) - 2)
    return index, (value - points[index]) / (points[index + 1] - points[index])


@dataclass(frozen=True)
class Table:
    """Microseconds of m×n products, one row for each m; bilinear between the shapes measured, and beyond them."""

    inputs: Sequence[int]
    outputs: Sequence[int]
    microseconds: Sequence[Sequence[float]]

    def __call__(self, m: Number, n: Number) -> Tensor:
        """Microseconds of m×n; either may be a tensor."""
        values = torch.tensor(self.microseconds, dtype=torch.float64)
        (row, across), (column, along) = _between(self.inputs, m), _between(self.outputs, n)
        low = torch.lerp(values[row, column], values[row, column + 1], along)
        high = torch.lerp(values[row + 1, column], values[row + 1, column + 1], along)
        return torch.lerp(low, high, across).clamp(min=0)


@dataclass(frozen=True)
class MachineCosts:
    """Costs of products on one machine, all in microseconds.

    Attributes:
        cached, uncached: of one row.
        sentence: of `SENTENCE_ROWS` rows, whose weights are not in the cache.
        working_sets, misses: a model that reads so many bytes for a token is so far from `cached` to `uncached`.
        overheads: kind of model → what is no product (`sentence_costs`).
    """

    cached: Table
    uncached: Table
    sentence: Table
    working_sets: Sequence[float]
    misses: Sequence[float]
    overheads: dict[str, list[float]] = field(default_factory=dict)

    def row(self, m: Number, n: Number, working_set: float = UNCACHED) -> Tensor:
        """One row times an m×n matrix in a model that reads `working_set` bytes of weights for a token."""
        working_set = min(max(working_set, self.working_sets[0]), self.working_sets[-1])
        index, share = _between(self.working_sets, working_set)
        misses = torch.tensor(self.misses, dtype=torch.float64)
        return torch.lerp(self.cached(m, n), self.uncached(m, n), torch.lerp(misses[index], misses[index + 1], share))

    def rows(self, m: Number, n: Number, count: float) -> Tensor:
        """`count` rows, a sentence's, times an m×n matrix."""
        return self.sentence(m, n) * (count / SENTENCE_ROWS)


def measure_machine(timer: Timer = median_seconds) -> MachineCosts:
    """Measure every table: some twenty seconds."""

    def table(inputs: Sequence[int], outputs: Sequence[int], working_set: float, **choice: Any) -> Table:
        return Table(
            inputs,
            outputs,
            [[time_product(m, n, working_set, timer=timer, **choice) for n in outputs] for m in inputs],
        )

    with one_core():
        cached = table(CACHED_WIDTHS, CACHED_WIDTHS, CACHED)
        uncached = table(WIDTHS, WIDTHS, UNCACHED)
        near, far = cached(512, 512).item(), uncached(512, 512).item()
        found = [time_product(512, 512, size, timer=timer) for size in BETWEEN]
        misses = [min(max((value - near) / max(far - near, 1e-9), 0.0), 1.0) for value in found]
        return MachineCosts(
            cached,
            uncached,
            sentence=table(WIDTHS, WIDTHS, UNCACHED, rows=SENTENCE_ROWS),
            working_sets=(CACHED, *BETWEEN, UNCACHED),
            misses=(0.0, *misses, 1.0),
        )


def costs_file() -> Path:
    """Where costs are kept: `lightformers_hf/costs.json` in `$XDG_CACHE_HOME`, or in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightformers_hf" / "costs.json"


@cache
def machine_name() -> str:
    """Processor, and versions of what is measured with it: costs measured with others are no use."""
    processor = platform.processor() or platform.machine()
    if (found := Path("/proc/cpuinfo")).exists():
        lines = found.read_text(encoding="utf-8", errors="replace").splitlines()
        processor = next(
            (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), processor
        )
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, lightformers_hf {__version__}"
    return f"{processor}, {torch.backends.cpu.get_cpu_capability()}, {versions}"


def _read(file: Path) -> dict:
    """What is in the file, machine → costs; nothing where there is none, or one of another version."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored["machines"] if isinstance(stored, dict) and stored.get("version") == VERSION else {}


def store_costs(costs: MachineCosts, file: Path | None = None) -> None:
    """Keep this machine's costs in `file` (default: `costs_file()`), beside those of others, if it can be written."""
    file = file or costs_file()
    machines = _read(file) | {machine_name(): asdict(costs)}
    with suppress(OSError):  # they can be measured again
        file.parent.mkdir(parents=True, exist_ok=True)
        with write_whole(file) as opened:
            opened.write(json.dumps({"version": VERSION, "machines": machines}).encode())


def machine_costs(file: Path | None = None, *, timer: Timer = median_seconds) -> MachineCosts:
    """This machine's costs from `file` (default: `costs_file()`), measured and kept there if it lacks them."""
    stored = _read(file or costs_file()).get(machine_name())
    if stored is not None:
        tables = {name: Table(**stored[name]) for name in ("cached", "uncached", "sentence")}
        return MachineCosts(**(stored | tables))
    costs = measure_machine(timer)
    store_costs(costs, file)
    return costs
