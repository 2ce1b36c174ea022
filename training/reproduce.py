#!/usr/bin/env python
r"""Repeat the experiments that the documentation quotes, and write the pages of their results.

    python training/reproduce.py --list                                    # experiments, their inputs and times
    python training/reproduce.py converted recovered --work runs/results   # some of them; --all for all
    python training/reproduce.py converted --dry-run                       # its commands, and which are complete
    python training/reproduce.py --pages                                   # `make results`: pages from the figures

Every experiment is a list of commands. They run in the folder `--work`, and what each has printed is kept there: a
second call runs what is missing, and repeats what an earlier commit or another machine made. The figures of a complete
experiment go to `docs/results/data/NAME.json` with their units, the commands, seeds, machine, versions and commit. The
pages in `docs/results/` are made from these files and from the templates in `docs/results/templates/`.

Inputs are data sets and checkpoints. They are read from `WORK/inputs/NAME`; a data set that may be downloaded is
downloaded to it. Every file is compared with its checksum, so that all who repeat an experiment read the same rows.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import fmean

import jinja2
from common import run_script
from comparing import save_pictures, spread
from generate_pairs import write_pairs
from rich.console import Console
from rich.table import Table

import lightformers_hf
from lightformers_hf.files import write_json

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
TABLE = "<!-- results -->"  # each of the README's tables is between two of them
PACKAGES = ("torch", "transformers", "ctranslate2", "onnxruntime", "sacrebleu")
FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "i8mm", "bf16")
MULTI30K = "https://raw.githubusercontent.com/multi30k/dataset/a3d2e0d26b56f3846f66a952536ffed4e401d05a/data/task1/raw"
TESTS = ("test_2016_flickr", "test_2017_flickr")
ONE_CORE = {"OMP_NUM_THREADS": "1"}
LANGUAGES = ("--source-lang", "de", "--target-lang", "en")
# Models for speech, of which the first is the main one.
WHISPERS = ("whisper-base", "whisper-tiny.en")
UNITS = {
    "parameters_before": "parameters of the teacher",
    "parameters_after": "parameters, each counted once",
    "agreement": "share of held-out tokens that teacher and model predict alike",
    "cpu_seconds": "seconds of one core",
    "tokens_per_second": "tokens of output per second",
    "to_teacher": "times the teacher's tokens per second in the same engine",
    "to_baseline": "times the teacher's tokens per second in CTranslate2 int8",
    "megabytes": "megabytes (10^6 bytes) on disk",
    "seconds": "seconds",
    "bleu": "BLEU (sacreBLEU, 13a)",
    "chrf": "chrF",
    "exact-match": "percent of outputs",
    "cer": "edits in percent of the references' characters",
    "wer": "edits in percent of the references' words, after Whisper's normalizer",
}
STUDIES = {  # and the tokenizer of each
    "architectures_6m": "inputs/multi30k-de-en",
    "lightformer_equal_parameters": "bpe",
}
FORMS = {  # {(method, form): what tables and pictures name it}
    ("narrow", "ctranslate2-int8"): "`narrow`, CTranslate2 int8",
    ("auto", "onnx-int8"): "`auto`, ONNX int8",
    ("auto", "onnx-int4"): "`auto`, ONNX int4",
    ("low-rank", "onnx-int4"): "`low-rank`, ONNX int4",
}
PAIRS = ("--calibration", "inputs/multi30k/train.jsonl", *LANGUAGES)
TRAINING = ("--data", "inputs/multi30k/train.jsonl", "--validation", "inputs/multi30k/validation.jsonl", *LANGUAGES,
            "--minutes", 20)  # fmt: skip
GREEDY = ("--num-beams", "1", "--no-speed")
WORDS = ("--source-lang", "word", "--target-lang", "phonemes")
PUBLIC = {  # {checkpoint: (folder of its pairs, the part that scores it, their columns)}
    "g2p-us": ("g2p", "validation", *WORDS),
    "g2p-gb": ("g2p-british", "test", *WORDS),
}


def download_multi30k(folder: Path) -> None:
    """Write the data set's four parts as one JSON object a line; runs of white space become one space."""
    for part, name in {"train": "train", "validation": "val", **{test: test for test in TESTS}}.items():
        sides = {}
        for language in ("de", "en"):
            with urllib.request.urlopen(f"{MULTI30K}/{name}.{language}.gz", timeout=60) as answer:
                sides[language] = gzip.decompress(answer.read()).decode().split("\n")[:-1]
        rows = [
            {"translation": {side: " ".join(text.split()) for side, text in zip(sides, pair, strict=True)}}
            for pair in zip(*sides.values(), strict=True)
        ]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{part}.jsonl").write_text(lines, encoding="utf-8")


@dataclass(frozen=True)
class Input:
    """A data set or a checkpoint that experiments read.

    Attributes:
        origin: where it comes from and under which terms.
        files: SHA-256 of every file, by its path in the folder.
        download: writes the files into a folder.
    """

    origin: str
    files: dict[str, str]
    download: Callable[[Path], None] | None = None


