#!/usr/bin/env python
r"""Train several models with equal data, tokenizer and number of steps, and print one table of their test scores.

    python training/compare_architectures.py translation --tokenizer-name opus-mt-de-en --seeds 1 2 3 \
        --models transformer=training/recipes/multi30k/transformer.yaml \
        narrow=training/recipes/multi30k/transformer.yaml,d_model=128,encoder_ffn_dim=512,decoder_ffn_dim=512 \
        lightformer-svd=converted --train-file train.jsonl --test-file test.jsonl --source-lang de --target-lang en \
        --output-dir runs/architectures --max-steps 1500 --jobs 2
    python training/compare_architectures.py clm --models transformer=training/recipes/wikitext2/transformer.yaml \
        subformer=training/recipes/wikitext2/subformer.yaml --tokenizer-name words \
        --train-file train.txt --test-file test.txt --output-dir runs/language

    python training/compare_architectures.py translation --learning-rates 3.5e-4 7e-4 1.4e-3 --max-steps 15000 \
        --early-stopping-patience 5 --eval-steps 500 --predict-with-generate False \
        --validation-file validation.jsonl --test-file test_2016.jsonl test_2017.jsonl …
    python training/compare_architectures.py @training/studies/subformer_table1.txt --tokenizer-name bpe …

`@file` stands for the options in a file, where `#` begins a comment. `training/studies` has the papers' small
experiments.

A model is a recipe (`.yaml`: shapes and options of the training), which starts from random weights. It may also be a
folder with weights, which is trained further (`{seed}` in its name is the run's seed), or a `.json` file or a folder
without weights. Fields of its configuration follow after commas, `field=value`. Other options are passed to
`run_translation.py`, `run_summarization.py` or `run_clm.py` and have priority over those of recipes. `--config` among
them is for the models without a recipe. Every model is trained once for each seed. With several `--learning-rates`,
each model gets the rate with the lowest validation loss at the first seed, after `--rate-steps` steps where these are
given, for example a fifth of the whole training. A second call skips complete runs, and
resumes an interrupted run if `--save-strategy` made it write checkpoints.

Besides the scores the table has unique parameters. For translation it also has two speeds on one core, as ratios to
the first model; all models are timed in turn. The first is the speed of decoding test sentences of average length,
all to that length. The second is the speed of a training step in fp32 on 16 test pairs. `--speed-runs 0`
measures no speeds, and keeps those of `results.json` if they have the same first model. For translation each model's
BLEU is compared with the first one's, with the interval of the paired bootstrap (first seed). `results.json` has every
run. `curves.png` (`curves-dark.png` for dark pages) shows the validation losses of runs that were evaluated meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shlex
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

from arguments import ScriptParser, dash_option, note, seed_number
from benchmark_architectures import training_speed
from common import run_script, test_names
from comparing import compare_outputs, run_all, save_pictures, score_key, show, spread
from rich.markup import escape
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

import lightformers_hf  # noqa: F401  registers the architectures with the Auto classes
from lightformers_hf.evaluation.quality import Difference
from lightformers_hf.evaluation.speed import speed_ratio, tokens_per_second, typical_sentences
from lightformers_hf.loading import load_model, load_pretrained, unique_parameters
from lightformers_hf.text import load_parallel

SEED = 42  # unless others are given
SCRIPTS = {"translation": "run_translation.py", "summarization": "run_summarization.py", "clm": "run_clm.py"}
SCORES = {
    "translation": {"bleu": "sacreBLEU", "chrf": "chrF"},
    "summarization": {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"},
    "clm": {"perplexity": "perplexity"},
}

SPEEDS = ("tokens_per_second", "speed_ratio", "step_speed_ratio")


@dataclass(frozen=True)
class Model:
    """A model of `--models`: a file or folder, and fields that replace those of its configuration."""

    path: str
    fields: tuple[str, ...] = ()

    def path_for(self, seed: int) -> Path:
        """The path, for a run with `seed`."""
        return Path(self.path.replace("{seed}", str(seed)))

    def options(self, seed: int) -> list[str]:
        """Arguments of the training script for the model."""
        path = self.path_for(seed)
        if path.suffix == ".yaml":
            source = "--config"
        else:
            weights = path.is_dir() and any(any(path.glob(kind)) for kind in ("*.safetensors", "pytorch_model*.bin"))
            source = "--model-name-or-path" if weights else "--config-name"
        return [source, str(path), *(f"--model.{field}" for field in self.fields)]


def parse_models(models: list[str], seeds: list[int]) -> dict[str, Model]:
    """{name: model} of `name=path,field=value,…` arguments. Raises `ValueError` or `FileNotFoundError`."""
    parsed: dict[str, Model] = {}
    for text in models:
        name, separator, rest = text.partition("=")
        path, *fields = re.split(r",(?=[a-z_]+=)", rest)
        if not separator or not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(f"--models {text}: expected name=path, the name of letters, digits, '-', '_' and '.'.")
        if name in parsed:
            raise ValueError(f"--models names {name!r} twice: give every model a name of its own.")
        parsed[name] = Model(path, tuple(fields))
        for folder in map(parsed[name].path_for, seeds):
            if not folder.exists():
                raise FileNotFoundError(
                    f"No model {folder}: give a recipe, a folder of a checkpoint, or a .json file of shapes."
                )
    return parsed


@dataclass(frozen=True)
class Run:
    """A model trained once; `rate` is its learning rate, if it has been asked for several."""

    name: str
    seed: int
    rate: float | None = None


def options(run: Run, model: Model, args: argparse.Namespace, others: list[str]) -> list[str]:
    """Arguments of the training script for a run."""
    given = ["tokenizer_name", "train_file", "validation_file", "max_steps", "num_beams"]
    given += ["source_lang", "target_lang"] if args.task == "translation" else []
    words = [(dash_option(f"--{name}"), str(getattr(args, name))) for name in given if getattr(args, name) is not None]
    parts = [text for option in words for text in option]
    parts += ["--seed", str(run.seed), *(["--learning-rate", str(run.rate)] if run.rate else [])]
    parts += ["--test-file", *args.test_file]
    first = ["--save-strategy", "no", "--report-to", "none"]  # later options have priority
    return [*first, *others, *model.options(run.seed), *parts]  # the last --config counts


def folder_of(run: Run, args: argparse.Namespace) -> Path:
    """Folder of a run; it does not depend on the other runs, so that seeds and rates can be added later."""
    rate = f"-rate-{run.rate:g}" if run.rate else ""
    return Path(args.output_dir, run.name + rate + (f"-seed-{run.seed}" if run.seed != SEED else ""))


def train_all(
    models: dict[str, Model], args: argparse.Namespace, others: list[str]
) -> dict[Run, dict[str, float | str]]:
    """Train every model with every seed, at the best of the learning rates; {run: scores of the tests}."""
    script = Path(__file__).with_name(SCRIPTS[args.task])

    def train(runs: list[Run], args: argparse.Namespace) -> dict[Run, dict[str, float | str]]:
        told = {run: (options(run, models[run.name], args, others), folder_of(run, args)) for run in runs}
        done = run_all(script, told, jobs=args.jobs)
        return {run: done[run] for run in runs}

    rates, first, best = args.learning_rates or [None], args.seeds[0], {}
    short = argparse.Namespace(**vars(args))
    if args.rate_steps:
        short.max_steps, short.output_dir = args.rate_steps, Path(args.output_dir, f"rates-{args.rate_steps}-steps")
    if len(rates) > 1:
        train([Run(name, first, rate) for name in models for rate in rates], short)
    for name in models:
        losses = {rate: validation_loss(folder_of(Run(name, first, rate), short)) for rate in rates if len(rates) > 1}
        best[name] = min(losses, key=losses.__getitem__, default=rates[0])
    return train([Run(name, seed, best[name]) for name in models for seed in args.seeds], args)


def validation_loss(folder: Path) -> float:
    """Validation loss of the last model of the run in `folder`, or of its best checkpoint if the run loads it."""
    return json.loads((folder / "eval_results.json").read_text(encoding="utf-8"))["eval_loss"]


def differences(runs: list[Run], args: argparse.Namespace) -> dict[str, list[Difference]]:
    """{model: difference of BLEU from the first model, for each test} at the first seed."""
    first, *rest = [run for run in runs if run.seed == args.seeds[0]]
    found: dict[str, list[Difference]] = {run.name: [] for run in rest}
    for name, file in zip(test_names(args.test_file), args.test_file, strict=True):
        references = load_parallel(file, source=args.source_lang, target=args.target_lang)["target"][:]
        for run in rest:
            found[run.name].append(compare_outputs(folder_of(run, args), folder_of(first, args), name, references))
    return found


def draw_curves(runs: list[Run], args: argparse.Namespace) -> None:
    """`curves.png` and `curves-dark.png`: validation loss by step, of the runs that were evaluated on the way."""
    curves = {}
    for run in runs:
        state = json.loads((folder_of(run, args) / "trainer_state.json").read_text(encoding="utf-8"))
        points = {entry["step"]: entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry}
        if len(points) > 1:
            curves[run.name + (f", seed {run.seed}" if len(args.seeds) > 1 else "")] = points
    if not curves or find_spec("matplotlib") is None:
        return

    def paint(panels: list) -> None:
        for name, points in curves.items():
            panels[0].plot(list(points), list(points.values()), label=name)
        panels[0].set(xlabel="step", ylabel="validation loss, nats a token")

    save_pictures(Path(args.output_dir, "curves"), paint)


def decoding_speed(models: dict[str, tuple], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Generated tokens a second of each (model, tokenizer) on one core, and the ratio to the first one's."""
    pairs = load_parallel(args.test_file[0], source=args.source_lang, target=args.target_lang)
    sources, references = pairs["source"][:], pairs["target"][:]
    tokenizer = next(iter(models.values()))[1]
    sentences = typical_sentences(sources, references, tokenizer, args.speed_sentences)
    length = round(fmean(len(ids) for ids in tokenizer(text_target=references, verbose=False)["input_ids"]))
    speeds = tokens_per_second(
        models, sentences, runs=args.speed_runs, forced_length=length, num_beams=args.num_beams or 1, progress=True
    )
    first = next(iter(speeds.values()))
    return {
        name: {"tokens_per_second": speed.tokens_per_second, "speed_ratio": speed_ratio(speed, first)}
        for name, speed in speeds.items()
    }


