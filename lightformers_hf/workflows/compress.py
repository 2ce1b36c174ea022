"""From a trained checkpoint to a compressed model in an engine: all steps as one call."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from ..arguments import CompressArguments
from ..conversion.options import CompressionOptions
from ..corpus import Corpus
from ..engines import CHECKPOINTS, export, load_engine_file
from ..engines.layers import read_source
from ..engines.write import check_engine, expands_low_rank
from ..evaluation.comparison import EngineComparison, compare_engines
from ..evaluation.evaluate import evaluate, find_columns
from ..evaluation.quality import check_metrics, choose_metrics, labels
from ..evaluation.transcribe import read_transcribed, reads_sound
from ..files import (
    RECORD_FILE,
    atomic_output,
    find_foreign,
    lock,
    parents,
    read_json,
    refuse_foreign,
    write_json,
    write_whole,
)
from ..hub import Push, check_push, push_folder
from ..in_memory import identify, on_disk
from ..languages import split_language, split_prefix
from ..loading import resolve_source
from ..options import OptionError, check_speech, takes, values_of
from ..recovery import check_reports
from ..results import Result
from ..speech import TRANSCRIPTS, Sound, find_sounds
from ..text import data_name, load_parallel
from .convert import convert
from .recover import Recovery, check_minutes, claim, find_added, recover

if TYPE_CHECKING:
    from rich.table import Table

PLAN_FILE = "compress.json"  # options of the call
CALIBRATION = 10_000  # pairs that are drawn for the calibration at most, unless more samples are asked for
MOST_HELD_OUT = 500  # pairs of validation and test each, where no others are given
SCORED = 500  # sentences of the test that are translated in every engine
# Arguments that an interrupted compression may resume with others of.
NOT_ASKED = ("output", "tokenizer", "report_to", "device", "push_to_hub", "private", "overwrite", "progress")
# Options that `recover` gets, too.
TRAINING = ("minutes", "translations", "seed", "report_to", "device", "skip_bad_lines", "progress")
PARTS = ("data", "converted", "recovered", "deployed", "results.json", "engines.json", "report.html", PLAN_FILE)


@dataclass(frozen=True)
class Texts:
    """Files of the parts of the text; what is missing, `recover` does without."""

    train: str | None
    validation: str | None
    test: str
    calibration: str | None = None


@dataclass(frozen=True)
class Compression(Result):
    """Result of a compression.

    Attributes:
        output: the folder.
        files: {part of it: its path}: `recovered` to push or to train on, `deployed` for the engine, and others.
        recovery: result of `recover`.
        engines: size, speed and quality of both models, as checkpoints and exported.
        summary: the result in one sentence.
        notes: remarks on it, and remedies if the quality is not sufficient.
        pushed: result of the push to the Hub.
    """

    output: str
    files: dict[str, str]
    recovery: Recovery
    engines: EngineComparison
    summary: str
    notes: list[str]
    pushed: Push | None = None

    def parts(self) -> list[Table | str]:
        """Return the tables of the comparison, the summary and the notes."""
        pushed = self.pushed.parts() if self.pushed else []
        places = f"Deployed: {self.files['deployed']}. To push: {self.files['recovered']}."
        page = [f"Report: {self.files['report.html']}."] if "report.html" in self.files else []
        return [*self.engines.tables(), "", self.summary, *self.notes, places, *page, *pushed]


@takes(CompressArguments)
def compress(call: CompressArguments) -> Compression:
    """Convert, recover, evaluate, export, and report. The same call resumes an interrupted compression.

    `output` gets `converted`, `recovered` (to push, or to train on), `deployed` (for the engine), `results.json` and
    `engines.json`; with matplotlib `report.html`; and `data`, if a part of the pairs is reserved for `validation` or
    `test`.

    Args:

    Raises:
        ValueError, FileNotFoundError, FileExistsError: as in its steps, and if `output` contains foreign files.
        BlockingIOError: another process is writing `output`.
        OSError: the push failed. The folder stays.

    Example:
        >>> print(compress("opus-mt-de-en", "small", data="train.jsonl", ratio=4, minutes=30))
    """
    data, validation, test, shortlist = map(data_name, (call.data, call.validation, call.test, call.shortlist))
    call = replace(call, calibration=data_name(call.calibration))
    metrics = check_metrics(call.metrics)
    options, note = choose_method(call)
    text = options.get("calibration")
    if data and text and os.path.realpath(text) == os.path.realpath(data):
        del options["calibration"]  # the default is the part of the data that no score is measured on
    check_engine(call.to, call.quantization, shortlist)
    check_minutes(call.minutes)
    check_reports(call.report_to)
    if call.push_to_hub:
        check_push(call.push_to_hub)
    output, given = Path(os.path.expanduser(call.output)), Texts(data, validation, test or "", data)
    asked = {name: value for name, value in values_of(call).items() if name not in NOT_ASKED} | options
    asked |= {"model": identify(call.model), "metrics": metrics or None}
    asked |= {"data": data, "validation": validation, "test": test, "shortlist": shortlist}
    asked = json.loads(json.dumps(asked, default=os.fspath))  # as it is read
    is_only_planned = {path.name for path in output.glob("*")} - {"data"} == {PLAN_FILE}  # by an earlier call
    overwrite = call.overwrite or is_only_planned
    with on_disk(call.tokenizer, call.model) as (teacher,), ExitStack() as stack:
        is_speech = reads_sound(resolve_source(teacher))
        if is_speech:
            check_speech(call, teacher)
            if not data:  # the teacher can transcribe
                data = options.pop("calibration", None)
                given = replace(given, train=data, calibration=data)
        read_source(call.model, call.to, call.tokenizer)
        inputs = [teacher, data, validation, test, shortlist]
        record = claim(output, asked, file=PLAN_FILE, overwrite=overwrite, inputs=inputs)
        stack.enter_context(parents(output))
        stack.enter_context(lock(output))
        if overwrite:
            check_parts(output)
        columns = split_language(call.source_lang)[0], split_language(call.target_lang)[0]
        texts: Sequence[Any] | None
        if is_speech:
            texts = draw_sounds(given, columns[1], call.seed)
        else:
            source, target = find_columns(teacher, *columns)
            columns = split_prefix(source)[0], target  # a prefix that the teacher requires is added when they are read
            texts = draw_texts(given, columns, values_of(call), metrics)
        if overwrite or not (output / PLAN_FILE).exists():
            begin(output, record)
        files = write_texts(texts, output / "data", columns, given)
        if is_speech and texts:  # the test is held out so
            files = replace(files, train=files.calibration)
        work = Work(call, teacher, output, files, columns, metrics, shortlist, options, note, is_speech)
        work.do()
    pushed = None
    if call.push_to_hub:
        results = [output / "results.json"]
        pushed = push_folder(output / "recovered", call.push_to_hub, private=call.private, results=results)
    return work.result(drawn=not test, pushed=pushed)


def choose_method(call: CompressArguments) -> tuple[dict[str, Any], str]:
    """Return the options of the conversion that are given, with the method for the engine, and a note on it."""
    names = [option.name for option in fields(CompressionOptions) if option.name != "device"]  # where, not what
    options = {name: value for name, value in values_of(call).items() if name in names and value is not None}
    to = call.to
    if not (CompressionOptions(**options).policy.compresses and expands_low_rank(to)):
        return options, ""
    if "method" not in options:
        with suppress(ValueError):  # narrower layers have no rank or energy
            CompressionOptions(**options, method="narrow")
            options["method"] = "narrow"
            return options, f"The method is narrow: {to} has no low-rank matrix multiplications."
    if options.get("method") == "narrow":
        return options, ""
    return options, (
        f"{to} has no low-rank matrix multiplications: low-rank factors are expanded to full matrices in deployed. "
        "The method narrow avoids them, with a ratio, a size or a number of parameters."
    )


@dataclass(frozen=True)
class Work:
    """The steps of a compression, each of which makes a part of the folder `output`."""

    call: CompressArguments
    teacher: str
    output: Path
    files: Texts
    columns: tuple[str | None, str | None]
    metrics: list[str]
    shortlist: str | None  # text for the deployed model's
    options: dict[str, Any]  # options of `convert`
    note: str  # on its method
    reads_sound: bool = False

    def do(self) -> None:
        """Do the steps whose part is not there yet."""
        steps: dict[str, Callable[[], None]] = {"converted": self.convert, "recovered": self.recover}
        steps |= {"results.json": self.evaluate, "deployed": self.deploy, "engines.json": self.compare}
        steps |= {"report.html": self.report} if find_spec("matplotlib") else {}
        if self.note and self.call.progress:
            tqdm.write(self.note)
        for number, (name, step) in enumerate(steps.items(), start=1):
            complete = is_complete(self.output / name)
            if self.call.progress:
                tqdm.write(f"{number}/{len(steps)} {self.output / name}" + " (there already)" * complete)
            if not complete:
                step()

    def result(self, *, drawn: bool, pushed: Push | None) -> Compression:
        """Return the summaries of the parts; `drawn`: the test was set apart from the data."""
        found = {name: str(self.output / name) for name in PARTS if (self.output / name).exists()}
        recovery = Recovery(**read_json(self.output / "recovered" / RECORD_FILE)["result"])
        comparison = EngineComparison.read(read_json(self.output / "engines.json"))
        notes = [self.note] if self.note else []
        differences = comparison.deployed[-1].differences  # the compressed model's, in the engine
        if compared := [f"{labels([name])[name]} {differences[name]}" for name in differences]:
            notes.append(
                f"Deployed, compared with the teacher: {', '.join(compared)}. In brackets: 95 % of test sets like "
                "this one (paired bootstrap)."
            )
        if drawn:
            notes.append("The test was drawn from your data: a teacher trained on it looks better than it is.")
        notes += [
            f"If the quality is not enough, give more minutes, more {'sound' if self.reads_sound else 'text'}, or a "
            "smaller ratio.",
            "If it is not small or fast enough, give a larger ratio"
            + (" or fewer decoder layers." if self.reads_sound else ", fewer decoder layers, or a shortlist."),
        ]
        what = "sounds" if self.reads_sound else "pairs"
        text = f"held-out {what} of your data" if drawn else f"{what} of {Path(self.files.test).name}"
        summary = summarize(recovery, comparison, self.call.to, text)
        return Compression(str(self.output), found, recovery, comparison, summary, notes, pushed)

    @property
    def light(self) -> str:
        return str(self.output / "recovered")

    @property
    def sides(self) -> dict[str, str | None]:
        return {name: self.options.get(name) for name in ("source_lang", "target_lang")}

    @property
    def measured(self) -> dict[str, Any]:
        return {"progress": self.call.progress, "metrics": self.metrics}

    def convert(self) -> None:
        """Make the teacher smaller."""
        text = {"calibration": self.files.calibration} if CompressionOptions(**self.options).reads_text else {}
        device = {"device": self.call.device or "cpu"}
        convert(self.teacher, self.output / "converted", progress=self.call.progress, **text | self.options | device)

    def recover(self) -> None:
        """Train the result with its teacher, or resume the training."""
        texts = {"data": self.files.train, "validation": self.files.validation}
        if not self.reads_sound and self.files.train:  # the parts of sound are apart
            texts["exclude"] = self.files.test or None
        asked = texts | self.sides | {"metrics": self.metrics} | {name: getattr(self.call, name) for name in TRAINING}
        # int8 costs too little to train for, and a training of speech does not round
        if self.call.quantization == "int4" and not self.reads_sound:
            asked["quantization"] = "int4"
        recover(self.output / "converted", self.light, teacher=self.teacher, **asked)

    def evaluate(self) -> None:
        """Score it beside its teacher on the test."""
        device = str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"
        settings: dict[str, Any] = {"device": self.call.device or device, "speed": False, "num_beams": 1}
        settings |= {"source_lang": self.columns[0], "target_lang": self.columns[1]} | self.measured
        found = evaluate(self.light, data=self.files.test, teacher=self.teacher, **settings)
        write_json(found.to_dict(), self.output / "results.json")

    def deploy(self) -> None:
        """Export it."""
        text: dict[str, Any] = self.texts | self.sides if self.texts else {}
        export(self.light, self.output / "deployed", to=self.call.to, quantization=self.call.quantization, **text)

    @property
    def texts(self) -> dict[str, str]:
        """The text that an export reads, by its option."""
        rounds = self.call.quantization == "int4" and not self.reads_sound
        texts = {"shortlist": self.shortlist, "calibration": self.files.train if rounds else None}
        return {name: str(text) for name, text in texts.items() if text}

    def compare(self) -> None:
        """Measure both models, as they are and deployed: speed, size, quality."""
        deployed = self.call.to if self.call.quantization == "float32" else f"{self.call.to}-{self.call.quantization}"
        forms = [CHECKPOINTS, deployed]
        settings: dict[str, Any] = {"cores": (1,), "beams": (1,), "max_samples": SCORED}
        source, target = self.columns
        if not self.reads_sound:
            settings["batch_sizes"] = (1,)
            sides = self.sides if self.texts else {}  # an export that reads text needs the languages' codes, too
            named = (sides.get("source_lang") or source, sides.get("target_lang") or target)
            source, target = find_columns(self.light, *named)  # which keeps a prefix that was given
        settings |= self.measured | {"source": source, "target": target} | self.texts
        found = compare_engines(self.teacher, [self.light], forms=forms, data=self.files.test, **settings)
        write_json(found.to_dict(), self.output / "engines.json")

    def report(self) -> None:
        """Write the page."""
        from ..evaluation.page import report_page  # needs matplotlib

        results = [self.output / "results.json", self.output / "engines.json"]
        settings = self.measured | {"source": self.columns[0], "target": self.columns[1], "results": results}
        page = report_page(self.light, teacher=self.teacher, data=self.files.test, **settings)
        with write_whole(self.output / "report.html") as file:
            file.write(page.encode())


def summarize(recovery: Recovery, comparison: EngineComparison, to: str, text: str) -> str:
    """Return the result in one sentence; `text` describes the pairs of the test."""
    teacher, light = comparison.models
    before = next(
        deployed for deployed in comparison.deployed if (deployed.model, deployed.form) == (teacher, CHECKPOINTS)
    )
    after = [deployed for deployed in comparison.deployed if deployed.model == light][-1]
    timings = (timing for timing in comparison.timings if (timing.model, timing.form) == (light, after.form))
    speed = next(timings).to_teacher
    metric, score = next(iter(after.scores.items()))
    sizes = [f"{deployed.disk_bytes / 1e6:,.1f} MB" for deployed in (before, after)]
    return (
        f"{recovery.ratio:.1f}x fewer parameters, {' → '.join(sizes)}, "
        f"{speed:.1f}x as fast as the teacher in {getattr(load_engine_file(to), 'NAME', to)}; "
        f"{labels(after.scores)[metric]} {score:.1f} instead of {before.scores[metric]:.1f} on "
        f"{comparison.quality_sentences} {text}."
    )


def is_complete(part: Path) -> bool:
    """Whether a step's output is there; that of a recovery grows while it trains."""
    if (part / RECORD_FILE).is_file():
        return "result" in read_json(part / RECORD_FILE)
    return part.exists()


