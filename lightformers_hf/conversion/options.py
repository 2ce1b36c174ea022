"""What a conversion is asked for."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from .choosing.rules import KINDS, RankPolicy, RankRule
from .forms.svd import SPLITS
from .sharing.merging import GROUP_STARTS

# Fields and what they may be.
CHOICES = {
    "group_start": GROUP_STARTS,
    "split": SPLITS,
    "weighting": ("loss", "inputs", "rows"),
    "allocation": (None, "uniform", "budget"),
    "attention_method": (None, "matrix", "product"),
    "ffn_method": (None, "matrix", "neurons"),
}
BUDGETS = ("ratio", "params", "size", "speedup")
OTHER_BUDGETS = BUDGETS[1:]
QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([kMG]?)B?")


@dataclass(frozen=True)
class CompressionOptions:
    """What is compressed, and how far. Of ratio, rank, energy, params, size and speedup at most one is set;
    the first three may be set for each kind, too.

    With none of them, the ratio is 2, unless layers or groups are asked for: then nothing is factorized. With a choice
    for some kinds alone, the other kinds stay dense.

    Attributes:
        ratio: p of Eq. 12, dense parameters / kept parameters of the matrices together; above 1.
        rank: r of each matrix.
        energy: share of the squared singular values that each matrix keeps, in (0, 1].
        params: unique parameters of the result at most: `20M`.
        size: bytes of the result's weights at most: `40MB`.
        speedup: how many times as fast as the source, estimated from costs measured on this machine: one core,
            batch 1, greedy (`sentence_costs.py`); above 1.
        embedding_ratio … ffn_energy: the same for the matrices of one kind, before the general choice.
        rank_pattern: module name pattern → rank, `None` for dense; before every other choice.
        encoder_layers, decoder_layers: layers that are kept, evenly spread and the first among them; the others are
            left out before anything else. The decoder's cost most time. `None` keeps all.
        encoder_groups, decoder_groups: N, number of stored layers; `None` leaves the source's sharing as it is.
        group_start: a group's layer starts as the `mean` of its layers, as the `first` of them, or as the mean after
            heads and neurons of all are `aligned` to the first, weighted by their inputs (`alignment.py`). `None`:
            `aligned` where the layers of a LightFormer allow it, else `mean`.
        share_layer_norms: whether the LayerNorms of new groups are shared, too.
        group_residual_rank: r of what each depth of new groups has for itself of every matrix; `None` is nothing. It
            leaves heads and neurons as they are.
        split: where Σ goes: `sigma-right` (Eq. 11) or `balanced`, √Σ to each factor.
        paper: the paper's procedure exactly: plain truncated SVD of every matrix alone, the ratio for each.
        calibration: parallel text, never that of a test: a file or a dataset on the Hub, see `load_parallel`. Errors
            are measured by what they cost the loss there (`calibration.py`). `None`: on text that the teacher makes
            itself (`synthesis.py`); models that are no sequence-to-sequence models go without.
        calibration_samples, calibration_seed: how many pairs of it are drawn, and which; `None` means 1000, or all
            of fewer, and 256 of the teacher's own.
        source_lang, target_lang: its columns; `None` means the languages that the tokenizer names.
        source_code, target_code: of a multilingual checkpoint (mBART-50, M2M100, NLLB), the languages that the result
            is to translate between, in the tokenizer's own codes. It keeps them.
        weighting: what errors of a matrix are weighed by there: the `loss`, its `inputs` alone, or one weight a row
            (`rows`), see `Calibration.metric`. Only the first makes errors of different matrices compare.
        allocation: `uniform` gives every matrix the ratio, `budget` spends the parameters that the ratio leaves where
            they spare most loss. `None` means `budget` where there is calibration and one ratio for all kinds.
        attention_method: attention by `matrix`, each by itself, or by `product`: narrower heads (`narrowing.py`).
            `None`: within a budget whichever loses less, else `matrix`.
        ffn_method: feed-forward networks by `matrix`, or with fewer `neurons`; `None` likewise.
        refit: after truncation, regress the teacher's outputs on what every layer gets, front to back (`refit.py`).
            `None`: where there is calibration, and no layer is shared.
        device: where the model runs and matrices are decomposed: `cpu`, `cuda`, `cuda:1`, `mps`, …. One that knows no
            float64 (mps) runs the model only.
    """

    ratio: float | None = None
    rank: int | None = None
    energy: float | None = None
    params: str | None = None
    size: str | None = None
    speedup: float | None = None
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
    encoder_layers: int | None = None
    decoder_layers: int | None = None
    encoder_groups: int | None = None
    decoder_groups: int | None = None
    group_start: str | None = None
    share_layer_norms: bool = True
    group_residual_rank: int | None = None
    split: str = "sigma-right"
    paper: bool = False
    calibration: str | None = None
    calibration_samples: int | None = None
    calibration_seed: int = 0
    source_lang: str | None = None
    target_lang: str | None = None
    source_code: str | None = None
    target_code: str | None = None
    weighting: str = "loss"
    allocation: str | None = None
    attention_method: str | None = None
    ffn_method: str | None = None
    refit: bool | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it is one of {', '.join(filter(None, allowed))}")
        if self.calibration_samples is not None and self.calibration_samples < 1:
            raise ValueError(f"calibration_samples is {self.calibration_samples}; it is 1 or more")
        if self.encoder_groups is None and self.decoder_groups is None:
            alone = {"share_layer_norms": not self.share_layer_norms, "group_residual_rank": self.group_residual_rank}
            if given := [name for name, value in alone.items() if value]:
                raise ValueError(f"{given[0]} is for layers that share: give encoder_groups or decoder_groups")
        narrower = self.attention_method == "product" or self.ffn_method == "neurons"
        if narrower and self.group_residual_rank:
            raise ValueError("group_residual_rank is for matrices as wide as the source's: leave narrower ones out")
        budgets = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(budgets) > 1:
            raise ValueError(f"{' and '.join(budgets)} are given; one budget is enough")
        for name in {"params", "size"} & {*budgets}:
            quantity(name, getattr(self, name))
        if self.paper:
            others = ("calibration", "allocation", "attention_method", "ffn_method", "group_residual_rank", "refit")
            others += ("encoder_layers", "decoder_layers", *OTHER_BUDGETS)
            if given := [name for name in others if getattr(self, name)]:
                raise ValueError(f"paper is True, but the paper's procedure has no {given[0]}: leave one of them out")
        if self.speedup is not None and not 1 < self.speedup < math.inf:
            raise ValueError(f"speedup is {self.speedup}, expected a number above 1: times as fast as the source")
        if self.allocation == "budget" and not self._one_budget():
            raise ValueError("allocation is 'budget', which needs one ratio for all kinds: give ratio alone")
        if not self._one_budget() and (given := [name for name in OTHER_BUDGETS if getattr(self, name)]):
            raise ValueError(f"{given[0]} is one budget for all matrices: leave rank, energy and single kinds out")
        if self.allocation == "uniform" and {*OTHER_BUDGETS} & {*budgets}:
            raise ValueError(f"allocation is 'uniform', which needs a ratio: leave {budgets[0]} out")
        if self.weighting != "loss" and not (self.allocation == "uniform" and self.refit is False):
            raise ValueError(
                f"weighting is {self.weighting!r}, by which errors of different matrices do not compare: it needs "
                "allocation='uniform' and refit=False"
            )
        self.policy()

    @property
    def calibrates(self) -> bool:
        """Whether errors are weighed by what they cost the loss, where the model allows it."""
        return not self.paper

    @property
    def languages(self) -> tuple[str | None, str | None]:
        """Codes of source and target of a multilingual checkpoint."""
        return self.source_code, self.target_code

    @property
    def needs_calibration(self) -> str | None:
        """An option given that means nothing without calibration."""
        names = ("calibration", "refit", *OTHER_BUDGETS)
        budget = "allocation" if self.allocation == "budget" else None
        return next((name for name in names if getattr(self, name)), budget)

    @property
    def budget(self) -> str:
        """The option that sets the budget."""
        return next((name for name in BUDGETS if getattr(self, name) is not None), "ratio")

    @property
    def spends_budget(self) -> bool:
        """Whether all parts are decided together, under one budget."""
        return self.calibrates and self.allocation != "uniform" and self._one_budget()

    def _one_budget(self) -> bool:
        if any(self._rule(f"{kind}_") for kind in KINDS):
            return False
        default = self.policy().default
        return default is not None and default.ratio is not None

    def _rule(self, prefix: str) -> RankRule | None:
        choice = {name: getattr(self, f"{prefix}{name}") for name in ("ratio", "rank", "energy")}
        return None if all(value is None for value in choice.values()) else RankRule(**choice)

    def policy(self) -> RankPolicy:
        """The choice of ranks that these options ask for. Raises `ValueError` where a value is out of its range."""
        default = self._rule("")
        kinds = {kind: rule for kind in KINDS if (rule := self._rule(f"{kind}_")) is not None}
        fields = ("encoder_layers", "decoder_layers", "encoder_groups", "decoder_groups")
        fewer = any(getattr(self, name) is not None for name in fields)
        whole = any(getattr(self, name) is not None for name in OTHER_BUDGETS)  # how much it is, is not known here
        if default is None and (whole or not (kinds or self.rank_pattern or fewer)):
            default = RankRule(ratio=2.0)
        return RankPolicy(default, kinds, self.rank_pattern or {})


def quantity(name: str, text: str) -> int:
    """`20M`, `40MB`, `1.5G`, `300000` → a number. Raises `ValueError` naming the option."""
    match = QUANTITY.fullmatch(str(text).strip())
    if match is None or not float(match[1]):
        raise ValueError(f"{name} is {text!r}, expected a number above 0 with k, M or G behind it: 20M, 40MB")
    return int(float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[match[2]])
