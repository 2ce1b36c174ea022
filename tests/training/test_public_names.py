"""Scripts and notebooks use public names only: those that a package lists, or that the reference shows."""

import ast
import json
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USERS = [*sorted((ROOT / "training").glob("*.py")), *sorted((ROOT / "notebooks").glob("*.*"))]
MODULES = {path.stem for path in (ROOT / "lightformers_hf").rglob("*")}


def source_of(path):
    if path.suffix == ".py":
        return path.read_text(encoding="utf-8")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def documented():
    """(module, names) as the reference shows them; a module without names shows all of its own."""
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
    for path, options in re.findall(r"^::: (\S+)((?:\n    .*)*)", text, flags=re.MULTILINE):
        members = re.search(r"members: \[(.*?)\]", options)
        yield path, members and members[1].split(", ")


def is_public(module, name, shown):
    if name.startswith("_"):
        return False
    if name in getattr(import_module(module), "__all__", ()) or f"{module}.{name}" in shown:
        return True
    return module in shown and (shown[module] is None or name in shown[module])


@pytest.mark.parametrize("path", USERS, ids=lambda path: path.name)
def test_every_name_is_public(path):
    shown = dict(documented())
    for node in ast.walk(ast.parse(source_of(path))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightformers_hf"):
            for alias in node.names:
                assert is_public(node.module, alias.name, shown), f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "lightformers_hf":
            assert is_public("lightformers_hf", node.attr, shown), node.attr
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in MODULES:
            assert not node.attr.startswith("_") or node.attr.endswith("__"), ast.unparse(node)
        elif isinstance(node, ast.Import):
            assert not [alias.name for alias in node.names if alias.name.startswith("lightformers_hf.")]
