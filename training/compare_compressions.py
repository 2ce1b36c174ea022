#!/usr/bin/env python
r"""Compress one teacher in several ways, recover each at equal steps, and print one table of test scores.

    python training/compare_compressions.py opus-mt-de-en --train-file train.jsonl --validation-file validation.jsonl \
        --test-file test.jsonl --source-lang de --target-lang en --output-dir runs/compare \
        --ratios 2 4 --methods paper all --max-steps 1000 --max-tokens 4096 --bf16 --learning-rate 1e-3

For every ratio, method of conversion, calibration seed, and number of encoder groups, it scores the converted model
as it is, then trains it from its converted weights and from random ones (`--starts`), on labels alone and with the
teacher (`--trainings`; none: no training), same steps, same seed. Each is compared with the teacher, with the interval
of the paired bootstrap. The table also goes to `results.json`, and where there are several ratios a picture, BLEU
against size, to `results.png` (and `results-dark.png`, for dark pages).
Options it does not know go to `run_translation.py`. A second call skips the runs that are complete.

A method is one of METHODS, or one of your own: `narrow-each=method=narrow,study.allocation=uniform` is a name, then
fields of `CompressionOptions`, and behind `study.` of `StudyOptions`, their values in YAML. Errors are weighed on the
training text, unless the method is the paper's or says `calibration=null`: then on text of the teacher's own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path

import yaml
from arguments import ScriptParser, check_names, seed_number
from common import run_script, test_names
from comparing import compare_outputs, run_once, score_key
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm

from lightformers_hf import CompressionOptions, StudyOptions, convert
from lightformers_hf.evaluation.quality import Difference
from lightformers_hf.text import load_parallel

TRAIN = Path(__file__).with_name("run_translation.py")
EACH = {"study.allocation": "uniform", "study.refit": False}  # every matrix by itself, the ratio for each
TEACHER, SCORES = "teacher", ("bleu", "chrf")
METHODS: dict[str, dict[str, object]] = {
    "paper": {"method": "paper"},  # plain SVD, the ratio for every matrix
    "rows": {"study.weighting": "rows", **EACH},
    "inputs": {"study.weighting": "inputs", **EACH},
    "loss": EACH,
    "product": {"study.attention_method": "narrow", **EACH},
    "neurons": {"study.ffn_method": "narrow", **EACH},
    "matrices": {"method": "low-rank", "study.refit": False},  # one budget for all matrices
    "budget": {"study.refit": False},  # heads and neurons among the choices
    "narrow": {"method": "narrow"},  # no products of thin matrices, but the table's
    "all": {},
    "own-text": {"calibration": None},  # weighed on what the teacher makes of random tokens
}


@dataclass(frozen=True)
class Run:
    """One cell of the table. `trained` is `None` for a model scored as it was converted."""

    ratio: float
    method: str
    seed: int
    groups: int | None
    start: str = "converted"
    trained: str | None = None

    @property
    def conversion_folder(self) -> str:
        """Folder of the converted model that the run starts from."""
        parts = [f"ratio-{self.ratio:g}", self.method]
        parts += [f"groups-{self.groups}"] if self.groups else []
        return "-".join([*parts, f"seed-{self.seed}"] if self.seed else parts)

    @property
    def folder(self) -> str:
        """Folder of the run's scores."""
        return f"{self.conversion_folder}/{self.start}-{self.trained or 'untrained'}"


def parse_methods(methods: list[str]) -> dict[str, dict[str, object]]:
    """{name: fields of the conversion} of arguments `name` or `name=field=value,field=value`.

    Raises `ValueError` for names and fields that are not known.
    """
    known = [field.name for field in fields(CompressionOptions)]
    known += [f"study.{field.name}" for field in fields(StudyOptions)]
    parsed: dict[str, dict[str, object]] = {}
    for text in methods:
        name, separator, rest = text.partition("=")
        if not separator:
            check_names([name], list(METHODS), "There is no method")
            parsed[name] = METHODS[name]
            continue
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(f"--methods {text}: expected a name of letters, digits, '-', '_' and '.' before '='.")
        given = dict(part.partition("=")[::2] for part in re.split(r",(?=[a-z_.]+=)", rest))
        check_names(given, known, f"--methods {name}: no option")
        parsed[name] = {field: yaml.safe_load(value) for field, value in given.items()}
    return parsed


