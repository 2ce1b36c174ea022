"""Commands that use a model: `translate`, `evaluate`, `compare`, `push`, and `demo`, which does all of it."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import click

from .output import (
    CHECKPOINT,
    DATA,
    PLACE,
    SEED,
    Answer,
    Argument,
    check_installed,
    check_open,
    command,
    make_console,
    option,
)

if TYPE_CHECKING:
    from ..evaluation.translate import ByteSource

AT_LEAST_ONE = click.IntRange(min=1)
FILE = click.Path(path_type=Path)

MODEL = Argument("model", type=CHECKPOINT, about="Folder or Hub name of a checkpoint.")
DATA_HELP = "Parallel text: a .jsonl, .json, .csv, .tsv or .parquet file, or a Hub name."
BATCH_SIZE = option("--batch-size", type=AT_LEAST_ONE, default=32, help="Sentences translated at once.")
NUM_BEAMS = option("--num-beams", type=AT_LEAST_ONE, help="Beams; 1 is greedy. Default: the checkpoint's.")
MAX_NEW_TOKENS = option("--max-new-tokens", type=AT_LEAST_ONE, help="Longest output. Default: the checkpoint's.")
DEVICE = option("--device", default="cpu", help="Where to compute: cpu, cuda, cuda:1, mps.")
SOURCE_LANG = option(
    "--source-lang",
    metavar="de",
    help="Its column, or language in 'translation'; of multilingual models and the code: de=de_DE. T5: de='prefix: '.",
)
TARGET_LANG = option("--target-lang", metavar="en", help="The same of the reference.")
TRANSLATED = (
    option(
        "--source-lang",
        metavar="de_DE",
        help="The source's language: of multilingual models its code; T5: en, or en='a prefix: '.",
    ),
    option("--target-lang", metavar="en_XX", help="The same of the language to translate into."),
)
SPLIT = option("--split", default="test", help="Split of a dataset on the Hub.")
MAX_SAMPLES = option("--max-samples", type=AT_LEAST_ONE, help="Use the first so many pairs. Default: all.")


def metric_names() -> list[str]:
    """What `--metric` takes."""
    from ..evaluation.quality import metric_names

    return metric_names()


METRIC = option(
    "--metric",
    "metrics",
    metavar="NAME",
    multiple=True,
    values=metric_names,
    help="exact-match, cer, bleu, multi-bleu, chrf, rouge, …. Repeatable. Default: what fits the data.",
)


class Generation(TypedDict, total=False):
    """Arguments of `generate()` that were given."""

    num_beams: int
    max_new_tokens: int


class Languages(TypedDict):
    """The two languages, as the package's functions take them."""

    source: str | None
    target: str | None


def generation_options(*, num_beams: int | None, max_new_tokens: int | None) -> Generation:
    """The arguments of `generate()` that were given."""
    given: Generation = {}
    if num_beams is not None:
        given["num_beams"] = num_beams
    if max_new_tokens is not None:
        given["max_new_tokens"] = max_new_tokens
    return given


def languages(source_lang: str | None, target_lang: str | None) -> Languages:
    """What the two options name, as the package's functions take it."""
    return {"source": source_lang, "target": target_lang}


