"""How long the demo still takes: from training steps timed on this machine, and then from what its stages took."""

from __future__ import annotations

from .stages import DemoSettings

# What stages take besides the steps that they train, in such steps: two cores, bfloat16. In float32 a step of a
# recovery takes two thirds of one of the teacher's training; the stages that are done tell in time.
BESIDES = {
    "teacher": 30,
    "compressed": 5,
    "calibrated": 60,
    "recovered-svd": 30,
    "recovered-random": 30,
    "deployed": 3,
    "results.json": 190,
    "picture.png": 5,
}
TIMED = ("teacher", "recovered-svd", "recovered-random")  # where one of these is missing, it is worth telling
UNSURE = 1.25  # the factor by which it may be less, or more
ENOUGH = 100  # steps in stages that are done, to go by them


class Wait:
    """What is left of the demo.

    Args:
        stages: names of those that are missing.
        settings: how many steps they train.
        step_seconds: that a training step of the teacher takes.
    """

    def __init__(self, stages: list[str], settings: DemoSettings, step_seconds: float) -> None:
        trained = dict.fromkeys(TIMED, settings.recovery_steps) | {"teacher": settings.teacher_steps}
        self.steps = {name: BESIDES[name] + trained.get(name, 0) for name in stages if name in BESIDES}
        self.step_seconds = step_seconds
        self.done = self.took = 0.0

    @property
    def seconds(self) -> float:
        """That the stages take that are left."""
        return sum(self.steps.values()) * self.step_seconds

    def finish(self, stage: str, seconds: float) -> str:
        """A stage took so long: return what is left, by the pace of those that are done once they say enough."""
        self.done += self.steps.pop(stage)
        self.took += seconds
        if self.done >= ENOUGH:
            self.step_seconds = self.took / self.done
        return f"; {self} left" if self.seconds > 30 else ""

    def __str__(self) -> str:
        """A range of minutes."""
        low, high = (max(1, round(self.seconds * factor / 60)) for factor in (1 / UNSURE, UNSURE))
        return f"{low} to {high} minutes" if low < high else "about a minute" if low == 1 else f"about {low} minutes"
