"""The kinds of tokenizers, by the files that they are saved in, and how each is written with fewer tokens.

`tokenizer.json` holds unigram or byte-pair models of the library tokenizers (BART, mBART, NLLB, Pegasus, T5, and what
this package trains); a `vocab.json`, or one for each side, beside SentencePiece models is Marian's and M2M100's.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from functools import partial
from pathlib import Path
from typing import Any

from ...files import read_json
from .pieces import Piece, PieceModel, lone_characters, merges_of

MAIN, CONFIG = "tokenizer.json", "tokenizer_config.json"
SIDES = {"source": "vocab.json", "target": "target_vocab.json"}  # the second where the two differ
# The types of models in tokenizer.json that tokens can be taken out of.
UNIGRAM, BPE = "Unigram", "BPE"


class SavedTokenizer(ABC):
    """A tokenizer as `save_pretrained` wrote it into a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    @abstractmethod
    def needed(self) -> set[str]:
        """Tokens that stay whatever the text: all that writes any text, and what cutting text depends on."""

    @abstractmethod
    def parts(self, token: str) -> set[str]:
        """A token, and those without which no text would be cut into it."""

    @abstractmethod
    def rewrite(self, ids: Mapping[str, Mapping[str, int]]) -> None:
        """Write the files anew: {side: {token that stays: its id}}, one side where both have the same tokens."""

    def rewrite_config(self, ids: Mapping[str, int]) -> None:
        """The same of `tokenizer_config.json` and `added_tokens.json`."""
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


