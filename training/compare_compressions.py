#!/usr/bin/env python
r"""Compress one teacher in several ways, recover each at equal steps, and print one table of test scores.

    python training/compare_compressions.py opus-mt-de-en --train-file train.jsonl --validation-file validation.jsonl \
        --test-file test.jsonl --source-lang de --target-lang en --output-dir runs/compare \
        --ratios 2 4 --methods paper all --max-steps 1000 --max-tokens 4096 --bf16 --learning-rate 1e-3

For every ratio, method of conversion, calibration seed, and number of encoder groups, the script scores the converted
model. It then trains the model from its converted and from random weights (`--starts`), on labels alone and with the
teacher (`--trainings`; none: no training). Steps and seed are equal. Each model is compared with the teacher, with the
interval of the paired bootstrap. The table is also written to `results.json`. For several ratios, `results.png`
(`results-dark.png` for dark pages) shows BLEU of every test against size.
Unknown options are passed to `run_translation.py`. A second call skips complete runs.

    python training/compare_compressions.py … --methods paper layers all fewer=decoder_layers=1 small=small.yaml \
        --starts converted --trainings distilled --engines ctranslate2-int8 onnx-int8

With `--engines`, the teacher and all models (trained if there are `--trainings`) are then exported in these forms. The
script measures tokens per second on one core (one sentence at a time, all models in turn), megabytes, and BLEU of the
engine's translations of the first test. `engines.json` has these figures, and `engines.png` and `engines-dark.png`
show BLEU against speed and size for each form.

A method is one of METHODS, or a new one such as `narrow-each=method=narrow,study.allocation=uniform`: a name, then
fields of `CompressionOptions`, or of `StudyOptions` after `study.`, with values in YAML. Errors are weighted on the
training text, unless the method is `paper`. With `calibration=null` the calibration text is self-generated.
`layers` keeps whole layers as they are, the ratio's share of each stack, and factorizes nothing (DistilBART, Shleifer
and Rush 2020). A method with a `ratio` runs once for all `--ratios`: `6-1=ratio=null,decoder_layers=1` keeps one layer
of the decoder, refitted to the output of the whole stack, or unchanged with `,study.refit=false`. `small=small.yaml`
names a recipe, which is trained from random weights with the teacher's tokenizer.

All models have the same options of training. A method or a recipe can change them:
`svd=method=paper,training.learning_rate=1e-3`. The table has the minutes of every training.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

from arguments import ScriptParser, as_options, check_names, load_recipe, read_value, seed_number
from common import run_script, test_names
from comparing import compare_outputs, run_all, save_pictures, score_key, show
from rich.markup import escape
from rich.table import Table
from run_translation import ARGUMENTS
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from lightformers_hf import CompressionOptions, StudyOptions, convert
from lightformers_hf.checkpoints.teacher import read
from lightformers_hf.evaluation.comparison import EngineComparison, check_forms, compare_engines
from lightformers_hf.evaluation.quality import Difference
from lightformers_hf.loading import load_pretrained, unique_parameters
from lightformers_hf.text import load_parallel

TRAIN = Path(__file__).with_name("run_translation.py")
EACH = {"study.allocation": "uniform", "study.refit": False}  # every matrix by itself, the ratio for each
TEACHER, SCORES = "teacher", ("bleu", "chrf")
LOOKS = list(itertools.product("os^D", [f"C{number}" for number in range(6)]))  # markers and colours of curves
# Options of a recipe that the comparison sets for all runs: model, data, tokenizer and teacher.
NOT_OF_TRAINING = re.compile(
    r"model|\w+_(file|split|lang|prefix)|dataset_name|tokenizer_name|model_name_or_path|config_name|teacher|output_dir"
)
DENSE = {"pattern": dict.fromkeys(("embedding", "attention", "ffn"), "dense"), "study.refit": False}
METHODS: dict[str, Mapping[str, object]] = {
    "paper": {"method": "paper"},  # plain SVD, the ratio for every matrix
    "inputs": {"study.weighting": "inputs", **EACH},
    "loss": EACH,
    "product": {"study.attention_method": "narrow", **EACH},
    "neurons": {"study.ffn_method": "narrow", **EACH},
    "matrices": {"method": "low-rank", "study.refit": False},  # one budget for all matrices
    "budget": {"study.refit": False},  # heads and neurons among the choices
    "narrow": {"method": "narrow"},  # no low-rank factors, except of the embedding matrix
    "refit": {"study.joint": False},
    "all": {},
    "own-text": {"calibration": None},  # weighted on self-generated text
    "layers": DENSE,  # fewer layers, and nothing else
}
Method = Mapping[str, object] | Path


@dataclass(frozen=True)
class Run:
    """One cell of the table. `trained` is `None` for an untrained model, `ratio` if the method contains the size."""

    ratio: float | None
    method: str
    seed: int
    groups: int | None
    start: str = "converted"
    trained: str | None = None

    @property
    def conversion_folder(self) -> str:
        """Folder of the converted model that the run starts from."""
        parts = [f"ratio-{self.ratio:g}", self.method] if self.ratio else [self.method]
        parts += [f"groups-{self.groups}"] if self.groups else []
        return "-".join([*parts, f"seed-{self.seed}"] if self.seed else parts)

    @property
    def folder(self) -> str:
        """Folder of the run's scores."""
        return f"{self.conversion_folder}/{self.start}-{self.trained or 'untrained'}"


