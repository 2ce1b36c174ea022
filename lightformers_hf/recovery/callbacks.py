"""Callbacks of a training: an end when the time is up, a bar of steps, and how long a step takes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState


class Fall:
    """The learning rate of a step as a share of the highest: up in a line, then down in a line to 0 at `end`.

    Args:
        warmup_steps: on the way up.
        end: the step at which nothing is left.
    """

    def __init__(self, warmup_steps: int, end: int) -> None:
        self.warmup_steps, self.start, self.share, self.end = warmup_steps, warmup_steps, 1.0, end

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return step / self.warmup_steps
        return self.share * max(0.0, (self.end - step) / max(1, self.end - self.start))

    def move(self, step: int, end: int) -> None:
        """From `step` on, fall to `end` instead, from where the rate is then; on the way up, later."""
        if step > self.start:
            self.start, self.share = step, self(step)
        self.end = end


class Pace(TrainerCallback, ExportableState):
    """After every validation, fits the steps that are left into the time that is left, in whole parts between two.

    The time of a step changes with the load of the machine; the last steps show the current time. The learning rate
    falls to 0 by the last step. A resumed training has the remaining time.

    Args:
        seconds: for the training, validation included; 0: the steps stay as they are.
        steps, warmup_steps: as planned. At most `max_steps` of the training's arguments are trained.
    """

    def __init__(self, seconds: float, steps: int, warmup_steps: int) -> None:
        self.seconds, self.fall = seconds, Fall(warmup_steps, steps)
        self.before, self.began, self.looked = 0.0, time.monotonic(), time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds of training, those before an interruption included, as far as a checkpoint has them."""
        return self.before + time.monotonic() - self.began

    def state(self) -> dict[str, Any]:
        """Content of a checkpoint."""
        return {"before": self.elapsed, "fall": dict(vars(self.fall))}

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        lr_scheduler: LambdaLR | None = None,
        **_: Any,
    ) -> None:
        """Adopt the number of steps and the rates, and those of a checkpoint."""
        kept = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step and kept:
            self.before = kept["before"]
            vars(self.fall).update(kept["fall"])
        self.began = self.looked = time.monotonic()
        state.max_steps = self.fall.end
        lr_scheduler.lr_lambdas = [self.fall] * len(lr_scheduler.lr_lambdas)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Plan anew, unless it was the last."""
        step, now = state.global_step, time.monotonic()
        part, self.looked = now - self.looked, now
        if not self.seconds or step >= self.fall.end:
            return
        most = (args.max_steps - step) // state.eval_steps
        parts = max(1, min(most, round((self.seconds - self.elapsed) / part)))
        self.fall.move(step, step + parts * state.eval_steps)
        state.max_steps = self.fall.end


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
        """The median time of a step; moments of high load do not count."""
        first = min(self.REST, len(self.times) - 2)
        return median(after - before for before, after in pairwise(self.times[first:]))