def step_speed(models: dict[str, tuple], args: argparse.Namespace) -> dict[str, float]:
    """Speed of a training step of each (model, tokenizer), on 16 test pairs and one core, relative to the first."""
    pairs = load_parallel(args.test_file[0], source=args.source_lang, target=args.target_lang, max_samples=16)
    tokenizer = next(iter(models.values()))[1]
    batch = dict(tokenizer(pairs["source"][:], text_target=pairs["target"][:], padding=True, return_tensors="pt"))
    batch["labels"] = batch["labels"].masked_fill(batch["labels"] == tokenizer.pad_token_id, -100)
    networks = {name: model for name, (model, _) in models.items()}
    speeds = training_speed(networks, batch, runs=args.speed_runs, progress=True)
    first = next(iter(speeds.values()))
    return {name: speed_ratio(speed, first) for name, speed in speeds.items()}


def measured_speeds(results: Path, first: str) -> dict[str, dict[str, float]]:
    """{model: its speeds} of the results of an earlier call with the same first model, the base of the ratios."""
    rows = json.loads(results.read_text(encoding="utf-8")) if results.is_file() else []
    if not rows or rows[0]["name"] != first:
        return {}
    measured = {row["name"]: {key: row[key] for key in SPEEDS if key in row} for row in rows}
    return {name: speeds for name, speeds in measured.items() if speeds}


