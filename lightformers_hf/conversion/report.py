"""The report of a conversion, as data and as the tables that `plan` and `convert` print."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.markup import escape
from rich.table import Column, Table
from transformers import PreTrainedModel
from transformers.utils import cached_file

from ..checkpoints.cards import inherited_metadata
from ..files import REPORT_FILE, as_kind, read_json, write_json
from ..loading import tensor_bytes
from ..matrices import STACKS
from ..results import Result
from .options import DEFAULT_RATIO, HOW_FAR, SHAPES
from .rules import rank_with_sharing, worth_factorizing

if TYPE_CHECKING:
    from ..checkpoints.teacher import Teacher
    from .options import CompressionOptions, StudyOptions

OWN_TEXT = "text that the model made itself"
DENSE = "dense"
# Below this share, sentences differ from the teacher's (docs/results/confident.md).
CLIFF = 0.8


@dataclass(frozen=True, kw_only=True)
class MatrixReport:
    """One matrix.

    Attributes:
        name: name of its module, as in `rank_pattern`.
        kind: `embedding`, `attention` or `ffn`.
        m, n: its shape in the teacher, with the features that are kept; inputs×outputs, or V×d.
        form: its form in the result: `dense`, or the `label` of a form in `forms/`.
        size: the number of the form (rank, width, neurons); `None` if the matrix is dense.
        setting: form and size as printed in tables: `dense`, `rank 64`, `heads 39 wide`.
        parameters_after: parameters kept: r(m + n), those of a narrower matrix, or mn.
        energy: share of its squared singular values that is kept.
        relative_error: norm of the error / norm of the matrix. Energy and error use the report's `measure`. If the
            matrices of a block or network became narrower together, they apply to the whole block.
    """

    name: str
    kind: str
    m: int
    n: int
    form: str
    size: int | None
    setting: str
    parameters_after: int
    energy: float
    relative_error: float

    @property
    def parameters_before(self) -> int:
        """Parameters of the dense matrix, mn, for the features that stay."""
        return self.m * self.n


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How often model and teacher predict the same token, each after the tokens of the text, and the same output.

    Attributes:
        share: share of equal tokens, from 0 to 1.
        tokens: the number of target tokens.
        held_out: whether the text was held out of the calibration; short texts are not.
        divergence: KL divergence from the teacher's predictions, nats a token; not in older reports.
        exact: share of the texts with equal outputs, token by token, with greedy decoding; `None` for sound, and in
            older reports.
        texts: the number of these texts, 100 at most.
    """

    share: float
    tokens: int
    held_out: bool
    divergence: float | None = None
    exact: float | None = None
    texts: int = 0

    def __str__(self) -> str:
        text = "held-out tokens" if self.held_out else "tokens of the calibration text"
        nats = "" if self.divergence is None else f", at a KL divergence of {self.divergence:.2g} nats"
        whole = "" if self.exact is None else f", and gives {self.exact:.0%} of {self.texts} whole outputs exactly"
        return f"agrees with its teacher on {self.share:.1%} of {self.tokens:,} {text}{whole}{nats}"


@dataclass(frozen=True)
class ModelFacts:
    """Facts that the model card of every model states."""

    architecture: str  # its `model_type`
    auto_class: str  # the Auto class that loads it
    parameters: int  # unique ones
    bytes: int  # of its tensors

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelFacts:
        """Return the facts of a model of this package, which may be a skeleton."""
        auto_classes = {reference.split(".")[-1]: name for name, reference in model.config.auto_classes.items()}
        auto_class = auto_classes[type(model).__name__]
        return cls(type(model.config).model_type, auto_class, model.num_parameters(), tensor_bytes(model))


