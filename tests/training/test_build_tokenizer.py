"""Tokenizers of the three kinds: what AutoTokenizer loads, text there and back, ids by frequency, bad input."""

import gzip
import json
from collections import Counter

import build_tokenizer as script
import pytest
from transformers import AutoTokenizer

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
TEXT = " the <unk> sat on the mat , the end . \n\n <unk> <unk> <unk> <unk> : a cat , a mat \n"


@pytest.fixture
def pairs(tmp_path, parallel_sentences):
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps({"translation": pair}) + "\n" for pair in parallel_sentences), encoding="utf-8")
    return file


def build(output, *options):
    script.main([*map(str, options), "--output", str(output)])
    return AutoTokenizer.from_pretrained(output)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_subwords_of_both_languages_and_back(kind, pairs, tmp_path, parallel_sentences):
    tokenizer = build(tmp_path / "out", pairs, "--columns", "de", "en", "--kind", kind, "--vocab-size", 120)
    assert len(tokenizer) == 120
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3]) == SPECIAL
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (
        0, 1, 2, 3
    )  # fmt: skip
    for sentence in parallel_sentences:
        for text in sentence.values():
            encoded = tokenizer(text)
            assert set(encoded) == {"input_ids", "attention_mask"}  # what every model here takes
            ids = encoded["input_ids"]
            assert ids[-1] == 2
            assert 3 not in ids
            assert tokenizer.decode(ids, skip_special_tokens=True) == text
    # One vocabulary: pieces of either language alone are in it; one letter, one character, is unknown.
    pieces = tokenizer.tokenize("Straße street")
    assert "".join(pieces).replace("▁", " ") == " Straße street"
    assert 3 in tokenizer("日")["input_ids"]
    assert not [piece for piece in tokenizer.get_vocab() if len(piece) > 1 and piece.endswith(".")]


def test_words_are_ordered_by_frequency_and_keep_the_unknown_word_of_the_text(tmp_path):
    (tmp_path / "text.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    tokenizer = build(tmp_path / "all", tmp_path / "text.txt.gz", "--kind", "words")
    counts = Counter(TEXT.split())
    words = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    assert words[:4] == SPECIAL
    assert sorted(words[4:]) == sorted(counts.keys() - {"<unk>"})
    frequencies = [counts[word] for word in words[4:]]
    assert frequencies == sorted(frequencies, reverse=True)
    ids = tokenizer("the <unk> dog sat")["input_ids"]  # nothing added behind it
    assert tokenizer.convert_ids_to_tokens(ids) == ["the", "<unk>", "<unk>", "sat"]
    assert tokenizer.decode(tokenizer("the cat , on a mat")["input_ids"]) == "the cat , on a mat"

    few = build(tmp_path / "few", tmp_path / "text.txt.gz", "--kind", "words", "--vocab-size", 6)
    assert few.convert_ids_to_tokens(list(range(len(few))))[:5] == [*SPECIAL, "the"]
    assert len(few) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kind", "bpe"], "needs --vocab-size"),
        (["--kind", "bpe", "--vocab-size", "4"], "vocab_size is 4"),
        (["--kind", "words", "--columns", "fr"], "no column 'fr': it has 'de', 'en'"),
        (["none.txt", "--kind", "words"], "No data file none.txt"),
        (["empty.txt", "--kind", "words"], "empty.txt is empty"),
        (["blank.txt", "--kind", "words"], "no words"),
        (["numbers.jsonl", "--kind", "words"], "expected a text in every row"),
    ],
)
def test_bad_input_leaves_no_file(options, message, pairs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text("\n \n")
    (tmp_path / "numbers.jsonl").write_text('{"text": 1}\n')
    before = sorted(tmp_path.iterdir())
    data = [] if options[0].endswith(("txt", "jsonl")) else [pairs, "--columns", "de", "en"]
    with pytest.raises((ValueError, OSError), match=message):
        build(tmp_path / "out", *data, *options)
    assert sorted(tmp_path.iterdir()) == before


def test_nothing_is_written_over(pairs, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="choose another folder"):
        build(tmp_path / "out", pairs, "--columns", "de", "--kind", "words")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["notes.txt"]
