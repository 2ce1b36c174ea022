"""Pipeline of a conversion: load → trim → shorten → share → bridge → measure → narrow → choose → fit → write."""

from __future__ import annotations

import copy
import logging
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from ..checkpoints.fidelity import check_outputs
from ..checkpoints.teacher import Teacher, copy_model, on_device, shorten, trim
from ..files import CARD_FILE
from ..loading import all_finite, complete, load_tensors, skeleton, stored_tensors
from ..matrices import product_of
from ..models.heads import ConditionalGenerationHead
from ..options import OptionError, check_speech
from ..processors import check_device, free_memory, has_fast_bf16
from ..speech import reads_sound, save_extractor
from ..text import fingerprint
from .allocation import (
    AUTO,
    Choice,
    check_choices,
    choose,
    count_besides,
    find_errors,
    find_units,
    spends_budget,
    work_on_sites,
)
from .calibration_speech import draw_pieces, sound_batches
from .calibration_text import (
    count_tokens,
    draw_pairs,
    further_text,
    greedy_outputs,
    hold_out,
    sample_text,
)
from .card import model_card
from .forms import Form, Shaped, all_forms
from .forms.svd import Split
from .joint import fit_jointly, layer_parameters
from .options import CompressionOptions, StudyOptions, needs_calibration, resolve_study
from .refit import bridge, can_refit, compare, find_refitted, refit, thin_out
from .report import DENSE, OWN_TEXT, Agreement, CompressionReport, MatrixReport, ModelFacts, Plan, write_report
from .sensitivity import Batch, Calibration, predicted_mask
from .sharing import Originals, can_align, find_matrices, merge_layers, share_layers, short_name
from .vocabulary import choose_tokens
from .width import find_width, fold_norms, likely_widths, narrow_fields, remove_features
from .workers import AT_ONCE, algebra_device, count_workers, describe_work, shows_progress

# A forecast. Seconds of one core for 10⁹ of: multiplications of layers with tokens, of the output layer with target
# tokens, cubes of the longer sides of matrices; and so many times as many without fast products in bfloat16.
LAYERS, LOGITS, ALGEBRA, SLOWER = 0.33, 0.33, 0.09, 2
# The share of the work that remains if the text has its translations, seconds to load, and the exponent of the speed
# of several threads.
GIVEN, LOADING, SHARED = 0.6, 8.0, 0.5
# Factors of the shortest and the longest time: processors differ, and several conversions may be compared.
SHORTEST, LONGEST = 0.3, 3.0
# Bytes of the libraries, and how often the model is in memory in float32, at most: teacher, result, activations.
LIBRARIES, COPIES = 1.4e9, 4.0

logger = logging.getLogger(__name__)
WORTH_FITTING = 1e-4  # nats a token: below, layers are not fitted jointly
COMPARED_TOKENS = 8192  # of targets, about: a comparison on more takes long, with the same outcome
CLOSE = 1.1  # divergences from the teacher that are equal but for chance
WITH = " with d_model "  # between a method and a width
DIGITS = 9  # of errors in a report: what an eigensolver's rounding does not change


@dataclass(frozen=True, eq=False)
class Compressed:
    """A compressed teacher."""

    teacher: Teacher  # with the layers that stay
    model: PreTrainedModel  # in float32; a skeleton after a dry run
    report: CompressionReport


@dataclass(frozen=True, eq=False)
class Measured:
    """Measurements of a teacher on calibration text."""

    teacher: Teacher  # its layers refitted where others are removed
    whole: PreTrainedModel | None = None  # with all layers, on its device; `None` without text
    calibration: Calibration | None = None  # the moments of the teacher's matrices, if errors are weighted
    compared: Sequence[Batch] = ()  # on which the result is compared with the teacher
    outputs: Sequence[Batch] = ()  # the teacher's greedy outputs of some of them
    maps: Mapping[str, Tensor] = field(default_factory=dict)  # `output_maps`, if features were removed
    held_out: bool = False  # whether these batches were held out of the calibration
    further: Sequence[Batch] = ()  # for the joint fit alone
    known: list[str] = field(default_factory=list)  # fingerprints of the user's sentences, or sounds


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way to make the model smaller, and how near it comes to its teacher."""

    chosen: list[Choice]
    model: PreTrainedModel
    errors: Mapping[Form, float]
    agreement: Agreement | None

    @property
    def divergence(self) -> float:
        """KL divergence from the teacher's predictions in nats a token, 0 where it is not known."""
        return 0.0 if self.agreement is None else self.agreement.divergence or 0.0


