"""The benchmark of factorization, on shapes small enough for a test."""

import pytest
import torch
from rich.console import Console
from transformers import MarianConfig, MarianMTModel

from lightformers_hf.evaluation.benchmarks import conversion as benchmark
from lightformers_hf.evaluation.benchmarks.conversion import (
    benchmark_conversion,
    conversion_memory,
    excess,
    show,
    trained_like,
)


def test_measures_and_shows(monkeypatch):
    monkeypatch.setitem(benchmark.CHECKPOINTS, "opus-mt", {(300, 120): 1, (120, 120): 3})
    result = benchmark_conversion("opus-mt", runs=2, samples=1)
    assert len(result.full_seconds) == len(result.our_seconds) == 2
    assert result.worst_excess < 1e-5
    console = Console(record=True, width=120)
    show(result, console)
    shown = console.export_text()
    assert "4 matrices" in shown
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


def test_memory_of_a_whole_conversion(monkeypatch):
    small = MarianConfig(vocab_size=100, d_model=16, encoder_layers=1, decoder_layers=1, pad_token_id=99,
                         decoder_start_token_id=99, encoder_ffn_dim=32, decoder_ffn_dim=32, encoder_attention_heads=2,
                         decoder_attention_heads=2, max_position_embeddings=16)  # fmt: skip
    monkeypatch.setitem(benchmark.TEACHERS, "opus-mt", (MarianMTModel, small))
    size, peak = conversion_memory("opus-mt")
    assert 4 * 5_000 < size < 100_000
    assert peak > size


@pytest.mark.parametrize("choice", [{"shapes": "other"}, {"shapes": "opus-mt", "runs": 0}])
def test_bad_choices_are_refused(choice):
    with pytest.raises(ValueError, match="expected"):
        benchmark_conversion(**choice)
