"""The steps of a conversion: a bar for each while it runs, and in the log what it took."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm.auto import tqdm

from ..processors import give_back_memory

logger = logging.getLogger(__name__)


class Step(tqdm):
    """A bar, over items or as a context; at its end the log (INFO) says the seconds on the clock and of processors.

    What was freed until then goes back to the system.

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
