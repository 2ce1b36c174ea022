"""Killed at any moment, a process that writes leaves the old output or the new one; kills.py kills more often."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fcntl", reason="processes are forked")
NUMBER = int(os.environ.get("LIGHTFORMERS_KILLS", "50"))


@pytest.mark.parametrize(
    ("what", "number"),
    [
        ("files", NUMBER // 2),
        ("convert", NUMBER // 10),
        ("export", NUMBER // 10),
        ("push", NUMBER // 5),
        ("training", NUMBER // 10),
    ],
)
def test_nothing_is_harmed(what, number, request):
    if what != "push":  # whose client reads whether there is a network when it is imported
        request.getfixturevalue("warm_python")
    command = [sys.executable, str(Path(__file__).with_name("kills.py")), "--what", what, "--number", str(number)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    print(run.stdout)
    counts = json.loads(run.stdout.splitlines()[-1])
    assert counts["killed"] == number
