#!/usr/bin/env python
r"""Compress one teacher in several ways, recover each at equal steps, and print one table of test scores.

    python training/compare_compressions.py opus-mt-de-en --train_file train.jsonl --validation_file validation.jsonl \
        --test_file test.jsonl --source_lang de --target_lang en --output_dir runs/compare \
        --ratios 2 4 --encoder_groups 3 --max_steps 1000 --max_tokens 4096 --bf16 --learning_rate 1e-3

For every ratio, without and with `--encoder_groups`, it scores the converted model as it is, then trains it from its
converted weights and from random weights (`--starts`), on labels alone and with the teacher (`--trainings`), same steps, same
seed.
Options it does not know go to `run_translation.py`. A second call skips the runs that are complete.
"""

from __future__ import annotations

import argparse
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from common import run_once, run_script
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from lightformers_hf import convert

TRAIN = Path(__file__).with_name("run_translation.py")


@dataclass(frozen=True)
class Run:
    """One cell of the table. `trained` is `None` for a model scored as it was converted."""

    ratio: float
    groups: int | None
    start: str = "svd"
    trained: str | None = None

    @property
    def converted(self) -> str:
        """Folder of the converted model that the run starts from."""
        return f"ratio-{self.ratio:g}" + (f"-groups-{self.groups}" if self.groups else "")

    @property
    def folder(self) -> str:
        """Folder of the run's scores."""
        return f"{self.converted}/{self.start}-{self.trained or 'untrained'}"


def grid(args: argparse.Namespace) -> list[Run]:
    """Every run that the arguments ask for: each model as converted, then each start with each way of training."""
    runs = []
    for ratio, groups in itertools.product(args.ratios, [None, *args.encoder_groups]):
        runs.append(Run(ratio, groups))
        runs += [Run(ratio, groups, *how) for how in itertools.product(args.starts, args.trainings)]
    return runs


def options(run: Run, args: argparse.Namespace, others: list[str]) -> list[str]:
    """What `run_translation.py` is told for a run."""
    model = str(Path(args.output_dir, run.converted, "model"))
    parts = ["--model_name_or_path", model, "--test_file", args.test_file, "--report_to", "none", *others]
    parts += ["--source_lang", args.source_lang, "--target_lang", args.target_lang]
    if run.trained:
        parts += ["--train_file", args.train_file, "--max_steps", str(args.max_steps), "--save_strategy", "no"]
        if args.validation_file:
            parts += ["--validation_file", args.validation_file]
        if run.trained == "distilled":
            parts += ["--teacher", args.teacher, "--distillation_alpha", str(args.distillation_alpha)]
        if run.start == "random":
            parts += ["--from_scratch"]
    return parts


def main(argv: list[str] | None = None) -> None:
    """Convert, run, tabulate; the table also goes to `results.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", help="checkpoint folder or Hub name")
    for name in ("train_file", "test_file", "source_lang", "target_lang", "output_dir"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--validation_file")
    parser.add_argument("--ratios", type=float, nargs="+", default=[2.0, 4.0])
    parser.add_argument("--encoder_groups", type=int, nargs="*", default=[], help="besides no sharing")
    parser.add_argument("--paper", action="store_true", help="convert as the paper does, without calibration")
    parser.add_argument("--starts", nargs="+", choices=["svd", "random"], default=["svd", "random"])
    parser.add_argument("--trainings", nargs="+", choices=["labels", "distilled"], default=["labels", "distilled"])
    parser.add_argument("--max_steps", type=int, default=1000)
    parser.add_argument("--distillation_alpha", type=float, default=0.7)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; above 1 each has one thread")
    args, others = parser.parse_known_args(argv)

    folder = Path(args.output_dir)
    runs = grid(args)
    parameters = {}
    for run in dict.fromkeys(Run(run.ratio, run.groups) for run in runs):
        model = folder / run.converted / "model"
        if not model.exists():
            convert(
                args.teacher, model, ratio=run.ratio, encoder_groups=run.groups, paper=args.paper,
                calibration=None if args.paper else args.train_file,
            )  # fmt: skip
        parameters[run.converted] = json.loads((model / "compression.json").read_text())["parameters_after"]
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = [
            pool.submit(run_once, TRAIN, options(run, args, others), folder / run.folder, one_thread=args.jobs > 1)
            for run in runs
        ]
        scores = {run: job.result() for run, job in zip(runs, tqdm(jobs, desc="runs"), strict=True)}

    table = Table("ratio", "encoder groups", "parameters", "start", "training", "BLEU", "chrF")
    rows = []
    for run, result in scores.items():
        rows.append(
            {
                **vars(run),
                "parameters": parameters[run.converted],
                **{k: result[f"test_{k}"] for k in ("bleu", "chrf")},
            }
        )
        table.add_row(
            f"{run.ratio:g}",
            str(run.groups or "-"),
            f"{parameters[run.converted]:,}",
            run.start,
            run.trained or "none",
            f"{result['test_bleu']:.1f}",
            f"{result['test_chrf']:.1f}",
        )
    (folder / "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    Console().print(table)


if __name__ == "__main__":
    run_script(main)
