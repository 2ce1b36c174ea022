"""Rules for ranks: a ratio (LightFormer, Eq. 12), a rank, a share of ranks or of the energy; by kind and by name.

W is m×n, its factors m×r and r×n: mn parameters become r(m+n). A rule fixes each matrix by itself. Where one budget
(`ratio`, `params` or `size`, without patterns) is for all, no rule is asked: `allocation.allocate` chooses among the
`choices` of forms. This file does not import torch, because options are checked with it before anything is loaded.
"""

from __future__ import annotations

import math
import numbers
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from ..options import OptionError

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("embedding", "attention", "ffn")


def rank_for_ratio(m: int, n: int, ratio: float) -> int:
    """Return the largest r that makes the matrix at least `ratio` times smaller: ⌊mn / (p(m+n))⌋ (Eq. 12), at least 1.

    Raises `ValueError` unless the ratio is above 1.
    """
    if not (isinstance(ratio, numbers.Real) and 1 < ratio < math.inf):
        raise OptionError("ratio", f" is {ratio!r}, expected a number above 1: dense parameters / kept parameters")
    return max(1, math.floor(m * n / (ratio * (m + n))))


def rank_with_sharing(rank: int, layers: int, groups: int) -> int:
    """Return r' = ⌊L r / N⌋, the rank of N shared groups with the parameters of L layers of rank r (Eq. 4 to 6)."""
    if not 1 <= groups <= layers:
        raise ValueError(f"groups is {groups}, expected 1 to {layers}, the number of layers")
    return layers * rank // groups


def rank_for_energy(singular_values: Tensor, energy: float) -> int:
    """Return the smallest r whose first singular values (descending) hold `energy` of the sum of squares.

    It is 1 for a matrix of zeros. Raises `ValueError` for an energy outside (0, 1].
    """
    Energy(energy)
    held = singular_values.double().square().cumsum(0)
    # Compared with the last entry and not with 1, so that energy 1 is reached in spite of rounding.
    return int((held < energy * held[-1]).sum()) + 1


def worth_factorizing(m: int, n: int, rank: int) -> bool:
    """Whether two factors of that rank hold fewer parameters than the m×n matrix."""
    return rank * (m + n) < m * n


def read_percentage(text: str) -> float:
    """Return the share that a percentage without its sign stands for."""
    return float(text) / 100


class RankRule(ABC):
    """A rule for ranks: a data class with the decorator `@register_rule`."""

    spelling: ClassVar[str]  # in the option `pattern`, a regular expression; its groups are the arguments of `read`
    example: ClassVar[str]  # the spelling in words, for messages
    number: ClassVar[Callable[[str], float]] = float  # of a group
    needs_spectrum: ClassVar[bool] = False  # whether the choice depends on the singular values

    @classmethod
    def read(cls, *groups: str) -> RankRule:
        """Return the rule that a spelling stands for. Raises `ValueError` for a number out of range."""
        return cls(*map(cls.number, groups))

    @abstractmethod
    def find_rank(self, name: str, m: int, n: int, singular_values: Tensor | None) -> int:
        """Return r of an m×n matrix, whether it saves parameters or not. Raises `ValueError` for an impossible rank.

        Singular values are descending, and `None` unless the rule needs them.
        """

    def choose_width(self, name: str, widths: list[int]) -> int:
        """Return one of `widths`, of neurons or heads. Raises `ValueError` where the rule is for ranks alone."""
        raise ValueError(f"{name}: narrower heads and networks are chosen by ratio, params or size")


RULES: list[type[RankRule]] = []


def register_rule(rule: type[RankRule]) -> type[RankRule]:
    """Register a class as a rule of the option `pattern`."""
    RULES.append(rule)
    return rule


@register_rule
@dataclass(frozen=True)
class FixedRank(RankRule):
    """The number of singular values kept of each matrix; at least 1."""

    rank: int
    spelling, example, number = r"(\d+)", "a rank (64)", int

    def __post_init__(self) -> None:
        if not (isinstance(self.rank, numbers.Integral) and self.rank >= 1):
            raise OptionError("rank", f" is {self.rank!r}, expected a whole number, 1 or more")

    def find_rank(self, name: str, m: int, n: int, singular_values: Tensor | None) -> int:
        if self.rank > min(m, n):
            raise ValueError(f"{name}: rank {self.rank} is above {min(m, n)}, the largest that a {m}×{n} matrix has")
        return self.rank


@register_rule
@dataclass(frozen=True)
class Ratio(RankRule):
    """p of Eq. 12, dense parameters / kept parameters of each matrix; above 1."""

    ratio: float
    spelling, example = r"(\d+(?:\.\d+)?)x", "a ratio (4x)"

    def __post_init__(self) -> None:
        rank_for_ratio(1, 1, self.ratio)

    def find_rank(self, name: str, m: int, n: int, singular_values: Tensor | None) -> int:
        if worth_factorizing(m, n, 1):  # a matrix that cannot get smaller stays dense
            self._check_reach(name, m * n / (m + n))
        return rank_for_ratio(m, n, self.ratio)

    def choose_width(self, name: str, widths: list[int]) -> int:
        self._check_reach(name, max(widths) / min(widths))
        return max(width for width in widths if width * self.ratio <= max(widths))

    def _check_reach(self, name: str, most: float) -> None:
        if self.ratio > most * (1 + 1e-12):
            raise ValueError(
                f"{name}: ratio is {self.ratio:g}, which cannot be met: at its smallest it is {most:.4g} times "
                "smaller; ask for less, or leave it dense"
            )


