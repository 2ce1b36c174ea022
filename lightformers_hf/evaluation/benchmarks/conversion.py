"""How fast a whole checkpoint is factorized, beside a full `torch.linalg.svd` of each matrix in the same process."""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...conversion.forms.svd import decompose
from ...conversion.rules import rank_for_ratio
from ...conversion.workers import map_in_threads
from ..benchmarks import teacher_class
from ..speed import child_command, child_environment

RATIO = 4.0
# Distinct matrices of a shape; a checkpoint of more repeats them, so that memory stays small.
DISTINCT = 2


class Seconds(NamedTuple):
    """Time that passed, and time the processors worked: the second is more reliable on a shared machine."""

    wall: float
    cpu: float

    @classmethod
    def since(cls, start: Seconds) -> Seconds:
        """From an earlier reading of `now` until now."""
        return cls(*(end - begin for end, begin in zip(cls.now(), start, strict=True)))

    @classmethod
    def now(cls) -> Seconds:
        """The clocks as they stand."""
        return cls(time.perf_counter(), time.process_time())


@dataclass(frozen=True)
class ConversionBenchmark:
    """Measurements.

    Attributes:
        shapes: name of the checkpoint whose shapes were used.
        threads: workers of ours, BLAS threads of the full decomposition.
        full_seconds: full `torch.linalg.svd` of every matrix, one after another; one entry a run.
        full_samples: of how many matrices of a shape that time was taken, to be multiplied by their number.
        our_seconds: `decompose` and `truncate` of every matrix; one entry a run.
        worst_excess: over all distinct matrices, Frobenius error / Eckart-Young optimum − 1.
    """

    shapes: str
    threads: int
    full_seconds: list[Seconds]
    full_samples: int
    our_seconds: list[Seconds]
    worst_excess: float

    @property
    def speedup(self) -> Seconds:
        """Median over the runs of the full decomposition's time divided by ours."""
        pairs = zip(self.full_seconds, self.our_seconds, strict=True)
        return _median([Seconds(full.wall / ours.wall, full.cpu / ours.cpu) for full, ours in pairs])


def _median(times: list[Seconds]) -> Seconds:
    return Seconds(*(statistics.median(column) for column in zip(*times, strict=True)))


def trained_like(m: int, n: int, seed: int) -> Tensor:
    """A float32 m×n matrix with no structure but a decaying spectrum: Gaussian, its columns weighted by i^(-1/4)."""
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(n, n, generator=generator)).Q
    return torch.randn(m, n, generator=generator) * torch.arange(1, n + 1) ** -0.25 @ rotation


def random_teacher(shapes: str) -> PreTrainedModel:
    """A checkpoint of these shapes with random weights.

    Raises:
        ValueError: unknown shapes.
    """
    model_class, config = teacher_class(shapes)
    model = model_class(config)
    if shapes.startswith("flan-t5"):  # its output layer is no copy of the table, which a new T5's always is
        model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
        model.all_tied_weights_keys.pop("lm_head.weight")
    if getattr(model.config, "forced_eos_token_id", None) is None:
        # M2M100 begins with the token that ends, which its table, as output layer, would find the likeliest at once.
        model.generation_config.suppress_tokens = [model.config.eos_token_id]
    return model


def matrices_of(shapes: str) -> dict[tuple[int, int], int]:
    """How many matrices m×n of each kind a checkpoint has, largest first; a shared table counts once.

    Raises:
        ValueError: unknown shapes.
    """
    with torch.device("meta"):
        model = random_teacher(shapes)
    counts: Counter[tuple[int, int]] = Counter()
    stored = {id(tensor) for _, tensor in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) and "position" not in name and id(module.weight) in stored:
            stored.remove(id(module.weight))
            rows, columns = module.weight.shape
            counts[(rows, columns) if isinstance(module, nn.Embedding) else (columns, rows)] += 1
    return dict(sorted(counts.items(), key=lambda item: -item[0][0] * item[0][1]))


