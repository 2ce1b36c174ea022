"""What is written to be shared says nothing of the machine, and shows nothing that a name smuggles in."""

import json
import os
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from lightformers_hf import convert
from lightformers_hf.checkpoints.cards import inherited_metadata
from lightformers_hf.conversion.card import model_card
from lightformers_hf.conversion.report import ModelFacts, read_report
from lightformers_hf.engines import export
from lightformers_hf.evaluation.evaluate import evaluate
from lightformers_hf.loading import printable_name

ESCAPE = "evil\x1b[31m\x07\u202e name"


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_marian, parallel_sentences):
    """A folder with a checkpoint `dense`, whose name on disk is a strange one, and data."""
    folder = tmp_path_factory.mktemp("private")
    shutil.copytree(tiny_marian, folder / ESCAPE)
    lines = [json.dumps(pair) + "\n" for pair in parallel_sentences]
    (folder / "test.jsonl").write_text("".join(lines), encoding="utf-8")
    before = os.umask(0o022)
    convert(folder / ESCAPE, folder / "light", ratio=2, calibration=str(folder / "test.jsonl"), progress=False)
    export(folder / "light", folder / "fast", to="onnx", quantization="float32")
    os.umask(before)
    return folder


@pytest.mark.parametrize("name", ["light", "fast"])
def test_no_path_and_no_control_character_is_written(place, name):
    for file in filter(Path.is_file, (place / name).rglob("*")):
        content = file.read_bytes()
        assert str(place).encode() not in content, file
        assert file.suffix == ".onnx" or b"\x1b" not in content or not file.name.endswith((".md", ".json")), file
    export = json.loads((place / "fast" / "export.json").read_text())
    assert export["source"] == "light"
    assert json.loads((place / "light" / "compression.json").read_text())["source"] == "evil[31m name"
    assert "\u202e" not in (place / "light" / "README.md").read_text(encoding="utf-8")


def test_no_path_in_measurements(place, monkeypatch):
    monkeypatch.chdir(place / "light")
    found = evaluate(".", data=place / "test.jsonl", teacher=place / ESCAPE, speed=False)
    text = json.dumps(found.to_dict())
    assert str(place) not in text
    assert "u001b" not in text
    shown = found.to_dict()
    assert (shown["model"]["name"], shown["teacher"]["name"], shown["data"]) == (
        "light",
        "evil[31m name",
        "test.jsonl",
    )


@pytest.mark.parametrize("name", ["light", "fast"])
def test_everybody_who_reads_one_file_reads_all(place, name):
    assert {oct(file.stat().st_mode & 0o777) for file in (place / name).iterdir() if file.is_file()} == {"0o644"}


def test_names(tmp_path):
    (tmp_path / "model").mkdir()
    assert printable_name(tmp_path / "model") == "model"
    assert printable_name(f"{tmp_path}/model/") == "model"
    assert printable_name("user/model") == "user/model"


@pytest.mark.parametrize(
    ("link", "kept"),
    [
        ("https://example.org/licence", True),
        ("LICENSE.md", True),
        ("javascript:alert(1)", False),
        ("JavaScript://example.org/%0aalert(1)", False),
        (" java\tscript:alert(1)", False),
        ("data:text/html,<script>", False),
        ("https://example.org/\x1b[31m", False),
    ],
)
def test_only_links_to_pages_are_inherited(place, tmp_path, link, kept):
    (tmp_path / "README.md").write_text(
        str(ModelCard(f"---\nlicense: other\nlicense_link: {json.dumps(link)}\n---\n"))
    )
    found = inherited_metadata(tmp_path, None)
    assert found.get("license_link") == (link if kept else None)
    assert found["license"] == "other"
    # A report that somebody changed, or that an earlier version wrote.
    report = read_report(Path(place, "light", "compression.json"))
    report.inherited["license_link"] = link
    card = ModelCard(model_card(ModelFacts("lightformer", "AutoModelForSeq2SeqLM", 1, 1), report))
    assert card.data.get("license_link") == (link if kept else None)
