"""Options of a conversion: `CompressionOptions` for all users, `StudyOptions` to compare ways to compress.

Importing this file imports neither torch nor transformers: the command line reads its options here.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Annotated, Any, Literal, get_args

from ..languages import split_language
from ..options import Help, OptionError, check_needs, check_whole_numbers, join_options
from ..text import data_name
from .rules import KINDS, RULES, Energy, FixedRank, RankPolicy, RankRule, RankShare, Ratio

DEFAULT_RATIO = 2.0  # where nothing else sets how far to compress
Method = Literal["auto", "low-rank", "narrow", "paper"]
METHODS = get_args(Method)

# Budgets for all matrices together, and all options for the size of the result.
OTHER_BUDGETS = ("params", "size")
BUDGETS = ("ratio", *OTHER_BUDGETS)
HOW_FAR = ("ratio", "rank", "energy", *OTHER_BUDGETS)
LAYERS = ("encoder_layers", "decoder_layers")
GROUPS = ("encoder_groups", "decoder_groups")
SHAPES = ("d_model", *LAYERS, *GROUPS, "vocabulary")  # what gets smaller besides the matrices

# Values of a method for attention and feed-forward networks; `auto` leaves both open.
METHOD_SWITCHES: dict[str, dict[str, Any]] = {
    "auto": {},
    "low-rank": {"attention_method": "low-rank", "ffn_method": "low-rank"},
    "narrow": {"attention_method": "narrow", "ffn_method": "narrow"},
    "paper": {"attention_method": "low-rank", "ffn_method": "low-rank", "allocation": "uniform", "refit": False},
}
# Switches for experiments and their values.
STUDY_CHOICES: dict[str, tuple[str | None, ...]] = {
    "weighting": ("loss", "inputs"),
    "allocation": (None, "uniform", "budget"),
}
QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(b?)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class CompressionOptions:
    """Options of a compression. At most one of ratio, rank, energy, params and size is set.

    With none of them, the ratio is 2, unless features, layers, groups, a vocabulary or a pattern are asked for: then
    only the patterns apply. So it is with a ratio of 1 beside them.

    Raises:
        ValueError: a value is out of its range, or two of them contradict each other.
    """

    ratio: Annotated[
        float | None,
        Help("Dense / kept parameters of matrices. Default: 2.", "P", "p of Eq. 12, of all together; above 1."),
    ] = None
    params: Annotated[str | None, Help("Instead: parameters of the compressed model at most.", "20M")] = None
    size: Annotated[str | None, Help("Instead: bytes of its weights at most.", "40MB")] = None
    rank: Annotated[
        str | int | None,
        Help(
            "Instead: singular values kept in each matrix, or a share of them: 64, 25%.",
            "R",
            'r of each matrix; `"25%"` is ⌊min(m, n) / 4⌋ (LightFormer, §3.3).',
        ),
    ] = None
    energy: Annotated[float | None, Help("Instead: share of their squares kept in each.", "E", "In (0, 1].")] = None
    pattern: Annotated[
        dict[str, str | int | None] | None,
        Help(
            "NAME: embedding, attention, ffn, or the end of module names. CHOICE: 64 (rank), 4x (ratio), 90% (energy) "
            "or dense. Repeatable.",
            "NAME=CHOICE",
            "In Python a dictionary. A name is a kind of matrices, or a regular expression. An int "
            "is a rank, `None` is dense. A pattern has priority over the general option, a name over a kind, and the "
            "first matching name over later ones.",
            kind="pattern",
        ),
    ] = None
    vocabulary: Annotated[
        str | Sequence[str] | None,
        Help(
            "Text whose tokens stay: file, Hub name. Repeatable.",
            "PATH",
            "Special tokens, single characters and bytes stay too, so that every text can still be written. `None` "
            "keeps all tokens.",
            kind="data",
            is_for_text=True,
        ),
    ] = None
    vocabulary_size: Annotated[
        int | None,
        Help(
            "Keep only its N most frequent tokens.",
            "N",
            "Tokens of each side at most.",
            kind="count",
            needs="vocabulary",
        ),
    ] = None
    languages: Annotated[
        str | Sequence[str] | None,
        Help(
            "Codes that stay in the vocabulary. Default: all.",
            "de_DE,en_XX",
            "Of a multilingual checkpoint, a list or one text; with those of source and target.",
            needs="vocabulary",
        ),
    ] = None
    d_model: Annotated[
        str | int | None,
        Help(
            "Features to keep: 384, 75%. Default: the best.",
            "N",
            "All matrices, tables, norms and positions become narrower, and are refitted to the teacher's outputs. "
            "A ratio counts from the teacher's width. A multiple of 32, to which a share is rounded down. By default, "
            "the methods auto and narrow compare widths for post-norm models (Marian, BART), where text is held out.",
            is_for_text=True,
        ),
    ] = None
    encoder_layers: Annotated[
        int | None,
        Help(
            "Layers of the encoder to keep.",
            "N",
            "They are evenly spread, and include the last. The others are removed first, and the kept ones are "
            "refitted by least squares to the outputs of the whole stack. `None` keeps all layers.",
        ),
    ] = None
    decoder_layers: Annotated[int | None, Help("The same for the decoder, which costs most time.", "N")] = None
    encoder_groups: Annotated[
        int | None,
        Help("Layers that are stored; the others share them.", "N", "`None` keeps the sharing of the source."),
    ] = None
    decoder_groups: Annotated[int | None, Help("The same for the decoder.", "N")] = None
    method: Annotated[
        Method,
        Help(
            "low-rank: factors; narrow: fewer neurons, narrower heads; paper: plain SVD. Default: auto, the better.",
            "METHOD",
            "`auto` takes the better of both for each part, or one for all. Both auto and narrow may remove features. "
            "`paper` truncates every matrix alone (Eq. 11), with the ratio for each (Eq. 12). Matrices of a group are "
            "truncated layer by layer, then merged to one of their rank.",
            values=METHODS,
        ),
    ] = "auto"
    calibration: Annotated[
        str | None,
        Help(
            "Text to weight errors on, never a test's: pairs, or sources alone (.txt). Default: self-generated.",
            "PATH",
            "A file or a data set on the Hub, on which the sensitivity of the loss is measured. Sentence pairs, see "
            "`load_parallel`; or source text alone (a .txt file with one text per line, or one column), which the "
            "teacher translates. Other models than sequence-to-sequence models use no calibration.",
            kind="data",
        ),
    ] = None
    calibration_samples: Annotated[
        int | None,
        Help(
            "Pairs to draw. Default: 1000 or more.",
            "N",
            "More short pairs are drawn, until each side has 64 tokens per feature of d_model, at most 32,768 tokens. "
            "Self-generated texts are 256, and up to 1024 for teachers of at most 10M parameters. For speech, the "
            "number is that of pieces of 30 seconds, by default 48. If given, the joint fit reads no further text.",
            kind="count",
        ),
    ] = None
    source_lang: Annotated[
        str | None,
        Help(
            "Column; of multilingual models also the code, de or de=de_DE; T5: de='a prefix: '.",
            "de",
            "A column of the data, or a language inside its column `translation`. For a multilingual checkpoint "
            "(mBART-50, M2M100, NLLB) also the language code of the tokenizer, which the result keeps. "
            "`None`: the languages of the tokenizer. A task prefix follows the column, with a space at the "
            "end: `de=translate German to English: ` for T5, unless its configuration has a prefix for the two "
            "languages.",
        ),
    ] = None
    target_lang: Annotated[str | None, Help("The same for the target.", "en")] = None
    device: Annotated[
        str,
        Help(
            "Where to compute: cuda, cuda:1, mps. Default: cpu.",
            "cpu",
            "The model runs and matrices are decomposed there. A device without float64 (mps) only runs the model.",
        ),
    ] = "cpu"

    def __post_init__(self) -> None:
        check_whole_numbers(self)
        object.__setattr__(self, "languages", _as_tuple(self.languages, ","))
        object.__setattr__(self, "vocabulary", _as_tuple(self.vocabulary, None))
        object.__setattr__(self, "calibration", data_name(self.calibration))
        for name in ("rank", "d_model"):
            if isinstance(given := getattr(self, name), str) and given.strip().isdecimal():  # from the command line
                object.__setattr__(self, name, int(given))
        check_needs(self)
        if self.d_model is not None and not re.fullmatch(r"[1-9]\d*|(?=.*[1-9])\d+(\.\d+)?%", str(self.d_model)):
            raise OptionError("d_model", f" is {self.d_model!r}, expected a whole number (384) or a share (75%)")
        _check_choice("method", self.method, METHODS)
        if not isinstance(self.pattern or {}, Mapping):
            raise OptionError(
                "pattern", f" is {self.pattern!r}, expected a dictionary: {{'ffn': '4x', 'fc1': 'dense'}}"
            )
        if len(given := self._given(*HOW_FAR)) > 1:
            raise OptionError(*join_options(given), " are given, expected one of them")
        for name in self._given("params", "size"):
            read_quantity(name, getattr(self, name))
        if self.method == "paper" and (given := self._given("calibration", "d_model", *LAYERS, *OTHER_BUDGETS)):
            raise OptionError(
                "method", " is 'paper', but the paper's procedure has no ", given[0], ": remove one of the two"
            )
        kinds = self.policy.kinds  # raises an error for values out of range
        for kind in ("attention", "ffn") if self.method == "narrow" else ():
            rule = kinds.get(kind, self.policy.default)
            if not (rule is None or isinstance(rule, Ratio)):
                name = "pattern" if kind in kinds else self._given(*HOW_FAR)[0]
                raise OptionError(
                    "method", " is 'narrow', and how narrow is chosen by ratio, params or size: remove ", name
                )
        if not self._is_one_number() and (given := self._given(*OTHER_BUDGETS)):
            raise OptionError(
                given[0], " is one budget for all matrices: in ", "pattern", " give names, or kinds that stay dense"
            )

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> "CompressionOptions":
        """Return the options among the arguments of a function, which may have others."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls) if field.name in arguments})

    @property
    def budget(self) -> str:
        """The option that sets the budget: `ratio`, `params` or `size`."""
        return next(iter(self._given(*BUDGETS)), "ratio")

    @property
    def spends_budget(self) -> bool:
        """Whether all parts are decided together under one budget (unless a study's allocation is `uniform`)."""
        return self.method != "paper" and self._is_one_number()

    @property
    def columns(self) -> tuple[str | None, str | None]:
        """Columns of the calibration text, or languages in its column `translation`: source and target."""
        return split_language(self.source_lang)[0], split_language(self.target_lang)[0]

    @property
    def texts(self) -> list[str]:
        """Files and data sets that are read."""
        return [*filter(None, [self.calibration]), *(self.vocabulary or ())]

    @property
    def reads_text(self) -> bool:
        """Whether calibration text is needed: matrices become smaller, or layers fewer."""
        return self.method != "paper" and (self.policy.compresses or bool(self._given("d_model", *LAYERS, *GROUPS)))

    def _given(self, *names: str) -> list[str]:
        return [name for name in names if getattr(self, name) is not None]

    def _is_one_number(self) -> bool:
        """Whether one ratio applies to all matrices without a pattern."""
        policy = self.policy
        return isinstance(policy.default, Ratio) and not any(policy.kinds.values())

    @cached_property
    def policy(self) -> RankPolicy:
        """The rule for each matrix. If the budget is not a ratio, the rule of the default ratio 2 stands for it."""
        rules: dict[str, Callable[[Any], RankRule]] = {"ratio": Ratio, "rank": read_rank, "energy": Energy}
        others = self._given(*SHAPES)
        rules_given = [] if self.ratio == 1 and others else self._given(*rules)  # a ratio of 1 leaves matrices alone
        default = next((rules[name](getattr(self, name)) for name in rules_given), None)
        if default is None and (self._given(*OTHER_BUDGETS) or not (self.pattern or others)):
            default = Ratio(DEFAULT_RATIO)
        names = {name: read_choice(name, choice) for name, choice in (self.pattern or {}).items()}
        return RankPolicy(default, {kind: names.pop(kind) for kind in KINDS if kind in names}, names)


