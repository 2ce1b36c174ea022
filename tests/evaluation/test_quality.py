"""Scores equal sacreBLEU's own, need no network, and COMET runs as a program."""

import os

import numpy as np
import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu.significance import PairedTest

from lightformers_hf.evaluation.quality import Difference, bleu_difference, comet_score, translation_quality

pytestmark = pytest.mark.quick

PREDICTIONS = ["The dog is sleeping under the bed.", "A man walks over the street!", "two dogs play"]
REFERENCES = ["The dog is sleeping under the table.", "A man is walking across the street.", "Two dogs are playing."]


def test_a_cache_that_takes_nothing_does_no_harm(monkeypatch):
    monkeypatch.setattr("evaluate.config.HF_METRICS_CACHE", "/dev/null/metrics")
    assert translation_quality(["a b c d"], ["a b c d"])["bleu"] == pytest.approx(100)


def test_scores_and_signatures_are_sacrebleus(monkeypatch):
    monkeypatch.setattr("socket.socket.connect", None)  # no network
    scores = translation_quality(PREDICTIONS, REFERENCES)
    assert scores["bleu"] == pytest.approx(sacrebleu.corpus_bleu(PREDICTIONS, [REFERENCES]).score)
    assert scores["chrf"] == pytest.approx(sacrebleu.corpus_chrf(PREDICTIONS, [REFERENCES]).score)
    assert 0 < scores["bleu"] < scores["chrf"] < 100
    assert scores["bleu_signature"] == (
        f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{sacrebleu.__version__}"
    )
    assert scores["chrf_signature"].startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0|")


def test_references_must_match():
    with pytest.raises(ValueError, match="3 predictions for 2 references"):
        translation_quality(PREDICTIONS, REFERENCES[:2])
    with pytest.raises(ValueError, match="no predictions"):
        translation_quality([], [])


@given(st.data())
def test_the_difference_is_that_of_corpus_scores_and_its_interval_of_sets_drawn_anew(data):
    """Against sacreBLEU's corpus score of lists of sentences, drawn as the definition says."""
    words = st.lists(st.sampled_from("a man walks over the street . dog !".split()), min_size=1, max_size=9)
    count = data.draw(st.integers(2, 6))
    sentences = st.lists(words.map(" ".join), min_size=count, max_size=count)
    outputs, others, references = (data.draw(sentences) for _ in range(3))
    found = bleu_difference(outputs, others, references, resamples=40, seed=7)

    def score(texts: list[str], places: list[int]) -> float:
        return sacrebleu.corpus_bleu([texts[i] for i in places], [[references[i] for i in places]], force=True).score

    def above(places: list[int]) -> float:
        return score(outputs, places) - score(others, places)

    assert found.bleu == pytest.approx(above(range(count)), abs=1e-9)
    draws = np.random.default_rng(7).multinomial(count, [1 / count] * count, 40)
    differences = [above(np.repeat(range(count), times)) for times in draws]
    assert [found.low, found.high] == pytest.approx(np.quantile(differences, (0.025, 0.975)).tolist(), abs=1e-9)


def test_the_interval_tells_chance_from_difference():
    """By sacreBLEU's own paired test, too."""
    references = [f"number {place} is a sentence of some words and the end" for place in range(200)]
    worse = [text if place % 3 else text.replace("some", "few") for place, text in enumerate(references)]
    other = [text if (place + 1) % 3 else text.replace("some", "few") for place, text in enumerate(references)]
    assert bleu_difference(references, references, references) == Difference(0, 0, 0)
    assert str(Difference(-0.04, -1.26, 0.049)) == "0.0 (-1.3 to 0.0)"
    for one, two, differ in ((worse, references, True), (worse, other, False)):
        found = bleu_difference(one, two, references)
        assert found.low <= found.bleu <= found.high
        assert (found.high < 0) == differ
        systems = [("two", two), ("one", one)]
        _, tested = PairedTest(systems, {"BLEU": sacrebleu.BLEU()}, [references], test_type="bs")()
        assert (tested["BLEU"][1].p_value < 0.05) == differ


@pytest.fixture
def comet_command(tmp_path, monkeypatch):
    """A program in comet-score's place: the share of lines where translation and reference agree, or a failure."""
    command = tmp_path / "bin" / "comet-score"
    command.parent.mkdir()
    command.write_text(
        """#!/usr/bin/env python3
import argparse, sys
parser = argparse.ArgumentParser()
for name in ("--sources", "--translations", "--references", "--model", "--gpus"):
    parser.add_argument(name, required=True)
for name in ("--only_system", "--quiet"):
    parser.add_argument(name, action="store_true")
given = parser.parse_args()
if "broken" in given.model:
    sys.exit("cannot read this checkpoint")
files = (given.sources, given.translations, given.references)
rows = list(zip(*(open(file, encoding="utf-8").read().splitlines() for file in files), strict=True))
print(f"{given.translations}\\tscore: {sum(a == b for _, a, b in rows) / len(rows):.4f}")
"""
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")


def test_comet_is_what_its_command_says(tmp_path, comet_command):
    (tmp_path / "model.ckpt").touch()
    (tmp_path / "broken.ckpt").touch()
    sources = ["eins", "", "drei\nvier", "fünf"]
    score = comet_score(
        sources, ["one", "", "three\nfour", "six"], ["one", "", "three four", "five"], tmp_path / "model.ckpt"
    )
    assert score == 0.75
    with pytest.raises(ValueError, match="cannot read this checkpoint"):
        comet_score(["a"], ["b"], ["c"], tmp_path / "broken.ckpt")


def test_comet_says_what_is_missing(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="No COMET checkpoint"):
        comet_score(["a"], ["b"], ["c"], tmp_path / "model.ckpt")
    (tmp_path / "model.ckpt").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="pipx install unbabel-comet"):
        comet_score(["a"], ["b"], ["c"], tmp_path / "model.ckpt")
