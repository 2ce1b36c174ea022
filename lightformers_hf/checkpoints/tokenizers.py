"""Saved tokenizers, which can be written again with a part of their tokens.

`TokenizerJson` is a tokenizer of the tokenizers library; `SentencePieceFiles` are those of Marian and M2M100.
"""

from __future__ import annotations

import json
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..files import read_json

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

Vocabularies = Mapping[str, Mapping[str, int]]  # {side: {token: id}}


def open_tokenizer(folder: Path) -> SavedTokenizer:
    """The tokenizer of a folder. Raises `ValueError` for an unknown kind."""
    return TokenizerJson(folder) if (folder / MAIN).is_file() else SentencePieceFiles(folder)


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
    offset = 0
    while offset < len(data):
        start = offset
        key, offset = _varint(data, offset)
        number, wire = key >> 3, key & 7
        value: bytes | int
        if wire == 0:
            value, offset = _varint(data, offset)
        else:
            if wire != 2 and wire not in LENGTHS:
                raise ValueError(f"byte {start} begins no field")
            length, offset = _varint(data, offset) if wire == 2 else (LENGTHS[wire], offset)
            if offset + length > len(data):
                raise ValueError(f"field {number} at byte {start} goes beyond the end")
            value, offset = data[offset : offset + length], offset + length
        yield number, data[start:offset], value


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    """The number of seven bits a byte that begins at `offset`, and the offset behind it."""
    value = shift = 0
    while True:
        byte = data[offset]
        value |= (byte & 127) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 128:
            return value, offset


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
        ranks = [(rank(*pair), index) for index, pair in enumerate(pairwise(parts))]
        possible = [(value, index) for value, index in ranks if value is not None]
        if not possible:
            break
        _, index = min(possible)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
        found.add(parts[index])
    return found


def lone_characters(tokens: Collection[str]) -> set[str]:
    """Tokens of one character, and of a space (▁) and one where that character is no token: they write any text."""
    alone = {token for token in tokens if len(token) == 1}
    return alone | {token for token in tokens if len(token) == 2 and token[0] == "▁" and token[1] not in alone}
