"""Metrics equal the libraries' own and hand-computed ones, need no network, and fit the data; COMET is a program."""

import os
import re
import subprocess
import sys

import evaluate
import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.significance import PairedTest

from lightformers_hf.evaluation.quality import (
    METRICS,
    Difference,
    bleu_tokenizer,
    check_metrics,
    choose_metrics,
    comet_score,
    describe,
    difference,
    edit_distance,
    load_metric,
    metric_names,
    score,
    selection_metric,
    signatures,
)

pytestmark = pytest.mark.quick

PREDICTIONS = ["The dog is sleeping under the bed.", "A man walks over the street!", "two dogs play"]
REFERENCES = ["The dog is sleeping under the table.", "A man is walking across the street.", "Two dogs are playing."]
SUMMARY = "The well-known dogs were running. They barked at 3 cats! Nobody came."
OTHER = "Known dogs ran.\nThey barked at the cats.\nNobody has come to see them."
# Of each kind of data: sources, references, the defaults, and what checkpoints are chosen by.
DATA = {
    "words": (["cat", "ice cream"], ["kˈæt", "ˌIskɹˈim"], ["exact-match", "cer", "chrf"], "cer"),
    "sentences": (REFERENCES, PREDICTIONS, ["bleu", "chrf"], "chrf"),
    "chinese": (["Two dogs play in the snow."], ["两只狗在雪地里玩耍。"], ["bleu", "chrf"], "chrf"),
    "from chinese": (["两只狗在雪地里玩耍。"], ["Two dogs play."], ["bleu", "chrf"], "chrf"),
    "summaries": ([f"{SUMMARY} {SUMMARY}"], ["Dogs were running."], list(METRICS)[-4:], "rougeL"),
    "chinese summaries": (["两只狗在雪地里玩耍。" * 3], ["两只狗玩耍。"], list(METRICS)[-4:], "rougeL"),
}


def test_a_cache_that_takes_nothing_does_no_harm(monkeypatch):
    monkeypatch.setattr("evaluate.config.HF_METRICS_CACHE", "/dev/null/metrics")
    assert score(["a b c d"], ["a b c d"])["bleu"] == pytest.approx(100)


def test_every_metric_is_one_of_evaluates_without_network(monkeypatch, tmp_path):
    monkeypatch.setattr("socket.socket.connect", None)
    scores = score(PREDICTIONS, REFERENCES, metric_names())
    assert list(scores) == list(METRICS)
    assert score(REFERENCES, REFERENCES, ["multi-bleu", "exact_match", "CER", "rougelsum"]) == pytest.approx(
        {"multi-bleu": 100, "exact-match": 100, "cer": 0, "rougeLsum": 100}
    )
    metric = evaluate.combine([load_metric(name, cache_dir=tmp_path) for name in ("chrf", "cer")])
    found = metric.compute(predictions=PREDICTIONS, references=REFERENCES)
    assert found == pytest.approx({name: scores[name] for name in ("chrf", "cer")})


def test_scores_and_signatures_are_sacrebleus():
    scores, variants = score(PREDICTIONS, REFERENCES), signatures(["bleu", "chrf"], REFERENCES)
    assert scores["bleu"] == pytest.approx(sacrebleu.corpus_bleu(PREDICTIONS, [REFERENCES]).score)
    assert scores["chrf"] == pytest.approx(sacrebleu.corpus_chrf(PREDICTIONS, [REFERENCES]).score)
    assert 0 < scores["bleu"] < scores["chrf"] < 100
    assert variants["bleu"] == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{sacrebleu.__version__}"
    assert variants["chrf"].startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0|")


@pytest.mark.parametrize(
    ("tokenizer", "reference", "output"),
    [
        ("13a", REFERENCES[0], PREDICTIONS[0]),
        ("zh", "两只狗在 Berlin 雪地里玩耍。", "两只小狗在 Berlin 雪地里玩耍。"),
        ("char", "犬は雪の中で遊んでいます。", "犬が雪の中で遊んでいます。"),
    ],
)
def test_bleu_splits_as_the_script_needs(tokenizer, reference, output, tmp_path):
    """The command of sacreBLEU with that tokenizer."""
    files = [tmp_path / "reference.txt", tmp_path / "output.txt"]
    for file, text in zip(files, (reference, output), strict=True):
        file.write_text(f"{text}\n", encoding="utf-8")
    command = [sys.executable, "-m", "sacrebleu", files[0], "-i", files[1], "-b", "-w", "6", "--tokenize", tokenizer]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert bleu_tokenizer([reference]) == tokenizer
    assert score([output], [reference], ["bleu"])["bleu"] == pytest.approx(float(printed), abs=1e-6)
    assert score([output], [reference], ["bleu"])["bleu"] > 10


