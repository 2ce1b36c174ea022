"""A shortlist for an exported model, from parallel text or its own translations, and its cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from sacrebleu import CHRF

from ..languages import add_prefix, split_prefix
from ..loading import position_limit, printable_name
from ..text import check_known, is_lines, load_lines, load_parallel, load_rows
from .engines import EngineFile, RunningModel
from .lexicon import LONGEST, learn_lexicon
from .search import Search
from .shortlist import choose_shortlist, digest, find_shortlist, special_tokens
from .source import Source

HELD_OUT, SHARE = 400, 0.1  # sentences that the lexicon does not see: so many, or such a part of fewer
BATCH, FEWEST = 32, 4


@dataclass(frozen=True)
class ShortlistReport:
    """A shortlist, and how the model does with it on sentences that it was not made from.

    Attributes:
        text: the text that it was made from.
        pairs: sentence pairs of it.
        own_translations: whether their targets are the model's.
        always: tokens that can always come.
        candidates: tokens that can come for a sentence, on average, of the `vocabulary`.
        coverage: share of the tokens of the model's outputs that the shortlist contains.
        sentences: held out for this.
        same: share of the sentences whose translation does not change.
        chrf, chrf_without: with the shortlist and with all tokens; `None` without references.
        sha256: of its file.
    """

    text: str
    pairs: int
    own_translations: bool
    always: int
    candidates: float
    vocabulary: int
    coverage: float
    sentences: int
    same: float
    chrf: float | None
    chrf_without: float | None
    sha256: str

    def lines(self) -> list[str]:
        """The same as sentences."""
        scores = "" if self.chrf is None else f"; chrF {self.chrf:.1f}, {self.chrf_without:.1f} with all tokens"
        return [
            f"Shortlist from {self.pairs:,} pairs of {self.text}: {self.candidates:,.0f} of {self.vocabulary:,} "
            f"tokens for a sentence. Of {self.sentences} sentences held out it has {self.coverage:.2%} of the tokens "
            f"of the model's own translations, and leaves {self.same:.0%} of these as they are{scores}."
        ]


def add_shortlist(
    engine: EngineFile,
    source: Source,
    folder: Path,
    quantization: str,
    text: str,
    columns: tuple[str | None, str | None],
) -> ShortlistReport:
    """Make a shortlist for an exported model, write it beside it, and measure it.

    Args:
        text: parallel text (see `load_parallel`); or text of the source alone, which the model then translates: a file
            of lines (any other ending), or data without the target's column.
        columns: those of source and target; `None`: as the tokenizer calls them, else `source` and `target`.

    Raises:
        ValueError: no tokenizer, an engine without shortlists, too little text.
        FileNotFoundError: no such text.
    """
    if source.tokenizer is None:
        raise ValueError(f"shortlist is given, but {source.name} has no tokenizer to read the text by")
    sources, references = read_pairs(source, text, columns)
    search = Search.of(source.generation)
    limit = min(position_limit(source.model.config) or LONGEST, LONGEST)
    ids = source.tokenizer(sources, truncation=True, max_length=limit)["input_ids"]
    check_known(ids, source.tokenizer)
    running = engine.load(folder, search, torch.get_num_threads())
    held = max(2, min(HELD_OUT, int(SHARE * len(ids))))
    made_from, checked = ids[:-held], ids[-held:]
    outputs = translate_all(running, checked, search)
    if references is None:
        targets = translate_all(running, made_from, search.with_options(1, None, None))
    else:
        targets = source.tokenizer(text_target=references[:-held], verbose=False)["input_ids"]
    unknown = source.tokenizer.unk_token_id
    half = held // 2  # one chooses, the other measures
    lexicon = learn_lexicon(made_from, targets)
    special, size = special_tokens(search, unknown), source.model.config.decoder_vocab_size
    shortlist = choose_shortlist(lexicon, size, special, checked[:half], outputs[:half])
    engine.write_shortlist(source, folder, quantization, shortlist)
    file = find_shortlist(folder)
    assert file is not None
    checked, outputs = checked[half:], outputs[half:]
    found = translate_all(engine.load(folder, search, torch.get_num_threads()), checked, search)
    coverage, candidates = shortlist.coverage(checked, outputs)
    same = sum(one == other for one, other in zip(found, outputs, strict=True))
    scores = [score(source, rows, references and references[-len(checked) :]) for rows in (found, outputs)]
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
        sha256=digest(file),
    )


def score(source: Source, outputs: list[list[int]], references: list[str] | None) -> float | None:
    """chrF of translations in ids; `None` without references."""
    if references is None:
        return None
    texts = source.tokenizer.batch_decode(outputs, skip_special_tokens=True)
    return CHRF().corpus_score(texts, [references]).score


def read_pairs(
    source: Source, text: str, columns: tuple[str | None, str | None]
) -> tuple[list[str], list[str] | None]:
    """Sentences that are not empty, with their translations if the text has them."""
    if getattr(source.tokenizer, "tgt_lang", "") is None:
        raise ValueError(
            f"shortlist is given, but {source.name} has many languages: give source_lang and target_lang with it"
        )
    named = zip(columns, ("source_lang", "target_lang"), ("source", "target"), strict=True)
    first, second = (given or getattr(source.tokenizer, field, None) or name for given, field, name in named)
    first, prefix = split_prefix(add_prefix(source.model.config, first, second))
    sources: list[str]
    references: list[str] | None = None
    if is_lines(text):
        lines = load_lines(Path(text))
        sources = list(lines["text"]) if len(lines) else []
    else:
        rows = load_rows(text).flatten()
        there = {name.removeprefix("translation."): name for name in rows.column_names}
        if first not in there:
            raise ValueError(f"{text} has no column {first!r}: it has {', '.join(map(repr, there))}; give source_lang")
        if second in there:
            pairs = load_parallel(text, source=first, target=second)
            sources, references = list(pairs["source"]), list(pairs["target"])
        else:
            sources = [str(one or "") for one in rows[there[first]]]
    others = references or sources
    kept = [index for index, pair in enumerate(zip(sources, others, strict=True)) if all(map(str.strip, pair))]
    if len(kept) < FEWEST:
        held = f"{len(kept)} sentence{'s' * (len(kept) != 1)}"
        raise ValueError(f"shortlist {text} holds {held}: give thousands like those to be translated")
    prefixed = [prefix + sources[index] for index in kept]
    return prefixed, None if references is None else [references[index] for index in kept]


def translate_all(model: RunningModel, sentences: Sequence[list[int]], search: Search) -> list[list[int]]:
    """Return the outputs of a running model for sentences, in their order."""
    order = sorted(range(len(sentences)), key=lambda index: -len(sentences[index]))
    outputs: list[list[int]] = [[] for _ in sentences]
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        for index, ids in zip(chosen, model.generate([sentences[index] for index in chosen], search), strict=True):
            outputs[index] = ids
    return outputs
