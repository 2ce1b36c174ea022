"""Pieces of tokens: what a SentencePiece model holds, and the merges that build a token of byte-pair encoding.

A SentencePiece model is a message of protocol buffers (`sentencepiece_model.proto` of google/sentencepiece): field 1,
repeated, is a piece, field 4 sentences by which a model tests itself when it is loaded, others say how text is cut.
Fields are copied as they stand, bytes and all, so that nothing is needed here but where each begins and ends.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

PIECES, SELF_TEST = 1, 4
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
TRAINER, MODEL_TYPE, BPE = 2, 3, 2  # the field of the trainer's settings, its field of the type, and one such type
LENGTHS = {1: 8, 5: 4}  # bytes of a field by its wire type; those of type 2 say theirs


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

    def keep(self, stays: Callable[[Piece], bool]) -> bytes:
        """The model with some of its pieces, as bytes; without the sentences by which it would test itself."""
        pieces = iter(self.pieces)
        kept = (
            whole for number, whole in self.fields if number != SELF_TEST and (number != PIECES or stays(next(pieces)))
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


# What two neighbours become, and how late among all merges; `None` where they are never merged.
Rank = Callable[[str, str], float | None]


def merges_of(token: str, rank: Rank) -> set[str]:
    """What arises while a token is merged out of its characters: these, and all tokens between, itself included.

    The lowest rank comes first, of equal ones the leftmost, as in byte-pair encoding. Neighbours of a token in a text
    change nothing: where the token comes out, no merge went across its ends.
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
