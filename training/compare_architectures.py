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

A model is a recipe (`.yaml`: shapes, and how it is trained), which starts from random weights; or a folder with
weights, which is trained further (`{seed}` in its name is the run's seed); or shapes alone, a `.json` file or a folder
without weights. Behind a comma come fields of its configuration, `field=value`. Options this script does not know go
to `run_translation.py`, `run_summarization.py` or `run_clm.py` and win over those of recipes; `--config` among them is
for the models without a recipe. Every model is trained once for each seed. A second call skips the runs that are
complete.

Besides the scores the table has unique parameters, the seconds of a training step (runs at the same time slow each
other), and for translation two speeds on one core as ratios to the first model, all models taking turns within the
same runs: of decoding, over test sentences of average length, each generating that length, and of a training step in
fp32 on 16 test pairs. `results.json` has every run.
"""

from __future__ import annotations

import argparse
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from arguments import ScriptParser, dash_option, seed_number
from common import run_once, run_script
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

import lightformers_hf  # noqa: F401  registers the architectures with the Auto classes
from lightformers_hf.evaluation.benchmarks.architectures import training_speed
from lightformers_hf.evaluation.speed import speed_ratio, tokens_per_second, typical_sentences
from lightformers_hf.loading import load_model, load_pretrained, unique_parameters
from lightformers_hf.text import load_parallel

SCRIPTS = {"translation": "run_translation.py", "summarization": "run_summarization.py", "clm": "run_clm.py"}
SCORES = {
    "translation": {"bleu": "BLEU", "chrf": "chrF"},
    "summarization": {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"},
    "clm": {"perplexity": "perplexity"},
}


@dataclass(frozen=True)
class Model:
    """What `--models` says of one: a file or folder, and fields of the configuration that replace its own."""

    path: str
    fields: tuple[str, ...] = ()

    def path_for(self, seed: int) -> Path:
        """The path, for a run with `seed`."""
        return Path(self.path.replace("{seed}", str(seed)))

    def options(self, seed: int) -> list[str]:
        """What the training script is told of it."""
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
        for place in map(parsed[name].path_for, seeds):
            if not place.exists():
                raise FileNotFoundError(
                    f"No model {place}: give a recipe, a folder of a checkpoint, or a .json file of shapes."
                )
    return parsed


def options(model: Model, seed: int, args: argparse.Namespace, others: list[str]) -> list[str]:
    """What the training script is told for a run."""
    given = ["tokenizer_name", "train_file", "test_file", "max_steps", "num_beams"]
    given += ["source_lang", "target_lang"] if args.task == "translation" else []
    told = [(dash_option(f"--{name}"), str(getattr(args, name))) for name in given if getattr(args, name) is not None]
    parts = [text for option in told for text in option]
    parts += ["--seed", str(seed), "--save-strategy", "no", "--report-to", "none"]
    return [*others, *model.options(seed), *parts]  # the last --config counts


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
        models, sentences, runs=args.speed_runs, forced_length=length, num_beams=args.num_beams or 1, progress=True
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


def tabulate(rows: list[dict], task: str) -> Table:
    """A line for every model: means over its seeds, with the standard deviation of the scores."""
    speeds = {"speed_ratio": "decoding", "step_speed_ratio": "training"}
    speeds = {key: title for key, title in speeds.items() if key in rows[0]}
    table = Table("model", "parameters", "s / step", *SCORES[task].values(), *speeds.values())
    for name in dict.fromkeys(row["name"] for row in rows):
        runs = [row for row in rows if row["name"] == name]
        cells = [escape(name), f"{runs[0]['parameters']:,}", f"{fmean(run['seconds_per_step'] for run in runs):.2f}"]
        for score in SCORES[task]:
            values = [run[score] for run in runs]
            cells.append(f"{fmean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else ""))
        table.add_row(*cells, *(f"{runs[0][key]:.2f}x" for key in speeds))
    return table


def main(argv: list[str] | None = None) -> None:
    """Train, measure, tabulate; the rows also go to `results.json`."""
    parser = ScriptParser(__doc__)
    parser.add_argument("task", choices=SCRIPTS)
    parser.add_argument("--models", nargs="+", required=True, metavar="NAME=PATH[,FIELD=VALUE]")
    for name in ("tokenizer_name", "train_file", "test_file", "output_dir"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--source-lang", help="translation: column or language")
    parser.add_argument("--target-lang", help="translation: column or language")
    parser.add_argument("--seeds", type=seed_number, nargs="+", default=[42], help="a run of every model for each")
    parser.add_argument("--max-steps", type=int, help="default: of the recipes")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; above 1 each has one thread")
    parser.add_argument("--num-beams", type=int, help="of every model, in test and speed")
    parser.add_argument("--speed-sentences", type=int, default=50, help="translation: sentences of a run")
    parser.add_argument("--speed-runs", type=int, default=10, help="translation: runs; 0 for no speeds")
    args, others = parser.parse_known_args(argv)
    models = parse_models(args.models, args.seeds)
    if args.task == "translation" and not (args.source_lang and args.target_lang):
        raise ValueError("Translation needs --source-lang and --target-lang.")

    several = len(args.seeds) > 1
    runs = {(name, seed): f"{name}-seed-{seed}" if several else name for name in models for seed in args.seeds}
    folders = {run: Path(args.output_dir, folder) for run, folder in runs.items()}
    script = Path(__file__).with_name(SCRIPTS[args.task])
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = {
            (name, seed): pool.submit(
                run_once, script, options(models[name], seed, args, others), folder, one_thread=args.jobs > 1
            )
            for (name, seed), folder in folders.items()
        }
        progress = tqdm(jobs.items(), desc="runs", total=len(jobs))
        results = {run: {score: job.result()[f"test_{score}"] for score in SCORES[args.task]} for run, job in progress}

    load = load_model if args.task == "translation" else lambda folder: (load_weights(folder),)
    trained = {name: load(folders[name, args.seeds[0]]) for name in models}
    timed = args.task == "translation" and args.speed_runs > 0
    speeds = decoding_speed(trained, args) if timed else {}
    rows = []
    for (name, seed), scores in results.items():
        measured = {"parameters": unique_parameters(trained[name][0])}
        measured["seconds_per_step"] = seconds_per_step(folders[name, seed])
        row = {"name": name, "model": str(models[name].path_for(seed)), "fields": models[name].fields, "seed": seed}
        rows.append(row | measured | scores | speeds.get(name, {}))
    if timed:  # last, because it changes the models' weights
        steps = step_speed(trained, args)
        for row in rows:
            row["step_speed_ratio"] = steps[row["name"]]
    Path(args.output_dir, "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    Console().print(tabulate(rows, args.task))


def load_weights(folder: Path) -> PreTrainedModel:
    """The trained model of a task whose speed is not measured."""
    causal = not load_pretrained(AutoConfig, folder).is_encoder_decoder
    return load_pretrained(AutoModelForCausalLM if causal else AutoModelForSeq2SeqLM, folder)


if __name__ == "__main__":
    run_script(main)
