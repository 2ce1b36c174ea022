"""The demo from beginning to end: corpus, teacher, compression as one call, picture."""

from __future__ import annotations

import io
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sentencepiece
import transformers
from rich.console import Console
from rich.markup import escape
from tqdm.auto import tqdm
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    GenerationConfig,
    MarianConfig,
    MarianTokenizer,
    PreTrainedModel,
    PrinterCallback,
    set_seed,
)

from ..evaluation.translate import load_translator, translate
from ..files import atomic_output, find_foreign, json_text, read_json, refuse_foreign, write_whole
from ..loading import build_network, load_pretrained
from ..matrices import STACKS
from ..processors import has_fast_bf16
from ..recovery import RecoveryTrainer, one_process
from ..recovery.runs import Progress, RecoverySettings, training_arguments
from ..text import load_parallel, tokenize_pairs
from ..workflows.compress import check_parts, compress

if TYPE_CHECKING:
    from datasets import Dataset
    from matplotlib.axes import Axes

FOLDERS = ("corpus", "teacher", "small", "page")
SETTINGS, PICTURE = "settings.json", "picture.png"
SAMPLES = 4
LONGEST = 96  # tokens; no sentence of the corpus comes near
# Attention written out: on a CPU, with sentences this short, it trains a quarter faster than the fused kernel.
ATTENTION = {"attn_implementation": "eager"}


@dataclass(frozen=True)
class DemoSettings:
    """How large the demo is. The defaults fill five minutes of two cores, seven without fast bfloat16."""

    seed: int = 0
    train_pairs: int = 20_000
    held_out_pairs: int = 500  # for validation, and as many for the test
    vocabulary: int = 1500
    d_model: int = 256
    ffn_dim: int = 1024
    heads: int = 4
    encoder_layers: int = 3
    decoder_layers: int = 2
    batch_size: int = 32
    teacher_steps: int = 600
    teacher_learning_rate: float = 1e-3
    ratio: float = 4.0
    calibration_pairs: int = 300
    minutes: float = 2.0  # time of the recovery


def run_demo(
    output: Path, settings: DemoSettings | None = None, *, fresh: bool = False, console: Console | None = None
) -> dict[str, Any]:
    """Run the demo into the folder `output`, or the rest of it, and return the results of `compress`.

    Every stage is a folder or a file of `output` that appears when it is complete. Those that exist are not made
    again: an interrupted run resumes, and a second run only shows the results.

    Args:
        fresh: remove the output of an earlier demo in `output`, and start again.
        console: where to print (default: the terminal).

    Raises:
        ValueError: the extra `demo` is not installed, or `output` holds a demo of other settings.
        FileExistsError: `output` is a file, or holds something that no demo made.
    """
    settings, console = settings or DemoSettings(), console or Console()
    if missing := [name for name in ("babel", "num2words", "matplotlib", "ctranslate2") if find_spec(name) is None]:
        raise ValueError(f"The demo needs {', '.join(missing)}: pip install 'lightformers_hf[demo]'")
    _claim(output, settings, fresh)
    transformers.utils.logging.disable_progress_bar()  # a progress bar is useless for a few megabytes
    corpus, teacher, small, page = (output / name for name in FOLDERS)
    _run_stage(console, 1, "Write a German-English corpus from locale data", corpus, write_corpus, settings)
    title = f"Train a Marian teacher for {settings.teacher_steps} steps"
    _run_stage(console, 2, title, teacher, write_teacher, corpus, settings)
    title = f"Compress it at ratio {settings.ratio:g}, train the result for {settings.minutes:g} minutes, export it"
    console.print(f"\n[bold]3/5[/bold] {title}", highlight=False)
    splits = {"data": "train", "validation": "validation", "test": "test"}
    texts: dict[str, Any] = {name: str(corpus / f"{split}.jsonl") for name, split in splits.items()}
    options: dict[str, Any] = {
        "minutes": settings.minutes,
        "seed": settings.seed,
        "calibration_samples": settings.calibration_pairs,
    }
    found = compress(teacher, small, ratio=settings.ratio, **texts, **options)
    results = found.to_dict()
    console.print("\n[bold]4/5[/bold] Draw the picture", highlight=False)
    _draw(output / PICTURE, small, results)
    console.print("\n[bold]5/5[/bold] Write a web page that translates in the browser", highlight=False)
    console.print(f"    {escape(_write_page(small / 'recovered', page))}", highlight=False, soft_wrap=True)
    console.print()
    console.print(*found.engines.tables())
    _show(results, texts["test"], output, console)
    return results


