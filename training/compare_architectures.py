#!/usr/bin/env python
r"""Train several models with equal data, tokenizer and number of steps, and print one table of their test scores.

    python training/compare_architectures.py translation --models transformer=shapes.json lightformer-svd=converted \
        --tokenizer_name opus-mt-de-en --train_file train.jsonl --test_file test.jsonl --source_lang de \
        --target_lang en --output_dir runs/architectures --max_steps 1500 --jobs 2 --learning_rate 1e-3
    python training/compare_architectures.py clm --models transformer=a.json subformer=b.json --tokenizer_name words \
        --train_file train.txt --test_file test.txt --output_dir runs/language --max_steps 1500 --block_size 128

A model is a folder with weights, which is trained further, or the shapes of one, a `.json` file or a folder without
weights, which starts from random weights. Options it does not know go to `run_translation.py` or `run_clm.py`. A
second call skips the runs that are complete.

Besides the scores the table has unique parameters, the seconds of a training step (runs at the same time slow each
other), and for translation two speeds on one core as ratios to the first model, all models taking turns within the
same runs: of decoding, over test sentences of average length, each generating that length, and of a training step in
fp32 on 16 test pairs.
"""

from __future__ import annotations

import argparse
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

from common import run_once, run_script
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm
from transformers import AutoModelForCausalLM

import lightformers_hf  # noqa: F401  registers the architectures with the Auto classes
from lightformers_hf.evaluation.architectures import training_speed
from lightformers_hf.evaluation.size import unique_parameters
from lightformers_hf.evaluation.speed import speed_ratio, tokens_per_second, typical_sentences
from lightformers_hf.evaluation.translate import load_model
from lightformers_hf.training import load_parallel

SCRIPTS = {"translation": "run_translation.py", "clm": "run_clm.py"}
SCORES = {"translation": {"bleu": "BLEU", "chrf": "chrF"}, "clm": {"perplexity": "perplexity"}}


def parse_models(models: list[str]) -> dict[str, Path]:
    """{name: folder or .json file} of `name=path` arguments. Raises `ValueError` or `FileNotFoundError`."""
    paths = {}
    for model in models:
        name, separator, path = model.partition("=")
        if not separator or not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(f"--models {model}: expected name=path, the name of letters, digits, '-', '_' and '.'.")
        if name in paths:
            raise ValueError(f"--models names {name!r} twice: give every model a name of its own.")
        if not Path(path).exists():
            raise FileNotFoundError(f"No model {path}: give a folder of a checkpoint, or a .json file of shapes.")
        paths[name] = Path(path)
    return paths


