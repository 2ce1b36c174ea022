"""The demo from beginning to end: corpus, teacher, compression, recovery, export, measurement, picture."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import transformers
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..conversion.convert import convert
from ..evaluation.benchmarks.engines import compare_engines
from ..evaluation.quality import score, signatures
from ..evaluation.speed import speed_ratio
from ..evaluation.translate import translate
from ..export import export
from ..files import json_text, read_json, write_whole
from ..folders import atomic_output, find_foreign, refuse_foreign
from ..loading import load_model, unique_parameters, weight_bytes
from ..processors import IdleThreads
from ..text import load_parallel
from .stages import DemoSettings, time_step, write_corpus, write_recovered, write_teacher
from .wait import TIMED, Wait

FOLDERS = ("corpus", "teacher", "compressed", "calibrated", "recovered-svd", "recovered-random", "deployed")
SETTINGS, RESULTS, PICTURE = "settings.json", "results.json", "picture.png"
MODELS = {  # folder → how the table calls it
    "teacher": "teacher",
    "compressed": "plain SVD, untrained",
    "calibrated": "calibrated, untrained",
    "recovered-random": "random weights, trained",
    "recovered-svd": "calibrated, trained as long",
}
ENGINE = ("ctranslate2", "int8")
DEPLOYED = {  # row of the results → the model that was exported, how the table calls it
    "teacher-deployed": ("teacher", "teacher, int8 in CTranslate2"),
    "deployed": ("recovered-svd", "recovered, int8 in CTranslate2"),
}
SAMPLES = 4


def run_demo(
    output: Path, settings: DemoSettings | None = None, *, fresh: bool = False, console: Console | None = None
) -> dict:
    """Run the demo into the folder `output`, or the rest of it, and return what `results.json` then holds.

    Every stage is a folder (or file) of `output` that appears when it is complete; those that exist are not made
    again. So an interrupted run goes on where it stopped, and a second run only shows the results.

    Args:
        fresh: remove what an earlier demo made in `output`, and begin again.
        console: where to print (default: the terminal).

    Raises:
        ValueError: the extra `demo` is not installed, or `output` holds a demo of other settings.
        FileExistsError: `output` is a file, or holds something that no demo made.
    """
    settings, console = settings or DemoSettings(), console or Console()
    _check_extra()
    _claim(output, settings, fresh)
    transformers.utils.logging.disable_progress_bar()  # a bar for loading a few megabytes says nothing
    steps = _steps(output, settings)
    missing, wait = [name for name in steps if not (output / name).exists()], None
    for number, (name, (title, make)) in enumerate(steps.items(), start=1):
        if wait is None and name in missing and name in TIMED:
            wait = _expect(output, missing, settings, console)
        console.print(f"\n[bold]{number}/{len(steps)}[/bold] {escape(title)}", highlight=False)
        done = f"{output / name} is there already"
        if name in missing:
            start = time.perf_counter()
            make(output / name)
            seconds = time.perf_counter() - start
            left = wait.finish(name, seconds) if wait else ""
            done = f"{output / name} ({seconds:.0f} s{left})"
        console.print(f"    [green]✓[/green] {escape(done)}", highlight=False)
    results = read_json(output / RESULTS)
    _show(results, output, console)
    return results


def _steps(output: Path, settings: DemoSettings) -> dict[str, tuple[str, Callable[[Path], object]]]:
    """{name in `output`: (what is said of the step, what makes it)}, in order."""
    corpus, teacher, _, calibrated, recovered, *_ = (output / name for name in FOLDERS)
    recovery = (calibrated, teacher, corpus, settings)
    return {
        "corpus": (
            "Write a German-English corpus from locale data",
            lambda folder: _write_whole(folder, write_corpus, settings),
        ),
        "teacher": (
            f"Train a Marian teacher for {settings.teacher_steps} steps",
            lambda folder: _write_whole(folder, write_teacher, corpus, settings),
        ),
        "compressed": (
            f"Compress it by truncated SVD at ratio {settings.ratio:g}",
            lambda folder: _compress(teacher, folder, settings, method="paper"),
        ),
        "calibrated": (
            "Compress it as far, weighing errors on sample sentences",
            lambda folder: _compress(
                teacher,
                folder,
                settings,
                calibration=str(corpus / "train.jsonl"),
                calibration_samples=settings.calibration_pairs,
            ),
        ),
        "recovered-svd": (
            f"Win the quality back: {settings.recovery_steps} steps from there",
            lambda folder: _write_whole(folder, write_recovered, *recovery, random_start=False),
        ),
        "recovered-random": (
            "For comparison: as many steps from random weights",
            lambda folder: _write_whole(folder, write_recovered, *recovery, random_start=True),
        ),
        "deployed": (
            "Export what was recovered, for CTranslate2 in int8",
            lambda folder: export(recovered, folder, to=ENGINE[0], quantization=ENGINE[1]),
        ),
        RESULTS: (
            "Measure quality, size and speed",
            lambda file: _write_file(file, json_text(_measure(output, settings), RESULTS).encode()),
        ),
        PICTURE: ("Draw the picture", lambda file: _draw(file, output)),
    }


def _compress(teacher: Path, folder: Path, settings: DemoSettings, **options: Any) -> None:
    convert(teacher, folder, ratio=settings.ratio, **options)


def _write_file(file: Path, content: bytes) -> None:
    with write_whole(file) as opened:
        opened.write(content)


def _draw(file: Path, output: Path) -> None:
    from .picture import draw  # needs the extra `demo`

    starts = {"from the teacher, by SVD": output / "recovered-svd", "from random weights": output / "recovered-random"}
    with write_whole(file) as opened:
        draw(opened, starts=starts, results=read_json(output / RESULTS))


def _check_extra() -> None:
    missing = [name for name in ("babel", "num2words", "matplotlib", "ctranslate2") if find_spec(name) is None]
    if missing:
        raise ValueError(f"The demo needs {', '.join(missing)}: pip install 'lightformers_hf[demo]'")


def _claim(output: Path, settings: DemoSettings, fresh: bool) -> None:
    """Make `output` the folder of a demo with these settings, or find that it is one."""
    if output.exists() and not output.is_dir():
        raise FileExistsError(f"{output} is a file: give another folder with --output.")
    marker = output / SETTINGS
    if not marker.exists() and output.is_dir() and any(output.iterdir()):
        raise FileExistsError(f"{output} is not empty and holds no demo: give another folder with --output.")
    if marker.exists() and not asdict(settings).keys() & read_json(marker).keys():
        raise FileExistsError(f"{marker} is no demo's: give another folder with --output.")
    if fresh and marker.exists():
        for folder in filter(Path.is_dir, (output / name for name in FOLDERS)):
            refuse_foreign(folder, find_foreign(folder))
        for name in (PICTURE, RESULTS, *reversed(FOLDERS)):
            path = output / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        marker.unlink()
    if marker.exists() and json.loads(marker.read_text(encoding="utf-8")) != asdict(settings):
        raise ValueError(
            f"{output} holds a demo of other settings: start over with --fresh, or give another folder with --output."
        )
    if not marker.exists():
        output.mkdir(parents=True, exist_ok=True)
        _write_file(marker, json_text(asdict(settings), SETTINGS).encode())


def _write_whole(folder: Path, write: Callable[..., None], *arguments: object, **options: object) -> None:
    """Call `write` on a folder that becomes `folder` when it is complete."""
    with atomic_output(folder) as temporary:
        write(temporary, *arguments, **options)


def _expect(output: Path, missing: list[str], settings: DemoSettings, console: Console) -> Wait:
    """Time some training steps, and say how long the stages take that are missing."""
    console.print("\nHow long will it take? A few steps of training, timed:", highlight=False)
    wait = Wait(missing, settings, time_step(output / "corpus", settings))
    console.print(f"    {wait} for all of it, on this machine, as busy as it is now", highlight=False)
    return wait


def _measure(output: Path, settings: DemoSettings) -> dict:
    """Quality on the test split, sizes, speed beside the teacher, and some translations."""
    data = str(output / "corpus" / "test.jsonl")
    test = load_parallel(data, source="de", target="en")
    sources, references = list(test["source"]), list(test["target"])
    rows, outputs = {}, {}
    for name in MODELS:
        model, tokenizer = load_model(output / name)
        with IdleThreads():
            outputs[name] = translate(sources, model, tokenizer, batch_size=100, progress=True)
        rows[name] = score(outputs[name], references) | {
            "parameters": unique_parameters(model),
            "bytes": weight_bytes(output / name),
        }
    chosen = range(0, len(sources), max(1, len(sources) // SAMPLES))[:SAMPLES]
    samples = [
        {"source": sources[i], "reference": references[i]} | {name: outputs[name][i] for name in MODELS}
        for i in chosen
    ]
    for name, fields in _deployed_rows(output, data, settings).items():
        rows[name] = rows.get(name, {}) | fields
    signature = signatures(["bleu"], references)["bleu"]
    return {"test_pairs": len(sources), "bleu_signature": signature, "models": rows, "samples": samples}


def _deployed_rows(output: Path, data: str, settings: DemoSettings) -> dict[str, dict[str, float]]:
    """Of teacher and recovered model, the speed in transformers, and all of them exported: {row: its fields}.

    Speeds are ratios to the teacher under `generate()`, on one core, one sentence at a time.
    """
    exported = "-".join(ENGINE)
    found = compare_engines(
        str(output / "teacher"),
        [str(output / "recovered-svd")],
        forms=("transformers", exported),
        cores=(1,),
        batch_sizes=(1,),
        beams=(1,),
        runs=settings.speed_runs,
        sentences=settings.speed_sentences,
        data=data,
        metrics=("bleu", "chrf"),
        source="de",
        target="en",
        progress=True,
    )
    rows: dict[str, dict[str, float]] = {}
    places = {(place.model, place.form): place for place in found.deployed}
    names = {(model, exported): row for row, (model, _) in DEPLOYED.items()}
    baseline = found.timings[0].speed
    for timing in found.timings:
        key = (timing.model, timing.form)
        speed = {
            "tokens_per_second": timing.speed.tokens_per_second,
            "speed_ratio": speed_ratio(timing.speed, baseline),
        }
        size = places[key].scores | {"bytes": places[key].disk_bytes}
        rows[names.get(key, timing.model)] = speed | (size if key in names else {})
    return rows


def _show(results: dict, output: Path, console: Console) -> None:
    """Print the table, sample translations and what to do next."""
    teacher = results["models"]["teacher"]
    table = Table(
        title=f"{results['test_pairs']} held-out sentences, German → English", caption=results["bleu_signature"]
    )
    table.add_column("")
    for column in ("BLEU", "chrF", "parameters", "MB", "speed"):
        table.add_column(column, justify="right")
    for name, title in (MODELS | {row: title for row, (_, title) in DEPLOYED.items()}).items():
        row = results["models"][name]
        table.add_row(
            title,
            f"{row['bleu']:.1f}",
            f"{row['chrf']:.1f}",
            f"{row['parameters'] / 1e6:.2f}M" if "parameters" in row else "",
            f"{row['bytes'] / 1e6:.1f} (1/{teacher['bytes'] / row['bytes']:.1f})",
            f"{row['speed_ratio']:.1f}x" if "speed_ratio" in row else "",
            end_section=name == list(MODELS)[-1],
        )
    console.print()
    console.print(table)
    for sample in results["samples"]:
        console.print()
        for name, label in {
            "source": "German",
            "reference": "reference",
            "teacher": "teacher",
            "recovered-svd": "recovered",
        }.items():
            console.print(f"[dim]{label:>10}[/dim]  {escape(sample[name])}", highlight=False)
    folder = escape(str(output))
    console.print(
        f"\nPicture: {folder}/{PICTURE}, numbers: {folder}/{RESULTS}. Next:\n"
        f"  echo 'Der Zug nach Prag fährt um 09:20 Uhr ab.' | lightformers translate {folder}/deployed\n"
        f"  lightformers plan {folder}/teacher --ratio 4\n"
        f"  lightformers compress Helsinki-NLP/opus-mt-de-en small --data yours.jsonl --ratio 4",
        highlight=False,
        soft_wrap=True,
    )
