"""A compression by one call: its folder, that it goes on, and what it refuses."""

import json

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from lightformers_hf.export import load_engine
from lightformers_hf.files import read_json
from lightformers_hf.workflows.compress import Work, compress


@pytest.fixture(scope="module")
def data(tmp_path_factory, parallel_sentences):
    file = tmp_path_factory.mktemp("text") / "pairs.jsonl"
    rows = [pair | {"de": f"{number} {pair['de']}"} for number in range(3) for pair in parallel_sentences]
    file.write_text("".join(json.dumps({"translation": row}) + "\n" for row in rows))
    return str(file)


def test_a_compression_goes_on_where_it_was_interrupted(tiny_marian, data, tmp_path, monkeypatch):
    def interrupt(self):
        raise KeyboardInterrupt

    output, asked = tmp_path / "small", {"data": data, "minutes": 0.01, "ratio": 2.0, "progress": False}
    with monkeypatch.context() as patch:
        patch.setattr(Work, "deploy", interrupt)
        with pytest.raises(KeyboardInterrupt):
            compress(tiny_marian, output, **asked)
    trained = (output / "recovered" / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(FileExistsError, match="another ratio"):
        compress(tiny_marian, output, **asked | {"ratio": 3.0})
    found, tables = compress(tiny_marian, output, **asked)
    assert (output / "recovered" / "model.safetensors").stat().st_mtime_ns == trained
    assert [table.row_count for table in tables] == [4]  # two models in two engines

    parts = {
        part: (output / "data" / f"{part}.jsonl").read_text().splitlines() for part in ("train", "validation", "test")
    }
    assert {part: len(lines) for part, lines in parts.items()} == {"train": 24, "validation": 3, "test": 3}
    assert len({line for lines in parts.values() for line in lines}) == 30
    plan = read_json(output / "recovered" / "compression.json")
    assert plan["calibration"] == "train.jsonl"
    tokenizer = AutoTokenizer.from_pretrained(output / "recovered")
    assert AutoModelForSeq2SeqLM.from_pretrained(output / "recovered").num_parameters() == plan["parameters_after"]
    assert load_engine(output / "deployed").generate([tokenizer("Ein Hund.")["input_ids"]])
    assert found["engines"]["data"].endswith("test.jsonl")
    assert "<h2>Training</h2>" in (output / "report.html").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"to": "tensorrt"}, "tensorrt"),
        ({"ratio": 1.0}, "ratio is 1.0"),
        ({"size": "10MB"}, "ratio and size are given"),
        ({"data": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"target_lang": "fr"}, "no column 'fr'"),
    ],
)
def test_what_is_refused_leaves_nothing(tiny_marian, data, tmp_path, changes, message):
    asked = {"data": data, "minutes": 0.01, "ratio": 2.0, "progress": False} | changes
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        compress(tiny_marian, tmp_path / "small", **asked)
    assert not (tmp_path / "small").exists()
