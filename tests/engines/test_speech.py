"""Exported models for speech transcribe what the checkpoint transcribes, in this package and in other programs."""

import json
import shutil
import subprocess

import numpy as np
import pytest
from speech import sound, train_whisper, write_speech

from lightformers_hf import convert, evaluate, export, load_engine
from lightformers_hf.engines.web import export_web
from lightformers_hf.evaluation.transcribe import load_speech, transcribe
from lightformers_hf.files import read_json, write_json
from lightformers_hf.speech import find_sounds

FORMS = {
    "dense": None,
    "narrow": {"method": "narrow", "ratio": 1.5},
    "low-rank": {"method": "low-rank", "ratio": 2, "pattern": {"embedding": 20}},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A Whisper and smaller ones, and speech."""
    root = tmp_path_factory.mktemp("speech")
    write_speech(root / "speech", train_whisper(root / "dense")[:8])
    for form, options in FORMS.items():
        if options:
            convert(root / "dense", root / form, calibration=str(root / "speech"), progress=False, **options)
    return root


@pytest.fixture(scope="module")
def exported(root):
    """{engine and form: an exported folder}, with all types of numbers of the engine."""
    folders = {}
    for form in FORMS:
        export(root / form, root / f"ctranslate2-{form}", to="ctranslate2", quantization="float32")
        export(root / form, root / f"onnx-{form}", to="onnx")
        export(root / form, root / f"onnx-{form}-float32", to="onnx", quantization="float32")
        folders |= {("ctranslate2", form): root / f"ctranslate2-{form}", ("onnx", form): root / f"onnx-{form}-float32"}
    return folders


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("engine", ["ctranslate2", "onnx"])
@pytest.mark.parametrize(("language", "beams"), [("en", 1), ("de", 1), (None, 1), ("en", 3)])
def test_engines_transcribe_as_the_checkpoint_does(engine, form, language, beams, root, exported):
    sounds = find_sounds(str(root / "speech"))
    options = {"language": language, "num_beams": beams, "max_new_tokens": 12}
    expected = transcribe(sounds, *load_speech(root / form), **options)
    found = transcribe(sounds, *load_speech(exported[engine, form]), **options)
    same = [one == other for one, other in zip(found, expected, strict=True)]
    assert all(same) or (beams > 1 and engine == "ctranslate2" and sum(same) >= 5)  # whose search differs


def test_a_transcript_may_fill_all_positions(root, monkeypatch):
    model, processor = load_speech(root / "dense")
    asked, generate = [], type(model).generate
    monkeypatch.setattr(
        type(model), "generate", lambda *a, **k: asked.append(k["max_new_tokens"]) or generate(*a, **k)
    )
    sounds = find_sounds(str(root / "speech"))[:1]
    assert transcribe(sounds, model, processor, language="en")[0]
    assert set(asked) == {model.config.max_target_positions - 4}  # less those of the prompt


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_fewer_bits_change_little(quantization, root, tmp_path):
    for form in FORMS:
        report = export(root / form, tmp_path / form, to="onnx", quantization=quantization)
        assert 0 < report.difference < 0.5
        assert load_speech(tmp_path / form)


def test_a_low_rank_table_stays_small(root, exported):
    sizes = {form: (root / f"onnx-{form}/onnx/decoder_model_merged_quantized.onnx").stat().st_size for form in FORMS}
    assert sizes["low-rank"] < sizes["dense"]


def test_an_export_is_measured_beside_its_teacher(root, exported):
    found = evaluate(root / "onnx-narrow", teacher=root / "dense", data=str(root / "speech"), progress=False)
    assert found.model.real_time_factor > 0
    assert found.model.disk_bytes == read_json(root / "onnx-narrow/export.json")["weight_bytes"]
    with pytest.raises(ValueError, match="transcribes sound: measure it by evaluate"):
        load_engine(root / "onnx-narrow")


def test_settings_that_an_export_lacks_are_named(root, tmp_path, caplog):
    shutil.copytree(root / "narrow", tmp_path / "model")
    file = tmp_path / "model" / "generation_config.json"
    for settings in ({}, {"no_repeat_ngram_size": 3, "repetition_penalty": 1.2}):
        write_json(read_json(file) | settings, file)
        export(tmp_path / "model", tmp_path / "out", to="onnx", quantization="int8", overwrite=True)
        named = [line for line in caplog.messages if "models for speech do not have" in line]
        assert len(named) == bool(settings)
    assert "asks for repetition_penalty=1.2, no_repeat_ngram_size=3, which" in named[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shortlist": "speech"}, "shortlist is for text"),
        ({"quantization": "int4", "calibration": "speech"}, "calibration is for text"),
        ({"source_lang": "en"}, "source_lang is for text"),
    ],
)
def test_options_for_text_are_refused(options, message, root, exported, tmp_path):
    options = {name: str(root / value) if value == "speech" else value for name, value in options.items()}
    with pytest.raises(ValueError, match=message):
        export(root / "narrow", tmp_path / "out", to="onnx", **options)
    (root / "narrow/preprocessor_config.json").rename(tmp_path / "kept")
    try:
        with pytest.raises(ValueError, match="holds no feature extractor"):
            export(root / "narrow", tmp_path / "out", to="onnx")
    finally:
        (tmp_path / "kept").rename(root / "narrow/preprocessor_config.json")
    assert not (tmp_path / "out").exists()


def test_a_transcript_has_no_more_tokens_than_positions(root, exported):
    sounds = find_sounds(str(root / "speech"))[:1]
    for folder in exported.values():
        assert transcribe(sounds, *load_speech(folder), language="en", max_new_tokens=500)


SCRIPT = """
import { env, pipeline } from "@huggingface/transformers";
import { readFileSync } from "fs";
env.allowRemoteModels = false;
env.localModelPath = process.argv[2];
const [samples, found] = [new Float32Array(readFileSync("sound.raw").buffer), {}];
for (const dtype of ["fp32", "q8", "fp16"]) {
  const transcribe = await pipeline("automatic-speech-recognition", process.argv[3], { dtype });
  const options = { language: "en", return_timestamps: "word", max_new_tokens: 12 };
  found[dtype] = await transcribe(samples, options);
}
console.log(JSON.stringify(found));
"""


@pytest.mark.parametrize("form", ["narrow", "low-rank"])
def test_transformers_js_transcribes_with_times_of_words(form, root, exported, node):
    (node / "run.mjs").write_text(SCRIPT, encoding="utf-8")
    sound("ccc").tofile(node / "sound.raw")
    command = ["node", "run.mjs", str(root), f"onnx-{form}"]
    done = subprocess.run(command, cwd=node, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    model, processor = load_speech(root / form)
    inputs = processor(sound("ccc"), sampling_rate=16000, return_tensors="pt")
    tokens = model.generate(**inputs, language="en", return_timestamps=True, max_new_tokens=12)
    expected = processor.batch_decode(tokens, skip_special_tokens=True)[0]
    assert found["fp32"]["text"].strip() == expected.strip()
    assert found["q8"]["chunks"]
    assert found["fp16"]["text"]


def test_faster_whisper_loads_the_folder(exported):
    faster_whisper = pytest.importorskip("faster_whisper")
    assert faster_whisper.WhisperModel(str(exported["ctranslate2", "narrow"]), device="cpu").model.is_multilingual


def test_the_page_transcribes_a_file_and_the_microphone(root, serve, chromium, tmp_path):
    import soundfile

    export_web(root / "narrow", tmp_path / "page", compare=root / "dense", source_lang="de")
    soundfile.write(tmp_path / "a.wav", np.stack([sound("ccc", 44100)] * 2, axis=1), 44100)
    (tmp_path / "b.wav").write_text("no sound")
    context = chromium.new_context(permissions=["microphone"])
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(error))
    page.goto(serve[0](tmp_path / "page"))
    page.wait_for_selector("html[data-ready=true]", timeout=30_000)
    assert page.input_value("#language") == "de"
    page.select_option("#language", "en")
    page.click("#translate")
    page.wait_for_selector("#message:has-text('Choose a file, or record.')")
    page.set_input_files("#file", tmp_path / "b.wav")
    page.click("#translate")
    page.wait_for_selector('#message:has-text("The browser can\'t decode b.wav as sound")')
    page.set_input_files("#file", tmp_path / "a.wav")
    page.click("#translate")
    page.wait_for_selector("article:last-child[data-speed]", timeout=30_000)
    assert [element.text_content() for element in page.query_selector_all(".translation")] == ["ccc"] * 2
    assert "0.4 s of sound" in page.text_content(".facts")
    page.evaluate("document.querySelectorAll('article').forEach((card) => delete card.dataset.speed)")
    page.click("#record")  # Chromium's own beep
    page.wait_for_selector("#record:has-text('Stop')")
    page.wait_for_timeout(1000)
    page.click("#record")
    page.wait_for_selector("article:last-child[data-speed]", timeout=30_000)
    assert not errors
    assert not (tmp_path / "page/model/onnx/encoder_model.onnx").exists()


@pytest.mark.parametrize(
    ("options", "message"), [({"source_lang": "fr"}, "the language is 'fr'"), ({"compare": "text"}, "two of one kind")]
)
def test_a_page_that_can_not_work_is_refused(options, message, root, tiny_marian, tmp_path):
    options = {name: tiny_marian if value == "text" else value for name, value in options.items()}
    with pytest.raises(ValueError, match=message):
        export_web(root / "narrow", tmp_path / "page", **options)
    assert not (tmp_path / "page").exists()
