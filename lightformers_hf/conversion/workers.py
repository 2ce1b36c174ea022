"""Worker threads, accelerators and processes that share the work of a conversion, and its steps.

Processes are those that `torchrun` or `accelerate launch` start. All of them run the same program; what is shared out
is what takes long. No process continues after another failed.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..loading import check_device
from ..processors import (
    EvenProducts,
    bf16_support,
    give_back_memory,
    has_fast_bf16,
    has_fast_rounding,
    rounded_products,
    use_threads,
)

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")
# Batches that models pass at the same time: each needs memory for the outputs of a layer.
AT_ONCE = 4
# Worker threads of the conversion that runs; `None` outside `share_cores`.
_worker_count: int | None = None


@contextmanager
def share_cores() -> Iterator[None]:
    """Inside, every thread computes alone, and as many workers share the items as PyTorch had threads.

    The number of threads that share a matrix multiplication or a sum decides the order of the additions, and so the
    rounding. One thread for each makes the results independent of the number of cores.
    """
    global _worker_count
    before, _worker_count = _worker_count, torch.get_num_threads()
    try:
        with use_threads(1):
            yield
    finally:
        _worker_count = before


def count_workers() -> int:
    """Return the number of worker threads: that of `share_cores`, or of PyTorch's threads outside it."""
    return _worker_count or torch.get_num_threads()


def find_device(name: str) -> torch.device:
    """The device of that name; of several processes each gets its own accelerator.

    Raises:
        ValueError: there is none.
    """
    kind, _, number = name.partition(":")
    if not is_distributed():
        return check_device(name)
    if number:
        raise ValueError(f"device is {name!r}, but each of several processes gets its own: leave the number out")
    return check_device(team(check_device(kind)).device if kind == "cuda" else kind)


def algebra_device(device: torch.device) -> torch.device:
    """Return the device of decompositions: the one given if it supports float64, else the CPU."""
    return torch.device("cpu") if device.type == "mps" else device


def describe_work(device: torch.device) -> dict[str, bool | str]:
    """Return what decides the rounding of a conversion: bfloat16 or not, and why."""
    if device.type != "cpu":
        return {"bf16": False, "reason": f"models run on {device.type}"}
    return {"bf16": has_fast_bf16(), "reason": bf16_support()[1]}


def fast_products(device: torch.device) -> AbstractContextManager:
    """Products of a model in bfloat16 where the processor multiplies it faster than fp32; else nothing.

    For passes whose results are summed over many tokens, in fp32.
    """
    return torch.autocast("cpu", torch.bfloat16, enabled=device.type == "cpu" and has_fast_bf16())


@contextmanager
def fast_passes(device: torch.device) -> Iterator[None]:
    """`fast_products` of few shapes, for passes of a model's layers over batches of many."""
    with fast_products(device), EvenProducts(shapes=0):
        yield


def fast_sums(device: torch.device) -> AbstractContextManager:
    """`rounded_products` where those are faster, for sums over many tokens: else nothing.

    Around the work of all threads, so that none multiplies otherwise than without the others.
    """
    return rounded_products() if device.type == "cpu" and has_fast_rounding() else nullcontext()


@contextmanager
def cast_weights(module: nn.Module) -> Iterator[None]:
    """Inside, the matrices of a module are in the type that `fast_products` multiplies, not cast for every product.

    A product of few rows takes less than casting its matrix does. Tables to look up in stay as they are, also where an
    output layer multiplies by the same.
    """
    owners = [owner for owner in module.modules() if not isinstance(owner, nn.Embedding)]
    own = [(owner, name, one) for owner in owners for name, one in owner.named_parameters(recurse=False)]
    own = [(owner, name, one) for owner, name, one in own if one.ndim == 2]
    fast = all(one.device.type == "cpu" for _, _, one in own) and has_fast_bf16()
    cast: dict[int, nn.Parameter] = {}
    try:
        for owner, name, one in own if fast else ():
            if id(one) not in cast:
                cast[id(one)] = nn.Parameter(one.detach().bfloat16(), requires_grad=one.requires_grad)
            setattr(owner, name, cast[id(one)])
        yield
    finally:
        for owner, name, one in own if fast else ():
            setattr(owner, name, one)


