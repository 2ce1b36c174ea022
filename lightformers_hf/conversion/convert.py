"""Pipeline of a conversion: load → trim → shorten → share → bridge → measure → choose → build → refit → write."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from ..files import CARD_FILE
from ..loading import all_finite, assemble, load_tensors, skeleton
from ..matrices import product_of
from ..models.heads import ConditionalGenerationHead
from ..processors import check_device, free_memory, has_fast_bf16
from ..text import fingerprint
from .allocation import check_choices, choose, find_units, work_on_places
from .calibration_text import count_tokens, draw_pairs, hold_out, sample_text
from .card import model_card
from .forms import Built, Form, Setting, all_forms
from .options import CompressionOptions, StudyOptions, needs_calibration, resolve_study
from .refit import bridge, can_refit, predict_tokens, refit, share_of_equal
from .report import OWN_TEXT, Agreement, CompressionReport, MatrixReport, ModelFacts, Plan, write_report
from .sensitivity import Batch, Calibration
from .sharing import Originals, can_align, find_matrices, merge_layers, share_layers, short_name
from .teacher import Teacher
from .vocabulary import choose_tokens
from .workers import AT_ONCE, algebra_device, count_workers, describe_work, shows_progress

# A forecast. Seconds of one core for 10⁹ of: multiplications of layers with tokens, of the output layer with target
# tokens, cubes of the longer sides of matrices; and so many times as many without fast products in bfloat16.
LAYERS, LOGITS, ALGEBRA, SLOWER = 0.33, 0.33, 0.09, 2
# The share of the work that remains if the text has its translations, seconds to load, and the exponent of the speed
# of several threads.
GIVEN, LOADING, SHARED = 0.6, 8.0, 0.5
# Bytes of the libraries, and how often the model is in memory in float32: teacher, result, activations.
LIBRARIES, COPIES = 7e8, 1.9


@dataclass(frozen=True, eq=False)
class Compressed:
    """A compressed teacher."""

    teacher: Teacher  # with the layers that stay
    model: PreTrainedModel  # skeleton of the result
    tensors: dict[str, Tensor]  # the result's, in the teacher's type or in float32; empty after a dry run
    report: CompressionReport


@dataclass(frozen=True, eq=False)
class Measured:
    """Measurements of a teacher on calibration text."""

    teacher: Teacher  # its layers refitted where others are removed
    whole: PreTrainedModel | None = None  # with all layers, on its device; `None` without text
    calibration: Calibration | None = None  # the moments of the teacher's matrices, if errors are weighted
    compared: Sequence[Batch] = ()  # on which the result is compared with the teacher
    held_out: bool = False  # whether these batches were held out of the calibration
    sentences: list[str] = field(default_factory=list)  # fingerprints of the user's sentences


def compress(
    folder: Path, source: str, options: CompressionOptions, study: StudyOptions | None, *, dry: bool
) -> Compressed:
    """Choose the form of every part of the teacher in a folder, and build it, unless the run is `dry`.

    `source` is the teacher's name as the user gave it.
    """
    asked_study, study = study, resolve_study(options, study)
    device = check_device(options.device)
    checkpoint = Teacher(folder, source, (options.source_lang, options.target_lang))
    whole = checkpoint.keep_tokens(choose_tokens(checkpoint, options)) if options.vocabulary else checkpoint
    teacher = whole.keep_layers({"encoder": options.encoder_layers, "decoder": options.decoder_layers})
    dense = share_layers(teacher, options, study)
    aligns = can_align(teacher, dense, options)
    originals = Originals(
        teacher, dense, aligns, device=algebra_device(device), is_truncated_first=options.method == "paper"
    )
    units = find_units(originals, options, study)
    is_seq2seq = issubclass(teacher.model_class, ConditionalGenerationHead)
    calibrates = is_seq2seq and options.method != "paper" and (aligns or options.policy.compresses)
    removed = check_choices(units, originals, options, study) if calibrates else None
    will_refit = can_refit(dense.config, study) and calibrates
    will_bridge = teacher is not whole and is_seq2seq and study.refit is not False
    if not (calibrates or will_bridge) and (needed := needs_calibration(options, study)) is not None:
        if not is_seq2seq:
            raise ValueError(
                f"{needed} needs calibration, which is for sequence-to-sequence models; "
                f"{teacher.name} is a {teacher.model_class.__name__}"
            )
        raise ValueError(
            f"{needed} is given, but no matrix gets smaller and no layer is merged or removed, which needs text: "
            f"give a ratio, a rank or a size, too, or remove {needed}"
        )
    if teacher.has_tokenizer:
        teacher.tokenizer()  # one that does not fit ends it here
    teacher.generation_config()  # and so does one that cannot be written

    reads_text = calibrates or (will_bridge and not dry)
    measured = Measured(teacher)
    if reads_text:
        measured = measure(whole, teacher, options, study, removed, bridges=will_bridge, device=device)
    originals = merge_layers(replace(originals, teacher=measured.teacher), measured.calibration)
    units = find_units(originals, options, study)
    places, setting = choose(units, originals, options, study)
    built, reports = build(places, setting, originals, keep=not dry)
    fields: dict[str, object] = {}
    for form in all_forms():
        fields |= form.fields([report for report in reports if report.form == form.label], dense)
    model = skeleton(teacher.model_class, type(dense.config)(**{**dense.config.to_dict(), **fields}))
    if tensors := built.tensors:
        tensors |= originals.other_tensors()
    agreement = None
    if tensors and measured.whole is not None:
        will_refit = will_refit and any(report.relative_error for report in reports)
        agreement = fit(model, teacher, measured, tensors, built if will_refit else None)
    report = (Plan if dry else CompressionReport).of(
        checkpoint,
        model,
        options,
        asked_study,
        calibration=(options.calibration or OWN_TEXT) if reads_text else None,
        trimmed=whole,
        matrices=reports,
        calibrated_on=measured.sentences,
        agreement=agreement,
        processor=describe_work(device),
    )
    return Compressed(teacher, model, tensors, report)


def measure(
    whole: Teacher,
    teacher: Teacher,
    options: CompressionOptions,
    study: StudyOptions,
    removed: float | None,
    *,
    bridges: bool,
    device: torch.device,
) -> Measured:
    """Print a forecast, get calibration text, refit the layers around removed ones, and measure sensitivity.

    Sensitivity is not measured if the share of parameters that is `removed` is `None`.
    """
    pairs = draw_pairs(whole, options, study)
    if shows_progress() and device.type == "cpu":
        given = pairs is not None and "target" in pairs.column_names
        tqdm.write(forecast(whole.model, count_tokens(whole, options, pairs), given=given), file=sys.stderr)
    model = whole.load().to(device)
    batches, held = hold_out(sample_text(model, whole, options, study, pairs))
    shorter = model if teacher is whole else teacher.load().to(device)
    if bridges:
        teacher = teacher.change(bridge(shorter, model, teacher.depths, batches))
    calibration = None
    if removed is not None:
        linear = [name for name, kind in find_matrices(shorter) if kind != "embedding"]
        calibration = Calibration(
            shorter, linear, batches, removed=removed, self_generated=pairs is None, alike=study.weighting != "loss"
        )
    sentences = set() if pairs is None else {fingerprint(sentence) for sentence in pairs["source"]}
    agreed = batches if held is None else held
    return Measured(teacher, model, calibration, agreed, held is not None, sorted(sentences))


def forecast(teacher: PreTrainedModel, tokens: float, *, given: bool) -> str:
    """Estimate time and memory of the default conversion of a model, within a factor of about 1.5."""
    layers = logits = cubes = 0.0
    for name, kind in find_matrices(teacher):
        m, n = product_of(teacher.get_submodule(name)).shape
        if kind == "embedding":
            logits = max(logits, m * n)
        else:
            layers, cubes = layers + m * n, cubes + max(m, n) ** 3
    work = (LAYERS * layers + LOGITS * logits) * tokens * (GIVEN if given else 1) + ALGEBRA * cubes
    work *= (1 if has_fast_bf16() else SLOWER) / min(count_workers(), AT_ONCE) ** SHARED
    seconds, memory, free = LOADING + work / 1e9, LIBRARIES + COPIES * 4 * (layers + logits), free_memory()
    time = f"{seconds / 60:.0f} minutes" if seconds > 90 else f"{max(1, round(seconds / 10)) * 10} seconds"
    line = f"This takes at least {time}, on idle cores, and about {memory / 1e9:.1f} GB of memory."
    if memory <= free:
        return line
    return f"{line} Only {free / 1e9:.1f} GB are free, so it may be ended half-way; --method paper needs least."


def build(
    places: list[Form], setting: Callable[[Form], Setting], originals: Originals, *, keep: bool
) -> tuple[Built, list[MatrixReport]]:
    """All places at their settings, largest first, one a worker; reports in the order of the model's matrices."""
    whole, make = Built([], {}), lambda place: place.build(setting(place))
    for _, built in work_on_places("factorizing", make, places, originals.device):
        whole.reports.extend(built.reports)
        whole.coordinates.update(built.coordinates)
        if keep:
            whole.tensors.update(built.tensors)
    by_name = {report.name: report for report in whole.reports}
    return whole, [by_name[short_name(name)] for name, _ in find_matrices(originals.dense)]


