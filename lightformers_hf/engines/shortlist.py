"""The output layer of a batch: which target tokens can come, given the source's, and how much is lost by it.

Which target tokens go with a source token is learned by IBM model 1 (Brown et al. 1993) from pairs of token ids: of
parallel text, or of the model's own translations.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from sacrebleu import CHRF

from ..data_files import is_lines
from ..decoding import repeated_start
from ..files import read_json
from ..languages import add_prefix, put_prefix, split_prefix, target_ids
from ..loading import position_limit, printable_name
from ..options import OptionError
from ..text import check_known, find_languages, load_lines, load_rows, select_texts
from .search import Search

if TYPE_CHECKING:
    from ..checkpoints.teacher import Teacher
    from . import EngineFile, RunningModel

SHORTLIST_FILES = ("vmap.txt", "shortlist.json")  # CTranslate2's, and that of the other engines
ROUNDS = 5  # rounds of expectation maximization
MOST = 20_000_000  # pairs of a source and a target token that are looked at: some hundred thousand sentences
LONGEST = 128  # tokens of a sentence
# Settings: tokens that always can come, and tokens for each of the source's. The smallest that covers enough is taken.
ALWAYS, EACH, ENOUGH = (100, 200, 500, 1000, 1500, 2000, 3000, 4000), (50, 100, 200), 0.998
HELD_OUT, SHARE = 400, 0.1  # sentences that the lexicon does not see: so many, or such a part of fewer
BATCH, FEWEST = 32, 4


@dataclass(frozen=True)
class Lexicon:
    """Pairs of tokens, by source and then by falling probability."""

    source: np.ndarray
    target: np.ndarray
    probability: np.ndarray  # t(target | source), which adds up to 1 over the targets of a source token
    frequent: np.ndarray  # target ids by falling frequency

    def targets(self, most: int) -> dict[int, list[int]]:
        """{source token: its most probable targets, so many at most}."""
        starts = np.flatnonzero(np.r_[True, self.source[1:] != self.source[:-1]])
        ends = np.minimum(np.r_[starts[1:], len(self.source)], starts + most)
        return {int(self.source[a]): self.target[a:b].tolist() for a, b in zip(starts, ends, strict=True)}


def learn_lexicon(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> Lexicon:
    """The lexicon of sentence pairs, of so many as `MOST` allows from the first on.

    Model 1 explains every target token by one of the source's, or by none of them (an empty word, which is removed
    from the result). Expectation maximization finds its probabilities.
    """
    nothing = size = 1 + max((max(ids, default=0) for ids in (*sources, *targets)), default=0)  # the empty word
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    pairs = index = 0
    for source, target in zip(sources, targets, strict=True):
        f, e = np.array([*source[:LONGEST], nothing]), np.array(target[:LONGEST], dtype=np.int64)
        parts.append((np.tile(f, len(e)), np.repeat(e, len(f)), np.repeat(np.arange(index, index + len(e)), len(f))))
        index, pairs = index + len(e), pairs + len(f) * len(e)
        if pairs > MOST:
            break
    f, e, positions = (np.concatenate([part[index] for part in parts]) for index in range(3))
    keys, which = np.unique(f * size + e, return_inverse=True)
    source, target = np.divmod(keys, size)
    probability = np.ones(len(keys))
    for _ in range(ROUNDS):
        weight = probability[which]
        weight /= np.bincount(positions, weight)[positions]
        expected = np.bincount(which, weight, len(keys))
        probability = expected / np.bincount(source, expected)[source]
    counts = np.bincount(e[f == nothing], minlength=1)
    order = np.lexsort((-probability, source))
    order = order[source[order] != nothing]
    frequent = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    return Lexicon(source[order], target[order], probability[order], frequent)


@dataclass(frozen=True)
class Shortlist:
    """Target tokens that can come."""

    vocabulary: int  # how many target tokens there are
    always: tuple[int, ...]  # whatever the source
    given: dict[int, list[int]]  # {source token: those that come with it, without these}

    @classmethod
    def of(cls, lexicon: Lexicon, vocabulary: int, special: Iterable[int], always: int, each: int) -> Shortlist:
        """The most frequent tokens, the special ones, and for each source token the most probable."""
        first = dict.fromkeys([*special, *lexicon.frequent[:always].tolist()])
        given = {
            source: [token for token in targets if token not in first]
            for source, targets in lexicon.targets(each).items()
        }
        return cls(vocabulary, tuple(first), given)

    def candidates(self, batch: Iterable[Sequence[int]]) -> np.ndarray:
        """The tokens that can come for any sentence of a batch, in rising order."""
        found = set(self.always)
        for token in {token for sentence in batch for token in sentence}:
            found.update(self.given.get(token, ()))
        return np.array(sorted(found), dtype=np.int64)

    def coverage(self, sources: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> tuple[float, float]:
        """(share of the tokens of outputs that can come, tokens that can come for a sentence on average)."""
        held = number = size = 0
        for source, output in zip(sources, outputs, strict=True):
            candidates = set(self.candidates([source]).tolist())
            held, number = held + sum(token in candidates for token in output), number + len(output)
            size += len(candidates)
        return held / max(number, 1), size / max(len(sources), 1)

    def save(self, file: Path) -> None:
        """Write it as JSON."""
        given = {str(token): ids for token, ids in self.given.items()}
        content = {"vocabulary": self.vocabulary, "always": list(self.always), "given": given}
        file.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")

    @classmethod
    def load(cls, file: Path) -> Shortlist:
        """Read the file that `save` wrote."""
        content = read_json(file)
        given = {int(token): ids for token, ids in content["given"].items()}
        return cls(content["vocabulary"], tuple(content["always"]), given)


def choose_shortlist(
    lexicon: Lexicon,
    vocabulary: int,
    special: Sequence[int],
    sources: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
) -> Shortlist:
    """The smallest shortlist that holds enough of a model's outputs, or the one that holds most of them."""
    tried = [Shortlist.of(lexicon, vocabulary, special, always, each) for always in ALWAYS for each in EACH]
    found = [(*candidate.coverage(sources, outputs), candidate) for candidate in tried]
    enough = [row for row in found if row[0] >= ENOUGH]
    return min(enough, key=lambda row: row[1])[2] if enough else max(found, key=lambda row: (row[0], -row[1]))[2]


