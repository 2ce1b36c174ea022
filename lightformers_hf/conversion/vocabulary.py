"""Fewer tokens: those of the text that the user gives stay, and those that write any text."""

from __future__ import annotations

import difflib
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints.tokenizers import SavedTokenizer, Vocabularies, open_tokenizer, unknown_kind
from ..data_files import is_lines
from ..languages import split_language
from ..loading import load_pretrained
from ..models.configuration_lightformer import FactorizedConfig
from ..options import OptionError
from ..text import find_languages, load_lines, load_rows
from ..vocabularies import narrow_fields, read_vocabularies, single_ids, token_axes
from .options import CompressionOptions

if TYPE_CHECKING:
    from ..checkpoints.teacher import Teacher

# Codes of languages that are tokens: de_DE and deu_Latn; Marian's are between brackets.
CODE, MARIAN_CODE = re.compile(r"[a-z]{2,4}_[A-Za-z]{2,4}"), re.compile(r">>(.+)<<")
SPACES = ("▁", "Ġ")  # pieces of nothing else
BOTH = "both"  # sides
AT_ONCE = 1000  # sentences that are read together
CHECKED = 2000  # sentences that are cut again by the new tokenizer

Counts = dict[str, Counter[int]]  # {side: {id: how often}}


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """Tokens of a checkpoint that stay."""

    source: Sequence[int]  # their old ids, in the order of the new ones
    target: Sequence[int]  # the same list where both sides have one vocabulary
    tokenizer: PreTrainedTokenizerBase  # with the new ids
    languages: Sequence[str] = ()  # the codes that stay, where some go

    def config(self, config: FactorizedConfig) -> FactorizedConfig:
        """A configuration of this package for the smaller vocabulary."""
        fields = config.to_dict()
        return type(config)(**{**fields, **narrow_fields(fields, self.source, self.target)})

    def rows(self, model: PreTrainedModel) -> dict[str, tuple[int, Tensor]]:
        """{tensor: (dimension, the indices that stay there)} of a model's tensors that have an entry a token."""
        return {
            name: (dimension, torch.tensor(self.source if ".encoder." in name else self.target))
            for name, dimension in token_axes(model).items()
        }


def choose_tokens(teacher: Teacher, options: CompressionOptions) -> KeptTokens:
    """The tokens of a teacher that stay, by `CompressionOptions`, and a tokenizer that contains only them."""
    tokenizer = teacher.need_tokenizer()
    vocabularies = read_vocabularies(tokenizer)
    special = {str(token) for token in (*tokenizer.all_special_tokens, *tokenizer.get_added_vocab())}
    codes = getattr(tokenizer, "lang_code_to_token", None)  # {code: token}, of M2M100
    if not codes:
        matches = (MARIAN_CODE.fullmatch(token) for token in tokenizer.get_vocab())
        codes = {token: token for token in special if CODE.fullmatch(token)}
        codes |= {match[1]: match[0] for match in matches if match}
    wanted = _choose_languages(codes, options, tokenizer.name_or_path)
    with tempfile.TemporaryDirectory() as folder:
        _save(tokenizer, Path(folder), [token for code, token in codes.items() if code in wanted])
        saved = open_tokenizer(Path(folder))
    counts, sample = _count_tokens(tokenizer, vocabularies, options)
    dropped = {token for code, token in codes.items() if code not in wanted}
    must = (saved.needed() | special | set(codes.values())) - dropped
    for _ in range(3):  # tokens that the tokenizer's class adds must stay
        kept = _choose(teacher, vocabularies, saved, counts, must, options.vocabulary_size)
        rebuilt = _rebuild(tokenizer, vocabularies, kept, [codes[code] for code in wanted])
        strange: set[str] = set()  # tokens whose id is not the one that they were given
        for side, found in read_vocabularies(rebuilt).items():
            new = {old: number for number, old in enumerate(kept[side])}
            expected = {token: new[old] for token, old in vocabularies[side].items() if old in new}
            strange |= {token for token, _ in expected.items() ^ found.items()}
        if not strange:
            break
        must |= strange
    else:
        raise unknown_kind(f"its class adds {', '.join(sorted(strange)[:3])}, for any files")
    languages = wanted if dropped else ()
    result = KeptTokens(kept["source"], kept.get("target", kept["source"]), rebuilt, languages)
    _check_cuts(tokenizer, result, sample)
    return result


