"""What `plan` prints: every figure in its column, nothing wrapped, and no more than is true."""

import pytest
from conversion.reports import matrix, report_of

from lightformers_hf.conversion.report import OWN_TEXT, Plan

pytestmark = pytest.mark.quick


def printed(report) -> list[str]:
    return str(Plan(**vars(report))).splitlines()


def test_a_matrix_is_a_line_of_at_most_120_columns():
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


def test_it_says_what_errors_were_measured_in():
    def text(**changed) -> str:
        return " ".join(printed(report_of(matrix(form="low-rank", size=1, setting="rank 1"), **changed)))

    assert "Frobenius" in text()
    assert "Without calibration" in text()
    weighed = text(calibration="train.jsonl")
    assert "entries weighed by what they cost on train.jsonl" in weighed
    assert "Frobenius" not in weighed
    assert "--calibration with a thousand sentence pairs" in text(calibration=OWN_TEXT)


def test_it_says_what_became_of_layers():
    report = report_of(
        matrix(), layers={"encoder": [2, 2], "decoder": [1, 6]}, groups={"encoder": [2, 6], "decoder": [1, 1]}
    )
    lines = printed(report)
    assert "The decoder keeps 1 of 6 layers." in lines
    assert "The encoder's 6 layers share 2 stored ones." in lines
    assert "Of 1 matrices: 1 dense." in lines
