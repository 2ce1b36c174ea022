"""The `lightformers` command: every sub-command is one call into the package.

What a command needs is imported inside it, so that the others and `--help` do not wait for it.
"""

import sys
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from .. import __version__
from ..export.engines import deployment_names, engine_names
from .commands import Answer, Commands, choices, compression_options, says

app = Commands(
    help="Make a trained translation or summarization model smaller and faster, and win its quality back.",
    epilog="Example: lightformers convert Helsinki-NLP/opus-mt-de-en opus-mt-de-en-light --ratio 2",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
)


def show_version(wanted: bool) -> None:
    """Print the version, and end."""
    if wanted:
        typer.echo(f"lightformers_hf {__version__}")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """What stands before the command's name."""


def check_installed(module: str, extra: str, what: str) -> None:
    """Raise `ValueError` where a module of an optional extra is missing, without which `what` can't be done."""
    if find_spec(module) is None:
        raise ValueError(f"{what} needs {module}: pip install 'lightformers_hf[{extra}]'")


def join_names(names: list[str]) -> str:
    """`a, b or c`."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


Source = Annotated[str, typer.Argument(help="A checkpoint folder, or a name on the Hub.", show_default=False)]


@app.command()
@compression_options
def plan(
    source: Source,
    options: dict | None = None,
) -> Answer:
    """Show what [bold]convert[/bold] would do to every matrix: rank, parameters, energy kept, error. Writes nothing.

    Example: lightformers plan Helsinki-NLP/opus-mt-de-en --ratio 3 --encoder-groups 3
    """
    from ..conversion.convert import plan as make_plan
    from ..conversion.tables import print_report

    report = make_plan(source, **options)
    return Answer(report.to_dict(), lambda console: print_report(report, console))


@app.command()
@compression_options
def convert(
    source: Source,
    output: Annotated[Path, typer.Argument(help="The folder to write.", show_default=False)],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what the folder holds.")] = False,
    options: dict | None = None,
) -> Answer:
    """Factorize a trained Marian, BART, mBART, Pegasus, M2M100, LightFormer, Subformer or PartialFormer checkpoint.

    The output loads with AutoModelForSeq2SeqLM and AutoTokenizer. Truncation costs quality: fine-tune the result with
    training/run_translation.py before use.

    Example: lightformers convert Helsinki-NLP/opus-mt-de-en opus-mt-de-en-light --ratio 2
    """
    from ..conversion.convert import convert as run
    from ..conversion.tables import print_report

    report = run(source, output, overwrite=overwrite, **options)

    def show(console: Console) -> None:
        print_report(report, console, matrices=False)
        says(f"Written to {output}; every matrix is listed in its compression.json.")(console)

    return Answer({"output": str(output), **report.to_dict()}, show)


@app.command()
def export(
    source: Source,
    output: Annotated[Path, typer.Argument(help="The folder to write.", show_default=False)],
    to: Annotated[
        str,
        typer.Option(
            help=f"{join_names(engine_names())}.", show_default=False, autocompletion=choices(*engine_names())
        ),
    ],
    quantization: Annotated[
        str | None,
        typer.Option(
            help="int8, or another that the engine has: int16, int8_float16, float16, … Default: float32.",
            autocompletion=choices("int8", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16"),
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what the folder holds.")] = False,
) -> Answer:
    """Write a LightFormer, or a dense model that becomes one, for CTranslate2 or ONNX Runtime, which run it fastest.

    Says what the engine cannot express, and compares its outputs with the checkpoint's; needs
    pip install 'lightformers_hf\\[export]'.

    Example: lightformers export opus-mt-de-en-light opus-mt-de-en-int8 --to ctranslate2 --quantization int8
    """
    from ..export import export as run

    report = run(source, output, to=to, quantization=quantization, overwrite=overwrite)
    return Answer({"output": str(output), **asdict(report)}, says(*report.lines(output)))


Model = Annotated[str, typer.Argument(help="Folder or Hub name of a checkpoint.", show_default=False)]
BatchSize = Annotated[int, typer.Option(min=1, help="Sentences translated at once.")]
NumBeams = Annotated[int | None, typer.Option(min=1, help="Beams; 1 is greedy. Default: the checkpoint's.")]
MaxNewTokens = Annotated[int | None, typer.Option(min=1, help="Longest output. Default: the checkpoint's.")]
Device = Annotated[str, typer.Option(help="Where to translate: cpu, cuda, cuda:1, mps.")]


def generation_options(**options: int | None) -> dict[str, int]:
    """The arguments of `generate()` that were given."""
    return {name: value for name, value in options.items() if value is not None}


@app.command()
def translate(
    model: Model,
    file: Annotated[Path | None, typer.Argument(help="Text, one sentence a line. Default: standard input.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write. Default: standard output.")
    ] = None,
    batch_size: BatchSize = 32,
    num_beams: NumBeams = None,
    max_new_tokens: MaxNewTokens = None,
    device: Device = "cpu",
) -> None:
    """Translate (or summarize) text, one sentence a line in, one line out.

    Lines are translated as they come, from a pipe too. A file given as --output appears when all of it is written.

    Examples:

        echo "Ein Hund läuft." | lightformers translate Helsinki-NLP/opus-mt-de-en

        lightformers translate ./small news.de --output news.en --num-beams 4
    """
    from tqdm.auto import tqdm

    from ..evaluation.translate import load_translator, translate_stream
    from ..files import written_whole

    options = generation_options(num_beams=num_beams, max_new_tokens=max_new_tokens)
    with ExitStack() as stack:
        source = stack.enter_context(file.open("rb")) if file else sys.stdin.buffer
        network, tokenizer = load_translator(model, device=device)
        sink = stack.enter_context(written_whole(output)) if output else sys.stdout.buffer
        bar = stack.enter_context(tqdm(unit="text", disable=None))
        translate_stream(source, sink, network, tokenizer, batch_size=batch_size, progress=bar, **options)


@app.command()
def evaluate(
    model: Model,
    data: Annotated[
        str,
        typer.Option(help="Parallel text: a .jsonl, .json, .csv, .tsv or .parquet file, or a Hub name."),
    ],
    teacher: Annotated[str | None, typer.Option(help="The dense checkpoint to compare with.")] = None,
    source: Annotated[
        str | None,
        typer.Option("--source-column", "--source-lang", help="Column of the source, or language in 'translation'."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--target-column", "--target-lang", help="Column of the reference, or language likewise."),
    ] = None,
    split: Annotated[str, typer.Option(help="Split of a dataset on the Hub.")] = "test",
    max_samples: Annotated[int | None, typer.Option(min=1, help="Use the first so many pairs. Default: all.")] = None,
    batch_size: BatchSize = 32,
    num_beams: NumBeams = None,
    max_new_tokens: MaxNewTokens = None,
    device: Device = "cpu",
    speed: Annotated[
        bool, typer.Option("--speed/--no-speed", help="Measure tokens/s and peak memory on one core (minutes).")
    ] = True,
    comet: Annotated[
        str | None, typer.Option(help="Local COMET checkpoint (.ckpt); needs the command comet-score.")
    ] = None,
) -> Answer:
    """Measure a checkpoint, beside its teacher if there is one: BLEU, chrF, parameters, bytes, speed, memory.

    Without column names, the languages that the tokenizer names are read from the data's column 'translation'.

    Speed is tokens/s on one core: 50 sentences of average length, one at a time, 10 runs, model and teacher in turn.

    Examples:

        lightformers evaluate ./small --teacher ./teacher --data test.jsonl

        lightformers evaluate ./small --data test.csv --source-column de --target-column en --json -
    """
    from ..evaluation.evaluate import evaluate_model

    evaluation = evaluate_model(
        model,
        data,
        teacher,
        source=source,
        target=target,
        split=split,
        max_samples=max_samples,
        batch_size=batch_size,
        device=device,
        speed=speed,
        comet=comet,
        progress=True,
        **generation_options(num_beams=num_beams, max_new_tokens=max_new_tokens),
    )
    return Answer(evaluation.to_dict(), lambda console: console.print(evaluation.table()))


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(help="What convert or a training run wrote.", show_default=False)],
    name: Annotated[
        str, typer.Argument(help="user/model, or model in your own namespace on the Hub.", show_default=False)
    ],
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    revision: Annotated[
        str | None, typer.Option("--revision", "--branch", help="Branch to commit to. Default: main.")
    ] = None,
    message: Annotated[str | None, typer.Option("--message", "-m", help="Of the commit.")] = None,
    results: Annotated[
        list[Path] | None,
        typer.Option(help="What evaluate --json wrote: becomes tables of the model card. Repeatable."),
    ] = None,
) -> Answer:
    """Share a checkpoint on the Hub, with its code: who has not installed this package loads it, too.

    One commit: weights, configuration, tokenizer, code, compression.json and a model card. Log in before with
    'hf auth login', or set HF_TOKEN. After an interruption the same command goes on.

    Examples:

        lightformers push recovered user/opus-mt-de-en-light --results results.json

        lightformers push recovered opus-mt-de-en-light --private --revision v2 --message "Trained longer"
    """
    from ..hub import push_to_hub

    commit = push_to_hub(folder, name, private=private, revision=revision, message=message, results=results or ())
    return Answer(
        {"name": commit.repo_url.repo_id, "url": str(commit.repo_url), "commit": commit.oid},
        says(
            f"{commit.repo_url} at commit {commit.oid}.",
            f'Load it: from_pretrained("{commit.repo_url.repo_id}", revision="{commit.oid}"), and with '
            "trust_remote_code=True, the tokenizer too, where lightformers_hf is not installed.",
        ),
    )


@app.command()
def analyze(
    models: Annotated[
        list[str], typer.Argument(help="Folders or Hub names of checkpoints, shown side by side.", show_default=False)
    ],
    data: Annotated[
        str,
        typer.Option(help="Parallel text: a .jsonl, .json, .csv, .tsv or .parquet file, or a Hub name."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for a picture of every measure, for light and for dark pages."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what the folder holds.")] = False,
    source: Annotated[str | None, typer.Option("--source-column", "--source-lang", help="See evaluate.")] = None,
    target: Annotated[str | None, typer.Option("--target-column", "--target-lang", help="See evaluate.")] = None,
    split: Annotated[str, typer.Option(help="Split of a dataset on the Hub.")] = "test",
    max_samples: Annotated[int | None, typer.Option(min=1, help="Use the first so many pairs. Default: all.")] = None,
    device: Device = "cpu",
) -> Answer:
    """Look inside checkpoints by the papers' measures: heads, tokens, neurons, MACs, memory, singular values.

    Head diversity, token uniformity, activated neurons: layer by layer, while the model reads the text's two sides.
    MACs and memory of the matrices follow from the shapes, the steps to convergence from a trainer_state.json beside
    the weights. Pictures need pip install 'lightformers_hf\\[demo]'.

    Example: lightformers analyze ./teacher ./small --data test.jsonl --output inside
    """
    from ..evaluation.analysis import analysis_table
    from ..evaluation.analysis import analyze as run
    from ..files import atomic_output

    if output is not None:
        check_installed("matplotlib", "demo", "--output")
    options = {"source": source, "target": target, "split": split, "max_samples": max_samples, "device": device}
    with atomic_output(output, overwrite=overwrite) if output else nullcontext() as folder:
        analyses = run(models, data, **options, progress=True)
        if folder:
            from ..evaluation.pages.plots import draw_analyses

            draw_analyses(analyses, folder)
    return Answer(
        [analysis.to_dict() for analysis in analyses], lambda console: console.print(analysis_table(analyses))
    )


@app.command()
def report(
    model: Annotated[
        str, typer.Argument(help="What convert or a training run wrote: folder, or Hub name.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("report.html"),
    teacher: Annotated[
        str | None,
        typer.Option(help="What it was made of: adds singular values with the chosen ranks, and its translations."),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Parallel text, as for evaluate: adds sample translations.")] = None,
    results: Annotated[
        list[Path] | None,
        typer.Option(
            help="What evaluate --json wrote, of this model or others: adds quality against size and speed. "
            "Repeatable."
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Translations shown, evenly spread over the data.")] = 8,
    source: Annotated[str | None, typer.Option("--source-column", "--source-lang", help="See evaluate.")] = None,
    target: Annotated[str | None, typer.Option("--target-column", "--target-lang", help="See evaluate.")] = None,
    split: Annotated[str, typer.Option(help="Split of a dataset on the Hub.")] = "test",
    num_beams: NumBeams = None,
    max_new_tokens: MaxNewTokens = None,
) -> Answer:
    """Write one HTML page of what became of a model: plan, pictures, translations beside the teacher's.

    The page holds all of it, loads nothing, and is light or dark as its reader's browser. The plan and the errors come
    from compression.json, the training curve from trainer_state.json. Needs pip install 'lightformers_hf\\[demo]'.

    Example: lightformers report ./small --teacher ./teacher --data test.jsonl --results results.json
    """
    check_installed("matplotlib", "demo", "report")
    from ..evaluation.pages.page import report_page
    from ..files import written_whole

    page = report_page(
        model,
        teacher=teacher,
        data=data,
        results=results or (),
        samples=samples,
        source=source,
        target=target,
        split=split,
        progress=True,
        **generation_options(num_beams=num_beams, max_new_tokens=max_new_tokens),
    )
    with written_whole(output) as file:
        file.write(page.encode())
    return Answer({"output": str(output)}, says(f"Written to {output}: open it in a browser."))


@app.command()
def compare(
    teacher: Annotated[str, typer.Argument(help="Folder or Hub name of the dense checkpoint.", show_default=False)],
    light: Annotated[
        str, typer.Argument(help="The smaller one; like the teacher, it may be an export.", show_default=False)
    ],
    num_beams: Annotated[int | None, typer.Option(min=1, help="Beams of both. Default: the light model's.")] = None,
    max_new_tokens: MaxNewTokens = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Where to serve. Default: the first free one from 7860.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Whom to serve: 127.0.0.1 is this machine alone, 0.0.0.0 whoever reaches it.")
    ] = "127.0.0.1",
    browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Serve a page to try two models side by side: type a sentence, see both translations, tokens and time.

    Nothing leaves this machine. Ctrl-C ends it. The same page is a Space on the Hub: see lightformers_hf/app.py.
    Needs pip install 'lightformers_hf\\[app]'.

    Example: lightformers compare opus-mt-de-en opus-mt-de-en-light --open
    """
    check_installed("gradio", "app", "compare")
    from ..app import build, serve

    page = build(teacher, light, num_beams=num_beams, max_new_tokens=max_new_tokens)
    address = serve(page, host=host, port=port, browser=browser)
    says(f"Both models are at {address} until Ctrl-C.")(Console())
    page.block_thread()


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for everything the demo makes.")] = Path(
        "demo-output"
    ),
    seed: Annotated[int, typer.Option(help="Of the corpus and of every training.")] = 0,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Remove what an earlier demo made there; start over.")
    ] = False,
) -> Answer:
    """See it all work in five minutes, offline: train a teacher, compress it, win its quality back, measure.

    An interrupted demo goes on where it stopped; needs pip install 'lightformers_hf\\[demo]'.

    Example: lightformers demo --output demo-output
    """
    from ..demo.run import run_demo
    from ..demo.stages import DemoSettings

    try:
        results = run_demo(output, DemoSettings(seed=seed), fresh=fresh)  # says how far it is
    except KeyboardInterrupt:
        message = f"Stopped. What is complete stays in {output}: the same command goes on from there."
        Console(stderr=True).print(f"\n{escape(message)}", highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None
    return Answer(results, says())


@app.command()
def parameters(
    table: Annotated[str, typer.Option(help="Only rows whose name contains this, e.g. 'Subformer T2'.")] = "",
) -> Answer:
    """Print the parameter tables of the papers: the printed count, ours, and the difference.

    Exits with 1 where a row differs by more than its tolerance.

    Example: lightformers parameters --table PartialFormer
    """
    from ..evaluation.parameters import count_parameters, parameter_table

    counts = count_parameters(table)
    return Answer(
        [count.to_dict() for count in counts],
        lambda console: console.print(parameter_table(counts)),
        exit_code=0 if all(count.within for count in counts) else 1,
    )


benchmark_app = Commands(
    help="Measure this package against what it replaces.",
    epilog="Example: lightformers benchmark architectures --pair partialformer-36m --no-training",
    no_args_is_help=True,
)
app.add_typer(benchmark_app, name="benchmark")


@benchmark_app.command("conversion")
def benchmark_conversion(
    shapes: Annotated[
        str,
        typer.Option(
            help="Shapes of a checkpoint: opus-mt (74M) or bart-large (406M).",
            autocompletion=choices("opus-mt", "bart-large"),
        ),
    ] = "opus-mt",
    runs: Annotated[int, typer.Option(min=1, help="Interleaved runs; medians are shown.")] = 3,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Time so many full decompositions of a shape and multiply. Default: all of them."),
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Instead convert a checkpoint with random weights; shows peak memory.")
    ] = False,
) -> Answer:
    """Time the factorization of a whole checkpoint beside a full torch.linalg.svd of every matrix.

    Example: lightformers benchmark conversion --shapes bart-large --runs 1 --samples 6
    """
    from ..evaluation.benchmarks.conversion import benchmark_conversion as run
    from ..evaluation.benchmarks.conversion import conversion_memory, show

    if memory:
        size, peak = conversion_memory(shapes)
        return Answer(
            {"shapes": shapes, "checkpoint_bytes": size, "peak_bytes": peak},
            says(f"{shapes}: checkpoint {size / 1e6:,.0f} MB, peak memory of its conversion {peak / 1e6:,.0f} MB"),
        )
    result = run(shapes, runs=runs, samples=samples)
    seconds = {"full_seconds": result.full_seconds, "our_seconds": result.our_seconds}
    data = asdict(result) | {name: [run._asdict() for run in of_runs] for name, of_runs in seconds.items()}
    return Answer(data | {"speedup": result.speedup._asdict()}, lambda console: show(result, console))


