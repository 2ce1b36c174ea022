"""The demo from beginning to end: corpus, teacher, compression as one call, picture."""

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

from ..evaluation.translate import load_translator, translate
from ..files import json_text, read_json, write_whole
from ..folders import atomic_output, find_foreign, refuse_foreign
from ..text import load_parallel
from ..workflows.compress import check_parts, compress
from .stages import DemoSettings, write_corpus, write_teacher

FOLDERS = ("corpus", "teacher", "small")
SETTINGS, PICTURE = "settings.json", "picture.png"
SAMPLES = 4


def run_demo(
    output: Path, settings: DemoSettings | None = None, *, fresh: bool = False, console: Console | None = None
) -> dict[str, Any]:
    """Run the demo into the folder `output`, or the rest of it, and return the results of `compress`.

    Every stage is a folder or a file of `output` that appears when it is complete. Those that exist are not made
    again: an interrupted run resumes, and a second run only shows the results.

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
    corpus, teacher, small = (output / name for name in FOLDERS)
    _run_stage(console, 1, "Write a German-English corpus from locale data", corpus, write_corpus, settings)
    title = f"Train a Marian teacher for {settings.teacher_steps} steps"
    _run_stage(console, 2, title, teacher, write_teacher, corpus, settings)
    title = f"Compress it at ratio {settings.ratio:g}, train the result for {settings.minutes:g} minutes, export it"
    console.print(f"\n[bold]3/4[/bold] {title}", highlight=False)
    test = str(corpus / "test.jsonl")
    found = compress(
        teacher,
        small,
        data=str(corpus / "train.jsonl"),
        validation=str(corpus / "validation.jsonl"),
        test=test,
        minutes=settings.minutes,
        seed=settings.seed,
        ratio=settings.ratio,
        calibration_samples=settings.calibration_pairs,
    )
    results = found.to_dict()
    console.print("\n[bold]4/4[/bold] Draw the picture", highlight=False)
    _draw(output / PICTURE, small, results)
    console.print()
    console.print(*found.engines.tables())
    _show(results, test, output, console)
    return results


def _run_stage(
    console: Console, number: int, title: str, folder: Path, write: Callable[..., None], *arguments: object
) -> None:
    """Have `write` fill a folder, which appears when it is complete; one that is there is left as it is."""
    console.print(f"\n[bold]{number}/4[/bold] {escape(title)}", highlight=False)
    done = f"{folder} is there already"
    if not folder.exists():
        start = time.perf_counter()
        with atomic_output(folder) as temporary:
            write(temporary, *arguments)
        done = f"{folder} ({time.perf_counter() - start:.0f} s)"
    console.print(f"    [green]✓[/green] {escape(done)}", highlight=False)


def _draw(file: Path, small: Path, results: dict[str, Any]) -> None:
    from .picture import draw  # needs the extra `demo`

    history = read_json(small / "recovered" / "trainer_state.json")["log_history"]
    losses = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    with write_whole(file) as opened:
        draw(opened, losses=losses, comparison=results["engines"])


def _check_extra() -> None:
    missing = [name for name in ("babel", "num2words", "matplotlib", "ctranslate2") if find_spec(name) is None]
    if missing:
        raise ValueError(f"The demo needs {', '.join(missing)}: pip install 'lightformers_hf[demo]'")


def _claim(output: Path, settings: DemoSettings, fresh: bool) -> None:
    """Make `output` the folder of a demo with these settings, or find that it is one."""
    if output.exists() and not output.is_dir():
        raise FileExistsError(f"{output} is a file: give another folder")
    marker = output / SETTINGS
    if not marker.exists() and output.is_dir() and any(output.iterdir()):
        raise FileExistsError(f"{output} is not empty and holds no demo: give another folder")
    if marker.exists() and not asdict(settings).keys() & read_json(marker).keys():
        raise FileExistsError(f"{marker} is no demo's: give another folder")
    if fresh and marker.exists():
        corpus, teacher, small = (output / name for name in FOLDERS)
        for folder in filter(Path.is_dir, (corpus, teacher)):
            refuse_foreign(folder, find_foreign(folder))
        check_parts(small)
        for path in (output / PICTURE, small, teacher, corpus):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        marker.unlink()
    if marker.exists() and json.loads(marker.read_text(encoding="utf-8")) != asdict(settings):
        raise ValueError(f"{output} holds a demo of other settings: start over with --fresh, or give another folder")
    if not marker.exists():
        output.mkdir(parents=True, exist_ok=True)
        with write_whole(marker) as opened:
            opened.write(json_text(asdict(settings), SETTINGS).encode())


def _show(results: dict[str, Any], test: str, output: Path, console: Console) -> None:
    """Print the size, some translations of the deployed model, and what to do next."""
    recovery = results["recovery"]
    console.print(
        f"\n{recovery['parameters']:,} parameters, 1/{recovery['ratio']:.1f} of the teacher's. Validation BLEU: "
        f"{recovery['before']['bleu']:.1f} after the conversion, {recovery['after']['bleu']:.1f} after the training, "
        f"teacher {recovery['teacher']['bleu']:.1f}.",
        highlight=False,
    )
    pairs = load_parallel(test, source="de", target="en")
    pairs = pairs.select(range(0, len(pairs), max(1, len(pairs) // SAMPLES))[:SAMPLES])
    model, tokenizer, _ = load_translator(str(output / "small" / "deployed"))
    said = translate(pairs["source"][:], model, tokenizer)
    for source, reference, translation in zip(pairs["source"], pairs["target"], said, strict=True):
        console.print()
        for label, text in {"German": source, "reference": reference, "translation": translation}.items():
            console.print(f"[dim]{label:>11}[/dim]  {escape(text)}", highlight=False)
    folder = escape(str(output))
    console.print(
        f"\nPicture: {folder}/{PICTURE}, report: {folder}/small/report.html. Next:\n"
        f"  echo 'Der Zug nach Prag fährt um 09:20 Uhr ab.' | lightformers translate {folder}/small/deployed\n"
        f"  lightformers plan {folder}/teacher --ratio 4\n"
        f"  lightformers compress Helsinki-NLP/opus-mt-de-en small --data yours.jsonl --ratio 4",
        highlight=False,
        soft_wrap=True,
    )