@dataclass(frozen=True, eq=False)
class Way:
    """A candidate before it is made: what is chosen for the matrices of a teacher, which may have fewer features."""

    chosen: list[Choice]
    originals: Originals
    measured: Measured


def compress(checkpoint: Teacher, options: CompressionOptions, study: StudyOptions | None, *, dry: bool) -> Compressed:
    """Choose the form of every site of a teacher, and make the smaller model, unless the run is `dry`."""
    asked_study, study = study, resolve_study(options, study)
    device = check_device(options.device)
    if reads_sound(checkpoint.config):
        check_speech(options, checkpoint.name)
    whole = trim(checkpoint, choose_tokens(checkpoint, options)) if options.vocabulary else checkpoint
    if (width := find_width(whole, options.d_model)) is not None:
        whole = fold_norms(whole)
    teacher = shorten(whole, {"encoder": options.encoder_layers, "decoder": options.decoder_layers})
    originals = find_originals(teacher, options, study, width)
    units = find_units(originals, options, study)
    steps = find_steps(whole, originals, options, study)
    if options.calibration_samples is not None and not steps:
        logger.warning("calibration_samples has no effect: this conversion reads no text")
    removed = check_choices(units, originals, options, study) if "weight" in steps else None
    if not dry:
        check_outputs(checkpoint)
    measured = Measured(teacher)
    refits = "refit" in steps
    if "weight" in steps or ("bridge" in steps and not dry):
        later = steps & {"bridge"} if dry else steps
        measured = measure(whole, teacher, options, study, removed, steps=later, compares=not dry, device=device)
        if width is not None:
            measured = narrow(measured, width, bridges="narrow" in later)
    originals = merge_layers(replace(originals, teacher=measured.teacher), measured.calibration)
    proposals = choose(units, originals, options, study)
    if options.method != AUTO or not measured.held_out:  # nothing shows how well they do on other text
        proposals = {options.method: proposals[AUTO]}
    ways = {name: Way(proposal.chosen, originals, measured) for name, proposal in proposals.items()}
    costs = {name: proposal.cost for name, proposal in proposals.items() if proposal.cost is not None}
    listed = {name: {"cost": round(cost / 2, DIGITS)} for name, cost in costs.items()}  # nats, as of `Metric`
    agreements: dict[str, Agreement] = {}

    def narrower_ways() -> Iterator[tuple[str, Way]]:
        """Yield ways with fewer and fewer features, of the method that was nearest."""
        for features in widths:
            method = nearest(agreements).partition(WITH)[0]
            others, narrower = find_originals(teacher, options, study, features), narrow(measured, features)
            others = merge_layers(replace(others, teacher=narrower.teacher), narrower.calibration)
            try:
                found = choose(find_units(others, options, study), others, options, study)
            except ValueError:  # it has so few parameters already, or a pattern asks for a rank that it cannot have
                return
            yield f"{method}{WITH}{features}", Way(found.get(method, found[AUTO]).chosen, others, narrower)

    is_open = options.d_model is None and "low-rank" not in (study.attention_method, study.ffn_method)
    widths: list[int] = []
    if is_open and refits and measured.held_out and spends_budget(options, study):
        widths = likely_widths(teacher, cast(float, removed))
    way, best = ways[options.method], None
    if not dry and (len(ways) > 1 or widths):
        every = thin_out(cast(Calibration, measured.calibration))
        tried = chain(ways.items(), narrower_ways())
        way, best = find_nearest(tried, agreements, listed, refits=refits, every=every)
    del ways  # each width has its own teacher
    measured, originals = way.measured, way.originals
    best = best or make(way, refits=refits, dry=dry)
    chosen, model, agreement = best.chosen, best.model, best.agreement
    if "joint" in steps and best.divergence > WORTH_FITTING:
        agreement = try_joint_fit(model, measured, cast(Agreement, agreement), study.calibration_seed)
    report = (Plan if dry else CompressionReport).of(
        checkpoint,
        model,
        options,
        asked_study,
        calibration=(options.calibration or OWN_TEXT) if steps - {"refit", "joint"} else None,
        trimmed=whole,
        matrices=report_matrices(chosen, best.errors, model, originals.dense),
        calibrated_on=measured.known,
        agreement=agreement,
        candidates=listed if len(listed) > 1 else {},
        processor=describe_work(device),
    )
    return Compressed(teacher, model, report)


