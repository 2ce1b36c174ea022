"""One checkpoint, beside its teacher or alone: quality, size, speed and memory, as numbers and as a table."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table
from transformers import AutoConfig, AutoTokenizer

from ..files import REPORT_FILE, read_json
from ..languages import add_prefix, split_language
from ..loading import (
    load_pair,
    load_pretrained,
    printable_name,
    resolve_source,
    unique_parameters,
    weight_bytes,
)
from ..text import fingerprint, load_parallel
from .memory import translation_memory
from .quality import Difference, bleu_difference, comet_score, signed, translation_quality
from .speed import speed_ratio, tokens_per_second, typical_sentences
from .translate import translate

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
MEMORY_SENTENCES = 10


@dataclass
class Measurements:
    """What one checkpoint is and does; None where it was not measured. Memory and sizes in bytes."""

    name: str
    bleu: float
    bleu_signature: str
    chrf: float
    chrf_signature: str
    comet: float | None
    parameters: int
    disk_bytes: int
    memory_bytes: int | None = None  # peak of a process that loads the checkpoint and translates
    libraries_bytes: int | None = None  # the part of it that was there before the checkpoint was loaded
    tokens_per_second: float | None = None
    tokens: int | None = None  # generated in one run of the speed measurement

    @property
    def own_memory_bytes(self) -> int | None:
        """Peak memory beyond what the libraries alone take."""
        return None if self.memory_bytes is None else self.memory_bytes - self.libraries_bytes


@dataclass
class Evaluation:
    """A checkpoint's measurements, its teacher's, and how they were taken."""

    model: Measurements
    teacher: Measurements | None
    speed_ratio: float | None  # model to teacher, median over runs measured side by side
    data: str
    source: str
    target: str
    sentences: int
    generation: dict[str, int]
    difference: Difference | None = None  # of BLEU, model above teacher, with its bootstrap interval

    def to_dict(self) -> dict:
        """The same as nested dictionaries of strings and numbers, for JSON; of paths their last parts."""
        content = asdict(self)
        for one in filter(None, (content["model"], content["teacher"])):
            one["name"] = printable_name(one["name"])
        return content | {"data": printable_name(self.data)}

    def table(self) -> Table:
        """A rich table: one row a measure, the teacher beside the model, and how they compare."""
        title = (
            f"{self.sentences:,} sentence{'s' * (self.sentences != 1)} of {self.data}, {self.source} → {self.target}"
        )
        notes = [self.model.bleu_signature, self.model.chrf_signature]
        if self.difference:
            notes.append("in brackets: 95 % of test sets like this one (paired bootstrap)")
        table = Table(title=escape(title), caption=escape("\n".join(notes)))
        table.add_column("")
        table.add_column(escape(self.model.name), justify="right", overflow="fold")
        if self.teacher:
            table.add_column(escape(self.teacher.name), justify="right", overflow="fold")
            table.add_column("compared", justify="right")

        def row(label: str, field: str, show: Callable[[float], str], compare: Callable[[float, float], str]) -> None:
            model, teacher = getattr(self.model, field), getattr(self.teacher, field, None)
            if model is not None:
                cells = [show(model)] + ([show(teacher), compare(model, teacher)] if self.teacher else [])
                table.add_row(label, *cells)

        def above(model: float, teacher: float) -> str:
            return str(self.difference or signed(model - teacher))

        def smaller(model: float, teacher: float) -> str:
            return f"{teacher / model:.2f}x smaller"

        row("BLEU", "bleu", "{:.1f}".format, above)
        row("chrF", "chrf", "{:.1f}".format, lambda model, teacher: signed(model - teacher))
        row("COMET", "comet", "{:.4f}".format, lambda model, teacher: signed(model - teacher, 4))
        row("unique parameters", "parameters", "{:,}".format, smaller)
        row("weights on disk", "disk_bytes", _megabytes, smaller)
        row("peak memory", "memory_bytes", _megabytes, smaller)
        row("  beyond libraries", "own_memory_bytes", _megabytes, smaller)
        ratio = self.speed_ratio
        row(
            "tokens/s, one core", "tokens_per_second", "{:,.1f}".format, lambda model, teacher: f"{ratio:.2f}x as fast"
        )
        return table


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"


def evaluate_model(
    model: str,
    data: str,
    teacher: str | None = None,
    *,
    source: str | None = None,
    target: str | None = None,
    split: str = "test",
    max_samples: int | None = None,
    batch_size: int = 32,
    device: str = "cpu",
    speed: bool = True,
    runs: int = 10,
    comet: str | None = None,
    progress: bool = False,
    **generation: int,
) -> Evaluation:
    """Translate parallel data with a checkpoint (and its teacher), score it, and measure size, memory and speed.

    Args:
        model, teacher: folders or Hub names of sequence-to-sequence checkpoints.
        data, split, max_samples: as for `load_parallel`.
        source, target: names of columns, or languages in a column `translation`; by default the tokenizer's own. Of
            a multilingual checkpoint also the codes, `de=deu_Latn` (`set_language_codes`). The source's may bring a
            prefix (`load_parallel`); one that the configuration has for the two is used.
        device: where the quality is measured; speed and memory are measured on one CPU core.
        speed: measure tokens/s and peak memory, too (minutes).
        runs: of the speed measurement.
        comet: a local COMET checkpoint to score with as well.
        generation: `num_beams`, `max_new_tokens` and other numbers for `generate()`, for quality and speed alike;
            what is not given is the checkpoint's (the number of beams: the model's, for the teacher too).

    Raises:
        FileNotFoundError, ValueError: a checkpoint or data that is not there or not fit, each with what to do.
    """
    names = {"model": model} | ({"teacher": teacher} if teacher else {})
    loaded = load_pair(model, teacher, device=device, source=source, target=target)
    # The teacher searches with the model's number of beams, whatever its own checkpoint says.
    generation = {"num_beams": loaded["model"][0].generation_config.num_beams or 1} | generation
    source, target = choose_columns(model, *loaded["model"], source, target)
    pairs = load_parallel(data, source=source, target=target, split=split, max_samples=max_samples)
    sources, references = list(pairs["source"]), list(pairs["target"])
    warn_of_overlap(model, data, sources)

    settings: dict[str, Any] = {"batch_size": batch_size, "progress": progress} | generation
    outputs = {role: translate(sources, *loaded[role], **settings) for role in names}
    measured = {
        role: _measure_quality(name, loaded[role][0], outputs[role], sources, references, comet)
        for role, name in names.items()
    }
    difference = bleu_difference(outputs["model"], outputs["teacher"], references) if teacher else None
    ratio = None
    if speed:
        sentences = typical_sentences(sources, references, loaded.get("teacher", loaded["model"])[1])
        ratio = _measure_speed(measured, loaded, sentences, runs=runs, progress=progress, **generation)
    columns = split_language(source)[0], split_language(target)[0]
    both = measured["model"], measured.get("teacher")
    return Evaluation(*both, ratio, data, *columns, len(sources), generation, difference)


def _measure_quality(
    name: str,
    network: PreTrainedModel,
    outputs: list[str],
    sources: list[str],
    references: list[str],
    comet: str | None,
) -> Measurements:
    """Size and scores of a checkpoint, without its speed. Args: of `evaluate_model`; `outputs`: of `translate`."""
    return Measurements(
        name=name,
        comet=comet_score(sources, outputs, references, comet) if comet else None,
        parameters=unique_parameters(network),
        disk_bytes=weight_bytes(name),
        **translation_quality(outputs, references),
    )


def _measure_speed(
    measured: dict[str, Measurements],
    loaded: dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]],
    sentences: list[str],
    *,
    runs: int,
    progress: bool,
    **generation: int,
) -> float | None:
    """Fill in tokens a second and peak memory of every role; return how many times as fast the model is."""
    for network, _ in loaded.values():
        network.to("cpu")
    speeds = tokens_per_second(loaded, sentences, runs=runs, progress=progress, **generation)
    for role, one in measured.items():
        first = {"forced_bos_token_id": loaded[role][0].generation_config.forced_bos_token_id}
        one.memory_bytes, one.libraries_bytes = translation_memory(
            one.name, sentences[:MEMORY_SENTENCES], **first | generation
        )
        one.tokens_per_second, one.tokens = speeds[role].tokens_per_second, speeds[role].tokens
    return speed_ratio(speeds["model"], speeds["teacher"]) if "teacher" in speeds else None


def warn_of_overlap(model: str, data: str, sources: list[str]) -> None:
    """Warn where sentences to be scored are among those that the conversion was calibrated on."""
    known = set(read_json(resolve_source(model) / REPORT_FILE).get("calibrated_on", ()))
    if seen := [sentence for sentence in sources if fingerprint(sentence) in known]:
        logger.warning(
            f"{len(seen)} of the {len(sources)} sentences of {data} were among those that {model} was calibrated on, "
            f"so its scores say too much; for example: {seen[0]}"
        )


def find_columns(name: str, source: str | None, target: str | None) -> tuple[str, str]:
    """As `choose_columns`, of a checkpoint whose weights are not read."""
    folder = resolve_source(name)
    config, tokenizer = (load_pretrained(auto, folder) for auto in (AutoConfig, AutoTokenizer))
    return choose_columns(name, config, tokenizer, source, target)


def choose_columns(
    name: str,
    model: PreTrainedModel | PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    source: str | None,
    target: str | None,
) -> tuple[str, str]:
    """The columns to read: as given, else the languages that the tokenizer names (Marian's does).

    The source's comes with the prefix that it was given, or that the configuration has for the two (T5's).
    """
    source = source or getattr(tokenizer, "source_lang", None)
    target = target or getattr(tokenizer, "target_lang", None)
    if not (source and target):
        raise ValueError(
            f"{name} does not say from which language to which it translates: give source and target (on the command "
            "line --source-lang and --target-lang), two columns of the data or two languages inside its column "
            "'translation'."
        )
    return add_prefix(getattr(model, "config", model), source, target), target
