"""What the comparisons share: many runs of a script, and what becomes of the others when one fails."""

import json

import pytest
from comparing import run_all

SCRIPT = """
import json, sys, time
from pathlib import Path

options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = Path(options["--output-dir"])
time.sleep(float(options["--seconds"]))
if options["--fails"] == "yes":
    sys.exit("no such text")
(folder / "test_results.json").write_text(json.dumps({"test_bleu": float(options["--bleu"])}))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def told(folder, *, seconds=0.0, fails="no", bleu=0.0):
    return ["--seconds", str(seconds), "--fails", fails, "--bleu", str(bleu)], folder


def test_a_failure_ends_it_and_keeps_what_was_under_way(tmp_path, script):
    runs = {"fails": told(tmp_path / "fails", fails="yes"), "runs": told(tmp_path / "runs", seconds=1.5)}
    runs |= {f"waits-{number}": told(tmp_path / f"waits-{number}", seconds=1) for number in range(3)}
    with pytest.raises(ChildProcessError, match=r"fails failed; see .*fails\.log"):
        run_all(script, runs, jobs=2)
    assert "no such text" in (tmp_path / "fails.log").read_text()
    assert json.loads((tmp_path / "runs" / "test_results.json").read_text()) == {"test_bleu": 0}
    assert not (tmp_path / "waits-2").exists()


def test_nothing_of_other_options_is_gone_on_from(tmp_path, script):
    """As the checkpoint of a run with another learning rate, where the next one ends before its first."""
    folder = tmp_path / "run"
    checkpoint = folder / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    (folder / "options.json").write_text('["--bleu", "1"]')
    with pytest.raises(ChildProcessError):
        run_all(script, {"run": told(folder, fails="yes")}, jobs=1)
    assert not checkpoint.exists()
