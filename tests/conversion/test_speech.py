"""Whisper becomes a LightFormer for speech, whose calibration is sound."""

import json
import shutil
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from speech import RATE, make_whisper, sound, texts, write_speech
from transformers import AutoModelForSpeechSeq2Seq, AutoProcessor, WhisperFeatureExtractor

from lightformers_hf import convert, plan
from lightformers_hf.checkpoints.teacher import read
from lightformers_hf.conversion import allocation, calibration_speech, sensitivity
from lightformers_hf.conversion.calibration_speech import (
    NUMBERS,
    REPLACED,
    SAMPLES,
    draw_errors,
    draw_pieces,
    replace_tokens,
    sound_batches,
    token_weights,
)
from lightformers_hf.conversion.options import CompressionOptions, StudyOptions
from lightformers_hf.conversion.sensitivity import GIVEN, Calibration
from lightformers_hf.evaluation.transcribe import load_speech


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A Whisper, and speech with and without transcripts."""
    root = tmp_path_factory.mktemp("speech")
    make_whisper(root / "whisper")
    write_speech(root / "with", texts(12))
    write_speech(root / "without", texts(12), transcribed=False)
    return root


def logits(folder):
    inputs = AutoProcessor.from_pretrained(folder)(sound("abcd"), sampling_rate=RATE, return_tensors="pt")
    model = AutoModelForSpeechSeq2Seq.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(**inputs, decoder_input_ids=torch.tensor([[260, 261, 265, 3, 4]])).logits


@pytest.mark.parametrize("form", ["one file", "shards", "fp16", "untied"])
def test_full_rank_gives_whispers_logits(form, root, tmp_path):
    model = AutoModelForSpeechSeq2Seq.from_pretrained(root / "whisper")
    if form == "untied":
        model.config.tie_word_embeddings = False
        model.proj_out.weight = torch.nn.Parameter(model.proj_out.weight + 0.1)
    model.to(torch.float16 if form == "fp16" else torch.float32)
    model.save_pretrained(tmp_path / "whisper", max_shard_size="30KB" if form == "shards" else "1GB")
    AutoProcessor.from_pretrained(root / "whisper").save_pretrained(tmp_path / "whisper")
    convert(tmp_path / "whisper", tmp_path / "light", method="paper", energy=1.0, progress=False)
    expected = logits(tmp_path / "whisper")
    torch.testing.assert_close(logits(tmp_path / "light"), expected, atol=1e-4, rtol=1e-4)


OPTIONS = {
    "auto": {"ratio": 2, "calibration": "with"},
    "low-rank": {"ratio": 2, "method": "low-rank", "calibration": "without"},
    "narrow": {"ratio": 2, "method": "narrow", "calibration": "with"},
    "layers": {"decoder_layers": 1, "calibration": "with"},
    "groups": {"ratio": 1.5, "decoder_groups": 1, "calibration": "with"},
    "language": {"ratio": 2, "calibration": "without", "source_lang": "de", "calibration_samples": 3},
    "paper": {"ratio": 2, "method": "paper", "calibration_samples": 3},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_every_method_gives_a_model_that_transcribes(case, root, tmp_path, caplog):
    options = {name: str(root / value) if name == "calibration" else value for name, value in OPTIONS[case].items()}
    report = convert(root / "whisper", tmp_path / "light", progress=False, **options)
    assert report.parameters_after < report.parameters_before
    assert ("calibration_samples has no effect" in caplog.text) == (case == "paper")
    processor = AutoProcessor.from_pretrained(tmp_path / "light")
    model = AutoModelForSpeechSeq2Seq.from_pretrained(tmp_path / "light")
    inputs = processor(sound("abc"), sampling_rate=RATE, return_tensors="pt")
    assert model.generate(**inputs, language="en", return_timestamps=True).ndim == 2
    assert (report.family, report.architecture) == ("whisper", "lightformer_speech")
    assert report.auto_class == "AutoModelForSpeechSeq2Seq"
    assert 'pipeline("automatic-speech-recognition"' in (tmp_path / "light/README.md").read_text()


def test_the_dearer_the_errors_of_an_encoder_the_more_it_keeps(root, monkeypatch):
    kept = []
    for factor in (1, 4, 64):
        monkeypatch.setattr(allocation, "UNHEARD", factor)
        report = plan(root / "whisper", ratio=2, calibration=str(root / "with"), progress=False)
        kept.append(sum(one.parameters_after for one in report.matrices if one.name.startswith("encoder.")))
    assert kept[0] < kept[1] < kept[2]


def test_the_prompt_is_measured_but_not_predicted(root):
    """Later tokens attend to it: of a trained Whisper, errors there cost more than all others."""
    teacher = read(root / "whisper")
    options = CompressionOptions(ratio=2, calibration=str(root / "with"))
    pieces = draw_pieces(teacher, options, StudyOptions())
    batches = sound_batches(teacher.model, teacher, pieces, "en")
    given = sum(int((batch["labels"] == GIVEN).sum()) for batch in batches)
    rows = sum(int((batch["decoder_position_ids"] == 0).sum()) for batch in batches)
    positions = sum(batch["labels"].numel() for batch in batches)
    # Before the first token there are four with times off, and three with times on: all but the last predict a token
    # of the prompt.
    assert given == 3 * rows - len(batches)
    name = "model.decoder.layers.0.self_attn.q_proj"
    calibration = Calibration(teacher.model, [name], batches)
    assert len(calibration.token_weights([name])) == positions
    assert calibration.target_tokens == positions - given


def test_measured_positions_of_an_encoder_stand_for_all(root, monkeypatch):
    teacher, traces = read(root / "whisper"), []
    pieces = draw_pieces(teacher, CompressionOptions(ratio=2, calibration=str(root / "with")), StudyOptions())
    names = ["model.encoder.layers.0.fc1", "model.decoder.layers.1.encoder_attn.v_proj", "model.decoder.layers.0.fc1"]
    for every in (1, 2):
        for module in (calibration_speech, sensitivity):
            monkeypatch.setattr(module, "EVERY", every)
        calibration = Calibration(teacher.model, names, sound_batches(teacher.model, teacher, pieces, "en"))
        traces.append([calibration.gradients([name]).trace().item() for name in names])
    assert traces[1] == pytest.approx(traces[0], rel=0.2)


def test_a_model_for_speech_gets_no_joint_fit(root, tmp_path, monkeypatch):
    module = sys.modules["lightformers_hf.conversion.convert"]
    monkeypatch.setattr(module, "fit_jointly", lambda *_: pytest.fail("fitted jointly"))
    convert(root / "whisper", tmp_path / "light", ratio=4, calibration=str(root / "with"), progress=False)


def test_removed_layers_leave_the_alignment_heads(root, tmp_path):
    convert(root / "whisper", tmp_path / "light", decoder_layers=1, calibration=str(root / "with"), progress=False)
    model = AutoModelForSpeechSeq2Seq.from_pretrained(tmp_path / "light")
    assert model.generation_config.alignment_heads == [[0, 3]]  # of [[0, 1], [1, 3]]: the second layer is kept


def test_a_converted_model_is_converted_again(root, tmp_path):
    options = {"calibration": str(root / "with"), "progress": False}
    convert(root / "whisper", tmp_path / "once", ratio=1.5, **options)
    report = convert(tmp_path / "once", tmp_path / "twice", ratio=1.5, **options)
    assert report.parameters_after < report.parameters_before


def without_extractor(root, folder):
    shutil.copytree(root / "whisper", folder)
    for name in ("processor_config.json", "preprocessor_config.json"):
        (folder / name).unlink(missing_ok=True)
    return folder


def with_other_extractor(root, folder):
    shutil.copytree(root / "whisper", folder)
    WhisperFeatureExtractor(chunk_length=2, feature_size=80).save_pretrained(folder)
    (folder / "processor_config.json").unlink()
    with pytest.raises(ValueError, match="makes 80 bands"):
        load_speech(folder)
    return folder


def english_only(root, folder):
    shutil.copytree(root / "whisper", folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"is_multilingual": False}))
    return folder


def with_old_generation(root, folder, form):
    """As of models that were trained with early versions of transformers, or without this file."""
    shutil.copytree(root / "whisper", folder)
    file = folder / "generation_config.json"
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "max_length")
    kept = {name: json.loads(file.read_text())[name] for name in names}
    if form == "missing":
        file.unlink()
    else:
        file.write_text(json.dumps(kept | {"_from_model_config": form == "of the model"}))
    return folder


@pytest.mark.parametrize("form", ["old", "of the model", "missing"])
def test_an_old_generation_configuration_is_completed(form, root, tmp_path):
    old = with_old_generation(root, tmp_path / "old", form)
    assert load_speech(old)[0].generation_config.is_multilingual
    convert(old, tmp_path / "light", ratio=2, calibration=str(root / "without"), progress=False)
    found, expected = (AutoModelForSpeechSeq2Seq.from_pretrained(one).generation_config
                       for one in (tmp_path / "light", root / "whisper"))  # fmt: skip
    for name in ("no_timestamps_token_id", "is_multilingual", "lang_to_id", "task_to_id"):
        assert getattr(found, name) == getattr(expected, name)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (None, {}, "calibration needs sound: give a folder of speech .* or compress by --method paper"),
        (None, {"calibration": "silent"}, "is silent: expected speech"),
        (None, {"calibration": "with", "source_lang": "fr"}, "the language is 'fr'; .* transcribes de, en"),
        (None, {"calibration": "with", "calibration_samples": 99}, r"holds \d pieces with speech"),
        (None, {"calibration": "with", "vocabulary": ("texts",)}, "vocabulary is for text; whisper is a model for"),
        (without_extractor, {"calibration": "with"}, "holds no feature extractor"),
        (
            with_other_extractor,
            {"calibration": "with"},
            r"makes 80 bands and 200 frames .* the model reads \(16, 200, 16000\)",
        ),
        (english_only, {"calibration": "with", "source_lang": "de"}, "transcribes English only: remove the language"),
    ],
)
def test_what_does_not_fit_is_named(change, options, message, root, tmp_path):
    options = dict(options)
    if options.get("calibration") == "silent":
        options["calibration"] = str(write_speech(tmp_path / "silent", ["   "], transcribed=False))
    elif "calibration" in options:
        options["calibration"] = str(root / options["calibration"])
    model = change(root, tmp_path / "other") if change else root / "whisper"
    with pytest.raises(ValueError, match=message):
        plan(model, ratio=2, progress=False, **options)


def test_transcripts_with_errors_hold_what_the_model_predicts_and_other_tokens():
    end, likely = 50_256, 7
    names = ["Ġ5" if number in (642, 830) else "a" for number in range(end)]
    tokenizer = SimpleNamespace(convert_ids_to_tokens=lambda numbers: [names[number] for number in numbers])
    weights = token_weights(tokenizer, end)
    assert weights.sum().item() == pytest.approx(1, abs=1e-4)
    assert weights[[642, 830]].sum().item() == pytest.approx(NUMBERS, abs=1e-3)
    logits = torch.full((1, 1 + 400, end + 8), -100.0)
    logits[..., likely] = 0.0
    model = Mock(return_value=SimpleNamespace(logits=logits), config=SimpleNamespace(eos_token_id=end))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        rows = draw_errors(model, torch.zeros(1, 2, 4), [end + 1], [*range(399), end], weights)
    assert replace_tokens(torch.tensor([]), weights).tolist() == []  # of silence
    assert [row[-1] for row in rows] == [end] * SAMPLES
    assert [len(row) for row in rows] == [400 + 1] * SAMPLES
    drawn = torch.tensor(rows)[:, :-1]
    others = drawn[(drawn != likely) & (drawn != 642) & (drawn != 830)]
    assert 1 - (drawn == likely).double().mean() == pytest.approx(REPLACED, abs=0.03)
    assert others.max() < end
    assert len(others.unique()) > len(others) / 4  # where the transcript has one token
    assert (others < end / 10).double().mean() > 0.5  # the common ones come first
