"""Saved tokenizers, and how each kind is written again with fewer tokens.

A kind is a file in this folder: `tokenizer_json` for the library tokenizers, `sentencepiece_files` for Marian's and
M2M100's. `choose` decides which tokens stay.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...files import read_json

CONFIG = "tokenizer_config.json"


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
    def rewrite(self, ids: Mapping[str, Mapping[str, int]]) -> None:
        """Write the files anew: {side: {token that stays: its id}}, one side where both have the same tokens."""

    def rewrite_config(self, ids: Mapping[str, int]) -> None:
        """Write `tokenizer_config.json` and `added_tokens.json` with the tokens that stay."""
        content = read_json(self.folder / CONFIG)
        for name in ("extra_special_tokens", "additional_special_tokens"):
            if isinstance(content.get(name), list):
                content[name] = [token for token in content[name] if _text(token) in ids]
        if added := content.get("added_tokens_decoder"):
            kept = {ids[entry["content"]]: entry for entry in added.values() if entry["content"] in ids}
            content["added_tokens_decoder"] = {str(number): kept[number] for number in sorted(kept)}
        write(content, self.folder / CONFIG)
        if added := read_json(self.folder / "added_tokens.json"):
            write({token: ids[token] for token in added if token in ids}, self.folder / "added_tokens.json")


def unknown_kind(why: str) -> ValueError:
    """Return the error for a tokenizer that cannot be rebuilt."""
    return ValueError(
        f"vocabulary cannot be trimmed, the tokenizer is not supported ({why}): supported are tokenizer.json with a "
        "unigram or byte-pair model, and SentencePiece models with vocab.json (Marian, M2M100); remove vocabulary"
    )


def write(content: Any, file: Path) -> None:
    """Write JSON as the libraries do, ids and merges in as little space as there is."""
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _text(token: str | dict) -> str:
    return token if isinstance(token, str) else token["content"]


# Merge of two neighbours, and its position among all merges; `None` where they are never merged.
Rank = Callable[[str, str], float | None]


def merges_of(token: str, rank: Rank) -> set[str]:
    """Return all tokens that a token is merged from: its characters, the tokens between, and the token itself.

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