INPUTS = {
    "multi30k": Input(
        "Multi30k, German to English (Elliott et al. 2016; github.com/multi30k/dataset), for research and education",
        {
            "train.jsonl": "b2a73280d51776cbb792e378071b97bcb19048f4377dcfc4a5aef726b688fb23",
            "validation.jsonl": "b7c631c31ad806383f97fd47cd2c67d55cc316638d91773b53c70e79970bd19e",
            "test_2016_flickr.jsonl": "ec7ebe37ce9cc6f3afa2b03c46c2deab17d628aebf099b34dd09c8b82bee08bd",
            "test_2017_flickr.jsonl": "e4d41e335c8a91038f0051f107d12cafa316be6e96cf0b11e03c90a593b03852",
        },
        download_multi30k,
    ),
    "multi30k-de-en": Input(
        "a Marian with 3 + 3 layers and d_model 256, trained on Multi30k with label smoothing by "
        "training/recipes/multi30k/transformer.yaml",
        {"model.safetensors": "f507fbe58d2d0342d58569ea3836711e402aba6cde2b0229e792b1c2ffbe945a"},
    ),
    "g2p-us": Input(
        "PeterReid/graphemes_to_phonemes_en_us of the Hub (Apache-2.0), a BART from English words to phonemes; "
        "its letters and phonemes have rows of their own in one vocabulary",
        {"model.safetensors": "1e13ad98b3e46477f1b5a8328e5df3bcab319bff6fbe582d6862e36103e139f2"},
    ),
    "g2p": Input(
        "words and phonemes of the lexicons of misaki (Apache-2.0), of which g2p-us has seen the training part only",
        {
            "train.jsonl": "0007e872f3c55b394aee43fb9d35b8a34f9bca1c170a301242e9a4b222626dd5",
            "validation.jsonl": "a780016534c095468b9da73f2982559eae7fb69e3f4af410b4f4e907035d1b02",
        },
    ),
    "g2p-gb": Input(
        "PeterReid/graphemes_to_phonemes_en_gb of the Hub (Apache-2.0), as g2p-us",
        {"model.safetensors": "225762bc45784acbbbaa413f0b7610cb6a46b36352714ba3a6743f8fb53561a5"},
    ),
    "g2p-british": Input(
        "British words and phonemes of the lexicons of misaki (Apache-2.0), drawn at random; which of them g2p-gb has "
        "seen is not known",
        {
            "train.jsonl": "26cf15b24d7292ac5f30e540fe89695aa538593f02dd7cdfcd354aed432b6c49",
            "test.jsonl": "c63e0f72ef397318aa87f170050cae0f8690a715a436bf206b6724cab5ba7b74",
        },
    ),
    "whisper-tiny.en": Input(
        "openai/whisper-tiny.en of the Hub (MIT), with weights in float16",
        {"model.safetensors": "27e6cbbc03132b9e95bc2ff4fe1a8c4ccb207f77998cc7567a3945b626b733f7"},
    ),
    "whisper-base": Input(
        "openai/whisper-base of the Hub (MIT), with weights in float16",
        {"model.safetensors": "2be218e4f1b5d055eee604bb1f92e17f5b36f316ff5366fb3db3a36c75258467"},
    ),
    "speech": Input(
        "72 utterances of LibriSpeech train-clean-100 (15 minutes, no transcripts) in calibration/; in validation/, "
        "103 utterances (12 minutes) of LibriSpeech test-other, VCTK (both CC BY 4.0), LJ Speech and others, with "
        "metadata.jsonl",
        {
            "calibration/metadata.jsonl": "3e5de90cdc24848594e5f218da8e85720173749ecf73acb5305ecfa51057c3e6",
            "validation/metadata.jsonl": "8c2d3b5ff14c1b878c1cf733907533e93e4bc3cf9c30d3d43c11bb26e4d4dcb7",
        },
    ),
}


