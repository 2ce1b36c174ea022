"""From a trained checkpoint to a small one that is ready to be deployed: every step after the other, as one call."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from ..conversion.convert import convert
from ..conversion.options import CompressionOptions
from ..evaluation.benchmarks.engines import EngineComparison, compare_engines
from ..evaluation.evaluate import evaluate_model, find_columns
from ..evaluation.quality import check_metrics, choose_metrics
from ..export import export
from ..export.engines import deployment_names
from ..export.write import check_engine
from ..files import RECORD_FILE, atomic_output, find_foreign, read_json, refuse_foreign, write_json, write_whole
from ..languages import split_language, split_prefix
from ..loading import hide_bars
from ..text import load_parallel, load_text
from .record import claim, find_added
from .recover import recover
from .settings import check_minutes

if TYPE_CHECKING:
    from rich.table import Table

PLAN_FILE = "compress.json"  # what was asked for
MOST_HELD_OUT = 500  # pairs of validation and test each, where no others are given
SCORED = 500  # sentences of the test that are translated in every engine
PARTS = ("data", "converted", "recovered", "deployed", "results.json", "engines.json", "report.html", PLAN_FILE)


@dataclass(frozen=True)
class Texts:
    """Files of the three parts of the text; what is missing, `recover` does without."""

    train: str | None
    validation: str | None
    test: str


def compress(
    teacher: str | Path,
    output: str | Path,
    *,
    data: str | None = None,
    validation: str | None = None,
    test: str | None = None,
    minutes: float = 30,
    to: str = "ctranslate2",
    quantization: str | None = "int8",
    source_lang: str | None = None,
    target_lang: str | None = None,
    translations: bool | None = None,
    metrics: Iterable[str] = (),
    report_to: tuple[str, ...] = (),
    seed: int = 0,
    overwrite: bool = False,
    progress: bool = True,
    **options: Any,
) -> tuple[dict[str, Any], list[Table]]:
    """Convert, recover, evaluate, export, and report. An interrupted call goes on when it is made again.

    `output` gets `converted`, `recovered` (to push, or to train on), `deployed` (for the engine), `results.json`,
    `engines.json`, with matplotlib `report.html`; and `data`, where `validation` or `test` had to be set apart.

    Args:
        teacher: the checkpoint, a folder or a name on the Hub.
        data: sentence pairs, or with `test` text of one language or none: see `recover`.
        validation, test: pairs that the best model is chosen by, and those that are looked at last.
        to, quantization: of `export`; source_lang, target_lang: as of `CompressionOptions`.
        metrics: names of `METRICS` for every measurement; `recover` chooses the best model by the first.
        minutes, translations, report_to, seed: of `recover`.
        options: how far: `size`, `params` or `ratio`, and other fields of `CompressionOptions`.

    Returns: what came out, as `files`, `recovery` and `engines` (`EngineComparison`); and this last one as tables.

    Raises:
        ValueError, FileNotFoundError, FileExistsError: as its steps, and where what is to be written is another's.
    """
    languages: dict[str, Any] = {"source_lang": source_lang, "target_lang": target_lang}
    CompressionOptions(**options, **languages)
    check_engine(to, quantization)
    check_minutes(minutes)
    metrics = check_metrics(metrics)
    output, given = Path(os.path.expanduser(output)), Texts(data, validation, test or "")
    training: dict[str, Any] = {"minutes": minutes, "translations": translations, "seed": seed}
    asked: dict[str, Any] = {"teacher": str(teacher), "data": data, "validation": validation, "test": test, "to": to}
    asked |= {"quantization": quantization, "metrics": metrics or None}
    asked = json.loads(json.dumps(asked | training | languages | options))  # as read
    overwrite = overwrite or is_only_planned(output)
    record = claim(output, asked, file=PLAN_FILE, overwrite=overwrite, inputs=[teacher, data, validation, test])
    if overwrite:
        check_parts(output)
    columns = plain_columns(teacher, languages)
    texts = read_texts(given, columns, seed)
    tested = load_parallel(test, source=columns[0], target=columns[1])["target"][:] if test else [b for _, b in texts]
    choose_metrics(metrics, tested, tested)  # which refuses those that mean nothing, before the work begins
    if overwrite or not (output / PLAN_FILE).exists():
        begin(output, record)
    files = split_texts(texts, output / "data", columns, given)
    form = (to, quantization if quantization != "float32" else None)
    options |= {name: value for name, value in languages.items() if value is not None}
    training |= {"metrics": metrics, "report_to": report_to}
    work = Work(str(teacher), output, files, columns, form, options, training, progress)
    with hide_bars():
        work.do()
    return work.results()


@dataclass(frozen=True)
class Work:
    """The steps of a compression, each of which makes a part of the folder `output`.

    Attributes:
        teacher: folder or Hub name.
        files, columns: the text, and its two columns.
        form: engine and quantization.
        options: of `convert`.
        training: of `recover`.
    """

    teacher: str
    output: Path
    files: Texts
    columns: tuple[str, str]
    form: tuple[str, str | None]
    options: dict[str, Any]
    training: dict[str, Any]
    progress: bool

    @property
    def steps(self) -> dict[str, Callable[[], object]]:
        """{what is made: what makes it}, in order."""
        steps: dict[str, Callable[[], object]] = {
            "converted": self.convert,
            "recovered": self.recover,
            "results.json": self.evaluate,
            "deployed": self.deploy,
            "engines.json": self.compare,
        }
        return steps | ({"report.html": self.report} if find_spec("matplotlib") else {})

    def do(self) -> None:
        """Do the steps whose part is not there yet."""
        for number, (name, step) in enumerate(self.steps.items(), start=1):
            complete = is_complete(self.output / name)
            if self.progress:
                place = f"{self.output / name}" + (" (there already)" if complete else "")
                tqdm.write(f"{number}/{len(self.steps)} {place}")
            if not complete:
                step()

    def results(self) -> tuple[dict[str, Any], list[Table]]:
        """What `compress` returns."""
        found = {name: str(self.output / name) for name in PARTS if (self.output / name).exists()}
        recovery = read_json(self.output / "recovered" / RECORD_FILE)["result"]
        comparison = EngineComparison.read(read_json(self.output / "engines.json"))
        return {"files": found, "recovery": recovery, "engines": comparison.to_dict()}, comparison.tables()

    @property
    def light(self) -> str:
        """The folder of the model when it is trained."""
        return str(self.output / "recovered")

    @property
    def named(self) -> dict[str, Any]:
        """What measurements are told alike."""
        metrics = self.training["metrics"]
        return {"source": self.columns[0], "target": self.columns[1], "progress": self.progress, "metrics": metrics}

    def convert(self) -> None:
        """Make the teacher smaller."""
        text = {"calibration": self.files.train} if CompressionOptions(**self.options).reads_text else {}
        convert(self.teacher, self.output / "converted", progress=self.progress, **text | self.options)

    def recover(self) -> None:
        """Train the result with its teacher, or go on with that."""
        texts = {"data": self.files.train, "validation": self.files.validation}
        languages = {name.removesuffix("_lang"): self.options.get(name) for name in ("source_lang", "target_lang")}
        asked = texts | languages | self.training | {"progress": self.progress}
        recover(self.output / "converted", self.light, teacher=self.teacher, **asked)

    def evaluate(self) -> None:
        """Score it beside its teacher on the test."""
        device = str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"
        settings: dict[str, Any] = {"device": device, "speed": False, "num_beams": 1}
        found = evaluate_model(self.light, self.files.test, self.teacher, **self.named, **settings)
        write_json(found.to_dict(), self.output / "results.json")

    def deploy(self) -> None:
        """Export it."""
        export(self.light, self.output / "deployed", to=self.form[0], quantization=self.form[1])

    def compare(self) -> None:
        """Measure both models, as they are and deployed: speed, size, quality."""
        deployed = "-".join(filter(None, self.form))
        forms = ["transformers", deployed if deployed in deployment_names() else self.form[0]]
        settings: dict[str, Any] = {"cores": (1,), "batch_sizes": (1,), "beams": (1,), "max_samples": SCORED}
        source, target = find_columns(self.light, *self.columns)  # which keeps a prefix that was given
        settings |= self.named | {"source": source, "target": target}
        found = compare_engines(self.teacher, [self.light], forms=forms, data=self.files.test, **settings)
        write_json(found.to_dict(), self.output / "engines.json")

    def report(self) -> None:
        """Write the page."""
        from ..evaluation.page import report_page  # needs matplotlib

        results = [self.output / "results.json", self.output / "engines.json"]
        page = report_page(self.light, teacher=self.teacher, data=self.files.test, results=results, **self.named)
        with write_whole(self.output / "report.html") as file:
            file.write(page.encode())


def is_only_planned(output: Path) -> bool:
    """Whether an earlier call, whose wish perhaps could not be met, made nothing in `output` but plan and texts."""
    return {path.name for path in output.glob("*")} - {"data"} == {PLAN_FILE}


def is_complete(part: Path) -> bool:
    """Whether a step's output is there; that of a recovery grows while it trains."""
    if (part / RECORD_FILE).is_file():
        return "result" in read_json(part / RECORD_FILE)
    return part.exists()


