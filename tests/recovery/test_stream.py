"""Batches of a corpus that is read while a model trains: what they hold, who gets which, and where they resume."""

import json
from itertools import islice

import numpy as np
import pytest
from transformers import AutoTokenizer

from lightformers_hf import corpus as module
from lightformers_hf.corpus import Corpus
from lightformers_hf.recovery import TokenBatches, TokenizedPool

pytestmark = pytest.mark.quick


@pytest.fixture
def batches(tmp_path, tiny_marian, parallel_sentences, monkeypatch):
    """Makes the batches of three hundred pairs in two shards, of small blocks and pools."""
    for name, value in {"BLOCK": 512, "POOL": 100}.items():
        monkeypatch.setattr(module, name, value)
    rows = [pair | {"de": f"{n} {pair['de']}"} for n in range(10) for pair in parallel_sentences]
    for shard in range(2):
        lines = [json.dumps({"translation": row}) + "\n" for row in rows[shard::2]]
        (tmp_path / f"{shard}.jsonl").write_text("".join(lines))
    tokenizer = AutoTokenizer.from_pretrained(tiny_marian)

    def make(rank=0, num_processes=1, held_out=()):
        corpus = Corpus(str(tmp_path / "*.jsonl"), source="de", target="en", default=("de", "en"))
        corpus.hold_out(held_out)
        limits = {"longest": (60, 60), "max_tokens": 400}
        made = TokenBatches(corpus, lambda pairs: TokenizedPool(pairs, tokenizer, **limits), 400)
        made.rank, made.num_processes = rank, num_processes
        return made

    make.rows, make.tokenizer = rows, tokenizer
    return make


def first_epoch(made):
    """(position, features) of all batches before the second epoch."""
    found = []
    for position, features in made:
        if position[0] == 1:
            return found
        found.append((position, features))
    return found


def test_an_epoch_holds_every_pair_once_within_the_budget(batches):
    held = {row["de"] for row in batches.rows[:7]}
    found = first_epoch(batches(held_out=held))
    for _, features in found:
        width = sum(max(len(row[name]) for row in features) for name in ("input_ids", "labels"))
        assert len(features) * width <= 400
    texts = [batches.tokenizer.decode(row["input_ids"], skip_special_tokens=True) for _, f in found for row in f]
    expected = batches.tokenizer([row["de"] for row in batches.rows if row["de"] not in held])["input_ids"]
    assert sorted(texts) == sorted(batches.tokenizer.batch_decode(expected, skip_special_tokens=True))
    assert len({pool for (_, pool, _), _ in found}) == -(-len(batches.rows) // 100)


def test_a_stream_resumes_at_any_position(batches):
    whole = list(islice(batches(), 60))
    assert whole[-1][0][0] >= 1  # an epoch has fewer
    for begun in (1, 5, 17, 40):
        rest = batches()
        rest.position = whole[begun - 1][0]
        assert list(islice(rest, 60 - begun)) == whole[begun:]


def test_processes_share_the_batches_of_each_step(batches):
    """In the order of one, where pools have a number of batches that two processes can share."""
    one, two = batches(), [first_epoch(batches(rank, 2)) for rank in range(2)]
    assert [position for position, _ in two[0]] == [position for position, _ in two[1]]
    dealt = [features for step in zip(*two, strict=True) for _, features in step]
    pairs = [
        sorted(row["input_ids"] for features in part for row in features)
        for part in (dealt, [f for _, f in first_epoch(one)])
    ]
    assert pairs[0] == pairs[1]
    resumed = batches(1, 2)
    resumed.position = two[1][3][0]
    assert [features for _, features in islice(resumed, 3)] == [features for _, features in two[1][4:7]]


def test_pairs_that_no_batch_takes_are_left_out(batches, caplog):
    pairs = {"source": ["Hund " * 50, "Hund"], "target": ["dog", "dog"]}
    pool = TokenizedPool(pairs, batches.tokenizer, longest=(60, 60), max_tokens=30)
    assert (len(pool), pool.lengths["source"]) == (1, [len(pool.input_ids[0])])
    assert "1 pairs have more than 30 tokens" in caplog.text
    assert pool.input_ids[0].dtype == np.int32


def test_an_estimate_of_the_steps_of_an_epoch(batches):
    made = batches()
    made.corpus.sample(1, 0)
    assert made.count_steps() == pytest.approx(len(first_epoch(batches())), rel=0.15)