@command(
    MODEL,
    Argument("file", required=False, type=FILE, about="Text, one sentence a line. Default: standard input."),
    option("--output", "-o", type=FILE, help="File to write. Default: standard output."),
    BATCH_SIZE,
    NUM_BEAMS,
    MAX_NEW_TOKENS,
    *TRANSLATED,
    DEVICE,
)
def translate(
    model: str,
    file: Path | None,
    output: Path | None,
    batch_size: int,
    num_beams: int | None,
    max_new_tokens: int | None,
    source_lang: str | None,
    target_lang: str | None,
    device: str,
) -> None:
    """Translate (or summarize) text, one sentence a line in, one line out.

    Lines are translated as they come, from a pipe too. A file given as --output appears when all of it is written.

    Examples:

        echo "Ein Hund läuft." | lightformers translate Helsinki-NLP/opus-mt-de-en

        lightformers translate ./small news.de --output news.en --num-beams 4
    """
    if file is None:
        check_open("stdin", "name a file to translate")
    if output is None:
        check_open("stdout", "give --output a file")
    else:
        from ..files import check_file

        check_file(output, [model, file])
    with ExitStack() as stack:
        # Standard input's buffer is a buffered reader, which its type does not say.
        standard: ByteSource = sys.stdin.buffer  # type: ignore[assignment]
        source: ByteSource = stack.enter_context(file.open("rb")) if file else standard
        from tqdm.auto import tqdm

        from ..evaluation.translate import load_translator, translate_stream
        from ..files import write_whole

        network, tokenizer, prefix = load_translator(model, device=device, **languages(source_lang, target_lang))
        sink = stack.enter_context(write_whole(output)) if output else sys.stdout.buffer
        bar = stack.enter_context(tqdm(unit="text", disable=None))
        options = {"batch_size": batch_size, "prefix": prefix, "progress": bar}
        generation = generation_options(num_beams=num_beams, max_new_tokens=max_new_tokens)
        translate_stream(source, sink, network, tokenizer, **options, **generation)


@command(
    MODEL,
    option("--data", type=DATA, required=True, help=DATA_HELP),
    option("--teacher", type=CHECKPOINT, help="The dense checkpoint to compare with."),
    SOURCE_LANG,
    TARGET_LANG,
    SPLIT,
    MAX_SAMPLES,
    BATCH_SIZE,
    NUM_BEAMS,
    MAX_NEW_TOKENS,
    DEVICE,
    option("--speed/--no-speed", default=True, help="Measure tokens/s and peak memory on one core (minutes)."),
    METRIC,
    option("--comet", type=PLACE, help="Local COMET checkpoint (.ckpt); needs the command comet-score."),
)
def evaluate(
    model: str,
    data: str,
    teacher: str | None,
    source_lang: str | None,
    target_lang: str | None,
    num_beams: int | None,
    max_new_tokens: int | None,
    **options: Any,
) -> Answer:
    """Measure a checkpoint, beside its teacher if there is one: quality, parameters, bytes, speed, memory.

    Quality is BLEU and chrF; for outputs of one word exact match and character error rate come first, for summaries
    it is ROUGE. --metric chooses.

    Without column names, the languages that the tokenizer names are read from the data's column 'translation'.

    Speed is tokens/s on one core: 50 sentences of average length, one at a time, 10 runs, model and teacher in turn.

    Examples:

        lightformers evaluate ./small --teacher ./teacher --data test.jsonl

        lightformers evaluate ./small --data test.csv --source-lang de --target-lang en --json -
    """
    from ..evaluation.evaluate import evaluate_model

    generation = generation_options(num_beams=num_beams, max_new_tokens=max_new_tokens)
    options |= languages(source_lang, target_lang)
    evaluation = evaluate_model(model, data, teacher, progress=True, **options, **generation)
    return Answer(evaluation.to_dict(), draw=lambda console: console.print(evaluation.table()))