def find_nearest(
    tried: Iterable[tuple[str, Way]],
    agreements: dict[str, Agreement],
    listed: dict[str, dict[str, float]],
    *,
    refits: bool,
    every: int,
) -> tuple[Way, Candidate | None]:
    """Make ways with every so many batches, and return the nearest, and its model if it was made with all text.

    Those with fewer and fewer features come last, and end with the first that is farther than another. `agreements`
    and `listed` get an entry for each.
    """
    found: dict[str, tuple[Way, Candidate | None]] = {}
    for name, way in tried:
        made = make(way, refits=refits, every=every)
        listed.setdefault(name, {})["divergence"] = round(made.divergence, DIGITS)
        if shows_progress():
            tqdm.write(f"{name} {made.agreement}", file=sys.stderr)
        agreements[name] = cast(Agreement, made.agreement)
        is_nearest = name == nearest(agreements)
        if WITH in name and not is_nearest:
            break
        if is_nearest:  # one model is kept; an earlier way may be the nearest again, and is then made again
            found = {each: (other, None) for each, (other, _) in found.items()}
        found[name] = way, made if every == 1 and is_nearest else None
        del made  # a whole model
    return found[nearest({name: agreements[name] for name in found})]


def try_joint_fit(model: PreTrainedModel, measured: Measured, before: Agreement, seed: int) -> Agreement:
    """Fit all layers of a model together, and keep that if it is nearer to its teacher on the text to compare them."""
    whole, calibration = cast(PreTrainedModel, measured.whole), cast(Calibration, measured.calibration)
    model.to(whole.device)
    batches = [*calibration.batches, *measured.further]
    given, further = (sum(len(batch["labels"]) for batch in some) for some in (calibration.batches, measured.further))
    is_much = further > given and not calibration.self_generated
    values = fit_jointly(model, whole, batches, before.divergence or 0.0, seed, 1 if is_much else 2)
    agreement = replace(compare(model, whole, measured.compared, measured.outputs), held_out=measured.held_out)
    if not (agreement.divergence or 0.0) < (before.divergence or 0.0):  # as where it is NaN
        agreement = before
        for parameter, value in zip(layer_parameters(model), values, strict=True):
            parameter.data = value
    complete(model.to("cpu"), {})
    return agreement


def nearest(agreements: Mapping[str, Agreement]) -> str:
    """Return the name with the smallest divergence.

    Of those within `CLOSE` times it, the last that has fewer features, which a joint fit brings nearer than others; if
    there is none, that with most equal outputs.
    """
    divergences = {name: agreement.divergence or 0.0 for name, agreement in agreements.items()}
    divergences = {name: math.inf if math.isnan(nats) else nats for name, nats in divergences.items()}
    close = [name for name, nats in divergences.items() if nats <= CLOSE * min(divergences.values())]
    narrower = [name for name in close if WITH in name]
    return narrower[-1] if narrower else max(close, key=lambda name: (agreements[name].exact or 0, -divergences[name]))


def make(way: Way, *, refits: bool, dry: bool = False, every: int = 1) -> Candidate:
    """Make the smaller model of one candidate, refitted on every so many batches; of a `dry` run its skeleton."""
    chosen, originals, measured = way.chosen, way.originals, way.measured
    # Without a refit, errors whose costs are not known are those of the values that are made.
    errors = find_errors([choice for choice in chosen if dry or refits or choice.choices], originals)
    fields: dict[str, object] = {}
    dense = originals.dense
    for form in all_forms():
        fields |= form.fields(matrix_sizes(chosen, form), dense)
    model = skeleton(type(originals.teacher.model), type(dense.config)(**{**dense.config.to_dict(), **fields}))
    agreement = None
    if not dry:
        refits = refits and (any(errors.values()) or bool(measured.maps))
        made, agreement = fit(model, chosen, originals, measured, refits=refits, every=every)
        errors = made | errors
    return Candidate(chosen, model, errors, agreement)


