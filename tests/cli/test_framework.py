"""What commands have alike: messages name options as they are typed."""

import pytest
import torch
from rich.table import Table

from lightformers_hf.cli import app
from lightformers_hf.cli.framework import as_typed, explain
from lightformers_hf.results import make_console

TYPED = {name: f"--{name.replace('_', '-')}" for name in "ratio rank size params encoder_groups source_lang".split()}


@pytest.mark.parametrize(
    ("message", "typed"),
    [
        ("encoder_groups is 4, but 6 layers", "--encoder-groups is 4, but 6 layers"),
        ("is for layers that share: give encoder_groups", "is for layers that share: give --encoder-groups"),
        ("ratio is 1.0, expected a number", "--ratio is 1.0, expected a number"),
        ("ratio and params are given", "--ratio and --params are given"),
        ("needs a ratio: remove size", "needs a ratio: remove --size"),
        ("for all kinds: give ratio alone", "for all kinds: give --ratio alone"),
        # What is no option.
        ("fc1: rank 65 is above 64", "fc1: rank 65 is above 64"),
        ("rank of fc1 is 65", "rank of fc1 is 65"),
        ("my/encoder_groups/model is no folder", "my/encoder_groups/model is no folder"),
        ("encoder_groups.json is missing", "encoder_groups.json is missing"),
        ("max_position_embeddings is 3", "max_position_embeddings is 3"),
    ],
)
def test_messages_name_options_as_they_are_typed(message, typed):
    assert as_typed(message, TYPED) == typed


def test_an_error_within_torch_is_no_mistake_of_the_user():
    reasons = []
    for call in (lambda: torch.optim.SGD([torch.zeros(1)], lr=-1), lambda: int("x")):
        with pytest.raises(ValueError) as found:  # noqa: PT011
            call()
        reasons.append(explain(found.value, {}))
    assert reasons == ["", "invalid literal for int() with base 10: 'x'"]


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