def parse_methods(methods: list[str]) -> dict[str, Method]:
    """{name: fields of the conversion} of arguments `name` or `name=field=value,field=value`; a recipe's is its path.

    Raises `ValueError` for unknown names and fields, and `FileNotFoundError` for a missing recipe.
    """
    known = [field.name for field in fields(CompressionOptions)]
    known += [f"study.{field.name}" for field in fields(StudyOptions)]
    known += [f"training.{field.name}" for each in ARGUMENTS for field in fields(each) if field.init]
    parsed: dict[str, Method] = {}
    for text in methods:
        name, separator, rest = text.partition("=")
        if name in parsed:
            raise ValueError(f"--methods names {name!r} twice: give every method a name of its own.")
        if not separator:
            check_names([name], list(METHODS), "There is no method")
            parsed[name] = METHODS[name]
            continue
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(f"--methods {text}: expected a name of letters, digits, '-', '_' and '.' before '='.")
        if rest.endswith(".yaml"):
            load_recipe(rest)
            parsed[name] = Path(rest)
            continue
        given = dict(part.partition("=")[::2] for part in re.split(r",(?=[a-z_.]+=)", rest))
        check_names(given, known, f"--methods {name}: no option")
        parsed[name] = {field: read_value(value, f"--methods {name}: {field}") for field, value in given.items()}
    return parsed


def list_runs(args: argparse.Namespace, methods: dict[str, Method]) -> list[Run]:
    """Every run that the arguments ask for: each model as converted, then each start with each way of training."""
    runs = []
    converted = {name: method for name, method in methods.items() if not isinstance(method, Path)}
    for ratio, (method, given), groups in itertools.product(
        [None, *args.ratios], converted.items(), [None, *args.encoder_groups]
    ):
        if (ratio is None) != ("ratio" in given):
            continue
        for seed in args.calibration_seeds if reads_text(given) else args.calibration_seeds[:1]:
            runs.append(Run(ratio, method, seed, groups))
            runs += [Run(ratio, method, seed, groups, *how) for how in itertools.product(args.starts, args.trainings)]
    recipes = [name for name in methods if name not in converted]
    for name, trained in itertools.product(recipes, args.trainings):
        runs.append(Run(None, name, 0, None, "random", trained))
    return runs


def reads_text(given: Mapping[str, object]) -> bool:
    """Whether a method weights errors or refits layers, unlike `paper` and methods that only remove layers."""
    conversion = {name: value for name, value in given.items() if not re.match(r"training\.|\w+_layers", name)}
    as_they_are = conversion == {"ratio": None, "study.refit": False}
    return given.get("method") != "paper" and given is not DENSE and not as_they_are