def narrow_search(search: Search, tokens: np.ndarray) -> Search:
    """A search among some tokens alone, which it calls by their indices in `tokens`."""
    index_of: dict = {None: None} | {int(token): number for number, token in enumerate(tokens)}
    single = {name: index_of[getattr(search, name)] for name in ("start", "pad", "forced_start", "forced_end")}
    suppressed = tuple(index_of[token] for token in search.suppressed if token in index_of)
    return replace(search, ends=tuple(index_of[token] for token in search.ends), suppressed=suppressed, **single)


def special_tokens(search: Search, unknown: int | None) -> list[int]:
    """Tokens that every search needs."""
    named = (search.start, search.pad, *search.ends, search.forced_start, search.forced_end, unknown)
    return sorted({token for token in named if token is not None})


def find_shortlist(folder: Path) -> Path | None:
    """The file of a shortlist in an exported folder."""
    return next((folder / name for name in SHORTLIST_FILES if (folder / name).is_file()), None)


def digest(file: Path) -> str:
    """Return the fingerprint of a file."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def check_shortlist(folder: Path, described: dict | None) -> None:
    """Raise a `ValueError` for a folder whose shortlist is another than `export.json` describes."""
    file = find_shortlist(folder)
    if file is None and described is not None:
        raise ValueError(f"{folder} lacks its shortlist ({' or '.join(SHORTLIST_FILES)}): export the model again")
    if file is not None and (described is None or digest(file) != described["sha256"]):
        raise ValueError(
            f"{file} was not made for this model, whose vocabulary may be another: remove the file, or export the "
            "model again with --shortlist"
        )


# --- A shortlist for a model that was just exported


@dataclass(frozen=True)
class ShortlistReport:
    """A shortlist, and how the model does with it on sentences that it was not made from."""

    text: str  # the text that it was made from
    pairs: int
    own_translations: bool  # whether the targets of the pairs are the model's
    always: int  # tokens that can always come
    candidates: float  # tokens that can come for a sentence, on average, of the `vocabulary`
    vocabulary: int
    coverage: float  # share of the tokens of the model's outputs that it contains
    sentences: int  # held out for this
    same: float  # share of them whose translation stays the same
    chrf: float | None  # `None` without references
    chrf_without: float | None  # with all tokens
    sha256: str  # of its file

    def line(self) -> str:
        """The same as sentences."""
        scores = "" if self.chrf is None else f"; chrF {self.chrf:.1f}, {self.chrf_without:.1f} with all tokens"
        return (
            f"Shortlist from {self.pairs:,} pairs of {self.text}: {self.candidates:,.0f} of {self.vocabulary:,} "
            f"tokens for a sentence. Of {self.sentences} sentences held out it has {self.coverage:.2%} of the tokens "
            f"of the model's translations, and does not change {self.same:.0%} of these{scores}."
        )


def add_shortlist(
    engine: EngineFile,
    source: Teacher,
    folder: Path,
    quantization: str,
    text: str,
    columns: tuple[str | None, str | None],
) -> ShortlistReport:
    """Make a shortlist for an exported model, write it beside it, and measure it.

    `text` is parallel text (see `load_parallel`); or text of the source alone, which the model then translates: a file
    of lines (any other ending), or data without the target's column. By default, `columns` are called as the tokenizer
    calls its languages, else `source` and `target`.
    """
    sources, references = read_pairs(source, text, columns)
    search, ids = Search.of(source.generation_config), read_ids(source, sources)
    tokenizer = source.need_tokenizer()
    running, positions = engine.load(folder, search, torch.get_num_threads()), position_limit(source.model.config)
    held = max(2, min(HELD_OUT, int(SHARE * len(ids))))
    made_from, checked = ids[:-held], ids[-held:]
    outputs = translate_all(running, checked, search, positions)
    if references is None:
        targets = translate_all(running, made_from, search.with_options(1, None, None), positions)
    else:
        targets = tokenizer(text_target=references[:-held], verbose=False)["input_ids"]
    half = held // 2  # one chooses, the other measures
    special, size = special_tokens(search, tokenizer.unk_token_id), source.model.config.decoder_vocab_size
    shortlist = choose_shortlist(learn_lexicon(made_from, targets), size, special, checked[:half], outputs[:half])
    engine.write_shortlist(source, folder, quantization, shortlist)
    checked, outputs = checked[half:], outputs[half:]
    found = translate_all(engine.load(folder, search, torch.get_num_threads()), checked, search, positions)
    coverage, candidates = shortlist.coverage(checked, outputs)
    same = sum(output == other for output, other in zip(found, outputs, strict=True))
    scores: list[float | None] = [None, None]
    if references is not None:
        texts = [tokenizer.batch_decode(rows, skip_special_tokens=True) for rows in (found, outputs)]
        scores = [CHRF().corpus_score(outputs, [references[-len(checked) :]]).score for outputs in texts]
    return ShortlistReport(
        text=printable_name(text),
        pairs=len(made_from),
        own_translations=references is None,
        always=len(shortlist.always),
        candidates=candidates,
        vocabulary=size,
        coverage=coverage,
        sentences=len(checked),
        same=same / len(checked),
        chrf=scores[0],
        chrf_without=scores[1],
        sha256=digest(cast(Path, find_shortlist(folder))),
    )


def read_pairs(
    source: Teacher, text: str, columns: tuple[str | None, str | None], *, option: str = "shortlist"
) -> tuple[list[str], list[str] | None]:
    """Sentences that are no empty ones, and their translations where the text has some. `option` names the text."""
    if source.tokenizer is None:
        raise OptionError(option, f" is given, but {source.name} has no tokenizer to read the text by")
    if getattr(source.tokenizer, "tgt_lang", "") is None:
        raise OptionError(
            option,
            f" is given, but {source.name} has many languages: give ",
            "source_lang",
            " and ",
            "target_lang",
            " with it",
        )
    named = zip(columns, ("source_lang", "target_lang"), ("source", "target"), strict=True)
    first, second = (given or getattr(source.tokenizer, field, None) or name for given, field, name in named)
    first, prefix = split_prefix(add_prefix(source.model.config, first, second, source.tokenizer))
    references: list[str] | None = None
    if is_lines(text):
        lines = load_lines(Path(text))
        sources = list(lines["text"]) if len(lines) else []
    else:
        rows = find_languages(load_rows(text), (first, second))
        if first not in rows.column_names:
            there = ", ".join(map(repr, rows.column_names))
            raise OptionError("", f"{text} has no column {first!r}: it has {there}; give ", "source_lang")
        if second in rows.column_names:
            pairs = select_texts(rows, text, first, second)
            sources, references = list(pairs["source"]), list(pairs["target"])
        else:
            sources = [str(text or "") for text in rows[first]]
    others = references or sources
    kept = [index for index, pair in enumerate(zip(sources, others, strict=True)) if all(map(str.strip, pair))]
    if len(kept) < FEWEST:
        held = f"{len(kept)} sentence{'s' * (len(kept) != 1)}"
        raise OptionError(option, f" {text} holds {held}: give thousands like those to be translated")
    prefixed = [put_prefix(prefix, sources[index]) for index in kept]
    return prefixed, None if references is None else [references[index] for index in kept]


def read_ids(source: Teacher, texts: list[str], *, is_target: bool = False) -> list[list[int]]:
    """The tokens of sentences, at most `LONGEST` of each. Raises `ValueError` where the tokenizer does not fit."""
    limit = min(position_limit(source.model.config) or LONGEST, LONGEST)
    tokenizer = source.need_tokenizer()
    if is_target:
        ids = target_ids(texts, tokenizer, limit, repeated_start(source.model, tokenizer))
    else:
        ids = tokenizer(texts, truncation=True, max_length=limit)["input_ids"]
    check_known(ids, tokenizer)
    return ids


def translate_all(
    model: RunningModel, sentences: Sequence[list[int]], search: Search, positions: int | None
) -> list[list[int]]:
    """Return the outputs of a running model for sentences, in their order."""
    order = sorted(range(len(sentences)), key=lambda index: -len(sentences[index]))
    outputs: list[list[int]] = [[] for _ in sentences]
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        batch = [sentences[index] for index in chosen]
        for index, ids in zip(chosen, model.generate(batch, search.limited(batch, positions)), strict=True):
            outputs[index] = ids
    return outputs
