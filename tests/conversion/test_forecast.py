"""What a conversion will take, said before it begins."""

from pathlib import Path

import pytest
import torch

from lightformers_hf import convert
from lightformers_hf.conversion import forecast as module
from lightformers_hf.conversion.forecast import Forecast, forecast
from lightformers_hf.conversion.options import CompressionOptions
from lightformers_hf.conversion.teacher import Teacher
from lightformers_hf.loading import unique_parameters
from lightformers_hf.processors import use_threads

pytestmark = pytest.mark.quick


@pytest.fixture
def machine(monkeypatch):
    """One core as fast as the one that the constants are from, and much memory."""
    monkeypatch.setattr(module, "product_seconds", lambda dtype: module.PRODUCT)
    monkeypatch.setattr(module, "free_memory", lambda: 1e12)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield monkeypatch
    torch.set_num_threads(before)


def dense_of(folder):
    return Teacher(Path(folder), "teacher", CompressionOptions().languages_of_sides).model


def test_it_is_the_work_of_layers_logits_and_algebra(tiny_marian, machine):
    model = dense_of(tiny_marian)
    table = model.get_input_embeddings().weight.numel()
    layers = cubes = 0
    for name, tensor in model.named_parameters():
        if name.endswith(("_proj.weight", "fc1.weight", "fc2.weight")):
            layers += tensor.numel()
            cubes += max(tensor.shape) ** 3
    found = forecast(model, 40 * 25, given=False)
    work = 40 * 25 * (0.33 * layers + 0.33 * table) + 0.09 * cubes
    assert found.seconds - 8 == pytest.approx(work / 1e9)
    assert 0.9 < (found.bytes - 7e8) / (1.9 * 4 * unique_parameters(model)) <= 1
    given = forecast(model, 40 * 25, given=True)
    work = 0.6 * 40 * 25 * (0.33 * layers + 0.33 * table) + 0.09 * cubes
    assert given.seconds - 8 == pytest.approx(work / 1e9)
    machine.setattr(module, "product_seconds", lambda dtype: 3 * module.PRODUCT)
    assert forecast(model, 40 * 25, given=False).seconds - 8 == pytest.approx(3 * (found.seconds - 8))
    with use_threads(4):  # which wait for one another
        assert forecast(model, 40 * 25, given=False).seconds - 8 == pytest.approx(3 / 2 * (found.seconds - 8))


def test_it_is_said_before_the_work_and_with_it_that_memory_is_short(tiny_marian, tmp_path, machine, capsys):
    machine.setattr(module, "free_memory", lambda: 3e8)
    convert(tiny_marian, tmp_path / "light", ratio=2, calibration_samples=2)
    lines = capsys.readouterr().err
    assert lines.index(
        "This takes at least 10 seconds, on idle cores, and about 0.7 GB of memory. Only 0.3 GB are free"
    ) < lines.index("making")
    convert(tiny_marian, tmp_path / "quiet", ratio=2, calibration_samples=2, progress=False)
    assert "This takes" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "text"), [(3, "10 seconds"), (44, "40 seconds"), (91, "2 minutes"), (1500, "25 minutes")]
)
def test_times_are_rounded(seconds, text):
    assert (
        str(Forecast(seconds, 2.34e9, 1e12))
        == f"This takes at least {text}, on idle cores, and about 2.3 GB of memory."
    )
