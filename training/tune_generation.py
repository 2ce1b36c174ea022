#!/usr/bin/env python
r"""Choose length penalty, beams and length of the outputs on validation data, and store the best in the checkpoint.

    python training/tune_generation.py model validation.jsonl --source-lang de --target-lang en --metric multi-bleu
    python training/tune_generation.py model validation.jsonl --source-lang document --target-lang summary \
        --metric rougeLsum --length-penalties 1 --min-new-tokens 40 50 60

The script generates the validation part once for each combination of the values. It prints a table of the scores, and
writes the best combination into the checkpoint's `generation_config.json`. The default penalties, 0 to 2 in steps of
0.2, and five beams are those of the Subformer's paper (Appendix B). For summaries the paper also tunes the "generation
length in the range of {40, 50, 60}", and does not print whether these are least or most lengths. A length penalty has
no effect without beams, so that one beam is tried once. For equal scores the first combination is used. Never tune on
a test part.
"""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import torch
from arguments import ScriptParser, positive_number
from common import run_script
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import GenerationConfig

from lightformers_hf import translate
from lightformers_hf.evaluation.quality import METRICS, choose_metrics, score, selection_metric
from lightformers_hf.evaluation.translate import load_translator
from lightformers_hf.files import read_json, write_json
from lightformers_hf.languages import split_language
from lightformers_hf.loading import is_export
from lightformers_hf.text import load_parallel

CONFIG = "generation_config.json"
PENALTIES = [round(0.2 * step, 1) for step in range(11)]
# Names of the values in a generation configuration, and those that they replace.
LENGTHS = {"max_new_tokens": "max_length", "min_new_tokens": "min_length"}


def combinations(values: dict[str, list]) -> list[dict[str, Any]]:
    """Every combination of the values; one beam has no length penalty. Raises `ValueError` if no length is left."""
    found = [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]
    for chosen in found:
        if chosen["num_beams"] == 1:
            del chosen["length_penalty"]
    found = [c for c in found if c.get("min_new_tokens", 0) <= c.get("max_new_tokens", math.inf)]
    if not found:
        raise ValueError("Each of --min-new-tokens is above each of --max-new-tokens: give smaller ones.")
    return list({json.dumps(chosen): chosen for chosen in found}.values())


def check_lengths(values: dict[str, list], own: GenerationConfig) -> None:
    """Raise `ValueError` for lengths beyond the other limit of the checkpoint, whose lengths count the start token."""
    least = own.min_new_tokens or (own.min_length or 1) - 1
    most = own.max_new_tokens or (own.max_length or math.inf) - 1
    lows, highs = values.get("min_new_tokens"), values.get("max_new_tokens")
    if lows is None and highs and least > min(highs):
        raise ValueError(f"The checkpoint generates {least} tokens or more: give --min-new-tokens, too.")
    if highs is None and lows and most < max(lows):
        raise ValueError(f"The checkpoint generates {most} tokens or fewer: give --max-new-tokens, too.")


def store(folder: Path, chosen: dict[str, Any], own: GenerationConfig) -> None:
    """Write the chosen values into the folder's generation configuration, and remove those that they replace.

    A folder without one gets that of the model, `own`, which has its special tokens.
    """
    if not (folder / CONFIG).is_file():
        own.save_pretrained(folder)
    config = read_json(folder / CONFIG)
    replaced = {LENGTHS[name] for name in chosen if name in LENGTHS} | {"length_penalty"}
    write_json({name: value for name, value in config.items() if name not in replaced} | chosen, folder / CONFIG)


def main(argv: list[str] | None = None) -> None:
    """Generate, score, print, write."""
    parser = ScriptParser(__doc__)
    parser.add_argument("model", type=Path, help=f"folder of the checkpoint, whose {CONFIG} is written")
    parser.add_argument("data", help="validation pairs: .json, .jsonl, .csv, .tsv (.gz), .parquet, or a Hub dataset")
    parser.add_argument("--split", default="validation", help="split of a Hub dataset")
    parser.add_argument("--source-lang", required=True, help="column, or language in a column 'translation'")
    parser.add_argument("--target-lang", required=True, help="the same for the references")
    parser.add_argument("--metric", help="metric that chooses the best: multi-bleu, rougeL, … (default: by the data)")
    parser.add_argument("--length-penalties", type=float, nargs="+", default=PENALTIES, help="default: 0, 0.2, … 2")
    parser.add_argument("--num-beams", type=positive_number, nargs="+", default=[5])
    parser.add_argument("--max-new-tokens", type=positive_number, nargs="+", help="default: the checkpoint's limit")
    parser.add_argument("--min-new-tokens", type=positive_number, nargs="+", help="default: the checkpoint's")
    parser.add_argument("--batch-size", type=positive_number, default=32)
    parser.add_argument("--max-samples", type=positive_number, help="only the first so many pairs")
    args = parser.parse_args(argv)
    if not args.model.is_dir() or is_export(args.model):
        kind = "an export" if args.model.is_dir() else "no folder"
        raise ValueError(f"{args.model} is {kind}: give the folder of a checkpoint, whose {CONFIG} can be written.")
    if wrong := [penalty for penalty in args.length_penalties if not math.isfinite(penalty)]:
        raise ValueError(f"--length-penalties has {wrong[0]}: give finite numbers, such as 0 0.6 1.")
    values = {"num_beams": args.num_beams, "length_penalty": args.length_penalties}
    values |= {name: given for name in LENGTHS if (given := getattr(args, name))}
    tried = combinations(values)

    languages = args.source_lang, args.target_lang
    columns = [split_language(language)[0] for language in languages]
    pairs = load_parallel(
        args.data, source=columns[0], target=columns[1], split=args.split, max_samples=args.max_samples
    )
    sources, references = pairs["source"][:], pairs["target"][:]
    asked = [args.metric] if args.metric else []
    metric = selection_metric(choose_metrics(asked, sources, references), asked)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    model, tokenizer, prefix = load_translator(
        args.model, device=device, source=languages[0], target=languages[1], columns=True
    )
    check_lengths(values, model.generation_config)
    table = Table(*values, METRICS[metric].label, title=f"{len(references)} pairs of {args.data}")
    scores = []
    for chosen in tried:
        outputs = translate(
            sources, model, tokenizer, prefix=prefix, batch_size=args.batch_size, split=False, progress=True, **chosen
        )
        scores.append(score(outputs, references, [metric], language=columns[1])[metric])
        table.add_row(*(str(chosen.get(name, "-")) for name in values), f"{scores[-1]:.2f}")
    best = (max if METRICS[metric].higher_is_better else min)(scores)
    chosen = tried[scores.index(best)]
    console = Console()
    console.print(table)
    store(args.model, chosen, model.generation_config)
    text = ", ".join(f"{name} {value}" for name, value in chosen.items())
    console.print(escape(f"Best {METRICS[metric].label}: {best:.2f} with {text}, saved in {args.model / CONFIG}"))


if __name__ == "__main__":
    run_script(main)
