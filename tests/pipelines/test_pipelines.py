"""The pipelines that version 5 of transformers removed: results of version 4, sentences, exported models."""

import json
from pathlib import Path

import pytest
import torch
from models.strangers import BLOCKER, run_apart
from pipelines.calls import CALLS, CODES, HELLO, run
from pipelines.record import EXPECTED, make_checkpoints
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BertConfig,
    BertLMHeadModel,
    pipeline,
)
from transformers.pipelines import PIPELINE_REGISTRY

from lightformers_hf import convert, export, load_engine, translate

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return make_checkpoints(tmp_path_factory.mktemp("pipelines"))


@pytest.fixture(scope="module")
def light(tmp_path_factory, tiny_marian) -> Path:
    folder = tmp_path_factory.mktemp("pipelines") / "light"
    convert(tiny_marian, folder, ratio=1.5, method="paper", progress=False)
    return folder


@pytest.fixture
def german(parallel_sentences):
    return [pair["de"] for pair in parallel_sentences]


@pytest.mark.parametrize(
    "number", range(len(CALLS)), ids=lambda number: f"{number}-{CALLS[number][0]}-{CALLS[number][1]}"
)
def test_results_of_version_4(root, number):
    """`record.py` recorded them with transformers 4.57."""
    assert run(root, CALLS[number]) == json.loads(EXPECTED.read_text(encoding="utf-8"))[number]


def test_the_table_has_thirty_calls():
    assert len(CALLS) == len(json.loads(EXPECTED.read_text(encoding="utf-8"))) == 30


def test_sentences_are_those_of_translate(tiny_marian, german):
    """Spaces and line breaks between them are kept; a text that is not split is one sentence."""
    pipe = pipeline("translation", model=str(tiny_marian))
    text = f"{german[0]}  {german[1]}\n\n{german[2]} "
    (expected,) = translate([text], tiny_marian)
    assert pipe(text) == [{"translation_text": expected}]
    assert "  " in expected
    assert expected.count("\n") == 2
    (whole,) = translate([text], tiny_marian, split=False)
    assert pipe(text, split=False) == [{"translation_text": whole}] != pipe(text)
    assert pipe(["", german[0]]) == [{"translation_text": one} for one in translate(["", german[0]], tiny_marian)]
    tokens = pipe(text, return_tensors=True)[0]["translation_token_ids"]
    assert pipe.tokenizer.decode(tokens, skip_special_tokens=True).split() == expected.split()


def test_a_sentence_that_is_too_long(tiny_marian, german, caplog):
    long = ", ".join(german).replace(".", "")
    pipe = pipeline("translation", model=str(tiny_marian))
    assert pipe([long]) == [{"translation_text": translate([long], tiny_marian)[0]}]
    assert "1 inputs have more than 64 tokens, and were divided at punctuation or cut" in caplog.text
    ids = torch.tensor([pipe.tokenizer(long, truncation=True)["input_ids"]])
    cut = pipe.tokenizer.decode(pipe.model.generate(ids)[0], skip_special_tokens=True)
    assert pipe(long, truncation=True) == [{"translation_text": cut}]


def test_what_convert_and_export_wrote(light, german, tmp_path):
    expected = [{"translation_text": text} for text in translate(german, light)]
    checkpoint = pipeline("translation_de_to_en", model=str(light))
    assert checkpoint(german) == expected
    export(light, tmp_path / "onnx", to="onnx", quantization="float32")
    export(light, tmp_path / "ct2", to="ctranslate2", quantization="float32")
    for model in (str(tmp_path / "onnx"), str(tmp_path / "ct2"), load_engine(tmp_path / "onnx"), load_engine(light)):
        pipe = pipeline("translation", model=model)
        greedy = {"num_beams": 1, "max_length": 20}
        assert pipe(german, **greedy) == checkpoint(german, **greedy)
        ids = [one["translation_token_ids"].tolist() for one in pipe(german[:3], return_tensors=True, **greedy)]
        exact = checkpoint(german[:3], return_tensors=True, **greedy)
        assert ids == [one["translation_token_ids"].tolist() for one in exact]
    with pytest.raises(ValueError, match="top_k is no setting of an exported model"):
        pipe(german, top_k=3)
    with pytest.raises(ValueError, match="device is 'cuda', but the model was exported to run on the CPU"):
        pipeline("translation", model=str(tmp_path / "onnx"), device="cuda")


