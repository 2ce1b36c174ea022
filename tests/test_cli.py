"""The command line: help that teaches, one message and a non-zero exit code for what cannot be done."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from lightformers_hf import cli


@pytest.fixture
def lightformers(monkeypatch, capsys):
    """Run the command as a shell does; gives exit code, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["lightformers", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return exit_.value.code, captured.out, captured.err

    return run


def test_every_command_explains_itself():
    runner = CliRunner()
    listing = runner.invoke(cli.app, ["--help"]).output
    for command in cli.app.registered_commands:
        name = command.name or command.callback.__name__
        assert name in listing
        text = runner.invoke(cli.app, [name, "--help"]).output
        assert "Example" in text, name


def test_plan_as_json(lightformers, tiny_marian):
    code, out, _ = lightformers("plan", tiny_marian, "--ratio", "2", "--ffn-rank", "5", "--json", "-")
    plan = json.loads(out)
    assert code == 0
    assert {matrix["rank"] for matrix in plan["matrices"] if matrix["kind"] == "ffn"} == {5}
    assert plan["options"]["ratio"] == 2


def test_a_rank_pattern_on_the_command_line(lightformers, tiny_marian):
    arguments = [
        "plan",
        tiny_marian,
        "--rank",
        "4",
        "--rank-pattern",
        "fc1=dense",
        "--rank-pattern",
        r"layers\.1\.fc2=3",
    ]
    _, out, _ = lightformers(*arguments, "--json", "-")
    ranks = {matrix["name"]: matrix["rank"] for matrix in json.loads(out)["matrices"]}
    assert ranks["encoder.layers.0.fc1"] is None
    assert (ranks["encoder.layers.1.fc2"], ranks["encoder.layers.0.fc2"]) == (3, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ratio", "1"], "ratio"),
        (["--rank", "0"], "rank"),
        (["--rank", "1000"], "1000"),
        (["--energy", "1.5"], "energy"),
        (["--encoder-groups", "4"], "encoder_groups is 4"),
        (["--rank-pattern", "fc1"], "PATTERN=RANK"),
        (["--ratio", "2", "--rank", "3"], "ratio"),
    ],
)
def test_bad_options_are_one_message_and_leave_no_output(lightformers, tiny_marian, tmp_path, arguments, message):
    code, _, err = lightformers("convert", tiny_marian, tmp_path / "out", *arguments)
    assert code == 1
    assert "error:" in err
    assert message in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_a_missing_source_is_one_message(lightformers, tmp_path):
    code, _, err = lightformers("convert", tmp_path / "nowhere", tmp_path / "out")
    assert code == 1
    assert "nowhere" in err
    assert "Traceback" not in err


def test_names_from_a_checkpoint_cannot_style_the_terminal(lightformers, tiny_marian, tmp_path):
    shutil.copytree(tiny_marian, tmp_path / "[red]model")
    code, out, _ = lightformers("plan", tmp_path / "[red]model", "--rank", "3")
    assert code == 0
    assert "[red]model" in out
