"""Scores equal sacreBLEU's own, need no network, and COMET runs as a program."""

import os

import pytest
import sacrebleu

from lightformers_hf.evaluation.quality import comet_score, translation_quality

pytestmark = pytest.mark.quick

PREDICTIONS = ["The dog is sleeping under the bed.", "A man walks over the street!", "two dogs play"]
REFERENCES = ["The dog is sleeping under the table.", "A man is walking across the street.", "Two dogs are playing."]


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
