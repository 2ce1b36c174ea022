"""The paper's printed parameter counts come out of the configurations."""

import json
from pathlib import Path

import pytest
import torch

import lightformers_hf.models as models

ROWS = json.loads((Path(__file__).parent / "parameter_tables.json").read_text())


@pytest.mark.parametrize("row", ROWS, ids=[row["table"] for row in ROWS])
def test_printed_count(row):
    with torch.device("meta"):
        model = getattr(models, row["model"])(models.LightFormerConfig(**row["config"]))
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6  # parameters() counts tied ones once
    last_digit = 10.0 ** -len(str(row["millions"]).partition(".")[2])
    assert millions == pytest.approx(row["millions"], abs=max(row["tolerance"] * row["millions"], last_digit / 2))
