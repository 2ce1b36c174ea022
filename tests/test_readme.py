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
SMALLER = {"--minutes 30": "--minutes 0.02", "test.jsonl --json": "test.jsonl --no-speed --json"}


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
    for folder in ("light", "recovered", "deployed"):
        shutil.rmtree(folder, ignore_errors=True)
    # Print the size of a model whose size is given in a comment.
    printed = r"\g<0>\nprint(round(sum(p.numel() for p in model.parameters()) / 1e6, 1))"
    size = r"model = .*#.* ([\d.]+)M.*"
    snippets = "".join(blocks("python")).replace("minutes=30", "minutes=0.02")
    (at_work / "snippet.py").write_text(re.sub(size, printed, snippets), encoding="utf-8")
    runpy.run_path("snippet.py", run_name="__main__")
    (stated,) = re.findall(size, snippets)
    assert float(capsys.readouterr().out.splitlines()[-1]) == pytest.approx(float(stated), abs=0.05)


def test_make_targets_of_the_readme_exist():
    targets = re.findall(r"^make (\w+)", "".join(blocks("bash")), flags=re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets == ["demo", "test"]
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)
