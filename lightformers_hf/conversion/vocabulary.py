"""Fewer tokens: those of the text that the user gives stay, and those that write any text.

A saved tokenizer is written again with the tokens that stay. `TokenizerJson` is a tokenizer of the tokenizers library;
`SentencePieceFiles` are those of Marian and M2M100.
"""

from __future__ import annotations

import difflib
import json
import re
import struct
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..files import read_json
from ..languages import split_language
from ..loading import load_pretrained
from ..models.configuration_lightformer import FactorizedConfig
from ..options import OptionError
from ..text import is_lines, load_lines, load_rows
from ..vocabularies import narrow_fields, read_vocabularies, single_ids, token_axes
from .options import CompressionOptions

if TYPE_CHECKING:
    from ..checkpoints.teacher import Teacher

CONFIG, MAIN = "tokenizer_config.json", "tokenizer.json"
SIDES = {"source": "vocab.json", "target": "target_vocab.json"}  # the second where the two differ
# The types of models of tokenizer.json that tokens can be taken out of.
UNIGRAM, BPE = "Unigram", "BPE"
# In a SentencePiece model: fields of the message, types of pieces, the trainer's settings, their field of the type of
# model and the value of one such type; bytes of a field by its wire type (those of type 2 contain their length).
PIECES, SELF_TEST = 1, 4
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
TRAINER, MODEL_TYPE, MERGES = 2, 3, 2
LENGTHS = {1: 8, 5: 4}
# Codes of languages that are tokens: de_DE and deu_Latn; Marian's are between brackets.
CODE, MARIAN_CODE = re.compile(r"[a-z]{2,4}_[A-Za-z]{2,4}"), re.compile(r">>(.+)<<")
SPACES = ("▁", "Ġ")  # pieces of nothing else
BOTH = "both"  # sides
AT_ONCE = 1000  # sentences that are read together
CHECKED = 2000  # sentences that are cut again by the new tokenizer

Counts = dict[str, Counter[int]]  # {side: {id: how often}}
Vocabularies = Mapping[str, Mapping[str, int]]  # {side: {token: id}}


