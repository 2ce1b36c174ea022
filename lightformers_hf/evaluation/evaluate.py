"""Quality, size, speed and memory of a checkpoint, with or without its teacher, as numbers and as a table."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.markup import escape
from rich.table import Table
from transformers import AutoConfig, AutoTokenizer

from ..arguments import EvaluateArguments
from ..data_files import check_split
from ..engines import Engine
from ..files import EXPORT_FILE, REPORT_FILE, read_json
from ..in_memory import model_name, on_disk
from ..languages import add_prefix, first_token_of, language_code, split_language, split_prefix
from ..loading import (
    load_pair,
    load_pretrained,
    load_teacher,
    printable_name,
    resolve_source,
    unique_parameters,
    weight_bytes,
)
from ..options import check_speech, takes
from ..processors import use_threads
from ..results import Result
from ..speech import RATE, check_language, sound_fingerprint
from ..text import CHECKED, choose_pair, data_name, fingerprint, load_parallel, load_rows
from .quality import (
    SPEECH,
    Difference,
    check_metrics,
    choose_metrics,
    comet_score,
    describe,
    difference,
    labels,
    score,
    signatures,
    signed,
)
from .speed import speed_ratio, tokens_per_second, translation_memory, typical_sentences
from .transcribe import SpeechEngine, load_speech, normalizer_of, read_transcribed, reads_sound, transcribe
from .translate import load_translator, translate

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
MEMORY_SENTENCES = 10


@dataclass
class Measurements:
    """Size, quality and speed of one checkpoint; None where it was not measured. Memory and sizes in bytes."""

    name: str
    scores: dict[str, float]  # {metric: 0 to 100}, the most important one first
    parameters: int
    disk_bytes: int
    memory_bytes: int | None = None  # peak of a process that loads the checkpoint and translates
    libraries_bytes: int | None = None  # the part of it that was there before the checkpoint was loaded
    tokens_per_second: float | None = None
    tokens: float | None = None  # generated in one run of the speed measurement
    real_time_factor: float | None = None  # seconds of one core for a second of sound, of a model for speech

    @property
    def own_memory_bytes(self) -> int | None:
        """Peak memory without that of the libraries."""
        return None if self.memory_bytes is None else self.memory_bytes - (self.libraries_bytes or 0)


@dataclass
class Evaluation(Result):
    """A checkpoint's measurements, its teacher's, and how they were taken."""

    model: Measurements
    teacher: Measurements | None
    speed_ratio: float | None  # model to teacher, median over runs measured side by side
    data: str
    source: str
    target: str
    sentences: int
    generation: dict[str, int]
    signatures: dict[str, str]  # {metric: the variant of it that was computed}
    differences: dict[str, Difference] = field(default_factory=dict)  # model above teacher, with bootstrap intervals

    @property
    def labels(self) -> dict[str, str]:
        """{metric: its name in tables}."""
        return labels(self.model.scores)

    def to_dict(self) -> dict:
        """The same as nested dictionaries of strings and numbers, for JSON; of paths their last parts."""
        content = asdict(self)
        for side in filter(None, (content["model"], content["teacher"])):
            side["name"] = printable_name(side["name"])
        return content | {"data": printable_name(self.data), "labels": self.labels}

    def parts(self) -> list[Table]:
        """A rich table: one row a measure, the teacher beside the model, and how they compare."""
        count = f"{self.sentences:,} sentence{'s' * (self.sentences != 1)}"
        title, notes = f"{count} of {self.data}, {self.source} → {self.target}", describe(self.signatures)
        if self.differences:
            notes.append("in brackets: 95 % of test sets like this one (paired bootstrap)")
        table = Table(title=escape(title), caption=escape("\n".join(notes)))
        table.add_column("")
        table.add_column(escape(self.model.name), justify="right", overflow="fold")
        if self.teacher:
            table.add_column(escape(self.teacher.name), justify="right", overflow="fold")
            table.add_column("compared", justify="right")

        def row(label: str, field: str, form: str, unit: float = 1, compared: str = "") -> None:
            values = [getattr(side, field) for side in (self.model, self.teacher) if side]
            if values[0] is not None:
                cells = [form.format(value if unit == 1 else value / unit) for value in values]
                compared = compared or f"{values[-1] / values[0]:.2f}x smaller"
                table.add_row(label, *cells, *([compared] if self.teacher else []))

        for name, label in self.labels.items():
            cells = [f"{(value := self.model.scores[name]):.1f}"]
            if self.teacher:
                other = self.teacher.scores[name]
                cells += [f"{other:.1f}", str(self.differences.get(name, signed(value - other)))]
            table.add_row(label, *cells)
        row("unique parameters", "parameters", "{:,}")
        row("weights on disk", "disk_bytes", "{:,.1f} MB", 1e6)
        row("peak memory", "memory_bytes", "{:,.1f} MB", 1e6)
        row("  beyond libraries", "own_memory_bytes", "{:,.1f} MB", 1e6)
        compared = f"{self.speed_ratio or 0:.2f}x as fast"
        row("real-time factor", "real_time_factor", "{:.3f}", compared=compared)
        row("tokens/s, one core", "tokens_per_second", "{:,.1f}", compared=compared)
        return [table]


@takes(EvaluateArguments)
def evaluate(call: EvaluateArguments) -> Evaluation:
    """Translate parallel data with a checkpoint (and its teacher), score it, and measure size, memory and speed.

    Models for speech transcribe sound (`find_sounds`): `source_lang` is its language, `target_lang` the column of
    transcripts, and both scores are of texts that Whisper's normalizer made alike. The teacher searches with the
    model's number of beams. Data are as of `load_parallel`. Without metrics, those are computed that fit the
    references (`choose_metrics`).

    Args:

    Raises:
        FileNotFoundError, ValueError: a checkpoint or data does not exist or is not suitable; the message names the
            remedy.

    Example:
        >>> print(evaluate("recovered", data="test.jsonl", teacher="opus-mt-de-en"))
    """
    names = {"model": model_name(call.model)} | ({"teacher": model_name(call.teacher)} if call.teacher else {})
    data_name(call.data)  # which refuses loaded rows
    check_split(call)
    call = replace(call, metrics=check_metrics(call.metrics))
    with on_disk(call.tokenizer, call.model, *([call.teacher] if call.teacher else [])) as found:
        folders = dict(zip(names, found, strict=True))
        if reads_sound(resolve_source(folders["model"])):
            return evaluate_speech(call, names, folders)
        return evaluate_text(call, names, folders, read_json(Path(folders["model"], EXPORT_FILE)))


def evaluate_text(
    call: EvaluateArguments, names: dict[str, str], folders: dict[str, str], exported: dict[str, Any]
) -> Evaluation:
    """Translate text with a model (and its teacher): see `evaluate`.

    Args:
        names, folders: of `model` and, if there is one, `teacher`: names to print, and places to read from.
        exported: the record of an export; empty for a checkpoint.
    """
    light, dense, data = folders["model"], folders.get("teacher"), str(data_name(call.data))
    languages = {"source": call.source_lang, "target": call.target_lang}
    if call.speed and exported:
        logger.warning(f"{names['model']} is an export: lightformers benchmark engines measures its speed")
    read = partial(load_parallel, data, split=call.split, max_samples=call.max_samples)
    if not exported:  # wrong data is refused before weights are read
        source, target = find_columns(light, **languages, label=names["model"])
        pairs = read(source=source, target=target)
    loaded = (load_exported if exported else load_pair)(light, dense, device=call.device, **languages)
    if exported:  # the engine has the prefix
        source, target = choose_columns(names["model"], *loaded["model"], **languages)
        pairs = read(source=source, target=target)
    own = loaded["model"][0].search if exported else loaded["model"][0].generation_config
    generation = {"num_beams": call.num_beams or own.num_beams or 1}
    generation |= {"max_new_tokens": call.max_new_tokens} if call.max_new_tokens is not None else {}
    sources, references = list(pairs["source"]), list(pairs["target"])
    metrics = choose_metrics(call.metrics, sources, references)
    warn_of_overlap(light, data, sources, map(fingerprint, sources))
    options: dict[str, Any] = {"batch_size": call.batch_size, "progress": call.progress} | generation
    outputs = {role: translate(sources, *loaded[role], prefix="", split=False, **options) for role in names}
    language, measured = language_code(target, loaded["model"][1]), {}
    for role, name in names.items():
        scores = score(outputs[role], references, metrics, language=language)
        if call.comet:
            scores["comet"] = 100 * comet_score(sources, outputs[role], references, call.comet)
        if exported and role == "model":
            sizes = exported["parameters"], exported["weight_bytes"]
        else:
            sizes = unique_parameters(loaded[role][0]), weight_bytes(folders[role])
        measured[role] = Measurements(name, scores, *sizes)
    ratio = None
    if call.speed and not exported:
        sentences = typical_sentences(sources, references, loaded.get("teacher", loaded["model"])[1])
        options = {"runs": call.runs, "progress": call.progress} | generation
        ratio = _measure_speed(measured, folders, loaded, sentences, **options)
    differences = {}
    if call.teacher:
        texts = outputs["model"], outputs["teacher"], references
        differences = {name: difference(*texts, metric=name, language=language) for name in metrics}
    head = load_rows(data, split=call.split, first=call.max_samples or CHECKED)
    columns = choose_pair(head, split_prefix(source)[0], split_language(target)[0] or "")
    variants = signatures(metrics, references, language=language)
    both = measured["model"], measured.get("teacher")
    return Evaluation(*both, ratio, data, *columns, len(sources), generation, variants, differences)


def evaluate_speech(call: EvaluateArguments, names: dict[str, str], folders: dict[str, str]) -> Evaluation:
    """Transcribe sound with a model for speech (and its teacher): see `evaluate`, and `evaluate_text`.

    Raises:
        ValueError: sound without transcripts, or a language that a model does not transcribe.
    """
    language, column = split_language(call.source_lang)[0], split_language(call.target_lang)[0]
    check_speech(call, names["model"])
    data, generation = str(data_name(call.data)), {"num_beams": call.num_beams or 1}
    resolved = {role: resolve_source(folder) for role, folder in folders.items()}
    sounds = read_transcribed(data, column=column, split=call.split, max_samples=call.max_samples)
    measures_speed = call.speed and torch.device(call.device).type == "cpu"
    threads = 1 if measures_speed else torch.get_num_threads()
    loaded = {role: load_speech(folder, call.device, threads) for role, folder in resolved.items()}
    has_engine = any(isinstance(model, SpeechEngine) for model, _ in loaded.values())
    if has_engine and call.batch_size != EvaluateArguments.batch_size:
        logger.warning("batch_size has no effect on an export, which transcribes one sound after the other")
    for role, (model, _) in loaded.items():
        check_language(model.generation_config, language, names[role])
    normalize = normalizer_of(loaded["model"][1], language)
    references = [normalize(sound.text or "") for sound in sounds]
    metrics = choose_metrics(call.metrics, references, references, default=SPEECH)
    seconds, known = 0.0, []
    for sound in sounds:
        wave = sound.read()
        seconds += len(wave) / RATE
        known.append(sound_fingerprint(wave))
    options: dict[str, Any] = {name: getattr(call, name) for name in ("batch_size", "max_new_tokens", "progress")}
    outputs, measured = {}, {}
    rates: dict[str, float | None] = {}
    for role, (model, processor) in loaded.items():
        begun = time.process_time()
        with use_threads(threads):
            texts = transcribe(sounds, model, processor, language=language, **options | generation)
        rates[role] = (time.process_time() - begun) / seconds if measures_speed else None
        outputs[role] = [normalize(text) for text in texts]
        if isinstance(model, SpeechEngine):
            sizes = model.parameters, read_json(resolved[role] / EXPORT_FILE)["weight_bytes"]
        else:
            sizes = unique_parameters(model), weight_bytes(str(resolved[role]))
        scores = score(outputs[role], references, metrics)
        measured[role] = Measurements(names[role], scores, *sizes, real_time_factor=rates[role])
    ratio, differences = None, {}
    if call.teacher:
        if rates["model"] and rates["teacher"]:
            ratio = rates["teacher"] / rates["model"]
        both = outputs["model"], outputs["teacher"], references
        differences = {name: difference(*both, metric=name) for name in metrics}
    warn_of_overlap(folders["model"], data, [sound.name for sound in sounds], known, "sounds")
    return Evaluation(
        measured["model"], measured.get("teacher"), ratio, data, "sound", column or "text", len(sounds), generation,
        signatures(metrics, references), differences,
    )  # fmt: skip


def load_exported(
    name: str, teacher: str | None, *, device: str, source: str | None, target: str | None
) -> dict[str, tuple[Any, PreTrainedTokenizerBase]]:
    """As `load_pair`, for an export and the checkpoint of its teacher."""
    light = load_pretrained(AutoTokenizer, name)
    codes = {"source": source, "target": target} if teacher is None or hasattr(light, "src_lang") else {}
    engine, light, _ = load_translator(name, device=device, columns=True, **codes)
    found = {"model": (engine, light)}
    if teacher is not None:
        found["teacher"] = load_teacher(teacher, light, device=device, source=source, target=target)
    return found


def _measure_speed(
    measured: dict[str, Measurements],
    folders: dict[str, str],
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
    for role, found in measured.items():
        first = first_token_of(loaded[role][0])
        found.memory_bytes, found.libraries_bytes = translation_memory(
            folders[role], sentences[:MEMORY_SENTENCES], **first | generation
        )
        found.tokens_per_second, found.tokens = speeds[role].tokens_per_second, speeds[role].tokens
    return speed_ratio(speeds["model"], speeds["teacher"]) if "teacher" in speeds else None


def calibrated_on(model: str | Path) -> set[str]:
    """Fingerprints of the sentences or sounds that a model's conversion was calibrated on."""
    return set(read_json(resolve_source(model) / REPORT_FILE).get("calibrated_on", ()))