def _choose_languages(codes: Mapping[str, str], options: CompressionOptions, name: str) -> list[str]:
    """The codes that stay: those asked for, and those of source and target; all where nothing is asked."""
    if not options.languages:
        return list(codes)
    if not codes:
        raise OptionError(
            "languages", f" are given, but the tokenizer of {name} has no language codes: remove ", "languages"
        )
    sides = (split_language(text)[1] for text in (options.source_lang, options.target_lang))
    wanted = [code.strip("><") for code in options.languages]
    for code in wanted:
        if code not in codes:
            near = difflib.get_close_matches(code, codes) or sorted(codes)[:5]
            raise OptionError(
                "languages", f" has {code!r}, which the tokenizer does not support; there is {' or '.join(near)}"
            )
    return [*dict.fromkeys([*wanted, *(code for code in sides if code and code in codes)])]


def _save(tokenizer: PreTrainedTokenizerBase, folder: Path, languages: Sequence[str]) -> None:
    """Save a tokenizer, its own languages among those that stay."""
    before = {name: getattr(tokenizer, name) for name in ("src_lang", "tgt_lang") if hasattr(tokenizer, name)}
    tokens = getattr(tokenizer, "lang_code_to_token", {})
    gone = [name for name, code in before.items() if code is not None and tokens.get(code, code) not in languages]
    if "src_lang" in gone and languages:  # there is always one
        tokenizer.src_lang = next((code for code, token in tokens.items() if token in languages), languages[0])
    if "tgt_lang" in gone:
        tokenizer.tgt_lang = None
    tokenizer.save_pretrained(folder)
    for name in gone:
        setattr(tokenizer, name, before[name])


def _count_tokens(
    tokenizer: PreTrainedTokenizerBase, vocabularies: Vocabularies, options: CompressionOptions
) -> tuple[Counts, list[tuple[str, str]]]:
    """Count each token in the texts. Return the counts, and (side, sentence) of the first sentences."""
    counts: Counts = {side: Counter() for side in vocabularies}
    both = ("source", "target") if hasattr(tokenizer, "spm_target") else ("source",)  # Marian's sides cut by their own
    sample: list[tuple[str, str]] = []
    for side, texts in read_texts(options.vocabulary or (), options.columns):
        for own in both if side == BOTH else (side,):
            into = counts[own if own in counts else "source"]
            for ids in _cut(tokenizer, texts, own):
                into.update(ids)
        sample += [(side if side != BOTH else "source", text) for text in texts[: CHECKED - len(sample)]]
    for side, found in counts.items():
        known = (vocabularies[side].get(token) for token in SPACES)
        unknown = found.pop(tokenizer.unk_token_id, 0)
        for token in (*tokenizer.all_special_ids, *known):
            found.pop(token, None)
        if not found or unknown > found.total():
            raise ValueError(
                f"vocabulary {', '.join(options.vocabulary or ())}: the tokenizer has {found.total():,} of "
                f"{found.total() + unknown:,} tokens of the {side} text: give text in the languages of the model"
            )
    return counts, sample


def read_texts(names: Sequence[str], columns: tuple[str | None, str | None]) -> Iterator[tuple[str, list[str]]]:
    """(`source`, `target` or `both`, some sentences) until all text is read.

    Args:
        names: files of data as `load_parallel` takes them, files of lines (any other ending), or names on the Hub.
        columns: those of source and target, or languages in a column `translation`. Where a data set has neither, all
            its columns of text are of both sides, and so are lines.
    """
    for name in names:
        rows = find_languages(load_lines(Path(name)) if is_lines(name) else load_rows(name), columns)
        named = zip(("source", "target"), columns, strict=True)
        sides = [(side, column) for side, column in named if column in rows.column_names]
        kinds = {column: getattr(kind, "dtype", "") for column, kind in rows.features.items()}
        sides = sides or [(BOTH, column) for column, kind in kinds.items() if kind in ("string", "large_string")]
        found = False
        for side, column in sides:
            values = rows[column]
            for start in range(0, len(rows), AT_ONCE):
                texts = values[start : start + AT_ONCE]
                bad = next((text for text in texts if not isinstance(text, str) or "\0" in text), None)
                if bad is not None or None in texts:
                    raise ValueError(f"vocabulary {name}, {column!r}: expected text, found {bad!r:.40}")
                found = found or any(text.strip() for text in texts)
                yield side, texts
        if not found:
            raise ValueError(f"vocabulary {name} holds no text: give sentences like those that are to be translated")