def tabulate(rows: list[dict], args: argparse.Namespace, differences: dict[str, list[Difference]]) -> Table:
    """A line for every model and test: means over its seeds, with the standard deviation of the scores."""
    speeds = {"speed_ratio": "decoding", "step_speed_ratio": "training"}
    speeds = {key: title for key, title in speeds.items() if any(key in row for row in rows)}
    tests = test_names(args.test_file)
    titles = ["model", *(["rate"] if args.learning_rates else []), "parameters", *speeds.values()]
    titles += ["test"] if len(tests) > 1 else []
    table = Table(*titles, *SCORES[args.task].values(), *(["sacreBLEU to the first, 95 %"] if differences else []))
    for name, test in itertools.product(dict.fromkeys(row["name"] for row in rows), tests):
        runs = [row for row in rows if row["name"] == name]
        cells = [escape(name), *([f"{runs[0]['rate']:g}"] if args.learning_rates else [])]
        cells += [f"{runs[0]['parameters']:,}", *(f"{runs[0][key]:.2f}x" if key in runs[0] else "" for key in speeds)]
        cells = ([""] * len(cells) if test != tests[0] else cells) + ([escape(test)] if len(tests) > 1 else [])
        for score in SCORES[args.task]:
            values = [run[score_key(test, score)] for run in runs]
            cells.append(spread(values))
        table.add_row(*cells, *([str(differences[name][tests.index(test)])] if name in differences else []))
    return table


