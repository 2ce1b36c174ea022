"""T5s in other engines: far tokens, every layer's own biases, and what CTranslate2's own converter makes of them."""

import ctranslate2
import pytest
import torch
from checkpoints.families.test_t5 import make_teacher
from conversion.test_convert_t5 import make_tokenizer, words
from ctranslate2.converters import TransformersConverter
from ctranslate2.converters.transformers import _MODEL_LOADERS, T5Loader

from lightformers_hf import convert
from lightformers_hf.engines import ENGINES, export, load_engine
from lightformers_hf.engines.ctranslate2 import quantize

SENTENCES = [[5 + (7 * place + place**2) % 35 for place in range(length)] + [2] for length in (45, 3, 17)]


@pytest.mark.parametrize("to", ENGINES)
@pytest.mark.parametrize("case", ["v1.0", "v1.1", "mt5", "umt5"])
def test_tokens_of_dense_teachers(case, to, tmp_path):
    """Of sentences, and for so many tokens, that distances beyond the last bucket's border come."""
    teacher = make_teacher(case)
    teacher.generation_config.update(max_length=40, min_length=30, num_beams=4, early_stopping=True)
    teacher.save_pretrained(tmp_path / "teacher")
    export(tmp_path / "teacher", tmp_path / "out", to=to, quantization="float32")
    engine, checkpoint = load_engine(tmp_path / "out"), load_engine(tmp_path / "teacher")
    assert engine.longest_input is None
    targets = [[5 + place % 30 for place in range(length)] for length in (30, 4, 0)]
    for found, right in zip(engine.score(SENTENCES, targets), checkpoint.score(SENTENCES, targets), strict=True):
        assert found == pytest.approx(right, abs=1e-4)
    for beams in (1, 4) if to == "onnx" else (1,):
        assert engine.generate(SENTENCES, num_beams=beams) == checkpoint.generate(SENTENCES, num_beams=beams)


class UnscaledLoader(T5Loader):
    """Transformers now says of every T5 that its output layer is tied, by which the converter knows those to scale."""

    def get_model_spec(self, model):
        model.config.tie_word_embeddings = model.config.scale_decoder_outputs
        return super().get_model_spec(model)


@pytest.mark.parametrize("case", ["v1.0", "v1.1"])
@pytest.mark.parametrize("quantization", ["float32", "int8"])
def test_ctranslate2_computes_what_its_own_converter_makes(case, quantization, tmp_path, monkeypatch):
    monkeypatch.setitem(_MODEL_LOADERS, "T5Config", UnscaledLoader())
    teacher = make_teacher(case)
    teacher.resize_token_embeddings(len(words()))
    teacher.save_pretrained(tmp_path / "teacher")
    make_tokenizer().save_pretrained(tmp_path / "teacher")
    export(tmp_path / "teacher", tmp_path / "ours", to="ctranslate2", quantization=quantization)
    theirs = TransformersConverter(str(tmp_path / "teacher"))._load()
    theirs.validate()
    quantize(theirs, quantization)  # its own rounding to int8 is cut off where there is no VNNI
    (tmp_path / "theirs").mkdir()
    theirs.save(str(tmp_path / "theirs"))
    sources = [[words()[token] for token in sentence] for sentence in SENTENCES]
    targets = [[words()[place % 40] for place in range(4, 14)]] * 3
    scores = [
        [result.log_probs for result in ctranslate2.Translator(str(tmp_path / name)).score_batch(sources, targets)]
        for name in ("ours", "theirs")
    ]
    torch.testing.assert_close(torch.tensor(scores[0]), torch.tensor(scores[1]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("to", ENGINES)
def test_converted_ones_keep_their_answers(to, tmp_path):
    """Narrower heads, fewer neurons and factors under one budget; the report says what was multiplied out."""
    make_teacher("v1.1").save_pretrained(tmp_path / "teacher")
    convert(tmp_path / "teacher", tmp_path / "light", ratio=2, calibration_samples=16, progress=False)
    report = export(tmp_path / "light", tmp_path / "out", to=to, quantization="float32")
    assert report.difference < 1e-3
    engine, checkpoint = load_engine(tmp_path / "out"), load_engine(tmp_path / "light")
    options = {"num_beams": 1, "forced_length": 20}
    assert engine.generate(SENTENCES, **options) == checkpoint.generate(SENTENCES, **options)
