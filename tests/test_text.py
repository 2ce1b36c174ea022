"""Parallel data: every file type gives the same pairs, and unusable data says what is wrong with it."""

import errno
import gzip
import io
import json
import os
from functools import partial

import pandas
import pyarrow
import pytest
from datasets import Dataset, DatasetDict
from pyarrow import parquet
from transformers import MarianTokenizer

from lightformers_hf import translate
from lightformers_hf.corpus import Corpus
from lightformers_hf.evaluation.translate import translate_stream
from lightformers_hf.loading import load_model
from lightformers_hf.text import find_texts, load_lines, load_parallel, load_rows, select_texts, tokenize_pairs

pytestmark = pytest.mark.quick

PAIRS = {"de": ["Guten Tag.", "null", '1984, "so"'], "en": ["Good day.", "NA", "zero"]}
ROWS = [dict(zip(PAIRS, row, strict=True)) for row in zip(*PAIRS.values(), strict=True)]


def load_text(data, **columns):
    """The columns of text that a corpus finds."""
    rows = load_rows(data)
    source, target, prefix = find_texts(rows, data, **columns)
    return select_texts(rows, data, source, target).map(lambda row: {"source": prefix + row["source"]})


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def write(folder, name, rows=ROWS):
    path, frame = folder / name, pandas.DataFrame(rows)
    if name.endswith(".parquet"):
        frame.to_parquet(path)
    elif ".tsv" in name:
        text = "\n".join("\t".join(line) for line in [rows[0], *(row.values() for row in rows)]) + "\n"
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    elif ".csv" in name:
        frame.to_csv(path, index=False)
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    return str(path)


@pytest.mark.parametrize(
    "name", ["x.jsonl", "X.JSONL", "x.json", "x.jsonl.gz", "x.csv", "x.csv.gz", "x.tsv", "x.parquet"]
)
def test_every_file_type_gives_the_texts_as_they_stand(tmp_path, name):
    """Of another file of the same path and time, too."""
    for rows in (ROWS[::-1], ROWS):
        path = write(tmp_path, name, rows)
        os.utime(path, (1e9, 1e9))
        pairs = load_parallel(path, source="de", target="en")
        assert pairs[:] == {"source": [row["de"] for row in rows], "target": [row["en"] for row in rows]}


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_languages_inside_translation(tmp_path, name):
    path = write(tmp_path, name, [{"id": i, "translation": row} for i, row in enumerate(ROWS)])
    pairs = load_parallel(path, source="en", target="de", max_samples=2)
    assert pairs[:] == {"source": PAIRS["en"][:2], "target": PAIRS["de"][:2]}