def find_originals(teacher: Teacher, options: CompressionOptions, study: StudyOptions, width: int | None) -> Originals:
    """Return the matrices of a teacher, beside the dense model that has as many layers, groups and features."""
    dense = share_layers(teacher, options, study)
    if width is not None:
        dense = share_layers(teacher, options, study, narrow_fields(dense, width))
    return Originals(
        teacher,
        dense,
        options.policy,
        can_align(teacher, dense, options),
        device=algebra_device(check_device(options.device)),
        narrowed=teacher.config.d_model / dense.config.d_model,
        added=0 if width is None else max(0, count_besides(dense) - count_besides(teacher.model)),
        is_truncated_first=options.method == "paper",
    )


def narrow(measured: Measured, width: int, *, bridges: bool = False) -> Measured:
    """Return the measurements of the teacher with `width` features; `bridges`: refit its layers here, not later."""
    whole, calibration = cast(PreTrainedModel, measured.whole), cast(Calibration, measured.calibration)
    teacher, maps, moments = remove_features(measured.teacher, whole, calibration, width, measured.compared)
    if bridges:
        narrower = copy_model(teacher.model).to(whole.device)
        bridge(narrower, whole, teacher.layers, calibration.batches, maps)
        teacher = replace(teacher, model=on_device(narrower, torch.device("cpu")))
    return replace(measured, teacher=teacher, calibration=moments, maps=maps)


def find_steps(
    whole: Teacher, originals: Originals, options: CompressionOptions, study: StudyOptions
) -> frozenset[str]:
    """Return the steps that need text.

    They `bridge` removed layers, `weight` errors, `refit` the result's layers, and fit these in the end (`joint`).

    Raises `ValueError` if an option is given that means nothing without them.
    """
    teacher, dense = originals.teacher, originals.dense
    steps: set[str] = set()
    is_seq2seq = isinstance(teacher.model, ConditionalGenerationHead)
    if teacher is not whole and is_seq2seq and study.refit is not False:
        steps.add("bridge")
    gets_smaller = originals.is_aligned or originals.narrowed != 1 or originals.policy.compresses
    if is_seq2seq and options.method != "paper" and gets_smaller:
        steps.add("weight")
    if can_refit(dense.config, study) and "weight" in steps:
        steps.add("refit")
    elif originals.narrowed != 1 and study.refit is not False:  # before layers share weights
        steps.add("narrow")
    if "weight" in steps and study.joint and study.refit is not False and not reads_sound(dense.config):
        steps.add("joint")  # of sound it came out farther from the teacher on other sound
    if not steps and (needed := needs_calibration(options, study)) is not None:
        if not is_seq2seq:
            raise OptionError(
                needed,
                " needs calibration, which is for sequence-to-sequence models; "
                f"{teacher.name} is a {type(teacher.model).__name__}",
            )
        raise OptionError(
            needed,
            " is given, but no matrix gets smaller and no layer is merged or removed, which needs text: "
            "give a ratio, a rank or a size, too, or remove ",
            needed,
        )
    return frozenset(steps)


