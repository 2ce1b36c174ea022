"""The README's commands and snippets, run as they stand there: only names of data and numbers of steps are smaller."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import Hub
from huggingface_hub import ModelCard

ROOT = Path(__file__).parents[1]
SMALLER = {
    "--max_steps 1500": "--max_steps 2 --max_source_length 48 --max_target_length 48",
    "--max_steps 20000": "--max_steps 1",
    "steps 500": "steps 1",
    "--encoder-groups 3": "--encoder-groups 1",
    "benchmark architectures": "benchmark architectures --pair sandwich-base --runs 1 --new-tokens 1 --no-training",
    "test.jsonl --json": "test.jsonl --no-speed --json",
    "benchmark engines": "benchmark engines --cores 1 --batch-size 2 --runs 1 --new-tokens 2",
    "--max_steps 3000": "--max_steps 1 --speed_sentences 2 --speed_runs 1 --max_source_length 48 "
    "--max_target_length 48",
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
    lines = "".join(json.dumps({"translation": pair}) + "\n" for pair in parallel_sentences)
    for part in ("train", "validation", "test"):
        (folder / f"{part}.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def hub():
    """A Hub on loopback, for what the README pushes."""
    with Hub() as server:
        yield server


def run(command, folder, **variables):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
    return subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_the_commands_work_one_after_another(workplace, hub):
    online = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "hf_alice", "HF_HUB_DISABLE_XET": "1"}
    commands = []
    for block in blocks("bash"):
        lines = re.sub(r"\\\n\s*", "", block).splitlines()
        commands += [line for line in lines if line.startswith(("lightformers ", "python training/", "echo "))]
    assert len(commands) >= 6
    for command in commands:
        for long, short in SMALLER.items():
            command = command.replace(long, short)
        done = run(command, workplace, **(online if command.startswith("lightformers push") else {}))
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert (workplace / "recovered" / "model.safetensors").is_file()
    card = ModelCard(hub.repositories["alice/opus-mt-de-en-light"].files["README.md"].decode())
    assert {result.metric_type for result in card.data.eval_results} == {"bleu", "chrf"}
    assert "compressed" in card.text


def test_the_python_snippets_work(workplace, monkeypatch):
    shutil.rmtree(workplace / "light", ignore_errors=True)
    # Where a model's size is said beside it, have it printed.
    printed = r"\g<0>\nprint(round(sum(p.numel() for p in model.parameters()) / 1e6, 1))"
    size = r"model = .*#.* ([\d.]+)M.*"
    snippets = "".join(blocks("python"))
    (workplace / "snippet.py").write_text(re.sub(size, printed, snippets), encoding="utf-8")
    done = run("python snippet.py", workplace)
    assert done.returncode == 0, done.stderr
    said = [float(millions) for millions in re.findall(size, snippets)]
    assert len(said) == 3
    assert [float(line) for line in done.stdout.splitlines()[-3:]] == pytest.approx(said, abs=0.05)


def test_make_targets_of_the_readme_exist():
    targets = re.findall(r"^make (\w+)", "".join(blocks("bash")), flags=re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets == ["demo", "test"]
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)
