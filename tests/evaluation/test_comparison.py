"""The benchmark of engines: every setting once, ratios within runs, quality the same in every fp32 engine."""

import io
import json
import sys
from statistics import median

import numpy as np
import pytest
from conversion.vocabulary.checkpoints import make_checkpoint
from datasets import Dataset
from rich.console import Console
from transformers import AutoTokenizer, GenerationConfig

from lightformers_hf import convert
from lightformers_hf.engines import deployment_names
from lightformers_hf.evaluation import comparison
from lightformers_hf.evaluation.comparison import Deployed, EngineComparison, Timing, _tell_languages, compare_engines
from lightformers_hf.evaluation.speed import Speed

FORMS = deployment_names()

pytestmark = pytest.mark.usefixtures("warm_python")


@pytest.fixture(scope="module")
def student(tiny_marian, tmp_path_factory):
    folder = tmp_path_factory.mktemp("student") / "small"
    convert(tiny_marian, folder, ratio=1.5, method="paper", progress=False)
    return folder


@pytest.fixture(scope="module")
def data(parallel_sentences, tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "test.jsonl"
    file.write_text("".join(json.dumps({"translation": pair}) + "\n" for pair in parallel_sentences), encoding="utf-8")
    return file


def test_every_model_in_every_form_and_setting(tiny_marian, student, data):
    comparison = compare_engines(
        str(tiny_marian),
        [str(student)],
        cores=[1],
        batch_sizes=[1, 3],
        beams=[1, 2],
        runs=2,
        sentences=2,
        new_tokens=3,
        data=str(data),
    )
    settings = [(t.model, t.form, t.batch_size, t.beams) for t in comparison.timings]
    models = comparison.models
    assert models == [tiny_marian.name, "small"]
    assert sorted(settings) == sorted(
        (m, f, size, k) for m in models for f in FORMS for size in (1, 3) for k in (1, 2)
    )
    by_setting = dict(zip(settings, comparison.timings, strict=True))
    for (model, form, size, beams), timing in by_setting.items():
        assert timing.speed.tokens == (2 if size == 1 else 3) * 3
        same, baseline = (by_setting[models[0], name, size, beams].speed.runs for name in (form, "ctranslate2-int8"))
        runs = timing.speed.runs
        assert timing.to_teacher == pytest.approx(median(a / b for a, b in zip(runs, same, strict=True)))
        assert timing.to_baseline == pytest.approx(median(a / b for a, b in zip(runs, baseline, strict=True)))
        assert model != models[0] or timing.to_teacher == 1

    places = {(place.model, place.form): place for place in comparison.deployed}
    for model in models:
        assert places[model, "onnx"].scores == places[model, "transformers"].scores
        assert places[model, "onnx-int8"].disk_bytes < places[model, "onnx"].disk_bytes
        for metric, found in places[model, "onnx-int8"].differences.items():
            both = (places[name, form].scores[metric] for name, form in [(model, "onnx-int8"), (models[0], FORMS[0])])
            assert found.value == pytest.approx(float(np.subtract(*both)))
            assert found.low <= found.value <= found.high
    assert places[models[1], "onnx"].differences.keys() == {"bleu", "chrf"}
    assert places[models[0], "ctranslate2-int8"].scores["bleu"] > 70

    console = Console(file=io.StringIO(), width=100)
    console.print(*comparison.tables())
    text = console.file.getvalue()
    assert all(form in text for form in FORMS)
    assert "1 core, batch 3, beam 2" in text
    assert (
        json.loads(json.dumps(comparison.to_dict()))["timings"][0]["speed"]["runs"] == comparison.timings[0].speed.runs
    )


def test_a_table_fits_a_terminal():
    speed = Speed(293.0, [293.0], 250)
    places = [
        Deployed(name, form, "", 10_600_000, {"bleu": 40.2, "chrf": 60.1})
        for name in ("opus-mt-de-en", "small")
        for form in FORMS
    ]
    timings = [Timing(place.model, place.form, 1, 1, 1, speed, 10.01, 10.02) for place in places]
    comparison = EngineComparison(["opus-mt-de-en", "small"], places, timings, 25, 10, "test.jsonl", 1, 500)
    console = Console(file=io.StringIO(), width=80)
    console.print(*comparison.tables())
    rows = [line for line in console.file.getvalue().splitlines() if "293" in line]
    assert len(rows) == len(places)
    assert all(
        row.split()[1:] == [place.model, "293", "10.01x", "10.02x", "10.6", "40.2", "60.1"]
        for row, place in zip(rows, places, strict=True)
    )


def test_without_students_data_and_baseline(tiny_marian):
    comparison = compare_engines(
        str(tiny_marian), [], forms=["onnx"], cores=[1], batch_sizes=[2], beams=[1], runs=1, new_tokens=2
    )
    (timing,) = comparison.timings
    assert (timing.speed.tokens, timing.to_baseline, comparison.deployed[0].scores) == (4, None, {})
    ((head, row),) = comparison.rows().values()
    assert head == ["engine", "model", "tokens/s", "same", "MB"]
    assert len(row) == len(head)
    assert not any("int8" in note for note in comparison.notes())


def test_what_cannot_be_measured(tiny_marian, tmp_path):
    with pytest.raises(ValueError, match="unknown engine 'tensorrt', expected one of transformers"):
        compare_engines(str(tiny_marian), [], forms=["tensorrt"])
    with pytest.raises(ValueError, match=r"batch_sizes is \[0\]"):
        compare_engines(str(tiny_marian), [], batch_sizes=[0])
    with pytest.raises(FileNotFoundError):
        compare_engines(str(tmp_path / "nothing"), [], forms=["onnx"])
    with pytest.raises(
        ValueError, match=r"process that measures on 1 cores failed: ValueError: 100 new tokens.*64 positions"
    ):
        compare_engines(str(tiny_marian), [], forms=["onnx"], cores=[1], new_tokens=100)


def test_sources_are_cut_to_the_positions(tiny_marian, tmp_path):
    """As `evaluate` cuts them: articles have more tokens than the model that summarizes them has positions."""
    text = "Der Hund schläft unter dem Tisch. " * 20
    inputs = comparison._inputs(
        {"model": str(tiny_marian)}, Dataset.from_dict({"source": [text], "target": ["A dog."]}), 1
    )
    assert [(len(ids), ids[-1]) for ids in inputs["model"]] == [(64, 0)]


def test_models_are_called_by_as_much_of_their_paths_as_tells_them_apart(tmp_path):
    paths = [tmp_path / "a" / "model", tmp_path / "b" / "model"]
    for path in paths:
        path.mkdir(parents=True)
    assert comparison._labels(["org/teacher", *map(str, paths)]) == ["org/teacher", "a/model", "b/model"]
    assert comparison._labels([str(paths[0]), "org/teacher"]) == ["model", "org/teacher"]


def test_a_killed_measurement_says_that_it_may_be_for_memory(tiny_marian, tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nkill -9 $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(ValueError, match=r"killed, most likely for memory: it holds 1 models.*--engine"):
        compare_engines(str(tiny_marian), [], forms=["transformers"], cores=[1], batch_sizes=[1], beams=[1])


def test_a_multilingual_teacher_is_told_its_students_languages(tmp_path, tiny_marian):
    """Measured as it comes, it would translate into whatever language its files name."""
    make_checkpoint("mbart50", tmp_path / "teacher")
    languages = {"source_lang": "de=de_DE", "target_lang": "en=en_XX"}
    convert(tmp_path / "teacher", tmp_path / "light", rank=4, method="paper", progress=False, **languages)
    names = {"teacher": str(tmp_path / "teacher"), "light": str(tmp_path / "light")}
    told = _tell_languages(names, None, None, tmp_path)
    assert told["light"] == names["light"]
    tokenizer = AutoTokenizer.from_pretrained(told["teacher"])
    assert (tokenizer.src_lang, tokenizer.tgt_lang) == ("de_DE", "en_XX")
    first = GenerationConfig.from_pretrained(told["teacher"]).forced_bos_token_id
    assert first == tokenizer.convert_tokens_to_ids("en_XX")
    plain = {"teacher": str(tiny_marian), "light": str(tiny_marian)}
    assert _tell_languages(plain, "de", "en", tmp_path) == plain
    with pytest.raises(ValueError, match="codes go with a multilingual tokenizer only"):
        _tell_languages(plain, "de=de_DE", "en=en_XX", tmp_path)
