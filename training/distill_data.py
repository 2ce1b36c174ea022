#!/usr/bin/env python
r"""Let the teacher translate (or summarize) the source side of a corpus: data for sequence-level distillation.

    python training/distill_data.py opus-mt-de-en train.jsonl --source-lang de --target-lang en \
        --output distilled.jsonl
    python training/run_translation.py --train-file distilled.jsonl --source-lang de --target-lang en …

A student learns more from the translations of its teacher than from references (Kim and Rush 2016, arXiv 1606.07947).
The output has one object a line, in the order of the data, `{"translation": {"de": "…", "en": "…"}}`: the source as it
was, and the teacher's best hypothesis. The file gets its name when it is complete. The same command resumes after a
kill, and gives the same file as without the kill.

On a CPU the teacher translates about five times as fast as an engine's model:

    lightformers export opus-mt-de-en deployed --to ctranslate2 --quantization int8
    python training/distill_data.py deployed train.jsonl --source-lang de --target-lang en --output distilled.jsonl

An exported model has no task prefixes of T5: give them, `--source-lang "de=translate German to English: "`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from arguments import ScriptParser
from common import load_texts, run_script
from rich.console import Console
from rich.markup import escape
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightformers_hf import translate
from lightformers_hf.engines import Engine
from lightformers_hf.evaluation.translate import load_translator
from lightformers_hf.languages import put_prefix, split_language
from lightformers_hf.loading import is_export

CHUNK = 2048  # texts that are sorted by length together, and written together


def count_complete(partial: Path, record: Path, options: dict, sources: list[str], columns: tuple[str, str]) -> int:
    """Return the number of whole chunks in `partial`, and remove an incomplete one at the end.

    Raises `ValueError` if they were written with other `options` than those in `record`, or from other data.
    """
    if not (partial.is_file() and record.is_file()):
        record.write_text(json.dumps(options, indent=1) + "\n", encoding="utf-8")
        partial.write_bytes(b"")
        return 0
    before = json.loads(record.read_text(encoding="utf-8"))
    if differing := [name for name in options if before.get(name) != options[name]]:
        raise ValueError(
            f"{partial} was begun with {differing[0]} {before.get(differing[0])!r}, not "
            f"{options[differing[0]]!r}: give the same options to resume, or delete it to start again."
        )
    whole, kept = 0, 0
    with partial.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            if number > len(sources) or json.loads(line)["translation"][columns[0]] != sources[number - 1]:
                raise ValueError(f"{partial}, line {number}, is not of this data: delete it to start again.")
            if number % CHUNK == 0 or number == len(sources):
                whole, kept = number, file.tell()
    os.truncate(partial, kept)
    return whole


def prepare_teacher(
    name: str, source: str, target: str
) -> tuple[PreTrainedModel | Engine, PreTrainedTokenizerBase, str]:
    """A checkpoint or an exported model, set to two languages, its tokenizer, and the prefix of every source.

    Raises `ValueError` for an exported model that translates into another language.
    """
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    device = "cpu" if is_export(name) else device
    return load_translator(name, device=device, source=source, target=target, columns=True)


def distill(options: dict, sources: list[str], output: Path, columns: tuple[str, str]) -> int:
    """Write the teacher's outputs for `sources` to `output`, and return how many an earlier run had made.

    Args:
        options: those that change the outputs: `teacher`, `batch_size`, arguments of `generate()` in `generation`, and
            `source_lang` and `target_lang` (see `set_language_codes`).
        columns: names of the two texts in the output.
    """
    partial, record = (output.with_name(f"{output.name}.{end}") for end in ("partial", "options.json"))
    model, tokenizer, prefix = prepare_teacher(options["teacher"], options["source_lang"], options["target_lang"])
    output.parent.mkdir(parents=True, exist_ok=True)
    done = count_complete(partial, record, options, sources, columns)
    with (
        tqdm(total=len(sources), initial=done, unit="text", desc="Translating") as bar,
        partial.open("a", encoding="utf-8") as file,
    ):
        for start in range(done, len(sources), CHUNK):
            texts = sources[start : start + CHUNK]
            size, generation = options["batch_size"], options["generation"]
            told = [put_prefix(prefix, text) if text.strip() else text for text in texts]
            outputs = translate(told, model, tokenizer, batch_size=size, split=False, progress=bar, **generation)
            for pair in zip(texts, outputs, strict=True):
                row = {"translation": dict(zip(columns, pair, strict=True))}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
    partial.replace(output)
    record.unlink()
    return done


def main(argv: list[str] | None = None) -> None:
    """Read, translate, write, report."""
    parser = ScriptParser(__doc__)
    parser.add_argument("teacher", help="checkpoint: a folder or a Hub name; or the folder of an export")
    parser.add_argument("data", help=".txt, .json, .jsonl, .csv, .tsv (.gz), .parquet, or a Hub dataset")
    parser.add_argument("--split", default="train", help="split of a Hub dataset")
    help_of_code = "; of a multilingual teacher also the language's code, or {}"
    help_of_source = "column, or language in a column 'translation'" + help_of_code.format("de=de_DE")
    help_of_source += "; or behind = the prefix of a T5, which ends with a space"
    help_of_target = "name of the teacher's texts in the output" + help_of_code.format("en=en_XX")
    parser.add_argument("--source-lang", required=True, help=help_of_source)
    parser.add_argument("--target-lang", required=True, help=help_of_target)
    parser.add_argument("--output", type=Path, required=True, help="the .jsonl file to write")
    parser.add_argument("--num-beams", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, help="default: the checkpoint's limit")
    parser.add_argument("--batch-size", type=int, default=32, help="texts of similar length translated at once")
    parser.add_argument("--max-samples", type=int, help="only the first so many texts")
    args = parser.parse_args(argv)
    columns = split_language(args.source_lang)[0], split_language(args.target_lang)[0]
    if columns[0] == columns[1]:
        raise ValueError(f"Source and target are both {columns[0]!r}: give the teacher's texts another name.")
    for name in ("num_beams", "batch_size", "max_samples"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"{name} is {value}: expected 1 or more.")
    if args.output.suffix != ".jsonl":
        raise ValueError(f"The output is {args.output}: expected a name that ends in .jsonl.")
    if args.output.exists():
        raise FileExistsError(f"{args.output} is there already, and complete: choose another name, or delete it.")
    texts = load_texts(args.data, [columns[0]], split=args.split, max_samples=args.max_samples)["text"][:]
    generation = {"num_beams": args.num_beams}
    if args.max_new_tokens is not None:
        generation["max_new_tokens"] = args.max_new_tokens
    # Sums over other batches round otherwise, which can change a beam: the file depends on the batch size.
    options = {name: getattr(args, name) for name in ("teacher", "data", "split", "batch_size")}
    options |= {"source_lang": args.source_lang, "target_lang": args.target_lang, "generation": generation}
    done = distill(options, texts, args.output, columns)
    made = f"{len(texts):,} pairs in {args.output}" + (f", {done:,} from the interrupted run" if done else "")
    Console().print(escape(made), soft_wrap=True)


if __name__ == "__main__":
    run_script(main)
