"""The commands of `lightformers`, each one call of a public function.

Each command imports its modules itself: `--help`, a wrong option and TAB wait for neither torch nor transformers.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from .. import __version__
from ..arguments import (
    BEGAN,
    CompareArguments,
    CompressArguments,
    ConvertArguments,
    DemoArguments,
    DistillArguments,
    EnginesArguments,
    EvaluateArguments,
    PlanArguments,
    PushArguments,
    RecoverArguments,
    ReportArguments,
    TrainingOptions,
    TranslateArguments,
)
from ..conversion.options import CompressionOptions
from ..engines import ARGOS, check_engine_name, split_deployment
from ..engines.arguments import DeploymentOptions, ExportArguments, WebArguments
from ..files import PAGE_FILE, check_file, check_folder, check_output, write_whole
from .framework import Answer, Group, command
from .parameters import FILE, check_installed, given, option, parameters_of, pop_languages, read_options
from .streams import check_open, end_on_sigterm, open_streams, without_proxies

NAME = "lightformers"


@command(*parameters_of(PlanArguments))
def plan(model: str, **options: Any) -> Answer:
    """Show the plan of `convert` for every matrix: rank, parameters, energy kept, error. Writes nothing.

    Example: lightformers plan Helsinki-NLP/opus-mt-de-en --ratio 3 --encoder-groups 3
    """
    found = read_options(options)
    from ..workflows.convert import plan as run

    return Answer.of(run(model, **found))


@command(*parameters_of(ConvertArguments))
def convert(model: str, output: Path, overwrite: bool, private: bool, **options: Any) -> Answer:
    """Compress a trained Marian, BART, mBART, Pegasus, M2M100, T5, Whisper or LightFormer checkpoint.

    AutoModelForSeq2SeqLM loads the output, and AutoModelForSpeechSeq2Seq that of a Whisper. `recover` restores lost
    quality.

    Example: lightformers convert Helsinki-NLP/opus-mt-de-en opus-light --ratio 2
    """
    found = read_options(options)
    check_output(output, overwrite=overwrite, inputs=[model, found.get("calibration"), *found.get("vocabulary", ())])
    from ..loading import has_tokenizer
    from ..workflows.convert import convert as run

    report = run(model, output, overwrite=overwrite, private=private, **found)
    lines = [f"Written to {output}; its compression.json lists every matrix."]
    if not has_tokenizer(output):
        lines.append(f"{model} has no tokenizer, so {output} has none either: put the files of one into it.")
    if name := found.get("push_to_hub"):
        lines.append(f"Pushed to {name}.")
    return Answer.of(report, *lines, output=str(output))


@command(*parameters_of(RecoverArguments))
def recover(model: str, output: Path, **options: Any) -> Answer:
    """Recover the quality of a compressed model: train it with its teacher for so many minutes.

    The settings follow from how far the model was compressed and from the time, which the first steps measure. The
    model with the best validation score is kept. The score is the first --metric; by default chrF, for outputs of one
    word the character error rate, for summaries ROUGE-L, for speech the word error rate. The same command resumes an
    interrupted recovery.

    Example: lightformers recover light recovered --teacher opus-mt-de-en --data train.jsonl --minutes 30
    """
    token = BEGAN.set(time.monotonic())
    try:
        from ..workflows.recover import recover as run

        return Answer.of(run(model, output, **given(**options)), f"Written to {output}.")
    finally:
        BEGAN.reset(token)


@command(*parameters_of(DistillArguments))
def distill(teacher: str, data: str, output: Path, **options: Any) -> Answer:
    """Let the teacher translate a corpus of any size, and write its pairs as shards for recover and compress.

    Empty, repeated, too long and copied lines are dropped and counted. The same command resumes after a kill, and
    gives the same files as without the kill. --ray needs pip install 'lightformers_hf[ray]'.

    Example: lightformers distill opus-mt-de-en "train-*.jsonl.gz" distilled --keep 90%
    """
    from ..workflows.distill import distill as run

    return Answer.of(run(teacher, data, output, **options), f"Written to {output}.")


HEADINGS = {"Data and training": TrainingOptions, "Conversion": CompressionOptions, "Deployment": DeploymentOptions}


@command(*parameters_of(CompressArguments, HEADINGS))
def compress(model: str, output: Path, **options: Any) -> Answer:
    """Make a trained model small and ready to deploy: convert, recover, evaluate, export and report in one call.

    The folder gets: recovered (to push), deployed (for the engine), report.html, and all measurements. For an engine
    without low-rank matrix multiplications the method is narrow, unless --method names another. The same command
    resumes an interrupted compression.

    Examples:

        lightformers compress opus-mt-de-en small --data train.jsonl --ratio 4

        lightformers compress nllb pair --data train.jsonl --vocabulary train.jsonl --languages deu_Latn,eng_Latn \