def options(path: Path, args: argparse.Namespace, others: list[str]) -> list[str]:
    """What the training script is told for the model `path`."""
    weights = path.is_dir() and any(any(path.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin"))
    parts = ["--model_name_or_path" if weights else "--config_name", str(path)]
    given = ["tokenizer_name", "train_file", "test_file", "max_steps"]
    if args.task == "translation":
        given += ["source_lang", "target_lang", "num_beams"]
    parts += [text for name in given for text in (f"--{name}", str(getattr(args, name)))]
    return [*parts, "--save_strategy", "no", "--report_to", "none", *others]


def seconds_per_step(folder: Path) -> float:
    """Mean time of a training step of the run in `folder`, from the state that its trainer saved."""
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    runtime = next(entry["train_runtime"] for entry in state["log_history"] if "train_runtime" in entry)
    return runtime / state["global_step"]


def decoding_speed(models: dict[str, tuple], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Generated tokens a second of each (model, tokenizer) on one core, and the ratio to the first one's."""
    pairs = load_parallel(args.test_file, source=args.source_lang, target=args.target_lang)
    sources, references = pairs["source"][:], pairs["target"][:]
    tokenizer = next(iter(models.values()))[1]
    sentences = typical_sentences(sources, references, tokenizer, args.speed_sentences)
    length = round(fmean(len(ids) for ids in tokenizer(text_target=references, verbose=False)["input_ids"]))
    speeds = tokens_per_second(
        models, sentences, runs=args.speed_runs, forced_length=length, num_beams=args.num_beams, progress=True
    )
    first = next(iter(speeds.values()))
    return {
        name: {"tokens_per_second": speed.tokens_per_second, "speed_ratio": speed_ratio(speed, first)}
        for name, speed in speeds.items()
    }


def step_speed(models: dict[str, tuple], args: argparse.Namespace) -> dict[str, float]:
    """How fast each (model, tokenizer) takes a training step on 16 test pairs, one core, relative to the first one."""
    pairs = load_parallel(args.test_file, source=args.source_lang, target=args.target_lang, max_samples=16)
    tokenizer = next(iter(models.values()))[1]
    batch = dict(tokenizer(pairs["source"][:], text_target=pairs["target"][:], padding=True, return_tensors="pt"))
    batch["labels"] = batch["labels"].masked_fill(batch["labels"] == tokenizer.pad_token_id, -100)
    networks = {name: model for name, (model, _) in models.items()}
    speeds = training_speed(networks, batch, runs=args.speed_runs, progress=True)
    first = next(iter(speeds.values()))
    return {name: speed_ratio(speed, first) for name, speed in speeds.items()}


def main(argv: list[str] | None = None) -> None:
    """Train, measure, tabulate; the table also goes to `results.json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("task", choices=SCRIPTS)
    parser.add_argument("--models", nargs="+", required=True, metavar="NAME=PATH")
    for name in ("tokenizer_name", "train_file", "test_file", "output_dir"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--source_lang", help="translation: column or language")
    parser.add_argument("--target_lang", help="translation: column or language")
    parser.add_argument("--max_steps", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; above 1 each has one thread")
    parser.add_argument("--num_beams", type=int, default=1, help="translation: of every model, in test and speed")
    parser.add_argument("--speed_sentences", type=int, default=50, help="translation: sentences of a run")
    parser.add_argument("--speed_runs", type=int, default=10, help="translation: runs")
    args, others = parser.parse_known_args(argv)
    paths = parse_models(args.models)
    if args.task == "translation" and not (args.source_lang and args.target_lang):
        raise ValueError("Translation needs --source_lang and --target_lang.")

    folders = {name: Path(args.output_dir, name) for name in paths}
    script = Path(__file__).with_name(SCRIPTS[args.task])
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = [
            pool.submit(run_once, script, options(path, args, others), folders[name], one_thread=args.jobs > 1)
            for name, path in paths.items()
        ]
        results = {name: job.result() for name, job in zip(paths, tqdm(jobs, desc="runs"), strict=True)}

    load = load_model if args.task == "translation" else lambda folder: (AutoModelForCausalLM.from_pretrained(folder),)
    models = {name: load(folder) for name, folder in folders.items()}
    speeds = decoding_speed(models, args) if args.task == "translation" else {}
    rows = []
    for name, (model, *_) in models.items():
        scores = {score: results[name][f"test_{score}"] for score in SCORES[args.task]}
        measured = {"parameters": unique_parameters(model), "seconds_per_step": seconds_per_step(folders[name])}
        rows.append({"name": name, "model": str(paths[name]), **measured, **scores, **speeds.get(name, {})})
    if args.task == "translation":  # last, because it changes the models' weights
        for row, ratio in zip(rows, step_speed(models, args).values(), strict=True):
            row["step_speed_ratio"] = ratio
    Path(args.output_dir, "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")

    columns = ["model", "parameters", "s / step", *SCORES[args.task].values()]
    table = Table(*columns, *(["decoding", "training"] if speeds else []))
    for row in rows:
        cells = [escape(row["name"]), f"{row['parameters']:,}", f"{row['seconds_per_step']:.2f}"]
        cells += [f"{row[score]:.1f}" for score in SCORES[args.task]]
        cells += [f"{row[ratio]:.2f}x" for ratio in ("speed_ratio", "step_speed_ratio") if ratio in row]
        table.add_row(*cells)
    Console().print(table)


if __name__ == "__main__":
    run_script(main)