def measure(
    whole: Teacher,
    teacher: Teacher,
    options: CompressionOptions,
    study: StudyOptions,
    removed: float | None,
    *,
    steps: Collection[str],
    compares: bool,
    device: torch.device,
) -> Measured:
    """Print a forecast, get calibration text, refit the layers around removed ones, and measure sensitivity.

    Layers are refitted where `steps` have `bridge`. Sensitivity is not measured if the share of parameters that is
    `removed` is `None`. The teacher's outputs are made where the call `compares` models.
    """
    pairs: Any = (draw_pieces if reads_sound(whole.config) else draw_pairs)(whole, options, study)
    if shows_progress() and device.type == "cpu":
        if whole.feature_extractor is not None:
            given, tokens = False, float(len(pairs) * whole.config.max_source_positions)
            written = float(len(pairs) * (whole.config.max_position_embeddings or 0))
        else:
            given = pairs is not None and "target" in pairs.column_names
            tokens = written = count_tokens(whole, options, pairs, joint="joint" in steps)
        tqdm.write(forecast(whole.model, tokens, written, given=given), file=sys.stderr)
    model = on_device(whole.model, device)
    if whole.feature_extractor is not None:
        known = {sound for piece in pairs for sound in piece.sounds}
        drawn: Sequence[Batch] = sound_batches(model, whole, pairs, options.columns[0], study.calibration_seed)
    else:
        known = set() if pairs is None else {*map(fingerprint, pairs["source"])}
        drawn = sample_text(model, whole, options, study, pairs)
    batches, held = hold_out(drawn)
    shorter = model if teacher is whole else copy_model(teacher.model).to(device)
    if "bridge" in steps:
        bridge(shorter, model, teacher.layers, batches)
        teacher = replace(teacher, model=on_device(shorter, torch.device("cpu")))
    calibration = None
    if removed is not None:
        linear = [name for name, kind in find_matrices(shorter) if kind != "embedding"]
        calibration = Calibration(
            shorter, linear, batches, removed=removed, self_generated=pairs is None, alike=study.weighting != "loss"
        )
    agreed = batches if held is None else held
    outputs: Sequence[Batch] = []
    if compares and whole.feature_extractor is None:
        translated = pairs is None or "target" not in pairs.column_names
        outputs = greedy_outputs(model, whole, agreed, translated=translated)
    further: Sequence[Batch] = ()
    if "joint" in steps:
        further, sources = further_text(model, whole, options, study, pairs)
        known |= {*map(fingerprint, sources)}
    every = max(1, sum(int(predicted_mask(batch).sum()) for batch in agreed) // COMPARED_TOKENS)
    agreed = agreed[::every]
    return Measured(teacher, model, calibration, agreed, outputs, {}, held is not None, further, sorted(known))


def forecast(teacher: PreTrainedModel, tokens: float, written: float, *, given: bool) -> str:
    """Estimate the range of the time and the largest memory of the default conversion of a model.

    Args:
        tokens, written: positions of the encoder and of the decoder.
        given: whether the text has its translations.
    """
    layers = logits = cubes = products = 0.0
    for name, kind in find_matrices(teacher):
        m, n = product_of(teacher.get_submodule(name)).shape
        if kind == "embedding":
            logits = max(logits, m * n)
        else:
            layers, cubes = layers + m * n, cubes + max(m, n) ** 3
            products += m * n * (written if "decoder." in name else tokens)
    work = (LAYERS * products + LOGITS * logits * written) * (GIVEN if given else 1) + ALGEBRA * cubes
    work *= (1 if has_fast_bf16() else SLOWER) / min(count_workers(), AT_ONCE) ** SHARED
    seconds, memory, free = LOADING + work / 1e9, LIBRARIES + COPIES * 4 * (layers + logits), free_memory()
    ends = (seconds * SHORTEST, seconds * LONGEST)
    shortest, longest = ((end / 60, "minutes") if end > 90 else (end, "seconds") for end in ends)
    first = f"{max(1, int(shortest[0]))}" + ("" if shortest[1] == longest[1] else f" {shortest[1]}")
    line = (
        f"This takes between {first} and {math.ceil(longest[0])} {longest[1]} on idle cores, and up to "
        f"{memory / 1e9:.1f} GB of memory."
    )
    if memory <= free:
        return line
    return f"{line} Only {free / 1e9:.1f} GB are free, so it may be ended half-way; --method paper needs least."


def matrix_sizes(chosen: Sequence[Choice], form: type[Form]) -> dict[str, int]:
    """{matrix: its setting} of those that have a form in the result, by the names in patterns."""
    parts = [part for choice in chosen if choice.size is not None for part in choice.site.parts(choice.size)]
    return {short_name(name): size for own, name, size in parts if own is form}


def report_matrices(
    chosen: Sequence[Choice], errors: Mapping[Form, float], model: PreTrainedModel, dense: PreTrainedModel
) -> list[MatrixReport]:
    """Reports in the order of the model's matrices, with the `errors` of sites."""
    reports = {}
    for choice in chosen:
        error = round(errors[choice.site], DIGITS)
        for name in choice.site.matrices:
            (m, n), kept = choice.site.shape_of(name), model.get_submodule(name).parameters()
            size, setting = (None, DENSE) if choice.size is None else choice.site.describe(name, choice.size)
            reports[name] = MatrixReport(
                name=short_name(name), kind=choice.site.kind(name), m=m, n=n, size=size, setting=setting,
                form=DENSE if choice.size is None else choice.site.label,
                parameters_after=sum(weight.numel() for weight in kept if weight.ndim == 2),
                energy=round(1 - error**2, DIGITS), relative_error=error,
            )  # fmt: skip
    return [reports[name] for name, _ in find_matrices(dense)]


@torch.no_grad()
def fit(
    student: PreTrainedModel,
    chosen: Sequence[Choice],
    originals: Originals,
    measured: Measured,
    *,
    refits: bool,
    every: int,
) -> tuple[dict[Form, float], Agreement | None]:
    """Give a skeleton its values: the only place where they are made, before a joint fit moves them.

    Matrices are the nearest to the teacher's. If the run `refits`, linear layers are then fitted to its outputs; their
    matrices before matter only in shapes that the teacher's do not have.

    Returns: the relative errors of the sites whose matrices are the nearest, and how often model and teacher agree.
    """
    later = frozenset(find_refitted(student) if refits else ())
    split: Split = "balanced" if refits else "sigma-right"
    coordinates: dict[str, Tensor] = {}
    returns: dict[str, Tensor] = {}

    def make(choice: Choice) -> tuple[Shaped, float]:
        site, error = choice.site, 0.0
        shaped = site.shape(choice.setting, originals, choice.choices)
        form = Form if choice.size is None else type(site)
        for name, weight in shaped.weights.items():
            module = student.get_submodule(name)
            if name not in later:
                metric = partial(originals.metric, name, site.kind(name))
                error = max(error, form.fit(module, weight, metric, name=short_name(name), split=split))
            elif len(weight.left) != site.shape_of(name)[0]:
                weight.put(module)
            else:
                module.to_empty(device="cpu").requires_grad_(False)
                for parameter in module.parameters():
                    parameter.zero_()
        return replace(shaped, weights={}), max(error, shaped.error)

    by_site = {choice.site: choice for choice in chosen}
    errors = {}
    made = work_on_sites("factorizing", lambda site: make(by_site[site]), list(by_site), originals.device)
    for site, (shaped, error) in made:
        coordinates.update(shaped.coordinates)
        returns.update(shaped.returns)
        errors[site] = error
    complete(student, originals.other_tensors())
    if measured.whole is None:
        return errors, None
    student.to(measured.whole.device)
    if refits:
        teacher = measured.teacher
        given = measured.calibration, coordinates, returns
        refit(student, measured.whole, teacher.layers, *given, every=every, maps=measured.maps)
    agreement = compare(student, measured.whole, measured.compared, measured.outputs)
    complete(student.to("cpu"), {})
    return errors, replace(agreement, held_out=measured.held_out)


def finish(result: Compressed, name: str) -> PreTrainedModel:
    """Return the compressed model as users get it: in its stored type, with gradients, and with its report."""
    model, teacher = result.model, result.teacher
    tensors = cast_tensors(stored_tensors(model), teacher.config.dtype or torch.float32)
    shared = {tensor.data_ptr() for tensor in teacher.model.state_dict().values()}
    for key, tensor in tensors.items():  # the user may train both
        tensors[key] = tensor.clone() if tensor.data_ptr() in shared else tensor
    load_tensors(model, tensors, assign=True)
    model.generation_config = copy.deepcopy(teacher.generation_config)
    model.config.name_or_path = model.name_or_path = name
    model.compression_report = result.report
    return model.requires_grad_(True)


def write(result: Compressed, folder: Path, output: str) -> None:
    """Write checkpoint, tokenizer, report and card into a folder whose final name is `output`."""
    teacher, model, report = result.teacher, result.model, result.report
    tensors = cast_tensors(stored_tensors(model), teacher.config.dtype or torch.float32)
    load_tensors(model, tensors, assign=True)
    model.generation_config = teacher.generation_config
    model.save_pretrained(folder)
    if teacher.tokenizer is not None:
        # Loaded and saved rather than copied: this writes the name of the class, which does not follow from the model
        # type.
        teacher.tokenizer.save_pretrained(folder)
    if teacher.feature_extractor is not None:
        save_extractor(teacher.feature_extractor, teacher.tokenizer, folder)
    write_report(report, folder)
    facts = ModelFacts(report.architecture, report.auto_class, report.parameters_after, report.bytes_after)
    (folder / CARD_FILE).write_text(model_card(facts, report, folder=output), encoding="utf-8")


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