def warn_of_overlap(
    model: str | Path, data: str, sources: list[str], fingerprints: Iterable[str], what: str = "sentences"
) -> int:
    """Return how many sentences (or names of sounds) to be scored the conversion was calibrated on, with a warning."""
    known = calibrated_on(model)
    if seen := [source for source, fingerprint in zip(sources, fingerprints, strict=True) if fingerprint in known]:
        logger.warning(
            f"{len(seen)} of the {len(sources)} {what} of {data} were among those that {printable_name(model)} was "
            f"calibrated on, so its scores are too good; for example: {seen[0]}"
        )
    return len(seen)


def find_columns(name: str, source: str | None, target: str | None, *, label: str | None = None) -> tuple[str, str]:
    """As `choose_columns`, of a checkpoint whose weights are not read; messages name `label`, by default `name`."""
    folder = resolve_source(name)
    config, tokenizer = (load_pretrained(auto, folder) for auto in (AutoConfig, AutoTokenizer))
    return choose_columns(label or name, config, tokenizer, source, target)


def choose_columns(
    name: str,
    model: PreTrainedModel | PreTrainedConfig | Engine,
    tokenizer: PreTrainedTokenizerBase,
    source: str | None,
    target: str | None,
) -> tuple[str, str]:
    """The columns to read: as given, else the languages that the tokenizer names (Marian's does).

    The source's comes with the prefix that it was given, or that the configuration has for the two (T5's), or the
    export.
    """
    source = source or getattr(tokenizer, "source_lang", None)
    target = target or getattr(tokenizer, "target_lang", None)
    if not (source and target):
        raise ValueError(
            f"the languages of {name} are unknown: give source and target (on the command "
            "line --source-lang and --target-lang), two columns of the data or two languages inside its column "
            "'translation'."
        )
    if isinstance(model, Engine) and model.prefix and not split_prefix(source)[1]:
        return f"{source}={model.prefix}", target
    return add_prefix(getattr(model, "config", model), source, target, tokenizer), target