def test_multi_bleu_counts_tokens_of_moses():
    """By hand: `don't` is two tokens, a full stop is one; of 9 tokens 8 match, of 8 pairs 6, of 7 triples 4, of 6
    quadruples 2."""
    found = score(["We don't see the red house there."], ["We don't see the old house there."], ["multi-bleu"])
    assert found["multi-bleu"] == pytest.approx(100 * (8 / 9 * 6 / 8 * 4 / 7 * 2 / 6) ** (1 / 4))
    assert score(["a b c"], ["a b d"], ["multi-bleu"]) == {"multi-bleu": 0}  # no quadruple, and nothing is smoothed
    # Hyphens: x-y is one token, or x ##AT##-##AT## y.
    texts, references = ["a b c d-e"], ["a b c d-f"]
    split, whole = ("a b c d @ e", "a b c d @ f"), ("a b c de", "a b c df")
    for name, (text, other) in {"multi-bleu-compounds": split, "multi-bleu": whole}.items():
        expected = sacrebleu.corpus_bleu([text], [[other]], tokenize="none", smooth_method="none", force=True).score
        assert score(texts, references, [name])[name] == pytest.approx(expected)
    assert "lang:de" in signatures(["multi-bleu"], REFERENCES, language="de")["multi-bleu"]


def test_error_rates_by_hand():
    """Substitution, insertion and deletion: 1 + 1 + 3 edits of 3 + 5 + 5 characters; one text of three is equal."""
    found = score(["cat", "hose", "y  x"], ["cut", "horse", "y x"], ["cer", "exact-match"])
    assert found == pytest.approx({"cer": 100 * 2 / 11, "exact-match": 100 / 3})
    assert score(["no " * 19, "no " * 18, ""], ["yes"] * 3, ["endless"]) == pytest.approx({"endless": 100 / 3})
    assert edit_distance("kitten", "sitting") == 3
    assert edit_distance("", "abc") == edit_distance("abc", "") == 3


@given(st.text("abc", max_size=7), st.text("abc", max_size=7))
def test_the_edit_distance_is_its_recursion(text, other):
    def distance(i: int, j: int) -> int:
        if not (i and j):
            return i + j
        if text[i - 1] == other[j - 1]:
            return distance(i - 1, j - 1)
        return 1 + min(distance(i - 1, j), distance(i, j - 1), distance(i - 1, j - 1))

    assert edit_distance(text, other) == distance(len(text), len(other))


def test_rouge_is_that_of_rouge_score():
    # By hand: stems {cat, sat, on, the, mat}; 1-grams 3 of 4 and of 6, 2-grams 2 of 3 and of 5, subsequence 3.
    found = score(["The cats sat there"], ["the cat sat on the mat"], ["rouge1", "rouge2", "rougeL"])
    assert found == pytest.approx({"rouge1": 100 * 6 / 10, "rouge2": 100 * 4 / 8, "rougeL": 100 * 6 / 10})
    names = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
    split = [re.sub(r"(?<=[.!]) ", "\n", text) for text in (OTHER, SUMMARY)]  # as its Lsum wants sentences
    expected = {name: 100 * pair.fmeasure for name, pair in RougeScorer(names, use_stemmer=True).score(*split).items()}
    found = score([SUMMARY], [OTHER], ["rouge"])
    assert found == pytest.approx(expected)
    assert found["rougeLsum"] != found["rougeL"]
    # Line breaks that are there are the sentences, with an abbreviation in one of them.
    lines = ["The U.S. dogs ran home.\nThey slept.", "Home ran the dogs.\nThe U.S. slept. They did."]
    expected = 100 * RougeScorer(["rougeLsum"], use_stemmer=True).score(*lines)["rougeLsum"].fmeasure
    assert score([lines[1]], [lines[0]], ["rougeLsum"]) == {"rougeLsum": pytest.approx(expected)}
    assert score(["a b", "x"], ["a b", "y"], ["rouge1"]) == {"rouge1": 50}
    # rouge-score alone gives 0 for scripts without a-z.
    assert score(["собака бежит"], ["собака спит"], ["rouge1"]) == {"rouge1": 50}
    assert score(["两只狗"], ["两只猫"], ["rouge1"])["rouge1"] == pytest.approx(200 / 3)


