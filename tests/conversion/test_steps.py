"""Steps: bars that say at their end what was taken."""

import logging
import re

import pytest

from lightformers_hf.conversion.steps import Step


def over_items(shown):
    return sum(Step("adding", [1, 2, 3], unit="number", shown=shown))


def as_context(shown):
    with Step("adding", unit="number", total=3, shown=shown) as bar:
        for _ in range(3):
            bar.update()
    return 6


@pytest.mark.parametrize("work", [over_items, as_context])
@pytest.mark.parametrize("shown", [True, False])
def test_a_step_counts_and_says_what_it_took(work, shown, caplog, capsys):
    with caplog.at_level(logging.INFO):
        assert work(shown) == 6
    assert re.fullmatch(r"adding took \d+\.\d s, \d+\.\d s of processor time", caplog.messages[-1])
    bar = capsys.readouterr().err
    assert ("adding" in bar and "3/3" in bar) == shown


def test_parameters_are_counted_in_thousands_and_millions(capsys):
    with Step("weighing", unit="parameter", total=36_741_120, shown=True) as bar:
        bar.update(12_345_678)
    assert "12.3M/36.7M" in capsys.readouterr().err