def conversion_of(
    run: Run, given: Mapping[str, object], args: argparse.Namespace
) -> tuple[dict[str, object], StudyOptions]:
    """How the teacher of a run is converted, with the fields `given` of its method; `ValueError` if it cannot be."""
    study = {name.removeprefix("study."): value for name, value in given.items() if name.startswith("study.")}
    options = {name: value for name, value in given.items() if not name.startswith(("study.", "training."))}
    options |= {"source_lang": args.source_lang, "target_lang": args.target_lang, "encoder_groups": run.groups}
    if given is DENSE:
        layers = {f"{stack}_layers": max(1, round(args.layers[stack] / run.ratio)) for stack in args.layers}
        options |= layers
    else:
        options.setdefault("ratio", run.ratio)
        if reads_text(given):
            study.setdefault("calibration_seed", run.seed)
            options.setdefault("calibration", args.train_file)
    CompressionOptions(**options)
    return options, StudyOptions(**study)


def options(run: Run, method: Method, args: argparse.Namespace, others: list[str]) -> list[str]:
    """Arguments of `run_translation.py` for a run."""
    model = ["--model-name-or-path", str(Path(args.output_dir, run.conversion_folder, "model"))]
    if isinstance(method, Path):
        model = ["--config", str(method), "--tokenizer-name", args.teacher]
    parts = ["--save-strategy", "no", *test_options(model, args, others)]
    if run.trained:
        parts += ["--train-file", args.train_file, "--max-steps", str(args.max_steps)]
        if args.validation_file:
            parts += ["--validation-file", args.validation_file]
        if run.trained == "distilled":
            parts += ["--teacher", args.teacher, "--distillation-alpha", str(args.distillation_alpha)]
            width = args.width if isinstance(method, Path) else load_pretrained(AutoConfig, model[1]).hidden_size
            weight = args.hidden_weight if width == args.width else 0  # other widths do not compare
            parts += ["--hidden-weight", str(weight)]
        if run.start == "random" and not isinstance(method, Path):
            parts += ["--from-scratch"]
        parts += as_options(own_training(method))  # the last of two equal options has priority
    return parts


def own_training(method: Method) -> dict[str, object]:
    """The options of `run_translation.py` that a method names for itself: a recipe's without its model and data."""
    if isinstance(method, Path):
        return {name: value for name, value in load_recipe(method).items() if not NOT_OF_TRAINING.fullmatch(name)}
    given = {name.partition("training.")[2]: value for name, value in method.items()}
    return {name: value for name, value in given.items() if name}


def test_options(model: list[str], args: argparse.Namespace, others: list[str]) -> list[str]:
    """Arguments of `run_translation.py` to test the model of the options `model`."""
    parts = [*model, "--report-to", "none", *others, "--test-file", *args.test_file]
    return [*parts, "--source-lang", args.source_lang, "--target-lang", args.target_lang]


def curves_of(rows: list[dict]) -> dict[str, list[dict]]:
    """{curve of a picture: its rows}: every method, sharing, start and training is one, of all ratios and seeds."""
    curves: dict[str, list[dict]] = {}
    for row in rows:
        words = [row["method"], f"{row['groups']} groups" if row["groups"] else "", row["trained"] or ""]
        words += ["from random" if row["start"] == "random" else ""]
        curves.setdefault(", ".join(filter(None, words)), []).append(row)
    return curves


def draw(rows: list[dict], folder: Path, tests: list[str]) -> None:
    """BLEU against parameters, a panel for every test: a curve for every method and training, a line for the teacher.

    For several seeds it is the mean. Written to `results.png` and, for dark pages, `results-dark.png`.
    """

    def paint(panels: list) -> None:
        for axes, test in zip(panels, tests, strict=True):
            score = score_key(test, "bleu")
            for name, points in curves_of(rows).items():
                bleu: dict[int, list[float]] = {}
                for row in sorted(points, key=lambda row: row["parameters"]):
                    bleu.setdefault(row["parameters"], []).append(row[score])
                axes.plot([size / 1e6 for size in bleu], [fmean(scores) for scores in bleu.values()], "o-", label=name)
            teacher = rows[0][score] - rows[0][score_key(test, "bleu_to_teacher")]["value"]
            axes.axhline(teacher, color="0.5", linestyle="--", linewidth=1, label=TEACHER)
            axes.set(xlabel="parameters, millions", xscale="log", title=test if len(tests) > 1 else "")
        panels[0].set(ylabel="BLEU")

    save_pictures(folder / "results", paint, columns=len(tests))