@dataclass(frozen=True)
class StudyOptions:
    """Switches for experiments that compare methods; other users need none of them.

    The two methods may name any structural form; `convert` checks them.

    Attributes:
        weighting: weights of errors of a matrix: the `loss`, or its `inputs` alone, see `Calibration.metric`. Only
            with `loss` are errors of different matrices comparable.
        allocation: `uniform` gives every matrix the same ratio; `budget` distributes the parameters so that the loss
            grows least. `None` means `budget` with calibration and one ratio for all kinds.
        attention_method: attention by `low-rank` factors of each matrix, or narrower heads (`narrow`). `None`: as in
            the method.
        ffn_method: feed-forward networks by `low-rank` factors, or with fewer neurons (`narrow`). `None`: as in the
            method.
        share_layer_norms: whether the layer norms of new groups are also shared.
        refit: refit every layer by least squares to the teacher's outputs, front to back: after truncation, and before
            it if layers are removed. `None`: if there is text and, after truncation, no layer is shared.
        joint: whether all layers are fitted together in the end (`fit_jointly`). Without text, without a refit
            (`refit=False`) and for speech there is no joint fit.
        calibration_seed: seed of the choice or generation of calibration text, and of the order of the joint fit.

    Raises:
        ValueError: a value is not among its choices.
    """

    weighting: str = "loss"
    allocation: str | None = None
    attention_method: str | None = None
    ffn_method: str | None = None
    share_layer_norms: bool = True
    refit: bool | None = None
    joint: bool = True
    calibration_seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in STUDY_CHOICES.items():
            _check_choice(name, getattr(self, name), allowed)
        if self.weighting != "loss" and not (self.allocation == "uniform" and self.refit is False):
            raise OptionError(
                "weighting",
                f" is {self.weighting!r}, by which errors of different matrices do not compare: it needs "
                "allocation='uniform' and refit=False",
            )