@pytest.mark.parametrize("kind", DATA)
def test_defaults_follow_from_the_data(kind):
    sources, references, defaults, best = DATA[kind]
    metrics = choose_metrics([], sources, references)
    assert metrics == defaults
    assert selection_metric(metrics, []) == best
    asked = choose_metrics(["CHRF", "rouge2", "rouge"], sources, references)
    assert asked == ["chrf", "rouge2", "rouge1", "rougeL", "rougeLsum"]
    assert selection_metric(asked, ["CHRF"]) == "chrf"


def test_what_is_refused():
    with pytest.raises(ValueError, match="no metric 'blue'; did you mean bleu"):
        check_metrics("blue")
    with pytest.raises(ValueError, match="there is wer, exact-match, cer, endless, bleu"):
        check_metrics(["accuracy of words"])
    for text in ("两只狗在雪地里玩耍。", "犬は雪の中で遊んでいます。"):
        with pytest.raises(ValueError, match=r"multi-bleu counts words between spaces.*would mean nothing"):
            choose_metrics(["multi-bleu"], ["Two dogs."], [text])
        with pytest.raises(ValueError, match="would mean nothing"):
            load_metric("multi-bleu").compute(predictions=[text], references=[text])
    with pytest.raises(ValueError, match="3 predictions for 2 references"):
        score(PREDICTIONS, REFERENCES[:2])
    with pytest.raises(ValueError, match="no predictions"):
        score([], [])


def test_metrics_of_one_variant_share_a_line():
    lines = describe(signatures(["rouge1", "rougeL", "cer"], REFERENCES))
    assert [line.partition(":")[0] for line in lines] == ["ROUGE-1, ROUGE-L", "CER"]


@settings(max_examples=25)
@given(st.data())
def test_the_difference_is_that_of_corpus_scores_and_its_interval_of_sets_drawn_anew(data):
    """Against the corpus score of lists of sentences, drawn as the definition says."""
    words = st.lists(st.sampled_from("a man walks over the street . dog !".split()), min_size=1, max_size=9)
    count = data.draw(st.integers(2, 6))
    sentences = st.lists(words.map(" ".join), min_size=count, max_size=count)
    outputs, others, references = (data.draw(sentences) for _ in range(3))
    name = data.draw(st.sampled_from(["bleu", "chrf"]))
    found = difference(outputs, others, references, metric=name, resamples=40, seed=7)
    metric = sacrebleu.BLEU(force=True) if name == "bleu" else sacrebleu.CHRF()

    def corpus_score(texts: list[str], places: list[int]) -> float:
        return metric.corpus_score([texts[i] for i in places], [[references[i] for i in places]]).score

    def above(places: list[int]) -> float:
        return corpus_score(outputs, places) - corpus_score(others, places)

    assert found.value == pytest.approx(above(range(count)), abs=1e-9)
    draws = np.random.default_rng(7).multinomial(count, [1 / count] * count, 40)
    differences = [above(np.repeat(range(count), times)) for times in draws]
    assert [found.low, found.high] == pytest.approx(np.quantile(differences, (0.025, 0.975)).tolist(), abs=1e-9)


def test_the_interval_tells_chance_from_difference():
    """By sacreBLEU's own paired test, too."""
    references = [f"number {place} is a sentence of some words and the end" for place in range(200)]
    worse = [text if place % 3 else text.replace("some", "few") for place, text in enumerate(references)]
    other = [text if (place + 1) % 3 else text.replace("some", "few") for place, text in enumerate(references)]
    assert difference(references, references, references) == Difference(0, 0, 0)
    assert str(Difference(-0.04, -1.26, 0.049)) == "0.0 (-1.3 to 0.0)"
    for one, two, differ in ((worse, references, True), (worse, other, False)):
        found = difference(one, two, references)
        assert found.low <= found.value <= found.high
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
