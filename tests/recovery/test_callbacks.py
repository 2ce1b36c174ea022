"""A training that ends when its time is up, and how long a step takes, with clocks of the tests' own."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerCallback

from lightformers_hf.recovery import callbacks
from lightformers_hf.recovery.callbacks import Clock, Fall, Pace


@given(
    warmup=st.integers(1, 50), end=st.integers(60, 500), moves=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 99)))
)
def test_rates_rise_and_fall_without_a_jump(warmup, end, moves):
    fall, step = Fall(warmup, end), 0
    assert [fall(s) for s in range(warmup + 1)] == pytest.approx([s / warmup for s in range(warmup + 1)])
    for share, more in moves:
        step += int(share * (fall.end - step))
        before = fall(step)
        fall.move(step, max(step, warmup) + more)
        assert fall(step) == pytest.approx(before)
    rates = [fall(s) for s in range(max(step, warmup), fall.end + 1)]
    assert rates[-1] == 0
    steps = [before - after for before, after in pairwise(rates)]
    assert steps == pytest.approx([rates[0] / max(1, len(steps))] * len(steps), abs=1e-9)


class Rates(TrainerCallback):
    """The learning rate of every step."""

    def __init__(self):
        self.rates = []

    def on_step_begin(self, args, state, control, lr_scheduler=None, **_):
        self.rates.append(lr_scheduler.get_last_lr()[0])


class Interrupt(TrainerCallback):
    """Ctrl-C at a step."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.fixture
def paced(build_trainer, monkeypatch):
    def build(seconds, *, each, seconds_planned=1.0, max_steps=60, **options):
        """A trainer, whose steps take `each` seconds, with a pace that planned another number."""
        asked = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
        trainer = build_trainer("lightformer", rows=4, max_steps=max_steps, **asked, **options)
        clock = SimpleNamespace(monotonic=lambda: each * trainer.state.global_step)
        monkeypatch.setattr(callbacks, "time", clock)
        found, rates = Pace(seconds, int(seconds / seconds_planned), 2), Rates()
        trainer.add_callback(found)
        trainer.add_callback(rates)
        return trainer, found, rates

    return build


@pytest.mark.parametrize(
    ("each", "expected"),
    [
        (1.0, 20),  # as planned
        (2.0, 12),  # after four steps, 12 s are left for parts of 8 s: two, rather than one
        (9.0, 8),  # the time is up after four, but a training whose rate has not fallen is worth little
        (0.5, 40),
        (0.1, 60),  # no more than that
    ],
)
def test_the_steps_fit_into_the_time(paced, each, expected):
    trainer, found, rates = paced(20, each=each)
    trainer.train()
    assert trainer.state.global_step == expected
    assert found.elapsed == pytest.approx(each * expected)
    assert rates.rates[2] == pytest.approx(1.0)
    assert 0 < rates.rates[-1] <= 1 / 4 + 1e-9  # it would be 0 at the next step
    assert trainer.state.log_history[-2]["step"] == expected  # it is validated, too


def test_without_a_time_the_steps_stay(paced):
    trainer, found, _ = paced(0, each=5.0)
    found.fall.end = 8
    trainer.train()
    assert trainer.state.global_step == 8


def test_a_training_that_goes_on_has_the_time_that_was_left(paced, tmp_path):
    trainer, _, rates = paced(20, each=2.0)
    trainer.add_callback(Interrupt(6))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    before = rates.rates[4:]
    trainer, found, rates = paced(20, each=2.0)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    assert trainer.state.global_step == 12
    assert found.elapsed == pytest.approx(24)
    assert rates.rates[: len(before)] == pytest.approx(before)


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
    clock, left = Clock(), iter(moments)
    monkeypatch.setattr(callbacks.time, "monotonic", lambda: next(left))
    for _ in moments:
        clock.on_step_end(None, None, None)
    assert clock.seconds == expected