def plain_columns(teacher: str | Path, languages: dict[str, str | None]) -> tuple[str, str]:
    """The columns of the two languages; a prefix that the teacher wants is added when they are read."""
    named = (split_language(languages["source_lang"])[0], split_language(languages["target_lang"])[0])
    source, target = find_columns(str(teacher), *named)
    return split_prefix(source)[0], target


def read_texts(given: Texts, columns: tuple[str, str], seed: int) -> list[tuple[str, str]] | None:
    """The pairs to be trained on in a random order, every source once; `None` where none are to be set apart.

    Raises `ValueError` where there are too few, or where other pairs that are given are none.
    """
    for part, pairs in {"train": given.validation, "test": given.test}.items():
        if pairs:
            load_parallel(pairs, source=columns[0], target=columns[1], split=part)
    data, test = given.train, given.test
    if given.validation and test:
        return None
    if data is None or "target" not in load_text(data, source=None, target=None, default=columns).column_names:
        if not test:
            what = f"{data} is of one language" if data else "Neither data nor test is given"
            raise ValueError(
                f"{what}: give pairs as data, or test, with pairs to measure on (then data may be left out)"
            )
        return None
    pairs = load_parallel(data, source=columns[0], target=columns[1]).shuffle(seed=seed)
    once = dict(zip(pairs["source"], pairs["target"], strict=True))
    if len(once) < 20:
        raise ValueError(
            f"{data} holds {len(once)} different pairs: twenty and more are needed, or a validation and a test"
        )
    return list(once.items())


