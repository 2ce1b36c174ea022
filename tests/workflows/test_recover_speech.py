"""A tiny Whisper learns tones, becomes smaller, and recovers from sound with and without transcripts."""

import pytest
from speech import train_whisper, write_speech
from transformers import AutoModelForSpeechSeq2Seq, AutoProcessor

from lightformers_hf import convert, evaluate, recover
from lightformers_hf.files import read_json
from lightformers_hf.recovery import runs


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


def test_it_needs_sound(root, tmp_path):
    with pytest.raises(ValueError, match="data is missing: a model for speech recovers from sound"):
        recover(root / "near", tmp_path / "out", teacher=root / "whisper", minutes=1, progress=False)
