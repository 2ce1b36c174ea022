"""A checkpoint in, a folder for another engine out, compared with the checkpoint before it is kept."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from ..decoding import SAMPLING, describe_strategies, output_limit, search_options
from ..files import EXPORT_FILE, atomic_output, check_output, write_json
from ..in_memory import given_folders
from ..languages import find_prefixes, named_columns
from ..loading import hide_bars, position_limit, resolve_source, unique_parameters
from ..models.modeling_lightformer_speech import LightFormerForSpeechSeq2Seq
from ..options import OptionError, check_speech, takes
from ..processors import usual_settings
from ..results import Result
from ..rounding import collate
from ..speech import prompt_of
from ..text import data_name
from . import ARGOS, EngineFile, argos, load_engine_file
from .arguments import ExportArguments
from .card import fill_example, write_card
from .engine import TransformersModel
from .layers import Expansion, Source, read_source
from .search import NOT_OF_ARGOS, UNHEARD, Search, find_ignored
from .shortlist import ShortlistReport, add_shortlist, read_ids, read_pairs, translate_all
from .tokenizer_file import TokenizerReport, write_tokenizer_file

if TYPE_CHECKING:
    from ..checkpoints.teacher import Teacher

LONGEST_OUTPUT = 512  # tokens, by other programs, of a model that names no length
SENTENCES, TOKENS = 6, 12  # sizes of the comparison
CALIBRATION, BATCH = 640, 32  # sentences by which matrices are rounded to int4
EXACT = 1e-3
logger = logging.getLogger(__name__)
# Mean difference in log p, as a share of how much log p differs between tokens: unrelated models are above 1.
ALIKE = 0.5


@dataclass(frozen=True)
class ExportReport(Result):
    """Report of an export.

    Attributes:
        engine, quantization: as asked for.
        source: the checkpoint.
        parameters: its unique ones.
        multiplied_out: stored matrices that were expanded because the engine has no low-rank layers.
        factor_parameters, product_parameters: their numbers before and after.
        narrowed_attentions: attentions among them whose heads got narrower than they were, exactly.
        weight_bytes: size of the model's files, without the tokenizer.
        difference: largest difference of log p from the checkpoint's, in nats, over random sentences; in less than
            32 bits the mean difference over the checkpoint's outputs, see `measure_difference`.
        max_position_embeddings: most tokens of an input; `None` where nothing limits them.
        encoder_table: numbers of the encoder's embedding matrix, if it was expanded.
        shortlist: report of the shortlist, if there is one.
        prefix: prefix of every source, as T5 requires: that of its two languages, or the only one.
        tokenizer: how the written `tokenizer.json` compares with the checkpoint's tokenizer.
        limit_by_input: whether the checkpoint names no length of outputs, so that sources suggest it.
        beside: {other quantization that the folder holds too: its bytes, and its difference of log p}.
        package: file in the folder that Argos Translate and LibreTranslate install, if it was asked for.
        reads_sound: whether it is a model for speech.
    """

    engine: str
    quantization: str
    source: str
    parameters: int
    multiplied_out: int
    factor_parameters: int
    product_parameters: int
    narrowed_attentions: int
    weight_bytes: int
    difference: float
    max_position_embeddings: int | None
    encoder_table: int = 0
    shortlist: ShortlistReport | None = None
    prefix: str = ""
    tokenizer: TokenizerReport = field(default_factory=TokenizerReport)
    beside: dict[str, tuple[int, float]] = field(default_factory=dict)
    limit_by_input: bool = False
    package: str = ""
    reads_sound: bool = False

    def parts(self) -> list[Table | str]:
        """Return a table of the result."""
        table = Table(title=f"{escape(self.source)} for {self.engine}", show_header=False)
        table.add_row("numbers", self.quantization)
        table.add_row("parameters", f"{self.parameters:,}")
        table.add_row("files of the model", f"{self.weight_bytes / 1e6:,.1f} MB")
        table.add_row("difference of log-probabilities", f"{self.difference:.2g} nats")
        if self.multiplied_out:
            table.add_row("low-rank factors expanded to full matrices", f"{self.multiplied_out}")
        return [table]

    def lines(self, output: str | Path) -> list[str]:
        """The same as sentences, and how to load the folder."""
        form = self.quantization
        measure = "at most" if form == "float32" else "mean over the tokens of its outputs"
        lines = [
            f"{self.source}: {self.parameters:,} parameters, {self.weight_bytes / 1e6:,.1f} MB in {output} "
            f"({self.engine}, {form}).",
            f"Its log-probabilities differ from the checkpoint's by {self.difference:.2g} nats ({measure}).",
        ]
        if self.multiplied_out:
            lines.append(
                f"{self.engine} has no low-rank linear layer: {self.multiplied_out} matrices were expanded, "
                f"{self.factor_parameters:,} parameters to {self.product_parameters:,}."
            )
        if self.encoder_table:
            bits = {"int8": 8, "int16": 16, "float16": 16, "bfloat16": 16}.get(form.partition("_")[0], 32)
            lines.append(
                f"{self.encoder_table * bits / 8e6:,.1f} MB of it are the encoder's embedding matrix, low-rank in the "
                "checkpoint: convert --vocabulary keeps fewer tokens, export --to onnx both factors."
            )
        if self.narrowed_attentions:
            lines.append(f"The heads of {self.narrowed_attentions} attentions were narrowed to their rank, exactly.")
        if self.shortlist is not None:
            lines.append(self.shortlist.line())
        for other, (size, difference) in self.beside.items():
            lines.append(f"The folder also holds {other}: {size / 1e6:,.1f} MB, difference {difference:.2g} nats.")
        if self.package:
            lines.append(f"Argos Translate and LibreTranslate install {output}/{self.package}.")
        if self.reads_sound:
            program = load_engine_file(self.engine).SPEECH_PROGRAM
            return [*lines, f"Run it with {program}, as {output}/README.md shows."]
        lines += self.tokenizer.lines()
        lines.append(
            f"Try it: lightformers translate {output}; in Python lightformers_hf.load_engine({str(output)!r})."
        )
        if own_way := load_engine_file(self.engine).describe_loading(Path(output)):
            lines.append(f"Without this package: {own_way}.")
        return lines


@takes(ExportArguments)
def export(call: ExportArguments) -> ExportReport:
    """Write a LightFormer, or a dense checkpoint of a family that this package converts, for another engine.

    `output` gets the engine's files, the tokenizer, the generation configuration and `export.json`. It is written
    whole or not at all, and only after its log-probabilities were compared with the checkpoint's.

    Args:

    Raises:
        ValueError: the engine is unknown or not installed, it does not support the model (the message names the part),
            or its outputs are not those of the checkpoint.
        FileNotFoundError: no such checkpoint.
        FileExistsError, BlockingIOError: see `files.atomic_output`.

    Example:
        >>> export("recovered", "deployed", to="ctranslate2", quantization="int8")
    """
    to = "ctranslate2" if call.to == ARGOS else call.to
    texts = [data_name(call.shortlist), data_name(call.calibration)]
    engine = check_engine(to, call.quantization, texts[0])
    if texts[0] and call.to == ARGOS:
        raise OptionError(
            "shortlist", " is given, but Argos Translate computes all tokens of the output layer: remove ", "shortlist"
        )
    if call.calibration is not None and call.quantization != "int4":
        raise ValueError(
            "calibration is given, which only int4 uses: give quantization int4 (--quantization int4), or remove it"
        )
    with usual_settings(), hide_bars():
        check_output(call.output, overwrite=call.overwrite, inputs=[*given_folders(call.model), *texts])
        inputs: list[str | Path | None] = [*map(resolve_source, given_folders(call.model)), *texts]
        with atomic_output(call.output, overwrite=call.overwrite, inputs=inputs) as temporary:
            source = read_source(call.model, to, call.tokenizer, (call.source_lang, call.target_lang))
            package = argos.find_languages(source, call.source_lang, call.target_lang) if call.to == ARGOS else None
            if type(source.model) is LightFormerForSpeechSeq2Seq:
                return write_speech(call, source, engine, temporary, to)
            report = write_text(call, source, engine, temporary, to, package)
            if package:
                argos.write_package(source, temporary, package)
                if ignored := find_ignored(source.generation_config, NOT_OF_ARGOS):
                    logger.warning(f"{source.name} asks for {ignored}, which Argos Translate does not have")
            return report


def write_text(
    call: ExportArguments, source: Source, engine: EngineFile, folder: Path, to: str, package: tuple[str, str] | None
) -> ExportReport:
    """Write a model for text into `folder`, with its tokenizer, report and card; `package`: languages for Argos."""
    languages = (call.source_lang, call.target_lang)
    columns = named_columns(*languages)
    shortlist, calibration = data_name(call.shortlist), data_name(call.calibration)
    if calibration:
        source = replace(source, calibration=read_calibration(source, calibration, columns))
    beside = write_beside(source, engine, folder, call.quantization, engine.write, measure_difference)
    before = folder_bytes(folder)
    quantization = call.quantization or "int8"
    expansion = engine.write(source, folder, quantization)
    listed = add_shortlist(engine, source, folder, quantization, shortlist, columns) if shortlist else None
    written = folder_bytes(folder) - before
    tokenizer = TokenizerReport(missing="the checkpoint has no tokenizer")
    if source.tokenizer is not None:
        source.tokenizer.save_pretrained(folder)
        tokenizer = write_tokenizer_file(source.tokenizer, folder)
    prefixes = find_prefixes(source.model.config, *languages, source.tokenizer)
    prefix = prefixes[0] if len(prefixes) == 1 else ""
    has_codes = hasattr(source.tokenizer, "src_lang")
    if any(languages) and not (shortlist or calibration or package or any(prefixes) or has_codes):
        logger.warning(
            f"source_lang and target_lang change nothing in the exported model: {source.name} translates one pair of "
            "languages, and no text is read whose columns they would name"
        )
    if hasattr(engine, "write_config"):
        engine.write_config(source, folder, prefix)
    by_input = write_generation(source, folder)
    report = describe_export(
        source,
        expansion,
        engine=to,
        quantization=quantization,
        weight_bytes=written,
        difference=measure_difference(source, engine, folder, quantization),
        encoder_table=expansion.encoder_table,
        shortlist=listed,
        prefix=prefix,
        tokenizer=tokenizer,
        beside=beside,
        limit_by_input=by_input,
        package=f"{argos.package_name(package)}.argosmodel" if package else "",
    )
    example = "" if tokenizer.missing else fill_example(engine, source, Path(call.output).name, prefix)
    write_report(call, source, report, folder, engine, example)
    return report


def write_generation(source: Source, folder: Path) -> bool:
    """Write the options of greedy or beam search; return whether sources suggest the length of outputs."""
    generation = source.generation_config
    if unusual := describe_strategies(generation):
        logger.warning(f"{source.name} asks for {unusual}: the export decodes by greedy or beam search")
        generation.update(**search_options(generation) | dict.fromkeys(SAMPLING))
    if by_input := output_limit(generation) is None:  # other programs would end after 20 tokens
        generation.max_length = min(LONGEST_OUTPUT, position_limit(source.model.config) or LONGEST_OUTPUT)
    generation.save_pretrained(folder)
    return by_input


def write_report(
    call: ExportArguments, source: Source, report: ExportReport, folder: Path, engine: EngineFile, example: str
) -> None:
    """Write `export.json` and the card."""
    write_json(asdict(report), folder / EXPORT_FILE)
    lines = report.lines(Path(call.output).name)
    names = {"engine": report.engine, "form": report.quantization}
    library = getattr(engine, "LIBRARY", report.engine)
    write_card(folder, source, lines=lines, example=example, library=library, **names)


def describe_export(source: Source, expansion: Expansion, **fields: Any) -> ExportReport:
    """Return the report of an export, with the sizes of its source and of the matrices that were expanded."""
    return ExportReport(
        source=source.name,
        parameters=unique_parameters(source.model),
        multiplied_out=expansion.matrices,
        factor_parameters=expansion.parameters_before,
        product_parameters=expansion.parameters_after,
        narrowed_attentions=expansion.narrowed_attentions,
        max_position_embeddings=source.model.config.max_position_embeddings,
        **fields,
    )


def read_calibration(
    source: Source, text: str, columns: tuple[str | None, str | None]
) -> tuple[dict[str, Tensor], ...]:
    """Return batches of sentences spread over a text, with their translations, else with those of the model."""
    sources, references = read_pairs(source, text, columns, option="calibration")
    chosen = range(0, len(sources), max(1, len(sources) // CALIBRATION))[:CALIBRATION]
    ids = read_ids(source, [sources[index] for index in chosen])
    if references is None:
        search = Search.of(source.generation_config)
        model, search = TransformersModel(source.model, search, 1), search.with_options(1, None, None)
        outputs = translate_all(model, ids, search, position_limit(source.model.config))
    else:
        outputs = read_ids(source, [references[index] for index in chosen], is_target=True)
    pad = source.model.config.pad_token_id
    starts = range(0, len(ids), BATCH)
    return tuple(collate(ids[start : start + BATCH], outputs[start : start + BATCH], pad) for start in starts)


def write_beside(
    source: Source,
    engine: EngineFile,
    folder: Path,
    quantization: str | None,
    write: Callable[[Source, Path, str], Expansion],
    measure: Callable[[Source, EngineFile, Path, str], float],
) -> dict[str, tuple[int, float]]:
    """Write the types of numbers that stand beside int8, if no type is asked for: as of `ExportReport.beside`."""
    beside: dict[str, tuple[int, float]] = {}
    for other in getattr(engine, "BESIDE", ()) if quantization is None else ():
        before = folder_bytes(folder)
        write(source, folder, other)
        beside[other] = folder_bytes(folder) - before, measure(source, engine, folder, other)
    return beside


def write_speech(call: ExportArguments, source: Source, engine: EngineFile, folder: Path, to: str) -> ExportReport:
    """Write a model for speech into `folder`, with its processor, report and card.

    Raises `ValueError` for options that are for text.
    """
    check_speech(call, source.name)
    parts = (source.need_tokenizer(), source.need_extractor(), source.generation_config)
    if ignored := find_ignored(source.generation_config, UNHEARD):
        logger.warning(f"{source.name} asks for {ignored}, which exported models for speech do not have")
    beside = write_beside(source, engine, folder, call.quantization, engine.write_speech, measure_speech)
    before, quantization = folder_bytes(folder), call.quantization or "int8"
    expansion = engine.write_speech(source, folder, quantization)
    written, difference = folder_bytes(folder) - before, measure_speech(source, engine, folder, quantization)
    for part in parts:
        part.save_pretrained(folder)
    if hasattr(engine, "write_config"):
        engine.write_config(source, folder, "")
    sizes: dict[str, Any] = {"weight_bytes": written, "difference": difference, "beside": beside, "reads_sound": True}
    report = describe_export(source, expansion, engine=to, quantization=quantization, **sizes)
    dtype = getattr(engine, "DTYPES", {}).get(quantization)  # as transformers.js names it
    example = engine.SPEECH_EXAMPLE.format(folder=Path(call.output).name, dtype=dtype)
    write_report(call, source, report, folder, engine, example)
    return report


def check_difference(difference: float, limit: float, quantization: str) -> float:
    """The difference. Raises `ValueError` where an export's log-probabilities are not the checkpoint's."""
    if difference <= limit:
        return difference
    wider = "int8" if quantization == "int4" else "float32"
    advice = f"Export it with quantization {wider} (--quantization {wider})."
    remedy = "Please report it." if quantization == wider else advice
    raise ValueError(
        f"the exported model's log-probabilities differ from the checkpoint's by {difference:.2g} nats, more than "
        f"{limit:.2g}: nothing was written. {remedy}"
    )


def measure_speech(source: Source, engine: EngineFile, folder: Path, quantization: str) -> float:
    """As `measure_difference`, in nats a token, on noise that the engine transcribes."""
    config, generation = source.model.config, source.generation_config
    generator = torch.Generator().manual_seed(0)
    features = torch.rand(1, config.num_mel_bins, 2 * config.max_source_positions, generator=generator) - 0.5
    languages = getattr(generation, "lang_to_id", None) or {}
    prompt = prompt_of(generation, next((token.strip("<|>") for token in languages), None))
    running = engine.load_speech(folder, generation, 1)
    tokens, score = running.transcribe(features.numpy(), prompt, num_beams=1, max_new_tokens=TOKENS)
    if len(tokens) < TOKENS:
        tokens = [*tokens, generation.eos_token_id]
    inputs = torch.tensor([[*prompt, *tokens]])
    logits = source.model(features, decoder_input_ids=inputs[:, :-1]).logits[0, len(prompt) - 1 :]
    logits[:, list(generation.suppress_tokens or ())] = -torch.inf
    logits[0, list(generation.begin_suppress_tokens or ())] = -torch.inf
    log_p = logits.log_softmax(-1)
    expected = log_p.gather(1, inputs[0, len(prompt) :, None]).sum()
    difference, exact = abs(score - float(expected)) / len(tokens), quantization == "float32"
    allowed = log_p[log_p.isfinite()]
    limit = EXACT if exact else ALIKE * float((allowed - allowed.mean()).abs().mean())
    return check_difference(difference, limit, quantization)


def folder_bytes(folder: Path) -> int:
    """The bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def check_engine(to: str, quantization: str | None, shortlist: str | None = None) -> EngineFile:
    """The file of an engine. Raises `ValueError` where it is unknown, not installed, or lacks what is asked for."""
    engine = load_engine_file(to)
    if quantization not in (None, *engine.QUANTIZATIONS):
        remedy = ". int4 is for --to onnx" if quantization == "int4" else ""
        raise OptionError("quantization", f" is {quantization!r}; {to} has {', '.join(engine.QUANTIZATIONS)}{remedy}")
    if shortlist is not None and quantization == "int4":
        raise OptionError(
            "", "int4 computes all tokens of the output layer: remove ", "shortlist", ", or give quantization int8"
        )
    if shortlist is not None and not hasattr(engine, "write_shortlist"):
        raise OptionError(
            "shortlist", f" is given, but {to} computes all tokens of the output layer: remove ", "shortlist"
        )
    return engine


