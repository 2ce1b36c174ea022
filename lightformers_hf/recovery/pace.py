"""A training that ends when its time is up, however fast its steps turn out to be."""

from __future__ import annotations

import time
from typing import Any

from torch.optim.lr_scheduler import LambdaLR
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

    What a step takes changes with what else a machine does; the last part says what one takes now. The learning rate
    falls to 0 by the last step. A training that goes on has the time left that it had.

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
        """What a checkpoint keeps."""
        return {"before": self.elapsed, "fall": dict(vars(self.fall))}

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        lr_scheduler: LambdaLR | None = None,
        **_: Any,
    ) -> None:
        """Take the steps' number and rates over, and what a checkpoint says of them."""
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
