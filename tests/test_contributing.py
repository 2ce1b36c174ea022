"""CONTRIBUTING.md followed to the letter: its code goes into a copy of the package, where its tests must pass."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SECTION = re.compile(r"^### (.+?)\n(.+?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```(python|diff)\n# (\S+)\n(.+?)^```$", re.MULTILINE | re.DOTALL)
SECTIONS = dict(SECTION.findall((ROOT / "CONTRIBUTING.md").read_text()))


def change(path: Path, diff: str) -> str:
    """A file with hunks applied that have no line numbers; each has its place once."""
    text = path.read_text()
    for hunk in diff.split("@@\n")[1:]:
        lines = hunk.splitlines(keepends=True)
        before, after = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
        assert text.count(before) == 1, f"{path.name} has {text.count(before)} times:\n{before}"
        text = text.replace(before, after)
    return text


def follow(section: str, folder: Path) -> list[str]:
    """Put the blocks of a section where their first lines say, and return the tests among them."""
    tests = []
    for language, name, code in BLOCK.findall(SECTIONS[section]):
        path = folder / name
        if language == "diff":
            path.write_text(change(path, code))
            continue
        before = f"{path.read_text()}\n\n" if path.exists() else ""
        path.write_text(before + code)
        if path.name.startswith("test_"):
            tests.append(name)
    assert tests
    return tests


def test_the_examples_work_as_they_stand(tmp_path):
    """All of them in one copy: whoever adds two has both."""
    for name in ("lightformers_hf", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    tests = [test for section in SECTIONS for test in follow(section, tmp_path)]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.quick
@pytest.mark.parametrize("section", SECTIONS)
def test_blocks_are_code_of_files_in_rooms_that_exist(section):
    for language, name, code in BLOCK.findall(SECTIONS[section]):
        assert (ROOT / name).parent.is_dir()
        compile(code if language == "python" else change(ROOT / name, code), name, "exec")
