"""A teacher and its students under every engine: tokens a second, megabytes on disk, quality."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import torch
from rich import box
from rich.markup import escape
from rich.table import Table
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoTokenizer

from ..arguments import EnginesArguments
from ..engines import CHECKPOINTS, deployment_names, export, load_engine, load_engine_file, split_deployment
from ..engines.engine import longest_input
from ..files import as_kind
from ..languages import begin_with, language_code, set_language_codes, split_language
from ..loading import load_network, load_pretrained, resolve_source, weight_bytes
from ..options import OptionError, check_speech, takes
from ..processors import use_threads
from ..results import Result
from ..speech import RATE, Sound, find_sounds
from ..text import load_parallel
from .evaluate import find_columns
from .quality import SPEECH, Difference, check_metrics, choose_metrics, describe, difference, labels, score, signatures
from .speed import Speed, child_command, child_environment, speed_of, speed_ratio, take_turns, typical_sentences
from .transcribe import load_processor, load_speech, normalizer_of, read_transcribed, reads_sound, transcribe
from .translate import translate

if TYPE_CHECKING:
    from datasets import Dataset

BASELINE = "ctranslate2-int8"  # the usual deployment of the teacher
SOURCE_TOKENS = 25
RUN_DONE = "run done\n"  # lines that the measuring process prints for each
SHORTLISTED = "+shortlist"  # behind the name of a form


@dataclass
class Deployed:
    """A model in one form: bytes on disk, and {metric: 0 to 100} where its quality was measured.

    `differences`: how much higher its scores are than those of the first one, with bootstrap intervals; of all others.
    """

    model: str
    form: str
    folder: str
    disk_bytes: int
    scores: dict[str, float] = field(default_factory=dict)
    differences: dict[str, Difference] = field(default_factory=dict)


@dataclass
class Timing:
    """Speed of a deployed model: median ratios over runs to the teacher in the same form, and in the baseline's."""

    model: str
    form: str
    cores: int
    batch_size: int
    beams: int
    speed: Speed
    to_teacher: float | None = None
    to_baseline: float | None = None


@dataclass
class EngineComparison(Result):
    """Measurements of `compare_engines`, and their settings."""

    models: list[str]
    deployed: list[Deployed]
    timings: list[Timing]
    new_tokens: int
    sentences: int
    data: str | None = None
    quality_beams: int | None = None
    quality_sentences: int | None = None
    signatures: dict[str, str] = field(default_factory=dict)  # {metric: the variant of it that was computed}
    reads_sound: bool = False  # speeds are seconds of sound in a second, not tokens

    @classmethod
    def read(cls, content: Any) -> EngineComparison:
        """Read the result of `to_dict` from a file of an unknown author.

        Raises:
            ValueError: it is something else; names what is missing or wrong.
        """
        found = as_kind(content, cls, "it")
        deployed = {(model.model, model.form) for model in found.deployed}
        if not found.timings or any((timing.model, timing.form) not in deployed for timing in found.timings):
            raise ValueError("no timings, or some of models that were not deployed")
        return found

    def rows(self) -> dict[str, list[list[str]]]:
        """{setting: its table's rows, the head first}: a row a form and model, in the order of the timings."""
        deployed = {(model.model, model.form): model for model in self.deployed}
        scores = labels(self.deployed[0].scores).values()
        compared = {"same": "to_teacher"} | ({"int8": "to_baseline"} if self.has_baseline else {})
        unit, digits = ("x real time", 1) if self.reads_sound else ("tokens/s", 0)
        head = ["engine", "model", unit, *compared, "MB", *scores]
        found: dict[str, list[list[str]]] = {}
        for timing in self.timings:
            model, ratios = deployed[timing.model, timing.form], [getattr(timing, name) for name in compared.values()]
            row = [timing.form, timing.model, f"{timing.speed.tokens_per_second:,.{digits}f}"]
            row += ["" if ratio is None else f"{ratio:.2f}x" for ratio in ratios]
            row += [f"{model.disk_bytes / 1e6:,.1f}", *(f"{score:.1f}" for score in model.scores.values())]
            cores = f"{timing.cores} core{'s' * (timing.cores > 1)}"
            found.setdefault(f"{cores}, batch {timing.batch_size}, beam {timing.beams}", [head]).append(row)
        return found

    def notes(self) -> list[str]:
        """Meaning of the numbers."""
        runs = len(self.timings[0].speed.runs)
        baseline = f", 'int8' to the teacher in {BASELINE}" if self.has_baseline else ""
        what, work = "sentences", f"{self.new_tokens} tokens for every sentence"
        if self.reads_sound:
            what, work = "sounds", f"Whole transcripts of {self.sentences} sounds"
        text = f"{self.quality_sentences} {what} of {Path(self.data).name}" if self.data else ""
        return [
            f"{work}; ratios are medians over {runs} interleaved runs:",
            f"'same' to the teacher in the same engine{baseline}.",
            *([f"Quality: {text}, beam {self.quality_beams}."] if text else []),
            *describe(self.signatures),
        ]

    def tables(self) -> list[Table]:
        """One table a setting, one row a model and form; their meaning is printed below the last."""
        tables = []
        for setting, (head, *rows) in self.rows().items():
            table = Table(title=setting, box=box.SIMPLE_HEAD, padding=0, show_edge=False)
            table.add_column(head[0], overflow="fold", min_width=len(BASELINE))
            table.add_column(head[1], overflow="fold", min_width=8)
            for column in head[2:]:
                table.add_column(column, justify="right", no_wrap=True)
            for form, model, *numbers in rows:
                table.add_row(form, escape(model), *numbers)
            tables.append(table)
        tables[-1].caption = escape("\n".join(self.notes()))
        return tables

    parts = tables

    @property
    def has_baseline(self) -> bool:
        """Whether the teacher was timed in that engine, too."""
        return any(timing.to_baseline is not None for timing in self.timings)


