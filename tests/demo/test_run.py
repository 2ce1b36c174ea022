"""The demo in small: it makes what it promises, goes on after an interruption, and never half-writes."""

import json
import shutil
import sys

import pytest
from click.testing import CliRunner
from rich.console import Console

from lightformers_hf.cli import app
from lightformers_hf.demo import run
from lightformers_hf.demo.run import FOLDERS, DemoSettings, run_demo
from lightformers_hf.engines import web

SIZES = {"vocabulary": 400, "d_model": 32, "ffn_dim": 64, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
SIZES |= {"train_pairs": 400, "held_out_pairs": 8, "calibration_pairs": 20}
TINY = DemoSettings(**SIZES, batch_size=16, teacher_steps=8, minutes=0.01, ratio=2.0)
EVERYTHING = {*FOLDERS, "settings.json", "picture.png"}


def names(folder):
    return {path.name for path in folder.iterdir()}


def times(folder):
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def run_quietly(output, settings=TINY, **options):
    console = Console(record=True, width=200, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    results = run_demo(output, settings, console=console, **options)
    return results, console.export_text()


def interrupted(*arguments, **options):
    raise KeyboardInterrupt


@pytest.fixture(scope="module", autouse=True)
def npm(warm_server):
    """The registry of npm, without network; and programs that have their imports behind them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(warm_server))
        patch.setattr(web, "vendor", lambda _: dict.fromkeys(web.VENDORED, "1.0"))
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A tiny demo that was interrupted once: its folder, what it returned, and what it printed."""
    output = tmp_path_factory.mktemp("demo") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "compress", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_quietly(output)
    assert names(output) == EVERYTHING - {"small", "page", "picture.png"}
    before = times(output)
    results, printed = run_quietly(output)
    assert printed.count("is there already") == 2
    assert {path: times(output)[path] for path in before} == before
    return output, results, printed


@pytest.fixture
def copy(finished, tmp_path):
    """A finished demo to do harm to."""
    return shutil.copytree(finished[0], tmp_path / "out")


def test_makes_everything_also_after_an_interruption(finished):
    output, results, printed = finished
    assert names(output) == EVERYTHING
    assert (output / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert [(timing["model"], timing["form"]) for timing in results["engines"]["timings"]] == [
        (model, form) for model in ("teacher", "recovered") for form in ("transformers", "ctranslate2-int8")
    ]
    sizes = [place["disk_bytes"] for place in results["engines"]["deployed"]]
    assert sizes[-1] == min(sizes)
    test = [json.loads(line) for line in (output / "corpus" / "test.jsonl").read_text().splitlines()]
    assert test[0]["de"] in printed
    assert "BLEU" in printed
    assert "5/5" in printed
    assert "python -m http.server --directory" in printed
    assert (output / "page" / "model" / "onnx" / "decoder_model_merged_quantized.onnx").is_file()
    assert "translate" in printed


def test_second_run_shows_what_is_there(finished):
    output, before, _ = finished
    made = {path: time for path, time in times(output).items() if not path.endswith("picture.png")}
    results, printed = run_quietly(output)
    assert printed.count("is there already") == 2
    assert results["engines"] == before["engines"]
    assert {path: time for path, time in times(output).items() if path in made} == made


def test_other_settings_are_refused(copy):
    before = times(copy)
    with pytest.raises(ValueError, match="--fresh"):
        run_quietly(copy, DemoSettings(seed=1))
    assert times(copy) == before


def test_without_npm_the_demo_prints_how_to_write_the_page(finished, tmp_path, monkeypatch):
    def fail(folder):
        raise ValueError("install Node")

    monkeypatch.setattr(web, "vendor", fail)
    model, page = finished[0] / "small" / "recovered", tmp_path / "page"
    assert run._write_page(model, page) == f"Skipped: install Node. Then: lightformers web {model} {page}"
    assert not page.exists()


def test_fresh_removes_the_demo_and_nothing_else(copy, monkeypatch):
    (copy / "notes.txt").write_text("mine")
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
    result = CliRunner().invoke(app, ["demo", str(tmp_path / "out"), "--seed", "5", "--fresh"])
    assert called == [(tmp_path / "out", DemoSettings(seed=5), True)]
    assert result.exit_code == 130
    assert "resumes" in result.output