def resolve_study(options: CompressionOptions, study: StudyOptions | None = None) -> StudyOptions:
    """The switches of a study with those that the options' method sets. Raises `ValueError` where they contradict."""
    study = study or StudyOptions()
    switches = METHOD_SWITCHES[options.method]
    if given := [name for name, value in switches.items() if getattr(study, name) not in (None, value)]:
        raise OptionError("method", f" is {options.method!r}, which determines {given[0]}: remove one of the two")
    if options.method == "paper" and study.weighting != "loss":
        raise OptionError(
            "method", f" is 'paper', which weights no errors; weighting is {study.weighting!r}: remove it"
        )
    study = replace(study, **switches)
    if not study.share_layer_norms and options.encoder_groups is None and options.decoder_groups is None:
        raise OptionError(
            "share_layer_norms", " is for layers that share: give ", "encoder_groups", " or ", "decoder_groups"
        )
    if study.allocation == "budget" and not options.spends_budget:
        raise OptionError("allocation", " is 'budget', which needs one ratio for all kinds: give ", "ratio", " alone")
    if study.allocation == "uniform" and options.budget in OTHER_BUDGETS:
        raise OptionError("allocation", " is 'uniform', which needs a ratio: remove ", options.budget)
    return study


def needs_calibration(options: CompressionOptions, study: StudyOptions) -> str | None:
    """An option or a switch that is given and means nothing without calibration."""
    if options.calibration is not None:
        return "calibration"
    if study.refit:
        return "refit"
    if options.budget in OTHER_BUDGETS:
        return options.budget
    return "allocation" if study.allocation == "budget" else None


