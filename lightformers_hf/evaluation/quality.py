"""Metrics of generated texts: one registry, the choice by the data, scores, and intervals of differences.

Each metric counts something in each pair of texts. The score is a function of the sums of these counts, which also
gives the bootstrap interval of a difference. `evaluate.load("bleu")` fetches a script from the Hub; `load_metric`
returns an `evaluate.Metric` without network.

The libraries that compute are imported when a metric is computed: the command line needs the names alone.
"""

from __future__ import annotations

import difflib
import re
import shutil
import subprocess
import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import evaluate
    from sacrebleu.metrics.base import Metric as SacreMetric

Texts = Sequence[str]

HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese characters
# Scripts without spaces between words: Thai, Lao, Tibetan, Burmese, Khmer, Kana, Chinese characters.
UNSPACED = re.compile(f"[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff{HAN}]")
SENTENCE_END = re.compile(r"(?<=[.!?。！？])\s+")
# Kinds of references.
WORDS, SUMMARIES, SENTENCES, SPEECH = "words", "summaries", "sentences", "speech"
ONE_WORD = 0.9  # share of references of one word from which the data are words
SHORT = 50  # characters above twice the reference that are not endless yet: references may be short
SHORTENED = 0.5  # share of the sources' length, in words and in characters, up to which references are summaries


@dataclass(frozen=True)
class Counter:
    """How one metric is computed for one set of references."""

    count: Callable[[Texts, Texts], np.ndarray]  # counts of each pair of prediction and reference, (pairs, counts)
    score: Callable[[np.ndarray], float]  # the metric of the sums of counts (counts)
    signature: str  # the variant that is computed


class Metric(NamedTuple):
    """One entry of `METRICS`; scores are from 0 to 100."""

    label: str  # its name in tables
    counter: Callable[[Texts, str | None], Counter]  # for references in a language (a code, `de`, or `None`)
    default_for: tuple[str, ...] = ()  # kinds of references
    higher_is_better: bool = True


def _sacrebleu(metric: SacreMetric, prepare: Callable[[str], str] | None = None, signature: str = "") -> Counter:
    """The `Counter` of a metric of sacreBLEU.

    sacreBLEU shows the counts of sentences for BLEU alone, so its private methods are called, which `corpus_score`
    and its own paired test call as well.
    """

    def count(predictions: Texts, references: Texts) -> np.ndarray:
        texts = [[prepare(text) for text in side] if prepare else list(side) for side in (predictions, references)]
        return np.array(metric._extract_corpus_statistics(texts[0], [texts[1]]))

    metric.num_refs = 1
    score = lambda sums: float(metric._compute_score_from_stats(list(sums)).score)  # noqa: E731
    return Counter(count, score, signature or str(metric.get_signature()))


def bleu_tokenizer(references: Texts) -> str:
    """sacreBLEU's tokenizer for the script of the references: `zh` for Chinese, `char` for others without spaces.

    Japanese is split into characters, too: words need `ja-mecab`, which is not installed everywhere.
    """
    if not is_unspaced(references):
        return "13a"
    han, unspaced = (_share_of_letters(script, references) for script in (re.compile(f"[{HAN}]"), UNSPACED))
    return "zh" if han > 0.9 * unspaced else "char"


def _bleu(references: Texts, language: str | None) -> Counter:
    from sacrebleu.metrics import BLEU

    # `force`: outputs that look tokenized are scored as they are; the library's warning would name no remedy here.
    return _sacrebleu(BLEU(tokenize=bleu_tokenizer(references), force=True))


def _chrf(references: Texts, language: str | None) -> Counter:
    from sacrebleu.metrics import CHRF

    return _sacrebleu(CHRF())