def expands_low_rank(to: str) -> bool:
    """Whether factors become full matrices in an engine."""
    return getattr(load_engine_file(to), "EXPANDS_LOW_RANK", False)


def measure_difference(source: Teacher, engine: EngineFile, folder: Path, quantization: str) -> float:
    """Return how far log-probabilities of the written model are from the checkpoint's, in nats, on random sentences.

    In float32 the result is the largest difference over random targets. In fewer bits it is the mean difference over
    the tokens that the checkpoint generates: errors of tokens that it never chooses change no output. Raises
    `ValueError` where the log-probabilities of random targets are not those of the checkpoint.
    """
    search, config = Search.of(source.generation_config), source.model.config
    special = {search.start, search.pad, *search.ends, *search.suppressed}
    generator = torch.Generator().manual_seed(0)
    longest = max(min(TOKENS, (position_limit(config) or TOKENS + 1) - 1), 1)

    def random_sentences(vocabulary: int) -> list[list[int]]:
        ids = torch.tensor([token for token in range(vocabulary) if token not in special] or [0])
        lengths = torch.randint(1, longest + 1, (SENTENCES,), generator=generator).tolist()
        return [ids[torch.randint(len(ids), (length,), generator=generator)].tolist() for length in lengths]

    models = TransformersModel(source.model, search, 1), engine.load(folder, search, 1)

    def scores(sources: list[list[int]], targets: list[list[int]], first: int) -> list[Tensor]:
        """Log-probabilities by both models, less those of the `first` tokens of each target."""
        return [
            torch.tensor([score for row in model.score(sources, targets) for score in row[first:]]).double()
            for model in models
        ]

    sources, targets = random_sentences(config.vocab_size), random_sentences(config.decoder_vocab_size)
    expected, found = scores(sources, targets, 0)
    errors = (found - expected).abs()
    exact = quantization == "float32"
    if exact:
        difference, limit = float(errors.max()), EXACT * max(1.0, float(expected.abs().max()))
    else:
        spread = fmean((expected - expected.mean()).abs().tolist())
        difference, limit = float(errors.mean()), ALIKE * spread
    check_difference(difference, limit, quantization)
    if exact:
        return difference
    own = models[0].generate(sources, search.with_options(1, longest, None))
    outputs = [row[:-1] if row and row[-1] in search.ends else row for row in own]
    expected, found = scores(sources, outputs, 0 if search.forced_start is None else 1)
    return float((found - expected).abs().mean())