def _write_page(model: Path, page: Path) -> str:
    """Write the page, if npm and its registry are there. Return how to open the page, or how to write it later."""
    from ..engines.web import export_web

    try:
        if not page.exists():
            export_web(model, page)
    except ValueError as error:
        return f"Skipped: {error}. Then: lightformers web {model} {page}"
    return f"Open the page: python -m http.server --directory {page}, then http://localhost:8000"


def _claim(output: Path, settings: DemoSettings, fresh: bool) -> None:
    """Make `output` the folder of a demo with these settings, or find that it is one."""
    if output.exists() and not output.is_dir():
        raise FileExistsError(f"{output} is a file: give another folder")
    marker = output / SETTINGS
    if not marker.exists() and output.is_dir() and any(output.iterdir()):
        raise FileExistsError(f"{output} is not empty and holds no demo: give another folder")
    if marker.exists() and not asdict(settings).keys() & read_json(marker).keys():
        raise FileExistsError(f"{marker} is no demo's: give another folder")
    if fresh and marker.exists():
        for folder in (output / name for name in FOLDERS if name != "small" and (output / name).is_dir()):
            refuse_foreign(folder, find_foreign(folder))
        check_parts(output / "small")
        for path in (output / PICTURE, *(output / name for name in reversed(FOLDERS)), marker):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if marker.exists() and json.loads(marker.read_text(encoding="utf-8")) != asdict(settings):
        raise ValueError(f"{output} holds a demo of other settings: start over with --fresh, or give another folder")
    if not marker.exists():
        output.mkdir(parents=True, exist_ok=True)
        with write_whole(marker) as opened:
            opened.write(json_text(asdict(settings), SETTINGS).encode())


def _run_stage(
    console: Console, number: int, title: str, folder: Path, write: Callable[..., None], *arguments: object
) -> None:
    """Have `write` fill a folder, which appears when it is complete; one that is there is left as it is."""
    console.print(f"\n[bold]{number}/5[/bold] {escape(title)}", highlight=False)
    done = f"{folder} is there already"
    if not folder.exists():
        start = time.perf_counter()
        with atomic_output(folder) as temporary:
            write(temporary, *arguments)
        done = f"{folder} ({time.perf_counter() - start:.0f} s)"
    console.print(f"    [green]✓[/green] {escape(done)}", highlight=False)


def write_corpus(folder: Path, settings: DemoSettings) -> None:
    """Write `train.jsonl`, `validation.jsonl` and `test.jsonl`, a pair `{"de": …, "en": …}` a line."""
    from .corpus import SPLITS, make_corpus  # needs the extra `demo`

    counts = dict.fromkeys(SPLITS, settings.held_out_pairs) | {"train": settings.train_pairs}
    with tqdm(total=sum(counts.values()), desc="writing sentences", unit="pair") as bar:
        corpus = make_corpus(counts, seed=settings.seed, advance=bar.update)
    for split, sentences in corpus.items():
        lines = [json.dumps({"de": s.de, "en": s.en}, ensure_ascii=False) + "\n" for s in sentences]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