def _multi_bleu(references: Texts, language: str | None, *, compounds: bool = False) -> Counter:
    """Tokenized BLEU, as `multi-bleu.perl` computes it: tokens of Moses, case-sensitive, not smoothed.

    `compounds`: hyphens between two characters become tokens of their own, as in the script
    `compound_split_bleu.sh` of fairseq (Vaswani et al. 2017). Raises `ValueError` for references without spaces.
    """
    from sacrebleu.metrics import BLEU
    from sacremoses import MosesTokenizer

    check_spaced(references)
    language = language or "en"
    moses = MosesTokenizer(lang=language)  # which uses the rules of English for unknown languages

    def prepare(text: str) -> str:
        tokens = moses.tokenize(text, escape=False, return_str=True)
        return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", tokens) if compounds else tokens

    signature = f"Moses tokens (sacremoses {version('sacremoses')}, lang:{language}), not smoothed"
    signature += ", compounds split at hyphens" * compounds
    return _sacrebleu(BLEU(tokenize="none", smooth_method="none", force=True), prepare, signature)


def _exact_match(references: Texts, language: str | None) -> Counter:
    def count(predictions: Texts, references: Texts) -> np.ndarray:
        pairs = zip(predictions, references, strict=True)
        return np.array([[text.split() == other.split(), 1] for text, other in pairs])

    return Counter(count, _percentage, "equal but for spaces")


def _character_error_rate(references: Texts, language: str | None) -> Counter:
    def count(predictions: Texts, references: Texts) -> np.ndarray:
        pairs = [[" ".join(text.split()) for text in pair] for pair in zip(predictions, references, strict=True)]
        return np.array([[edit_distance(text, other), len(other)] for text, other in pairs])

    signature = "character error rate, edits / characters of the references in percent; lower is better"
    return Counter(count, _percentage, signature)


def _word_error_rate(references: Texts, language: str | None) -> Counter:
    try:
        import jiwer
    except ImportError:
        raise ValueError("word error rates are computed by jiwer: pip install 'lightformers_hf[speech]'") from None

    def count(predictions: Texts, references: Texts) -> np.ndarray:
        counts = []
        for text, other in zip(predictions, references, strict=True):
            words = len(other.split())
            found = jiwer.process_words(other, text) if words else None
            edits = found.substitutions + found.deletions + found.insertions if found else len(text.split())
            counts.append([edits, words])
        return np.array(counts)

    signature = f"word error rate (jiwer {version('jiwer')}), edits / words of the references in percent; lower is "
    return Counter(count, _percentage, signature + "better")


def _endless(references: Texts, language: str | None) -> Counter:
    """Outputs that repeat themselves until the length limit; an error rate counts such a one as dozens of errors."""

    def count(predictions: Texts, references: Texts) -> np.ndarray:
        pairs = zip(predictions, references, strict=True)
        return np.array([[len(text) > 2 * len(other) + SHORT, 1] for text, other in pairs])

    signature = f"outputs longer than twice the reference by more than {SHORT} characters, in percent; lower is better"
    return Counter(count, _percentage, signature)


def _rouge(references: Texts, language: str | None, *, kind: str) -> Counter:
    """ROUGE (Lin 2004): F1 of one reference, mean over the texts, with Porter's stems.

    References in Latin letters have the words of Google's rouge-score, `[a-z0-9]+`; others have words of all letters,
    and single characters where a script has no spaces. Sentences of rougeLsum end at line breaks, as in rouge-score,
    and in a text without line breaks after `.`, `!` and `?`.
    """
    from rouge_score.rouge_scorer import RougeScorer  # brings all of nltk along, which takes a second or two

    latin = _share_of_letters(re.compile("[a-zA-Z]"), references) > 0.5
    scorer = RougeScorer([kind], tokenizer=_Words(latin=latin))

    def count(predictions: Texts, references: Texts) -> np.ndarray:
        if kind == "rougeLsum":
            predictions, references = (
                [t if "\n" in t.strip() else SENTENCE_END.sub("\n", t) for t in side]
                for side in (predictions, references)
            )
        pairs = zip(predictions, references, strict=True)
        return np.array([[scorer.score(other, text)[kind].fmeasure, 1] for text, other in pairs])

    words = "" if latin else ", words of all letters"
    return Counter(count, _percentage, f"rouge-score {version('rouge-score')}, Porter's stems{words}, mean F1")