class MainFile(SavedTokenizer):
    """One `tokenizer.json` with everything in it."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.content = read_json(folder / MAIN)
        self.model = self.content["model"]
        kind, foreign = self.model.get("type"), ("continuing_subword_prefix", "end_of_word_suffix")
        if kind not in (UNIGRAM, BPE) or any(self.model.get(name) for name in foreign):
            raise unknown_kind(f"its model is {kind}{' with marks inside of words' if kind == BPE else ''}")
        merges = [tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair) for pair in self._list("merges")]
        self.ranks = {pair: float(rank) for rank, pair in enumerate(merges)}

    def _list(self, name: str) -> list:
        return self.model.get(name) or []

    @property
    def pieces(self) -> set[str]:
        """Tokens that text is cut into."""
        return set(self.model["vocab"] if self.model["type"] == BPE else (piece for piece, _ in self.model["vocab"]))

    def needed(self) -> set[str]:
        """Single characters and bytes; the least probable piece, from which comes how probable unknown ones are."""
        pieces = self.pieces
        found = lone_characters(pieces) | {piece for piece in pieces if is_byte(piece)}
        found |= {token for token in (self.model.get("unk_token"),) if token}
        if self.model["type"] == UNIGRAM:
            found.add(min(self.model["vocab"], key=lambda entry: entry[1])[0])
            found |= {self.model["vocab"][number][0] for number in (self.model.get("unk_id"),) if number is not None}
        return found | set(_processed_tokens(self.content.get("post_processor")))

    def parts(self, token: str) -> set[str]:
        """Of a byte-pair model, what is merged into it."""
        if self.model["type"] == UNIGRAM:
            return {token}
        found = merges_of(token, lambda left, right: self.ranks.get((left, right)))
        return found & self.pieces_once | {token}

    @property
    def pieces_once(self) -> set[str]:
        """`pieces`, made once."""
        if not hasattr(self, "_pieces"):
            self._pieces = self.pieces
        return self._pieces

    def rewrite(self, ids: Mapping[str, Mapping[str, int]]) -> None:
        """Vocabulary, merges, added tokens and the template of special ones."""
        (kept,) = ids.values()
        content, model = self.content, self.model
        if model["type"] == UNIGRAM:
            unknown = None if model.get("unk_id") is None else model["vocab"][model["unk_id"]][0]
            model["vocab"] = [entry for entry in model["vocab"] if entry[0] in kept]
            model["unk_id"] = None if unknown is None else kept[unknown]
        else:
            model["vocab"] = {token: kept[token] for token in model["vocab"] if token in kept}
            model["merges"] = [list(pair) for pair in self.ranks if {*pair, "".join(pair)} <= kept.keys()]
        content["added_tokens"] = [
            token | {"id": kept[token["content"]]} for token in content["added_tokens"] if token["content"] in kept
        ]
        _renumber(content.get("post_processor"), kept)
        if content.get("padding"):
            content["padding"]["pad_id"] = kept[content["padding"]["pad_token"]]
        write(content, self.folder / MAIN)
        self.rewrite_config(kept)


class PieceFiles(SavedTokenizer):
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
        """Single characters, bytes, and what the models say of themselves."""
        texts = {piece.text for model in self.models.values() for piece in model.pieces}
        return lone_characters(texts).union(*(model.needed() for model in self.models.values())) & self.known

    def parts(self, token: str) -> set[str]:
        """Of byte-pair models, what is merged into it."""
        found = {token}
        for scores in self.scores:
            found |= merges_of(token, partial(_rank_in, scores)) & self.known
        return found

    def rewrite(self, ids: Mapping[str, Mapping[str, int]]) -> None:
        """Both; pieces that no vocabulary has stay in the models, which would else cut differently."""
        for file, model in self.models.items():
            side = "target" if "target" in ids and file.stem == "target" else "source"
            stays = partial(_is_none_of, self.vocabularies[side].keys() - ids[side].keys())
            file.write_bytes(model.keep(stays))
        for side, kept in ids.items():
            vocabulary = {token: kept[token] for token in self.vocabularies[side] if token in kept}
            write(vocabulary, self.folder / SIDES[side])
        self.rewrite_config(next(iter(ids.values())))


def _rank_in(scores: Mapping[str, float], left: str, right: str) -> float | None:
    return scores.get(left + right)


def _is_none_of(gone: Set[str], piece: Piece) -> bool:
    return piece.text not in gone


def open_tokenizer(folder: Path) -> SavedTokenizer:
    """The tokenizer of a folder. Raises `ValueError` for one of a kind that is not known here."""
    return MainFile(folder) if (folder / MAIN).is_file() else PieceFiles(folder)


def unknown_kind(why: str) -> ValueError:
    """What is said of a tokenizer that cannot be rebuilt."""
    return ValueError(
        f"vocabulary cannot be trimmed, the tokenizer is of no known kind ({why}): known are tokenizer.json with a "
        "unigram or byte-pair model, and SentencePiece models with vocab.json (Marian, M2M100); leave vocabulary out"
    )


def is_byte(piece: str) -> bool:
    """Whether a piece stands for a byte: `<0x0A>`."""
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")


def write(content: Any, file: Path) -> None:
    """Write JSON as the libraries do, ids and merges in as little space as there is."""
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _text(token: str | dict) -> str:
    return token if isinstance(token, str) else token["content"]


def _processed_tokens(node: Any) -> list[str]:
    """The tokens that a post-processor adds."""
    if isinstance(node, list):
        return [token for part in node for token in _processed_tokens(part)]
    if not isinstance(node, dict):
        return []
    pairs = [node[name][0] for name in ("sep", "cls") if isinstance(node.get(name), list | tuple)]
    template = [token for entry in (node.get("special_tokens") or {}).values() for token in entry["tokens"]]
    return [*pairs, *template, *_processed_tokens(node.get("processors"))]


def _renumber(node: Any, ids: Mapping[str, int]) -> None:
    """Give the tokens of a post-processor their new ids, in place."""
    for part in node if isinstance(node, list) else []:
        _renumber(part, ids)
    if not isinstance(node, dict):
        return
    for name in ("sep", "cls"):
        if isinstance(node.get(name), list | tuple):
            node[name] = [node[name][0], ids[node[name][0]]]
    for entry in (node.get("special_tokens") or {}).values():
        entry["ids"] = [ids[token] for token in entry["tokens"]]
    _renumber(node.get("processors"), ids)