def draw_texts(
    given: Texts, columns: tuple[str, str], arguments: Mapping[str, Any], metrics: list[str]
) -> list[tuple[str, str]] | None:
    """Random pairs to measure and to calibrate with, every source once; `None` where no pairs are to be set apart."""
    for part, file in {"train": given.validation, "test": given.test}.items():
        if file:
            targets = load_parallel(file, source=columns[0], target=columns[1], split=part)["target"][:]
            choose_metrics(metrics, targets, targets)  # refuses unsuitable metrics before the work begins
    data, test = given.train, given.test
    if given.validation and test:
        return None
    skip_bad = arguments["skip_bad_lines"]
    corpus = Corpus(data, source=None, target=None, default=columns, skip_bad=skip_bad) if data else None
    if corpus is None or not corpus.has_targets:
        if not test:
            what = f"{data} is of one language" if data else "Neither data nor test is given"
            raise ValueError(f"{what}: give pairs as data, or test, with pairs to measure on (then data is optional)")
        return None
    number = 2 * MOST_HELD_OUT + max(CALIBRATION, 2 * (arguments["calibration_samples"] or 0))
    pairs = corpus.sample(number, arguments["seed"])
    once = dict(zip(pairs["source"], pairs["target"], strict=True))
    choose_metrics(metrics, pairs["target"][:], pairs["target"][:])
    if len(once) < 20:
        raise ValueError(
            f"{data} holds {len(once)} different pairs: twenty and more are needed, or a validation and a test"
        )
    return list(once.items())


