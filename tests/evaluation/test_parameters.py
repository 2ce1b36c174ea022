"""The papers' printed parameter counts come out of the configurations, and the command says whether they do."""

import json

import pytest
import torch
from click.testing import CliRunner

from lightformers_hf import cli, models
from lightformers_hf.evaluation import parameters
from lightformers_hf.evaluation.parameters import ParameterCount, ParameterRow, count_parameters, parameter_rows

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("row", parameter_rows(), ids=[row.table for row in parameter_rows()])
def test_printed_count(row):
    model_class = getattr(models, row.model)
    with torch.device("meta"):
        model = model_class(model_class.config_class(**row.config))
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6  # parameters() counts tied ones once
    last_digit = 10.0 ** -len(str(row.millions).partition(".")[2])
    assert millions == pytest.approx(row.millions, abs=max(row.tolerance * row.millions, last_digit / 2))


def test_every_architecture_has_rows():
    names = [row.table for row in parameter_rows()]
    assert len(set(names)) == len(names) >= 47
    assert {name.split()[0] for name in names} == {"LightFormer", "PartialFormer", "Subformer"}


@pytest.mark.parametrize(
    ("printed", "tolerance", "ours", "within"),
    [
        (36.8, 0.0, 36.849, True),  # rounds to what is printed
        (36.8, 0.0, 36.851, False),
        (63, 0.0, 63.4, True),
        (63, 0.0, 62.4, False),
        (100, 0.02, 101.9, True),
        (100, 0.02, 97.9, False),
    ],
)
def test_within(printed, tolerance, ours, within):
    assert ParameterCount(ParameterRow("row", "Model", printed, tolerance, {}), ours).within is within


def test_the_command_counts_the_rows_asked_for(tmp_path):
    shown = CliRunner().invoke(cli.app, ["parameters", "--table", "subformer t2"], env={"COLUMNS": "150"})
    assert shown.exit_code == 0
    assert "3 of 3 rows within their tolerance" in shown.output
    assert "+2.3%" in shown.output  # 38.86M of 38M
    written = CliRunner().invoke(cli.app, ["parameters", "--table", "t6 r4", "--json", "-"])
    (row,) = json.loads(written.output)
    assert row["table"] == "LightFormer T6 r4"
    assert row["within"] is True
    assert row["ours"] == pytest.approx(14.6, abs=0.05)


def test_the_command_fails_where_a_row_is_out_of_tolerance(monkeypatch):
    row = next(row for row in parameter_rows() if row.table == "LightFormer T6 r4")
    wrong = ParameterRow("wrong", row.model, 14.0, 0.01, row.config)
    monkeypatch.setattr(parameters, "parameter_rows", lambda: (row, wrong))
    result = CliRunner().invoke(cli.app, ["parameters"], env={"COLUMNS": "150"})
    assert result.exit_code == 1
    assert "1 of 2 rows within their tolerance" in result.output


def test_no_such_row():
    with pytest.raises(ValueError, match=r"'T99'.*LightFormer T6.*Subformer T5"):
        count_parameters("T99")
