"""Parallel data: every file type gives the same pairs, and unusable data says what is wrong with it."""

import gzip
import json

import pandas
import pytest
from transformers import MarianTokenizer

from lightformers_hf.text import load_parallel, tokenize_pairs

pytestmark = pytest.mark.quick

PAIRS = {"de": ["Guten Tag.", "null", '1984, "so"'], "en": ["Good day.", "NA", "zero"]}
ROWS = [dict(zip(PAIRS, row, strict=True)) for row in zip(*PAIRS.values(), strict=True)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def write(folder, name, rows=ROWS):
    path, frame = folder / name, pandas.DataFrame(rows)
    if name.endswith(".parquet"):
        frame.to_parquet(path)
    elif ".tsv" in name:
        path.write_text("\n".join("\t".join(line) for line in [rows[0], *(row.values() for row in rows)]) + "\n")
    elif ".csv" in name:
        frame.to_csv(path, index=False)
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    return str(path)


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.jsonl.gz", "x.csv", "x.csv.gz", "x.tsv", "x.parquet"])
def test_every_file_type_gives_the_texts_as_they_stand(tmp_path, name):
    pairs = load_parallel(write(tmp_path, name), source="de", target="en")
    assert pairs[:] == {"source": PAIRS["de"], "target": PAIRS["en"]}


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_languages_inside_translation(tmp_path, name):
    path = write(tmp_path, name, [{"id": i, "translation": row} for i, row in enumerate(ROWS)])
    pairs = load_parallel(path, source="en", target="de", max_samples=2)
    assert pairs[:] == {"source": PAIRS["en"][:2], "target": PAIRS["de"][:2]}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", "", "no rows"),
        ("empty.json", "[]", "no rows"),
        ("empty.csv", "", "no rows"),
        ("header.csv", "de,en\n", "no rows"),
        ("other.csv", "de,fr\na,b\n", "no column 'en': it has 'de', 'fr'"),
        ("other.jsonl", '{"translation": {"de": "a", "fr": "b"}}\n', "no column 'en': it has 'de', 'fr'"),
        ("null.jsonl", '{"de": "a", "en": "b"}\n{"de": "a", "en": null}\n', "row 2, 'en': expected text, found None"),
        ("number.jsonl", '{"de": 1, "en": "b"}\n', "row 1, 'de': expected text, found 1"),
        ("mixed.jsonl", '{"de": "a", "en": "b"}\n{"de": "a", "en": 3}\n', "row 2, 'en': expected text, found 3"),
        ("broken.jsonl", '{"de": "a", "en"\n', "cannot be read"),
        ("ragged.csv", "de,en\na,b\na,b,c\n", "cannot be read"),
        ("broken.parquet", "no parquet", "cannot be read"),
        ("text.docx", "a", "unknown type '.docx'"),
    ],
)
def test_unusable_files_say_why(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_parallel(str(tmp_path / name), source="de", target="en")


def test_a_missing_file_is_not_taken_for_a_hub_name(tmp_path):
    for name in (str(tmp_path / "none"), "none.jsonl.gz"):
        with pytest.raises(FileNotFoundError, match="none"):
            load_parallel(name, source="de", target="en")


def test_tokens_keep_their_end_and_count_it(tmp_path, tiny_marian, parallel_sentences):
    tokenizer = MarianTokenizer.from_pretrained(tiny_marian)
    pairs = load_parallel(write(tmp_path, "x.jsonl", parallel_sentences), source="de", target="en")
    tokens = tokenize_pairs(pairs, tokenizer, max_source_length=9, max_target_length=7)
    for row, pair in zip(tokens, parallel_sentences, strict=True):
        source = tokenizer(pair["de"])["input_ids"]
        target = tokenizer(text_target=pair["en"])["input_ids"]
        assert row["input_ids"] == [*source[:-1][:8], tokenizer.eos_token_id]
        assert row["labels"] == [*target[:-1][:6], tokenizer.eos_token_id]
        assert (row["source_length"], row["target_length"]) == (len(row["input_ids"]), len(row["labels"]))