def draw_sounds(given: Texts, column: str | None, seed: int) -> list[Sound] | None:
    """The sounds of the data in random order, to measure and to calibrate with; `None` where no parts are needed."""
    for data in filter(None, (given.validation, given.test)):
        read_transcribed(data, column=column)
    if given.train is None:
        raise OptionError("calibration", " is missing: a model for speech needs sound, give a folder of speech")
    sounds = find_sounds(given.train, column=column)
    if given.validation and given.test:
        return None
    if not all(sound.text for sound in sounds):
        if not given.test:
            raise ValueError(
                f"{given.train} has sounds without transcripts: give test (--test), transcribed sound to measure on"
            )
        return None
    if len(sounds) < 20:
        raise ValueError(
            f"{given.train} holds {len(sounds)} sounds: twenty and more are needed, or validation and test"
        )
    random.Random(seed).shuffle(sounds)
    return sounds


def write_texts(texts: Sequence[Any] | None, folder: Path, columns: tuple[Any, Any], given: Texts) -> Texts:
    """Files of calibration, validation and test: those given, the others from `texts`, written to `folder`."""
    if texts is None:
        return given
    size = min(MOST_HELD_OUT, len(texts) // 10)
    first, second = (0 if path else size for path in (given.validation, given.test))
    parts = {
        "validation": texts[:first],
        "test": texts[first : first + second],
        "calibration": texts[first + second :],
    }
    if not folder.is_dir():  # an interrupted compression resumes with its files there
        with atomic_output(folder) as temporary:
            for part, rows in parts.items():
                written = (_row(row, columns, temporary) for row in rows)
                lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in written)
                if lines:
                    (temporary / f"{part}.jsonl").write_text(lines, encoding="utf-8")
    made = {part: str(folder / f"{part}.jsonl") for part in parts}
    test = given.test or made["test"]
    return Texts(given.train, given.validation or made["validation"], test, made["calibration"])


def _row(row: tuple[str, str] | Sound, columns: tuple[Any, Any], folder: Path) -> dict[str, Any]:
    """A row of a file in `folder`: a pair of texts, or a sound, of which a data set's gets a file."""
    if not isinstance(row, Sound):
        return {"translation": dict(zip(columns, row, strict=True))}
    if isinstance(row.content, bytes):
        path = Path(hashlib.sha256(row.content).hexdigest()[:16] + Path(row.name).suffix)
        (folder / path).write_bytes(row.content)
    else:
        path = row.content.absolute()
    return {"file_name": str(path), columns[1] or TRANSCRIPTS[0]: row.text}


def check_parts(output: Path) -> None:
    """Raise `FileExistsError` if a part to be replaced contains files that no compression wrote."""
    for folder in filter(Path.is_dir, (output / part for part in PARTS)):
        refuse_foreign(folder, find_added(folder) if folder.name == "recovered" else find_foreign(folder))


def begin(output: Path, record: dict[str, Any]) -> None:
    """Write the options, and remove the files of an earlier call."""
    for part in PARTS:
        path = output / part
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    output.mkdir(parents=True, exist_ok=True)
    write_json(record, output / PLAN_FILE)
