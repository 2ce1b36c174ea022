"""The rules of the house that can be read off the files: see CONTRIBUTING.md. `lint-imports` holds the layers."""

import ast
import json
import re
import sys
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import grimp
import pytest

pytestmark = pytest.mark.quick
ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightformers_hf"
# Who may use names with a leading underscore of other projects: one file a project, with the reasons. loading.py reads
# the attribute by which a transformers model class says what it does not store.
INTERNALS = {
    "evaluation/quality.py",
    "cli/streams.py",
    "engines/ctranslate2.py",
    "loading.py",
    "recovery/trainer.py",
    "models/layers.py",
}


def parse(path: Path) -> ast.Module:
    """The syntax of a file; of a notebook, of its code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        text = "\n".join("".join(cell["source"]) for cell in cells)
        text = "\n".join(line for line in text.splitlines() if not line.startswith(("%", "!")))
    return ast.parse(text)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def test_no_file_imports_itself_by_way_of_others():
    graph = grimp.build_graph("lightformers_hf", exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # raises a CycleError that names the circle


@pytest.mark.parametrize("path", sorted((PACKAGE / "models").rglob("*.py")), ids=lambda path: path.name)
def test_models_import_torch_transformers_and_their_siblings(path):
    assert path.parent.name == "models", "models/ is flat: save_pretrained copies its files beside the weights"
    # huggingface_hub comes with transformers, whose configurations are its strict data classes.
    allowed = {"torch", "transformers", "huggingface_hub", *sys.stdlib_module_names}
    tree = parse(path)
    # transformers does not demand what is imported within `try`.
    optional = {child for node in ast.walk(tree) if isinstance(node, ast.Try) for child in ast.walk(node)}
    for node in ast.walk(tree):
        if node in optional:
            continue
        if isinstance(node, ast.Import):
            assert {alias.name.partition(".")[0] for alias in node.names} <= allowed, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1 or (node.module or "").partition(".")[0] in allowed, ast.unparse(node)


def private_names_of_others() -> list[tuple[str, str]]:
    """(file, name with a leading underscore that no file of the package defines), wherever one is read."""
    trees = {path.relative_to(PACKAGE).as_posix(): parse(path) for path in PACKAGE.rglob("*.py")}
    nodes = [(file, node) for file, tree in trees.items() for node in ast.walk(tree)]
    own, read = {"_asdict", "_replace", "_exit"}, []  # of a named tuple and of os, which are public
    for file, node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            is_own = isinstance(node, ast.Name) or ast.unparse(node.value) in ("self", "cls")
            own |= {name} if isinstance(node.ctx, ast.Store) and is_own else set()
            read += [(file, name)] if isinstance(node, ast.Attribute) else []
        elif isinstance(node, ast.ImportFrom) and not node.level:
            read += [(file, part) for part in (*(node.module or "").split("."), *(alias.name for alias in node.names))]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            read += [(file, ast.literal_eval(name)) for name in node.args[1:2] if isinstance(name, ast.Constant)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "object.__setattr__":
            own |= {ast.literal_eval(name) for name in node.args[1:2] if isinstance(name, ast.Constant)}
    return [(file, name) for file, name in read if is_private(name) and name not in own]


def test_private_parts_of_other_projects_stay_in_their_files():
    assert {file for file, _ in private_names_of_others()} <= INTERNALS, private_names_of_others()


# Scripts and notebooks, which use names that a package lists in `__all__`, or that the reference shows.
USERS = [*sorted((ROOT / "training").glob("*.py")), *sorted((ROOT / "notebooks").glob("*.[ip]*"))]
MODULES = {path.stem for path in PACKAGE.rglob("*")}


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
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightformers_hf"):
            for alias in node.names:
                assert is_public(node.module, alias.name, shown), f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "lightformers_hf":
            assert node.attr == "__version__" or is_public("lightformers_hf", node.attr, shown), node.attr
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in MODULES:
            assert not is_private(node.attr), ast.unparse(node)
        elif isinstance(node, ast.Import):
            assert not [alias.name for alias in node.names if alias.name.startswith("lightformers_hf.")]
