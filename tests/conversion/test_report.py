"""What a report holds, what is read from its file, and the tables that are printed of it."""

import json
from dataclasses import replace

import pytest
from conversion.reports import matrix, report_of

from lightformers_hf.conversion.report import OWN_TEXT, Plan, read_report, write_report

pytestmark = pytest.mark.quick


def test_forms_are_counted_whatever_they_are():
    report = report_of(
        matrix(),
        matrix(form="low-rank", size=3, setting="rank 3"),
        matrix(form="banded", size=11, setting="11 bands wide"),
        matrix(form="banded", size=7, setting="7 bands wide"),
        matrix(form="low-rank", size=3, setting="rank 3"),
    )
    assert report.outcome == "2 low-rank (rank 3), 2 banded (7 to 11 bands wide), 1 dense"
    assert report_of(matrix()).outcome == "1 dense"


def test_the_ratio_is_that_of_the_matrices_that_got_smaller():
    assert report_of(matrix(), matrix(form="low-rank", size=1, setting="rank 1", after=8)).ratio == 2
    assert report_of(matrix()).ratio == 1


def test_a_ratio_counts_from_all_features():
    report = report_of(matrix(), matrix(form="low-rank", size=1, setting="rank 1", after=8), features=[4, 12])
    assert report.ratio == 3 * (16 + 16) / (16 + 8)
    assert report.measure.endswith("; relative to matrices for 4 features")
    assert "parameters (before: for 4 features)" in str(Plan(**vars(report)))


def test_a_report_is_read_as_it_was_written(tmp_path):
    report = report_of(matrix(), matrix("n", "low-rank", 1, "rank 1", 8), calibration="Text für Müller")
    write_report(report, tmp_path)
    assert read_report(tmp_path / "compression.json") == report
    saved = json.loads((tmp_path / "compression.json").read_text(encoding="utf-8"))
    assert saved["ratio"] == 2
    assert [entry["parameters_before"] for entry in saved["matrices"]] == [16, 16]
    assert read_report(tmp_path / "nothing.json") is None


def test_a_report_of_0_1_0_is_read(tmp_path):
    """Fields and options that were removed since then do not count."""
    report = report_of(matrix())
    content = report.to_dict() | {"estimated_speedup": 2.5}
    content["options"] = {"speedup": 2.5, "split": "balanced"}
    (tmp_path / "compression.json").write_text(json.dumps(content), encoding="utf-8")
    found = read_report(tmp_path / "compression.json")
    assert found == replace(report, options=content["options"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_figure_that_json_cannot_say_is_named(tmp_path, bad):
    report = report_of(matrix(), matrix("n", energy=bad))
    with pytest.raises(ValueError, match=r"compression\.json: matrices\[1\]\.energy is NaN or infinite"):
        write_report(report, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: "{", "is damaged"),
        (lambda content: "[1]", "holds no object"),
        (lambda content: '{"source": 1}', "'family' is missing.*convert the model again"),
        (lambda content: content.replace('"size"', '"rank"'), "'size' is missing.*convert the model again"),
        (lambda content: json.dumps(json.loads(content) | {"matrices": [1]}), "no report of this version"),
    ],
)
def test_another_file_is_refused(tmp_path, change, message):
    write_report(report_of(matrix()), tmp_path)
    file = tmp_path / "compression.json"
    file.write_text(change(file.read_text()))
    with pytest.raises(ValueError, match=message):
        read_report(file)


def printed(report) -> list[str]:
    return str(Plan(**vars(report))).splitlines()


@pytest.mark.parametrize("environment", [{}, {"COLUMNS": "80"}, {"COLUMNS": ""}, {"FORCE_COLOR": "1"}])
def test_a_matrix_is_a_line_of_at_most_120_columns(monkeypatch, environment):
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    name = "decoder.layers.11.encoder_attn.out_proj"
    big = {"m": 256206, "n": 2048, "kind": "embedding"}
    report = report_of(
        matrix(name, "narrower heads", 128, "heads 128 wide", 123_456_789, **big),
        matrix("shared", "low-rank", 1024, "rank 1024", 123_456_789, **big),
    )
    lines = printed(report)
    row = next(line for line in lines if name in line)
    assert row.split() == [
        name, "embedding", "256206x2048", "heads", "128", "wide", "524,709,888", "123,456,789", "90.0%", "0.1000",
    ]  # fmt: skip
    assert any(line.split()[:5] == ["shared", "embedding", "256206x2048", "rank", "1024"] for line in lines)
    assert max(map(len, lines)) <= 120
    assert "becomes" in next(line for line in lines if "shape" in line)


def test_the_text_is_text_in_a_notebook_too(monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert "rank 3" in "\n".join(printed(report_of(matrix(form="low-rank", size=3, setting="rank 3"))))


def test_it_says_what_errors_were_measured_in():
    def text(**changed) -> str:
        return " ".join(printed(report_of(matrix(form="low-rank", size=1, setting="rank 1"), **changed)))

    assert "Frobenius" in text()
    assert "Without calibration" in text()
    weighed = text(calibration="train.jsonl")
    assert "entries weighted by the sensitivity of the loss on train.jsonl" in weighed
    assert "Frobenius" not in weighed
    assert "--calibration with a thousand sentence pairs" in text(calibration=OWN_TEXT)


def test_a_ratio_that_nobody_gave_is_named():
    said = "The ratio is 2, which is the default: --ratio sets another."
    for options in ({}, {"method": "narrow"}):
        assert said in printed(report_of(matrix(), options=options))
    for options in ({"ratio": 2}, {"size": "1MB"}, {"encoder_layers": 1}, {"pattern": {"ffn": "4x"}}):
        assert said not in printed(report_of(matrix(), options=options))
