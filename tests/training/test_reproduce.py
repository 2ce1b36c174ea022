"""The suite of experiments: inputs, resumption, figures and pages."""

import json
import subprocess
import sys

import pytest
import reproduce


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder of results with two experiments' figures and one template that quotes both."""
    folder = tmp_path / "results"
    (folder / "data").mkdir(parents=True)
    (folder / "templates").mkdir()
    for name in ("one", "two"):
        (folder / "data" / f"{name}.json").write_text(
            json.dumps({"commit": "abc", "rows": [{"ratio": 2, "bleu": 1.5}]})
        )
    template = "{{ signed(find(data('one').rows, ratio=2).bleu) }} {{ data('two').rows[0].ratio }}\n"
    (folder / "templates" / "page.md").write_text(template)
    monkeypatch.setattr(reproduce, "RESULTS", folder)
    return folder


def test_pages_are_made_from_the_figures():
    for page, text in reproduce.render_pages().items():
        assert page.read_text(encoding="utf-8") == text, f"{page.name} differs from its figures: run `make results`"


def test_a_page_quotes_figures_of_one_commit(results):
    assert reproduce.render_pages() == {results / "page.md": "+1.5 2\n"}
    (results / "data" / "two.json").write_text(json.dumps({"commit": "def", "rows": [{"ratio": 2}]}))
    with pytest.raises(ValueError, match=r"page\.md quotes figures of several commits: abc, def"):
        reproduce.render_pages()


def test_a_command_runs_once_at_each_commit_and_machine(tmp_path, monkeypatch, capsys):
    calls = []

    def run(line, **options):
        calls.append(line)
        (tmp_path / "made.found.json").write_text('{"value": 1}')
        return subprocess.CompletedProcess(line, 0)

    monkeypatch.setattr(reproduce.subprocess, "run", run)
    for commit, words, runs in [
        ("a", ["plan", 1], 1),
        ("a", ["plan", 1], 1),
        ("a", ["plan", 2], 2),
        ("b", ["plan", 2], 3),
        ("b", ["plan", 2], 4),
    ]:
        if runs == 4:
            monkeypatch.setattr(reproduce, "describe_machine", lambda: {"processor": "another"})
        lab = reproduce.Lab(tmp_path, commit)
        assert lab.run("made", *words)["value"] == 1
        assert lab.commands == [f"lightformers plan {words[1]}"]
        assert len(calls) == runs
    monkeypatch.setattr(reproduce, "find_commit", lambda: "b")
    commands = ["lightformers plan 2", "lightformers plan 3"]
    monkeypatch.setattr(reproduce, "read_record", lambda _: {"commit": "before", "commands": commands})
    reproduce.list_commands("converted", tmp_path)
    assert capsys.readouterr().out.splitlines()[1:] == [f"complete {commands[0]}", f"to run   {commands[1]}"]


@pytest.mark.usefixtures("warm_python")
def test_a_failing_command_leaves_no_record(tmp_path):
    with pytest.raises(ChildProcessError, match="exit code 1: lightformers plan nothing"):
        reproduce.Lab(tmp_path, "a").run("made", "plan", "nothing")
    assert not (tmp_path / "made.json").exists()


def test_inputs_are_those_of_the_experiments(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"g2p-us lacks model.safetensors.*PeterReid"):
        reproduce.prepare("g2p-us", tmp_path)
    folder = tmp_path / "inputs" / "g2p-us"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"other")
    with pytest.raises(ValueError, match="another file than the experiments were made with"):
        reproduce.prepare("g2p-us", tmp_path)


def test_without_a_network_the_missing_data_are_named(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(reproduce.urllib.request, "urlopen", refuse)
    with pytest.raises(FileNotFoundError, match=r"multi30k could not be downloaded .no network.: put it"):
        reproduce.prepare("multi30k", tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "Name an experiment"), (["nothing"], "There is no experiment nothing: expected converted")],
)
def test_bad_names_are_refused(words, message):
    done = subprocess.run([sys.executable, reproduce.__file__, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