@benchmark_app.command("architectures")
def benchmark_architectures(
    pair: Annotated[
        list[str] | None, typer.Option(help="Only this pair, e.g. subformer-base. Repeatable. Default: all.")
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Interleaved runs; medians are shown.")] = 10,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated in a run.")] = 25,
    training: Annotated[bool, typer.Option("--training/--no-training", help="Time training steps, too.")] = True,
    bf16: Annotated[bool, typer.Option("--bf16", help="Train under bfloat16 autocast.")] = False,
) -> Answer:
    """Time architectures of the papers beside Marian of equal width: decoding and training on one core.

    Example: lightformers benchmark architectures --pair partialformer-36m --no-training
    """
    from ..evaluation.benchmarks.architectures import PAIRS, compare, comparison_table

    comparisons = [
        compare(name, runs=runs, new_tokens=new_tokens, training=training, bf16=bf16, progress=True)
        for name in pair or PAIRS
    ]
    return Answer(
        [comparison.to_dict() for comparison in comparisons],
        lambda console: console.print(comparison_table(comparisons)),
    )


@benchmark_app.command("engines")
def benchmark_engines(
    teacher: Annotated[str, typer.Argument(help="Folder or Hub name of the dense checkpoint.", show_default=False)],
    students: Annotated[
        list[str] | None, typer.Argument(help="Folders or Hub names of checkpoints made from it.", show_default=False)
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{join_names(deployment_names())}. Repeatable. Default: all.",
            autocompletion=choices(*deployment_names()),
        ),
    ] = None,
    cores: Annotated[list[int] | None, typer.Option(help="Repeatable. Default: 1 and 2.")] = None,
    batch_size: Annotated[list[int] | None, typer.Option(help="Repeatable. Default: 1 and 32.")] = None,
    num_beams: Annotated[list[int] | None, typer.Option(help="Repeatable. Default: 1 and 4.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Interleaved runs; medians are shown.")] = 5,
    sentences: Annotated[int, typer.Option(min=1, help="Sentences of a run at batch size 1.")] = 10,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated for every sentence.")] = 25,
    data: Annotated[str | None, typer.Option(help="Parallel text to measure BLEU and chrF on, too.")] = None,
    source: Annotated[str | None, typer.Option("--source-column", "--source-lang", help="See evaluate.")] = None,
    target: Annotated[str | None, typer.Option("--target-column", "--target-lang", help="See evaluate.")] = None,
    max_samples: Annotated[int | None, typer.Option(min=1, help="Use the first so many pairs. Default: all.")] = None,
) -> Answer:
    """Time a teacher and its students in transformers, CTranslate2 and ONNX Runtime, in float32 and int8.

    Ratios are to the teacher in the same engine, and to the teacher in CTranslate2 int8, what a user would deploy.
    Needs pip install 'lightformers_hf\\[export]'.

    Example: lightformers benchmark engines opus-mt-de-en recovered --data test.jsonl --cores 1 --batch-size 1
    """
    from ..evaluation.benchmarks.engines import compare_engines

    comparison = compare_engines(
        teacher,
        students or [],
        forms=engine,
        cores=cores or [1, 2],
        batch_sizes=batch_size or [1, 32],
        beams=num_beams or [1, 4],
        runs=runs,
        sentences=sentences,
        new_tokens=new_tokens,
        data=data,
        source=source,
        target=target,
        max_samples=max_samples,
        progress=True,
    )
    return Answer(comparison.to_dict(), lambda console: console.print(*comparison.tables()))


def main() -> None:
    """Run the command line, under the same name however it was started."""
    app(prog_name="lightformers")