@dataclass
class Lab:
    """The commands of one experiment, run in the folder of all runs.

    Attributes:
        work: the folder that commands run in.
        commit: the commit of this package.
        commands: what has been run, or was found there.
    """

    work: Path
    commit: str
    commands: list[str] = field(default_factory=list)

    def run(self, name: str, *words: object) -> dict:
        """Return what a command writes with `--json`, and its processor seconds as `cpu_seconds`.

        Args:
            name: of the folder or the result, which is kept as `NAME.json`.
            words: of `lightformers`, or beginning with a script of this folder.
        """
        program, *text = words = [str(word) for word in words]
        is_script = program.endswith(".py")
        self.commands.append(
            " ".join(["python", f"training/{program}", *text] if is_script else ["lightformers", *words])
        )
        line = [str(ROOT / "training" / program), *text] if is_script else ["-m", "lightformers_hf", *words]
        record = self.work / f"{name}.json"
        if record.is_file():
            kept = json.loads(record.read_text(encoding="utf-8"))
            if kept.items() >= self.describe().items():
                return kept["result"]
        record.parent.mkdir(parents=True, exist_ok=True)
        found = self.work / f"{name}.found.json"
        times = self.call([sys.executable, *line, "--json", str(found)])
        result = json.loads(found.read_text(encoding="utf-8"))
        result = ({"rows": result} if isinstance(result, list) else result) | times
        found.unlink()
        write_json(self.describe() | {"result": result}, record)
        return result

    def describe(self) -> dict[str, object]:
        """Return what a result of the last command belongs to: that command, the commit and the machine."""
        return {"command": self.commands[-1], "commit": self.commit, "machine": describe_machine()}

    def is_complete(self, command: str) -> bool:
        """Whether the folder of all runs has the result of a command, for this commit and machine."""
        kept = (json.loads(path.read_text(encoding="utf-8")) for path in self.work.rglob("*.json"))
        wanted = Lab(self.work, self.commit, [command]).describe()
        return any(isinstance(each, dict) and each.items() >= wanted.items() for each in kept)

    def call(self, line: list[str], folder: Path | None = None) -> dict[str, float]:
        """Run the last of the commands, in `folder` or in that of all runs; return its `seconds` and `cpu_seconds`."""
        print(f"$ {self.commands[-1]}", file=sys.stderr)
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
        done = subprocess.run(line, cwd=folder or self.work, env=os.environ | ONE_CORE, check=False)
        if done.returncode:
            raise ChildProcessError(f"The command failed with exit code {done.returncode}: {self.commands[-1]}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {"seconds": round(time.time() - began, 1), "cpu_seconds": round(spent, 1)}

    def compare(self, name: str, *words: object) -> list[dict]:
        """Return the rows of `compare_compressions.py`, which resumes by itself in a folder of this commit."""
        folder = f"{name}-{self.commit}"
        text = [*map(str, words), "--output-dir", folder]
        self.commands.append(" ".join(["python training/compare_compressions.py", *text]))
        self.call([sys.executable, str(ROOT / "training" / "compare_compressions.py"), *text])
        return json.loads((self.work / folder / "results.json").read_text(encoding="utf-8"))

    def study(self, name: str, tokenizer: str, *words: str) -> list[dict]:
        """Return the rows of the study `training/studies/NAME.txt` on Multi30k, which resumes by itself.

        `words` are options that replace the file's.
        """
        work = os.path.relpath(self.work, ROOT)  # the recipes of a study are named from the repository's folder
        data = f"{work}/inputs/multi30k"
        text = [f"@training/studies/{name}.txt", "--tokenizer-name", f"{work}/{tokenizer}", "--train-file",
                f"{data}/train.jsonl", "--validation-file", f"{data}/validation.jsonl", "--test-file",
                *(f"{data}/{test}.jsonl" for test in TESTS), "--output-dir",
                f"{work}/studies-{self.commit}/{name}", "--jobs", "2", *words]  # fmt: skip
        self.commands.append(" ".join(["python training/compare_architectures.py", *text]))
        self.call([sys.executable, "training/compare_architectures.py", *text], ROOT)
        rows = json.loads((self.work / f"studies-{self.commit}" / name / "results.json").read_text(encoding="utf-8"))
        return [{"study": name} | {key: row[key] for key in row if key != "model"} for row in rows]

    def convert(self, teacher: str, name: str, *options: object) -> dict:
        """Convert a teacher into the folder `name`: its report without the list of calibration sentences."""
        result = self.run(name, "convert", f"inputs/{teacher}", name, *options, "--overwrite")
        return {key: value for key, value in result.items() if key not in ("matrices", "calibrated_on")}

    def score(self, model: str, teacher: str, data: str, *options: object) -> dict:
        """Return the scores of a model on a data set beside its teacher's: `{metric: …, metric_difference: …}`."""
        name = f"{model}-{Path(data).stem}" if not model.startswith("inputs/") else f"{teacher}-{Path(data).stem}"
        beside = [] if model.startswith("inputs/") else ["--teacher", f"inputs/{teacher}"]
        result = self.run(name, "evaluate", model, *beside, "--data", f"inputs/{data}", *options)
        row = dict(result["model"]["scores"])
        for metric, difference in (result.get("differences") or {}).items():
            row |= {f"{metric}_difference": difference["value"]}
            row |= {f"{metric}_{end}": difference[end] for end in ("low", "high")}
        return row


Rows = Iterator[dict[str, object]]


def converted(lab: Lab) -> Rows:
    """The Multi30k teacher at five ratios, from pairs, from its own text, and by plain SVD; without `recover`."""
    yield {"model": "teacher", "ratio": 1, **score_tests(lab, "inputs/multi30k-de-en")}
    for ratio in (2, 3, 4, 8, 12):
        for text, given in {"pairs": PAIRS, "own": (), "plain": ("--method", "paper")}.items():
            name = f"converted/{ratio}-{text}"
            report = lab.convert("multi30k-de-en", name, "--ratio", ratio, *given)
            yield {"model": text, "ratio": ratio, **figures(report), **score_tests(lab, name)}


def confident(lab: Lab) -> Rows:
    """Two public checkpoints, trained without label smoothing, at ratios 2 to 4; each trained at ratio 3."""
    for teacher, (data, test, *languages) in PUBLIC.items():
        for row in compress_public(lab, teacher, data, test, languages):
            yield {"teacher": teacher, **row}


def compress_public(lab: Lab, teacher: str, data: str, test: str, languages: list[str]) -> Rows:
    """Rows of one checkpoint, scored on the part `test` of its data."""
    pairs = f"inputs/{data}/train.jsonl"
    options = (*languages, *GREEDY, "--metric", "exact-match", "--metric", "cer")

    def score(model: str) -> dict[str, float]:
        return lab.score(model, teacher, f"{data}/{test}.jsonl", *options)

    yield {"model": "teacher", "ratio": 1, **score(f"inputs/{teacher}")}
    for ratio in (2, 3, 4):
        for text in ("pairs", "own"):
            name = f"confident/{teacher}-{ratio}-{text}"
            given = ("--calibration", pairs, "--calibration-samples", 1000, *languages) if text == "pairs" else ()
            report = lab.convert(teacher, name, "--ratio", ratio, *given)
            yield {"model": text, "ratio": ratio, **figures(report), **score(name)}
    start, name = f"confident/{teacher}-3-pairs", f"confident/{teacher}-3-recovered"
    lab.run(name, "recover", start, name, "--teacher", f"inputs/{teacher}", "--data", pairs, *languages,
            "--minutes", 10, "--overwrite")  # fmt: skip
    yield {"model": "recovered", "ratio": 3, **score(name)}


def deploy(lab: Lab, model: str, engine: str, quantization: str) -> dict[str, object]:
    """Export a Multi30k model: its form, megabytes, and scores on both tests."""
    name = f"deployed/{Path(model).name}-{engine}-{quantization}"
    text = PAIRS if quantization == "int4" else ()
    report = lab.run(name, "export", model, name, "--to", engine, "--quantization", quantization, *text,
                     "--overwrite")  # fmt: skip
    row: dict[str, object] = {"form": f"{engine}-{quantization}", "megabytes": report["weight_bytes"] / 1e6}
    for test in TESTS:
        data = ("--data", f"inputs/multi30k/{test}.jsonl", *LANGUAGES, *GREEDY)
        scores = lab.run(f"{name}-{test}", "evaluate", name, *data)["model"]["scores"]
        row |= {f"{test}_{metric}": score for metric, score in scores.items()}
    return row


def recovered(lab: Lab) -> Rows:
    """The Multi30k teacher at ratio 4 (two seeds) and 8 after twenty minutes of one core; the checkpoint, and int8."""
    for ratio, seed in ((4, 0), (4, 1), (8, 0)):
        lab.convert("multi30k-de-en", f"converted/{ratio}-pairs", "--ratio", ratio, *PAIRS)
        name = f"recovered/{ratio}-{seed}"
        report = lab.run(name, "recover", f"converted/{ratio}-pairs", name, "--teacher", "inputs/multi30k-de-en",
                         *TRAINING, "--seed", seed, "--overwrite")  # fmt: skip
        times = {key: report[key] for key in ("seconds", "cpu_seconds")}
        row = {"ratio": ratio, "seed": seed, **times, **score_tests(lab, name)}
        yield row | {"deployed": deploy(lab, name, "ctranslate2", "int8")}


def compare_on_multi30k(lab: Lab, name: str, *words: object) -> Rows:
    """Yield the rows of a comparison of compressions of the Multi30k teacher, on both tests; outputs of 60 tokens."""
    data = [f"inputs/multi30k/{test}.jsonl" for test in TESTS]
    yield from lab.compare(
        name, "inputs/multi30k-de-en", "--train-file", "inputs/multi30k/train.jsonl", "--test-file", *data, *LANGUAGES,
        "--num-beams", 1, "--generation-max-length", 60, "--max-source-length", 64, "--starts", "converted", *words,
    )  # fmt: skip


def alternatives(lab: Lab) -> Rows:
    """Ways to a quarter of the parameters, after distillation: SVDs, `convert`, a small Transformer."""
    recipe = os.path.relpath(ROOT / "training" / "recipes" / "multi30k" / "small_transformer.yaml", lab.work)
    yield from compare_on_multi30k(
        lab, "alternatives", "--ratios", 4, "--methods", "paper", "inputs", "all", f"small={recipe}", "--trainings",
        "distilled", "--max-steps", 600, "--max-tokens", 1600, "--max-target-length", 64, "--bf16",
        "--attn-implementation", "eager", "--learning-rate", "1e-3", "--warmup-steps", 100, "--lr-scheduler-type",
        "linear", "--adam-beta2", 0.98, "--hidden-weight", 5, "--model.dropout", 0,
    )  # fmt: skip


def ablations(lab: Lab) -> Rows:
    """The parts of `convert` one after the other, at ratio 3, without `recover`."""
    methods = ("paper", "inputs", "loss", "matrices", "budget", "refit", "all", "own-text")
    yield from compare_on_multi30k(lab, "ablations", "--ratios", 3, "--methods", *methods, "--trainings")


def engines(lab: Lab) -> Rows:
    """The Multi30k teacher and its ratio-4 models in every engine, one core, one sentence at a time."""
    models = {"converted/4-pairs": (), "converted/4-narrow": ("--method", "narrow")}
    for name, method in models.items():
        lab.convert("multi30k-de-en", name, "--ratio", 4, *PAIRS, *method)
    options = ("--cores", 1, "--batch-size", 1, "--data", "inputs/multi30k/test_2016_flickr.jsonl", *LANGUAGES)
    result = lab.run("engines", "benchmark", "engines", "inputs/multi30k-de-en", *models, *options)
    yield from deployments(result)


def deployed(lab: Lab) -> Rows:
    """Quality against the bytes of the deployed model: three methods, two engines, int8 and int4."""
    for form in dict.fromkeys(form for _, form in FORMS):
        yield {"model": "teacher", "ratio": 1, **deploy(lab, "inputs/multi30k-de-en", *form.split("-"))}
    for ratio in (2, 4, 8):
        for method, form in FORMS:
            name = f"deployed/{ratio}-{method}"
            lab.convert("multi30k-de-en", name, "--ratio", ratio, *PAIRS, "--method", method)
            yield {"model": method, "ratio": ratio, **deploy(lab, name, *form.split("-"))}
    start, name = "deployed/4.5-narrow", "deployed/recovered"
    lab.convert("multi30k-de-en", start, "--ratio", 4.5, *PAIRS, "--method", "narrow")
    lab.run(name, "recover", start, name, "--teacher", "inputs/multi30k-de-en", *TRAINING, "--overwrite")
    yield {"model": "recovered", "ratio": 4.5, **deploy(lab, name, "ctranslate2", "int8")}


def deployments(result: dict) -> Rows:
    """Yield a row for each timing of engines: model, engine, beams, speeds, megabytes and scores."""
    for timing in result["timings"]:
        (deployed,) = [
            each for each in result["deployed"] if all(each[key] == timing[key] for key in ("model", "form"))
        ]
        row = {key: timing[key] for key in ("model", "form", "beams", "to_teacher", "to_baseline")}
        row |= {"tokens_per_second": timing["speed"]["tokens_per_second"], "megabytes": deployed["disk_bytes"] / 1e6}
        yield row | deployed["scores"]


def architectures(lab: Lab) -> Rows:
    """Decoding speed of the papers' architectures beside a Transformer, random weights, one core."""
    yield from lab.run("architectures", "benchmark_architectures.py", "--no-training", "--runs", 5)["rows"]


def conversion(lab: Lab) -> Rows:
    """Time and memory of a conversion by the size of the teacher; random weights of published shapes."""
    for shapes in ("opus-mt", "flan-t5-base"):
        yield lab.run(f"conversion/{shapes}", "benchmark_conversion.py", "--shapes", shapes)


def build_tokenizer(lab: Lab) -> None:
    """Make the tokenizer `bpe` of the small studies."""
    train = "inputs/multi30k/train.jsonl"
    text = [train, "--columns", "de", "en", "--kind", "bpe", "--vocab-size", "4000", "--output", "bpe"]
    lab.commands.append(" ".join(["python training/build_tokenizer.py", *text]))
    if not (lab.work / "bpe").is_dir():
        lab.call([sys.executable, str(ROOT / "training" / "build_tokenizer.py"), *text])


def studies(lab: Lab) -> Rows:
    """Small experiments of the papers: five epochs of Multi30k, the best of several rates by validation loss."""
    build_tokenizer(lab)
    for name, tokenizer in STUDIES.items():
        yield from lab.study(name, tokenizer)
    models = [f"studies-{lab.commit}/architectures_6m/{name}-rate-0.0007" for name in ("transformer", "partialformer")]
    data = ("--data", "inputs/multi30k/test_2016_flickr.jsonl", *LANGUAGES)
    yield from map(summarize_analysis, lab.run("analysis", "analyze.py", *models, *data)["rows"])


def parts(lab: Lab) -> Rows:
    """Subformer and PartialFormer without one of their parts, or with one more: small models, trained alike."""
    build_tokenizer(lab)
    for name in ("subformer_parts", "partialformer_parts", "partialformer_variants"):
        yield from lab.study(name, "bpe")


def widths(lab: Lab) -> Rows:
    """PartialFormer with more, fewer, wider and narrower heads, and with more and fewer features, trained alike."""
    build_tokenizer(lab)
    yield from lab.study("partialformer_table19", "bpe")


def transfer(lab: Lab) -> Rows:
    """LightFormer with 18 + 3 layers in six groups, trained from random weights, from SVD and from `convert`."""
    build_tokenizer(lab)
    recipe = "training/recipes/multi30k/small_lightformer.yaml,encoder_layers=18,decoder_layers=3"
    dense = ",".join(f"{name}=null" for name in ("encoder_groups", "attention_rank", "ffn_rank", "embedding_rank"))
    yield from lab.study("lightformer_teachers", "bpe", "--models", f"18-3={recipe},{dense}")
    folder = f"studies-{lab.commit}/lightformer_teachers/18-3-rate-0.001"
    models = {"teacher": folder}
    for method, text in {"paper": LANGUAGES, "low-rank": PAIRS}.items():
        models[method] = name = f"studies-{lab.commit}/lightformer_svd/18-3-{method}"
        options = ("--method", method, "--encoder-groups", 6, "--rank", 20, "--pattern", "embedding=34", *text)
        agreement = lab.run(name, "convert", folder, name, *options, "--overwrite")["agreement"]
        yield {"study": "converted", "name": method, "divergence": agreement and agreement["divergence"]}
    work = os.path.relpath(lab.work, ROOT)
    named = [f"{name}={work}/{folder}" for name, folder in models.items()]
    yield from lab.study("lightformer_table6", "bpe", "--models", *named, f"random={recipe},encoder_groups=6")


def summarize_analysis(row: dict) -> dict[str, object]:
    """Return the measures of one model: means over its layers, and sums over its parts."""
    found = {"study": "analysis", "model": Path(row["name"]).name, "macs": sum(row["macs"].values())}
    for stack in ("encoder", "decoder"):
        found |= {f"{stack}_{key}": fmean(row[key][stack]) for key in ("head_diversity", "token_uniformity")}
        layers = row["ffn"][stack]
        measures = ("activated", "neurons", "ratio", "efficiency")
        found |= {f"{stack}_{key}": fmean(layer[key] for layer in layers) for key in measures}
    return found | {"memory_bytes": row["memory_bytes"] - row["libraries_bytes"]}


def demo(lab: Lab) -> Rows:
    """The demo: a teacher trained on made-up sentences, compressed at ratio 4, recovered and exported."""
    yield from deployments(lab.run("demo", "demo", "demo-output", "--fresh")["engines"])


def whisper(lab: Lab) -> Rows:
    """Two Whisper models at three ratios of their linear layers, beside principal components of an encoder alone."""
    for teacher in WHISPERS:
        yield {"teacher": teacher, "model": "teacher", "ratio": 1, **score_speech(lab, f"inputs/{teacher}")}
        for ratio in (1.5, 2, 3):
            name, report = compress_speech(lab, teacher, ratio)
            row = {"teacher": teacher, "model": "converted", "ratio": ratio, **figures(report)}
            yield {**row, **score_speech(lab, name)}
    teacher, name, ratio = WHISPERS[0], f"whisper/{WHISPERS[0]}-pca", 1.25
    options = ("--calibration", "inputs/speech/calibration", "--ratio", ratio)
    found = lab.run(name, "pca_encoder.py", f"inputs/{teacher}", name, *options)
    yield {"teacher": teacher, "model": "components", "ratio": ratio, **found, **score_speech(lab, name)}


def compress_speech(lab: Lab, teacher: str, ratio: float) -> tuple[str, dict]:
    """Return the name of a model whose linear layers are smaller, and its report."""
    name, options = f"whisper/{teacher}-{ratio}", ("--pattern", "embedding=dense", "--calibration")
    return name, lab.convert(teacher, name, "--ratio", ratio, *options, "inputs/speech/calibration")


def score_speech(lab: Lab, model: str) -> dict[str, float]:
    """Return the error rates of a model for speech."""
    data = ("--data", "inputs/speech/validation", "--source-lang", "en", "--no-speed")
    name = f"whisper/{Path(model).name}-validation"
    return lab.run(name, "evaluate", model, *data)["model"]["scores"]


def whisper_recovered(lab: Lab) -> Rows:
    """The first teacher's model at ratio 2 after 30 minutes of one core, with the teacher's transcripts."""
    teacher = WHISPERS[0]
    start, _ = compress_speech(lab, teacher, 2)
    name, speech = f"{start}-recovered", "inputs/speech/calibration"
    lab.run(name, "recover", start, name, "--teacher", f"inputs/{teacher}", "--data", speech, "--minutes", 30,
            "--overwrite")  # fmt: skip
    yield {"teacher": teacher, "model": "recovered", "ratio": 2, **score_speech(lab, name)}


def whisper_engines(lab: Lab) -> Rows:
    """The first teacher and two of its models at ratio 2 in int8 on one core: speed, size and error rates."""
    teacher, name, speech = WHISPERS[0], f"whisper/{WHISPERS[0]}-2-narrow", "inputs/speech"
    start, _ = compress_speech(lab, teacher, 2)
    options = ("--method", "narrow", "--pattern", "embedding=dense", "--calibration", f"{speech}/calibration")
    lab.convert(teacher, name, "--ratio", 2, *options)
    options = ("--engine", "ctranslate2-int8", "--engine", "onnx-int8", "--cores", 1, "--batch-size", 1)
    options = (*options, "--num-beams", 1, "--data", f"{speech}/validation", "--source-lang", "en")
    found = lab.run("whisper/engines", "benchmark", "engines", f"inputs/{teacher}", name, start, *options)
    yield from deployments(found)


def score_tests(lab: Lab, model: str) -> dict[str, float]:
    """Return the scores of a Multi30k model on both tests."""
    found = {test: lab.score(model, "multi30k-de-en", f"multi30k/{test}.jsonl", *LANGUAGES, *GREEDY) for test in TESTS}
    return {f"{test}_{key}": value for test, row in found.items() for key, value in row.items()}


def figures(report: dict) -> dict[str, object]:
    """Return what pages quote of a conversion's report."""
    agreement = report.get("agreement") or {}
    names = ("parameters_before", "parameters_after", "cpu_seconds", "seconds")
    return {name: report[name] for name in names if name in report} | {"agreement": agreement.get("share")}


@dataclass(frozen=True)
class Experiment:
    """An entry of the suite: how its rows are made, from which inputs, and in how many minutes of one core."""

    rows: Callable[[Lab], Rows]
    inputs: tuple[str, ...]
    minutes: int
    seeds: tuple[int, ...] = (0,)

    @property
    def question(self) -> str:
        """What the experiment measures, in one sentence."""
        return " ".join((self.rows.__doc__ or "").split())


def scale(lab: Lab) -> Rows:
    """Seconds and memory before the first step of a recovery, and of a conversion, by the size of the corpus."""

    def measure(name: str, what: str, data: str, *words: str) -> dict:
        return lab.run(f"scale/{name}", "measure_scale.py", what, "inputs/multi30k-de-en", f"scale/{data}", *words)

    lab.convert("multi30k-de-en", "scale/light", "--ratio", 4)
    for number in (10_000, 1_000_000, 10_000_000):
        data = lab.work / "scale" / f"{number}.jsonl"
        write_pairs(data, number)
        for what, words in {"first-step": ("--light", "scale/light"), "conversion": ()}.items():
            yield {"what": what, "pairs": number, **measure(f"{what}-{number}", what, data.name, *words)}
        data.unlink()
    (lab.work / "scale" / "shards").mkdir(exist_ok=True)
    for number in range(16):
        write_pairs(lab.work / "scale" / "shards" / f"{number:02}.jsonl", 250, seed=number)
    yield from ({"what": "distill", **row} for row in measure("distill", "distill", "shards")["rows"])


EXPERIMENTS = {
    "converted": Experiment(converted, ("multi30k", "multi30k-de-en"), 25),
    "confident": Experiment(confident, (*PUBLIC, *(data for data, *_ in PUBLIC.values())), 40),
    "recovered": Experiment(recovered, ("multi30k", "multi30k-de-en"), 70, (0, 1)),
    "alternatives": Experiment(alternatives, ("multi30k", "multi30k-de-en"), 50),
    "ablations": Experiment(ablations, ("multi30k", "multi30k-de-en"), 15),
    "engines": Experiment(engines, ("multi30k", "multi30k-de-en"), 20),
    "deployed": Experiment(deployed, ("multi30k", "multi30k-de-en"), 65),
    "architectures": Experiment(architectures, (), 8),
    "conversion": Experiment(conversion, (), 15),
    "scale": Experiment(scale, ("multi30k-de-en",), 25),
    "studies": Experiment(studies, ("multi30k", "multi30k-de-en"), 180, (42, 0, 1)),
    "parts": Experiment(parts, ("multi30k",), 245, (42, 0)),
    "widths": Experiment(widths, ("multi30k",), 120, (42,)),
    "transfer": Experiment(transfer, ("multi30k",), 90, (42, 0)),
    "demo": Experiment(demo, (), 10),
    "whisper": Experiment(whisper, (*WHISPERS, "speech"), 70),
    "whisper_recovered": Experiment(whisper_recovered, ("whisper-base", "speech"), 45),
    "whisper_engines": Experiment(whisper_engines, ("whisper-base", "speech"), 45),
}


def list_commands(name: str, work: Path) -> None:
    """Print the commands of an experiment as they were recorded, and whether each would run."""
    record, lab = read_record(name), Lab(work, find_commit())
    print(f"# {name}: {EXPERIMENTS[name].minutes} minutes of one core in all; inputs: {EXPERIMENTS[name].inputs}")
    for command in (each.replace(record["commit"], lab.commit) for each in record["commands"]):
        print(("complete " if lab.is_complete(command) else "to run   ") + command)


def prepare(name: str, work: Path) -> None:
    """Check the files of an input, downloading them where that is allowed.

    Raises `FileNotFoundError` where they are missing and cannot be had, `ValueError` where they are others.
    """
    known, folder = INPUTS[name], work / "inputs" / name
    missing = [file for file in known.files if not (folder / file).is_file()]
    if missing and known.download:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            known.download(folder)
        except OSError as error:
            raise FileNotFoundError(f"{name} could not be downloaded ({error}): put it into {folder}.") from None
    elif missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}. Put the input there: {known.origin}.")
    for file, expected in known.files.items():
        if hashlib.sha256((folder / file).read_bytes()).hexdigest() != expected:
            raise ValueError(f"{folder / file} is another file than the experiments were made with: {known.origin}.")


