"""The benchmark of conversions, on shapes small enough for a test."""

import shutil
import sys

import pytest
import torch
from tiny import marian_tokens, sizes

from lightformers_hf.evaluation.benchmarks import TEACHERS
from lightformers_hf.evaluation.benchmarks.conversion import random_teacher, time_conversion
from lightformers_hf.loading import unique_parameters

SMALL = sizes(16, max_position_embeddings=16) | marian_tokens(100)


@pytest.mark.parametrize(
    ("shapes", "parameters"),
    [("opus-mt", 73_886_208), ("bart-large", 406_291_456), ("nllb-600m", 615_073_792), ("flan-t5-base", 247_577_856)],
)
def test_shapes_are_those_of_the_checkpoints(shapes, parameters):
    with torch.device("meta"):
        assert unique_parameters(random_teacher(shapes)) == parameters


def test_times_every_step_of_a_conversion(monkeypatch, warm_python):
    monkeypatch.setitem(TEACHERS, "opus-mt", ("MarianMTModel", SMALL))
    result = time_conversion("opus-mt")
    assert list(result.steps) == ["making text", "calibrating", "weighting", "factorizing", "refitting", "balancing"]
    assert 0 < sum(wall for wall, _ in result.steps.values()) < result.total[0]
    assert 4 * 5_000 < result.checkpoint_bytes < 100_000
    assert result.peak_bytes > result.libraries_bytes > result.checkpoint_bytes
    table, memory = result.parts()
    assert (table.title, table.row_count) == ("opus-mt: convert with default options", 7)
    assert f"peak memory {result.peak_bytes / 1e6:,.0f} MB" in memory
    assert result.to_dict()["total"] == dict(zip(("wall", "cpu"), result.total, strict=True))
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(ValueError, match="the conversion of opus-mt failed"):
        time_conversion("opus-mt")


def test_unknown_shapes_are_refused():
    with pytest.raises(ValueError, match="expected one of opus-mt"):
        random_teacher("other")