class SavedTokenizer(ABC):
    """A tokenizer as `save_pretrained` wrote it into a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    @abstractmethod
    def needed(self) -> set[str]:
        """Tokens that stay for any text: those that can write any text, and those that the tokenization depends on."""

    @abstractmethod
    def parts(self, token: str) -> set[str]:
        """A token, and those without which no text would be cut into it."""

    @abstractmethod
    def rewrite(self, ids: Vocabularies) -> None:
        """Write the files anew: {side: {token that stays: its id}}, one side where both have the same tokens."""

    def rewrite_config(self, ids: Mapping[str, int]) -> None:
        """Write `tokenizer_config.json` and `added_tokens.json` with the tokens that stay."""
        content = read_json(self.folder / CONFIG)
        for name in ("extra_special_tokens", "additional_special_tokens"):
            if isinstance(content.get(name), list):
                texts = [token if isinstance(token, str) else token["content"] for token in content[name]]
                content[name] = [token for token, text in zip(content[name], texts, strict=True) if text in ids]
        if added := content.get("added_tokens_decoder"):
            kept = {ids[entry["content"]]: entry for entry in added.values() if entry["content"] in ids}
            content["added_tokens_decoder"] = {str(number): kept[number] for number in sorted(kept)}
        _write(content, self.folder / CONFIG)
        if added := read_json(self.folder / "added_tokens.json"):
            _write({token: ids[token] for token in added if token in ids}, self.folder / "added_tokens.json")


class TokenizerJson(SavedTokenizer):
    """One `tokenizer.json` with a unigram or byte-pair model: BART, mBART, NLLB, Pegasus, T5, and our own."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.content = read_json(folder / MAIN)
        self.model = self.content["model"]
        kind, foreign = self.model.get("type"), ("continuing_subword_prefix", "end_of_word_suffix")
        if kind not in (UNIGRAM, BPE) or any(self.model.get(name) for name in foreign):
            raise unknown_kind(f"its model is {kind}{' with marks inside of words' if kind == BPE else ''}")
        merges = self.model.get("merges") or []
        pairs = [tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair) for pair in merges]
        self.ranks = {pair: float(rank) for rank, pair in enumerate(pairs)}
        vocabulary = self.model["vocab"]
        self.pieces = set(vocabulary) if kind == BPE else {piece for piece, _ in vocabulary}

    def needed(self) -> set[str]:
        """Single characters and bytes; the least probable piece, from which comes how probable unknown ones are."""
        found = lone_characters(self.pieces) | {piece for piece in self.pieces if re.fullmatch("<0x..>", piece, re.S)}
        found |= {token for token in (self.model.get("unk_token"),) if token}
        if self.model["type"] == UNIGRAM:
            found.add(min(self.model["vocab"], key=lambda entry: entry[1])[0])
            found |= {self.model["vocab"][number][0] for number in (self.model.get("unk_id"),) if number is not None}
        for pairs, templates in _processors(self.content.get("post_processor")):
            found |= {token for token, _ in pairs.values()} | {
                token for entry in templates for token in entry["tokens"]
            }
        return found

    def parts(self, token: str) -> set[str]:
        if self.model["type"] == UNIGRAM:
            return {token}
        return merges_of(token, lambda left, right: self.ranks.get((left, right))) & self.pieces | {token}

    def rewrite(self, ids: Vocabularies) -> None:
        (kept,) = ids.values()
        content, model = self.content, self.model
        if model["type"] == UNIGRAM:
            unknown = None if model.get("unk_id") is None else model["vocab"][model["unk_id"]][0]
            model["vocab"] = [entry for entry in model["vocab"] if entry[0] in kept]
            model["unk_id"] = None if unknown is None else kept[unknown]
        else:
            model["vocab"] = {token: kept[token] for token in model["vocab"] if token in kept}
            model["merges"] = [list(pair) for pair in self.ranks if {*pair, "".join(pair)} <= kept.keys()]
        added = [token for token in content["added_tokens"] if token["content"] in kept]
        content["added_tokens"] = [token | {"id": kept[token["content"]]} for token in added]
        for pairs, templates in _processors(content.get("post_processor")):
            for pair in pairs.values():
                pair[1] = kept[pair[0]]
            for entry in templates:
                entry["ids"] = [kept[token] for token in entry["tokens"]]
        if content.get("padding"):
            content["padding"]["pad_id"] = kept[content["padding"]["pad_token"]]
        _write(content, self.folder / MAIN)
        self.rewrite_config(kept)


def _processors(node: Any) -> Iterator[tuple[dict[str, list], list[dict]]]:
    """Yield, for each post-processor of a sequence, its pairs of token and id, and its templates' special tokens."""
    for part in node if isinstance(node, list) else [node] if node else []:
        pairs = {name: part[name] for name in ("sep", "cls") if isinstance(part.get(name), list)}
        yield pairs, list((part.get("special_tokens") or {}).values())
        yield from _processors(part.get("processors"))


