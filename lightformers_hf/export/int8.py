"""Weights in eight bits that every x86 processor multiplies exactly, whichever engine runs them."""

from __future__ import annotations

import numpy as np

# Limits of a value, and of a pair of neighbours in a row before rounding, which adds one at most.
LARGEST, LARGEST_PAIR = 127, 127


def quantize_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A matrix in int8 with a scale for each row, fp32: values (n×m) and scales (n), so that values·scale ≈ rows.

    Without VNNI (Intel before Ice Lake and Alder Lake, AMD before Zen 4), x86 multiplies inputs of 0 to 255 by weights
    of −127 to 127 and adds the products of neighbours in 16 bits (`vpmaddubsw`). Larger values are cut off, without
    a word. 255·128 does not, so no pair 2j, 2j + 1 of a row adds up to more than 128. That costs a quarter of a scale
    or so, as two neighbours are hardly ever both the largest; halving it instead, as is usual, costs more.
    """
    rows = rows.astype(np.float32, copy=False)
    even = rows.shape[1] // 2 * 2
    largest, pairs = (
        np.abs(numbers).max(axis=1, initial=0.0) for numbers in (rows, rows[:, 0:even:2] + rows[:, 1:even:2])
    )
    scales = np.maximum(largest / LARGEST, pairs / LARGEST_PAIR)
    scales = np.where(scales >= np.finfo(np.float32).tiny, scales, 1).astype(np.float32)
    return np.rint(rows / scales[:, None]).astype(np.int8), scales