class _Words:
    def __init__(self, *, latin: bool) -> None:
        from nltk.stem.porter import PorterStemmer

        self.latin, self.stem = latin, lru_cache(100_000)(PorterStemmer().stem)

    def tokenize(self, text: str) -> list[str]:
        words = re.findall("[a-z0-9]+", text.lower()) if self.latin else _all_words(text)
        return [self.stem(word) if len(word) > 3 else word for word in words]


def _all_words(text: str) -> list[str]:
    """Words of letters, marks and digits; a character of a script without spaces is a word."""
    kept = "".join(c if c.isalnum() or unicodedata.category(c)[0] == "M" else " " for c in text.lower())
    return UNSPACED.sub(r" \g<0> ", kept).split()


def _percentage(sums: np.ndarray) -> float:
    return 100 * float(sums[0]) / max(float(sums[1]), 1)


def edit_distance(text: str, other: str) -> int:
    """The least number of insertions, deletions and substitutions of characters (Levenshtein 1966)."""
    places = np.arange(len(other) + 1)
    characters = np.array([ord(c) for c in other], dtype=np.int64)
    row = places
    for number, character in enumerate(text, start=1):
        best = np.minimum(row[1:] + 1, row[:-1] + (characters != ord(character)))  # deletion, substitution
        best = np.concatenate(([number], best))
        row = np.minimum.accumulate(best - places) + places  # insertions, one after another
    return int(row[-1])


METRICS = {
    "wer": Metric("WER", _word_error_rate, (SPEECH,), higher_is_better=False),
    "exact-match": Metric("exact match", _exact_match, (WORDS,)),
    "cer": Metric("CER", _character_error_rate, (WORDS, SPEECH), higher_is_better=False),
    "endless": Metric("endless outputs", _endless, (SPEECH,), higher_is_better=False),
    "bleu": Metric("BLEU", _bleu, (SENTENCES,)),
    "multi-bleu": Metric("multi-bleu", _multi_bleu),
    "multi-bleu-compounds": Metric("multi-bleu, compounds split", partial(_multi_bleu, compounds=True)),
    "chrf": Metric("chrF", _chrf, (SENTENCES, WORDS)),
    "rouge1": Metric("ROUGE-1", partial(_rouge, kind="rouge1"), (SUMMARIES,)),
    "rouge2": Metric("ROUGE-2", partial(_rouge, kind="rouge2"), (SUMMARIES,)),
    "rougeL": Metric("ROUGE-L", partial(_rouge, kind="rougeL"), (SUMMARIES,)),
    "rougeLsum": Metric("ROUGE-Lsum", partial(_rouge, kind="rougeLsum"), (SUMMARIES,)),
}
GROUPS = {"rouge": [name for name in METRICS if name.startswith("rouge")]}
# The default metric for each kind of references that distinguishes similar models best.
FINEST = ("wer", "cer", "rougeL", "chrf")


def metric_names() -> list[str]:
    """All names that `--metric` takes."""
    return [*METRICS, *GROUPS]


def check_metrics(names: str | Iterable[str]) -> list[str]:
    """The metrics of these names as `METRICS` spells them, each once; `rouge` is all of ROUGE.

    Raises:
        ValueError: an unknown name; the message has similar names.
    """
    known = {name.lower(): [name] for name in METRICS} | GROUPS
    found: dict[str, None] = {}
    for name in [names] if isinstance(names, str) else names:
        key = name.lower().replace("_", "-")
        if key not in known:
            near = difflib.get_close_matches(key, known)
            near = [known[other][0] if other not in GROUPS else other for other in near]
            hint = f"did you mean {' or '.join(near)}?" if near else f"there is {', '.join(metric_names())}."
            raise ValueError(f"There is no metric {name!r}; {hint}")
        found |= dict.fromkeys(known[key])
    return list(found)


