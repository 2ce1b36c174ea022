"""The comparison script: every run that was asked for, once, with the scores of its own test set."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "training" / "compare_compressions.py"


@pytest.mark.usefixtures("warm_python")
def test_compares_and_continues(tmp_path, tiny_marian, parallel_sentences):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in parallel_sentences), encoding="utf-8")
    command = [sys.executable, str(SCRIPT), str(tiny_marian), "--train-file", str(data), "--test-file", str(data)]
    command += ["--source-lang", "de", "--target-lang", "en", "--output-dir", str(tmp_path / "runs")]
    command += [
        "--ratios",
        "1.5",
        "1.2",
        "--methods",
        "paper",
        "own-text",
        "--starts",
        "random",
        "--trainings",
        "distilled",
        "--max-steps",
        "1",
        "--jobs",
        "2",
    ]
    command += ["--max-source-length", "40", "--max-target-length", "40", "--generation-max-length", "20"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "runs" / "results.json").read_text())
    assert [(row["ratio"], row["method"], row["start"], row["trained"]) for row in rows] == [
        (ratio, method, *how)
        for ratio in (1.5, 1.2)
        for method in ("paper", "own-text")
        for how in (("converted", None), ("random", "distilled"))
    ]
    for row in rows:
        report = tmp_path / "runs" / f"ratio-{row['ratio']:g}-{row['method']}" / "model" / "compression.json"
        assert row["parameters"] == json.loads(report.read_text())["parameters_after"]
        assert (json.loads(report.read_text())["options"].get("method") == "paper") == (row["method"] == "paper")
    for picture in ("results.png", "results-dark.png"):
        assert (tmp_path / "runs" / picture).stat().st_size > 10_000

    scores = tmp_path / "runs" / "ratio-1.5-paper" / "converted-untrained" / "test_results.json"
    scores.write_text(json.dumps({"test_bleu": 12.5, "test_chrf": 3.0}))
    subprocess.run(command, capture_output=True, check=True)
    assert json.loads((tmp_path / "runs" / "results.json").read_text())[0]["bleu"] == 12.5  # not run again
