"""Corpora of any size: what is drawn, what is read, what is held out, and what is wrong with a shard."""

import gzip
import json
import random
from collections import Counter
from itertools import chain
from types import SimpleNamespace

import pandas
import pytest
from datasets import Dataset

from lightformers_hf import corpus as module
from lightformers_hf.conversion.vocabulary import read_texts
from lightformers_hf.corpus import Corpus
from lightformers_hf.engines.shortlist import read_pairs
from lightformers_hf.text import load_parallel

pytestmark = pytest.mark.quick
KINDS = ["x.jsonl", "x.jsonl.gz", "x.json", "x.csv", "x.tsv", "x.tsv.gz", "x.parquet"]
SIDES = {"source": "de", "target": "en", "default": ("de", "en")}


def make_rows(number, first=0):
    """Lines of very different lengths, with blank-like and multi-byte text."""
    lengths = random.Random(number).choices(range(1, 40), k=number)
    return [{"de": f"Straße {i} " + "ö" * n, "en": f"street {i}"} for i, n in enumerate(lengths, first)]


def write(path, rows, group=None):
    suffix = path.name.removesuffix(".gz").rpartition(".")[2]
    if suffix == "parquet":
        pandas.DataFrame(rows).to_parquet(path, row_group_size=group or 100)
        return str(path)
    if suffix == "jsonl":
        text = "".join(json.dumps({"translation": row}, ensure_ascii=False) + "\n" for row in rows)
    elif suffix == "json":
        text = json.dumps(rows)
    else:
        cut = "\t" if suffix == "tsv" else ","
        text = "\n".join([cut.join(rows[0]), *(cut.join(row.values()) for row in rows)])  # no newline at the end
    path.write_bytes(gzip.compress(text.encode()) if path.name.endswith(".gz") else text.encode())
    return str(path)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks, pools and turns so small that a hundred rows have many."""
    for name, value in {"BLOCK": 256, "POOL": 64, "TURN": 3, "AT_ONCE": 16}.items():
        monkeypatch.setattr(module, name, value)


def read_epoch(corpus, seed=0, epoch=0, first=0):
    return [row for _, pairs in corpus.pools(seed, epoch, first) for row in zip(*pairs.values(), strict=True)]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", KINDS)
def test_an_epoch_has_every_row_once_in_an_order_of_its_own(tmp_path, name):
    rows = make_rows(500)
    corpus = Corpus(write(tmp_path / name, rows), **SIDES)
    epochs = [read_epoch(corpus, epoch=epoch) for epoch in (0, 1, 0)]
    expected = [(row["de"], row["en"]) for row in rows]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(expected)
    assert epochs[0] == epochs[2]
    if corpus.blocks > 1:
        assert len({*map(tuple, (epochs[0], epochs[1], expected))}) == 3
    later = list(corpus.pools(0, 0, first=3))
    assert [number for number, _ in later] == list(range(3, -(-500 // 64)))
    assert epochs[0][3 * 64 :] == read_epoch(corpus, first=3)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", KINDS)
def test_a_sample_depends_on_the_seed_alone_and_holds_no_row_twice(tmp_path, name):
    rows = make_rows(500)
    corpus = Corpus(write(tmp_path / name, rows), **SIDES)
    first, again, other = (corpus.sample(100, seed)["source"][:] for seed in (1, 1, 2))
    assert first == again != other
    assert {*first} <= {row["de"] for row in rows}
    assert len({*first}) == 100
    assert corpus.rows == 500
    rest = corpus.sample(500, 1, without={*first})["source"][:]
    assert len(rest) == 400
    assert not {*rest} & {*first}


def test_long_and_short_lines_are_drawn_equally_often(tmp_path, monkeypatch):
    """Every third line is twenty times as long; blocks are fewer than there are, so that they are drawn, too."""
    for name, value in {"BLOCK": 256, "POOL": 1, "SPREAD": 20}.items():
        monkeypatch.setattr(module, name, value)
    rows = [{"de": "x" * (200 if i % 3 == 0 else 10) + f" {i}", "en": "y"} for i in range(600)]
    corpus = Corpus(write(tmp_path / "x.jsonl", rows), **SIDES)
    assert corpus.blocks > 5 * 20
    drawn = Counter(chain.from_iterable(corpus.sample(5, seed)["source"][:] for seed in range(800)))
    number = {"long": 0, "short": 0}
    for text, count in drawn.items():
        number["long" if len(text) > 100 else "short"] += count
    share = number["long"] / sum(number.values())
    assert sum(number.values()) == 4000
    assert share == pytest.approx(1 / 3, abs=0.03)  # four standard errors
    assert len(drawn) > 590  # and no line is out of reach


def test_only_the_blocks_of_a_sample_are_read(tmp_path, monkeypatch):
    for name, value in {"BLOCK": 256, "POOL": 1, "SPREAD": 4}.items():
        monkeypatch.setattr(module, name, value)
    corpus, opened = Corpus(write(tmp_path / "x.jsonl", make_rows(500)), **SIDES), []
    read = module.LineFile.read
    monkeypatch.setattr(module.LineFile, "read", lambda one, block: opened.append(block) or read(one, block))
    assert len(corpus.sample(3, 0)) == 3
    assert len(opened) == 4
    assert corpus.rows == pytest.approx(500, rel=0.5)


@pytest.mark.usefixtures("small_blocks")
def test_shards_are_one_corpus_and_what_is_held_out_is_in_no_pool(tmp_path):
    rows = make_rows(300)
    for shard in range(3):
        write(tmp_path / f"train-{shard}.jsonl.gz", rows[shard * 100 : shard * 100 + 100])
    for data in (str(tmp_path), str(tmp_path / "train-*.jsonl.gz"), ",".join(map(str, sorted(tmp_path.iterdir())))):
        corpus = Corpus(data, **SIDES)
        assert len(corpus.files) == 3
        held = {*corpus.sample(50, 0)["source"]}
        assert {int(text.split()[1]) // 100 for text in held} == {0, 1, 2}
        corpus.hold_out(held)
        assert {source for source, _ in read_epoch(corpus)} == {row["de"] for row in rows} - held
        assert load_parallel(data, source="de", target="en")["source"][:] == [row["de"] for row in rows]
        assert load_parallel(data, source="de", target="en", max_samples=120)["source"][:] == [
            row["de"] for row in rows[:120]
        ]


def test_a_small_corpus_is_one_pool_that_is_read_once(tmp_path):
    corpus = Corpus(write(tmp_path / "x.jsonl", make_rows(50)), **SIDES)
    corpus.sample(5, 0)
    (first,), (second,) = ([pairs for _, pairs in corpus.pools(0, epoch)] for epoch in (0, 1))
    assert first is second


@pytest.mark.usefixtures("small_blocks")
def test_the_last_pool_is_kept_until_other_rows_are_held_out(tmp_path):
    corpus = Corpus(write(tmp_path / "x.jsonl", make_rows(200)), **SIDES)
    (_, first), (_, again) = (next(corpus.pools(0, 0)) for _ in range(2))
    assert first is again
    corpus.hold_out(first["source"][:1])
    assert next(corpus.pools(0, 0))[1]["source"] == first["source"][1:]


def test_a_name_that_exists_is_no_pattern(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    for name in ("a[1].jsonl", "a1.jsonl", "b,c.jsonl", "b", "c.jsonl", "d*.jsonl", "d1.jsonl"):
        write(tmp_path / name, make_rows(1, first=len(name))) if "." in name else (tmp_path / name).write_text("x")
    for name in ("a[1].jsonl", "b,c.jsonl", "d*.jsonl"):
        assert [*Corpus(name, **SIDES).files] == [name]
        assert not caplog.records
    assert [*Corpus("[ac]*.jsonl", **SIDES).files] == ["a1.jsonl", "a[1].jsonl", "c.jsonl"]
    assert "[ac]*.jsonl: 3 files, a1.jsonl, a[1].jsonl, c.jsonl" in caplog.text
    with pytest.raises(FileNotFoundError, match=r"No data file e\*.jsonl, and no file matches the pattern"):
        Corpus("e*.jsonl", **SIDES)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("x.jsonl", b'{"translation": {"de": "a', "line 301 is no JSON object"),
        ("x.jsonl.gz", b'{"translation": {"de": "a', "line 301 is no JSON object"),
        ("x.jsonl", b'{"translation": {"de": "\xdf", "en": "b"}}', "line 301 is not UTF-8"),
        ("x.jsonl", b'{"translation": {"de": "a"}}', "line 301 has no 'en': expected text"),
        ("x.tsv", b"a\tb\tc", "line 302: 3 fields, the header names 2"),
        ("x.csv", b"a,b,c", "line 302: 3 fields, the header names 2"),
    ],
)
def test_a_damaged_line_is_named_or_skipped_and_counted(tmp_path, name, damage, message):
    rows = make_rows(500)
    path = tmp_path / name
    write(path, rows)
    opened = gzip.open if name.endswith(".gz") else open
    with opened(path, "rb") as file:
        lines = file.read().split(b"\n")
    lines.insert(int(message.split()[1].rstrip(":")) - 1, damage)
    with opened(path, "wb") as file:
        file.write(b"\n".join(lines))
    with pytest.raises(
        ValueError, match=rf"{name}( cannot be read as \w+:|,) {message.replace('line', '(line|row)')}"
    ):
        read_epoch(Corpus(str(path), **SIDES))
    corpus = Corpus(str(path), **SIDES, skip_bad=True)
    for _ in range(2):
        assert sorted(read_epoch(corpus)) == sorted((row["de"], row["en"]) for row in rows)
        assert [*corpus.bad] == [f"{path}, line {message.split()[1].rstrip(':')}"]


def test_shards_that_do_not_fit_name_themselves(tmp_path, caplog):
    write(tmp_path / "a.jsonl", make_rows(3))
    (tmp_path / "b.jsonl").touch()
    assert len(read_epoch(Corpus(str(tmp_path), **SIDES))) == 3
    assert "b.jsonl is empty: it is skipped" in caplog.text
    (tmp_path / "c.jsonl").write_text('{"de": "a", "fr": "b"}\n')
    with pytest.raises(ValueError, match=r"c\.jsonl, line 1 has no 'en': expected text in every row"):
        Corpus(str(tmp_path), **SIDES)
    with pytest.raises(ValueError, match=r"c\.jsonl has the columns de, fr, unlike .*a\.jsonl"):
        load_parallel(str(tmp_path), source="de", target="en")
    (tmp_path / "c.jsonl").unlink()
    corpus = Corpus(str(tmp_path), **SIDES)
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"a\.jsonl is gone since this work began: put it back"):
        corpus.sample(1, 0)


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_languages_inside_translation_go_together(tmp_path, name):
    """A column beside them may have the name of one."""
    rows = [{"de": f"{row['de'][:9]} (old)", "translation": row} for row in make_rows(20)]
    file = tmp_path / name
    if name == "x.jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        Dataset.from_list(rows).to_parquet(file)
    pairs = load_parallel(str(file), source="de", target="en")
    assert (
        {*pairs["source"]}
        == {row["translation"]["de"] for row in rows}
        == {*Corpus(str(file), **SIDES).sample(20, 0)["source"]}
    )
    sides = [(side, text) for side, texts in read_texts([str(file)], ("de", "en")) for text in texts]
    assert [text for side, text in sides if side == "source"] == [row["translation"]["de"] for row in rows]
    both = [text for _, texts in read_texts([str(file)], (None, None)) for text in texts]
    assert both == [text for _, text in sides]
    tokenizer = SimpleNamespace(convert_tokens_to_ids=lambda token: None, unk_token_id=None)
    teacher = SimpleNamespace(tokenizer=tokenizer, model=SimpleNamespace(config=None), name="it")
    pairs = read_pairs(teacher, str(file), ("de", "en"))
    assert pairs == tuple([row["translation"][side] for row in rows] for side in ("de", "en"))


def test_rows_in_memory_are_a_corpus():
    rows = Dataset.from_dict({"source": list("abc"), "target": list("xyz")})
    assert sorted(read_epoch(Corpus.of(rows))) == [("a", "x"), ("b", "y"), ("c", "z")]
    assert sorted(read_epoch(Corpus.of(rows.select_columns(["source"])))) == [("a",), ("b",), ("c",)]
