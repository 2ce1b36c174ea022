"""What the demo says of the wait: from timed steps at first, then from what its stages took."""

import pytest

from lightformers_hf.demo.stages import DemoSettings
from lightformers_hf.demo.wait import UNSURE, Wait

SETTINGS = DemoSettings()
# Seconds of a whole run on two cores with little else to do, in bfloat16; a step of the teacher's training took 0.21.
TOOK = {
    "teacher": 131,
    "compressed": 1,
    "calibrated": 12,
    "recovered-svd": 49,
    "recovered-random": 46,
    "deployed": 0.4,
    "results.json": 40,
    "picture.png": 1,
}
STEP = 0.21


@pytest.mark.parametrize("done", range(len(TOOK)))
def test_what_is_said_holds_at_every_stage_of_a_measured_run(done):
    stages = list(TOOK)
    wait = Wait(stages, SETTINGS, STEP)
    for stage in stages[:done]:
        wait.finish(stage, TOOK[stage])
    left = sum(TOOK[stage] for stage in stages[done:])
    assert left / UNSURE - 5 < wait.seconds < left * UNSURE + 5


def test_goes_by_the_stages_that_are_done():
    wait = Wait(list(TOOK), SETTINGS, STEP / 3)  # nothing else ran when steps were timed, two programs do since
    before = wait.seconds
    wait.finish("teacher", TOOK["teacher"])
    assert wait.seconds > before / 2
    assert wait.seconds == pytest.approx(sum(TOOK.values()) - TOOK["teacher"], rel=0.25)


@pytest.mark.parametrize(
    ("step", "said"), [(STEP, "4 to 6 minutes"), (STEP / 7, "about a minute"), (8 * STEP, "30 to 47 minutes")]
)
def test_says_a_range(step, said):
    assert str(Wait(list(TOOK), SETTINGS, step)) == said


def test_says_nothing_of_the_last_seconds():
    wait = Wait(list(TOOK), SETTINGS, STEP)
    said = [wait.finish(stage, TOOK[stage]) for stage in TOOK]
    assert said[0].endswith("minutes left")
    assert said[-1] == ""


def test_only_what_is_missing_counts():
    assert Wait(["results.json"], SETTINGS, STEP).seconds < 60
