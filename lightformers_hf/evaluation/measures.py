"""The papers' measures of a model's inside, as functions of tensors and of training logs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from lightformers_hf.conversion.forms import svd
from lightformers_hf.matrices import factors_of, matrices_of

from ..files import as_kind, read_json


def head_diversity(heads: Tensor) -> Tensor:
    """D_output of PartialFormer, Eq. 7 (Li et al. 2018): exp(−1/H² Σᵢ Σⱼ |Oⁱ·Oʲ| / (‖Oⁱ‖ ‖Oʲ‖)).

    Outputs of H heads at a position, (…, H, d_k) → (…). From 1/e, all heads point the same way, to exp(−1/H), they are
    orthogonal. A head that is zero is similar to none. Only heads of one width compare: the narrower, the more similar
    they are by chance (|cos| of random directions is about √(2/(π·d_k))).
    """
    unit = normalize(heads, dim=-1, eps=torch.finfo(heads.dtype).tiny)
    return torch.exp(-(unit @ unit.mT).abs().mean(dim=(-2, -1)))


def token_uniformity(states: Tensor, mask: Tensor) -> Tensor:
    """Mean Pearson correlation of two tokens of a sentence (PartialFormer, Appendix H; lower is better).

    States (B, T, d), mask (B, T), 0 where a token does not count → (B): the mean over all pairs of different tokens,
    from −1 to 1, NaN where a sentence has fewer than two. A state whose entries are all equal correlates with none.
    """
    centred = states - states.mean(dim=-1, keepdim=True)
    unit = normalize(centred, dim=-1, eps=torch.finfo(states.dtype).tiny) * mask.unsqueeze(-1)
    tokens = mask.sum(dim=-1)
    # The square of the sum of unit vectors is the sum over all pairs; those of a token with itself are taken off.
    pairs = unit.sum(dim=1).square().sum(dim=-1) - unit.square().sum(dim=(1, 2))
    return pairs / (tokens * (tokens - 1))


def activated_neurons(inner: Tensor) -> Tensor:
    """n_act (PartialFormer, §6.5; Zhang et al. 2022): how many neurons the activation function leaves above 0.

    Hidden states of a feed-forward network (B, T, width), or (B, T, H, width) of networks inside heads, whose widths
    add up → (B, T).
    """
    return (inner.flatten(2) > 0).sum(dim=-1)


def matrix_spectra(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Name and singular values (descending, float64) of every matrix that is stored, one after another.

    A low-rank matrix has those of its product, as many as its rank; the product itself is never made. A tied or shared
    matrix comes once, position tables do not come.

    Raises:
        ValueError: a matrix holds NaN or infinity.
    """
    for name, module in matrices_of(model):
        if "positions" not in name.rpartition(".")[2]:
            yield name, singular_values(name, *factors_of(module))


@torch.no_grad()
def singular_values(name: str, left: Tensor, right: Tensor | None = None) -> Tensor:
    """Singular values, descending, float64, of a matrix m×n, or of the product of two, m×r and r×n, without making it.

    Raises:
        ValueError: NaN or infinity in a matrix; the message has its `name`.
    """
    if right is None:
        return svd.singular_values(left.cpu(), name=name)
    # The product's orthonormal factors on the outside change no singular value: what is inside is r×r.
    left, right = (torch.linalg.qr(factor.cpu().double(), mode="r").R for factor in (left, right.T))
    return svd.singular_values(left @ right.T, name=name)


def read_log(file: Path) -> list[dict[str, float]]:
    """The steps and numbers that a training logged into a `trainer_state.json`; nothing where there is no such file.

    Raises:
        ValueError: it holds something else; names the file.
    """
    content = read_json(file).get("log_history", [])
    try:
        history = as_kind(content, list[dict[str, Any]], "log_history")
        for number, entry in enumerate(history):
            as_kind(entry.get("step"), int, f"the step of entry {number}")
            for name, value in entry.items():
                if not isinstance(value, float | str | None):  # floats may be NaN: a loss that diverged
                    as_kind(value, bool if isinstance(value, bool) else int, f"{name} of entry {number}")
    except ValueError as error:
        raise ValueError(f"{file} holds no log of a training ({error}): write it again, or remove it") from None
    return [
        {name: value for name, value in entry.items() if isinstance(value, float) or type(value) is int}
        for entry in history
    ]


def loss_curve(log_history: Sequence[dict]) -> tuple[str, list[tuple[int, float]]]:
    """Name and (step, value) pairs of the loss in a `trainer_state.json`: `eval_loss`, else `loss` of the training.

    Values that are no finite numbers are left out.

    Raises:
        ValueError: neither was logged as a number.
    """
    for name in ("eval_loss", "loss"):
        logged = [(entry["step"], entry[name]) for entry in log_history if name in entry]
        if curve := [(step, loss) for step, loss in logged if math.isfinite(loss)]:
            return name, curve
    raise ValueError("the training log has neither eval_loss nor loss: train with --logging-steps or --eval-steps")


def iterations_to_convergence(curve: Sequence[tuple[int, float]], *, tolerance: float = 0.01) -> int | None:
    """The first step whose loss is within `tolerance`, relatively, of the lowest (Subformer, Table 7).

    The paper does not say when a model has converged: here the rest of the training wins less than one percent. `None`
    where that step is the last one, so that the loss may still fall.

    Raises:
        ValueError: an empty curve, or one without a finite value.
    """
    finite = [(step, loss) for step, loss in curve if loss == loss and abs(loss) != float("inf")]
    if not finite:
        raise ValueError("no finite loss was logged: expected one at least")
    best = min(loss for _, loss in finite)
    step = next(step for step, loss in finite if loss <= best + tolerance * abs(best))
    return step if step < finite[-1][0] else None
