"""Which tokens stay: by frequency, by language; and what cannot be, said in one message before anything is written."""

import json
import shutil

import pytest
import torch
from conftest import ENGLISH, GERMAN
from conversion.vocabulary.checkpoints import make_checkpoint
from tiny import word_tokenizer
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig

from lightformers_hf import convert, plan
from lightformers_hf.conversion.vocabulary import KeptTokens
from lightformers_hf.vocabularies import renumber_generation

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def nllb(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nllb") / "source"
    make_checkpoint("nllb", folder)
    return folder


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("\n".join(GERMAN + ENGLISH), encoding="utf-8")
    return str(file)


def sizes(*arguments, **options):
    return plan(*arguments, progress=False, **options).vocabulary["source"]


def test_the_most_frequent_tokens_stay(nllb, text, tmp_path):
    everything = sizes(nllb, vocabulary=text, languages="deu_Latn,eng_Latn")[0]
    few = everything - 20
    report = convert(
        nllb, tmp_path / "few", vocabulary=text, languages=["deu_Latn"], vocabulary_size=few, ratio=1, progress=False
    )
    assert everything - 25 <= report.vocabulary["source"][0] <= few
    tokenizer, before = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "few", nllb))
    sentence = GERMAN[0]
    assert len(tokenizer(sentence)["input_ids"]) >= len(before(sentence)["input_ids"])
    assert tokenizer.decode(tokenizer(sentence)["input_ids"], skip_special_tokens=True) == sentence
    assert "eng_Latn" not in tokenizer.get_vocab()
    assert (tokenizer.src_lang, tokenizer.tgt_lang) == ("deu_Latn", None)
    with pytest.raises(ValueError, match=r"vocabulary_size is 9, but \d+ tokens must stay .*: give \d+ or more"):
        sizes(nllb, vocabulary=text, vocabulary_size=9)


def test_languages_of_the_sides_stay_and_lead(nllb, text, tmp_path):
    sides = {"source_lang": "fra_Latn", "target_lang": "spa_Latn"}
    convert(nllb, tmp_path / "out", vocabulary=text, languages="ita_Latn", **sides, ratio=1, progress=False)
    model, tokenizer = (auto.from_pretrained(tmp_path / "out") for auto in (AutoModelForSeq2SeqLM, AutoTokenizer))
    codes = [token for token in tokenizer.all_special_tokens if "_" in token]
    assert sorted(codes) == ["fra_Latn", "ita_Latn", "spa_Latn"]
    first = model.generate(**tokenizer("Zwei", return_tensors="pt"), max_new_tokens=3, max_length=None)[0, 1]
    assert tokenizer.convert_ids_to_tokens(int(first)) == "spa_Latn"


def test_trimming_comes_before_compression(nllb, text, tmp_path):
    options = {"vocabulary": text, "languages": "deu_Latn,eng_Latn", "progress": False}
    convert(nllb, tmp_path / "pair", **options)
    report = plan(tmp_path / "pair", ratio=2, method="paper", progress=False)
    both = plan(nllb, ratio=2, method="paper", **options)
    assert both.parameters_after == report.parameters_after
    assert [matrix.m for matrix in both.matrices] == [matrix.m for matrix in report.matrices]


def test_any_number_of_texts_of_any_kind(nllb, text, tmp_path):
    data = tmp_path / "more.jsonl"
    data.write_text(json.dumps({"translation": {"de": "0 1 2", "en": "3 4 5"}, "id": 7}) + "\n")
    kept, _ = sizes(nllb, vocabulary=[text, str(data)], languages="deu_Latn,eng_Latn")
    assert kept >= sizes(nllb, vocabulary=text, languages="deu_Latn,eng_Latn")[0]


def test_a_compressed_checkpoint_is_trimmed_too(tmp_path, text):
    large = make_checkpoint("marian", tmp_path / "source")
    sides = {"source_lang": "de", "target_lang": "en"}
    convert(tmp_path / "source", tmp_path / "light", pattern={"embedding": 4}, method="paper", progress=False)
    options = {"vocabulary": text, "vocabulary_size": 70, "ratio": 1, "progress": False}
    convert(tmp_path / "light", tmp_path / "small", **options, **sides)
    light, small = (AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name).eval() for name in ("light", "small"))
    assert small.config.embedding_rank == light.config.embedding_rank == 4
    assert small.config.vocab_size <= 70 < light.config.vocab_size == large.config.vocab_size
    before, after = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("light", "small"))
    old = {number: before.get_vocab()[token] for token, number in after.get_vocab().items()}
    order = torch.tensor([old[number] for number in range(len(old))])
    ids = after("Hund", return_tensors="pt")["input_ids"]
    expected = light(input_ids=order[ids], decoder_input_ids=order[ids]).logits[..., order]
    torch.testing.assert_close(small(input_ids=ids, decoder_input_ids=ids).logits, expected, atol=1e-5, rtol=1e-4)


def test_forbidden_and_forced_tokens_get_their_new_ids():
    kept = KeptTokens([1, 3, 5, 7], [1, 3, 5, 7], None)
    generation = GenerationConfig(
        eos_token_id=[5, 7], forced_bos_token_id=3, suppress_tokens=[2, 7], bad_words_ids=[[1], [2], [5, 4], [5, 3]],
        begin_suppress_tokens=[2], sequence_bias=[[[5, 3], 1.5], [[2], -1.0]],
    )  # fmt: skip
    renumber_generation(generation, kept.target)
    assert (generation.eos_token_id, generation.forced_bos_token_id) == ([2, 3], 1)
    assert (generation.suppress_tokens, generation.begin_suppress_tokens) == ([3], None)
    assert generation.bad_words_ids == [[0], [2, 1]]
    assert generation.sequence_bias == [[[2, 1], 1.5]]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("Hund", {"languages": "deu_Latin"}, "languages has 'deu_Latin', which .* not support; there is deu_Latn"),
        ("", {}, r"text\.txt holds no text"),
        (" \n\n", {}, r"text\.txt holds no text"),
        ("漢字\n", {}, "has 0 of 1 tokens of the source text"),
        (b"\xff\xfe\x00\x01", {}, r"text\.txt cannot be read as text"),
        ("a\0b", {}, "expected text, found"),
    ],
)
def test_texts_and_languages_that_cannot_be(nllb, tmp_path, content, options, message):
    file = tmp_path / "text.txt"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        convert(nllb, tmp_path / "out", vocabulary=str(file), ratio=1, progress=False, **options)
    assert not (tmp_path / "out").exists()


def test_one_pair_has_no_languages(tiny_marian, text, tmp_path):
    with pytest.raises(ValueError, match="has no language codes: remove languages"):
        plan(tiny_marian, vocabulary=text, languages="de", progress=False)


def test_a_tokenizer_of_no_known_kind(tiny_marian, text, tmp_path):
    shutil.copytree(tiny_marian, tmp_path / "words", ignore=lambda *_: ["vocab.json", "source.spm", "target.spm"])
    words = ["[UNK]", "[PAD]", "Hund"]
    word_tokenizer(words, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(tmp_path / "words")
    with pytest.raises(ValueError, match=r"not supported \(its model is WordLevel.*remove vocabulary"):
        plan(tmp_path / "words", vocabulary=text, progress=False)
