"""The examples of docs/extending: their code is put into a copy of the package, where their tests must pass."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(python|diff)\n# (\S+)\n(.+?)^```$", re.MULTILINE | re.DOTALL)
PAGES = {page.stem: page.read_text() for page in (ROOT / "docs/extending").glob("*.md") if page.stem != "index"}


def change(path: Path, diff: str) -> str:
    """Return the file with the hunks applied. A hunk has no line numbers, and its text occurs once in the file."""
    text = path.read_text()
    for hunk in diff.split("@@\n")[1:]:
        lines = hunk.splitlines(keepends=True)
        before, after = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
        assert text.count(before) == 1, f"{path.name} has {text.count(before)} times:\n{before}"
        text = text.replace(before, after)
    return text


def follow(page: str, folder: Path) -> list[str]:
    """Write the blocks of a page to the files that their first lines name, and return the tests among them."""
    tests = []
    for language, name, code in BLOCK.findall(PAGES[page]):
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


@pytest.mark.usefixtures("warm_python")
def test_the_examples_work_as_they_stand(tmp_path):
    """Apply all examples to one copy, because they must not exclude each other."""
    for name in ("lightformers_hf", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    tests = [test for page in PAGES for test in follow(page, tmp_path)]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.quick
@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_code_of_files_in_folders_that_exist(page):
    for language, name, code in BLOCK.findall(PAGES[page]):
        assert (ROOT / name).parent.is_dir()
        compile(code if language == "python" else change(ROOT / name, code), name, "exec")
