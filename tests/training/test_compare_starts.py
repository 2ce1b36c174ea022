"""Reversed random tokens: one table of every model's share and losses; bad models are refused before any trains."""

import compare_starts as script
import pytest
import torch
from tqdm import tqdm


def run(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["compare_starts.py", *words])
    script.main()


def test_one_row_a_model(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    run(
        monkeypatch,
        "--models",
        "plain=lightformer,encoder_layers=2",
        "subformer",
        "--steps",
        "1",
        "2",
        "--seeds",
        "0",
        "1",
    )
    rows = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert [row.split("│")[1].strip() for row in rows] == ["plain", "subformer"]
    assert "lightformer,encoder_layers=2" in rows[0]
    assert all(0 < float(row.split("│")[2]) < 1 < float(row.split("│")[4]) for row in rows)


def test_reversing_can_be_learnt():
    """Of one layer that sees its own table's positions, within 150 steps: below the loss of guessing."""
    model = script.make_model("lightformer,encoder_layers=1,decoder_layers=1", 0)
    first, last = script.learn(model, 0, [10, 150], tqdm(disable=True))
    assert last < first - 0.5


def test_the_share_is_one_minus_what_the_tokens_of_a_sentence_have_in_common():
    model = script.make_model("subformer,encoder_layers=3", 0).eval()
    share = script.own_share(model, 0)
    generator = torch.Generator().manual_seed(0)
    shape = (script.SENTENCES, script.LENGTH)
    ids = torch.randint(script.SPECIAL, script.SPECIAL + script.TOKENS, shape, generator=generator)
    states = model.model.encoder(ids).last_hidden_state.detach()
    common = states.mean(1).square().mean() / states.square().mean()
    assert share == pytest.approx(1 - common.item(), rel=1e-4)


def test_a_misspelt_field_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="'encoder_group'; did you mean encoder_groups"):
        run(monkeypatch, "--models", "lightformer,encoder_group=2")


@pytest.mark.parametrize("option", ["--threads", "--steps"])
def test_numbers_are_above_0(option, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, option, "0")
    assert "0: give a whole number above 0" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["bert", "x=gpt,d_model=3"])
def test_an_unknown_type_is_refused_by_name(model, monkeypatch):
    with pytest.raises(ValueError, match=r"no model type '(bert|gpt)'.*lightformer, marian"):
        run(monkeypatch, "--models", model)