@takes(EnginesArguments)
def compare_engines(call: EnginesArguments) -> EngineComparison:
    """Export a teacher and its students, and time each of them in all forms, in turn within the same runs.

    Every sentence gets exactly `new_tokens` tokens, past any end token, so that all do the same work. Each number of
    cores has a process of its own, because engines fix their threads when they load. Sources are those of `data` with
    references of average length; without data, 25 random tokens. Models for speech transcribe sounds of `data`, each
    to its end: `source` is its language, `target` the column of transcripts.

    Args:

    Raises:
        ValueError: an unknown form, a number below 1, an engine that is not installed, a model that an engine cannot
            express; or a measuring process failed.
        FileNotFoundError: no such checkpoint or data.
    """
    forms, metrics, data = _choose_forms(call), check_metrics(call.metrics), call.data
    cores = call.cores or range(1, min(2, os.cpu_count() or 1) + 1)
    _check_numbers(call, cores)
    settings, sentences = [(size, count) for size in call.batch_sizes for count in call.beams], call.sentences
    names = dict(zip(_labels([call.teacher, *call.students]), [call.teacher, *call.students], strict=True))
    pairs, languages = cast(Any, None), (call.source, call.target)
    if is_speech := reads_sound(resolve_source(call.teacher)):
        if data is None:
            raise OptionError("data", " is missing: models for speech transcribe it")
        check_speech(call, call.teacher)
        languages = split_language(call.source)[0], split_language(call.target)[0]
        settings = [(1, beam) for beam in call.beams]
        pairs = read_transcribed(data, column=languages[1], max_samples=call.max_samples)
        sentences = min(sentences, len(pairs))
    elif data is not None:
        source, target = languages = find_columns(call.teacher, *languages)
        pairs = load_parallel(data, source=source, target=target, split="test", max_samples=call.max_samples)
        metrics = choose_metrics(metrics, pairs["source"][:], pairs["target"][:])
    steps = len(names) * len(forms) * ((1 if pairs is None else 2) + call.runs * len(cores) * len(settings))
    with tempfile.TemporaryDirectory() as work, tqdm(total=steps, disable=not call.progress, unit="step") as bar:
        if not is_speech and any(languages):
            names = _tell_languages(names, call.source, call.target, Path(work))
        to = (Path(work), (call.shortlist, call.calibration, *languages), bar)
        deployed = [_deploy(label, names[label], form, *to) for label in names for form in forms]
        numbers = (call.new_tokens, sentences)
        comparison = EngineComparison(list(names), deployed, [], *numbers, data, reads_sound=is_speech)
        count = max(sentences if 1 in call.batch_sizes else 1, *call.batch_sizes)
        inputs = {label: [data, *languages] for label in names} if is_speech else _inputs(names, pairs, count)
        task = {"settings": settings, "runs": call.runs, "sentences": sentences, "new_tokens": call.new_tokens}
        task["reads_sound"] = is_speech
        for count in cores:
            bar.set_description(f"measure on {count} core{'s' * (count > 1)}")
            comparison.timings += _measure_speed(deployed, inputs, task | {"cores": count}, bar)
        _add_ratios(comparison.timings, comparison.models[0])
        if pairs is not None:
            comparison.quality_beams, comparison.quality_sentences = max(call.beams), len(pairs)
            _measure_quality(comparison, names, pairs, languages, metrics, bar)
    return comparison