def list_runs(args: argparse.Namespace, methods: dict[str, dict[str, object]]) -> list[Run]:
    """Every run that the arguments ask for: each model as converted, then each start with each way of training."""
    runs = []
    for ratio, (method, given), groups in itertools.product(
        args.ratios, methods.items(), [None, *args.encoder_groups]
    ):
        samples = args.calibration_seeds[:1] if given.get("method") == "paper" else args.calibration_seeds
        for seed in samples:
            runs.append(Run(ratio, method, seed, groups))
            runs += [Run(ratio, method, seed, groups, *how) for how in itertools.product(args.starts, args.trainings)]
    return runs


def conversion_of(
    run: Run, given: dict[str, object], args: argparse.Namespace
) -> tuple[dict[str, object], StudyOptions]:
    """How the teacher of a run is converted, with the fields `given` of its method; `ValueError` if it cannot be."""
    study = {name.removeprefix("study."): value for name, value in given.items() if name.startswith("study.")}
    options = {name: value for name, value in given.items() if not name.startswith("study.")}
    if options.get("method") != "paper":
        study.setdefault("calibration_seed", run.seed)
        options.setdefault("calibration", args.train_file)
    options |= {"source_lang": args.source_lang, "target_lang": args.target_lang}
    options |= {"ratio": run.ratio, "encoder_groups": run.groups}
    CompressionOptions(**options)
    return options, StudyOptions(**study)


def options(run: Run, args: argparse.Namespace, others: list[str]) -> list[str]:
    """What `run_translation.py` is told for a run."""
    model = str(Path(args.output_dir, run.conversion_folder, "model"))
    parts = ["--save-strategy", "no", *test_options(model, args, others)]
    if run.trained:
        parts += ["--train-file", args.train_file, "--max-steps", str(args.max_steps)]
        if args.validation_file:
            parts += ["--validation-file", args.validation_file]
        if run.trained == "distilled":
            parts += ["--teacher", args.teacher, "--distillation-alpha", str(args.distillation_alpha)]
        if run.start == "random":
            parts += ["--from-scratch"]
    return parts


def test_options(model: str, args: argparse.Namespace, others: list[str]) -> list[str]:
    """What `run_translation.py` is told to test a model."""
    parts = ["--model-name-or-path", model, "--report-to", "none", *others, "--test-file", *args.test_file]
    return [*parts, "--source-lang", args.source_lang, "--target-lang", args.target_lang]


def draw(rows: list[dict], folder: Path, score: str) -> None:
    """BLEU (of the first test) against parameters, a curve for every method and training; the mean of several seeds.

    Written to `results.png` and, for dark pages, `results-dark.png`.
    """
    from lightformers_hf.evaluation.pages.plots import save_picture  # needs matplotlib

    curves: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        words = [row["method"], f"{row['groups']} groups" if row["groups"] else "", row["trained"] or ""]
        words += ["from random" if row["start"] == "random" else ""]
        name = ", ".join(filter(None, words))
        curves.setdefault(name, {}).setdefault(row["parameters"], []).append(row[score])

    def paint(panels: list) -> None:
        for name, points in curves.items():
            sizes = sorted(points)
            means = [sum(points[size]) / len(points[size]) for size in sizes]
            panels[0].plot([size / 1e6 for size in sizes], means, "o-", label=name)
        panels[0].set(xlabel="parameters, millions", ylabel="BLEU", xscale="log")

    for name, dark in (("results.png", False), ("results-dark.png", True)):
        save_picture(folder / name, paint, height=5, dark=dark)