@dataclass(frozen=True)
class CompressionReport(Result):
    """Report of a conversion.

    Attributes:
        source: name of the source, without the path to it.
        family: `model_type` of the source.
        architecture: `model_type` of the result.
        auto_class: the Auto class that loads the result.
        options: the options that were set, and the switches of a study.
        calibration: the text on which errors were weighted and layers refitted; `None`: neither was done.
        calibrated_on: fingerprints of its sentences or sounds, so that an evaluation can detect them.
        agreement: how often the result predicts its teacher's token; `None` where no text was read.
        layers: layers of the result and of the source, {stack: [kept, before]}.
        groups: stored layers of the result and depths, {stack: [stored, depths]}.
        matrices: one report per stored matrix of the result.
        parameters_before, parameters_after: unique parameters of the whole models.
        bytes_before, bytes_after: bytes of the tensors of both.
        vocabulary: if tokens were removed, the number of tokens of `source` and `target`, and the `parameters` of the
            whole model: [kept, before] each.
        languages: the remaining language codes, if some were removed.
        candidates: the models that were compared, if several were: {method: its `cost` and `divergence`}. The cost is
            predicted, and a plan has only this; that of fewer features (`auto with d_model 160`) is not known. The
            divergence is that of a model made with a part of the text. Both are in nats a token.
        features: features of the hidden states (d_model) of the result and of the source; not in older reports.
        processor: the number of worker `threads`, whether models multiplied in `bf16`, and the `reason`.
        inherited: metadata from the source's card: licence, languages, task, its name on the Hub.
    """

    source: str
    family: str
    architecture: str
    auto_class: str
    options: dict[str, Any]
    calibration: str | None
    calibrated_on: list[str]
    layers: dict[str, list[int]]
    groups: dict[str, list[int]]
    matrices: list[MatrixReport]
    parameters_before: int
    parameters_after: int
    bytes_before: int
    bytes_after: int
    inherited: dict[str, Any]
    agreement: Agreement | None = None
    vocabulary: dict[str, list[int]] = field(default_factory=dict)
    languages: list[str] = field(default_factory=list)
    candidates: dict[str, dict[str, float]] = field(default_factory=dict)
    features: list[int] = field(default_factory=list)
    processor: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        teacher: Teacher,
        model: PreTrainedModel,
        options: CompressionOptions,
        study: StudyOptions | None = None,
        *,
        calibration: str | None,
        trimmed: Teacher | None = None,
        **others: Any,
    ) -> CompressionReport:
        """The report of compressing `teacher` into `model`, whose skeletons give the totals.

        Args:
            options, study: the given options; those that differ from their defaults are kept.
            trimmed: the teacher with the tokens that stay, where not all do.
            others: other fields.
        """
        given: list[CompressionOptions | StudyOptions] = [options] if study is None else [options, study]
        chosen = {
            option.name: getattr(asked, option.name)
            for asked in given
            for option in fields(asked)
            if getattr(asked, option.name) != option.default and option.name != "device"  # where, not what
        }
        if "calibration" in chosen:
            chosen["calibration"] = _without_path(chosen["calibration"])
        if "vocabulary" in chosen:
            chosen["vocabulary"] = [_without_path(text) for text in chosen["vocabulary"]]
        layers, groups = {}, {}
        for stack in STACKS:
            depths = getattr(model.config, f"{stack}_layers")
            layers[stack] = [depths, getattr(teacher.config, f"{stack}_layers")]
            groups[stack] = [getattr(model.config, f"{stack}_groups", None) or depths, depths]
        if trimmed is not None and trimmed.kept is not None:
            configs = (trimmed.config, teacher.config)
            others["vocabulary"] = {
                "source": [config.vocab_size for config in configs],
                "target": [getattr(config, "decoder_vocab_size", config.vocab_size) for config in configs],
                "parameters": [source.model.num_parameters() for source in (trimmed, teacher)],
            }
            others["languages"] = list(trimmed.kept.languages)
        facts = ModelFacts.of(model)
        return cls(
            source=teacher.name,
            family=teacher.family,
            architecture=facts.architecture,
            auto_class=facts.auto_class,
            options=chosen,
            calibration=calibration and _without_path(calibration),
            features=[config.d_model for config in (model.config, teacher.config)],
            layers=layers,
            groups=groups,
            parameters_before=teacher.model.num_parameters(),
            parameters_after=facts.parameters,
            bytes_before=tensor_bytes(teacher.model),
            bytes_after=facts.bytes,
            inherited=_metadata(teacher),
            **others,
        )

    @property
    def ratio(self) -> float:
        """Dense parameters / kept parameters of the matrices that got smaller, together (Eq. 12's p).

        With fewer features all matrices got smaller; their dense parameters are those with all features.
        """
        smaller, widening = self.smaller, 1.0
        if self.fewer_features:
            smaller, widening = self.matrices, self.features[1] / self.features[0]
        kept = sum(matrix.parameters_after for matrix in smaller)
        return widening * sum(matrix.parameters_before for matrix in smaller) / kept if kept else 1.0

    @property
    def smaller(self) -> list[MatrixReport]:
        """The matrices that are."""
        return [matrix for matrix in self.matrices if matrix.form != DENSE]

    @property
    def fewer_layers(self) -> dict[str, list[int]]:
        """`layers` of the stacks from which layers were removed."""
        return {stack: [kept, before] for stack, (kept, before) in self.layers.items() if kept != before}

    @property
    def loses(self) -> bool:
        """Whether anything but tokens was removed."""
        return bool(self.smaller or self.fewer_layers or self.shares or self.fewer_features)

    @property
    def fewer_features(self) -> bool:
        """Whether features of the hidden states were removed."""
        return self.features[:1] != self.features[1:]

    @property
    def shares(self) -> bool:
        """Whether layers share weights."""
        return any(stored != depths for stored, depths in self.groups.values())

    @property
    def measure(self) -> str:
        """The norm of `energy` and `relative_error` of the matrices, in words."""
        relative = "; for shared layers, relative to the merged matrix" if self.shares else ""
        if self.fewer_features:
            relative += f"; relative to matrices for {self.features[0]} features"
        if self.calibration is None or not self.smaller:
            return f"every entry with equal weight (Frobenius norm){relative}"
        return f"entries weighted by the sensitivity of the loss on {self.calibration}{relative}"

    @property
    def outcome(self) -> str:
        """The number of matrices in each form: `40 low-rank (rank 3 to 64), 21 dense`."""
        found = []
        for form in dict.fromkeys([*(matrix.form for matrix in self.smaller), DENSE]):
            matrices = [matrix for matrix in self.matrices if matrix.form == form]
            text = f"{len(matrices)} {form}"
            if form != DENSE:  # the settings, smallest to largest: `rank 3 to 64`
                smallest, largest = (end(matrices, key=lambda matrix: matrix.size or 0) for end in (min, max))
                sizes = f"{smallest.size} to {largest.size}" if smallest.size != largest.size else str(largest.size)
                setting, *_ = largest.setting.partition(",")  # neurons, without ranks
                text += f" ({setting.replace(str(largest.size), sizes, 1)})"
            found += [text] if matrices else []
        return ", ".join(found)

    def parts(self) -> list[Table | str]:
        """Return the totals, and remarks on them."""
        totals = Table("", *_figures("before", "after", "ratio"), title="totals", title_justify="left")
        for label, before, after, show in (
            ("unique parameters", self.parameters_before, self.parameters_after, "{:,}".format),
            ("megabytes", self.bytes_before, self.bytes_after, lambda size: f"{size / 1e6:,.1f}"),
        ):
            totals.add_row(label, show(before), show(after), f"{before / after:.2f}")
        return [totals, *remarks(self)]

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON holds it, derived figures included."""
        matrices = [asdict(matrix) | {"parameters_before": matrix.parameters_before} for matrix in self.matrices]
        return asdict(self) | {"matrices": matrices, "ratio": self.ratio}


class Plan(CompressionReport):
    """Plan of a conversion; it also prints a line for every matrix."""

    def parts(self) -> list[Table | str]:
        """Return a table of all matrices, then as the report of a conversion."""
        before = f" (before: for {self.features[0]} features)" if self.fewer_features else ""
        legend = [
            f"\nbefore, after: parameters{before}. energy: share of Σσ² kept. error: relative norm of the difference.",
            f"Energy and error: {self.measure}; of a whole block where it got narrower.\n",
        ]
        # In 120 columns nothing wraps but a name of more than 40 letters.
        columns = [Column("matrix", overflow="fold"), Column("kind", overflow="fold")]
        columns += _figures("shape", "becomes", "before", "after", "energy", "error")
        looks: dict[str, Any] = {"title_justify": "left", "box": box.SIMPLE_HEAD, "padding": 0, "show_edge": False}
        table = Table(*columns, title=f"{escape(self.source)}: every matrix", **looks)
        for matrix in self.matrices:
            table.add_row(
                escape(matrix.name), matrix.kind, f"{matrix.m}x{matrix.n}", escape(matrix.setting),
                f"{matrix.parameters_before:,}", f"{matrix.parameters_after:,}",
                f"{matrix.energy:.1%}", f"{matrix.relative_error:.4f}",
            )  # fmt: skip
        return [table, *legend, *super().parts(), *ranks_with_sharing(self)]


def _figures(*names: str) -> list[Column]:
    return [Column(name, justify="right") for name in names]


def ranks_with_sharing(report: CompressionReport) -> Iterator[str]:
    """Yield, for each stack that shares layers, the rank that sharing allows at equal parameters (Eq. 4 to 6)."""
    for stack, (stored, depths) in report.groups.items():
        shapes = [
            (matrix.size or 0, matrix.m, matrix.n)
            for matrix in report.smaller
            if matrix.form == "low-rank" and matrix.name.startswith(f"{stack}.layers.")
        ]
        if stored == depths or not shapes:
            continue
        (rank, m, n), _ = Counter(shapes).most_common(1)[0]
        larger = rank_with_sharing(rank, depths, stored)
        what, most = (f"rank {larger}", "") if worth_factorizing(m, n, larger) else ("dense matrices", "at most ")
        groups = f"1 group of {what} has" if stored == 1 else f"{stored} groups of {what} have"
        count = f"{most}as many parameters as {depths} layers of rank {rank}"
        yield f"In the {stack}, {groups} {count} (LightFormer, Eq. 6)."


def _without_path(text: str) -> str:
    """The name of a file, without the path to it."""
    return Path(text).name if Path(text).is_file() else text


def write_report(report: CompressionReport, folder: Path) -> None:
    """Write `compression.json` into `folder`. Raises `ValueError` for a figure that is NaN or infinite."""
    write_json(report.to_dict(), folder / REPORT_FILE)


def read_report(file: Path) -> CompressionReport | None:
    """Read the report in a file; `None` where there is none. Raises `ValueError` for a damaged or incompatible one."""
    content = read_json(file)
    if not content:
        return None
    try:
        report = as_kind(content, CompressionReport, "the report")  # earlier versions wrote no fields with a default
        pairs = [report.layers.get(stack, []) for stack in STACKS] + [report.groups.get(stack, []) for stack in STACKS]
        if any(len(pair) != len(STACKS) for pair in pairs) or len(report.layers) + len(report.groups) != len(pairs):
            raise ValueError("layers and groups hold two numbers for each stack")
        sizes = [size for matrix in report.matrices for size in (matrix.m, matrix.n, matrix.parameters_after)]
        if len(report.features) not in (0, 2):
            raise ValueError("features hold two numbers")
        if min((*sizes, *report.features, report.parameters_before, report.parameters_after)) < 1:
            raise ValueError("a size is below 1")
    except ValueError as error:
        raise ValueError(
            f"{file} is no report of this version of lightformers_hf ({error}): convert the model again, or remove "
            "the file"
        ) from None
    return report


def copy_report(source: str, folder: str | Path) -> None:
    """Put the `compression.json` of a checkpoint beside the trained model, so that a card can describe it.

    Args:
        source: the checkpoint that training started from, a folder or a name on the Hub. It may have none.
        folder: where the result lies.
    """
    found = cached_file(
        source, REPORT_FILE, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    if found is not None:
        shutil.copyfile(found, Path(folder, REPORT_FILE))


def _metadata(teacher: Teacher) -> dict[str, Any]:
    """Return the metadata that the teacher's card hands on. Languages may come from its tokenizer."""
    inherited = inherited_metadata(teacher.folder, teacher.hub_name)
    named = [getattr(teacher.tokenizer, f"{side}_lang", None) for side in ("source", "target")]
    if "language" not in inherited and all(re.fullmatch("[a-z]{2,3}", str(code)) for code in named):
        inherited["language"] = list(dict.fromkeys(map(str, named)))
    return inherited


