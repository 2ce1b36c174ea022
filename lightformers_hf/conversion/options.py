"""What a conversion is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from .ranks import KINDS, RankPolicy, RankRule
from .sharing import GROUP_STARTS
from .svd import SPLITS

ALLOCATIONS = (None, "uniform", "budget")


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
        calibration: parallel text, never that of a test: factorizes in the metric of the loss (`calibration.py`)
            instead of all entries alike. A file or a dataset on the Hub, see `load_parallel`.
        calibration_samples, calibration_seed: how many pairs of it are drawn, and which; `None` means 1000, or all
            of fewer.
        source_lang, target_lang: its columns; `None` means the languages that the tokenizer names.
        allocation: `uniform` gives every matrix the ratio, `budget` spends the parameters that the ratio leaves where
            they spare most loss. `None` means `budget` where there is calibration and one ratio for all kinds.
        refit: after truncation, regress the teacher's outputs on what every layer gets, front to back (`refit.py`).
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
    calibration: str | None = None
    calibration_samples: int | None = None
    calibration_seed: int = 0
    source_lang: str | None = None
    target_lang: str | None = None
    allocation: str | None = None
    refit: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("group_start", GROUP_STARTS), ("split", SPLITS), ("allocation", ALLOCATIONS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it is one of {', '.join(filter(None, allowed))}")
        if self.calibration_samples is not None and self.calibration_samples < 1:
            raise ValueError(f"calibration_samples is {self.calibration_samples}; it is 1 or more")
        if self.refit and self.calibration is None:
            raise ValueError("refit is True, but there is no text to refit on: give calibration")
        if self.allocation == "budget" and self.calibration is None:
            raise ValueError(
                "allocation is 'budget', but without calibration the errors of different matrices do not compare: "
                "give calibration"
            )
        if self.allocation == "budget" and not self._one_ratio():
            raise ValueError("allocation is 'budget', which needs one ratio for all kinds: give ratio alone")
        self.policy()

    @property
    def spends_budget(self) -> bool:
        """Whether ranks are chosen together, under one budget."""
        return self.calibration is not None and self.allocation != "uniform" and self._one_ratio()

    def _one_ratio(self) -> bool:
        default = self.policy().default
        own = [self._rule(f"{kind}_") for kind in KINDS]
        return default is not None and default.ratio is not None and not any(own)

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