def fit(
    model: PreTrainedModel, teacher: Teacher, measured: Measured, tensors: dict[str, Tensor], built: Built | None
) -> Agreement:
    """Refit the layers of a compressed model to its teacher's outputs, and compare their predictions."""
    names = list(tensors)
    # Tensors are removed one by one, so that the model and all tensors are never in memory together.
    values = {name: (tensors.pop(name) if built else tensors[name]).float() for name in names}
    student = assemble(type(model), model.config, values).to(measured.whole.device)
    expected = predict_tokens(measured.whole, measured.compared)
    before = None
    if built is not None:
        before, _ = share_of_equal(predict_tokens(student, measured.compared), expected)
        refit(student, measured.whole, teacher.depths, measured.calibration, built)
        state = student.state_dict()
        tensors.update({name: state[name].cpu() for name in names})
    share, tokens = share_of_equal(predict_tokens(student, measured.compared), expected)
    return Agreement(share=share, before_refit=before, tokens=tokens, held_out=measured.held_out)


def write(result: Compressed, folder: Path, place: str) -> None:
    """Write checkpoint, tokenizer, report and card into a folder whose final name is `place`."""
    teacher, model, report = result.teacher, result.model, result.report
    load_tensors(model, cast_tensors(result.tensors, teacher.config.dtype or torch.float32), assign=True)
    model.generation_config = teacher.generation_config()
    model.save_pretrained(folder)
    if teacher.has_tokenizer:
        # Loaded and saved rather than copied: this writes the name of the class, which does not follow from the model
        # type.
        teacher.tokenizer().save_pretrained(folder)
    write_report(report, folder)
    facts = ModelFacts(report.architecture, report.auto_class, report.parameters_after, report.bytes_after)
    (folder / CARD_FILE).write_text(model_card(facts, report, place=place), encoding="utf-8")


def cast_tensors(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors in the type in which the result is stored."""
    cast = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    for name, tensor in cast.items():
        if not all_finite(tensor):
            if not all_finite(tensors[name]):
                raise ValueError(
                    f"{name} of the result holds NaN or infinite values, which is a mistake: please report it"
                )
            raise ValueError(
                f"{name} of the result holds values beyond {str(dtype).removeprefix('torch.')}, the type of the "
                "source: convert the source in float32"
            )
    return cast