def _check_numbers(call: EnginesArguments, cores: Sequence[int]) -> None:
    """Raise `ValueError` for a number below 1, or more cores than there are."""
    for name, values in {"cores": cores, "batch_sizes": call.batch_sizes, "beams": call.beams}.items():
        if not values or min(values) < 1:
            raise ValueError(f"{name} is {list(values)}: expected numbers of 1 or more")
    if max(cores) > (there := os.cpu_count() or 1):
        raise ValueError(f"cores is {max(cores)}: this machine has {there}")


def _measure_quality(
    comparison: EngineComparison,
    names: dict[str, str],
    pairs: Any,
    languages: tuple[str | None, str | None],
    metrics: list[str],
    bar: tqdm,
) -> None:
    """Fill in the scores of all models and forms, and their differences from the first."""
    most = max(timing.cores for timing in comparison.timings)
    options: dict[str, Any] = {"threads": most, "num_beams": comparison.quality_beams}
    if comparison.reads_sound:
        language, teacher = None, names[comparison.models[0]]
        normalize = normalizer_of(load_processor(resolve_source(teacher)), languages[0])
        references = [normalize(sound.text) for sound in pairs]
        metrics = choose_metrics(metrics, references, references, default=SPEECH)
    else:
        language, sources, references = language_code(languages[1]), pairs["source"][:], pairs["target"][:]
    comparison.signatures = signatures(metrics, references, language=language)
    first: list[str] | None = None
    for model in comparison.deployed:
        bar.set_description(f"outputs of {model.model} {model.form}")
        if comparison.reads_sound:
            outputs = list(map(normalize, _transcribe(model.folder, pairs, languages[0], **options)))
        else:
            outputs = _translate(model.folder, names[model.model], sources, **options)
        model.scores = score(outputs, references, metrics, language=language)
        if first is None:
            first = outputs
        else:
            texts = outputs, first, references
            model.differences = {name: difference(*texts, metric=name, language=language) for name in metrics}
        bar.update()


def _translate(folder: str, checkpoint: str, sources: list[str], *, threads: int, num_beams: int) -> list[str]:
    tokenizer = load_pretrained(AutoTokenizer, checkpoint)
    engine = load_engine(folder, threads=threads)
    return translate(sources, engine, tokenizer, num_beams=num_beams, prefix="", split=False)


def _transcribe(
    folder: str, sounds: Sequence[Sound], language: str | None, *, threads: int, num_beams: int
) -> list[str]:
    with use_threads(threads):
        loaded = load_speech(resolve_source(folder), threads=threads)
        return transcribe(sounds, *loaded, language=language, num_beams=num_beams)


def check_forms(forms: Iterable[str]) -> None:
    """Raise `ValueError` for a name that is none of `deployment_names()`, or whose engine is not installed."""
    for engine, _ in map(split_deployment, forms):
        if engine != CHECKPOINTS:
            load_engine_file(engine)


def _choose_forms(call: EnginesArguments) -> list[str]:
    """The forms to measure, each with a shortlist, too, where there is one and its engine takes it."""
    chosen = []
    for form in dict.fromkeys(deployment_names() if call.forms is None else call.forms):
        engine, quantization = split_deployment(form)
        file = None if engine == CHECKPOINTS else load_engine_file(engine)
        known = file is None or quantization is None or quantization in file.QUANTIZATIONS
        if call.forms or known:  # not all support int8
            chosen.append(form)
            if call.shortlist and hasattr(file, "write_shortlist"):
                chosen.append(f"{form}{SHORTLISTED}")
    used = {"shortlist": any(form.endswith(SHORTLISTED) for form in chosen)}
    used["calibration"] = any(split_deployment(form)[1] == "int4" for form in chosen if not form.endswith(SHORTLISTED))
    if unused := [name for name in used if getattr(call, name) and not used[name]]:
        raise OptionError(
            unused[0], f" has no effect on {', '.join(chosen)}: give another ", "forms", ", or remove ", unused[0]
        )
    return chosen


