#!/usr/bin/env python
r"""Compress one teacher in several ways, recover each at equal steps, and print one table of test scores.

    python training/compare_compressions.py opus-mt-de-en --train-file train.jsonl --validation-file validation.jsonl \
        --test-file test.jsonl --source-lang de --target-lang en --output-dir runs/compare \
        --ratios 2 4 --methods paper all --max-steps 1000 --max-tokens 4096 --bf16 --learning-rate 1e-3

For every ratio, method of conversion, calibration seed, and number of encoder groups, it scores the converted model
as it is, then trains it from its converted weights and from random ones (`--starts`), on labels alone and with the
teacher (`--trainings`; none: no training), same steps, same seed. The table also goes to `results.json`, and where
there are several ratios a picture, BLEU against size, to `results.png` (and `results-dark.png`, for dark pages).
Options it does not know go to `run_translation.py`. A second call skips the runs that are complete.
"""

from __future__ import annotations

import argparse
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from arguments import ScriptParser
from common import run_once, run_script
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from lightformers_hf import StudyOptions, convert

TRAIN = Path(__file__).with_name("run_translation.py")
EACH = StudyOptions(allocation="uniform", refit=False)
# Method and switches of the conversion. All but the first and the last are calibrated on the training text.
METHODS = {
    "paper": ("paper", StudyOptions()),  # plain SVD, the ratio for every matrix
    "rows": ("auto", replace(EACH, weighting="rows")),
    "inputs": ("auto", replace(EACH, weighting="inputs")),
    "loss": ("auto", EACH),
    "product": ("auto", replace(EACH, attention_method="product")),
    "neurons": ("auto", replace(EACH, ffn_method="neurons")),
    "matrices": ("low-rank", StudyOptions(refit=False)),  # one budget for all matrices
    "budget": ("auto", StudyOptions(refit=False)),  # heads and neurons among the choices
    "narrow": ("narrow", StudyOptions()),  # no products of thin matrices, but the table's
    "all": ("auto", StudyOptions()),
    "own-text": ("auto", StudyOptions()),  # calibrated on what the teacher makes of random tokens
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
    def converted(self) -> str:
        """Folder of the converted model that the run starts from."""
        parts = [f"ratio-{self.ratio:g}", self.method]
        parts += [f"groups-{self.groups}"] if self.groups else []
        return "-".join([*parts, f"seed-{self.seed}"] if self.seed else parts)

    @property
    def folder(self) -> str:
        """Folder of the run's scores."""
        return f"{self.converted}/{self.start}-{self.trained or 'untrained'}"


def grid(args: argparse.Namespace) -> list[Run]:
    """Every run that the arguments ask for: each model as converted, then each start with each way of training."""
    runs = []
    seeds = args.calibration_seeds
    for ratio, method, groups in itertools.product(args.ratios, args.methods, [None, *args.encoder_groups]):
        for seed in seeds if method != "paper" else seeds[:1]:
            runs.append(Run(ratio, method, seed, groups))
            runs += [Run(ratio, method, seed, groups, *how) for how in itertools.product(args.starts, args.trainings)]
    return runs


def compress(run: Run, args: argparse.Namespace, model: Path) -> None:
    """Convert the teacher as the run has it."""
    calibration = {"calibration": args.train_file, "source_lang": args.source_lang, "target_lang": args.target_lang}
    given = {} if run.method in ("paper", "own-text") else calibration
    method, study = METHODS[run.method]
    study = replace(study, calibration_seed=run.seed)
    convert(args.teacher, model, ratio=run.ratio, encoder_groups=run.groups, method=method, study=study, **given)


def options(run: Run, args: argparse.Namespace, others: list[str]) -> list[str]:
    """What `run_translation.py` is told for a run."""
    model = str(Path(args.output_dir, run.converted, "model"))
    parts = ["--model-name-or-path", model, "--test-file", args.test_file, "--report-to", "none", *others]
    parts += ["--source-lang", args.source_lang, "--target-lang", args.target_lang]
    if run.trained:
        parts += ["--train-file", args.train_file, "--max-steps", str(args.max_steps), "--save-strategy", "no"]
        if args.validation_file:
            parts += ["--validation-file", args.validation_file]
        if run.trained == "distilled":
            parts += ["--teacher", args.teacher, "--distillation-alpha", str(args.distillation_alpha)]
        if run.start == "random":
            parts += ["--from-scratch"]
    return parts


def draw(rows: list[dict], folder: Path) -> None:
    """BLEU against parameters, one curve for every method and way of training; the mean of several seeds.

    Written to `results.png` and, for dark pages, `results-dark.png`.
    """
    from lightformers_hf.evaluation.pages.plots import save_picture  # needs matplotlib

    curves: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        words = [row["method"], f"{row['groups']} groups" if row["groups"] else "", row["trained"] or ""]
        words += ["from random" if row["start"] == "random" else ""]
        name = ", ".join(filter(None, words))
        curves.setdefault(name, {}).setdefault(row["parameters"], []).append(row["bleu"])

    def paint(panels: list) -> None:
        for name, points in curves.items():
            sizes = sorted(points)
            means = [sum(points[size]) / len(points[size]) for size in sizes]
            panels[0].plot([size / 1e6 for size in sizes], means, "o-", label=name)
        panels[0].set(xlabel="parameters, millions", ylabel="BLEU", xscale="log")

    for name, dark in (("results.png", False), ("results-dark.png", True)):
        save_picture(folder / name, paint, height=5, dark=dark)


def main(argv: list[str] | None = None) -> None:
    """Convert, run, tabulate; the table also goes to `results.json`."""
    parser = ScriptParser(__doc__)
    parser.add_argument("teacher", help="checkpoint folder or Hub name")
    for name in ("train_file", "test_file", "source_lang", "target_lang", "output_dir"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--validation-file")
    parser.add_argument("--ratios", type=float, nargs="+", default=[2.0, 4.0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["paper", "all"])
    parser.add_argument("--calibration-seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--encoder-groups", type=int, nargs="*", default=[], help="besides no sharing")
    parser.add_argument("--starts", nargs="+", choices=["converted", "random"], default=["converted", "random"])
    parser.add_argument("--trainings", nargs="*", choices=["labels", "distilled"], default=["labels", "distilled"])
    parser.add_argument("--max-steps", type=int, default=1000)
    parser.add_argument("--distillation-alpha", type=float, default=0.7)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; above 1 each has one thread")
    args, others = parser.parse_known_args(argv)

    if len(args.ratios) > 1 and find_spec("matplotlib") is None:
        raise ValueError("The picture of several ratios needs matplotlib: pip install 'lightformers_hf[demo]'")
    folder = Path(args.output_dir)
    runs = grid(args)
    parameters = {}
    for run in {run.converted: run for run in runs}.values():
        model = folder / run.converted / "model"
        if not model.exists():
            compress(run, args, model)
        parameters[run.converted] = json.loads((model / "compression.json").read_text())["parameters_after"]
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = [
            pool.submit(run_once, TRAIN, options(run, args, others), folder / run.folder, one_thread=args.jobs > 1)
            for run in runs
        ]
        scores = {run: job.result() for run, job in zip(runs, tqdm(jobs, desc="runs"), strict=True)}

    table = Table("ratio", "method", "seed", "groups", "parameters", "start", "training", "BLEU", "chrF")
    rows = []
    for run, result in scores.items():
        measured = {score: result[f"test_{score}"] for score in ("bleu", "chrf")}
        rows.append({**vars(run), "parameters": parameters[run.converted], **measured})
        shown = [f"{run.ratio:g}", run.method, str(run.seed), str(run.groups or "-")]
        shown += [f"{parameters[run.converted]:,}", run.start, run.trained or "none"]
        table.add_row(*shown, *(f"{score:.1f}" for score in measured.values()))
    (folder / "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if len(args.ratios) > 1:
        draw(rows, folder)
    Console().print(table)


if __name__ == "__main__":
    run_script(main)