@register_rule
@dataclass(frozen=True)
class Energy(RankRule):
    """The share of the sum of squared singular values kept; in (0, 1]."""

    energy: float
    spelling, example, number, needs_spectrum = r"(\d+(?:\.\d+)?)%", "an energy (90%)", read_percentage, True

    def __post_init__(self) -> None:
        if not (isinstance(self.energy, numbers.Real) and 0 < self.energy <= 1):
            raise OptionError("energy", f" is {self.energy!r}, expected a share above 0 and at most 1")

    def find_rank(self, name: str, m: int, n: int, singular_values: Tensor) -> int:
        return rank_for_energy(singular_values, self.energy)


@dataclass(frozen=True)
class RankShare(RankRule):
    """The proportion of the singular values kept of each matrix, by their number (LightFormer, §3.3); in (0, 1].

    The option `rank` has this rule; in `pattern`, `25%` is an energy.
    """

    share: float
    spelling, example, number = Energy.spelling, "a share of the singular values (25%)", read_percentage

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise OptionError(
                "rank",
                f" is {100 * self.share:g}%, expected a share of the singular values above 0% and at most 100%, "
                "such as 25%",
            )

    def find_rank(self, name: str, m: int, n: int, singular_values: Tensor | None) -> int:
        return max(1, math.floor(self.share * min(m, n) + 1e-9))  # 0.28 · 25 is just below 7


@dataclass(frozen=True)
class RankPolicy:
    """The rule for each matrix: that of the first pattern that matches its name, else of its kind, else the default.

    A pattern is a regular expression for the end of a module's name, beginning at a dot: `q_proj` fits
    `encoder.layers.0.self_attn.q_proj`, `proj` does not. A rule of `None` leaves matrices dense.

    Raises `ValueError` for an unknown kind, or a pattern that is no regular expression.
    """

    default: RankRule | None = None  # for kinds without their own
    kinds: dict[str, RankRule | None] = field(default_factory=dict)  # rules of `embedding`, `attention` and `ffn`
    names: dict[str, RankRule | None] = field(default_factory=dict)  # pattern → rule

    def __post_init__(self) -> None:
        if unknown := set(self.kinds) - set(KINDS):
            raise ValueError(f"unknown kind {sorted(unknown)[0]!r}, expected one of {', '.join(KINDS)}")
        for pattern in self.names:
            try:
                re.compile(pattern)
            except re.error as error:
                raise OptionError("pattern", f" {pattern!r} is not a regular expression: {error}") from None

    @property
    def compresses(self) -> bool:
        """Whether any matrix may get smaller."""
        return any((self.default, *self.kinds.values(), *self.names.values()))

    def rule(self, name: str, kind: str) -> RankRule | None:
        """Return the rule for one matrix."""
        patterns = (rule for pattern, rule in self.names.items() if _matches(pattern, name))
        return next(patterns, self.kinds.get(kind, self.default))

    def fixes(self, name: str, kind: str) -> bool:
        """Whether the budget excludes a matrix: its name has a rule, or its kind stays dense."""
        return self.kinds.get(kind, self) is None or any(_matches(pattern, name) for pattern in self.names)

    def needs_spectrum(self, name: str, kind: str) -> bool:
        """Whether `choose` needs the matrix's singular values."""
        rule = self.rule(name, kind)
        return rule is not None and rule.needs_spectrum

    def choose(self, name: str, kind: str, m: int, n: int, singular_values: Tensor | None = None) -> int | None:
        """Return the rank of one matrix, `None` where it stays dense. Raises `ValueError` for an impossible rank."""
        rule = self.rule(name, kind)
        rank = None if rule is None else rule.find_rank(name, m, n, singular_values)
        return rank if rank is not None and worth_factorizing(m, n, rank) else None

    def choose_width(self, name: str, kind: str, widths: list[int]) -> int | None:
        """Return one of `widths`, of neurons or heads, or `None` where all stay. Raises `ValueError` as `choose`."""
        rule = self.rule(name, kind)
        return None if rule is None else rule.choose_width(name, widths)

    def unused_patterns(self, names: Iterable[str]) -> list[str]:
        """Return the patterns that fit none of the module names."""
        names = list(names)
        return [pattern for pattern in self.names if not any(_matches(pattern, name) for name in names)]


def _matches(pattern: str, name: str) -> bool:
    from ..models.low_rank import pattern_matches  # which imports torch

    return pattern_matches(pattern, name)
