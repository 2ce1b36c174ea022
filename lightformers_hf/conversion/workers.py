"""Who does the work: threads, an accelerator, or several processes that share it.

Processes are those that `torchrun` or `accelerate launch` start. All of them run the same program; what is shared out
is what takes long. No process goes on where another failed.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from threading import Condition
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn

from ..loading import check_device
from ..processors import (
    EvenProducts,
    IdleThreads,
    bf16_support,
    has_fast_bf16,
    has_fast_rounding,
    rounded_products,
    use_threads,
)

Item = TypeVar("Item")
Result = TypeVar("Result")
# Batches that models pass at the same time: each needs room for what a layer computes of it.
AT_ONCE = 4
# Worker threads of the conversion that runs; `None` outside `share_cores`.
_worker_count: int | None = None


@contextmanager
def share_cores() -> Iterator[None]:
    """Inside, every thread computes alone, and as many workers share the items as other programs leave cores.

    The number of threads that share a matrix multiplication or a sum decides the order of the additions, and so the
    rounding. One thread for each makes the results independent of the number of cores and of their load.
    """
    global _worker_count
    with IdleThreads():
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
    """Where decompositions are computed: on the device if it knows float64, which they need, else on the CPU."""
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


def own_share(items: Sequence[Item]) -> Sequence[Item]:
    """This process's share: every n-th, so that of items in order of size all have alike."""
    return items[team().process_index :: team().num_processes] if is_distributed() else items


@contextmanager
def fail_together() -> Iterator[None]:
    """What fails inside in any process, fails in all, with that message. All of them must come here.

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


def from_main(compute: Callable[[], Result]) -> Result:
    """What `compute` returns in the main process, for all; what fails there, fails in all. All must come here."""
    result = None
    with fail_together():
        if is_main():
            result = compute()
    return broadcast_object_list([result])[0] if is_distributed() else result


def share_work(function: Callable[[Item], Result], items: Sequence[Item], device: torch.device) -> Iterator[Result]:
    """Results of `function`, computed by all processes and seen by all; own ones as soon as they are there.

    Args:
        items: the largest first, in all processes in the same order.
        device: where `function` computes; on a CPU in a pool of workers.
    """
    own = []
    with fail_together():
        for result in (map_in_threads if device.type == "cpu" else map)(function, own_share(items)):
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


def map_in_threads(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int | None = None
) -> Iterator[Result]:
    """Results of `function` in worker threads, each as soon as it is there (so not in the order of `items`).

    Every worker has one BLAS thread: several matrices side by side are faster than one matrix on several cores.
    `items` is read as workers become free, so a lazily loading iterable keeps at most `workers` matrices in memory.
    Give the largest first, so that none is left for the end.

    Args:
        workers: number of threads; `count_workers` unless given.
    """
    workers = workers or count_workers()
    items = iter(items)
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        running = {pool.submit(function, item) for item in islice(items, workers)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                result = future.result()
                running.update(pool.submit(function, item) for item in islice(items, 1))
                yield result


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
        with torch.set_grad_enabled(recorded):  # of each thread its own
            return function(item)

    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool, use_threads(1):
        ahead = deque(pool.submit(work, item) for item in islice(items, workers))
        while ahead:
            result = ahead.popleft().result()
            ahead.extend(pool.submit(work, item) for item in islice(items, 1))
            yield result


class Turns:
    """Stages of work on items side by side: one item at a time is in a stage, and all go through it in their order."""

    def __init__(self) -> None:
        self._passed: Counter[str] = Counter()
        self._changed, self._failed = Condition(), False

    @contextmanager
    def take(self, stage: str, number: int) -> Iterator[None]:
        """Wait until the items before this number, which count from 0, have left the stage.

        Raises:
            RuntimeError: one of them failed, and never will.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._passed[stage] == number)
            if self._failed:
                raise RuntimeError(f"what came before number {number} has failed")
        try:
            with self.noticing():
                yield
        finally:
            with self._changed:
                self._passed[stage] += 1
                self._changed.notify_all()

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Let nobody wait for what fails inside, between stages."""
        try:
            yield
        except BaseException:
            with self._changed:
                self._failed = True
                self._changed.notify_all()
            raise
