"""Names that are imported when they are first used: all are there, and nothing is imported before."""

import subprocess
import sys

import pytest

from lightformers_hf import recovery


def test_every_public_name_is_found_and_no_other():
    assert set(recovery.__all__) <= set(dir(recovery))
    for name in recovery.__all__:
        assert getattr(recovery, name).__name__ == name
    with pytest.raises(AttributeError, match=r"'lightformers_hf\.recovery' has no attribute 'Trainer'"):
        _ = recovery.Trainer


def test_a_name_does_not_import_its_neighbours():
    script = "import sys; from lightformers_hf.recovery import find_last_checkpoint; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = {name for name in done.stdout.split() if name.startswith("lightformers_hf.recovery")}
    assert loaded == {"lightformers_hf.recovery", "lightformers_hf.recovery.checkpoints"}