def _labels(names: list[str]) -> list[str]:
    """Names of the models: the last parts of their paths, as many as are needed to distinguish them."""
    parts = [Path(name).parts if Path(name).is_dir() else (name,) for name in names]
    for count in range(1, max(map(len, parts)) + 1):
        short = ["/".join(each[-count:]) for each in parts]
        if len(set(short)) == len(short):
            return short
    return names


def _tell_languages(names: dict[str, str], source: str | None, target: str | None, work: Path) -> dict[str, str]:
    """The models; instead of multilingual ones copies in `work` that translate between these languages.

    A teacher translates as its first student does, if that has a pair of languages.
    """
    tokenizers = {label: load_pretrained(AutoTokenizer, name) for label, name in names.items()}
    several = [label for label, tokenizer in tokenizers.items() if hasattr(tokenizer, "src_lang")]
    teacher, *students = names
    copies: dict[str, str] = {}
    for label in sorted(several or [teacher], key=lambda label: label == teacher):  # other models refuse codes
        light = tokenizers[students[0]] if label == teacher and students else None
        own = [getattr(light, side, None) for side in ("src_lang", "tgt_lang")]
        first = set_language_codes(tokenizers[label], *(own if all(own) else (source, target)))
        if first is not None:
            copies[label] = str(work / f"told-{len(copies)}")
            network = load_network(names[label])
            begin_with(network, first)
            stored = load_pretrained(AutoConfig, names[label]).dtype or torch.float32
            network.to(stored).save_pretrained(copies[label])  # as large as it is
            tokenizers[label].save_pretrained(copies[label])
    return names | copies


def _deploy(label: str, name: str, form: str, work: Path, texts: tuple[str | None, ...], bar: tqdm) -> Deployed:
    """A model in one form, exported below `work`, if it is not the checkpoint.

    `texts` are those of a shortlist and of int4, and their two columns.
    """
    bar.set_description(f"deploy {label} {form}")
    engine, quantization = split_deployment(form.removesuffix(SHORTLISTED))
    if engine == CHECKPOINTS:
        deployed = Deployed(label, form, name, weight_bytes(name))
    else:
        folder = work / label.replace(os.sep, "--") / form
        shortlist, calibration, *columns = texts
        options: dict[str, Any] = {"shortlist": shortlist} if form.endswith(SHORTLISTED) else {}
        if quantization == "int4":
            options["calibration"] = calibration
        if any(options.values()):
            options |= dict(zip(("source_lang", "target_lang"), columns, strict=True))
        report = export(name, folder, to=engine, quantization=quantization or "float32", **options)
        deployed = Deployed(label, form, str(folder), report.weight_bytes)
    bar.update()
    return deployed


def _inputs(names: dict[str, str], pairs: Dataset | None, count: int) -> dict[str, list[list[int]]]:
    """{model: token ids of `count` sentences}: the same sentences for all, repeated where there are too few."""
    if pairs is None:
        size = min(load_pretrained(AutoConfig, name).vocab_size for name in names.values())
        ids = torch.randint(3, size, (count, SOURCE_TOKENS), generator=torch.Generator().manual_seed(0))
        return dict.fromkeys(names, ids.tolist())
    tokenizers = {label: load_pretrained(AutoTokenizer, name) for label, name in names.items()}
    first = next(iter(tokenizers.values()))
    chosen = typical_sentences(list(pairs["source"]), list(pairs["target"]), first, count)
    chosen = [chosen[index % len(chosen)] for index in range(count)]
    limits = {label: longest_input(load_pretrained(AutoConfig, names[label]), tokenizers[label]) for label in names}
    return {
        label: tokenizer(chosen, truncation=True, max_length=limits[label])["input_ids"]
        for label, tokenizer in tokenizers.items()
    }