class SentencePieceFiles(SavedTokenizer):
    """A `vocab.json`, or one for each side, and SentencePiece models that cut the text."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        files = sorted([*folder.glob("*.spm"), *folder.glob("*.model")])
        self.models = {file: PieceModel.read(file) for file in files}
        self.vocabularies = {side: read_json(folder / name) for side, name in SIDES.items()}
        self.known = {token for tokens in self.vocabularies.values() for token in tokens}
        if not self.models or not self.vocabularies["source"]:
            raise unknown_kind("it has neither a tokenizer.json nor a vocab.json with SentencePiece models")
        self.scores = [
            {piece.text: -piece.score for piece in model.pieces} for model in self.models.values() if model.is_bpe
        ]

    def needed(self) -> set[str]:
        texts = {piece.text for model in self.models.values() for piece in model.pieces}
        return lone_characters(texts).union(*(model.needed() for model in self.models.values())) & self.known

    def parts(self, token: str) -> set[str]:
        def merges(scores: Mapping[str, float]) -> set[str]:
            return merges_of(token, lambda left, right: scores.get(left + right)) & self.known

        return {token}.union(*map(merges, self.scores))

    def rewrite(self, ids: Vocabularies) -> None:
        """Both; pieces that no vocabulary has stay in the models, which would else cut differently."""
        for file, model in self.models.items():
            side = "target" if "target" in ids and file.stem == "target" else "source"
            file.write_bytes(model.without(self.vocabularies[side].keys() - ids[side].keys()))
        for side, kept in ids.items():
            vocabulary = {token: kept[token] for token in self.vocabularies[side] if token in kept}
            _write(vocabulary, self.folder / SIDES[side])
        self.rewrite_config(next(iter(ids.values())))


@dataclass(frozen=True)
class Piece:
    """A piece with its score (log p of a unigram, minus the rank of a merge), and which of the six types it has."""

    text: str
    score: float
    type: int


@dataclass(frozen=True)
class PieceModel:
    """A SentencePiece model: a message of protocol buffers (`sentencepiece_model.proto` of google/sentencepiece).

    Field 1, repeated, is a piece, field 4 sentences by which a model tests itself when it is loaded, other fields
    define the tokenization. Fields are copied as they stand, so that only where each begins and ends has to be known.
    """

    fields: list[tuple[int, bytes]]  # (number, bytes) of every field of the message, key and length included
    pieces: list[Piece]  # those of the fields that are pieces, in their order

    @classmethod
    def read(cls, file: Path) -> PieceModel:
        """A model of a file. Raises `ValueError` for anything else."""
        try:
            content = list(read_fields(file.read_bytes()))
            pieces = [_read_piece(value) for number, _, value in content if number == PIECES]
            model = cls([(number, whole) for number, whole, _ in content], pieces)
            model.settings(TRAINER)
        except (IndexError, ValueError, struct.error) as error:
            raise ValueError(f"{file} is no SentencePiece model: {error}") from None
        if not pieces:
            raise ValueError(f"{file} is no SentencePiece model: it holds no piece")
        return model

    @property
    def is_bpe(self) -> bool:
        """Whether text is cut by merges, and not into the most probable pieces."""
        return self.settings(TRAINER).get(MODEL_TYPE) == MERGES

    def settings(self, message: int) -> dict[int, Any]:
        """{field: value} of one of the model's messages of settings, whose field has this number."""
        wholes = [whole for number, whole in self.fields if number == message]
        return {
            number: value
            for whole in wholes
            for _, _, content in read_fields(whole)
            for number, _, value in read_fields(_as_bytes(content))
        }

    def without(self, removed: Set[str]) -> bytes:
        """The model without some pieces, as bytes; without the sentences by which it would test itself, too."""
        pieces = iter(self.pieces)
        kept = (
            whole
            for number, whole in self.fields
            if number != SELF_TEST and (number != PIECES or next(pieces).text not in removed)
        )
        return b"".join(kept)

    def needed(self) -> set[str]:
        """Pieces that stay whatever the text: all that are not normal; the best and the worst of a unigram model."""
        found = {piece.text for piece in self.pieces if piece.type not in (NORMAL, UNUSED)}
        # What is unknown is as probable as the worst normal piece, and what a user defined as the best.
        normal = [piece for piece in self.pieces if piece.type == NORMAL]
        if normal and not self.is_bpe:
            found |= {end(normal, key=lambda piece: piece.score).text for end in (min, max)}
        return found


