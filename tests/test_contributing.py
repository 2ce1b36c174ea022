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
BLOCK = re.compile(r"^```python\n# (\S+)\n(.+?)^```$", re.MULTILINE | re.DOTALL)
SECTIONS = dict(SECTION.findall((ROOT / "CONTRIBUTING.md").read_text()))


def follow(section: str, folder: Path) -> list[str]:
    """Put the blocks of a section where their first lines say, and return the tests among them."""
    tests = []
    for name, code in BLOCK.findall(SECTIONS[section]):
        path = folder / name
        before = f"{path.read_text()}\n\n" if path.exists() else ""
        path.write_text(before + code)
        if path.name.startswith("test_"):
            tests.append(name)
    return tests


@pytest.mark.parametrize(
    "section", ["A source family whose names are Marian's", "A way to choose ranks"], ids=["family", "ranks"]
)
def test_an_example_works_as_it_stands(tmp_path, section):
    for name in ("lightformers_hf", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    tests = follow(section, tmp_path)
    assert tests
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("section", SECTIONS)
def test_blocks_are_code_of_files_in_rooms_that_exist(section):
    for name, code in BLOCK.findall(SECTIONS[section]):
        assert (ROOT / name).parent.is_dir()
        compile(code, name, "exec")
