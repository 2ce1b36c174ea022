"""What commands have alike."""

from pathlib import Path

import pytest
import torch
from rich.table import Table

from lightformers_hf.cli import app
from lightformers_hf.cli.framework import explain
from lightformers_hf.results import make_console


def test_an_error_within_torch_is_no_mistake_of_the_user():
    reasons = []
    for call in (lambda: torch.optim.SGD([torch.zeros(1)], lr=-1), lambda: int("x")):
        with pytest.raises(ValueError) as found:  # noqa: PT011
            call()
        reasons.append(explain(found.value, {}))
    assert reasons == ["", "invalid literal for int() with base 10: 'x'"]


def test_a_deleted_folder_is_named(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError) as raised:
        Path.cwd()
    assert "current folder was deleted" in explain(raised.value, {})
    assert explain(FileNotFoundError("model is not there"), {}) == "model is not there"


def test_every_option_says_what_it_is_for():
    for command in [*app.commands.values(), *app.commands["benchmark"].commands.values()]:
        for parameter in command.params:
            assert getattr(parameter, "help", None) or getattr(parameter, "about", None), (
                command.name,
                parameter.name,
            )


def test_titles_and_captions_stay_whole_off_a_terminal(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table(title="10 sentences of test.jsonl, de → en", caption="nrefs:1|case:mixed|tok:13a|" * 9)
    table.add_row("BLEU", "12.3")
    make_console().print(table)
    first, *_, last = capsys.readouterr().out.splitlines()
    assert (first, last) == ("10 sentences of test.jsonl, de → en", "nrefs:1|case:mixed|tok:13a|" * 9)