def split_texts(texts: list[tuple[str, str]] | None, folder: Path, columns: tuple[str, str], given: Texts) -> Texts:
    """Files of training, validation and test: those that were given, the others from `texts`, written to `folder`.

    An interrupted compression goes on with what it wrote there.
    """
    if texts is None:
        return given
    size = min(MOST_HELD_OUT, len(texts) // 10)
    first, second = (0 if one else size for one in (given.validation, given.test))
    bounds = {"validation": (0, first), "test": (first, first + second), "train": (first + second, len(texts))}
    if not folder.is_dir():
        with atomic_output(folder) as temporary:
            for part, (start, end) in bounds.items():
                if start == end:
                    continue
                rows = (dict(zip(columns, pair, strict=True)) for pair in texts[start:end])
                lines = "".join(json.dumps({"translation": row}, ensure_ascii=False) + "\n" for row in rows)
                (temporary / f"{part}.jsonl").write_text(lines, encoding="utf-8")
    made = {part: str(folder / f"{part}.jsonl") for part in bounds}
    return Texts(made["train"], given.validation or made["validation"], given.test or made["test"])


def check_parts(output: Path) -> None:
    """Raise `FileExistsError` where a part that is to be made anew holds what no compression wrote."""
    for folder in filter(Path.is_dir, (output / part for part in PARTS)):
        refuse_foreign(folder, find_added(folder) if folder.name == "recovered" else find_foreign(folder))


def begin(output: Path, record: dict[str, Any]) -> None:
    """Write down what is asked for; what an earlier call wrote goes."""
    for part in PARTS:
        path = output / part
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    output.mkdir(parents=True, exist_ok=True)
    write_json(record, output / PLAN_FILE)
