"""A narrower model: hidden states of fewer features (docs/explanation/narrowing.md).

A hidden state x (d) becomes x·A (d'). A (d×d') has orthonormal columns, the principal directions of the hidden states,
weighted by the sensitivity of the loss (as SliceGPT, Ashkboos et al. 2024). A matrix that writes hidden states becomes
W·A. One that reads them becomes R·W, with x·A·R the best linear estimate of x on the calibration text.

RMSNorm commutes with rotations, and LayerNorm with those that keep the mean of the features. Gains of norms do not.
Where only matrices read the output of a norm, they get its gain. Other gains become those of the new features.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..checkpoints.teacher import Teacher, copy_model, on_device, replace_model
from ..loading import stored_tensors
from ..matrices import STACKS, product_of
from ..models.configuration_lightformer import RELATIVE_POSITIONS, LightFormerConfig
from ..models.heads import ConditionalGenerationHead
from ..options import OptionError
from .forms.heads import head_fields
from .moments import INPUT_DAMPING, damped_root
from .refit import bridge, compare, thin_out
from .sensitivity import Batch, Calibration, stream_of
from .sharing import change_basis, find_matrices

logger = logging.getLogger(__name__)
UNIT = 32  # features in a block of int4, of ONNX
TABLES, WRITERS = ("shared", "embed_tokens"), ("out_proj", "fc2")


def find_width(teacher: Teacher, asked: str | int | None) -> int | None:
    """Return the number of features that the option `d_model` keeps; `None` for all.

    Raises `ValueError` if the teacher has fewer, cannot be narrowed, or engines need another number.
    """
    if asked is None:
        return None
    if obstacle := _find_obstacle(teacher):
        raise OptionError("d_model", f" is {asked}, but {obstacle}")
    d, name = teacher.config.d_model, teacher.name
    unit, text = math.gcd(d, UNIT), str(asked)
    share = float(text[:-1]) / 100 if text.endswith("%") else None
    width = int(text) if share is None else max(unit, int(d * share) // unit * unit)
    if share is not None and share < 1 and width == d:
        logger.warning(f"d_model is {asked}, but all {d} features of {name} stay: engines need a multiple of {unit}")
    if width > d:
        raise OptionError("d_model", f" is {asked}, but {name} has {d} features: give {d} at most")
    if width % unit:
        below = width // unit * unit
        near = " or ".join(str(features) for features in (below, below + unit) if features)
        raise OptionError(
            "d_model", f" is {asked}, expected a multiple of {unit} for a teacher with {d} features: give {near}"
        )
    return None if width == d else width


def _find_obstacle(teacher: Teacher) -> str:
    """Return why a teacher cannot become narrower; empty where it can."""
    config, name = teacher.config, teacher.name
    if not isinstance(teacher.model, ConditionalGenerationHead):
        return f"{name} is no sequence-to-sequence model of text: remove it"
    fields = ("encoder_groups", "decoder_groups", *config.matrix_fields, "joint_qkv")
    held = [field for field in fields if getattr(config, field, None)]
    if isinstance(config, LightFormerConfig) and not held and config.attention_output_projection:
        return ""
    return (
        f"layers of {name} are shared or factorized already ({', '.join(held) or config.model_type}): convert its own "
        "teacher with all options together"
    )


def likely_widths(teacher: Teacher, removed: float) -> list[int]:
    """Return widths that may suit a model better than its teacher's, if a share of the parameters is `removed`.

    They are a sixteenth of the teacher's apart, or the next multiple of what engines need. The widest is the teacher's
    times the cube root of the share that stays, about. The narrowest has that share of the parameters before anything
    else gets smaller. Only post-norm models have any: pre-norm models would have to be measured anew, without the
    gains of their norms (`fold_norms`).
    """
    d = teacher.config.d_model
    unit = math.gcd(d, UNIT)
    step = math.ceil(d / 16 / unit) * unit
    if _find_obstacle(teacher) or teacher.config.normalize_before:
        return []
    widest = round(d * (1 - removed) ** (1 / 3) / unit) * unit
    return [width for width in range(widest, 0, -step) if d * (1 - removed) <= width < d]


def narrow_fields(model: PreTrainedModel, width: int) -> dict[str, object]:
    """Return the fields of a configuration with fewer features, whose heads and networks are as wide as before."""
    fields = head_fields(model, {})
    if model.config.position_embedding_type not in RELATIVE_POSITIONS:
        fields["position_embedding_type"] = "learned"  # sinusoids depend on the width
    return {**fields, "d_model": width}


# Gains of norms ------------------------------------------------------------------------------------------------------
def norm_before(name: str) -> str:
    """Return the norm in front of a linear layer of a pre-norm model, or of the output layer."""
    path, _, part = name.rpartition(".")
    if name == "lm_head":
        return "model.decoder.layer_norm"
    if part in ("fc1", "fc_gate"):
        return f"{path}.final_layer_norm"
    return "model.encoder.layer_norm" if stream_of(name) == "source" and "decoder" in name else f"{path}_layer_norm"


@torch.no_grad()
def fold_norms(teacher: Teacher) -> Teacher:
    """Return a teacher with the same outputs, whose norms have neither gain nor bias: the matrices behind have them.

    The last norm of a model whose output layer is its token table keeps both. So do all norms of a post-norm model,
    and of one whose norms have a bias that a matrix behind them cannot take.
    """
    config, stored = teacher.config, stored_tensors(teacher.model)
    if not config.normalize_before:
        return teacher
    tensors, folded = dict(stored), set()
    for name, kind in find_matrices(teacher.model):
        if name.endswith((*TABLES, *WRITERS)) or (kind == "embedding" and config.tie_word_embeddings):
            continue
        weight, bias = f"{name}.weight", "final_logits_bias" if name == "lm_head" else f"{name}.bias"
        norm = norm_before(name)
        if f"{norm}.bias" in stored and bias not in stored and not name.endswith("k_proj"):
            return teacher  # nothing takes the norm's bias; scores do not depend on a bias of all keys
        folded.add(norm)
        tensors[weight] = stored[weight] * stored[f"{norm}.weight"]
        if bias in stored and f"{norm}.bias" in stored:
            scale = (teacher.model.output_scale or 1.0) if name == "lm_head" else 1.0
            tensors[bias] = stored[bias] + scale * stored[weight] @ stored[f"{norm}.bias"]
    for norm in folded:
        tensors |= {
            f"{norm}.{leaf}": fill(stored[f"{norm}.{leaf}"])
            for leaf, fill in (("weight", torch.ones_like), ("bias", torch.zeros_like))
            if f"{norm}.{leaf}" in stored
        }
    return replace_model(teacher, config, tensors)


# Which directions ----------------------------------------------------------------------------------------------------
def find_streams(model: PreTrainedModel, calibration: Calibration, width: int) -> list[dict[str, Tensor]]:
    """Return candidates, {stack: A (d×d')} of its hidden states: principal directions, and the best features alone.

    Features are for models whose norms keep gains. Stacks that share the token table have the same A.
    """
    config, sums = model.config, dict.fromkeys(STACKS, torch.zeros((), dtype=torch.float64))
    for name in [name for name, _ in find_matrices(model) if not name.endswith((*TABLES, *WRITERS, "lm_head"))]:
        gradients = calibration.gradients([name])
        matrix = product_of(model.get_submodule(name), torch.float64, gradients.device)
        importance = _importance(*calibration.inputs([name]), matrix @ gradients @ matrix.T)
        sums[_read_stack(name)] = importance + sums[_read_stack(name)].to(importance.device)
    weights = calibration.moments["lm_head"].vectors["squares"].double() / calibration.target_tokens
    table = product_of(model.lm_head, torch.float64, weights.device)
    table = table - (weights @ table) / weights.sum()
    sums["decoder"] += _importance(*calibration.inputs(["lm_head"]), table.T @ (weights[:, None] * table))
    if config.share_encoder_decoder_embeddings:
        sums = dict.fromkeys(STACKS, sums["encoder"] + sums["decoder"])
    directions, features = {}, {}
    for stack, importance in sums.items():
        has_mean = config.normalization == "layer_norm"
        directions[stack] = principal_directions(importance, width, keep_mean=has_mean).cpu()
        kept = importance.diagonal().topk(width).indices.sort().values
        features[stack] = torch.eye(len(importance), dtype=torch.float64)[:, kept.cpu()]
    is_exact = config.normalize_before and not config.tie_word_embeddings and not config.layernorm_embedding
    return [directions] if is_exact else [directions, features]


def _importance(second: Tensor, mean: Tensor, gradients: Tensor) -> Tensor:
    """Return the importance of directions of an input: C and H, each relative to its trace, times tr(C·H).

    C is the covariance of the input, H the second moment of the gradient there. Without any input the cost is tr(C·H).
    """
    covariance = second - torch.outer(mean, mean)
    traces = covariance.trace(), gradients.trace()
    if not min(traces) > 0:
        return torch.zeros_like(covariance)
    return (covariance * gradients).sum() * (covariance / traces[0] + gradients / traces[1])


def principal_directions(moment: Tensor, width: int, *, keep_mean: bool) -> Tensor:
    """Return A (d×d'), an orthonormal basis of the directions with the largest sums of squares.

    With `keep_mean` one of them is that of the mean, and the mean of x·A is that of x but for a constant factor.
    """
    size = len(moment)
    if not keep_mean:
        return torch.linalg.eigh(moment).eigenvectors[:, size - width :]
    ones = moment.new_full((size, 1), size**-0.5)
    centre = torch.eye(size).to(moment) - ones @ ones.T
    vectors = torch.linalg.eigh(centre @ moment @ centre - ones @ ones.T).eigenvectors  # the ones come first
    basis = torch.cat([ones, vectors[:, size - width + 1 :]], 1)
    # A reflection that takes the first of d' axes to the direction of their mean.
    normal = moment.new_full((width,), -(width**-0.5))
    normal[0] += 1
    return basis - 2 * torch.outer(basis @ normal, normal) / normal.square().sum() if width > 1 else basis


def _read_stack(name: str) -> str:
    """Return the stack whose hidden states a matrix reads."""
    return "encoder" if stream_of(name) == "source" else "decoder"


# The narrower model --------------------------------------------------------------------------------------------------
def _last_norm(config: PreTrainedConfig) -> str:
    """Return the name of the norm in front of the output layer."""
    layer = "" if config.final_layer_norm else f"layers.{config.decoder_layers - 1}.final_"
    return f"model.decoder.{layer}layer_norm"


def _scales(config: PreTrainedConfig, width: int) -> tuple[float, float, float]:
    """Return factors of the token tables, of the inputs of the output layer, and of the last norm.

    Models multiply by roots of their width: embeddings, and the outputs of the last norm.
    """
    stretch = (config.d_model / width) ** 0.5
    table = stretch if config.scale_embedding else 1.0
    inputs = 1 / table if config.tie_word_embeddings else 1.0
    return table, inputs, inputs / stretch if config.scale_output else inputs


def output_maps(model: PreTrainedModel, streams: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return {module: its outputs in fewer features (1×d×d')} of every norm and every matrix that writes them.

    The output of a norm with gain D is to be x·D·A. In a post-norm model, the new gain multiplies the sum of a
    matrix's output and the hidden state, which is therefore to be x·D·A / the new gain.
    """
    maps = {}
    for name, _ in model.named_modules():
        if not name.endswith((*WRITERS, "layer_norm", "layernorm_embedding")):
            continue
        basis = streams["encoder" if name.startswith("model.encoder.") else "decoder"]
        if name.endswith(WRITERS) and not model.config.normalize_before:
            path, _, part = name.rpartition(".")
            norm = f"{path}.final_layer_norm" if part == "fc2" else f"{path}_layer_norm"
            gain = model.get_submodule(norm).weight.to(basis)
            basis = gain[:, None] * basis / (gain @ basis.square())
        maps[name] = basis[None]
    last = _last_norm(model.config)
    maps[last] = maps[last] * _scales(model.config, streams["decoder"].shape[1])[2]
    return maps


@torch.no_grad()
def narrow(teacher: Teacher, streams: Mapping[str, Tensor], calibration: Calibration | None = None) -> Teacher:
    """Return a teacher whose hidden states x are x·A, {stack: A}. Without calibration, R is Aᵀ."""
    model, config, stored = teacher.model, teacher.config, stored_tensors(teacher.model)
    width, linear = streams["encoder"].shape[1], dict(find_matrices(model))
    table, _, output = _scales(config, width)
    tensors = dict(stored)
    for name, tensor in stored.items():
        module, _, leaf = name.rpartition(".")
        basis = streams["encoder" if name.startswith(("model.encoder.", "model.shared.")) else "decoder"].to(tensor)
        if module.endswith(TABLES):
            tensors[name] = tensor @ basis * table
        elif module.endswith("embed_positions"):
            tensors[name] = tensor @ basis
        elif module.endswith(("layer_norm", "layernorm_embedding")):
            new = tensor @ (basis if leaf == "bias" else basis.square())
            if config.normalization == "rms_norm":
                new = new * (config.d_model / width) ** 0.5
            tensors[name] = new * output if module == _last_norm(config) else new
        elif module.endswith(WRITERS):
            tensors[name] = basis.T @ tensor if leaf == "weight" else tensor @ basis
        elif module in linear and leaf == "weight":
            bias = "final_logits_bias" if module == "lm_head" else f"{module}.bias"
            found = estimate_from(streams[_read_stack(module)], calibration, module, has_bias=bias in stored)
            estimate, shift = (part.to(tensor) for part in found)
            tensors[name] = tensor @ estimate.T
            if bias in stored:
                tensors[bias] = stored[bias] + tensor @ shift
    if "lm_head" not in linear and calibration is not None and "final_logits_bias" in stored:  # of removed directions
        mean, basis = (
            value.to(tensors["final_logits_bias"])
            for value in (calibration.inputs(["lm_head"])[1], streams["decoder"])
        )
        tensors["final_logits_bias"] = stored["final_logits_bias"] + model.lm_head(mean - mean @ basis @ basis.T)
    for stack in STACKS:
        positions = getattr(model.model, stack).embed_positions
        if hasattr(positions, "table"):
            tensors[f"model.{stack}.embed_positions.weight"] = positions.table @ streams[stack].to(positions.table)
    fields = narrow_fields(model, width)
    return replace_model(teacher, type(config)(**{**config.to_dict(), **fields}), tensors)


def estimate_from(
    basis: Tensor, calibration: Calibration | None, name: str, *, has_bias: bool
) -> tuple[Tensor, Tensor]:
    """Return R (d'×d) and a shift (d) so that x·A·R + shift is the best estimate of the inputs x of a module."""
    basis = basis.double()
    if calibration is None:
        return basis.T, basis.new_zeros(len(basis))
    second, mean = (moment.to(basis.device) for moment in calibration.inputs([name]))
    mean = mean if has_bias else torch.zeros_like(mean)
    covariance = second - torch.outer(mean, mean)
    root = damped_root(basis.T @ covariance @ basis, INPUT_DAMPING)
    estimate = torch.cholesky_solve(basis.T @ covariance, root)
    return estimate, mean - mean @ basis @ estimate


def narrow_calibration(calibration: Calibration, streams: Mapping[str, Tensor], model: PreTrainedModel) -> Calibration:
    """Return the moments of the narrower `model` that was made of a teacher, from those of the teacher."""
    table, output, _ = _scales(calibration.model.config, streams["encoder"].shape[1])
    calibration = calibration.copy(model)
    for name, moments in calibration.moments.items():
        if name.endswith((*TABLES, *WRITERS)):
            basis = streams["encoder" if name.startswith("model.encoder.") else "decoder"]
            basis = basis / table if name.endswith(TABLES) else basis
            moments.replace("gradients", change_basis(moments.gradients, basis, basis))
        else:
            basis = streams[_read_stack(name)] * (output if name == "lm_head" else 1.0)
            moments.replace("inputs", change_basis(moments.inputs, basis, basis))
            moments.vectors["mean"] = change_basis(moments.vectors["mean"], basis)
    return calibration


def remove_features(
    teacher: Teacher, whole: PreTrainedModel, calibration: Calibration, width: int, compared: Sequence[Batch]
) -> tuple[Teacher, dict[str, Tensor], Calibration]:
    """Return a teacher with `width` features, its `output_maps` and its moments.

    Several candidates are refitted on a part of the text. The one with predictions nearest to those of the `whole`
    teacher on the `compared` batches is returned.
    """
    best: tuple[float, Any] = torch.inf, None
    candidates = find_streams(calibration.model, calibration, width)
    for streams in candidates:
        narrower, maps = narrow(teacher, streams, calibration), output_maps(teacher.model, streams)
        divergence = 0.0
        if len(candidates) > 1:
            trial = copy_model(narrower.model).to(whole.device)
            bridge(trial, whole, teacher.layers, calibration.batches[:: thin_out(calibration)], maps)
            divergence = compare(trial, whole, compared).divergence or 0.0
        if divergence < best[0]:
            best = divergence, (streams, narrower, maps)
    streams, narrower, maps = best[1]
    narrower.model.requires_grad_(False)  # the choice of forms would keep the graph of all it computes
    return narrower, maps, narrow_calibration(calibration, streams, on_device(narrower.model, whole.device))
