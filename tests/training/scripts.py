"""Options of a script as it gets them, and what its run has left."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest


def command(base, **changes):
    """The command line of the options `base`, changed; `None` leaves one out, a list is several words."""
    words = []
    for name, value in (base | changes).items():
        if value is not None:
            words += [_spelled(name), *map(str, value if isinstance(value, list) else [value])]
    return words


def _spelled(name):
    """An option, with dashes; a field of the model keeps its name."""
    return f"--{name if '.' in name else name.replace('_', '-')}"


def losses(folder):
    """The training losses of a run, in order."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def run_on_two(script, words):
    """What a script prints that runs on two processes."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(script).parents[1])}
    done = subprocess.run([*launch, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


class KilledError(Exception):
    """As SIGKILL, which leaves no time for anything."""


@contextmanager
def killed(trainer_class, when):
    """A training in this context is killed before the step at which `when` is true of its trainer."""
    step = trainer_class.training_step

    def training_step(trainer, *arguments, **options):
        if when(trainer):
            raise KilledError
        return step(trainer, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_class, "training_step", training_step)
        with pytest.raises(KilledError):
            yield
