"""The benchmark of vocabularies: its shapes are those of the tables, and every row is timed in every form."""

import pytest
from rich.console import Console

from lightformers_hf import LightFormerForConditionalGeneration
from lightformers_hf.evaluation import benchmarks as shapes
from lightformers_hf.evaluation.benchmarks import vocabulary as benchmark
from lightformers_hf.evaluation.benchmarks.vocabulary import benchmark_vocabulary, find_config, vocabulary_table
from lightformers_hf.evaluation.speed import speed_ratio
from lightformers_hf.loading import skeleton, unique_parameters

SMALL = {"vocab_size": 60, "pad_token_id": 59, "decoder_start_token_id": 59}


@pytest.mark.parametrize(
    ("shapes", "row", "parameters"),
    [
        ("opus-mt", "dense", 73_886_208),
        ("opus-mt", "ratio 8, two decoder layers", 7_247_256),
        ("nllb-600m", "dense", 615_073_792),
        ("nllb-600m", "one pair", 377_298_944),
        ("nllb-600m", "one pair, ratio 2", 188_742_380),
    ],
)
def test_shapes_have_the_parameters_of_the_results(shapes, row, parameters):
    model = skeleton(LightFormerForConditionalGeneration, find_config(shapes, row))
    assert unique_parameters(model) == parameters


def test_every_row_is_timed_with_all_tokens_and_with_few(monkeypatch):
    fields = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 3, "decoder_attention_heads": 2, **SMALL,
              "encoder_attention_heads": 2, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40}  # fmt: skip
    monkeypatch.setitem(shapes.TEACHERS, "opus-mt", ("MarianMTModel", fields))
    rows = {"dense": {}, "light": {"decoder_layers": 2, "embedding_rank": 8}}
    monkeypatch.setitem(shapes.VOCABULARY_ROWS, "opus-mt", rows)
    rows = benchmark_vocabulary("opus-mt", candidates=[30, 20], runs=2, sentences=2, new_tokens=3)
    assert [row.name for row in rows] == ["dense", "light"]
    for row in rows:
        assert list(row.speeds) == [60, 30, 20]
        assert all(len(speed.runs) == 2 and speed.tokens == 6 for speed in row.speeds.values())
    console = Console(record=True, width=160)
    console.print(vocabulary_table(rows))
    text = console.export_text()
    assert f"{speed_ratio(rows[1].speeds[20], rows[0].speeds[60]):.1f}x" in text
    assert f"({speed_ratio(rows[1].speeds[20], rows[1].speeds[60]):.1f}x)" in text

    monkeypatch.setattr(benchmark, "LARGEST", rows[1].parameters)
    dense, light = benchmark_vocabulary("opus-mt", runs=1, sentences=1, new_tokens=2)
    assert (dense.disk_bytes, dense.speeds) == (None, {})
    assert list(light.speeds) == [60]
    vocabulary_table([dense, light])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shapes": "gpt"}, "unknown shapes 'gpt'"),
        ({"runs": 0}, "runs is 0"),
        ({"candidates": [3]}, "candidates is 3"),
        ({"candidates": [58_101]}, "fewer than the 58,101 tokens"),
    ],
)
def test_numbers_out_of_their_ranges(changes, message):
    with pytest.raises(ValueError, match=message):
        benchmark_vocabulary(**{"shapes": "opus-mt"} | changes)