def deploy(rows: list[dict], args: argparse.Namespace) -> EngineComparison:
    """Speed, size and quality of the teacher and the rows' models in `--engines`; writes `engines.json`, a picture."""
    folder = Path(args.output_dir)
    runs = [Run(**{field.name: row[field.name] for field in fields(Run)}) for row in rows]
    places = [folder / (run.folder if run.trained else f"{run.conversion_folder}/model") for run in runs]
    found = compare_engines(
        args.teacher, list(map(str, places)), forms=args.engines, data=args.test_file[0], metrics=SCORES,
        source=args.source_lang, target=args.target_lang, cores=(1,), batch_sizes=(1,), beams=(1,), progress=True,
    )  # fmt: skip
    (folder / "engines.json").write_text(json.dumps(found.to_dict(), indent=1) + "\n", encoding="utf-8")
    labelled = [row | {"label": label} for row, label in zip(rows, found.models[1:], strict=True)]
    curves = {TEACHER: found.models[:1]}
    curves |= {name: [row["label"] for row in points] for name, points in curves_of(labelled).items()}
    draw_engines(found, curves, args.engines, folder / "engines")
    return found


def draw_engines(found: EngineComparison, curves: dict[str, list[str]], engines: list[str], picture: Path) -> None:
    """BLEU against tokens a second and against megabytes, of {curve: its models}: a row of panels for each engine."""
    sizes = {
        (deployed.model, deployed.form): (deployed.disk_bytes / 1e6, deployed.scores["bleu"])
        for deployed in found.deployed
    }
    speeds = {(timing.model, timing.form): timing.speed.tokens_per_second for timing in found.timings}

    def paint(panels: list) -> None:
        for form, (by_speed, by_size) in zip(engines, zip(panels[::2], panels[1::2], strict=True), strict=True):
            for (name, models), (marker, colour) in zip(curves.items(), LOOKS, strict=False):
                look = {"marker": marker, "color": colour, "label": name}
                points = [(speeds[model, form], *sizes[model, form]) for model in models]
                by_speed.plot(*zip(*sorted((speed, bleu) for speed, _, bleu in points), strict=True), **look)
                by_size.plot(*zip(*sorted((size, bleu) for _, size, bleu in points), strict=True), **look)
            by_speed.set(xlabel=f"tokens a second in {form}, one core", ylabel="BLEU", xscale="log")
            by_size.set(xlabel=f"megabytes in {form}", xscale="log")

    save_pictures(picture, paint, rows=len(engines), columns=2)


def convert_all(runs: list[Run], methods: dict[str, Method], args: argparse.Namespace) -> None:
    """Convert the teacher in every way that a run starts from, unless that is there already.

    Raises `ValueError` if a folder's model was made otherwise.
    """
    ways = {
        run.conversion_folder: conversion_of(run, method, args)
        for run in runs
        if not isinstance(method := methods[run.method], Path)
    }
    for name, (settings, study) in ways.items():
        model, record = (Path(args.output_dir, name, part) for part in ("model", "conversion.json"))
        asked = settings | {f"study.{field}": value for field, value in vars(study).items()}
        if not model.exists():
            convert(args.teacher, model, study=study, **settings)
            record.write_text(json.dumps(asked, indent=1) + "\n", encoding="utf-8")
        elif record.is_file() and json.loads(record.read_text(encoding="utf-8")) != asked:
            raise ValueError(f"{model} was converted otherwise ({record}): choose another output folder.")


def count_parameters(run: Run, args: argparse.Namespace) -> int:
    """Unique parameters of a run's model."""
    report = Path(args.output_dir, run.conversion_folder, "model", "compression.json")
    if not report.exists():
        return unique_parameters(load_pretrained(AutoModelForSeq2SeqLM, Path(args.output_dir, run.folder)))
    return json.loads(report.read_text(encoding="utf-8"))["parameters_after"]


def minutes_of(folder: Path) -> float:
    """How long the training took whose output is in a folder."""
    history = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return next(entry["train_runtime"] for entry in history if "train_runtime" in entry) / 60


