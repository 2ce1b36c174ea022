"""What a training shows while it runs, and how long its steps take."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


@contextmanager
def hush_trainer() -> Iterator[None]:
    """Inside, transformers' trainer does not warn of tied tables, which checkpoints hold once, as of missing ones."""
    logger = logging.getLogger("transformers.trainer")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


class Progress(TrainerCallback):
    """A bar of steps, and a line for every validation.

    Args:
        bar: of as many steps as are trained.
        labels: {metric: its name in a line}.
    """

    def __init__(self, bar: tqdm, labels: dict[str, str] | None = None) -> None:
        self.bar, self.labels, self.start = bar, labels or {}, time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Move the bar on; how many steps there are may change."""
        self.bar.total = state.max_steps
        self.bar.update(state.global_step - self.bar.n)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        """Show the loss."""
        if logs and "loss" in logs:
            self.bar.set_postfix(loss=f"{float(logs['loss']):.3f}", refresh=False)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **_: Any
    ) -> None:
        """Print a line."""
        if not self.bar.disable and metrics and self.labels and all(f"eval_{name}" in metrics for name in self.labels):
            minutes = (time.monotonic() - self.start) / 60
            scores = [f"{label} {metrics[f'eval_{name}']:.1f}" for name, label in self.labels.items()]
            self.bar.write(
                f"step {state.global_step:,} of {self.bar.total:,}, {minutes:.1f} min: "
                f"validation {', '.join(scores)}, loss {metrics['eval_loss']:.3f}"
            )


class Clock(TrainerCallback):
    """How long a step takes, the first few aside."""

    REST = 4

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Look at the clock."""
        self.times.append(time.monotonic())

    @property
    def seconds(self) -> float:
        """Of a step, a median: a moment in which the machine had something else to do does not count."""
        first = min(self.REST, len(self.times) - 2)
        return median(after - before for before, after in pairwise(self.times[first:]))