def _cut(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], side: str) -> list[list[int]]:
    """Ids of texts as one side reads them, without those that only frame a sentence."""
    if side == "target" and getattr(tokenizer, "tgt_lang", "") is None:  # many languages, none chosen: cut alike
        side = "source"
    name = "text" if side == "source" else "text_target"
    return tokenizer(**{name: list(texts)}, add_special_tokens=False, verbose=False)["input_ids"]


def _choose(
    teacher: Teacher,
    vocabularies: Vocabularies,
    saved: SavedTokenizer,
    counts: Counts,
    must: set[str],
    size: int | None,
) -> dict[str, list[int]]:
    """{side: old ids in the order of the new ones}."""
    config = teacher.config
    smaller = min(config.vocab_size, getattr(config, "decoder_vocab_size", config.vocab_size))
    configs = [config.to_dict(), teacher.generation_config.to_dict()]
    ids = {number for fields in configs for numbers in single_ids(fields).values() for number in numbers}
    named = sorted(number for number in ids if 0 <= number < smaller)
    kept = {}
    for side, vocabulary in vocabularies.items():
        token_of = {number: token for token, number in vocabulary.items()}
        chosen = {vocabulary[token] for token in must if token in vocabulary} | set(named)
        if size is not None and size < len(chosen):
            raise OptionError(
                "vocabulary_size",
                f" is {size}, but {len(chosen)} tokens must stay so that every text can be written "
                f"(special tokens, languages, single characters): give {len(chosen)} or more",
            )
        for number, _ in sorted(counts[side].items(), key=lambda item: (-item[1], item[0])):
            parts = {vocabulary[part] for part in saved.parts(token_of[number]) if part in vocabulary}
            if size is None or len(chosen) + len(parts - chosen) <= size:
                chosen |= parts
        # Ids of a configuration are of both sides: where these are numbered apart, they come first. Rows without a
        # token come last, behind those that a tokenizer adds.
        front = named if len(vocabularies) > 1 else []
        kept[side] = [*front, *sorted(chosen - set(front), key=lambda number: (number not in token_of, number))]
    return kept


def _rebuild(
    tokenizer: PreTrainedTokenizerBase,
    vocabularies: Vocabularies,
    kept: Mapping[str, Sequence[int]],
    languages: Sequence[str],
) -> PreTrainedTokenizerBase:
    """The tokenizer with the tokens that stay, loaded from files as anybody will load them."""
    ids = {}
    for side, vocabulary in vocabularies.items():
        token_of = {number: token for token, number in vocabulary.items()}
        ids[side] = {token_of[old]: new for new, old in enumerate(kept[side]) if old in token_of}
    with tempfile.TemporaryDirectory() as folder:
        _save(tokenizer, Path(folder), languages)
        open_tokenizer(Path(folder)).rewrite(ids)
        for _ in range(2):  # tokens that a class adds may appear only after saving and loading
            rebuilt = load_pretrained(AutoTokenizer, folder)
            rebuilt.save_pretrained(folder)
    rebuilt.name_or_path = tokenizer.name_or_path
    rebuilt.init_kwargs["name_or_path"] = tokenizer.name_or_path
    return rebuilt


def _check_cuts(tokenizer: PreTrainedTokenizerBase, kept: KeptTokens, sample: Sequence[tuple[str, str]]) -> None:
    """Raise a `ValueError` if a text whose tokens all stay is tokenized differently."""
    for side in {side for side, _ in sample}:
        new = {old: number for number, old in enumerate(getattr(kept, side))}
        texts = [text for origin, text in sample if origin == side]
        pairs = zip(texts, _cut(tokenizer, texts, side), _cut(kept.tokenizer, texts, side), strict=True)
        for text, before, after in pairs:
            if {*before} <= new.keys() and [new[token] for token in before] != after:
                raise unknown_kind(f"{text!r:.60} is cut differently without the tokens that go")