def remarks(report: CompressionReport) -> Iterator[str]:
    """Yield remarks on a report, a sentence or two each."""
    if sizes := report.vocabulary:
        (source, of_sources), (target, of_targets) = sizes["source"], sizes["target"]
        sides = f"{source:,} of {of_sources:,} tokens"
        if (source, of_sources) != (target, of_targets):
            sides = f"{sides} of the source and {target:,} of {of_targets:,} of the target"
        kept, before = sizes["parameters"]
        yield f"The vocabulary keeps {sides}, which alone spares {before - kept:,} parameters."
    if not report.options.keys() & {*HOW_FAR, *SHAPES, "pattern"}:
        yield f"The ratio is {DEFAULT_RATIO:g}, which is the default: --ratio sets another."
    yield f"Of {len(report.matrices)} matrices: {report.outcome}."
    if len(report.smaller) < len(report.matrices):
        yield "A matrix stays dense if no smaller form was requested, or if its factors would hold as many parameters."
    if report.candidates:
        costs = ", ".join(
            method
            + (f" {found['cost']:.3g}" if "cost" in found else "")
            + (f" ({found['divergence']:.2g} nats measured)" if "divergence" in found else "")
            for method, found in report.candidates.items()
        )
        yield f"Predicted costs of the candidates: {costs}. convert measures them and keeps the nearest."
    if report.agreement is not None:
        sentence = str(report.agreement)
        yield f"{sentence[0].upper()}{sentence[1:]}."
        if report.agreement.share < CLIFF:
            remedies = ["train it with `lightformers recover`", "choose a smaller ratio"]
            if report.calibration == OWN_TEXT:
                remedies.append("give text like that it is for with --calibration")
            yield f"Below {CLIFF:.0%}, outputs differ from the teacher's: {', or '.join(remedies)}."
    if report.calibration is None and report.smaller:
        yield "Without calibration every entry of a matrix has equal weight. Train the model to restore its quality."
    elif report.calibration == OWN_TEXT:
        yield (
            f"Errors were weighted on {OWN_TEXT}; --calibration with a thousand sentence pairs, or "
            "sentences, like those it is for keeps more."
        )
    if report.fewer_features:
        kept, before = report.features
        yield f"The hidden states keep {kept} of {before} features (d_model)."
    for stack, (kept, before) in report.fewer_layers.items():
        yield f"The {stack} keeps {kept} of {before} layers."
    for stack, (stored, depths) in report.groups.items():
        if stored != depths:
            yield f"The {stack}'s {depths} layers share {stored} stored ones."