def measure(
    runs: list[Run], methods: dict[str, dict[str, object]], args: argparse.Namespace, others: list[str]
) -> list[dict[str, object]]:
    """Convert and run whatever is not there yet; what every run is, its parameters, its scores, and those to beat."""
    folder, parameters = Path(args.output_dir), {}
    for name, (settings, study) in {
        run.conversion_folder: conversion_of(run, methods[run.method], args) for run in runs
    }.items():
        model, record = folder / name / "model", folder / name / "conversion.json"
        asked = settings | {f"study.{field}": value for field, value in vars(study).items()}
        if not model.exists():
            convert(args.teacher, model, study=study, **settings)
            record.write_text(json.dumps(asked, indent=1) + "\n", encoding="utf-8")
        elif record.is_file() and json.loads(record.read_text(encoding="utf-8")) != asked:
            raise ValueError(f"{model} was converted otherwise ({record}): choose another output folder.")
        parameters[name] = json.loads((model / "compression.json").read_text(encoding="utf-8"))["parameters_after"]
    jobs = {TEACHER: test_options(args.teacher, args, others)}
    jobs |= {run.folder: options(run, args, others) for run in runs}
    tests = dict(zip(test_names(args.test_file), args.test_file, strict=True))
    with ThreadPoolExecutor(args.jobs) as pool:
        done = {
            name: pool.submit(run_once, TRAIN, told, folder / name, one_thread=args.jobs > 1)
            for name, told in jobs.items()
        }
        found = {name: job.result() for name, job in tqdm(done.items(), desc="runs")}
    references = {
        name: load_parallel(file, source=args.source_lang, target=args.target_lang)["target"][:]
        for name, file in tests.items()
    }
    rows = []
    for run in runs:
        row = {**vars(run), "parameters": parameters[run.conversion_folder]}
        for name in tests:
            row |= {score_key(name, score): found[run.folder][f"{name}_{score}"] for score in SCORES}
            compared = compare_outputs(folder / run.folder, folder / TEACHER, name, references[name])
            row[score_key(name, "bleu_to_teacher")] = asdict(compared)
        rows.append(row)
    return rows


def tabulate(rows: list[dict], tests: list[str]) -> Table:
    """A line for every run and test."""
    titles = ["ratio", "method", "seed", "groups", "parameters", "start", "training"]
    titles += ["test"] if len(tests) > 1 else []
    table = Table(*titles, "BLEU", "chrF", "BLEU to the teacher, 95 %")
    for row, test in itertools.product(rows, tests):
        shown = [f"{row['ratio']:g}", row["method"], str(row["seed"]), str(row["groups"] or "-")]
        shown += [f"{row['parameters']:,}", row["start"], row["trained"] or "none"]
        shown = ([""] * len(shown) if test != tests[0] else shown) + ([escape(test)] if len(tests) > 1 else [])
        shown += [f"{row[score_key(test, score)]:.1f}" for score in SCORES]
        table.add_row(*shown, str(Difference(**row[score_key(test, "bleu_to_teacher")])))
    return table


def main(argv: list[str] | None = None) -> None:
    """Convert, run, tabulate; the table also goes to `results.json`."""
    parser = ScriptParser(__doc__)
    parser.add_argument("teacher", help="checkpoint folder or Hub name")
    for name in ("train_file", "source_lang", "target_lang", "output_dir"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--test-file", nargs="+", required=True, help="one or several")
    parser.add_argument("--validation-file")
    parser.add_argument("--ratios", type=float, nargs="+", default=[2.0, 4.0])
    help_of_methods = f"{', '.join(METHODS)}, or NAME=FIELD=VALUE,…"
    parser.add_argument("--methods", nargs="+", default=["paper", "all"], metavar="METHOD", help=help_of_methods)
    parser.add_argument("--calibration-seeds", type=seed_number, nargs="+", default=[0])
    parser.add_argument("--encoder-groups", type=int, nargs="*", default=[], help="besides no sharing")
    parser.add_argument("--starts", nargs="+", choices=["converted", "random"], default=["converted", "random"])
    parser.add_argument("--trainings", nargs="*", choices=["labels", "distilled"], default=["labels", "distilled"])
    parser.add_argument("--max-steps", type=int, default=1000)
    parser.add_argument("--distillation-alpha", type=float, default=0.7)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; above 1 each has one thread")
    args, others = parser.parse_known_args(argv)

    if len(args.ratios) > 1 and find_spec("matplotlib") is None:
        raise ValueError("The picture of several ratios needs matplotlib: pip install 'lightformers_hf[demo]'")
    methods = parse_methods(args.methods)
    tests = test_names(args.test_file)
    rows = measure(list_runs(args, methods), methods, args, others)
    folder = Path(args.output_dir)
    (folder / "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if len(args.ratios) > 1:
        draw(rows, folder, score_key(tests[0], "bleu"))
    Console().print(tabulate(rows, tests))


if __name__ == "__main__":
    run_script(main)
