"""A compression by one call: its folder, that it goes on, and what it refuses."""

import json
import os
import shutil

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from lightformers_hf.arguments import CompressArguments
from lightformers_hf.conversion.report import OWN_TEXT
from lightformers_hf.engines import load_engine
from lightformers_hf.evaluation.evaluate import evaluate
from lightformers_hf.files import lock, read_json
from lightformers_hf.workflows.compress import Work, choose_method, compress

pytestmark = pytest.mark.usefixtures("warm_python", "few_random_texts")


@pytest.fixture(scope="module")
def data(tmp_path_factory, parallel_sentences):
    file = tmp_path_factory.mktemp("text") / "pairs.jsonl"
    rows = [pair | {"de": f"{number} {pair['de']}"} for number in range(3) for pair in parallel_sentences]
    file.write_text("".join(json.dumps({"translation": row}) + "\n" for row in rows))
    return str(file)


def interrupt(self):
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def asked(data):
    return {"data": data, "minutes": 0.01, "ratio": 2.0, "progress": False}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where the first test leaves a whole compression."""
    return tmp_path_factory.mktemp("finished") / "small"


@pytest.fixture
def finished(place, tiny_marian, asked):
    """A whole compression, made here where the first test ran in another process."""
    if not (place / "report.html").exists():
        compress(tiny_marian, place, **asked)
    return place


def test_a_compression_goes_on_where_it_was_interrupted(tiny_marian, asked, place, monkeypatch):
    output = place
    with monkeypatch.context() as patch:
        patch.setattr(Work, "deploy", interrupt)
        with pytest.raises(KeyboardInterrupt):
            compress(tiny_marian, output, **asked)
    trained = (output / "recovered" / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(FileExistsError, match="another ratio"):
        compress(tiny_marian, output, **asked | {"ratio": 3.0})
    found = compress(tiny_marian, output, **asked)
    assert (output / "recovered" / "model.safetensors").stat().st_mtime_ns == trained
    assert [table.row_count for table in found.engines.tables()] == [4]  # two models in two engines

    names = ("calibration", "validation", "test")
    parts = {part: (output / "data" / f"{part}.jsonl").read_text().splitlines() for part in names}
    assert {part: len(lines) for part, lines in parts.items()} == {"calibration": 24, "validation": 3, "test": 3}
    assert len({line for lines in parts.values() for line in lines}) == 30
    plan = read_json(output / "recovered" / "compression.json")
    assert plan["calibration"] == "calibration.jsonl"
    tokenizer = AutoTokenizer.from_pretrained(output / "recovered")
    assert AutoModelForSeq2SeqLM.from_pretrained(output / "recovered").num_parameters() == plan["parameters_after"]
    assert load_engine(output / "deployed").generate([tokenizer("Ein Hund.")["input_ids"]])
    assert found.engines.data.endswith("test.jsonl")
    differences = found.engines.deployed[-1].differences
    assert found.notes[1].startswith(
        "Deployed, compared with the teacher: BLEU {bleu}, chrF {chrf}. ".format(**differences)
    )
    assert "<h2>Training</h2>" in (output / "report.html").read_text()
    assert "<h2>Deployed: 1 core, batch 1, beam 1</h2>" in (output / "report.html").read_text()


@pytest.mark.parametrize(
    "name", ["data/notes.txt", "converted/notes.txt", "recovered/sub/notes.txt", "deployed/mine/README.md"]
)
def test_a_users_own_file_in_a_part_is_not_overwritten(tiny_marian, asked, finished, tmp_path, monkeypatch, name):
    output = tmp_path / "small"
    shutil.copytree(finished, output)
    (output / name).parent.mkdir(exist_ok=True)
    (output / name).write_text("mine")
    before = {path: path.is_file() and path.read_bytes() for path in output.rglob("*")}
    with pytest.raises(FileExistsError, match=f"{name.split('/')[1]}.* which this package did not write there"):
        compress(tiny_marian, output, overwrite=True, **asked | {"ratio": 3.0})
    assert {path: path.is_file() and path.read_bytes() for path in output.rglob("*")} == before
    compress(tiny_marian, output, **asked)  # all is there already


def test_overwriting_leaves_what_lies_beside_the_parts(tiny_marian, asked, finished, tmp_path, monkeypatch):
    output = tmp_path / "small"
    shutil.copytree(finished, output)
    (output / "notes.txt").write_text("mine")
    for left in ("checkpoint-7/optimizer.pt", "runs/log"):  # by a training that was killed
        (output / "recovered" / left).parent.mkdir()
        (output / "recovered" / left).write_text("")
    monkeypatch.setattr(Work, "do", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compress(tiny_marian, output, overwrite=True, **asked | {"ratio": 3.0})
    assert {path.name for path in output.iterdir()} == {"notes.txt", "data", "compress.json"}


def test_a_link_in_place_of_a_part_is_not_followed(tiny_marian, asked, finished, tmp_path, monkeypatch):
    output, elsewhere = tmp_path / "small", tmp_path / "elsewhere"
    shutil.copytree(finished, output)
    (output / "converted").rename(elsewhere)
    (output / "converted").symlink_to(elsewhere)
    monkeypatch.setattr(Work, "do", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compress(tiny_marian, output, overwrite=True, **asked)
    assert (elsewhere / "model.safetensors").is_file()
    assert not (output / "converted").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"to": "tensorrt"}, "tensorrt"),
        ({"ratio": 1.0}, "ratio is 1.0"),
        ({"size": "10MB"}, "ratio and size are given"),
        ({"data": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"target_lang": "fr"}, "no column 'fr'"),
        ({"test": "tset.jsonl"}, "tset.jsonl"),
        ({"validation": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"quantization": "in8"}, "quantization is 'in8'; ctranslate2 has"),
        ({"to": "onnx", "quantization": "bfloat16"}, "quantization is 'bfloat16'; onnx has"),
        ({"minutes": 0}, "minutes is 0"),
        ({"minutes": float("inf")}, "minutes is inf"),
        ({"report_to": ["tensorbord"]}, "report_to is 'tensorbord': tensorbord is not supported"),
        ({"report_to": ["dvclive"]}, "report_to is 'dvclive': .*pip install"),
    ],
)
def test_what_is_refused_leaves_nothing(tiny_marian, data, tmp_path, changes, message):
    asked = {"data": data, "minutes": 0.01, "ratio": 2.0, "progress": False} | changes
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        compress(tiny_marian, tmp_path / "small", **asked)
    assert not (tmp_path / "small").exists()


def test_one_of_two_writers_is_refused(tiny_marian, data, tmp_path, monkeypatch):
    """Also where it would replace what the other one writes."""
    asked = {"data": data, "minutes": 0.01, "ratio": 2.0, "progress": False}
    monkeypatch.setattr(Work, "do", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compress(tiny_marian, tmp_path / "small", **asked)
    (tmp_path / "small" / "converted").mkdir()
    for overwrite in (False, True):
        with lock(tmp_path / "small"), pytest.raises(BlockingIOError, match="being written by another process"):
            compress(tiny_marian, tmp_path / "small", overwrite=overwrite, **asked)
    assert (tmp_path / "small" / "converted").is_dir()


def test_what_no_engine_supports_is_refused_before_the_work(tiny_marian, data, tmp_path):
    shutil.copytree(tiny_marian, tmp_path / "teacher")
    file = tmp_path / "teacher" / "generation_config.json"
    file.write_text(json.dumps(read_json(file) | {"guidance_scale": 2.0}))
    with pytest.raises(ValueError, match=r"teacher: generation_config\.json has guidance_scale=2\.0"):
        compress(tmp_path / "teacher", tmp_path / "small", data=data, minutes=0.01, ratio=2.0, progress=False)
    assert not (tmp_path / "small").exists()


def test_a_metric_that_means_nothing_is_refused_before_the_work(tiny_marian, tmp_path):
    rows = [{"translation": {"de": f"{n} Hunde.", "en": f"{n}只狗在雪地里玩耍。"}} for n in range(30)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="would mean nothing"):
        compress(tiny_marian, tmp_path / "small", data=str(tmp_path / "pairs.jsonl"), metrics=["multi-bleu"])
    assert not (tmp_path / "small").exists()


def test_what_cannot_be_met_is_asked_for_anew(tiny_marian, data, tmp_path, monkeypatch):
    asked = {"data": data, "minutes": 0.01, "progress": False}
    with pytest.raises(ValueError, match="cannot be met"):
        compress(tiny_marian, tmp_path / "small", size="1kB", **asked)
    monkeypatch.setattr(Work, "do", interrupt)
    with pytest.raises(KeyboardInterrupt):  # so it is not refused
        compress(tiny_marian, tmp_path / "small", ratio=2.0, **asked)
    assert read_json(tmp_path / "small" / "compress.json")["asked"]["ratio"] == 2.0


def test_the_calibration_text_has_no_pairs_of_the_test(tiny_marian, asked, tmp_path, monkeypatch):
    monkeypatch.setattr(Work, "recover", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compress(tiny_marian, tmp_path / "small", **asked | {"calibration": os.path.relpath(asked["data"])})
    report = read_json(tmp_path / "small" / "converted" / "compression.json")
    assert report["calibration"] == "calibration.jsonl"  # a part of it, not the whole file


@pytest.mark.parametrize(("quantization", "trained"), [("int8", None), ("int4", "int4")])
def test_the_recovery_knows_the_rounding_to_4_bits(tiny_marian, asked, tmp_path, monkeypatch, quantization, trained):
    monkeypatch.setattr(Work, "evaluate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compress(tiny_marian, tmp_path / "small", **asked, to="onnx", quantization=quantization)
    assert read_json(tmp_path / "small" / "recovered" / "recovery.json")["result"]["quantization"] == trained


@pytest.mark.parametrize(("to", "quantization"), [("onnx", "int4"), ("ctranslate2", "float16"), ("onnx", "float32")])
def test_what_is_compared_is_what_was_deployed(tiny_marian, asked, tmp_path, to, quantization):
    out = tmp_path / "small"
    compress(tiny_marian, out, **asked, to=to, quantization=quantization)
    compared = read_json(out / "engines.json")["deployed"][-1]
    assert compared["form"] == (to if quantization == "float32" else f"{to}-{quantization}")
    assert compared["disk_bytes"] == read_json(out / "deployed" / "export.json")["weight_bytes"]
    found = evaluate(out / "deployed", data=out / "data" / "test.jsonl", speed=False, num_beams=1, progress=False)
    assert compared["scores"] == pytest.approx({name: found.model.scores[name] for name in compared["scores"]})


def test_without_text_a_test_of_pairs_is_all_that_is_needed(tiny_marian, data, tmp_path, monkeypatch):
    asked = {"minutes": 0.01, "ratio": 2.0, "progress": False}
    with pytest.raises(ValueError, match="Neither data nor test is given"):
        compress(tiny_marian, tmp_path / "none", **asked)
    assert not (tmp_path / "none").exists()
    monkeypatch.setattr(Work, "deploy", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compress(tiny_marian, tmp_path / "small", test=data, **asked)
    parts = {name: read_json(tmp_path / "small" / name) for name in ("recovered/recovery.json", "results.json")}
    assert parts["recovered/recovery.json"]["result"]["with_teacher"]
    assert not (tmp_path / "small" / "data").exists()
    assert read_json(tmp_path / "small" / "converted" / "compression.json")["calibration"] == OWN_TEXT
    assert parts["results.json"]["sentences"] == 30


def test_it_goes_on_however_its_folder_and_options_are_spelled(tiny_marian, asked, finished, tmp_path, monkeypatch):
    shutil.copytree(finished, tmp_path / "small")
    for part in ("recovered", "deployed"):
        shutil.rmtree(tmp_path / "small" / part)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Work, "deploy", interrupt)
    for output in ("small", tmp_path / "small", "./small"):
        with pytest.raises(KeyboardInterrupt):
            compress(tiny_marian, output, **asked)
    monkeypatch.setattr(Work, "do", interrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            compress(tiny_marian, tmp_path / "other", vocabulary=(asked["data"],), **asked)


def test_only_what_is_missing_is_set_apart(tiny_marian, asked, tmp_path, monkeypatch):
    test = tmp_path / "test.jsonl"
    test.write_text(json.dumps({"translation": {"de": "Ein Hund.", "en": "A dog."}}) + "\n")
    monkeypatch.setattr(Work, "do", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compress(tiny_marian, tmp_path / "small", test=str(test), **asked)
    made = {file.stem: len(file.read_text().splitlines()) for file in (tmp_path / "small" / "data").glob("*.jsonl")}
    assert made == {"calibration": 27, "validation": 3}


@pytest.mark.parametrize(
    ("options", "method", "note"),
    [
        ({"ratio": 2.0}, "narrow", "The method is narrow"),
        ({"ratio": 2.0, "to": "onnx"}, None, ""),
        ({"rank": 4}, None, "expanded to full matrices"),
        ({"ratio": 2.0, "method": "low-rank"}, "low-rank", "expanded to full matrices"),
        ({"ratio": 2.0, "method": "narrow"}, "narrow", ""),
        ({"decoder_layers": 1}, None, ""),
    ],
)
def test_the_method_fits_the_engine(options, method, note):
    chosen, said = choose_method(CompressArguments("model", "output", **options))
    assert chosen.get("method") == method
    assert said.startswith(note) or note in said
    assert bool(said) == bool(note)
