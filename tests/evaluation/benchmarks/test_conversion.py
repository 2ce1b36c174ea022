"""The benchmark of factorization, on shapes small enough for a test."""

import io

import pytest
import torch

from lightformers_hf.evaluation import benchmarks as shapes
from lightformers_hf.evaluation.benchmarks import conversion as benchmark
from lightformers_hf.evaluation.benchmarks.conversion import (
    benchmark_conversion,
    excess,
    matrices_of,
    show,
    show_whole,
    time_conversion,
    trained_like,
)
from lightformers_hf.results import print_parts

SMALL = {"vocab_size": 100, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 99,
         "decoder_start_token_id": 99, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_attention_heads": 2,
         "decoder_attention_heads": 2, "max_position_embeddings": 16}  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(shapes.TEACHERS, "opus-mt", ("MarianMTModel", SMALL))


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ("opus-mt", {(58101, 512): 1, (512, 2048): 12, (2048, 512): 12, (512, 512): 72}),
        ("bart-large", {(50265, 1024): 1, (1024, 4096): 24, (4096, 1024): 24, (1024, 1024): 144}),
        # Gated networks have two matrices in front; the output layer is no copy of the table.
        ("flan-t5-base", {(32128, 768): 1, (768, 32128): 1, (768, 2048): 48, (2048, 768): 24, (768, 768): 144,
                          (32, 12): 2}),
    ],
)  # fmt: skip
def test_shapes_are_those_of_the_checkpoints(shapes, expected):
    assert matrices_of(shapes) == expected


def test_measures_and_shows(small):
    result = benchmark_conversion("opus-mt", runs=2, samples=1)
    assert len(result.full_seconds) == len(result.our_seconds) == 2
    assert result.worst_excess < 1e-5
    file = io.StringIO()
    print_parts(show(result), file)
    shown = file.getvalue()
    assert "17 matrices" in shown  # 12 of attention, 4 of networks, the table
    assert f"{result.speedup.wall:.2f}×" in shown
    assert "at most 1 matrices of a shape timed" in shown


def test_excess_is_that_of_the_factors(monkeypatch):
    weight = trained_like(5000, 40, seed=0)
    assert abs(excess(weight)) < 1e-7
    left, right = benchmark._factorize(weight)
    monkeypatch.setattr(benchmark, "_factorize", lambda _: (left * 1.1, right))
    optimum = torch.linalg.svdvals(weight.double())[left.shape[1] :].norm()
    error = torch.linalg.norm(weight.double() - 1.1 * left.double() @ right.double())
    assert excess(weight) == pytest.approx((error / optimum - 1).item(), rel=1e-6)


def test_times_every_step_of_a_whole_conversion(small):
    result = time_conversion("opus-mt")
    assert list(result.steps) == ["making text", "calibrating", "weighing", "factorizing", "refitting", "balancing"]
    assert 0 < sum(step.wall for step in result.steps.values()) < result.total.wall
    assert 4 * 5_000 < result.checkpoint_bytes < 100_000
    assert result.peak_bytes > result.libraries_bytes > result.checkpoint_bytes
    file = io.StringIO()
    print_parts(show_whole(result), file)
    shown = file.getvalue()
    assert f"{result.total.wall:.1f}" in shown
    assert "default options" in shown


def test_a_conversion_that_fails_says_so(small):
    with pytest.raises(ValueError, match="the conversion of opus-mt failed"):
        time_conversion("opus-mt", ratio=-1)


@pytest.mark.parametrize("choice", [{"shapes": "other"}, {"shapes": "opus-mt", "runs": 0}])
def test_bad_choices_are_refused(choice):
    with pytest.raises(ValueError, match="expected"):
        benchmark_conversion(**choice)
