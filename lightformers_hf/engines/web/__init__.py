"""A static page that translates, or transcribes sound, in the browser.

It has the model in int8 or int4, transformers.js and its WebAssembly. `app.js` is the page, `worker.js` the model in a
Web Worker, `sw.js` keeps all files for later visits without network.
transformers.js and ONNX Runtime come from the npm registry at pinned versions; npm checks their digests.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from transformers import AutoConfig, GenerationConfig

from ...files import CARD_FILE, PAGE_FILE, atomic_output, check_output, read_json, write_json
from ...in_memory import AnyModel, is_loaded
from ...languages import split_language
from ...loading import load_pretrained, printable_name, resolve_source
from ...options import check_speech, takes
from ...results import Result
from ...speech import check_language, reads_sound
from ..arguments import WebArguments
from ..write import ExportReport, export, folder_bytes

TRANSFORMERS_JS = "4.3.2"
SMALLEST_SHARED = 4096  # bytes of a tensor
PAGE_FILES = ("index.html", "style.css", "app.js", "worker.js", "sw.js")
MODEL_FILES = ("config.json", "generation_config.json", "tokenizer*.json", "preprocessor_config.json", "onnx/*.onnx")
QUANTIZATIONS = ("int8", "int4")
# {package: files of it that the page loads}
VENDORED = {
    "@huggingface/transformers": ("dist/transformers.min.js", "LICENSE"),
    "onnxruntime-web": ("dist/ort-wasm-simd-threaded.mjs", "dist/ort-wasm-simd-threaded.wasm"),
}


@dataclass(frozen=True)
class WebReport(Result):
    """A page that was written. Sizes are those on disk, and sent by a server that compresses files."""

    models: list[ExportReport]  # reports of the model, and of the one that it is compared with
    model_bytes: int
    model_gzip_bytes: int
    program_bytes: int  # size of all other files except the model to compare with
    program_gzip_bytes: int

    def parts(self) -> list[str]:
        """Return the sizes."""
        sizes = {"Model": (self.model_bytes, self.model_gzip_bytes)}
        sizes["transformers.js and ONNX Runtime"] = self.program_bytes, self.program_gzip_bytes
        lines = [f"{name}: {a / 1e6:.1f} MB on disk, {b / 1e6:.1f} MB with gzip." for name, (a, b) in sizes.items()]
        return [*lines, *dict.fromkeys(line for report in self.models for line in report.tokenizer.lines())]


@takes(WebArguments)
def export_web(call: WebArguments) -> WebReport:
    """Write a folder with a page that translates in the browser, or transcribes a sound file and the microphone.

    Args:

    Raises:
        ValueError: as `export`; also a tokenizer that `tokenizer.json` cannot hold; npm is missing, or fails.
        FileNotFoundError, FileExistsError, BlockingIOError: as `export`.
    """
    output, names = call.output, {"model": call.model} | ({"compare": call.compare} if call.compare else {})
    inputs = [*names.values(), call.calibration]
    check_output(output, overwrite=call.overwrite, inputs=inputs)
    if call.quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization is {call.quantization!r}; a page has {' or '.join(QUANTIZATIONS)}")
    is_speech = not is_loaded(call.model) and reads_sound(load_pretrained(AutoConfig, resolve_source(call.model)))
    if is_speech:
        check_speech(call, printable_name(call.model))
    asked = ("quantization", "calibration", *(() if is_speech else ("source_lang", "target_lang")))
    options = {name: getattr(call, name) for name in asked}
    with atomic_output(output, overwrite=call.overwrite, inputs=inputs) as temporary:
        versions = vendor(temporary / "vendor")
        reports = [_write_model(name, temporary / key, options) for key, name in names.items()]
        if len({report.reads_sound for report in reports}) > 1:
            raise ValueError("one of model and compare reads sound and the other one text: give two of one kind")
        from ..onnx_model import DTYPES  # imports an optional dependency, which is there

        title = f"{printable_name(call.model)} in the browser"
        tokenizer = read_json(temporary / "model" / "tokenizer_config.json")
        language = call.source_lang or tokenizer.get("source_lang") or tokenizer.get("src_lang")
        target = call.target_lang or tokenizer.get("target_lang") or tokenizer.get("tgt_lang")
        models = [
            {"folder": key, "name": printable_name(name), "bytes": folder_bytes(temporary / key)}
            | {"dtype": DTYPES[call.quantization]}
            for key, name in names.items()
        ]
        page: dict[str, Any] = {
            "title": title,
            "example": "",
            "language": find_language(language),
            "target": find_language(target),
        }
        task, content = ("automatic-speech-recognition", "sound") if is_speech else ("translation", "text")
        if is_speech:
            generation = GenerationConfig.from_pretrained(temporary / "model")
            check_language(generation, call.source_lang, printable_name(call.model))
            codes = getattr(generation, "lang_to_id", None) or {}
            page["language"], page["languages"] = call.source_lang, sorted(code.strip("<|>") for code in codes)
        for name in PAGE_FILES:
            shutil.copyfile(Path(__file__).parent / name, temporary / name)
        digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(temporary.rglob("*.*"))]
        worker = temporary / "sw.js"
        version = hashlib.sha256("".join([*digests, json.dumps(page)]).encode()).hexdigest()[:16]
        write_json({**page, "version": version, "models": models}, temporary / PAGE_FILE)
        worker.write_text(worker.read_text(encoding="utf-8").replace("VERSION", version), encoding="utf-8")
        programs = dict(zip(("version", "runtime"), map(versions.__getitem__, VENDORED), strict=True))
        card = (
            (Path(__file__).parent / "card.md")
            .read_text(encoding="utf-8")
            .format(title=title, folder=Path(output).name, task=task, content=content, **programs)
        )
        (temporary / CARD_FILE).write_text(card, encoding="utf-8")
        sizes = {is_model: [0, 0] for is_model in (True, False)}
        for file in temporary.rglob("*"):
            if file.is_file() and temporary / "compare" not in file.parents:
                total = sizes[temporary / "model" in file.parents]
                total[0] += file.stat().st_size
                total[1] += len(gzip.compress(file.read_bytes(), 6))
        return WebReport(reports, *sizes[True], *sizes[False])


def find_language(name: str | None) -> str | None:
    """Return the code of a language that a browser understands: `de` of `de_DE`, `deu` of `x=deu_Latn`."""
    found = re.fullmatch(r"([a-z]{2,3})([_-].*)?", split_language(name)[1] or "")
    return found[1] if found else None


def _write_model(name: AnyModel, folder: Path, options: dict[str, Any]) -> ExportReport:
    """Export a model with options of `export`, and keep only the files that a browser loads."""
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch, "made")
        report = export(name, made, to="onnx", **options)
        if report.tokenizer.missing:
            raise ValueError(f"{name} cannot run in a browser, it has no tokenizer.json: {report.tokenizer.missing}")
        for file in (file for pattern in MODEL_FILES for file in made.glob(pattern)):
            target = folder / file.relative_to(made)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
    if not report.reads_sound:  # whose encoder has no embedding matrix
        from ..onnx_model import SUFFIXES  # imports an optional dependency, which is there

        share_weights(folder / "onnx", SUFFIXES[options["quantization"]])
    return report


def share_weights(folder: Path, end: str) -> None:
    """Have the decoder read the tensors that the encoder holds too from the encoder's file, as external data.

    The worker of the page names that file to transformers.js, which opens no file of two graphs otherwise.
    """
    import onnx  # an optional dependency

    encoder, decoder = (folder / f"{name}{end}.onnx" for name in ("encoder_model", "decoder_model_merged"))
    content, model = encoder.read_bytes(), onnx.load(decoder)
    for tensor in model.graph.initializer:
        start = content.find(tensor.raw_data) if len(tensor.raw_data) > SMALLEST_SHARED else -1
        if start >= 0:
            fields = {"location": encoder.name, "offset": start, "length": len(tensor.raw_data)}
            tensor.ClearField("raw_data")
            tensor.data_location = onnx.TensorProto.EXTERNAL
            for key, value in fields.items():
                tensor.external_data.add(key=key, value=str(value))
    decoder.write_bytes(model.SerializeToString())


def vendor(folder: Path) -> dict[str, str]:
    """Put transformers.js and the WebAssembly that it runs into a new folder. Return {package: version}."""
    if shutil.which("npm") is None:
        raise ValueError(
            "the page needs transformers.js from the npm registry, and npm is not installed: install Node"
        )
    folder.mkdir()
    versions = {"@huggingface/transformers": TRANSFORMERS_JS}
    with tempfile.TemporaryDirectory() as scratch:
        for package, files in VENDORED.items():
            archive = _run_npm(["pack", f"{package}@{versions[package]}"], Path(scratch))[-1]
            with tarfile.open(Path(scratch, archive)) as content:
                read: dict[str, Any] = {file: content.extractfile(f"package/{file}") for file in files}
                for file, opened in read.items():
                    (folder / Path(file).name).write_bytes(opened.read())
                needed = json.load(cast(Any, content.extractfile("package/package.json"))).get("dependencies", {})
            versions |= {name: needed[name] for name in VENDORED if name in needed}
    return versions


def _run_npm(arguments: Sequence[str], folder: Path) -> list[str]:
    """Lines that npm prints. Raises `ValueError` where it fails."""
    limits = ["--loglevel=error", "--fetch-retries=1", "--fetch-retry-mintimeout=1000"]  # by default it waits a minute
    done = subprocess.run(["npm", *arguments, *limits], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = re.findall(r"^npm error (\w.*)", done.stderr, re.MULTILINE) or [done.stderr.strip() or "no message"]
        reason = "; ".join(lines[:3])  # the cause: the last ones name a log
        raise ValueError(
            f"npm {' '.join(arguments)} failed: {reason}. The npm registry must be reachable, and npm's cache writable"
        )
    return done.stdout.strip().splitlines()
