"""A training that ends when its time is up, and how long a step takes, with clocks of the tests' own."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from transformers import TrainerCallback

from lightformers_hf.recovery import runs
from lightformers_hf.recovery.runs import Clock, Pace, RecoverySettings, list_checkpoints, training_arguments


class Rates(TrainerCallback):
    """The learning rate of every step."""

    def __init__(self):
        self.rates = []

    def on_step_begin(self, args, state, control, lr_scheduler=None, **_):
        self.rates.append(lr_scheduler.get_last_lr()[0])


class Seconds(TrainerCallback):
    """A clock that steps and validations move."""

    now = 0.0

    def on_step_end(self, args, state, control, **_):
        self.now += self.each

    def on_evaluate(self, args, state, control, **_):
        self.now += self.validation


class Interrupt(TrainerCallback):
    """Ctrl-C at a step."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.fixture
def paced(build_trainer, monkeypatch):
    def build(seconds, *, each, validation=2.0, most_steps=60, **options):
        """A trainer, whose steps and validations take so many seconds, with four validations."""
        settings = RecoverySettings(1.0, 0.0, 0.0, 1, bf16=False, steps=20, warmup_steps=2, eval_steps=5)
        settings = replace(settings, seconds=seconds, most_steps=most_steps)
        arguments = training_arguments(settings, saves=True, best_by="loss", output_dir="unused")
        names = ("eval_strategy", "save_strategy", "eval_steps", "save_steps", "max_steps", "warmup_steps")
        trainer = build_trainer("lightformer", rows=4, **{name: getattr(arguments, name) for name in names}, **options)
        clock = Seconds()
        monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: clock.now))
        found, rates = Pace(settings, 0.0), Rates()
        clock.each, clock.validation = each, validation
        for callback in (clock, found, rates):
            trainer.add_callback(callback)
        return trainer, found, rates

    return build


@pytest.mark.parametrize(
    ("each", "validation", "expected", "validated"),
    [
        (1.0, 2.0, 40, [10, 17, 25, 32]),
        (4.0, 2.0, 40, [3, 5, 7, 8]),
        (1.0, 8.0, 40, [10, 24]),  # validations take longer than thought
        (0.1, 0.2, 6.8, [15, 30, 45, 60]),  # no more steps than that
        (100.0, 2.0, 102, [1]),
    ],
)
def test_a_training_fits_into_its_time(paced, each, validation, expected, validated):
    trainer, found, rates = paced(40, each=each, validation=validation)
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == validated
    assert (trainer.state.global_step, found.elapsed) == (validated[-1], pytest.approx(expected))
    if validated[-1] > 2:
        assert rates.rates[1:3] == pytest.approx([0.5, 1])
        assert rates.rates[2:] == sorted(rates.rates[2:], reverse=True)
        assert 0 < rates.rates[-1] < 2 * each / 40 + 0.1  # 0 at the next step


def test_a_validation_that_took_less_than_thought_does_not_come_twice(paced):
    trainer, *_ = paced(40, each=0.2, validation=0.1, most_steps=1000)
    trainer.train()
    steps = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(steps) == 4


def test_a_training_that_goes_on_has_the_time_that_was_left(paced, tmp_path):
    trainer, *_ = paced(40, each=1.0)
    trainer.add_callback(Interrupt(20))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    (checkpoint,) = list_checkpoints(tmp_path / "out")[-1:]
    trainer, found, rates = paced(40, each=1.0)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert found.elapsed == pytest.approx(40, abs=2)
    assert rates.rates[1:] == sorted(rates.rates[1:], reverse=True)
    assert trainer.state.global_step > 30


@pytest.mark.parametrize(
    ("moments", "expected"),
    [
        ([0, 9, 18, 20, 21, 22, 23, 24], 1),  # the first few are slower
        ([0, 9, 18, 20, 21, 22, 23, 31, 32, 33], 1),  # so is one while the machine has something else to do
        ([0, 3], 3),
        ([0, 3, 5], 2),
    ],
)
def test_a_step_takes_what_most_take(moments, expected, monkeypatch):
    clock, left, control = Clock(), iter(moments), SimpleNamespace(should_training_stop=False)
    monkeypatch.setattr(runs.time, "monotonic", lambda: next(left))
    for _ in moments:
        clock.on_step_end(None, None, control)
    assert (clock.seconds, control.should_training_stop) == (expected, False)
    clock.limit, left = 3, iter([99])
    clock.on_step_end(None, None, control)
    assert control.should_training_stop == (len(moments) > 2)