def is_distributed() -> bool:
    """Whether this is one of several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def team(device: torch.device | None = None) -> PartialState:
    """The processes, which meet at the first call."""
    # Never made for one alone: it would decide the device of a Trainer that comes later.
    return PartialState(cpu=device is None or device.type != "cuda")


def is_main() -> bool:
    """Whether this process is the one that writes and speaks."""
    return not is_distributed() or team().is_main_process


def process_share(items: Sequence[Item]) -> Sequence[Item]:
    """This process's share: every n-th, so that of items in order of size all have alike."""
    return items[team().process_index :: team().num_processes] if is_distributed() else items


@contextmanager
def fail_together() -> Iterator[None]:
    """An error inside in any process is raised in all, with that message. All processes must enter this block.

    Collective operations belong between such blocks, never inside: a process that failed would be missed there.
    """
    if not is_distributed():
        yield
        return
    error = None
    try:
        yield
    except Exception as found:
        if getattr(found, "is_shared", False):
            raise
        error = found
    messages = [message for message in gather_from_all(error and (str(error) or type(error).__name__)) if message]
    if messages:
        error = error or ValueError(messages[0])
        error.is_shared = True  # type: ignore[attr-defined]  # a mark for the blocks around this one
        raise error


@contextmanager
def end_together() -> Iterator[None]:
    """Let no process end before the others have ended, too: launchers stop those that remain."""
    try:
        with fail_together():
            yield
    except Exception:
        if is_distributed():
            team().wait_for_everyone()
        raise


def sum_over_all(tensor: Tensor) -> Tensor:
    """The sum of a tensor over all processes."""
    if not is_distributed():
        return tensor
    moved = tensor.to(team().device, copy=True)
    torch.distributed.all_reduce(moved)
    return moved.to(tensor.device)


def gather_from_all(value: Result) -> list[Result]:
    """The value of every process."""
    if not is_distributed():
        return [value]
    team()
    return gather_object([value])


def share_work(function: Callable[[Item], Result], items: Sequence[Item], device: torch.device) -> Iterator[Result]:
    """Results of `function`, computed by all processes and seen by all; those of this process first.

    Args:
        items: the largest first, in all processes in the same order.
        device: where `function` computes; on a CPU in a pool of workers.
    """
    own = []
    with fail_together():
        for result in (map_in_threads if device.type == "cpu" else map)(function, process_share(items)):
            if is_distributed():
                own.append(result)
            yield result
    if is_distributed():
        for index in range(len(items)):
            position, owner = divmod(index, team().num_processes)
            mine = owner == team().process_index
            box = broadcast_object_list([own[position] if mine else None], from_process=owner)
            if not mine:
                yield box[0]


def map_in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Results of `function` in the order of `items`, computed by worker threads.

    Every worker has one BLAS thread: several matrices side by side are faster than one matrix on several cores.
    Give the largest first, so that none is left for the end.
    """
    with ThreadPoolExecutor(count_workers(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from pool.map(function, items)


def map_in_order(function: Callable[[Item], Result], items: Iterable[Item], device: torch.device) -> Iterator[Result]:
    """Results of `function` in the order of `items`, on a CPU side by side in worker threads, `AT_ONCE` at most.

    Every worker has one BLAS thread. Results are computed ahead of the one that is taken, one for each worker.
    Gradients are recorded if they are here.
    """
    workers = min(count_workers(), AT_ONCE) if device.type == "cpu" else 1
    if workers == 1:
        with use_threads(1) if device.type == "cpu" else nullcontext():
            yield from map(function, items)
        return
    recorded, items = torch.is_grad_enabled(), iter(items)

    def work(item: Item) -> Result:
        with torch.set_grad_enabled(recorded):  # a setting of each thread
            return function(item)

    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool, use_threads(1):
        ahead = deque(pool.submit(work, item) for item in islice(items, workers))
        while ahead:
            result = ahead.popleft().result()
            ahead.extend(pool.submit(work, item) for item in islice(items, 1))
            yield result


class Step(tqdm):
    """Progress bar of a step. At its end, the log (INFO) gets its wall-clock time and its processor time.

    Freed memory then goes back to the system.

    Args:
        name: of the step.
        items: what it works on; else it is a context, and `update` counts.
        unit: of what it counts; parameters are counted in thousands and millions.
        total: how many there are, where `items` does not tell.
        shown: whether there is a bar.
    """

    def __init__(
        self, name: str, items: Iterable[Any] | None = None, *, unit: str, total: int | None = None, shown: bool
    ):
        scaled = unit == "parameter"
        super().__init__(items, desc=name, unit=unit, unit_scale=scaled, total=total, disable=not shown)
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