def _measure_speed(deployed: list[Deployed], inputs: dict, task: dict[str, Any], bar: tqdm) -> list[Timing]:
    """Measurements of a process with the number of cores of a task; each run advances the bar."""
    cores, names = task["cores"], [(model.model, model.form) for model in deployed]
    task = task | {"models": [[model.folder, inputs[model.model]] for model in deployed]}
    # Waiting threads that spin take the core from the engine whose turn it is.
    environment = child_environment(OMP_NUM_THREADS=str(cores), OMP_WAIT_POLICY="PASSIVE")
    command = "from lightformers_hf.evaluation.comparison import _measure; _measure()"
    with tempfile.TemporaryFile("w+") as work, tempfile.TemporaryFile("w+") as errors:
        json.dump(task, work)
        work.seek(0)
        streams: dict[str, Any] = {"stdin": work, "stdout": subprocess.PIPE, "stderr": errors, "text": True}
        with subprocess.Popen(child_command(command), env=environment, **streams) as child:
            found = ""
            try:
                for line in cast(IO[str], child.stdout):
                    bar.update(line == RUN_DONE)
                    found = line
            except BaseException:
                child.kill()
                raise
        if child.returncode == -signal.SIGKILL:
            raise ValueError(
                f"the process that measures was killed, most likely for memory: it holds {len(deployed)} models, the "
                "teacher and its students in every form. Give fewer students, or one form after the other (--engine)"
            )
        if child.returncode:
            errors.seek(0)
            last = (errors.read().strip() or "no message").splitlines()[-1]
            raise ValueError(f"the process that measures on {cores} cores failed: {last}")
    return [
        Timing(*names[int(number)], cores, size, count, speed_of([tuple(run) for run in timed]))
        for size, count, number, timed in json.loads(found)
    ]


def _measure() -> None:
    """The process of `_measure_speed`: a task on stdin; a line after every run, and in the end
    `[[batch size, beams, number of the model, [(tokens, seconds), …]], …]`, on stdout.
    """
    task = json.load(sys.stdin)
    load = _load_transcriber if task["reads_sound"] else _load_translator
    loaded = [load(task, *model) for model in task["models"]]

    def run(work: Callable[[Any, int], int | float], batches: list, count: int) -> tuple[int | float, float]:
        start = time.perf_counter()
        amount = sum(work(batch, count) for batch in batches)
        seconds = time.perf_counter() - start
        print(RUN_DONE, end="", flush=True)
        return amount, seconds

    found = []
    for size, count in task["settings"]:
        actions = {}
        for number, (work, inputs) in enumerate(loaded):
            batches = [[item] for item in inputs[: task["sentences"]]] if size == 1 else [inputs[:size]]
            work(batches[0], count)
            actions[str(number)] = partial(run, work, batches, count)
        found += [[size, count, number, timed] for number, timed in take_turns(actions, runs=task["runs"]).items()]
    print(json.dumps(found))


def _load_translator(task: dict[str, Any], folder: str, ids: list[list[int]]) -> tuple[Callable, list]:
    """A function that translates a batch and returns its tokens, and sentences."""
    engine, tokens = load_engine(folder, threads=task["cores"]), task["new_tokens"]

    def work(batch: list[list[int]], count: int) -> int:
        engine.generate(batch, num_beams=count, forced_length=tokens)
        return len(batch) * tokens

    return work, ids


def _load_transcriber(task: dict[str, Any], folder: str, where: list[Any]) -> tuple[Callable, list]:
    """A function that transcribes a batch and returns its seconds, and sounds of a place: data, language, column."""
    data, language, column = where
    loaded, sounds = load_speech(resolve_source(folder), threads=task["cores"]), find_sounds(data, column=column)
    seconds = {sound.name: len(sound.read()) / RATE for sound in sounds[: task["sentences"]]}

    def work(batch: list[Sound], count: int) -> float:
        transcribe(batch, *loaded, language=language, num_beams=count)
        return sum(seconds[sound.name] for sound in batch)

    return work, sounds[: task["sentences"]]


def _add_ratios(timings: list[Timing], teacher: str) -> None:
    speeds = {(t.model, t.form, t.cores, t.batch_size, t.beams): t.speed for t in timings}
    for timing in timings:
        setting = (timing.cores, timing.batch_size, timing.beams)
        timing.to_teacher = speed_ratio(timing.speed, speeds[teacher, timing.form, *setting])
        if (baseline := speeds.get((teacher, BASELINE, *setting))) is not None:
            timing.to_baseline = speed_ratio(timing.speed, baseline)