def reproduce(name: str, work: Path) -> None:
    """Run one experiment and write its figures to `docs/results/data/NAME.json`."""
    experiment, lab = EXPERIMENTS[name], Lab(work, find_commit())
    for each in experiment.inputs:
        prepare(each, work)
    rows = list(experiment.rows(lab))
    record = {
        "name": name,
        "question": experiment.question,
        "date": date.today().isoformat(),
        "commit": lab.commit,
        "machine": describe_machine(),
        "versions": {
            "lightformers_hf": lightformers_hf.__version__,
            **{each: importlib.metadata.version(each) for each in PACKAGES},
        },
        "seeds": experiment.seeds,
        "units": {name: unit for name, unit in UNITS.items() if any(name in key for row in rows for key in row)},
        "commands": lab.commands,
        "rows": rows,
    }
    (RESULTS / "data").mkdir(exist_ok=True)
    write_json(record, RESULTS / "data" / f"{name}.json")


def find_commit() -> str:
    """Return the last commit that changed what is measured; raise `ValueError` where files differ from it."""
    measured = ["lightformers_hf", "training", ":!training/reproduce.py"]

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    if changed := git("status", "--porcelain", "--", *measured):
        raise ValueError(f"Figures belong to a commit: commit these changes, or take them back.\n{changed}")
    return git("log", "-1", "--format=%h", "--", *measured)


