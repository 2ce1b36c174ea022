"""A tiny Whisper learns tones, becomes smaller, recovers from sound with and without transcripts, and is deployed."""

import json
import random
import shutil

import numpy as np
import pytest
import soundfile
import torch
from datasets import Audio, Dataset
from speech import train_whisper, write_speech
from transformers import AutoModelForSpeechSeq2Seq, AutoProcessor
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from lightformers_hf import compress, convert, evaluate, export, recover
from lightformers_hf.conversion.calibration_speech import hear
from lightformers_hf.evaluation.comparison import compare_engines
from lightformers_hf.files import read_json
from lightformers_hf.hub import preview_push
from lightformers_hf.recovery import runs
from lightformers_hf.speech import find_sounds
from lightformers_hf.workflows import recover_speech, run
from lightformers_hf.workflows.compress import Work
from lightformers_hf.workflows.run import Run


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A trained Whisper, a smaller one, and speech."""
    root = tmp_path_factory.mktemp("speech")
    words = train_whisper(root / "whisper")
    write_speech(root / "with", words[:40])
    write_speech(root / "without", words[:40], transcribed=False)
    write_speech(root / "test", words[40:60])
    options = {"calibration": str(root / "without"), "pattern": {"embedding": "dense"}, "progress": False}
    convert(root / "whisper", root / "near", ratio=1.5, **options)
    convert(root / "whisper", root / "far", method="paper", ratio=8, progress=False)
    return root


def error_rate(folder, root):
    found = evaluate(folder, data=str(root / "test"), speed=False, progress=False, source_lang="en")
    return found.model.scores["wer"]


def test_calibration_on_sound_keeps_what_a_whisper_has_learned(root):
    assert error_rate(root / "whisper", root) == 0
    assert error_rate(root / "near", root) <= 10
    assert error_rate(root / "far", root) >= 50


def test_a_loaded_model_brings_its_processor(root, tmp_path):
    model = AutoModelForSpeechSeq2Seq.from_pretrained(root / "whisper")
    processor = AutoProcessor.from_pretrained(root / "whisper")
    options = {"calibration": str(root / "without"), "pattern": {"embedding": "dense"}, "progress": False}
    light = convert(model, tmp_path / "light", ratio=1.5, tokenizer=processor, **options)
    assert light.calibration == str(root / "without")
    for name in ("model.safetensors", "preprocessor_config.json"):
        assert (tmp_path / "light" / name).read_bytes() == (root / "near" / name).read_bytes()
    data = {"data": str(root / "test"), "speed": False, "progress": False, "source_lang": "en"}
    assert evaluate(model, tokenizer=processor, **data).model.scores["wer"] == 0
    export(model, tmp_path / "deployed", to="ctranslate2", quantization="float32", tokenizer=processor)
    assert error_rate(tmp_path / "deployed", root) == 0
    for call in (
        lambda: convert(model, ratio=1.5, tokenizer=processor.tokenizer, **options),
        lambda: evaluate(model, tokenizer=processor.tokenizer, **data),
    ):
        with pytest.raises(ValueError, match="for speech, and lacks its feature extractor: give tokenizer, its proc"):
            call()


def test_commands_take_a_folder_of_sound_alone(lightformers, root):
    code, _, _ = lightformers("plan", root / "whisper", "--ratio", 1.5, "--calibration", root / "without", "--quiet")
    assert code == 0
    code, _, errors = lightformers("evaluate", root / "whisper", "--data", root / "without")
    assert code == 1
    assert "has no transcript of 000.flac" in errors


@pytest.mark.parametrize("data", ["with", "without"])
def test_it_recovers(data, root, tmp_path):
    options = {"teacher": root / "whisper", "data": str(root / data), "minutes": 0.3, "device": "cpu"}
    found = recover(root / "far", tmp_path / "out", **options, source_lang="en", progress=False)
    assert found.with_teacher == (data == "without")
    assert found.best_by == "wer"
    assert found.after["wer"] < found.before["wer"]
    assert error_rate(tmp_path / "out", root) < error_rate(root / "far", root)
    assert AutoProcessor.from_pretrained(tmp_path / "out").feature_extractor.chunk_length == 2
    assert AutoModelForSpeechSeq2Seq.from_pretrained(tmp_path / "out").generation_config.is_multilingual


@pytest.fixture(scope="module")
def quieter(root):
    """Sounds that no conversion has read."""
    shutil.copytree(root / "test", root / "quieter")
    for file in (root / "quieter").glob("*.flac"):
        wave, rate = soundfile.read(file)
        soundfile.write(file, wave / 2, rate)
    return root / "quieter"


def test_sounds_of_the_calibration_are_known_without_transcripts(root, quieter, tmp_path, caplog):
    """They are not drawn for a validation where there are others, and an evaluation warns of them."""
    shutil.copytree(root / "without", tmp_path / "both/read")
    shutil.copytree(quieter, tmp_path / "both/new", ignore=lambda *_: ["metadata.jsonl"])
    options = {"teacher": root / "whisper", "minutes": 0.02, "progress": False, "source_lang": "en"}
    recover(root / "near", tmp_path / "out", data=str(tmp_path / "both"), **options)
    drawn = read_json(tmp_path / "out/validation.json")["source"]
    assert drawn
    assert all("/new/" in name for name in drawn)
    assert "calibrated on" not in caplog.text
    evaluate(root / "near", data=str(root / "with"), speed=False, progress=False, source_lang="en")
    assert "40 of the 40 sounds" in caplog.text


@pytest.mark.parametrize("is_known", [True, False])
def test_a_model_is_not_compared_on_sounds_that_it_was_calibrated_on(root, quieter, tmp_path, monkeypatch, is_known):
    """By these, it is better before a training than it is."""
    measure = Run.measure
    monkeypatch.setattr(Run, "measure", lambda *given: (measure(*given)[0] | {"wer": -1}, 1.0))  # which is best
    options = {"teacher": root / "whisper", "data": str(root / "without"), "minutes": 0.02, "source_lang": "en"}
    options |= {} if is_known else {"validation": str(quieter)}
    trained: list[dict] = []
    train = run.train
    monkeypatch.setattr(run, "train", lambda *given: (train(*given), trained.append(copy_weights(given[0].model))))
    found = recover(root / "near", tmp_path / "out", **options, progress=False)
    assert (found.best_step > 0) == is_known
    if is_known:  # such a validation can't tell what harms on other sound: the mean with the weights before
        folders = root / "near", tmp_path / "out"
        before, after = (copy_weights(AutoModelForSpeechSeq2Seq.from_pretrained(folder)) for folder in folders)
        for name, weight in after.items():
            assert torch.allclose(weight, (before[name] + trained[0][name]) / 2, atol=1e-6)


def copy_weights(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def test_its_validation_is_in_the_language_that_is_given(root, tmp_path, monkeypatch):
    """Detection may fail: of a model that lost much, and between languages that sound alike."""
    heard, generate = [], WhisperGenerationMixin.generate
    monkeypatch.setattr(
        WhisperGenerationMixin, "generate", lambda *a, **k: heard.append(k.get("language")) or generate(*a, **k)
    )
    options = {"teacher": root / "whisper", "data": str(root / "with"), "minutes": 0.02, "progress": False}
    recover(root / "near", tmp_path / "out", **options, validation=str(root / "test"), source_lang="de")
    assert heard
    assert all(set(languages) == {"<|de|>"} for languages in heard)


def test_it_resumes_with_the_same_transcripts(root, tmp_path, monkeypatch):
    def interrupt(self, args, state, control, **_):
        if state.global_step:
            raise KeyboardInterrupt

    options = {"teacher": root / "whisper", "data": str(root / "without"), "minutes": 0.02, "progress": False}
    monkeypatch.setattr(runs.Progress, "on_step_end", interrupt)
    with pytest.raises(KeyboardInterrupt):
        recover(root / "near", tmp_path / "out", **options)
    kept = read_json(tmp_path / "out/translations.json"), read_json(tmp_path / "out/validation.json")
    monkeypatch.undo()
    monkeypatch.setattr("lightformers_hf.workflows.recover_speech.hear", lambda *_: pytest.fail("transcribed again"))
    assert recover(root / "near", tmp_path / "out", **options).steps >= 1
    assert kept == (read_json(tmp_path / "out/translations.json"), read_json(tmp_path / "out/validation.json"))


def test_a_missing_transcript_leaves_the_others_as_references(root, tmp_path):
    folder = shutil.copytree(root / "with", tmp_path / "some")
    rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    rows[0]["text"] = ""
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"teacher": root / "whisper", "data": str(folder), "minutes": 0.02, "progress": False}
    assert not recover(root / "near", tmp_path / "out", **options).with_teacher


def test_it_needs_sound_alone(root, tmp_path):
    options = {"teacher": root / "whisper", "minutes": 1, "progress": False}
    with pytest.raises(ValueError, match="data is missing: a model for speech recovers from sound"):
        recover(root / "near", tmp_path / "out", **options)
    for name, value in {"exclude": str(root / "test"), "skip_bad_lines": True, "quantization": "int8"}.items():
        with pytest.raises(ValueError, match=f"{name} is for text"):
            recover(root / "near", tmp_path / "out", data=str(root / "with"), **{name: value}, **options)


def test_a_transcript_in_a_known_language_needs_no_teacher(root, tmp_path, monkeypatch):
    heard = []
    monkeypatch.setattr(recover_speech, "hear", lambda *arguments: heard.append(arguments) or hear(*arguments))
    data = {"data": str(root / "with"), "validation": str(root / "test"), "source_lang": "en"}
    recover(root / "near", tmp_path / "out", teacher=root / "whisper", minutes=0.02, progress=False, **data)
    pieces = [piece for arguments in heard for piece in arguments[3]]
    assert all(piece.text is None for piece in pieces)  # a few, to forecast the validation's time


def test_an_evaluation_has_no_options_without_effect(root, tmp_path, caplog):
    model, data = root / "near", str(root / "test")
    for options, message in [
        ({"comet": "x.ckpt"}, "comet is for text; .*near is a model for speech"),
        ({"split": "validation"}, "split is for data sets on the Hub, but .*test is local"),
    ]:
        with pytest.raises(ValueError, match=message):
            evaluate(model, data=data, progress=False, **options)
    assert evaluate(model, data=data, teacher=model, speed=False, progress=False).speed_ratio is None
    found = evaluate(model, data=data, teacher=model, max_samples=2, progress=False)
    assert min(found.model.real_time_factor, found.speed_ratio) > 0
    export(model, tmp_path / "deployed", to="ctranslate2")
    with pytest.raises(ValueError, match="was exported to run on the CPU, not on cuda"):
        evaluate(tmp_path / "deployed", data=data, device="cuda")
    assert "batch_size" not in caplog.text
    evaluate(tmp_path / "deployed", data=data, batch_size=2, max_samples=2, progress=False)
    assert "batch_size has no effect on an export" in caplog.text
    with pytest.raises(ValueError, match="new_tokens is for text"):
        compare_engines(str(root / "whisper"), [str(model)], data=data, new_tokens=3)


def test_half_of_all_sounds_have_a_background_that_is_quieter():
    draw, wave, other = random.Random(0), np.ones(1000, np.float32), np.full(300, -0.01, np.float32)
    levels = [recover_speech.add_background(wave, [other], draw)[0] - 1 for _ in range(200)]
    added = np.array([-level for level in levels if level])
    assert 70 < len(added) < 130
    assert -30 <= 20 * np.log10(added.min()) < -25
    assert -10 < 20 * np.log10(added.max()) <= -4.9
    silent = recover_speech.add_background(wave, [0 * other] * 9, draw)
    assert silent.dtype == np.float32
    assert (silent == wave).all()


def test_a_push_has_the_feature_extractor(root):
    assert "preprocessor_config.json" in preview_push(root / "near", "alice/near")


@pytest.mark.parametrize(("layout", "engine"), [("folder", "ctranslate2-int8"), ("data set", "onnx-int4")])
def test_one_call_does_it_all(layout, engine, root, tmp_path, monkeypatch):
    place = str(root / "with")
    if layout == "data set":
        rows = find_sounds(place)
        contents = [{"bytes": sound.content.read_bytes(), "path": sound.name} for sound in rows]
        data = Dataset.from_dict({"audio": contents, "sentence": [sound.text for sound in rows]})
        place = str(tmp_path / "data.parquet")
        data.cast_column("audio", Audio(decode=False)).to_parquet(place)
    options = {"calibration": place, "ratio": 1.5, "pattern": {"embedding": "dense"}, "minutes": 0.05}
    options |= dict(zip(("to", "quantization"), engine.split("-"), strict=True))
    found = compress(root / "whisper", tmp_path / "small", progress=False, **options)
    parts = [find_sounds(str(tmp_path / f"small/data/{part}.jsonl")) for part in ("calibration", "validation", "test")]
    assert [len(part) for part in parts] == [32, 4, 4]
    assert len({sound.read().tobytes() for part in parts for sound in part}) == len(set(read_all(place)))
    assert read_json(tmp_path / "small/converted/compression.json")["calibration"] == "calibration.jsonl"
    assert [place.scores["wer"] for place in found.engines.deployed] == [0, 0, 0, 0]
    assert {place.form for place in found.engines.deployed} == {"transformers", engine}
    assert found.engines.rows()["1 core, batch 1, beam 1"][0][2] == "x real time"
    assert error_rate(tmp_path / "small/deployed", root) == 0
    monkeypatch.setattr(Work, "convert", lambda self: pytest.fail("converted again"))
    assert compress(root / "whisper", tmp_path / "small", progress=False, **options).summary == found.summary


def read_all(place):
    return [sound.read().tobytes() for sound in find_sounds(place)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "calibration is missing: a model for speech needs sound"),
        ({"calibration": "without"}, "has sounds without transcripts: give test"),
        ({"calibration": "few"}, "holds 5 sounds: twenty and more are needed"),
        ({"calibration": "with", "test": "without"}, "has no transcript of"),
        ({"calibration": "with", "shortlist": "with"}, "shortlist is for text"),
        ({"data": "with", "skip_bad_lines": True}, "skip_bad_lines is for text"),
        ({"data": "with", "d_model": "75%"}, "d_model is for text"),
        ({"data": "with", "private": True}, "private needs push_to_hub"),
        ({"calibration": "with", "metrics": ["blue"]}, "blue"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_work(options, message, root, tmp_path):
    write_speech(tmp_path / "few", ["ab"] * 5)
    places = {name: root / name for name in ("with", "without")} | {"few": tmp_path / "few"}
    options = {
        name: str(places.get(value, value)) if isinstance(value, str) else value for name, value in options.items()
    }
    with pytest.raises(ValueError, match=message):
        compress(root / "whisper", tmp_path / "small", ratio=2, progress=False, **options)
    assert not (tmp_path / "small").exists()


def test_sound_without_transcripts_needs_a_test_alone(root, tmp_path, monkeypatch):
    monkeypatch.setattr(Work, "evaluate", interrupt)
    options = {"calibration": str(root / "without"), "test": str(root / "test"), "minutes": 0.01}
    with pytest.raises(KeyboardInterrupt):
        compress(root / "whisper", tmp_path / "small", ratio=1.5, progress=False, **options)
    assert read_json(tmp_path / "small/recovered/recovery.json")["result"]["with_teacher"]
    assert not (tmp_path / "small/data").exists()


def interrupt(self):
    raise KeyboardInterrupt
