"""What learns nothing, computed beside what learns: a teacher's outputs for the next batch, on a processor's cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch

ANSWER = "teacher"  # the entry of a batch that holds the teacher's outputs, or will


class Ahead:
    """Asks a teacher in a thread of its own, while another trains with the threads of PyTorch that are left.

    Threads that share every product of a step gain little where products are small: two take 0.77 of the time of one,
    and 0.66 if one of them is the teacher's (RESULTS.md, "In half an hour, by one command").

    How many threads there are is what `torch.get_num_threads` says outside `share`. With one there is nothing to
    share: nothing is asked ahead then.

    Args:
        ask: the teacher's outputs for a batch. It is called in the other thread, one batch after another.
    """

    def __init__(self, ask: Callable[[dict[str, Any]], Any]) -> None:
        self.ask, self.pool = ask, ThreadPoolExecutor(1, "teacher", _stay_in_autocast)
        self.last: Future | None = None

    def put(self, batch: dict[str, Any]) -> None:
        """Ask for a batch, and lay the answer that is to come into it: a `Future`, to be taken out with `take`."""
        threads = _for_teacher(torch.get_num_threads())
        if threads:
            self.last = batch[ANSWER] = self.pool.submit(self._answer, dict(batch), threads)

    @contextmanager
    def share(self) -> Iterator[None]:
        """Inside, PyTorch has the threads that the teacher leaves; at the end the teacher has answered, too.

        So whatever comes between steps has all threads, and no other at its side.
        """
        threads = torch.get_num_threads()
        _use(threads - _for_teacher(threads))
        try:
            yield
        finally:
            if self.last is not None:
                wait([self.last])
            _use(threads)

    def _answer(self, batch: dict[str, Any], threads: int) -> Any:
        _use(threads)
        return self.ask(batch)


def take(batch: dict[str, Any]) -> Any | None:
    """Take the answer out of a batch, when it is there: `None` if nobody asked ahead. Raises what `ask` did."""
    answer = batch.pop(ANSWER, None)
    return None if answer is None else answer.result()


def _for_teacher(threads: int) -> int:
    """Of so many threads the teacher's: it only goes forward, the student back, too. 0 where nothing is to share."""
    return max(1, threads // 3) if threads > 1 else 0


def _stay_in_autocast() -> None:
    """Enter `torch.autocast` in the calling thread for good, without any casts, around those that are to come.

    Where a thread's outermost ends, PyTorch forgets the casts of all threads: a student's, too, in mid-step, whose
    gradients are then summed otherwise, now and then.
    """
    torch.autocast("cpu", enabled=False).__enter__()


def _use(threads: int) -> None:
    """Let the calling thread compute with so many. (PyTorch forgets what it prepared when it is told a number.)"""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