def measure(
    runs: list[Run], methods: dict[str, Method], args: argparse.Namespace, others: list[str]
) -> list[dict[str, object]]:
    """Convert and run everything that is missing. Return each run and the teacher, with parameters and scores."""
    folder = Path(args.output_dir)
    convert_all(runs, methods, args)
    words_of = {TEACHER: test_options(["--model-name-or-path", args.teacher], args, others)}
    words_of |= {run.folder: options(run, methods[run.method], args, others) for run in runs}
    tests = dict(zip(test_names(args.test_file), args.test_file, strict=True))
    found = run_all(TRAIN, {name: (words, folder / name) for name, words in words_of.items()}, jobs=args.jobs)
    references = {
        name: load_parallel(file, source=args.source_lang, target=args.target_lang)["target"][:]
        for name, file in tests.items()
    }
    rows = []
    for run in runs:
        row = {**vars(run), "parameters": count_parameters(run, args)}
        row["minutes"] = minutes_of(folder / run.folder) if run.trained else None
        for name in tests:
            row |= {score_key(name, score): found[run.folder][f"{name}_{score}"] for score in SCORES}
            compared = compare_outputs(folder / run.folder, folder / TEACHER, name, references[name])
            row[score_key(name, "bleu_to_teacher")] = asdict(compared)
        rows.append(row)
    return rows


def tabulate(rows: list[dict], tests: list[str]) -> Table:
    """A line for every run and test."""
    titles = ["ratio", "method", "seed", "groups", "parameters", "start", "training", "minutes"]
    titles += ["test"] if len(tests) > 1 else []
    table = Table(*titles, "sacreBLEU", "chrF", "sacreBLEU to the teacher, 95 %")
    for row, test in itertools.product(rows, tests):
        ratio = f"{row['ratio']:g}" if row["ratio"] else "-"
        shown = [ratio, row["method"], str(row["seed"]), str(row["groups"] or "-")]
        shown += [f"{row['parameters']:,}", row["start"], row["trained"] or "none"]
        shown += [f"{row['minutes']:.1f}" if row["minutes"] is not None else "-"]
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
    help_of_methods = f"{', '.join(METHODS)}, or NAME=FIELD=VALUE,…, or NAME=RECIPE.yaml"
    help_of_engines = "as `lightformers benchmark engines` has them: ctranslate2-int8, onnx-int8, transformers, …"
    parser.add_argument("--methods", nargs="+", default=["paper", "all"], metavar="METHOD", help=help_of_methods)
    parser.add_argument("--calibration-seeds", type=seed_number, nargs="+", default=[0])
    parser.add_argument("--encoder-groups", type=int, nargs="*", default=[], help="besides no sharing")
    parser.add_argument("--starts", nargs="+", choices=["converted", "random"], default=["converted", "random"])
    parser.add_argument("--trainings", nargs="*", choices=["labels", "distilled"], default=["labels", "distilled"])
    parser.add_argument("--max-steps", type=int, default=1000)
    parser.add_argument("--distillation-alpha", type=float, default=0.7)
    parser.add_argument("--hidden-weight", type=float, default=0.0)
    parser.add_argument("--engines", nargs="+", default=[], metavar="FORM", help=help_of_engines)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; above 1 each has one thread")
    args, others = parser.parse_known_args(argv)

    if (len(args.ratios) > 1 or args.engines) and find_spec("matplotlib") is None:
        raise ValueError("Pictures need matplotlib: pip install 'lightformers_hf[demo]'")
    check_forms(args.engines)
    methods = parse_methods(args.methods)
    config = read(args.teacher).config
    args.layers = {stack: getattr(config, f"{stack}_layers") for stack in ("encoder", "decoder")}
    args.width = config.hidden_size
    tests = test_names(args.test_file)
    rows = measure(list_runs(args, methods), methods, args, others)
    folder = Path(args.output_dir)
    (folder / "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if len(args.ratios) > 1:
        draw(rows, folder, tests)
    show(tabulate(rows, tests))
    if args.engines:
        final = [row for row in rows if row["trained"] or not args.trainings]
        show(*deploy(final, args).tables())


if __name__ == "__main__":
    run_script(main)