--source-lang de=deu_Latn --target-lang en=eng_Latn --shortlist train.jsonl
    """
    check_engine_name(options["to"])
    found = read_options(options)
    from ..workflows.compress import compress as run

    return Answer.of(run(model, output, **found))


@command(*parameters_of(ExportArguments))
def export(model: str, output: Path, to: str, overwrite: bool, **options: Any) -> Answer:
    """Write a LightFormer, or a dense model that becomes one, for CTranslate2 or ONNX Runtime, which run it fastest.

    The layout of --to onnx is that of transformers.js and optimum; `lightformers web` writes a page around it.

    Its outputs are compared with the checkpoint's. A message lists what the engine does not support. Needs
    pip install 'lightformers_hf[export]'.

    Example: lightformers export opus-mt-de-en-light opus-mt-de-en-int8 --to ctranslate2 --quantization int8
    """
    check_engine_name("ctranslate2" if to == ARGOS else to)
    check_output(output, overwrite=overwrite, inputs=[model, options["shortlist"], options["calibration"]])
    from ..engines.write import export as run

    report = run(model, output, to=to, overwrite=overwrite, **options)
    return Answer({"output": str(output), **report.to_dict()}, report.lines(output))


@command(*parameters_of(WebArguments))
def web(model: str, output: Path, overwrite: bool, **options: Any) -> Answer:
    """Write a static web page that translates, or transcribes sound, in the browser, with transformers.js alone.

    The folder works on any web server, and is a static Space on the Hub: see `lightformers push`. Needs npm, and
    pip install 'lightformers_hf[onnx]'.

    Example: lightformers web opus-mt-de-en-light page --compare opus-mt-de-en
    """
    check_output(output, overwrite=overwrite, inputs=[model, options["compare"], options["calibration"]])
    from ..engines.web import export_web

    report = export_web(model, output, overwrite=overwrite, **options)
    opening = f"Written to {output}. Open it: python -m http.server --directory {output}, then http://localhost:8000"
    return Answer.of(report, opening, output=str(output))


@command(*parameters_of(TranslateArguments))
def translate(model: str, file: Path | None, output: Path | None, device: str, **options: Any) -> None:
    """Translate (or summarize) text, line by line.

    A line may have several sentences. Lines are translated as they arrive, also from a pipe. A file given as
    --output appears when all of it is written.

    Examples:

        echo "Ein Hund läuft." | lightformers translate Helsinki-NLP/opus-mt-de-en

        lightformers translate ./small news.de --output news.en --num-beams 4
    """
    file, output = (None if str(path) == "-" else path for path in (file, output))
    if file is None:
        check_open("stdin", "name a file to translate")
    if output is None:
        check_open("stdout", "give --output a file")
    else:
        check_file(output, [model, file])
    with ExitStack() as stack:
        source: Any = stack.enter_context(file.open("rb")) if file else sys.stdin.buffer
        from tqdm.auto import tqdm

        from ..evaluation.translate import load_translator, translate_stream

        network, tokenizer, prefix = load_translator(model, device=device, **pop_languages(options))
        sink = stack.enter_context(write_whole(output)) if output else sys.stdout.buffer
        bar = stack.enter_context(tqdm(unit="text", disable=None))
        translate_stream(source, sink, network, tokenizer, prefix=prefix, progress=bar, **given(**options))


@command(*parameters_of(EvaluateArguments))
def evaluate(model: str, **options: Any) -> Answer:
    """Measure a checkpoint, beside its teacher if there is one: quality, parameters, bytes, speed, memory.

    Quality is BLEU and chrF; for outputs of one word exact match, character error rate and chrF; for summaries ROUGE;
    for speech word and character error rate. --metric chooses.

    Without --source-lang and --target-lang, the languages that the tokenizer names are read from the data's column
    'translation'.

    Speed is tokens/s on one core: 50 sentences of average length, one at a time, 10 runs, model and teacher in turn.
    That of an export is measured by `benchmark engines`.

    Examples:

        lightformers evaluate ./small --teacher ./teacher --data test.jsonl

        lightformers evaluate ./small --data test.csv --source-lang de --target-lang en --json -
    """
    from ..evaluation.evaluate import evaluate as run

    return Answer.of(run(model, **options))


@command(*parameters_of(CompareArguments))
def compare(teacher: str, model: str, port: int | None, host: str, browser: bool, **options: Any) -> None:
    """Serve a page to try two models side by side: type a sentence, see both translations, tokens and time.

    Nothing leaves this machine. Ctrl-C ends it. The same page is a Space on the Hub: see lightformers_hf/app.py. Needs
    pip install 'lightformers_hf[app]'.

    Example: lightformers compare opus-mt-de-en opus-mt-de-en-light --open
    """
    check_installed("gradio", "app", "compare")
    with without_proxies():  # gradio's clients look for them when it is imported
        from ..app import build, check_address, serve, wait

    check_address(host, port)
    page = build(teacher, model, **pop_languages(options), **options)
    with without_proxies():
        address = serve(page, host=host, port=port, browser=browser)
        click.echo(f"Both models are at {address} until Ctrl-C.")
        wait(page)


@command(
    *parameters_of(PushArguments),
    option("--dry-run", is_flag=True, help="List the files that would be sent, and send nothing."),
)
def push(model: Path, name: str, results: tuple[Path, ...], dry_run: bool, **options: Any) -> Answer:
    """Share a checkpoint on the Hub with its code, so that users without this package can load it.

    One commit: weights, configuration, tokenizer, code, compression.json and a model card. An export becomes a model
    repository, and a page of lightformers web a static Space. Log in before with 'hf auth login', or set HF_TOKEN. The
    same command resumes an interrupted push.

    Examples:

        lightformers push recovered user/opus-mt-de-en-light --dry-run

        lightformers push recovered user/opus-mt-de-en-light --results results.json

        lightformers push recovered opus-mt-de-en-light --private --revision v2 --message "Trained longer"
    """
    if not (model / PAGE_FILE).is_file():
        check_folder(model)
    call = PushArguments(model, name, results=results, **options)
    from ..hub import preview_push, push_to_hub

    if dry_run:
        sizes = preview_push(model, name, results=results)
        lines = [f"{size:15,}  {file}" for file, size in sizes.items()]
        asked = {"private": call.private, f"branch {call.revision}": call.revision, repr(call.message): call.message}
        target = ", ".join([name, *(text for text, value in asked.items() if value)])
        return Answer({"name": name, "files": sizes}, [*lines, f"{sum(sizes.values()):15,}  bytes to {target}."])
    return Answer.of(push_to_hub(model, name, results=results, **options))


@command(*parameters_of(DemoArguments))
def demo(output: Path, seed: int, fresh: bool) -> Answer:
    """See it all work in five to ten minutes, offline: train a teacher, compress it, recover its quality, measure.

    The same command resumes an interrupted demo; needs pip install 'lightformers_hf[demo]'.

    Example: lightformers demo demo-output
    """
    from ..demo.run import DemoSettings, run_demo
    from ..results import make_console

    try:
        results = run_demo(output, DemoSettings(seed=seed), fresh=fresh, console=make_console())
    except KeyboardInterrupt:
        click.echo(f"\nStopped. The complete parts stay in {output}: the same command resumes there.", err=True)
        raise click.exceptions.Exit(130) from None
    return Answer(results)


@command(
    *parameters_of(ReportArguments),
    option("--output", type=FILE, default="report.html", help="The page to write. A file of that name is replaced."),
)
def report(model: str, output: Path, **options: Any) -> Answer:
    """Write one HTML page about a compressed model: plan, pictures, translations beside the teacher's.

    The page loads nothing from elsewhere, and follows the browser's light or dark mode. The plan and the errors come
    from compression.json, the training curve from trainer_state.json. Needs pip install 'lightformers_hf[demo]'.

    Example: lightformers report ./small --teacher ./teacher --data test.jsonl --results results.json
    """
    check_installed("matplotlib", "demo", "report")
    check_file(output, [model, *(options[name] for name in ("teacher", "data")), *options["results"]])
    from ..evaluation.page import report_page

    page = report_page(model, **given(**options), progress=True)
    with write_whole(output) as file:
        file.write(page.encode())
    return Answer({"output": str(output)}, [f"Written to {output}: open it in a browser."])


@command(*parameters_of(EnginesArguments))
def engines(teacher: str, students: tuple[str, ...], forms: tuple[str, ...], **options: Any) -> Answer:
    """Time a teacher and its students in transformers, CTranslate2 and ONNX Runtime, in float32 and int8.

    Ratios are to the teacher in the same engine, and to the teacher in CTranslate2 int8, the usual deployment.
    Needs pip install 'lightformers_hf[export]'.

    Example: lightformers benchmark engines opus-mt-de-en recovered --data test.jsonl --cores 1 --batch-size 1
    """
    for name in forms:
        split_deployment(name)  # which refuses unknown ones
    from ..evaluation.comparison import compare_engines

    return Answer.of(compare_engines(teacher, students, forms=forms or None, **given(**options), progress=True))


benchmark = Group(
    "benchmark",
    help="Measure this package against the models that it replaces.",
    examples="Example: lightformers benchmark engines opus-mt-de-en recovered --data test.jsonl --cores 1",
    commands=[engines],
)
app = Group(
    NAME,
    help="Make a trained translation or summarization model smaller and faster, and recover its quality.",
    examples="Example: lightformers compress Helsinki-NLP/opus-mt-de-en small --data train.jsonl --ratio 4",
    commands=[
        *(compress, plan, convert, distill, recover, export, web, translate, evaluate, compare, push, demo),
        *(report, benchmark),
    ],
)
click.version_option(__version__, message="lightformers_hf %(version)s")(app)


def main() -> None:
    """Run the command line, under the same name however it was started."""
    open_streams()
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "30")  # seconds: bars fill no log
    # Compiled kernels of bfloat16 matrix multiplications that oneDNN and PyTorch keep, up to 0.5 MB each. A training
    # uses about 300 of them repeatedly, a conversion few.
    kernels, plans = ("64", "64") if sys.argv[1:2] in (["convert"], ["plan"]) else ("512", "128")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", kernels)
    os.environ.setdefault("LRU_CACHE_CAPACITY", plans)
    end_on_sigterm()
    app(prog_name=NAME)
