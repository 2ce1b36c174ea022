"""What a conversion is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from .ranks import KINDS, RankPolicy, RankRule
from .sharing import GROUP_STARTS
from .svd import SPLITS


@dataclass(frozen=True)
class CompressionOptions:
    """What is compressed, and how far. Of ratio, rank and energy at most one is set, in general and for each kind.

    With none of them, and no groups, the ratio is 2. With groups alone nothing is factorized; with a choice for some
    kinds alone, the other kinds stay dense.

    Attributes:
        ratio: p of Eq. 12, dense parameters / factorized parameters of each matrix; above 1.
        rank: r of each matrix.
        energy: share of the squared singular values that each matrix keeps, in (0, 1].
        embedding_ratio … ffn_energy: the same for the matrices of one kind, before the general choice.
        rank_pattern: module name pattern → rank, `None` for dense; before every other choice.
        encoder_groups, decoder_groups: N, number of stored layers; `None` leaves the source's sharing as it is.
        group_start: a group's layer starts as the `mean` of its layers or as the `first` of them.
        split: where Σ goes: `sigma-right` (Eq. 11) or `balanced`, √Σ to each factor.
    """

    ratio: float | None = None
    rank: int | None = None
    energy: float | None = None
    embedding_ratio: float | None = None
    embedding_rank: int | None = None
    embedding_energy: float | None = None
    attention_ratio: float | None = None
    attention_rank: int | None = None
    attention_energy: float | None = None
    ffn_ratio: float | None = None
    ffn_rank: int | None = None
    ffn_energy: float | None = None
    rank_pattern: dict[str, int | None] | None = None
    encoder_groups: int | None = None
    decoder_groups: int | None = None
    group_start: str = "mean"
    split: str = "sigma-right"

    def __post_init__(self) -> None:
        for name, allowed in (("group_start", GROUP_STARTS), ("split", SPLITS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it is one of {', '.join(allowed)}")
        self.policy()

    def _rule(self, prefix: str) -> RankRule | None:
        choice = {name: getattr(self, f"{prefix}{name}") for name in ("ratio", "rank", "energy")}
        return None if all(value is None for value in choice.values()) else RankRule(**choice)

    def policy(self) -> RankPolicy:
        """The choice of ranks that these options ask for. Raises `ValueError` where a value is out of its range."""
        default = self._rule("")
        kinds = {kind: rule for kind in KINDS if (rule := self._rule(f"{kind}_")) is not None}
        shares = self.encoder_groups is not None or self.decoder_groups is not None
        if not (default or kinds or self.rank_pattern or shares):
            default = RankRule(ratio=2.0)
        return RankPolicy(default, kinds, self.rank_pattern or {})
