"""Budgets are checked before anything takes long, and what they say is possible is possible."""

import re

import pytest

from lightformers_hf import convert, plan


@pytest.fixture
def nothing_measured(monkeypatch):
    """A conversion that gets as far as its sample text fails."""

    def measure(*arguments, **options):
        raise AssertionError("the budget was not checked before")

    monkeypatch.setattr("lightformers_hf.conversion.convert.sample_text", measure)


@pytest.mark.usefixtures("nothing_measured")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": "40"}, r"size is 40, which cannot be met: .* [\d,]+ bytes are left; .*is 40MB meant\?"),
        ({"size": "40GB"}, r"size is 40GB, and .* has 0\.\d MB already: give less"),
        ({"params": "10"}, r"params is 10, which cannot be met: .* [\d,]+ parameters are left"),
        ({"params": "40M"}, r"params is 40M, and .* has [\d,]+ parameters already"),
        ({"ratio": 1000.0}, r"ratio is 1000.0, which cannot be met: .* [\d,]+ parameters are left"),
        ({"ratio": 2.0, "pattern": {"nothing": 4}}, "pattern 'nothing' matches no matrix of this model"),
        ({"rank": 100_000}, r"[\w.]+: rank 100000 is above .*, the largest that"),
        ({"pattern": {"ffn": 100_000}}, r"encoder\.layers\.0\.fc1: rank 100000 is above .*, the largest that"),
        ({"pattern": {"ffn": "1000x"}}, r"encoder\.layers\.0\.fc1: ratio is 1000, which cannot be met"),
    ],
)
def test_what_cannot_be_met_is_said_at_once(tiny_marian, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        convert(tiny_marian, tmp_path / "light", progress=False, **options)
    assert not (tmp_path / "light").exists()


@pytest.mark.usefixtures("nothing_measured")
def test_an_output_that_is_there_is_noticed_before_the_source(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    with pytest.raises(FileExistsError, match="is not empty"):
        convert("no/such-model", tmp_path / "out", ratio=2, progress=False)


def test_the_smallest_size_that_is_named_can_be_had(tiny_marian, tmp_path):
    with pytest.raises(ValueError, match="bytes are left") as error:
        convert(tiny_marian, tmp_path / "light", size="1kB", progress=False)
    least = int(re.search(r"([\d,]+) bytes", str(error.value))[1].replace(",", ""))
    options = {"calibration_samples": 4, "progress": False}
    convert(tiny_marian, tmp_path / "light", size=str(least + 8), **options)
    assert (tmp_path / "light" / "model.safetensors").stat().st_size <= least + 8
    with pytest.raises(ValueError, match="cannot be met"):
        convert(tiny_marian, tmp_path / "less", size=str(least - 400), **options)


@pytest.mark.usefixtures("nothing_measured")
def test_a_plan_of_fewer_layers_alone_needs_no_text(tiny_marian):
    assert plan(tiny_marian, decoder_layers=1, progress=False).layers["decoder"] == [1, 2]