def read_fields(data: bytes) -> Iterator[tuple[int, bytes, bytes | int]]:
    """(number, all bytes, value) of every field of a message; a value is an integer, or bytes."""
    place = 0
    while place < len(data):
        start = place
        key, place = _varint(data, place)
        number, wire = key >> 3, key & 7
        value: bytes | int
        if wire == 0:
            value, place = _varint(data, place)
        else:
            if wire != 2 and wire not in LENGTHS:
                raise ValueError(f"byte {start} begins no field")
            length, place = _varint(data, place) if wire == 2 else (LENGTHS[wire], place)
            if place + length > len(data):
                raise ValueError(f"field {number} at byte {start} goes beyond the end")
            value, place = data[place : place + length], place + length
        yield number, data[start:place], value


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """The number of seven bits a byte that begins at `place`, and the place behind it."""
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place


def _read_piece(data: bytes | int) -> Piece:
    values = {number: value for number, _, value in read_fields(_as_bytes(data))}
    (score,) = struct.unpack("<f", _as_bytes(values.get(2, bytes(4))))
    return Piece(_as_bytes(values.get(1, b"")).decode("utf-8"), score, int(values.get(3, NORMAL)))


def _as_bytes(value: bytes | int) -> bytes:
    """A field that holds bytes. Raises `ValueError` for one that holds a number."""
    if isinstance(value, int):
        raise ValueError(f"a field holds the number {value}, expected text or a message")
    return value


def unknown_kind(why: str) -> ValueError:
    """Return the error for a tokenizer that cannot be rebuilt."""
    return ValueError(
        f"vocabulary cannot be trimmed, the tokenizer is not supported ({why}): supported are tokenizer.json with a "
        "unigram or byte-pair model, and SentencePiece models with vocab.json (Marian, M2M100); remove vocabulary"
    )


def _write(content: Any, file: Path) -> None:
    """Write JSON as the libraries do, ids and merges in as little space as there is."""
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def merges_of(token: str, rank: Callable[[str, str], float | None]) -> set[str]:
    """Return all tokens that a token is merged from: its characters, the tokens between, and the token itself.

    The lowest rank comes first, of equal ones the leftmost, as in byte-pair encoding. Neighbours of a token in a text
    change nothing: where the token comes out, no merge went across its ends.

    Args:
        rank: position among all merges of the merge of two neighbours; `None` where they are never merged.
    """
    parts = list(token)
    found = set(parts)
    while len(parts) > 1:
        ranks = [(rank(*pair), place) for place, pair in enumerate(pairwise(parts))]
        possible = [(value, place) for value, place in ranks if value is not None]
        if not possible:
            break
        _, place = min(possible)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
        found.add(parts[place])
    return found


def lone_characters(tokens: Collection[str]) -> set[str]:
    """Tokens of one character, and of a space (▁) and one where that character is no token: they write any text."""
    alone = {token for token in tokens if len(token) == 1}
    return alone | {token for token in tokens if len(token) == 2 and token[0] == "▁" and token[1] not in alone}


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
        saved = _open_tokenizer(Path(folder))
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


def _open_tokenizer(folder: Path) -> SavedTokenizer:
    """The tokenizer of a folder. Raises `ValueError` for an unknown kind."""
    return TokenizerJson(folder) if (folder / MAIN).is_file() else SentencePieceFiles(folder)


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
    return [*dict.fromkeys([*wanted, *(code for code in sides if code in codes)])]


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
        for one in both if side == BOTH else (side,):
            into = counts[one if one in counts else "source"]
            for ids in _cut(tokenizer, texts, one):
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
        rows = load_lines(Path(name)) if is_lines(name) else load_rows(name).flatten()
        short = {column.removeprefix("translation."): column for column in rows.column_names}
        named = zip(("source", "target"), columns, strict=True)
        sides = [(side, short[column]) for side, column in named if column in short]
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
        _open_tokenizer(Path(folder)).rewrite(ids)
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
        texts = [text for one, text in sample if one == side]
        pairs = zip(texts, _cut(tokenizer, texts, side), _cut(kept.tokenizer, texts, side), strict=True)
        for text, before, after in pairs:
            if {*before} <= new.keys() and [new[token] for token in before] != after:
                raise unknown_kind(f"{text!r:.60} is cut differently without the tokens that go")