def benchmark_conversion(shapes: str, *, runs: int = 3, samples: int | None = None) -> ConversionBenchmark:
    """Factorize matrices of a checkpoint's shapes at ratio 4 (Eq. 12) and time it, interleaved with full SVDs.

    Threads are torch's (`OMP_NUM_THREADS`): so many workers with one BLAS thread each for ours, so many BLAS threads
    for the full decomposition.

    Args:
        runs: how often both are measured.
        samples: time at most so many full decompositions of a shape and multiply; all of them unless given.

    Raises:
        ValueError: unknown shapes, or `runs` or `samples` below 1.
    """
    counts = matrices_of(shapes)
    if runs < 1 or (samples is not None and samples < 1):
        raise ValueError(f"runs is {runs} and samples is {samples}, expected 1 or more")
    distinct = {
        (m, n): [trained_like(m, n, seed) for seed in range(min(count, DISTINCT))] for (m, n), count in counts.items()
    }

    def all_matrices() -> Iterator[Tensor]:
        for shape, count in counts.items():
            yield from (distinct[shape][index % len(distinct[shape])] for index in range(count))

    full_seconds, our_seconds = [], []
    for _ in range(runs):
        wall = cpu = 0.0
        for shape, count in counts.items():
            timed = min(count, samples or count)
            start = Seconds.now()
            for index in range(timed):
                torch.linalg.svd(distinct[shape][index % len(distinct[shape])], full_matrices=False)
            spent = Seconds.since(start)
            wall, cpu = wall + spent.wall * count / timed, cpu + spent.cpu * count / timed
        full_seconds.append(Seconds(wall, cpu))
        start = Seconds.now()
        for _ in map_in_threads(_factorize, all_matrices()):
            pass
        our_seconds.append(Seconds.since(start))
    most = max(counts.values())
    return ConversionBenchmark(
        shapes=shapes,
        threads=torch.get_num_threads(),
        full_seconds=full_seconds,
        full_samples=min(most, samples or most),
        our_seconds=our_seconds,
        worst_excess=max(excess(matrix) for matrices in distinct.values() for matrix in matrices),
    )


# Run in a separate process, so that only the conversion is in its memory.
_CONVERT = """
import json, logging, sys
from lightformers_hf import convert
from lightformers_hf.conversion import workers
from lightformers_hf.evaluation.benchmarks.conversion import Seconds
from lightformers_hf.evaluation.speed import peak_memory
source, output, options = sys.argv[1:]
found, taken = [], logging.Handler()
taken.emit = lambda record: found.append(record.args)
workers.logger.addHandler(taken)
workers.logger.setLevel(logging.INFO)
libraries, start = peak_memory(), Seconds.now()
convert(source, output, **json.loads(options))
print(json.dumps([found, Seconds.since(start), peak_memory(), libraries]))
"""


@dataclass(frozen=True)
class WholeConversion:
    """Time and memory of `convert` for a whole checkpoint.

    Attributes:
        shapes: name of the checkpoint whose shapes were used.
        options: of `convert`.
        threads: PyTorch's.
        checkpoint_bytes: of the source.
        peak_bytes: resident memory of the process at most.
        libraries_bytes: of which Python, PyTorch and Transformers took so much before.
        steps: what each step took; loading, writing and algebra between them is in `total` alone.
        total: from the call to its return.
    """

    shapes: str
    options: dict[str, object]
    threads: int
    checkpoint_bytes: int
    peak_bytes: int
    libraries_bytes: int
    steps: dict[str, Seconds]
    total: Seconds


