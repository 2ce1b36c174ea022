"""The benchmark of architectures beside Marian, on tiny rows. No test here looks at a clock."""

import json

import benchmark_architectures as architectures
import pytest
import torch
from benchmark_architectures import PAIRS, Comparison, Pair, compare, comparison_table, training_speed
from count_parameters import ParameterRow, find_row
from rich.console import Console

from lightformers_hf.evaluation.speed import Speed
from lightformers_hf.loading import unique_parameters

SIZES = {"vocab_size": 50, "d_model": 16, "encoder_layers": 4, "decoder_layers": 3}
TINY = {
    "partial": ParameterRow(
        "partial",
        "PartialFormerForConditionalGeneration",
        1,
        1,
        SIZES | {"head_dim": 4, "encoder_attention_heads": 6, "base_attention_heads": 2},
    ),
    "sub": ParameterRow(
        "sub",
        "SubformerForConditionalGeneration",
        1,
        1,
        SIZES | {"ffn_dim": 32, "embedding": "full", "sandwich_attention_heads": 2},
    ),
}


@pytest.fixture
def tiny(monkeypatch):
    """Two pairs of tiny models, `partial` and `sub`, in place of the papers'."""
    monkeypatch.setattr(architectures, "PAIRS", {name: Pair(name, 1.5) for name in TINY})
    monkeypatch.setattr(architectures, "find_row", TINY.__getitem__)


@pytest.mark.parametrize("name", PAIRS)
def test_the_transformer_beside_is_the_papers(name):
    row = find_row(PAIRS[name].table)
    with torch.device("meta"):
        transformer = architectures.transformer_beside(PAIRS[name], 26)
    printed = {"partialformer": 62, "lightformer": 37}.get(name.split("-")[0], 61)  # Tables 9, 2 and 3 of the papers
    assert round(unique_parameters(transformer) / 1e6) == printed
    layers = 6 if name.startswith("lightformer") else row.config["decoder_layers"]
    assert transformer.config.decoder_layers == layers
    assert transformer.config.vocab_size == row.config["vocab_size"]


def test_the_pair_of_twelve_and_one():
    config = PAIRS["lightformer-12-1"].row.model_config()
    assert (config.encoder_layers, config.encoder_groups, config.decoder_layers, config.attention_rank) == (
        12,
        6,
        1,
        80,
    )


@pytest.mark.parametrize("name", TINY)
def test_a_pair_decodes_the_length_asked_for_and_trains(tiny, name):
    comparison = compare(name, runs=2, new_tokens=7, bf16=name == "sub")
    tokens = {measure: [speed.tokens for speed in pair] for measure, pair in comparison.speeds.items()}
    assert tokens == {"greedy": [7, 7], "beam 4": [7, 7], "training": [16 * 25] * 2}
    assert {len(speed.runs) for pair in comparison.speeds.values() for speed in pair} == {2}
    assert comparison.parameters == unique_parameters(TINY[name].build())


def test_a_training_step_descends():
    model = TINY["partial"].build()
    batch = architectures.random_batch(50)
    before = model.eval()(**batch).loss.item()
    training_speed({"model": model}, batch, runs=10)
    assert model.eval()(**batch).loss.item() < before


def test_the_operations_of_a_training_step(tiny):
    d, layers, vocabulary, batch, length = 16, (4, 3), 50, 16, 25
    model = architectures.transformer_beside(Pair("sub"), length + 1)
    feed_forward, maps = 2 * d * model.config.decoder_ffn_dim, 2 * length * d  # a token's
    encoder, decoder = 4 * d * d + maps + feed_forward, 2 * (4 * d * d + maps) + feed_forward
    forward = 2 * batch * length * (layers[0] * encoder + layers[1] * decoder + d * vocabulary)
    counted = architectures.training_flops(model, architectures.random_batch(vocabulary))
    assert counted == 3 * forward  # as much again for the gradients of inputs, and of weights


def test_the_table_shows_medians_of_ratios(tiny):
    speeds = {"greedy": (Speed(0, [30.0, 8.0, 60.0], 25), Speed(0, [10.0, 4.0, 20.0], 25))}
    speeds["training"] = (Speed(0, [100.0] * 3, 400), Speed(0, [200.0] * 3, 400))
    comparison = Comparison("sub", 2_000_000, 3_000_000, speeds, 1.5, 0.87)
    console = Console(width=150)
    with console.capture() as capture:
        console.print(comparison_table([comparison]))
    shown = capture.get()
    for text in ("2.0 / 3.0M", "30.0 tokens/s", "10.0 tokens/s", "3.00x (2.50–3.00)", "1.5x", "4.00 s/step", "0.50x"):
        assert text in shown, text
    assert "0.87x" in shown


def test_the_script(tiny, run_script):
    arguments = ["--pair", "sub", "--runs", "1", "--new-tokens", "2", "--no-training"]
    (comparison,) = json.loads(run_script(architectures, *arguments, "--json", "-")[1])
    assert comparison["name"] == "sub"
    assert set(comparison["measures"]) == {"greedy", "beam 4"}
    assert comparison["arithmetic"] is None  # nothing was trained
    greedy = comparison["measures"]["greedy"]
    assert greedy["ratio"] == pytest.approx(greedy["runs"][0] / greedy["transformer_runs"][0])


@pytest.mark.parametrize("choice", [{"name": "other"}, {"name": "sub", "runs": 0}, {"name": "sub", "new_tokens": 0}])
def test_bad_choices_are_refused(tiny, choice):
    with pytest.raises(ValueError, match="expected"):
        compare(**choice)
