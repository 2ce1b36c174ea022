"""`lightformers report`: one self-contained HTML page about a compressed model."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import Any

import jinja2

from ..arguments import ReportArguments
from ..conversion.report import CompressionReport, read_report
from ..data_files import check_split
from ..files import REPORT_FILE, STATE_FILE, as_kind, read_json
from ..loading import load_pair, printable_name, resolve_source
from ..options import takes
from ..text import fingerprint, load_parallel
from . import plots
from .comparison import EngineComparison
from .evaluate import Evaluation, Measurements, choose_columns, warn_of_overlap
from .plots import Paint, save_picture, style
from .quality import check_metrics, describe, labels
from .transcribe import load_speech, read_transcribed, reads_sound, transcribe
from .translate import translate

KINDS = {"embedding": "embedding", "attention": "attention", "ffn": "feed-forward"}
PHONE = 5  # inches of a picture for phones


@takes(ReportArguments)
def report_page(call: ReportArguments) -> str:
    """The page as text of HTML, with all pictures inside and no script: it loads nothing from anywhere.

    The plan and the error of every layer come from `compression.json`, the training from `trainer_state.json`,
    and other parts from the arguments.

    The first of `metrics` is drawn; by default all that the results have are shown.

    Args:

    Raises:
        FileNotFoundError, ValueError: files that are not there or do not belong together, or nothing to report.
    """
    check_split(call)
    metrics, folder = check_metrics(call.metrics), resolve_source(call.model)
    report = read_report(folder / REPORT_FILE)
    measured = [_read_result(Path(file)) for file in call.results]
    pictures = _pictures(folder, report, [result for result in measured if isinstance(result, Evaluation)], metrics)
    sheets = [  # a table for every setting that a benchmark of engines measured in
        {"title": f"Deployed: {setting}", "caption": " ".join(result.notes()), "rows": rows}
        for result in measured
        if isinstance(result, EngineComparison)
        for setting, rows in result.rows().items()
    ]
    translations = _translate_samples(call, call.data) if call.data else []
    if not (report or pictures or sheets or translations):
        raise ValueError(
            f"{folder} holds neither {REPORT_FILE} nor {STATE_FILE}, so there is nothing to report: give what convert "
            "or a training run wrote, or --results, or --data"
        )
    styles = {"light": style(dark=False), "dark": style(dark=True)}
    options: dict[str, Any] = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
    loader = jinja2.PackageLoader(__package__, "")
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, **options)
    return environment.get_template("page.html").render(
        title=printable_name(call.model),
        colors={name: (settings["figure.facecolor"], settings["text.color"]) for name, settings in styles.items()},
        plan=report,
        kinds=KINDS,
        options=json.dumps(report and report.options, indent=1),
        pictures=pictures,
        sheets=sheets,
        samples=translations,
        teacher=call.teacher,
        data=call.data and Path(call.data).name,
    )


def _pictures(
    folder: Path, report: CompressionReport | None, results: Sequence[Evaluation], metrics: list[str]
) -> list[dict[str, Any]]:
    pictures = []
    if report and plots.has_errors(report.matrices):
        caption = f"Error of a matrix, relative to its norm: {report.measure}. Dots are matrices, lines means of a "
        caption += "block."
        paint = partial(plots.errors, matrices=report.matrices)
        pictures.append(_draw("Error of every layer", paint, caption, columns=2))
    if results:
        pictures.append(_draw_trade_off(results, metrics))
    losses, qualities = plots.training_curves(read_log(folder / STATE_FILE))
    if losses:
        paint = partial(plots.training, losses=losses, qualities=qualities)
        caption = f"{STATE_FILE}: values that the training logged."
        pictures.append(_draw("Training", paint, caption, columns=2 if qualities else 1))
    return pictures


def _draw(title: str, paint: Paint, caption: str, *, columns: int, rows: Sequence[list[str]] = ()) -> dict[str, Any]:
    """PNGs in base64, for light and for dark pages, and for phones, with one panel below the other; a table below."""
    picture: dict[str, Any] = {"title": title, "caption": caption, "rows": rows}
    phone: dict[str, Any] = {"rows": columns, "width": PHONE, "height": 3.6 * columns}
    for width, shape in {"": {"columns": columns}, "narrow_": phone}.items():
        for scheme in ("light", "dark"):
            file = io.BytesIO()
            save_picture(file, paint, dark=scheme == "dark", **shape)
            picture[width + scheme] = base64.b64encode(file.getvalue()).decode()
    return picture


def _read_result(file: Path) -> Evaluation | EngineComparison:
    """Content of a file of `lightformers evaluate --json` or `lightformers benchmark engines --json`."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(content, dict) and "timings" in content:
            return EngineComparison.read(content)
        result = as_kind(content, Evaluation, "it")
        for side in filter(None, (result.model, result.teacher)):
            side.name = Path(side.name).name
        return result
    except FileNotFoundError:
        raise FileNotFoundError(f"{file} is not there: `lightformers evaluate … --json {file}` writes it") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{file} holds no results, as `lightformers evaluate … --json FILE` and `lightformers benchmark engines` "
            f"write them ({error})"
        ) from None


def _conditions(result: Evaluation) -> str:
    """The text that was translated, and how it was searched: only under the same ones do results compare."""
    options = "".join(f", {name} {value}" for name, value in sorted(result.generation.items()))
    return f"{result.sentences} sentences of {Path(result.data).name}{options}"


