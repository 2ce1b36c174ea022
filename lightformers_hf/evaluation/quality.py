"""How good outputs are: sacreBLEU and chrF through `evaluate`, COMET where it is installed; ROUGE of summaries.

`evaluate.load("sacrebleu")` fetches a script from the Hub, so the metric is defined here and works with no network.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TypedDict

import datasets
import evaluate
import numpy as np
import torch
from sacrebleu.metrics import BLEU, CHRF


class TranslationScores(TypedDict):
    """From 0 to 100, with the sacreBLEU signature of either."""

    bleu: float
    bleu_signature: str
    chrf: float
    chrf_signature: str


class TranslationQuality(evaluate.Metric):
    """Corpus-level BLEU (13a tokenization, mixed case) and chrF2 of one reference a sentence, as `evaluate.Metric`.

    `compute(predictions=…, references=…)` gives `bleu` and `chrf` (0 to 100), and the sacreBLEU signature of either
    (Post, "A Call for Clarity in Reporting BLEU Scores", 2018) as `bleu_signature` and `chrf_signature`.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Corpus-level sacreBLEU (13a) and chrF2 with their signatures.",
            citation="",
            inputs_description="predictions, references: lists of detokenized sentences, one reference each.",
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> TranslationScores:
        # `force`: outputs that look tokenized are scored as they are; the library's warning would name no remedy here.
        bleu, chrf = BLEU(force=True), CHRF()
        bleu_score, chrf_score = (
            metric.corpus_score(list(predictions), [list(references)]).score for metric in (bleu, chrf)
        )
        return {
            "bleu": bleu_score,
            "bleu_signature": str(bleu.get_signature()),
            "chrf": chrf_score,
            "chrf_signature": str(chrf.get_signature()),
        }


def translation_quality(predictions: list[str], references: list[str]) -> TranslationScores:
    """Corpus-level sacreBLEU (13a) and chrF2 of `predictions` against one reference each, with their signatures.

    Raises `ValueError` for lists of different lengths and for empty ones.
    """
    _check_counts(predictions, references)
    with tempfile.TemporaryDirectory() as folder:  # it makes one, even if the cache of the libraries takes none
        metric = TranslationQuality(keep_in_memory=True, cache_dir=folder)
        return metric.compute(predictions=predictions, references=references)


@dataclass(frozen=True)
class Difference:
    """How much higher one system's BLEU is than another's on the same sentences, and where chance may have put it.

    Attributes:
        bleu: the difference of the two corpus scores.
        low, high: what 95 % of all test sets like this one would show.
    """

    bleu: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{signed(self.bleu)} ({signed(self.low)} to {signed(self.high)})"


def signed(value: float, decimals: int = 1) -> str:
    """A difference as text: `+1.2`, `-0.3`, and `0.0` of what rounds to nothing."""
    text = f"{value:+.{decimals}f}"
    return text if float(text) else text[1:]


def bleu_difference(
    predictions: list[str], others: list[str], references: list[str], *, resamples: int = 1000, seed: int = 12345
) -> Difference:
    """BLEU of `predictions` above that of `others`, with its paired bootstrap interval (Koehn 2004, section 4).

    Sentences are drawn anew, with replacement, for both systems alike; the interval holds the middle 95 % of the
    differences. What chance other random seeds of a training bring is not in it.

    Raises:
        ValueError: lists of different lengths, or empty ones.
    """
    _check_counts(predictions, references)
    _check_counts(others, references)
    draws = np.random.default_rng(seed).multinomial(
        len(references), [1 / len(references)] * len(references), resamples
    )
    counted = np.concatenate([np.ones((1, len(references)), dtype=int), draws])  # the set itself comes first
    scores = [_bleu_of_sums(counted @ _bleu_statistics(outputs, references)) for outputs in (predictions, others)]
    difference = scores[0] - scores[1]
    low, high = np.quantile(difference[1:], (0.025, 0.975))
    return Difference(difference[0].item(), low.item(), high.item())


def _bleu_statistics(predictions: list[str], references: list[str]) -> np.ndarray:
    """Of every sentence: matches and n-grams of lengths 1 to 4, tokens of output and reference (sentences, 10)."""
    bleu = BLEU(force=True, effective_order=True)  # which changes sentences' scores, not what they count
    scores = [bleu.sentence_score(text, [reference]) for text, reference in zip(predictions, references, strict=True)]
    return np.array([[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores])


def _bleu_of_sums(sums: np.ndarray) -> np.ndarray:
    """Corpus BLEU of sums of `_bleu_statistics` (sets, 10)."""
    return np.array(
        [BLEU.compute_bleu(list(row[:4]), list(row[4:8]), *row[8:], smooth_method="exp").score for row in sums]
    )


def summary_quality(predictions: list[str], references: list[str]) -> dict[str, float]:
    """ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004) of `predictions` against one reference each: mean F1, from 0 to 100.

    Google's `rouge_score`: lower-cased words of a-z and 0-9 only, Porter's stems; the L is that of the whole text.
    Returns `rouge1`, `rouge2`, `rougeL`. Raises `ValueError` for lists of different lengths and for empty ones.
    """
    from rouge_score.rouge_scorer import RougeScorer  # brings all of nltk along, which takes a second or two

    _check_counts(predictions, references)
    names = ["rouge1", "rouge2", "rougeL"]
    scorer = RougeScorer(names, use_stemmer=True)
    scores = [scorer.score(reference, text) for text, reference in zip(predictions, references, strict=True)]
    return {name: 100 * fmean(score[name].fmeasure for score in scores) for name in names}


def _check_counts(predictions: list[str], references: list[str]) -> None:
    if len(predictions) != len(references):
        raise ValueError(f"{len(predictions)} predictions for {len(references)} references: give one reference each")
    if not predictions:
        raise ValueError("no predictions: a score needs at least one sentence")


def comet_score(sources: list[str], predictions: list[str], references: list[str], checkpoint: str) -> float:
    """The system score of a local COMET checkpoint (Rei et al. 2020), by the command `comet-score`.

    unbabel-comet asks for transformers below 5 and cannot share an environment with this package, so its command
    runs as a program of its own. The checkpoint is a pickle, which that program loads: use one you trust.

    Args:
        checkpoint: the `.ckpt` file inside a downloaded COMET model (`…/checkpoints/model.ckpt`).

    Raises:
        FileNotFoundError: no such checkpoint, or the command is not installed.
        ValueError: the command failed.
    """
    if not Path(checkpoint).is_file():
        raise FileNotFoundError(
            f"No COMET checkpoint {checkpoint}: give the .ckpt file of a downloaded model (…/checkpoints/model.ckpt)."
        )
    command = shutil.which("comet-score")
    if command is None:
        raise FileNotFoundError(
            "COMET needs the command comet-score, which is not on PATH. It asks for transformers below 5, so give it "
            "an environment of its own: pipx install unbabel-comet"
        )
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--model", str(checkpoint), "--gpus", "1" if torch.cuda.is_available() else "0"]
        for name, texts in {"sources": sources, "translations": predictions, "references": references}.items():
            file = Path(folder, f"{name}.txt")
            file.write_text("".join(" ".join(text.split()) + "\n" for text in texts), encoding="utf-8")
            arguments += [f"--{name}", str(file)]
        result = subprocess.run([command, *arguments, "--only_system", "--quiet"], capture_output=True, text=True)
    score = re.search(r"score: (-?[0-9.]+)", result.stdout)
    if result.returncode or score is None:
        raise ValueError(f"{command} failed: {(result.stderr or result.stdout).strip()[-500:]}")
    return float(score[1])