def main(argv: list[str] | None = None) -> None:
    """Train, measure, tabulate; the rows also go to `results.json`."""
    args, others = parse(argv)
    models = parse_models(args.models, args.seeds)
    results = train_all(models, args, others)
    folders = {name: folder_of(next(run for run in results if run.name == name), args) for name in models}

    load = load_model if args.task == "translation" else lambda folder: (load_weights(folder),)
    trained = {name: load(folder) for name, folder in folders.items()}
    timed = args.task == "translation" and args.speed_runs > 0
    speeds = decoding_speed(trained, args) if timed else {}
    rows = []
    for run, scores in results.items():
        found = {
            score_key(test, score): scores[f"{test}_{score}"]
            for test in test_names(args.test_file)
            for score in SCORES[args.task]
        }
        model = models[run.name]
        row = {"name": run.name, "model": str(model.path_for(run.seed)), "fields": model.fields, "seed": run.seed}
        row |= {"rate": run.rate} if run.rate else {}
        row |= {"parameters": unique_parameters(trained[run.name][0])}
        row |= {"validation_loss": validation_loss(folder_of(run, args))} if args.validation_file else {}
        rows.append(row | found | speeds.get(run.name, {}))
    if timed:  # last, because it changes the models' weights
        steps = step_speed(trained, args)
        for row in rows:
            row["step_speed_ratio"] = steps[row["name"]]
    elif args.task == "translation":
        known = measured_speeds(Path(args.output_dir, "results.json"), rows[0]["name"])
        rows = [row | known.get(row["name"], {}) for row in rows]
        lacking = [name for name in models if name not in known]
        note(
            "Speeds were not measured (--speed-runs 0)."
            + (" Those of an earlier call are kept." if known else "")
            + (f" {', '.join(lacking)}: no speeds." if known and lacking else "")
        )
    compared = differences(list(results), args) if args.task == "translation" else {}
    for row in rows:
        if row["name"] in compared and row["seed"] == args.seeds[0]:
            row["bleu_to_first"] = [asdict(difference) for difference in compared[row["name"]]]
    Path(args.output_dir, "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    draw_curves(list(results), args)
    show(tabulate(rows, args, compared))


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Arguments of the command line, and those of the training script among them. Raises `ValueError`."""
    parser = ScriptParser(__doc__)
    parser.fromfile_prefix_chars = "@"
    parser.convert_arg_line_to_args = partial(shlex.split, comments=True)
    parser.add_argument("task", choices=SCRIPTS)
    parser.add_argument("--models", nargs="+", required=True, metavar="NAME=PATH[,FIELD=VALUE]")
    for name in ("tokenizer_name", "train_file", "output_dir"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--test-file", nargs="+", required=True, help="one or several, each with columns of its own")
    parser.add_argument("--validation-file", help="text to choose learning rates and checkpoints")
    parser.add_argument("--source-lang", help="translation: column or language")
    parser.add_argument("--target-lang", help="translation: column or language")
    parser.add_argument("--seeds", type=seed_number, nargs="+", default=[SEED], help="a run of every model for each")
    parser.add_argument("--learning-rates", type=float, nargs="+", help="default: as in the recipes")
    parser.add_argument("--rate-steps", type=int, help="steps after which rates are compared; default: all steps")
    parser.add_argument("--max-steps", type=int, help="default: as in the recipes")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; above 1 each has one thread")
    parser.add_argument("--num-beams", type=int, help="beams of every model, for test and speed")
    parser.add_argument("--speed-sentences", type=int, default=50, help="translation: sentences of a run")
    parser.add_argument("--speed-runs", type=int, default=10, help="translation: runs; 0 for no speeds")
    args, others = parser.parse_known_args(argv)
    if args.task == "translation" and not (args.source_lang and args.target_lang):
        raise ValueError("Translation needs --source-lang and --target-lang.")
    if len(args.learning_rates or []) > 1 and not args.validation_file:
        raise ValueError("The best of several --learning-rates is found on other text: give --validation-file.")
    test_names(args.test_file)
    return args, others


def load_weights(folder: Path) -> PreTrainedModel:
    """The trained model of a task whose speed is not measured."""
    causal = not load_pretrained(AutoConfig, folder).is_encoder_decoder
    return load_pretrained(AutoModelForCausalLM if causal else AutoModelForSeq2SeqLM, folder)


if __name__ == "__main__":
    run_script(main)