def _draw_trade_off(results: Sequence[Evaluation], metrics: list[str]) -> dict[str, Any]:
    """Quality against parameters and speed: relative to the teacher where all were measured beside one."""
    conditions = sorted(set(map(_conditions, results)))
    if len(conditions) > 1:
        raise ValueError(
            "results compare only on the same text, with the same search, but these are of "
            f"{' and of '.join(conditions)}: evaluate all with the same options"
        )
    shared = [name for name in results[0].model.scores if all(name in result.model.scores for result in results)]
    if missing := [name for name in metrics if name not in shared] or ([] if shared else ["any metric"]):
        raise ValueError(
            f"results do not all have {missing[0]}, only {', '.join(shared) or 'different ones'}: evaluate all with "
            "the same --metric"
        )
    metrics = metrics or shared
    names = labels(metrics)
    relative = all(result.speed_ratio for result in results)
    points: dict[tuple[str, int, int], tuple[Measurements, float | None, bool]] = {}
    for number, result in enumerate(results, start=1):
        for point, ratio in ((result.teacher, 1.0), (result.model, result.speed_ratio)):
            if point:
                # A teacher is one point; models of one name and size may be several, of different seeds.
                is_teacher = point is result.teacher
                key = (point.name, point.parameters, 0 if is_teacher else number)
                points[key] = point, ratio if relative else point.tokens_per_second, is_teacher
    has_speed = any(speed for _, speed, _ in points.values())
    measure = "times as fast as the teacher" if relative else "tokens/s, one core"
    table = [["", *names.values(), "parameters", "megabytes", measure]]
    for key in sorted(points, key=lambda key: -key[1]):
        point, speed, _ = points[key]
        sizes = [f"{point.parameters:,}", f"{point.disk_bytes / 1e6:,.1f}", "" if speed is None else f"{speed:.2f}"]
        table.append([point.name, *(f"{point.scores[name]:.1f}" for name in metrics), *sizes])
    if not has_speed:
        table = [row[:-1] for row in table]
    title = "Quality against size" + (" and speed" if has_speed else "")
    paint = partial(plots.trade_off, points=list(points.values()), metric=metrics[0], speed=measure)
    variants = {name: text for name, text in results[0].signatures.items() if name in metrics}
    caption = ". ".join([conditions[0], *describe(variants)])
    return _draw(title, paint, caption, columns=2 if has_speed else 1, rows=table)


def _translate_samples(call: ReportArguments, data: str) -> list[dict[str, Any]]:
    """Sentences evenly spread over the data, translated by the model and, as it searches, by its teacher.

    Of `parts`, the model's words in runs, each has whether the teacher's differ.
    """
    given = {"num_beams": call.num_beams, "max_new_tokens": call.max_new_tokens}
    generation: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if reads_sound(resolve_source(call.model)):
        sounds = read_transcribed(data, column=call.target, split=call.split)
        sounds = [sounds[i * len(sounds) // call.samples] for i in range(min(call.samples, len(sounds)))]
        sources, references = ([getattr(sound, field) for sound in sounds] for field in ("name", "text"))
        outputs = {
            role: transcribe(sounds, *load_speech(resolve_source(checkpoint)), language=call.source, **generation)
            for role, checkpoint in (("model", call.model), ("teacher", call.teacher))
            if checkpoint
        }
        return _compare_samples(sources, references, outputs)
    loaded = load_pair(call.model, call.teacher, source=call.source, target=call.target)
    model, tokenizer = loaded["model"]
    source, target = choose_columns(call.model, model, tokenizer, call.source, call.target)
    pairs = load_parallel(data, source=source, target=target, split=call.split)
    count = min(call.samples, len(pairs))
    pairs = pairs.select([i * len(pairs) // count for i in range(count)])
    sources = list(pairs["source"])
    warn_of_overlap(call.model, data, sources, map(fingerprint, sources))
    generation = {"num_beams": model.generation_config.num_beams or 1, "progress": call.progress} | generation
    outputs = {role: translate(sources, *pair, split=False, **generation) for role, pair in loaded.items()}
    return _compare_samples(sources, pairs["target"], outputs)


def _compare_samples(
    sources: Sequence[str], references: Sequence[str], outputs: dict[str, list[str]]
) -> list[dict[str, Any]]:
    """Rows of the table of samples."""
    theirs = outputs.get("teacher", [None] * len(sources))
    return [
        {"source": text, "reference": reference, "teacher": before, "parts": _mark_differences(before, after)}
        for text, reference, before, after in zip(sources, references, theirs, outputs["model"], strict=True)
    ]


def _mark_differences(before: str | None, after: str) -> list[tuple[str, bool]]:
    """The words of `after` in runs, and whether a run is not at that place of `before`."""
    words = after.split()
    if before is None:
        return [(" ".join(words), False)]
    steps = SequenceMatcher(None, before.split(), words, autojunk=False).get_opcodes()
    return [(" ".join(words[start:end]), step != "equal") for step, _, _, start, end in steps if start < end]


def read_log(file: Path) -> list[dict[str, float]]:
    """The steps and numbers that a training logged into a `trainer_state.json`; nothing where there is no such file.

    Raises:
        ValueError: it holds something else; names the file.
    """
    content = read_json(file).get("log_history", [])
    try:
        history = as_kind(content, list[dict[str, Any]], "log_history")
        for number, entry in enumerate(history):
            as_kind(entry.get("step"), int, f"the step of entry {number}")
            for name, value in entry.items():
                if not isinstance(value, float | str | bool | None):  # floats may be NaN: a loss that diverged
                    as_kind(value, int, f"{name} of entry {number}")
    except ValueError as error:
        raise ValueError(f"{file} holds no log of a training ({error}): write it again, or remove it") from None
    return [{name: value for name, value in entry.items() if type(value) in (int, float)} for entry in history]
