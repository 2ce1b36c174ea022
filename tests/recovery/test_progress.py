"""How long a step is said to take."""

import pytest

from lightformers_hf.recovery import progress
from lightformers_hf.recovery.progress import Clock


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
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(left))
    for _ in moments:
        clock.on_step_end(None, None, None)
    assert clock.seconds == expected