def choose_metrics(
    names: Iterable[str], sources: Texts, references: Texts, *, default: str | None = None
) -> list[str]:
    """The metrics that are asked for, or the defaults for a kind of data, by default that of the texts (`kind_of`).

    Raises:
        ValueError: an unknown name, or multi-bleu for references without spaces.
    """
    chosen = check_metrics(names)
    if not chosen:
        kind = default or kind_of(sources, references)
        chosen = [name for name, metric in METRICS.items() if kind in metric.default_for]
    if any(name.startswith("multi-bleu") for name in chosen):
        check_spaced(references)
    return chosen


def check_spaced(references: Texts) -> None:
    """Raise `ValueError` where multi-bleu would be computed for references without spaces."""
    if is_unspaced(references):
        raise ValueError(
            f"multi-bleu counts words between spaces, and the references have none, for example "
            f"{references[0][:40]!r}, so the score would mean nothing. Use bleu, which splits this script into "
            "characters, or chrf."
        )


def selection_metric(metrics: Sequence[str], asked: Iterable[str]) -> str:
    """The metric by which checkpoints are chosen: the first that is asked for, or the finest of the defaults."""
    return metrics[0] if list(asked) else next(name for name in FINEST if name in metrics)


def kind_of(sources: Texts, references: Texts) -> str:
    """The kind of the references: `words` if nine of ten have no space inside, `summaries` if they are at most half as
    long as the sources, in words and in characters, otherwise `sentences`. A script without spaces has no words."""
    unspaced = is_unspaced(references)
    if not unspaced and sum(len(text.split()) <= 1 for text in references) >= ONE_WORD * len(references):
        return WORDS
    characters, words = (
        [sum(len(measure(text)) for text in side) for side in (sources, references)]
        for measure in (str.strip, str.split)
    )
    if unspaced != is_unspaced(sources):  # a translation; lengths do not compare
        return SENTENCES
    lengths = [characters] if unspaced else [characters, words]
    return SUMMARIES if all(short <= SHORTENED * long for long, short in lengths) else SENTENCES


def is_unspaced(texts: Texts) -> bool:
    """Whether most letters are of a script that writes no spaces between words."""
    return _share_of_letters(UNSPACED, texts) > 0.5


def _share_of_letters(script: re.Pattern, texts: Texts) -> float:
    letters = sum(sum(map(str.isalpha, text)) for text in texts)
    return sum(len(script.findall(text)) for text in texts) / max(letters, 1)


def score(
    predictions: Texts, references: Texts, metrics: Iterable[str] = ("bleu", "chrf"), *, language: str | None = None
) -> dict[str, float]:
    """Scores of `predictions` against one reference each, from 0 to 100.

    Args:
        metrics: names of `METRICS`.
        language: code of the references' language (`de`): multi-bleu tokenizes by it.

    Raises:
        ValueError: lists of different lengths, or empty ones; an unknown metric.
    """
    _check_counts(predictions, references)
    counters = {name: METRICS[name].counter(references, language) for name in check_metrics(metrics)}
    sums = {name: counter.count(predictions, references).sum(axis=0) for name, counter in counters.items()}
    return {name: counter.score(sums[name]) for name, counter in counters.items()}


def load_metric(name: str, *, language: str | None = None, **options: object) -> evaluate.Metric:
    """A metric of `METRICS` as `evaluate.Metric`, without network: `load_metric("cer").compute(predictions=…, …)`.

    Args:
        language: as for `score`.
        options: those of `evaluate.Metric`.
    """
    (name,) = check_metrics([name])
    return _metric_class()(name, language, **options)