def describe_machine() -> dict[str, object]:
    """Return processor, cores, instruction sets and memory of this machine, without its name."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    known = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    known = {key.strip(): value.strip() for key, value in known.items()}
    flags = known.get("flags", known.get("Features", "")).split()
    return {
        "processor": known.get("model name", platform.machine()),
        "cores": os.cpu_count(),
        "instruction_sets": [flag for flag in FLAGS if flag in flags],
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
    }


def read_record(name: str) -> dict:
    """Return the figures of an experiment, and how they were measured, from `docs/results/data/NAME.json`."""
    return json.loads((RESULTS / "data" / f"{name}.json").read_text(encoding="utf-8"))


def render_pages() -> dict[Path, str]:
    """Return the text of every page of results, and of the README, made from the templates and the figures.

    Raises `ValueError` where a page quotes figures of two commits, and `FileNotFoundError` where figures are missing.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(RESULTS / "templates"), undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True, trim_blocks=True, lstrip_blocks=True, autoescape=False,
    )  # fmt: skip
    pages = {}
    folder = RESULTS / "templates"
    for template in [*sorted(folder.glob("*.md")), *folder.glob("readme.md.in")]:
        used: dict[str, dict] = {}

        def data(name: str, *, apart: bool = False, used: dict[str, dict] = used) -> dict:
            """Return the figures of an experiment; `apart`: the page names their commit, or they depend on none."""
            record = read_record(name)
            used |= {} if apart else {name: record}
            return record

        names = {"data": data, "signed": signed, "spread": spread, "mean": fmean, "find": find, "forms": FORMS}
        text = environment.get_template(template.name).render(names)
        commits = {record["commit"] for record in used.values() if "commit" in record}
        if len(commits) > 1:
            raise ValueError(f"{template.name} quotes figures of several commits: {', '.join(sorted(commits))}.")
        if template.name == "readme.md.in":
            parts = (ROOT / "README.md").read_text(encoding="utf-8").split(TABLE)
            parts[1::2] = [f"\n{table.strip()}\n" for table in text.split(TABLE)]
            pages[ROOT / "README.md"] = TABLE.join(parts)
        else:
            pages[(ROOT if template.name == "RESULTS.md" else RESULTS) / template.name] = text
    return pages


