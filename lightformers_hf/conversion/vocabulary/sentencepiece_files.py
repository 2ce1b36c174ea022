"""Tokenizers of SentencePiece models beside a `vocab.json`, or one for each side: Marian's and M2M100's.

A SentencePiece model is a message of protocol buffers (`sentencepiece_model.proto` of google/sentencepiece): field 1,
repeated, is a piece, field 4 sentences by which a model tests itself when it is loaded, other fields define the
tokenization. Fields are copied as they stand, bytes and all, so that nothing is needed here but where each begins and
ends.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...files import read_json
from . import SavedTokenizer, lone_characters, merges_of, unknown_kind, write

SIDES = {"source": "vocab.json", "target": "target_vocab.json"}  # the second where the two differ
PIECES, SELF_TEST = 1, 4
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
TRAINER, MODEL_TYPE, BPE = 2, 3, 2  # the field of the trainer's settings, its field of the type, and one such type
LENGTHS = {1: 8, 5: 4}  # bytes of a field by its wire type; those of type 2 contain their length


class SentencePieceFiles(SavedTokenizer):
    """A `vocab.json`, or one for each side, and SentencePiece models that cut the text."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.models = {
            file: PieceModel.read(file) for file in sorted([*folder.glob("*.spm"), *folder.glob("*.model")])
        }
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
        found = {token}
        for scores in self.scores:
            found |= merges_of(token, partial(_rank_in, scores)) & self.known
        return found

    def rewrite(self, ids: Mapping[str, Mapping[str, int]]) -> None:
        """Both; pieces that no vocabulary has stay in the models, which would else cut differently."""
        for file, model in self.models.items():
            side = "target" if "target" in ids and file.stem == "target" else "source"
            file.write_bytes(model.without(self.vocabularies[side].keys() - ids[side].keys()))
        for side, kept in ids.items():
            vocabulary = {token: kept[token] for token in self.vocabularies[side] if token in kept}
            write(vocabulary, self.folder / SIDES[side])
        self.rewrite_config(next(iter(ids.values())))


def _rank_in(scores: Mapping[str, float], left: str, right: str) -> float | None:
    return scores.get(left + right)


@dataclass(frozen=True)
class Piece:
    """A piece with its score (log p of a unigram, minus the rank of a merge), and which of the six types it has."""

    text: str
    score: float
    type: int


@dataclass(frozen=True)
class PieceModel:
    """A SentencePiece model.

    Attributes:
        fields: (number, bytes) of every field of the message, key and length included.
        pieces: those of the fields that are pieces, in their order.
        is_bpe: whether text is cut by merges, and not into the most probable pieces.
    """

    fields: list[tuple[int, bytes]]
    pieces: list[Piece]
    is_bpe: bool

    @classmethod
    def read(cls, file: Path) -> PieceModel:
        """A model of a file. Raises `ValueError` for anything else."""
        try:
            content = list(read_fields(file.read_bytes()))
            pieces = [_read_piece(value) for number, _, value in content if number == PIECES]
            trainer = next((value for number, _, value in content if number == TRAINER), b"")
            kind = next((value for number, _, value in read_fields(_as_bytes(trainer)) if number == MODEL_TYPE), None)
        except (IndexError, ValueError, struct.error) as error:
            raise ValueError(f"{file} is no SentencePiece model: {error}") from None
        if not pieces:
            raise ValueError(f"{file} is no SentencePiece model: it holds no piece")
        return cls([(number, whole) for number, whole, _ in content], pieces, kind == BPE)

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
        """Pieces that stay whatever the text: all that are not normal; and, as what is unknown is as probable as the
        worst normal piece and what a user defined as the best, these two.
        """
        found = {piece.text for piece in self.pieces if piece.type not in (NORMAL, UNUSED)}
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
            if wire == 2:
                length, place = _varint(data, place)
            elif wire in LENGTHS:
                length = LENGTHS[wire]
            else:
                raise ValueError(f"byte {start} begins no field")
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
