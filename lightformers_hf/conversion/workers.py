"""Worker threads, accelerators and processes that share the work of a conversion, and its steps."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import nn
from tqdm.auto import tqdm

from ..processors import (
    EvenProducts,
    PackedAttention,
    bf16_support,
    cast_once,
    give_back_memory,
    has_fast_bf16,
    use_threads,
)

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")
CPU = torch.device("cpu")
# Batches that models pass at the same time: each needs memory for the activations of a layer.
AT_ONCE = 4
# Worker threads of the conversion that runs, `None` outside `share_cores`; and whether it shows progress bars.
_worker_count: int | None = None
_progress = False


@contextmanager
def share_cores(*, progress: bool = False) -> Iterator[None]:
    """Inside, every thread computes alone, and as many workers share the items as PyTorch had threads.

    The number of threads of a sum decides its rounding. One thread makes results independent of the number of cores.
    """
    global _worker_count, _progress
    before = _worker_count, _progress
    _worker_count, _progress = count_workers(), progress  # another thread may be in such a block
    try:
        with use_threads(1):
            yield
    finally:
        _worker_count, _progress = before


def count_workers() -> int:
    """Return the number of worker threads: that of `share_cores`, or of PyTorch's threads outside it."""
    return _worker_count or torch.get_num_threads()


def shows_progress() -> bool:
    """Return whether the conversion that runs shows progress bars."""
    return _progress


def algebra_device(device: torch.device) -> torch.device:
    """Return the device of decompositions: the one given if it supports float64, else the CPU."""
    return CPU if device.type == "mps" else device


def describe_work(device: torch.device) -> dict[str, bool | str]:
    """Return the setting that decides the rounding of a conversion: bfloat16 or not, and the reason."""
    fast = device.type == "cpu" and has_fast_bf16()
    return {"bf16": fast, "reason": bf16_support()[1] if device.type == "cpu" else f"models run on {device.type}"}


def fast_products(device: torch.device) -> AbstractContextManager:
    """Matrix multiplications in bfloat16 if the processor supports it; their results are summed in float32."""
    return torch.autocast("cpu", torch.bfloat16, enabled=device.type == "cpu" and has_fast_bf16())


def packed_attention(batch: Mapping[str, torch.Tensor]) -> AbstractContextManager:
    """`PackedAttention` for a batch with texts in one row; it would slow down others."""
    return PackedAttention() if "decoder_position_ids" in batch else nullcontext()


@contextmanager
def fast_passes(device: torch.device) -> Iterator[None]:
    """`fast_products` of few shapes, for passes of a model's layers over batches of many lengths."""
    with fast_products(device), EvenProducts(shapes=0):
        yield


def cast_weights(module: nn.Module) -> AbstractContextManager:
    """Inside, the matrices of a module are in the type that `fast_products` multiplies, not cast for every product."""
    on_cpu = all(parameter.device.type == "cpu" for parameter in module.parameters())
    return cast_once(module) if on_cpu and has_fast_bf16() else nullcontext()


def map_in_threads(
    function: Callable[[Item], Result], items: Iterable[Item], device: torch.device = CPU, most: int | None = None
) -> Iterator[Result]:
    """Results of `function` in the order of `items`; on a CPU computed by worker threads with one BLAS thread each.

    Args:
        items: largest first, so that none is left for the end.
        device: where `function` computes.
        most: workers at most; results are then computed ahead of the one that is taken, one for each worker.
    """
    workers = min(count_workers(), most or count_workers()) if device.type == "cpu" else 1
    if workers == 1:
        with use_threads(1) if device.type == "cpu" else nullcontext():
            yield from map(function, items)
        return
    recorded, items = torch.is_grad_enabled(), iter(items)

    def work(item: Item) -> Result:
        with torch.set_grad_enabled(recorded):  # a setting of each thread
            return function(item)

    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool, use_threads(1):
        ahead = deque(pool.submit(work, item) for item in islice(items, most and workers))
        while ahead:
            result = ahead.popleft().result()
            ahead.extend(pool.submit(work, item) for item in islice(items, 1))
            yield result


class Step(tqdm):
    """Progress bar of a step. At its end, its time goes to the log (INFO), and freed memory to the system."""

    def __init__(self, name: str, items: Iterable[Any] | None = None, *, unit: str, total: int | None = None):
        scaled = unit == "parameter"
        super().__init__(items, desc=name, unit=unit, unit_scale=scaled, total=total, disable=not _progress)
        self._name, self._begun = name, (time.perf_counter(), time.process_time())

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        self._end()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._end()

    def _end(self) -> None:
        give_back_memory()
        clock, processor = time.perf_counter() - self._begun[0], time.process_time() - self._begun[1]
        logger.info("%s took %.1f s, %.1f s of processor time", self._name, clock, processor)
