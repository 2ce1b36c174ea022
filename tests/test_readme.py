"""The README's commands and snippets, run as they stand there: only some numbers are smaller.

As in test_documentation.py, everything runs in this process; that the command line starts by itself is in test_cli.py.
"""

import json
import re
import runpy
import shutil

import pytest
from huggingface_hub import ModelCard
from test_documentation import ROOT, commands, run
from test_hub import hub  # noqa: F401, a fixture

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_python")]
SMALLER = {
    "--minutes 30": "--minutes 0.02",
    "--max-steps 1500": "--max-steps 2 --max-source-length 48 --max-target-length 48",
    "--max-steps 20000": "--max-steps 1",
    "--vocab-size 8000": "--vocab-size 90",
    "--model.encoder_layers 24": "--model.encoder_layers 1 --model.decoder_layers 1",
    "steps 500": "steps 1",
    "--encoder-groups 3": "--encoder-groups 1",
    "--size 40MB": "--size 150kB",
    "benchmark architectures": "benchmark architectures --pair sandwich-base --runs 1 --new-tokens 1 --no-training",
    "evaluate recovered": "evaluate recovered --no-speed",
    "benchmark engines": "benchmark engines --cores 1 --batch-size 2 --runs 1 --new-tokens 2",
    "--max-steps 3000": "--max-steps 1 --speed-sentences 2 --speed-runs 1 --max-source-length 48 "
    "--max-target-length 48",
}


def blocks(language):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, tiny_marian, parallel_sentences):
    """A folder with what the README assumes: a checkpoint and parallel data."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(tiny_marian, folder / "opus-mt-de-en")
    (folder / "training").symlink_to(ROOT / "training")
    more = [*parallel_sentences, *(pair | {"de": f"{pair['de']} {pair['de']}"} for pair in parallel_sentences)]
    for part, pairs in {"train": more, "validation": parallel_sentences, "test": parallel_sentences}.items():
        lines = "".join(json.dumps({"translation": pair}) + "\n" for pair in pairs)
        (folder / f"{part}.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture
def at_work(workplace, monkeypatch):
    """That folder, as the working directory."""
    monkeypatch.chdir(workplace)
    monkeypatch.syspath_prepend(str(ROOT / "training"))
    return workplace


def test_the_commands_work_one_after_another(at_work, hub, monkeypatch):  # noqa: F811
    lines = [line for block in blocks("bash") for line in commands(block)]
    ran = [line for line in lines if line.startswith(("lightformers ", "python training/", "echo "))]
    assert len(ran) >= 6
    for command in ran:
        run(command, monkeypatch, SMALLER, parsed_only=None)
    assert (at_work / "recovered" / "model.safetensors").is_file()
    card = ModelCard(hub.repositories["alice/opus-mt-de-en-light"].files["README.md"].decode())
    assert {result.metric_type for result in card.data.eval_results} == {"bleu", "chrf"}
    assert "compressed" in card.text


def test_the_python_snippets_work(at_work, capsys):
    shutil.rmtree("light", ignore_errors=True)
    # Where a model's size is said beside it, have it printed.
    printed = r"\g<0>\nprint(round(sum(p.numel() for p in model.parameters()) / 1e6, 1))"
    size = r"model = .*#.* ([\d.]+)M.*"
    snippets = "".join(blocks("python"))
    (at_work / "snippet.py").write_text(re.sub(size, printed, snippets), encoding="utf-8")
    runpy.run_path("snippet.py", run_name="__main__")
    said = [float(millions) for millions in re.findall(size, snippets)]
    assert len(said) == 3
    assert [float(line) for line in capsys.readouterr().out.splitlines()[-3:]] == pytest.approx(said, abs=0.05)


def test_make_targets_of_the_readme_exist():
    targets = re.findall(r"^make (\w+)", "".join(blocks("bash")), flags=re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets == ["demo", "test"]
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)
