"""The comparison script: every run that was asked for, once, with the scores of its own test set."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "training" / "compare_compressions.py"


def test_compares_and_continues(tmp_path, tiny_marian, parallel_sentences):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in parallel_sentences), encoding="utf-8")
    command = [sys.executable, str(SCRIPT), str(tiny_marian), "--train_file", str(data), "--test_file", str(data)]
    command += ["--source_lang", "de", "--target_lang", "en", "--output_dir", str(tmp_path / "runs")]
    command += ["--ratios", "1.5", "--starts", "random", "--trainings", "distilled", "--max_steps", "1", "--jobs", "2"]
    command += ["--max_source_length", "40", "--max_target_length", "40", "--generation_max_length", "20"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "runs" / "results.json").read_text())
    assert [(row["start"], row["trained"]) for row in rows] == [("svd", None), ("random", "distilled")]
    report = json.loads((tmp_path / "runs" / "ratio-1.5" / "model" / "compression.json").read_text())
    assert {row["parameters"] for row in rows} == {report["parameters_after"]}

    scores = tmp_path / "runs" / "ratio-1.5" / "svd-untrained" / "test_results.json"
    scores.write_text(json.dumps({"test_bleu": 12.5, "test_chrf": 3.0}))
    subprocess.run(command, capture_output=True, check=True)
    assert json.loads((tmp_path / "runs" / "results.json").read_text())[0]["bleu"] == 12.5  # not run again