def draw_pictures() -> None:
    """Draw BLEU against parameters and against deployed bytes, for light and dark pages."""
    converted, score = read_record("converted")["rows"], "test_2016_flickr_bleu"
    sizes = {row["ratio"]: row["parameters_after"] / 1e6 for row in converted if row["model"] == "pairs"}
    trained = [row | {"model": "trained"} for row in read_record("recovered")["rows"] if row["seed"] == 0]
    names = {"trained": "convert and recover (20 minutes)", "pairs": "convert", "plain": "plain SVD"}

    def paint(panels: list) -> None:
        (axes,) = panels
        for model, label in names.items():
            rows = [row for row in [*converted, *trained] if row["model"] == model]
            axes.plot([sizes[row["ratio"]] for row in rows], [row[score] for row in rows], "o-", label=label)
        axes.axhline(
            find(converted, model="teacher")[score], color="0.5", linestyle="--", linewidth=1, label="teacher"
        )
        axes.set(xlabel="parameters, millions", ylabel="BLEU, Flickr 2016", ylim=(0, None))

    def paint_deployed(panels: list) -> None:
        (axes,) = panels
        rows = read_record("deployed")["rows"]
        for (model, form), label in FORMS.items():
            line = [row for row in rows if row["form"] == form and row["model"] in ("teacher", model)]
            axes.plot(
                [row["megabytes"] for row in line], [row[score] for row in line], "o-", label=label.replace("`", "")
            )
        axes.set(xlabel="deployed model, MB", ylabel="BLEU, Flickr 2016", ylim=(0, None))

    save_pictures(ROOT / "docs" / "pictures" / "compression", paint)
    save_pictures(ROOT / "docs" / "pictures" / "deployed", paint_deployed)