@pytest.mark.parametrize("load", [load_parallel, partial(load_text, default=("de", "en"))])
@pytest.mark.parametrize("names", [("src", "tgt"), ("tgt", "src")])
@pytest.mark.parametrize("source", ["de", "de=translate: "])
def test_the_only_two_columns_of_text_are_source_and_target(tmp_path, caplog, names, load, source):
    path = write(tmp_path, "x.jsonl", [dict(zip(names, row.values(), strict=True)) for row in ROWS])
    pairs = load(path, source=source, target="en")
    assert pairs["source"][:] == [source.partition("=")[2] + text for text in PAIRS["de"]]
    assert pairs["target"][:] == PAIRS["en"]
    assert f"{names[0]!r} and {names[1]!r}, are taken as source and target" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("numbers.csv", "key,text\n17,a\n18,b\n", "no column 'de' nor 'en'.*Give source_lang and target_lang"),
        ("languages.csv", "fr,es\na,b\n", "no column 'de' nor 'en'"),
        ("codes.csv", "fra_Latn,es-MX\na,b\n", "no column 'de' nor 'en'"),
        ("three.csv", "key,src,tgt\na,b,c\n", "no column 'de' nor 'en'"),
        ("empty.jsonl", "", "no rows"),
        ("empty.json", "[]", "no rows"),
        ("empty.csv", "", "no rows"),
        ("header.csv", "de,en\n", "no rows"),
        ("other.csv", "de,fr\na,b\n", "no column 'en': it has 'de', 'fr'"),
        ("other.jsonl", '{"translation": {"de": "a", "fr": "b"}}\n', "no column 'en': it has 'de', 'fr'"),
        ("null.jsonl", '{"de": "a", "en": "b"}\n{"de": "a", "en": null}\n', "row 2 has no 'en': expected text"),
        ("number.jsonl", '{"de": 1, "en": "b"}\n', "row 1, 'de': expected text, found 1"),
        (
            "columns.json",
            '{"de": ["a", ' + '"b", ' * 99 + '"c"], "en": ["a"]}',
            "row 1, 'de': expected text, found .{60}$",
        ),
        ("mixed.jsonl", '{"de": "a", "en": "b"}\n{"de": "a", "en": 3}\n', "row 2, 'en': expected text, found 3"),
        ("broken.jsonl", '{"de": "a", "en": "b"}\n\n{"de": "a", "en"\n', "line 3 is no JSON object: Expecting ':'"),
        ("headless.tsv", f"{'Ein Hund' * 9}\tA dog\nb\tc\n", "Ein Hund.{5}…', 'A dog'. Its first line must name"),
        ("trailing.csv", "de,en\na,b\nEin Hund,A dog,\n", "cannot be read.*line 3: 3 fields, the header names 2"),
        ("all.csv", "de,en\nEin Hund,A dog,\nEine Katze,A cat,\n", "line 2: 3 fields, the header names 2"),
        ("all.tsv", "de\ten\nEin Hund\tA dog\t\n", "line 2: 3 fields"),
        ("few.csv", 'de,en\n"Ein\nHund",A dog\nKatze\n', "line 4: 1 field, the header names 2"),
        ("few.tsv", "de\ten\na\tb\n\n\nEin Hund\n", "line 5: 1 field"),
        ("fewer.csv", "de,en,\na,b\n", "line 2: 2 fields, the header names 3"),
        ("twice.csv", "de,de\na,b\n", "line 1 names a column twice"),
        ("quote.csv", 'de,en\na,b\n"Ein Hund,A dog\n', "line 3: a quote is not closed"),
        ("return.tsv", "de\ten\na\tb\nEin\rHund\tA dog\n", r"return.tsv .*: line 3: holds a carriage return \(\\r\)"),
        ("semicolons.csv", "de;en\na;b\n", "semicolons.csv .*: line 1 names one column, 'de;en': put a comma between"),
        ("commas.tsv", "\nde,en\na,b\n", "commas.tsv .*: line 2 names one column, 'de,en': put a comma between"),
        ("return.txt", "a\r\r\nEin\rHund\r\n", r"return.txt .*: line 2: holds a carriage return \(\\r\)"),
        (
            "half.jsonl",
            '{"de": "a", "en": "b"}\n{"de": "\\ud83d", "en": "b"}\n',
            r"line 2 holds the lone surrogate \\ud83d",
        ),
        (
            "lacks.jsonl",
            '{"translation": {"de": "a", "en": "b"}}\n{"translation": {"de": "a"}}\n',
            "row 2 has no 'en'",
        ),
        ("blank.csv", 'de,en\na,""\nb," "\n', "'en' is empty in every row: give text"),
        ("broken.parquet", "no parquet", "cannot be read"),
        ("text.docx", "a", "unknown type '.docx'"),
    ],
)
def test_unusable_files_say_why(tmp_path, caplog, capsys, name, content, message):
    """And nothing else is said, such as by the parsers."""
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_parallel(str(tmp_path / name), source="de", target="en")
    assert "ArrowInvalid" not in caplog.text + "".join(capsys.readouterr())


def test_texts_that_are_empty_are_counted(tmp_path, caplog):
    (tmp_path / "some.csv").write_text("de,en\na,b\nc, \n,\xa0\n")
    assert len(load_parallel(str(tmp_path / "some.csv"), source="de", target="en")) == 3
    assert "'de' is empty in 1 of 3 rows" in caplog.text
    assert "'en' is empty in 2 of 3 rows, first in row 2: remove them" in caplog.text


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.csv", "x.tsv", "x.txt"])
def test_text_that_is_not_utf8_names_its_file_and_line(tmp_path, name):
    rows = [f"de{i},en{i}" for i in range(300)]
    if ".jsonl" in name:
        rows = [json.dumps(dict(zip(["de", "en"], row.split(","), strict=True))) for row in rows]
    elif name == "x.tsv":
        rows = [row.replace(",", "\t") for row in rows]
    for encoding, message in (
        ("latin-1", r"line 201 is not UTF-8 \(byte 0xdf at character \d+\): save it as UTF-8"),
        ("utf-16", "UTF-16, expected UTF-8: save it as UTF-8"),
        ("utf-16-le", "UTF-16, expected UTF-8"),
    ):
        text = "\n".join([*rows[:200], rows[200].replace("de", "ß"), *rows[201:], ""])
        content = text.encode(encoding)
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        with pytest.raises(ValueError, match=rf"{name} cannot be read as \w+: .*{message}"):
            load_text(str(tmp_path / name), source=None, target=None, default=("de", "en"))