def write_teacher(folder: Path, corpus: Path, settings: DemoSettings) -> None:
    """Train tokenizer and Marian teacher, and save both in the layout of an opus-mt checkpoint."""
    train = load_parallel(str(corpus / "train.jsonl"), source="de", target="en")
    _write_tokenizer(folder, [*train["source"], *train["target"]], settings.vocabulary)
    tokenizer = load_pretrained(AutoTokenizer, folder)
    set_seed(settings.seed)
    end, padding = tokenizer.eos_token_id, tokenizer.pad_token_id
    ids = {"eos_token_id": end, "pad_token_id": padding, "decoder_start_token_id": padding}
    fields: dict[str, Any] = {"vocab_size": len(tokenizer), "d_model": settings.d_model, "dropout": 0.0, **ids}
    for stack in STACKS:
        fields |= {f"{stack}_ffn_dim": settings.ffn_dim, f"{stack}_attention_heads": settings.heads}
        fields[f"{stack}_layers"] = getattr(settings, f"{stack}_layers")
    fields |= {"activation_function": "swish", "scale_embedding": True, "static_position_embeddings": True}
    fields |= {"attention_dropout": 0.0, "init_std": settings.d_model**-0.5, "max_position_embeddings": LONGEST}
    fields |= {"bos_token_id": None, "forced_eos_token_id": None}
    model = build_network(AutoModelForSeq2SeqLM, MarianConfig(**fields), **ATTENTION)
    model.generation_config = GenerationConfig(max_length=LONGEST, num_beams=1, bad_words_ids=[[padding]], **ids)
    options = {"learning_rate": settings.teacher_learning_rate, "label_smoothing": 0.1}
    train_model(model, tokenizer, train, settings, steps=settings.teacher_steps, **options)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train_model(
    model: PreTrainedModel,
    tokenizer: MarianTokenizer,
    train: Dataset,
    settings: DemoSettings,
    *,
    steps: int,
    learning_rate: float,
    label_smoothing: float = 0.0,
    teacher: PreTrainedModel | None = None,
) -> list[tuple[int, float]]:
    """Train a model on the CPU with a progress bar; return the training loss, (step, mean since the last), in nats."""
    bar = tqdm(total=steps, desc="training", unit="step")
    with one_process(), tempfile.TemporaryDirectory() as scratch, bar:
        # Not batches of one length by a token budget: sentences of one length are often of one template here, and such
        # batches took more than twice the time to learn from.
        size = {"per_device_train_batch_size": settings.batch_size, "label_smoothing_factor": label_smoothing}
        options = {"output_dir": scratch, "use_cpu": True, "seed": settings.seed, "report_to": "none"}
        rising = {"steps": steps, "warmup_steps": max(1, steps // 12), "eval_steps": 1}
        plan = RecoverySettings(learning_rate, 0.0, 0.0, 0, has_fast_bf16(), **rising)
        arguments = training_arguments(plan, saves=False, best_by="bleu", **size, **options)
        trainer = RecoveryTrainer(
            model,
            arguments,
            train_dataset=tokenize_pairs(train, tokenizer, max_source_length=LONGEST, max_target_length=LONGEST),
            data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
            callbacks=[Progress(bar)],
            teacher=teacher,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


def _write_tokenizer(folder: Path, sentences: list[str], vocabulary: int) -> None:
    """A SentencePiece model for both languages; digits are pieces of their own, so that any number can be written."""
    model = io.BytesIO()
    options: dict[str, Any] = {"model_type": "bpe", "split_digits": True, "character_coverage": 1.0}
    options |= {"sentence_iterator": iter(sentences), "model_writer": model, "vocab_size": vocabulary}
    sentencepiece.SentencePieceTrainer.train(**options, num_threads=1, minloglevel=2)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    words = [pieces.id_to_piece(i) for i in range(len(pieces)) if not (pieces.is_control(i) or pieces.is_unknown(i))]
    vocab = {word: i for i, word in enumerate(["</s>", "<unk>", *words, "<pad>"])}
    with tempfile.TemporaryDirectory() as scratch:
        spm, table = Path(scratch, "source.spm"), Path(scratch, "vocab.json")
        spm.write_bytes(model.getvalue())
        table.write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
        options = {"source_spm": str(spm), "target_spm": str(spm), "vocab": str(table)}
        options |= {"source_lang": "de", "target_lang": "en"}
        MarianTokenizer(**options, model_max_length=LONGEST).save_pretrained(folder)


def _draw(file: Path, small: Path, results: dict[str, Any]) -> None:
    """Write a PNG: the training loss; size, time for a token and BLEU as shares of the teacher's in transformers."""
    from ..evaluation.plots import save_picture  # needs the extra `demo`

    history = read_json(small / "recovered" / "trainer_state.json")["log_history"]
    losses = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]

    def paint(panels: list[Axes]) -> None:
        left, right = panels
        left.plot(*zip(*losses, strict=True), color="C2")
        left.set(yscale="log", xlabel="step", ylabel="training loss, nats a token", title="Training after conversion")
        _draw_shares(right, results["engines"])
        right.set(title="Compared with the teacher")

    with write_whole(file) as opened:
        save_picture(opened, paint, columns=2)


def _draw_shares(axes: Axes, comparison: Mapping[str, Any]) -> None:
    """Bars of size, time and BLEU relative to the first row of the comparison, and each value."""
    deployed = {(model["model"], model["form"]): model for model in comparison["deployed"]}
    rows = {}
    for timing in comparison["timings"]:
        model, speed = deployed[timing["model"], timing["form"]], timing["speed"]["tokens_per_second"]
        measures = {"MB": model["disk_bytes"] / 1e6, "ms a token": 1000 / speed, "BLEU": model["scores"]["bleu"]}
        rows[f"{model['model']}, {model['form']}"] = measures
    full = next(iter(rows.values()))
    for index, (label, measures) in enumerate(rows.items()):
        for group, (measure, value) in enumerate(measures.items()):
            y, share = group + 0.2 * (index - (len(rows) - 1) / 2), value / full[measure] if full[measure] else 0
            axes.barh(y, share, height=0.18, color=f"C{index}", label=label if measure == "BLEU" else None)
            axes.annotate(f" {value:.3g}", (share, y), va="center", fontsize=10)
    axes.set(yticks=range(len(full)), yticklabels=full, xlim=(0, 1.15), xticks=(0, 0.25, 0.5, 0.75, 1))
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")


def _show(results: dict[str, Any], test: str, output: Path, console: Console) -> None:
    """Print the size, some translations of the deployed model, and the next commands."""
    recovery = results["recovery"]
    before, after, dense = (recovery[when]["bleu"] for when in ("before", "after", "teacher"))
    console.print(
        f"\n{recovery['parameters']:,} parameters, 1/{recovery['ratio']:.1f} of the teacher's. Validation BLEU: "
        f"{before:.1f} after the conversion, {after:.1f} after the training, teacher {dense:.1f}.",
        highlight=False,
    )
    pairs = load_parallel(test, source="de", target="en")
    pairs = pairs.select(range(0, len(pairs), max(1, len(pairs) // SAMPLES))[:SAMPLES])
    model, tokenizer, _ = load_translator(str(output / "small" / "deployed"))
    said = translate(pairs["source"][:], model, tokenizer)
    for source, reference, translation in zip(pairs["source"], pairs["target"], said, strict=True):
        console.print()
        for label, text in {"German": source, "reference": reference, "translation": translation}.items():
            console.print(f"[dim]{label:>11}[/dim]  {escape(text)}", highlight=False)
    folder = escape(str(output))
    console.print(
        f"\nPicture: {folder}/{PICTURE}, report: {folder}/small/report.html. Next:\n"
        f"  echo 'Der Zug nach Prag fährt um 09:20 Uhr ab.' | lightformers translate {folder}/small/deployed\n"
        f"  lightformers plan {folder}/teacher --ratio 4\n"
        f"  lightformers compress Helsinki-NLP/opus-mt-de-en small --data yours.jsonl --ratio 4",
        highlight=False,
        soft_wrap=True,
    )