def read_quantity(name: str, text: str | float) -> int:
    """`20M`, `40MB`, `1.5G`, `1kb`, `300000` → a number, whatever the case. Raises `ValueError` for other texts."""
    match = QUANTITY.fullmatch(str(text).strip())
    if match is None or not float(match[1]):
        raise OptionError(name, f" is {text!r}, expected a number above 0, k, M or G behind it: 20M, 40MB")
    if name == "params" and match[3]:
        raise OptionError(
            "params", f" is {text!r}, but counts parameters, not bytes: remove the B, or give it as ", "size"
        )
    return int(float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[match[2].lower()])


def missing_unit(text: str | float) -> str:
    """A question for whoever wrote `40` for bytes, and maybe meant `40MB`; empty where a unit was given."""
    match = QUANTITY.fullmatch(str(text).strip())
    return f"{text} is a number of bytes: is {text}MB meant?" if match and not (match[2] or match[3]) else ""


def read_rank(rank: str | int) -> RankRule:
    """The rule of the option `rank`: `64`, or `25%` of the singular values. Raises `ValueError` for other values."""
    for rule in (FixedRank, RankShare) if not isinstance(rank, bool) else ():
        if match := re.fullmatch(rule.spelling, str(rank).strip()):
            return rule.read(*match.groups())
    raise OptionError("rank", f" is {rank!r}, expected a whole number (64) or {RankShare.example}")


def read_choice(name: str, choice: str | int | None) -> RankRule | None:
    """The rule of a value of `pattern`: `64`, `4x`, `90%`, and `dense` for none. Raises `ValueError` for others."""
    if choice is None or choice == "dense":
        return None
    for rule in RULES if not isinstance(choice, bool) else ():
        if match := re.fullmatch(rule.spelling, str(choice).strip()):
            try:
                return rule.read(*match.groups())
            except ValueError as error:
                raise OptionError("pattern", f" {name!r} is {choice!r}: {error}") from None
    examples = ", ".join(rule.example for rule in RULES)
    raise OptionError("pattern", f" {name!r} is {choice!r}, expected {examples} or dense")


def read_pattern(items: list[str]) -> Mapping[str, str]:
    """`["fc1=64", "ffn=4x"]` → `{"fc1": "64", "ffn": "4x"}`. Raises `ValueError` for other items, and names twice."""
    pattern: dict[str, str] = {}
    for item in items:
        name, separator, choice = item.rpartition("=")
        if not (separator and name):
            raise OptionError("pattern", f" is {item!r}, expected NAME=CHOICE, such as ffn=4x or fc1=dense")
        if name in pattern:
            raise OptionError("pattern", f" has {name!r} twice: remove one of the two")
        pattern[name] = choice
    return pattern


def _check_choice(name: str, value: object, allowed: tuple[str | None, ...]) -> None:
    if value not in allowed:
        raise OptionError(name, f" is {value!r}, expected one of {', '.join(filter(None, allowed))}")


def _as_tuple(value: str | os.PathLike | Sequence[str] | None, separator: str | None) -> tuple[str, ...] | None:
    """A list of words, or words in one text; `None` for none at all."""
    if value is None:
        return None
    given = list(value) if isinstance(value, Sequence | Set) and not isinstance(value, str) else [value]
    texts = filter(None, map(data_name, given))
    words = [part.strip() for text in texts for part in (text.split(separator) if separator else [text])]
    return tuple(filter(None, words)) or None
