"""Forecast of the time and memory of a conversion on calibration text, from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..matrices import product_of
from ..processors import free_memory, product_seconds
from .sharing import find_matrices
from .workers import AT_ONCE, count_workers

# Seconds of one core for 10⁹ of: multiplications of layers with tokens, of the output layer with target tokens, cubes
# of the longer sides of matrices. From `lightformers benchmark conversion --whole` for four shapes of 74M to 615M,
# within a quarter of each, where a product of two matrices 512×512 in float32 took so many seconds.
LAYERS, LOGITS, ALGEBRA, PRODUCT = 0.33, 0.33, 0.09, 1.9e-3
# Cost of a token that the model need not generate first, relative to other tokens: measured 0.52 and 0.76.
GIVEN = 0.6
# Bytes of the libraries and of other data; multiples of the model's size in float32: the teacher, the result, memory
# of a batch and of a decomposition. For the same models, and for a model of 10M, within 10 %.
LIBRARIES, COPIES = 7e8, 1.9
BEGINNING = 8.0  # seconds, to load
# So many threads to the power of this are so many times as fast: two 1.4 times, measured 1.4 to 1.5.
SHARED = 0.5


@dataclass(frozen=True)
class Forecast:
    """Time and memory of a conversion, within a factor of about 1.5.

    Attributes:
        seconds: on the clock, where no other program works.
        bytes: memory at its peak.
        free: what there is of it.
    """

    seconds: float
    bytes: float
    free: float

    def __str__(self) -> str:
        tens = max(1, round(self.seconds / 10)) * 10
        time = f"{self.seconds / 60:.0f} minutes" if self.seconds > 90 else f"{tens} seconds"
        line = f"This takes at least {time}, on idle cores, and about {self.bytes / 1e9:.1f} GB of memory."
        if self.bytes <= self.free:
            return line
        return (
            f"{line} Only {self.free / 1e9:.1f} GB are free, so it may be ended half-way; --method paper needs least."
        )


def forecast(teacher: PreTrainedModel, tokens: float, *, given: bool) -> Forecast:
    """Estimate the default conversion of a model on this machine's processor, at PyTorch's number of threads.

    Args:
        teacher: its skeleton, with all its layers.
        tokens: a side, of the text on which it is measured.
        given: whether that has both sides, or the model has to write the other.
    """
    layers = logits = cubes = 0.0
    for name, kind in find_matrices(teacher):
        m, n = product_of(teacher.get_submodule(name)).shape
        if kind == "embedding":
            logits = max(logits, m * n)
            continue
        layers += m * n
        cubes += max(m, n) ** 3
    work = (LAYERS * layers + LOGITS * logits) * tokens * (GIVEN if given else 1) + ALGEBRA * cubes
    work *= product_seconds(torch.float32) / PRODUCT / min(count_workers(), AT_ONCE) ** SHARED
    seconds = BEGINNING + work / 1e9
    return Forecast(seconds, LIBRARIES + COPIES * 4 * (layers + logits), free_memory())