def test_parquet_that_is_not_utf8_names_its_row(tmp_path):
    table = pyarrow.table({"de": pyarrow.array([b"a", b"Stra\xdfe"]).cast("string", safe=False), "en": ["a", "b"]})
    parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"x.parquet, row 2, 'de': the text is not UTF-8"):
        load_parallel(str(tmp_path / "x.parquet"), source="de", target="en")


def test_parquet_without_a_row(tmp_path):
    parquet.write_table(pyarrow.table({"de": pyarrow.array([], "string")}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="no rows"):
        load_rows(str(tmp_path / "x.parquet"))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("inside", [True, False])
def test_rows_may_have_languages_that_others_lack(tmp_path, late, inside):
    rows = [{"de": f"Hund {i}" + " und" * 999, "en": f"dog {i}"} for i in range(3000)]  # 10 MB are read together
    rows[2900 if late else 1] |= {"fr": "chien"}
    path = write(tmp_path, "x.jsonl", [{"translation": row} if inside else row for row in rows])
    pairs = load_parallel(path, source="de", target="en")
    assert pairs["source"][:] == [row["de"] for row in rows]
    assert pairs["target"][2900] == "dog 2900"
    with pytest.raises(ValueError, match="row 1 has no 'fr': expected text"):
        load_parallel(path, source="de", target="fr")


@pytest.mark.parametrize("translation", ["a text", ["a"], {"de": {"x": 1}}, 10**40])
def test_a_translation_that_is_no_pair_is_one_message(tmp_path, translation):
    rows = [{"translation": {"de": "a", "en": "b"}}, {"translation": translation}, {"translation": {"fr": "c"}}]
    with pytest.raises(ValueError, match=r"x\.jsonl"):
        load_parallel(write(tmp_path, "x.jsonl", [{"id": 10**40, **row} for row in rows]), source="de", target="en")
    text = "\n\n" + json.dumps([{"translation": {"de": "a", "en": "b"}}, {"translation": {"de": "c", "fr": "d"}}])
    (tmp_path / "y.json").write_text(text)
    with pytest.raises(ValueError, match=r"y\.json"):
        load_parallel(str(tmp_path / "y.json"), source="de", target="en")


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv.gz", ".parquet", ".txt"])
def test_the_file_that_is_named_is_read_whatever_its_name(tmp_path, monkeypatch, suffix):
    monkeypatch.chdir(tmp_path)
    names = ["train[1]", "a?", "b*", "c::d", "$HOME", "~e", "f[!x]", "[en-de]", "**", "~"]
    for name in [*names, "train1", "ab", "b2", "d", "f2", "e"]:
        rows = [{"de": f"{name} {i}", "en": "x"} for i in range(2)]
        if suffix == ".txt":
            (tmp_path / f"{name}{suffix}").write_text("".join(row["de"] + "\n" for row in rows))
        else:
            write(tmp_path, f"{name}{suffix}", rows)
    for name in [*names, *names]:  # read, and from the cache
        text = load_text(f"{name}{suffix}", source=None, target=None, default=("de", "en"))
        assert text["source"][:] == [f"{name} {i}" for i in range(2)]


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
def test_a_cache_that_takes_nothing_is_told_from_data_that_cannot_be_read(tmp_path, monkeypatch, number):
    def fail(*_args, **_options):
        raise OSError(number, os.strerror(number), "some.lock")

    path = write(tmp_path, "x.jsonl")
    monkeypatch.setattr("lightformers_hf.text.write_whole", fail)
    with pytest.raises(OSError, match=r"the cache .* cannot be written .*HF_HOME"):
        load_rows(path)


@pytest.mark.parametrize(
    ("name", "content", "columns", "found"),
    [
        ("x.txt", "Ein Hund.\nEine Katze.\n", (None, None), ["source"]),
        ("x.txt", "Ein Hund.\nEine Katze.\n", ("de", "en"), ["source"]),
        ("x.csv", "text\nEin Hund.\nEine Katze.\n", (None, None), ["source"]),
        (
            "x.jsonl",
            '{"translation": {"de": "Ein Hund."}}\n{"translation": {"de": "Eine Katze."}}\n',
            ("de", "en"),
            None,
        ),
        ("x.csv", "id,text\n1,Ein Hund.\n2,Eine Katze.\n", ("text", None), ["source"]),
        ("x.csv", "de,en\nEin Hund.,A dog.\nEine Katze.,A cat.\n", (None, None), ["source", "target"]),
    ],
)
def test_text_of_one_language_alone(tmp_path, name, content, columns, found):
    (tmp_path / name).write_text(content)
    text = load_text(str(tmp_path / name), source=columns[0], target=columns[1], default=("de", "en"))
    assert text.column_names == (found or ["source"])
    assert text["source"][:] == ["Ein Hund.", "Eine Katze."]


@pytest.mark.parametrize(
    ("name", "content", "columns", "message"),
    [
        ("x.txt", "", (None, None), "empty"),
        ("x.txt", "Ein Hund.\tA dog.\n\nb\tc\n", (None, None), "has a tab in every line: .*Rename a table to .tsv"),
        ("x.csv", "text\nEin Hund.\n", ("de", None), "no column 'de': it has 'text' alone"),
        ("x.csv", "en\nA dog.\nTwo cats.\n", (None, None), "no column 'de': it has '?en'? alone"),
        ("x.csv", "de,fr\na,b\n", (None, None), "no column 'en'"),
        ("x.csv", "de,fr\na,b\n", ("de", "en"), "no column 'en'"),
    ],
)
def test_text_that_is_neither_pairs_nor_sources(tmp_path, name, content, columns, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_text(str(tmp_path / name), source=columns[0], target=columns[1], default=("de", "en"))


def test_a_tokenizer_that_does_not_know_the_text_ends_it(tiny_marian):
    model, tokenizer = load_model(tiny_marian)
    text = ["日本語", "今日は寒い。"] * 4
    with pytest.raises(ValueError, match=r"maps (\d+) of \1 tokens of the text to its unknown token '<unk>'"):
        translate(text, model, tokenizer)
    pairs = Dataset.from_dict({"source": ["Ein Hund."] * 8, "target": text})
    with pytest.raises(ValueError, match="unknown token"):
        tokenize_pairs(pairs, tokenizer, max_source_length=9, max_target_length=7)
    assert len(translate(["Zwei Hunde spielen.", text[0]], model, tokenizer, max_new_tokens=3)) == 2
    source, sink = io.BytesIO(f"Ein Hund.\n{text[1]}\n".encode()), io.BytesIO()
    source.read1 = lambda _size: source.readline()  # line by line, as from a terminal
    assert translate_stream(source, sink, model, tokenizer, max_new_tokens=3) == 2


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


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "x.txt").write_text("\ufeffEin Hund.\n\ufeffEine Katze.\n", encoding="utf-8")
    assert load_lines(tmp_path / "x.txt")["text"][:] == ["Ein Hund.", "Eine Katze."]


def test_quoted_fields_and_empty_lines_are_no_mistake(tmp_path):
    long = "x" * 200_000
    (tmp_path / "x.csv").write_text(f'\ufeff"de",en,\n"a, ""b""\nc",d,1\n\n   \n{long},,2\n', encoding="utf-8")
    pairs = load_parallel(str(tmp_path / "x.csv"), source="de", target="en")
    assert pairs[:] == {"source": ['a, "b"\nc', long], "target": ["d", ""]}


@pytest.mark.parametrize("name", ["x.csv.gz", "x.jsonl.gz", "y.jsonl.gz"])
@pytest.mark.parametrize("kept", [0.5, 0.999])
def test_half_of_a_packed_file(tmp_path, name, kept):
    rows = [{"de": f"{i}", "en": f"{i * i}"} for i in range(1000)]
    text = "".join(f"{row['de']},{row['en']}\n" for row in rows) if "csv" in name else "".join(map(json.dumps, rows))
    if name == "y.jsonl.gz":
        text = "".join(json.dumps(row) + "\n" for row in rows)
    content = gzip.compress(text.encode())
    (tmp_path / name).write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(ValueError, match=r"gz cannot be read"):
        load_parallel(str(tmp_path / name), source="de", target="en")


def test_a_folder_is_no_data(tmp_path, monkeypatch):
    (tmp_path / "corpus").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("corpus", str(tmp_path / "corpus")):
        with pytest.raises(ValueError, match="is a folder without data"):
            load_parallel(name, source="de", target="en")


def both_ways(data):
    """Pairs by `load_parallel`, and those that a `Corpus` draws."""
    drawn = Corpus(data, source="de", target="en", default=("de", "en")).sample(100, seed=0)
    pairs = load_parallel(data, source="de", target="en")[:]
    assert sorted(drawn["source"]) == sorted(pairs["source"])
    return pairs


def test_a_folder_of_several_splits_is_no_data(tmp_path):
    (tmp_path / "data" / "train").mkdir(parents=True)
    for name in ("data/train/0.jsonl", "data/train/more-1.jsonl", "contest.jsonl"):
        write(tmp_path, name)
    assert both_ways(str(tmp_path))["source"] == PAIRS["de"] * 3
    for name in ("test.jsonl", "data/dev_1.parquet"):
        write(tmp_path, name)
        for read in (both_ways, load_rows):
            with pytest.raises(ValueError, match=r"splits test and train.*: give the files of one"):
                read(str(tmp_path))
    assert both_ways(str(tmp_path / "data" / "train"))["source"] == PAIRS["de"] * 2


@pytest.mark.parametrize("nested", [False, True])
def test_a_folder_of_save_to_disk(tmp_path, nested):
    rows = [{"translation": row} for row in ROWS] if nested else ROWS
    data = Dataset.from_list(rows)
    DatasetDict(train=data, test=data).save_to_disk(tmp_path / "splits")
    with pytest.raises(ValueError, match="splits test and train: give the files of one"):
        load_rows(str(tmp_path / "splits"))
    folder = tmp_path / "splits" / "train"
    (folder / "cache-0123.arrow").write_bytes((folder / "data-00000-of-00001.arrow").read_bytes())
    assert both_ways(str(folder)) == {"source": PAIRS["de"], "target": PAIRS["en"]}
    assert len(load_rows(str(folder), first=2)) == 2
    (folder / "data-00000-of-00001.arrow").write_bytes(b"ARROW1")
    with pytest.raises(ValueError, match=r"00001.arrow cannot be read as arrow"):
        load_rows(str(folder))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("content", ["[" * 50_000, '{"de": ' + "[" * 50_000 + "]" * 50_000 + "}"])
def test_brackets_without_end_do_not_end_the_process(tmp_path, content, packed):
    text = '{"de": "a [[ \\\\", "en": "b"}\n' + content
    path = tmp_path / ("x.jsonl.gz" if packed else "x.json")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    with pytest.raises(ValueError, match="line 2 is nested too deep"):
        load_parallel(str(path), source="de", target="en")


@pytest.mark.parametrize(
    ("content", "line"), [("null", 1), ("\ufeffnull", 1), ("\n null\n", 2), ('{"de": "n{", "en": "A"}\nnull\n', 2)]
)
@pytest.mark.parametrize("name", ["test.json", "test.jsonl", "test.jsonl.gz"])
def test_null_as_a_row_is_an_error_instead_of_a_crash(tmp_path, content, line, name):
    opened = gzip.open if name.endswith(".gz") else open
    with opened(tmp_path / name, "wb") as file:
        file.write(content.encode())
    with pytest.raises(ValueError, match=f"{name} cannot be read as jsonl?: line {line} is null, expected an object"):
        load_rows(str(tmp_path / name))


def test_null_within_an_object_is_read(tmp_path):
    rows = [{"de": "null\nn", "en": "A", "x": [None]}, {"de": "B", "en": "n", "x": None}]
    (tmp_path / "test.json").write_text(json.dumps(rows, indent=1))
    assert load_rows(str(tmp_path / "test.json"))["de"][:] == ["null\nn", "B"]


def test_brackets_in_a_text_are_text(tmp_path):
    text = "[" * 200 + '\\"' + "{" * 200
    path = write(tmp_path, "x.jsonl", [{"de": text, "en": "b"}] * 3)
    assert load_parallel(path, source="de", target="en")["source"] == [text] * 3