@command(
    Argument("teacher", type=CHECKPOINT, about="Folder or Hub name of the dense checkpoint."),
    Argument("light", type=CHECKPOINT, about="The smaller one; like the teacher, it may be an export."),
    option("--num-beams", type=AT_LEAST_ONE, help="Beams of both. Default: the light model's."),
    MAX_NEW_TOKENS,
    *TRANSLATED,
    option("--port", type=click.IntRange(1, 65535), help="Where to serve. Default: the first free one from 7860."),
    option(
        "--host",
        default="127.0.0.1",
        help="Whom to serve: 127.0.0.1 is this machine alone, 0.0.0.0 whoever reaches it.",
    ),
    option("--open", "browser", is_flag=True, help="Open the page in the browser."),
)
def compare(
    teacher: str,
    light: str,
    num_beams: int | None,
    max_new_tokens: int | None,
    source_lang: str | None,
    target_lang: str | None,
    port: int | None,
    host: str,
    browser: bool,
) -> None:
    """Serve a page to try two models side by side: type a sentence, see both translations, tokens and time.

    Nothing leaves this machine. Ctrl-C ends it. The same page is a Space on the Hub: see lightformers_hf/app.py. Needs
    pip install 'lightformers_hf[app]'.

    Example: lightformers compare opus-mt-de-en opus-mt-de-en-light --open
    """
    check_installed("gradio", "app", "compare")
    from ..app import build, check_address, serve, wait

    check_address(host, port)
    pair = languages(source_lang, target_lang)
    page = build(teacher, light, **pair, num_beams=num_beams, max_new_tokens=max_new_tokens)
    address = serve(page, host=host, port=port, browser=browser)
    click.echo(f"Both models are at {address} until Ctrl-C.")
    wait(page)


@command(
    Argument("folder", type=FILE, about="What convert or a training run wrote."),
    Argument("name", about="user/model, or model in your own namespace on the Hub."),
    option("--private", is_flag=True, help="Make the repository private."),
    option("--revision", "--branch", "revision", help="Branch to commit to. Default: main."),
    option("--message", "-m", help="Of the commit."),
    option(
        "--results",
        type=FILE,
        multiple=True,
        help="What evaluate --json wrote: becomes tables of the model card. Repeatable.",
    ),
    option("--dry-run", is_flag=True, help="List the files that would go, and send nothing."),
)
def push(folder: Path, name: str, results: tuple[Path, ...], dry_run: bool, **options: Any) -> Answer:
    """Share a checkpoint on the Hub, with its code: who has not installed this package loads it, too.

    One commit: weights, configuration, tokenizer, code, compression.json and a model card. Log in before with
    'hf auth login', or set HF_TOKEN. After an interruption the same command goes on.

    Examples:

        lightformers push recovered user/opus-mt-de-en-light --dry-run

        lightformers push recovered user/opus-mt-de-en-light --results results.json

        lightformers push recovered opus-mt-de-en-light --private --revision v2 --message "Trained longer"
    """
    from ..files import check_folder

    check_folder(folder)
    from ..hub import preview_push, push_to_hub

    if dry_run:
        sizes = preview_push(folder, name, results=results)
        lines = [f"{size:15,}  {file}" for file, size in sizes.items()]
        return Answer({"name": name, "files": sizes}, [*lines, f"{sum(sizes.values()):15,}  bytes to {name}."])
    commit = push_to_hub(folder, name, results=results, **options)
    return Answer(
        {"name": commit.repo_url.repo_id, "url": str(commit.repo_url), "commit": commit.oid},
        [
            f"{commit.repo_url} at commit {commit.oid}.",
            f'Load it: from_pretrained("{commit.repo_url.repo_id}", revision="{commit.oid}"), and with '
            "trust_remote_code=True, the tokenizer too, where lightformers_hf is not installed.",
        ],
    )


@command(
    option("--output", "-o", type=FILE, default="demo-output", help="Folder for everything the demo makes."),
    option("--seed", type=SEED, default=0, help="Of the corpus and of every training."),
    option("--fresh", is_flag=True, help="Remove what an earlier demo made there; start over."),
)
def demo(output: Path, seed: int, fresh: bool) -> Answer:
    """See it all work in five to seven minutes, offline: train a teacher, compress it, win its quality back, measure.

    An interrupted demo goes on where it stopped; needs pip install 'lightformers_hf[demo]'.

    Example: lightformers demo --output demo-output
    """
    from ..demo.run import DemoSettings, run_demo

    try:
        results = run_demo(output, DemoSettings(seed=seed), fresh=fresh, console=make_console())  # says how far it is
    except KeyboardInterrupt:
        message = f"Stopped. What is complete stays in {output}: the same command goes on from there."
        click.echo(f"\n{message}", err=True)
        raise click.exceptions.Exit(130) from None
    return Answer(results)
