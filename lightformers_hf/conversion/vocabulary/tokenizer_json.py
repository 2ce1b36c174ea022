"""Tokenizers of the tokenizers library: one `tokenizer.json` holds a unigram or byte-pair model.

BART, mBART, NLLB, Pegasus, T5, and the tokenizers that this package trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ...files import read_json
from . import SavedTokenizer, lone_characters, merges_of, unknown_kind, write

MAIN = "tokenizer.json"
# The types of models that tokens can be taken out of.
UNIGRAM, BPE = "Unigram", "BPE"


class TokenizerJson(SavedTokenizer):
    """One `tokenizer.json` with everything in it."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.content = read_json(folder / MAIN)
        self.model = self.content["model"]
        kind, foreign = self.model.get("type"), ("continuing_subword_prefix", "end_of_word_suffix")
        if kind not in (UNIGRAM, BPE) or any(self.model.get(name) for name in foreign):
            raise unknown_kind(f"its model is {kind}{' with marks inside of words' if kind == BPE else ''}")
        merges = [
            tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair)
            for pair in self.model.get("merges") or []
        ]
        self.ranks = {pair: float(rank) for rank, pair in enumerate(merges)}

    @cached_property
    def pieces(self) -> set[str]:
        """Tokens that text is cut into."""
        return set(self.model["vocab"] if self.model["type"] == BPE else (piece for piece, _ in self.model["vocab"]))

    def needed(self) -> set[str]:
        """Single characters and bytes; the least probable piece, from which comes how probable unknown ones are."""
        found = lone_characters(self.pieces) | {piece for piece in self.pieces if is_byte(piece)}
        found |= {token for token in (self.model.get("unk_token"),) if token}
        if self.model["type"] == UNIGRAM:
            found.add(min(self.model["vocab"], key=lambda entry: entry[1])[0])
            found |= {self.model["vocab"][number][0] for number in (self.model.get("unk_id"),) if number is not None}
        return found | set(_processed_tokens(self.content.get("post_processor")))

    def parts(self, token: str) -> set[str]:
        if self.model["type"] == UNIGRAM:
            return {token}
        found = merges_of(token, lambda left, right: self.ranks.get((left, right)))
        return found & self.pieces | {token}

    def rewrite(self, ids: Mapping[str, Mapping[str, int]]) -> None:
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


def is_byte(piece: str) -> bool:
    """Whether a piece stands for a byte: `<0x0A>`."""
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")


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
