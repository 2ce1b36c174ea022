# /// script
# requires-python = ">=3.11"
# dependencies = ["lightformers_hf[demo]"]
# ///
r"""Compress a published translation model at several ratios, deploy and measure each, and write a page of results.

    uv run training/opus_mt.py --output-dir opus-mt
    hf jobs uv run --flavor a10g-small --secrets HF_TOKEN training/opus_mt.py --push you/opus-mt-de-en

The script takes the teacher `Helsinki-NLP/opus-mt-de-en`, trains on pairs of OPUS-100 (Zhang et al. 2020), and scores
on FLORES+ devtest (NLLB Team 2022), whose terms must be accepted on the Hub. Each ratio is one call of
`lightformers_hf.compress`, so that a second call of the script resumes. `--teacher`, `--data` and `--test` take other
models and files, without a network:

    python training/opus_mt.py --teacher demo-output/teacher --data train.jsonl --test test.jsonl

`results.md` and `results.json` have size, BLEU, chrF and, with `--comet`, COMET of every checkpoint and deployed form.
`--push you/name` pushes `you/name-2`, `you/name-4` and so on.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from datasets import load_dataset

import lightformers_hf

TEACHER, PAIRS, FLORES = "Helsinki-NLP/opus-mt-de-en", "Helsinki-NLP/opus-100", "openlanguagedata/flores_plus"
FLORES_CODES = {"de": "deu_Latn", "en": "eng_Latn"}
FORMS = {"ctranslate2": "int8", "onnx": "int8"}  # deployed forms: {engine: quantization}
METRICS = ("bleu", "chrf")


def read_options(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", default=TEACHER, help="Checkpoint or name on the Hub.")
    parser.add_argument("--data", help="Pairs to train on. Default: OPUS-100, German and English.")
    parser.add_argument("--test", help="Pairs to measure on. Default: FLORES+ devtest.")
    parser.add_argument("--output-dir", type=Path, default=Path("opus-mt"))
    parser.add_argument("--ratios", type=float, nargs="+", default=[2, 4, 8], metavar="RATIO")
    parser.add_argument("--minutes", type=float, default=120, help="Training of each ratio. Default: %(default)s.")
    parser.add_argument("--max-samples", type=int, help="Measure on so many pairs.")
    parser.add_argument("--comet", metavar="CHECKPOINT", help="Local COMET checkpoint; needs the command comet-score.")
    parser.add_argument("--device", help="Default: an accelerator if there is one.")
    parser.add_argument("--push", metavar="USER/NAME", help="Push every model under this name with its ratio.")
    return parser.parse_args(arguments)


def write_flores(file: Path) -> Path:
    """Write FLORES+ devtest in German and English as lines of JSON, and return the file."""
    sides = {language: load_dataset(FLORES, code, split="devtest") for language, code in FLORES_CODES.items()}
    texts = {language: {row["id"]: row["text"] for row in rows} for language, rows in sides.items()}
    rows = [{language: side[number] for language, side in texts.items()} for number in sorted(texts["de"])]
    file.write_text("".join(json.dumps({"translation": row}) + "\n" for row in rows), encoding="utf-8")
    return file


def measure(model: str | Path, label: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return a row of the table: label, megabytes, and scores. An export's speed is not measured."""
    found = lightformers_hf.evaluate(
        str(model), data=options.test, metrics=METRICS, speed=False, comet=options.comet,
        max_samples=options.max_samples, progress=False,
    ).to_dict()  # fmt: skip
    return {"model": label, "megabytes": round(found["model"]["disk_bytes"] / 1e6, 1), **found["model"]["scores"]}


def write_page(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Write the rows as a page and as JSON."""
    columns = list(rows[0])
    lines = [f"# {Path(options.teacher).name}, compressed", ""]
    lines += [f"Test: {Path(str(options.test)).name}. Training: {options.minutes:g} minutes for each ratio.", ""]
    lines += [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for row in rows:
        cells = (f"{row[name]:.1f}" if isinstance(row[name], float) else str(row[name]) for name in columns)
        lines.append(f"| {' | '.join(cells)} |")
    (options.output_dir / "results.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (options.output_dir / "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Compress, deploy and measure; see above."""
    options = read_options(arguments)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    options.data = options.data or f"{PAIRS}:de-en"
    options.test = options.test or str(write_flores(options.output_dir / "flores.jsonl"))
    rows = [measure(options.teacher, "teacher", options)]
    for ratio in options.ratios:
        folder, name = options.output_dir / f"ratio-{ratio:g}", f"{options.push}-{ratio:g}"
        lightformers_hf.compress(
            options.teacher, folder, data=options.data, test=options.test, ratio=ratio, minutes=options.minutes,
            metrics=METRICS, device=options.device, push_to_hub=name if options.push else None, progress=False,
        )  # fmt: skip
        rows.append(measure(folder / "recovered", f"ratio {ratio:g}", options))
        for engine, quantization in FORMS.items():
            deployed = folder / f"{engine}-{quantization}"
            lightformers_hf.export(
                folder / "recovered", deployed, to=engine, quantization=quantization, overwrite=True
            )
            rows.append(measure(deployed, f"ratio {ratio:g}, {engine} {quantization}", options))
        write_page(rows, options)
    print((options.output_dir / "results.md").read_text(encoding="utf-8"))


if __name__ == "__main__":  # this file alone is sent to a job: it imports none of the others here
    try:
        main()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")