def find(rows: list[dict], **fields: object) -> dict:
    """Return the one row that has these fields."""
    (row,) = [row for row in rows if all(row.get(key) == value for key, value in fields.items())]
    return row


def signed(value: float, digits: int = 1) -> str:
    """Return a difference with its sign: `−0.4`, `+1.2`."""
    return f"{value:+.{digits}f}".replace("-", "−")


def main() -> None:
    """Run experiments, list them, or write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="experiments: " + ", ".join(EXPERIMENTS))
    parser.add_argument("--all", action="store_true", help="run every experiment")
    parser.add_argument("--list", action="store_true", help="print experiments, inputs and minutes of one core")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and which have results, run none")
    parser.add_argument("--pages", action="store_true", help="write the pages from the figures")
    parser.add_argument("--work", type=Path, default=Path("results-work"), help="folder of inputs and runs")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in EXPERIMENTS]:
        parser.error(f"There is no experiment {', '.join(unknown)}: expected {', '.join(EXPERIMENTS)}.")
    names = list(EXPERIMENTS) if args.all else args.names
    if not (names or args.list or args.pages):
        parser.error("Name an experiment, or give --all, --list or --pages.")
    if args.list:
        table = Table("experiment", "minutes", "inputs", "question")
        for name, experiment in EXPERIMENTS.items():
            table.add_row(name, str(experiment.minutes), ", ".join(experiment.inputs), experiment.question)
        Console().print(table)
    for name in names:
        (list_commands if args.dry_run else reproduce)(name, args.work.resolve())
    if args.pages:
        for path, text in render_pages().items():
            path.write_text(text, encoding="utf-8")
        draw_pictures()


if __name__ == "__main__":
    run_script(main)
