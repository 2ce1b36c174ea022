"""What one depth of a group adds to the matrix that the group shares (`group_residual_rank`)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ...models.layer_sharing import group_of_depth
from ..forms.svd import Factors, decompose
from ..statistics.metric import Metric
from .originals import Originals, short_name


def residual_factors(matrix: Tensor, mean: Tensor, rank: int, *, name: str, metric: Metric | None = None) -> Factors:
    """A (m×r) and B (r×n), the best with W̄ + A·B ≈ W: in the `metric` of the calibration, or all entries alike.

    Raises:
        ValueError: see `decompose`; `name` is the matrix's.
    """
    difference = matrix.double() - mean.double()
    return decompose(difference, name=name, rank=rank, metric=metric).truncate(rank, "balanced")


def residual_tensors(name: str, originals: Originals, shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of one residual: of what one depth's matrix is, less what its group's has become.

    Args:
        name: the residual's module, `….depths.3.residuals.fc1`.
        shared: matrices that the groups now have, as the layers compute them (m×n), by module.
    """
    teacher, dense = originals.teacher, originals.dense
    stack, _, rest = name.partition(".depths.")
    depth, _, leaf = rest.partition(".residuals.")
    layers, groups = (f"{stack.rpartition('.')[2]}_{what}" for what in ("layers", "groups"))
    stored, source = (
        f"{stack}.layers.{group_of_depth(int(depth), getattr(config, layers), getattr(config, groups))}.{leaf}"
        for config in (dense.config, teacher.config)
    )
    own = originals.in_merging_bases(source)
    metric = None
    if originals.calibration is not None:
        metric = originals.calibration.metric([source], dense.get_submodule(stored).kind, has_bias=False)
    rank = dense.config.group_residual_rank
    mean, short = shared[stored].to(own.matrix), short_name(name)
    left, right = residual_factors(own.matrix, mean, rank, name=short, metric=metric)
    return {f"{name}.u.weight": left.T.contiguous().cpu(), f"{name}.v.weight": right.T.contiguous().cpu()}