def test_without_the_package(light, german, tmp_path):
    """The pipeline's file is beside the weights, and every saved copy has it."""
    program = (
        BLOCKER
        + """
import json
from transformers import pipeline
pipe = pipeline("translation", model=sys.argv[1], trust_remote_code=True)
assert type(pipe).__module__.startswith("transformers_modules"), type(pipe)
json.dump(pipe(sys.argv[3:]), open("said.json", "w"))
pipe.save_pretrained(sys.argv[2])
"""
    )
    texts = [f"{german[0]} {german[1]}", german[2]]
    for source, target in ((light, tmp_path / "again"), (tmp_path / "again", tmp_path / "third")):
        run_apart(program, source, target, *texts, folder=tmp_path, HF_HUB_OFFLINE="1")
        said = json.loads((tmp_path / "said.json").read_text())
        assert said == [{"translation_text": text} for text in translate(texts, light)]
    code = {path.name for path in light.glob("*.py")}
    assert code == {path.name for path in (tmp_path / "third").glob("*.py")}
    assert len(code) == 7
    # With the package no code must be trusted.
    assert (
        type(pipeline("translation", model=str(tmp_path / "third"))).__module__ == "lightformers_hf.models.pipelines"
    )


def test_a_pipeline_of_another_model_is_saved(tiny_marian, german, tmp_path):
    pipeline("translation", model=str(tiny_marian)).save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "pipelines.py").is_file()
    again = pipeline("translation", model=str(tmp_path / "saved"), trust_remote_code=True)
    assert again(german[:1]) == [{"translation_text": translate(german[:1], tiny_marian)[0]}]


def test_languages(root, caplog):
    nllb = pipeline("translation", model=str(root / "nllb"))
    own = nllb(HELLO, src_lang="deu_Latn", tgt_lang="eng_Latn")
    assert nllb(HELLO) == own  # those of the tokenizer
    assert nllb(HELLO, **CODES["nllb"]) != own
    assert nllb.tokenizer.src_lang == "deu_Latn"
    with pytest.raises(ValueError, match=r"tgt_lang is 'fra', which .*nllb does not support; there is fra_Latn"):
        nllb("Hello", src_lang="eng_Latn", tgt_lang="fra")
    with pytest.raises(ValueError, match="src_lang is 'en', which"):
        pipeline("translation_en_to_fr", model=str(root / "nllb"))("Hello")
    nllb.tokenizer.tgt_lang, nllb.model.generation_config.forced_bos_token_id = None, None
    with pytest.raises(ValueError, match="Translation requires a `src_lang` and a `tgt_lang`"):
        nllb("Hello", src_lang="eng_Latn")
    marian = pipeline("translation", model=str(root / "marian"))
    assert marian(HELLO, src_lang="fr") == marian(HELLO)
    assert "src_lang 'fr' has no effect: the model has one pair of languages, with 'de'" in caplog.text


def test_tasks(tiny_marian):
    assert {"translation", "summarization", "text2text-generation"} <= {*PIPELINE_REGISTRY.get_supported_tasks()}
    with pytest.raises(KeyError, match="Invalid translation task translation_de, use 'translation_XX_to_YY'"):
        pipeline("translation_de", model=str(tiny_marian))
    with pytest.raises(KeyError, match="question-answering"):
        pipeline("question-answering", model=str(tiny_marian))
    with pytest.raises(ValueError, match=r"does not provide any default models for options \('de', 'en'\)"):
        pipeline("translation_de_to_en")


def test_bad_input(tiny_marian, tmp_path):
    pipe = pipeline("translation", model=str(tiny_marian))
    for wrong in ([3], [["Hallo"]], [None]):
        with pytest.raises(TypeError, match=r"the input contains the type \w+: expected texts"):
            pipe(wrong)
    with pytest.raises(TypeError, match="the input has the type int: expected a text"):
        pipe(3)
    with pytest.raises(ValueError, match="framework is 'tf', but the pipelines use PyTorch alone"):
        pipeline("translation", model=str(tiny_marian), framework="tf")
    with pytest.raises(ValueError, match="not used by the model"):
        pipe("Hallo", no_such_argument=1)
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_marian)
    with pytest.raises(ValueError, match="the model has no tokenizer: give tokenizer"):
        pipeline("translation", model=model)
    model.save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="the model has no tokenizer: give tokenizer"):
        pipeline("translation", model=str(tmp_path / "bare"))
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    BertLMHeadModel(BertConfig(vocab_size=130, is_decoder=True, **sizes)).save_pretrained(tmp_path / "bert")
    AutoTokenizer.from_pretrained(tiny_marian).save_pretrained(tmp_path / "bert")
    decoder = AutoModelForCausalLM.from_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="the model is a 'bert': this pipeline needs an encoder-decoder"):
        pipeline("summarization", model=decoder, tokenizer=pipe.tokenizer)
