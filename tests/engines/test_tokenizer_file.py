"""`tokenizer.json` made from SentencePiece models cuts and decodes as the tokenizer that it was made from."""

import pytest
from conftest import ENGLISH, GERMAN
from conversion.vocabulary.checkpoints import make_checkpoint
from tiny import make_tokenizer
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from lightformers_hf.engines.tokenizer_file import DIFFICULT, FILE, MARK, sample_sentences, write_tokenizer_file


@pytest.mark.parametrize(("name", "sentences"), [("marian", 10_000), ("m2m_100", 2_000)])
def test_ids_and_texts_are_those_of_the_slow_tokenizer(name, sentences, tmp_path):
    """Sentences with other scripts, emoji and odd spaces; Marian's target has pieces that its source lacks.

    A run of characters that the source's model lacks is one unknown token here; Marian's tokenizer looks it up among
    the target's tokens.
    """
    make_checkpoint(name, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert not (tmp_path / "model" / FILE).exists()
    report = write_tokenizer_file(tokenizer, tmp_path)
    assert (report.texts, report.missing) == (0, "")
    assert f"{report.ids} get other ids" in report.lines()[0]
    made = Tokenizer.from_file(str(tmp_path / FILE))
    foreign = {number for token, number in made.get_vocab().items() if token.startswith(MARK)}
    for text in sample_sentences(tokenizer, sentences):
        ids = [tokenizer.unk_token_id if number in foreign else number for number in tokenizer(text)["input_ids"]]
        assert made.encode(text).ids == ids


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_characters_that_are_no_piece_are_bytes(kind, tmp_path):
    options = {"byte_fallback": True, "model_type": kind, "hard_vocab_limit": False}
    tokenizer = make_tokenizer(tmp_path / "model", GERMAN + ENGLISH, 330, **options)
    report = write_tokenizer_file(tokenizer, tmp_path)
    made = Tokenizer.from_file(str(tmp_path / FILE))
    for text in DIFFICULT:
        ids = tokenizer(text)["input_ids"]
        assert made.encode(text).ids == ids
        assert tokenizer.unk_token_id not in ids
        assert made.decode(ids).strip() == tokenizer.decode(ids, skip_special_tokens=True).strip()
    assert report.texts == 0


def test_two_vocabularies_have_no_common_file(tmp_path):
    make_checkpoint("marian_apart", tmp_path / "model")
    report = write_tokenizer_file(AutoTokenizer.from_pretrained(tmp_path / "model"), tmp_path)
    assert "separate vocabularies" in report.lines()[0]
    assert not (tmp_path / FILE).exists()
