"""Multilingual checkpoints: what is made of one translates between the two languages that were asked for."""

import json

import pytest
import torch
from transformers import AutoTokenizer, M2M100Tokenizer, MBartForConditionalGeneration

from lightformers_hf import convert, translate
from lightformers_hf.evaluation.evaluate import evaluate_model
from lightformers_hf.languages import set_language_codes
from lightformers_hf.loading import load_model, load_teacher

pytestmark = pytest.mark.quick

CODES = {"source_lang": "de=de_DE", "target_lang": "en=fr_XX"}


@pytest.fixture
def data(tmp_path, parallel_sentences):
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"translation": pair}) + "\n" for pair in parallel_sentences))
    return str(file)


@pytest.mark.parametrize("how", ["paper", "own text", "text"])
def test_the_result_keeps_its_languages(tiny_mbart50, data, tmp_path, how):
    given = {"calibration": data} if how == "text" else {}
    convert(
        tiny_mbart50,
        tmp_path / "light",
        ratio=1.2,
        method="paper" if how == "paper" else "auto",
        progress=False,
        **given,
        **CODES,
    )
    model, tokenizer = load_model(tmp_path / "light")
    de, fr, eos = tokenizer.convert_tokens_to_ids(["de_DE", "fr_XX", "</s>"])
    tokens = tokenizer("Zwei Hunde", text_target="Two dogs")
    assert (tokens["input_ids"][0], tokens["labels"][0], tokens["labels"][-1]) == (de, fr, eos)
    assert model.generate(torch.tensor([tokens["input_ids"]]), max_new_tokens=4)[0, 1] == fr
    assert AutoTokenizer.from_pretrained(tiny_mbart50).tgt_lang is None  # the teacher is as it was


def test_its_teacher_is_asked_for_the_same_languages(tiny_mbart50, data, tmp_path):
    convert(tiny_mbart50, tmp_path / "light", ratio=1.2, progress=False, **CODES)
    _, light = load_model(tmp_path / "light")
    source = torch.tensor([light("Zwei Hunde spielen im Schnee.")["input_ids"]])
    reference = MBartForConditionalGeneration.from_pretrained(tiny_mbart50).eval()
    first = light.convert_tokens_to_ids("fr_XX")
    wanted = reference.generate(source, forced_bos_token_id=first, num_beams=1, max_new_tokens=6, max_length=None)
    teacher = load_teacher(tiny_mbart50, light)
    (said,) = translate(["Zwei Hunde spielen im Schnee."], *teacher, num_beams=1, max_new_tokens=6)
    assert said == light.decode(wanted[0], skip_special_tokens=True)
    found = evaluate_model(
        str(tmp_path / "light"), data, str(tiny_mbart50), source="de", target="en", speed=False, max_new_tokens=6
    )
    assert found.teacher.bleu >= 0


def test_a_text_of_two_languages_needs_their_codes(tiny_mbart50, data, tmp_path):
    with pytest.raises(ValueError, match="many languages: give source_lang and target_lang"):
        convert(tiny_mbart50, tmp_path / "light", ratio=1.2, progress=False, calibration=data)
    assert not (tmp_path / "light").exists()


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ({"source_lang": "de_DE"}, "go together"),
        ({"source_lang": "de", "target_lang": "en_XX"}, "source_lang is 'de', which .* does not know.*COLUMN=CODE"),
        ({"source_lang": "de=de_DE", "target_lang": "en=en_X"}, "target_lang is 'en_X'.* en_XX"),
    ],
)
def test_codes_that_cannot_be(tiny_mbart50, tmp_path, codes, message):
    with pytest.raises(ValueError, match=message):
        convert(tiny_mbart50, tmp_path / "light", method="paper", ratio=1.2, progress=False, **codes)
    assert not (tmp_path / "light").exists()


def test_a_checkpoint_of_one_pair_takes_no_codes(tiny_marian, tmp_path):
    with pytest.raises(ValueError, match="with a multilingual tokenizer only"):
        convert(tiny_marian, tmp_path / "light", method="paper", ratio=1.2, progress=False, **CODES)


def test_codes_that_are_no_tokens(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "▁a": 4}))
    import sentencepiece

    text = iter(["a b c d e f g"] * 5)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=text, model_prefix=str(tmp_path / "spm"), vocab_size=12, minloglevel=2
    )
    tokenizer = M2M100Tokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "spm.model"))
    assert set_language_codes(tokenizer, "de", "fr") == tokenizer.get_lang_id("fr")
    assert tokenizer("a")["input_ids"][0] == tokenizer.get_lang_id("de")
