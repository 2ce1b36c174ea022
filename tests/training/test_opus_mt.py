"""The script for a published model runs in full on a tiny teacher, without a network."""

import json
import re
import tomllib
from pathlib import Path

import opus_mt as script
import pytest


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_a_whole_run(tmp_path, tiny_marian, parallel_sentences, capsys):
    rows = [pair | {"de": f"{number} {pair['de']}"} for number in range(3) for pair in parallel_sentences]
    for name, pairs in {"train": rows, "test": parallel_sentences}.items():
        text = "".join(json.dumps({"translation": pair}) + "\n" for pair in pairs)
        (tmp_path / f"{name}.jsonl").write_text(text)
    options = ["--teacher", tiny_marian, "--data", tmp_path / "train.jsonl", "--test", tmp_path / "test.jsonl"]
    options += ["--output-dir", tmp_path / "runs", "--ratios", 2, "--minutes", 0.03, "--device", "cpu"]
    script.main(list(map(str, options)))
    table = json.loads((tmp_path / "runs" / "results.json").read_text())
    labels = ["teacher", "ratio 2", "ratio 2, ctranslate2 int8", "ratio 2, onnx int8"]
    assert [row["model"] for row in table] == labels
    assert table[0]["bleu"] > 90  # it knows the ten sentences
    assert table[2]["megabytes"] < table[1]["megabytes"] < table[0]["megabytes"]
    page = (tmp_path / "runs" / "results.md").read_text()
    assert "| model | megabytes | bleu | chrf |" in page
    assert page in capsys.readouterr().out


@pytest.mark.quick
def test_the_header_is_that_of_a_script():
    """PEP 723: `uv run` reads the comment block."""
    text = Path(script.__file__).read_text(encoding="utf-8")
    (block,) = re.findall(r"^# /// script\n((?:#.*\n)+?)# ///$", text, flags=re.MULTILINE)
    header = tomllib.loads("".join(line[2:] for line in block.splitlines(keepends=True)))
    assert header["requires-python"] == ">=3.11"
    assert header["dependencies"] == ["lightformers_hf[demo]"]
