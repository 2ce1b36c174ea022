"""The demo in small: it makes what it promises, goes on after an interruption, and never half-writes."""

import json
import shutil

import pytest
from click.testing import CliRunner
from rich.console import Console
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from lightformers_hf.cli import app
from lightformers_hf.demo import run
from lightformers_hf.demo.run import DEPLOYED, FOLDERS, MODELS, run_demo
from lightformers_hf.demo.stages import DemoSettings

TINY = DemoSettings(
    train_pairs=400,
    held_out_pairs=8,
    vocabulary=400,
    d_model=32,
    ffn_dim=64,
    heads=2,
    encoder_layers=1,
    decoder_layers=1,
    batch_size=16,
    teacher_steps=8,
    recovery_steps=4,
    speed_sentences=1,
    speed_runs=1,
)
EVERYTHING = {*FOLDERS, "settings.json", "results.json", "picture.png"}


def names(folder):
    return {path.name for path in folder.iterdir()}


def times(folder):
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def run_quietly(output, settings=TINY, **options):
    console = Console(record=True, width=200, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    results = run_demo(output, settings, console=console, **options)
    return results, console.export_text()


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A finished tiny demo: its folder and what it printed."""
    output = tmp_path_factory.mktemp("demo") / "out"
    return output, *run_quietly(output)


@pytest.fixture
def copy(finished, tmp_path):
    """A finished demo to do harm to."""
    return shutil.copytree(finished[0], tmp_path / "out")


def test_makes_everything(finished):
    output, results, printed = finished
    assert names(output) == EVERYTHING
    assert (output / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert results == json.loads((output / "results.json").read_text())
    assert set(results["models"]) == {*MODELS, *DEPLOYED}
    assert results["test_pairs"] == TINY.held_out_pairs
    for row in results["models"].values():
        assert 0 <= row["bleu"] <= 100
    for sample in results["samples"]:
        assert sample["source"] in printed
    timed = [name for name, row in results["models"].items() if row.get("speed_ratio")]
    assert timed == ["teacher", "recovered-svd", "teacher-deployed", "deployed"]
    assert results["models"]["teacher"]["speed_ratio"] == 1
    assert results["models"]["deployed"]["bytes"] < results["models"]["teacher-deployed"]["bytes"]
    assert printed.index("minute") < printed.index("2/9")
    assert "9/9" in printed
    assert "translate" in printed


def test_models_load_with_auto_classes(finished):
    output, results, _ = finished
    sizes = {}
    for name in MODELS:
        model = AutoModelForSeq2SeqLM.from_pretrained(output / name)
        tokenizer = AutoTokenizer.from_pretrained(output / name)
        batch = tokenizer(["Der Zug nach Prag fährt um 09:20 Uhr ab."], return_tensors="pt")
        assert tokenizer.unk_token_id not in batch["input_ids"]
        assert model.generate(**batch, max_new_tokens=4, max_length=None).shape[0] == 1
        sizes[name] = results["models"][name]["parameters"]
    assert sizes["calibrated"] == sizes["recovered-svd"] == sizes["recovered-random"]
    assert max(sizes["compressed"], sizes["calibrated"]) < sizes["teacher"] / 2


def test_the_two_starts_differ_and_both_trained(finished):
    output = finished[0]
    losses = {
        start: json.loads((output / f"recovered-{start}" / "losses.json").read_text()) for start in ("svd", "random")
    }
    assert [step for step, _ in losses["svd"]] == [step for step, _ in losses["random"]] == [1, 2, 3, 4]
    assert losses["svd"] != losses["random"]


def test_second_run_shows_what_is_there(copy, finished):
    before = times(copy)
    results, printed = run_quietly(copy)
    assert printed.count("is there already") == 9
    assert results == finished[1]
    assert times(copy) == before


def test_goes_on_after_an_interruption(copy, monkeypatch):
    for name in ("recovered-random", "recovered-svd", "deployed"):
        shutil.rmtree(copy / name)
    for name in ("results.json", "picture.png"):
        (copy / name).unlink()
    before = times(copy)

    def interrupted(folder, *arguments, **options):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "write_recovered", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_quietly(copy)
    assert names(copy) == EVERYTHING - {"recovered-svd", "recovered-random", "deployed", "results.json", "picture.png"}
    results, printed = run_quietly(copy)
    assert printed.count("is there already") == 4
    assert names(copy) == EVERYTHING
    assert set(results["models"]) == {*MODELS, *DEPLOYED}
    after = times(copy)
    assert all(after[path] == time for path, time in before.items())


def test_other_settings_are_refused(copy):
    before = times(copy)
    with pytest.raises(ValueError, match="--fresh"):
        run_quietly(copy, DemoSettings(seed=1))
    assert times(copy) == before


def test_fresh_removes_the_demo_and_nothing_else(copy, monkeypatch):
    (copy / "notes.txt").write_text("mine")

    def interrupted(folder, *arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "write_corpus", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_quietly(copy, DemoSettings(seed=1), fresh=True)
    assert names(copy) == {"settings.json", "notes.txt"}
    assert json.loads((copy / "settings.json").read_text())["seed"] == 1


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_of_somebody_else_is_left_alone(tmp_path, fresh):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="no demo"):
        run_demo(tmp_path, TINY, fresh=fresh)
    assert names(tmp_path) == {"thesis.txt"}
    with pytest.raises(FileExistsError, match="is a file"):
        run_demo(tmp_path / "thesis.txt", TINY, fresh=fresh)
    (tmp_path / "settings.json").write_text('{"editor.fontSize": 12}')
    (tmp_path / "corpus").mkdir()
    with pytest.raises(FileExistsError, match="is no demo's"):
        run_demo(tmp_path, TINY, fresh=fresh)
    assert names(tmp_path) == {"thesis.txt", "settings.json", "corpus"}


def test_fresh_keeps_what_was_added_to_the_demo_s_folders(copy):
    (copy / "teacher" / "notes.txt").write_text("mine")
    before = times(copy)
    with pytest.raises(FileExistsError, match=r"teacher holds notes\.txt, which this package did not write there"):
        run_quietly(copy, fresh=True)
    assert times(copy) == before


def test_missing_extra_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "find_spec", lambda name: None if name == "num2words" else object())
    with pytest.raises(ValueError, match=r"num2words: pip install 'lightformers_hf\[demo\]'"):
        run_demo(tmp_path / "out", TINY)
    assert not (tmp_path / "out").exists()


def test_command_line_says_how_to_go_on_after_ctrl_c(tmp_path, monkeypatch):
    called = []

    def interrupted(output, settings, *, fresh, console):
        called.append((output, settings, fresh))
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_demo", interrupted)
    result = CliRunner().invoke(app, ["demo", "--output", str(tmp_path / "out"), "--seed", "5", "--fresh"])
    assert called == [(tmp_path / "out", DemoSettings(seed=5), True)]
    assert result.exit_code == 130
    assert "goes on" in result.output