@cache
def _metric_class() -> type[evaluate.Metric]:
    import datasets
    import evaluate  # takes seconds

    class TextMetric(evaluate.Metric):
        def __init__(self, name: str, language: str | None = None, **options: object) -> None:
            self.language = language
            super().__init__(config_name=name, **options)

        def _info(self) -> evaluate.MetricInfo:
            columns = {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            return evaluate.MetricInfo(
                description=METRICS[self.config_name].label,
                citation="",
                inputs_description="predictions, references: lists of detokenized texts, one reference each.",
                features=datasets.Features(columns),
            )

        def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
            return score(predictions, references, [self.config_name], language=self.language)

    return TextMetric


def signatures(metrics: Iterable[str], references: Texts, *, language: str | None = None) -> dict[str, str]:
    """{metric: the variant that is computed for these references}, for sacreBLEU's metrics its signature."""
    return {name: METRICS[name].counter(references, language).signature for name in metrics}


def labels(metrics: Iterable[str]) -> dict[str, str]:
    """{metric: its name in tables}, of metrics that are not in the registry (`comet`) in capitals."""
    return {name: METRICS[name].label if name in METRICS else name.upper() for name in metrics}


def describe(signatures: dict[str, str]) -> list[str]:
    """One line for each signature, with the labels of the metrics that have it."""
    return [
        f"{', '.join(labels(name for name, other in signatures.items() if other == signature).values())}: {signature}"
        for signature in dict.fromkeys(signatures.values())
    ]


@dataclass(frozen=True)
class Difference:
    """How much higher the score of one system is than that of another on the same texts."""

    value: float
    low: float  # bounds of the 95 % interval of test sets like this one
    high: float

    def __str__(self) -> str:
        return f"{signed(self.value)} ({signed(self.low)} to {signed(self.high)})"


def signed(value: float, decimals: int = 1) -> str:
    """A difference as text: `+1.2`, `-0.3`, and `0.0` for values that round to zero."""
    text = f"{value:+.{decimals}f}"
    return text if float(text) else text[1:]


def difference(
    predictions: Texts,
    others: Texts,
    references: Texts,
    *,
    metric: str = "bleu",
    language: str | None = None,
    resamples: int = 1000,
    seed: int = 12345,
) -> Difference:
    """Score of `predictions` above that of `others`, with its paired bootstrap interval (Koehn 2004, section 4).

    Texts are drawn again, with replacement, the same for both systems; the interval holds the middle 95 % of the
    differences. It does not include the variation between random seeds of a training.

    Raises:
        ValueError: lists of different lengths, or empty ones.
    """
    _check_counts(predictions, references)
    _check_counts(others, references)
    size = len(references)
    draws = np.random.default_rng(seed).multinomial(size, [1 / size] * size, resamples)
    sets = np.concatenate([np.ones((1, size), dtype=int), draws])  # the test set itself comes first
    counter = METRICS[metric].counter(references, language)
    scores = [
        np.array([counter.score(sums) for sums in sets @ counter.count(outputs, references)])
        for outputs in (predictions, others)
    ]
    differences = scores[0] - scores[1]
    low, high = np.quantile(differences[1:], (0.025, 0.975))
    return Difference(differences[0].item(), low.item(), high.item())


def _check_counts(predictions: Texts, references: Texts) -> None:
    if len(predictions) != len(references):
        raise ValueError(f"{len(predictions)} predictions for {len(references)} references: give one reference each")
    if not predictions:
        raise ValueError("no predictions: a score needs at least one sentence")


def comet_score(sources: list[str], predictions: list[str], references: list[str], checkpoint: str) -> float:
    """The system score of a local COMET checkpoint (Rei et al. 2020), by the command `comet-score`.

    unbabel-comet asks for transformers below 5 and cannot share an environment with this package, so its command
    runs as a program of its own. The checkpoint is a pickle, which that program loads: use one you trust.

    Raises:
        FileNotFoundError: no such checkpoint, or the command is not installed.
        ValueError: the command failed.
    """
    if not Path(checkpoint).is_file():
        hint = "give the .ckpt file of a downloaded model (…/checkpoints/model.ckpt)."
        raise FileNotFoundError(f"No COMET checkpoint {checkpoint}: {hint}")
    command = shutil.which("comet-score")
    if command is None:
        raise FileNotFoundError(
            "COMET needs the command comet-score, which is not on PATH. It asks for transformers below 5, so give it "
            "an environment of its own: pipx install unbabel-comet"
        )
    import torch

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