def time_conversion(shapes: str, **options: object) -> WholeConversion:
    """Convert a checkpoint of these shapes with random weights in a process of its own; its bars go to stderr.

    Translations of random weights are as long as they may be, so that calibration takes longer than that of a trained
    checkpoint. Writes about three times the checkpoint's size into the folder for temporary files, and removes it.

    Args:
        options: of `convert`; by default the default conversion, at the default ratio.

    Raises:
        ValueError: unknown shapes, or the conversion failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")
        model = random_teacher(shapes)
        model.save_pretrained(source)
        del model
        size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
        command = child_command(_CONVERT, str(source), str(Path(folder, "output")), json.dumps(options))
        done = subprocess.run(command, env=child_environment(), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ValueError(f"the conversion of {shapes} failed: see above")
    found, total, peak, libraries = json.loads(done.stdout.splitlines()[-1])
    steps = {name: Seconds(*seconds) for name, *seconds in found}
    return WholeConversion(shapes, options, torch.get_num_threads(), size, peak, libraries, steps, Seconds(*total))


def show_whole(result: WholeConversion) -> list[Table | str]:
    """Return what a whole conversion took as a table."""
    options = ", ".join(f"{name} {value}" for name, value in result.options.items()) or "default options"
    table = Table(title=f"{result.shapes}: convert with {options}", caption=f"{result.threads} threads")
    for heading in ("step", "seconds", "CPU seconds"):
        table.add_column(heading, justify="left" if heading == "step" else "right")
    rows = {**result.steps, "all, with what is between": result.total}
    for name, seconds in rows.items():
        table.add_row(name, f"{seconds.wall:,.1f}", f"{seconds.cpu:,.1f}")
    return [
        table,
        f"checkpoint {result.checkpoint_bytes / 1e6:,.0f} MB, peak memory {result.peak_bytes / 1e6:,.0f} MB, of which "
        f"the libraries took {result.libraries_bytes / 1e6:,.0f} MB",
    ]


def _factorize(weight: Tensor) -> tuple[Tensor, Tensor]:
    m, n = weight.shape
    rank = rank_for_ratio(m, n, RATIO)
    return decompose(weight, name="matrix", rank=rank).truncate(rank)


def excess(weight: Tensor) -> float:
    """Frobenius error of the factors / Eckart-Young optimum − 1, the optimum from float64 singular values."""
    left, right = _factorize(weight)
    optimum = torch.linalg.svdvals(weight.double())[left.shape[1] :].norm()
    # By chunks of rows, so that the difference in float64 is never held whole.
    chunks = zip(weight.split(4096), left.split(4096), strict=True)
    errors = [torch.linalg.norm(rows.double() - part.double() @ right.double()) for rows, part in chunks]
    return (torch.stack(errors).norm() / optimum - 1).item()


def show(result: ConversionBenchmark) -> list[Table | str]:
    """Return a measurement as a table."""
    counts = matrices_of(result.shapes)
    parameters = sum(m * n * count for (m, n), count in counts.items())
    table = Table(
        title=f"{result.shapes}: {sum(counts.values())} matrices, {parameters / 1e6:.0f}M parameters, ratio {RATIO:g}",
        caption=f"{len(result.our_seconds)} interleaved runs, {result.threads} threads, medians",
    )
    for heading in ("", "seconds", "speed", "CPU seconds", "speed"):
        table.add_column(heading, justify="right" if heading else "left")
    rows = {
        "full torch.linalg.svd": (_median(result.full_seconds), Seconds(1.0, 1.0)),
        "truncated factorization": (_median(result.our_seconds), result.speedup),
    }
    for name, (seconds, speed) in rows.items():
        cells = [cell for pair in zip(seconds, speed, strict=True) for cell in (f"{pair[0]:.2f}", f"{pair[1]:.2f}×")]
        table.add_row(name, *cells)
    parts = [table, f"worst error above the Eckart-Young optimum: {result.worst_excess:.1e} (relative)"]
    if result.full_samples < max(counts.values()):
        note = f"at most {result.full_samples} matrices of a shape timed, multiplied by their number"
        parts.append(f"full torch.linalg.svd: {note}")
    return parts
