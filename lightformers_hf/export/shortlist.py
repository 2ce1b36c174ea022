"""The output layer of a batch: which target tokens can come, given the source's, and how much is lost by it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..files import read_json
from .lexicon import Lexicon
from .search import Search

SHORTLIST_FILES = ("vmap.txt", "shortlist.json")  # CTranslate2's, and that of the other engines
# Settings: tokens that always can come, and tokens for each of the source's. The smallest that covers enough is taken.
ALWAYS, EACH, ENOUGH = (100, 200, 500, 1000, 1500, 2000, 3000, 4000), (50, 100, 200), 0.998


@dataclass(frozen=True)
class Shortlist:
    """Target tokens that can come.

    Attributes:
        vocabulary: how many target tokens there are.
        always: whatever the source.
        given: {source token: those that come with it, without these}.
    """

    vocabulary: int
    always: tuple[int, ...]
    given: dict[int, list[int]]

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
    found: list[tuple[bool, float, float, Shortlist]] = []
    for always in ALWAYS:
        for each in EACH:
            shortlist = Shortlist.of(lexicon, vocabulary, special, always, each)
            coverage, size = shortlist.coverage(sources, outputs)
            found.append((coverage >= ENOUGH, coverage, size, shortlist))
    enough = [one for one in found if one[0]]
    return min(enough, key=lambda one: one[2])[3] if enough else max(found, key=lambda one: (one[1], -one[2]))[3]


def narrow_search(search: Search, tokens: np.ndarray) -> Search:
    """A search among some tokens alone, which it calls by their places in `tokens`."""
    place = {int(token): number for number, token in enumerate(tokens)}
    return replace(
        search,
        start=place[search.start],
        pad=place[search.pad],
        ends=tuple(place[token] for token in search.ends),
        suppressed=tuple(place[token] for token in search.suppressed if token in place),
        forced_start=None if search.forced_start is None else place[search.forced_start],
        forced_end=None if search.forced_end is None else place[search.forced_end],
    )


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
    """Raise a `ValueError` where an exported folder holds a shortlist that was not made for it, or lacks its own.

    Args:
        described: its entry in `export.json`.
    """
    file = find_shortlist(folder)
    if file is None and described is None:
        return
    if file is None:
        raise ValueError(f"{folder} lacks its shortlist ({' or '.join(SHORTLIST_FILES)}): export the model again")
    if described is None or digest(file) != described["sha256"]:
        raise ValueError(
            f"{file} was not made for this model, whose vocabulary may be another: remove the file, or export the "
            "model again with --shortlist"
        )
