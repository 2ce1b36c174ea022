"""What strangers meet first: workflows, promised versions, forms, citation. A fact has one home, the rest agrees."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import lightformers_hf

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def read_pins(name: str) -> dict[str, Version]:
    """The versions that a file of constraints pins, by the package's name in small letters."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and line[0] != "#"]
    return {line.split("==")[0].lower(): Version(line.split("==")[1]) for line in lines}


def read_workflow(name: str) -> dict:
    """A workflow as YAML has it; the key `on` is `True` there."""
    return yaml.safe_load((ROOT / ".github/workflows" / name).read_text())


def oldest_allowed(requirement: str) -> tuple[str, Version]:
    """Name and smallest version of a requirement `name>=version`."""
    parsed = Requirement(requirement)
    return parsed.name.lower(), Version(next(part.version for part in parsed.specifier if part.operator == ">="))


def test_the_version_stands_in_one_place():
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    assert Version(lightformers_hf.__version__)
    # It is written as a literal, which building the package reads without importing anything.
    said = re.compile(rf'"{re.escape(lightformers_hf.__version__)}"')
    files = [*(ROOT / "lightformers_hf").rglob("*.py"), ROOT / "pyproject.toml", ROOT / "CITATION.cff"]
    assert [path.name for path in files if said.search(path.read_text())] == ["__init__.py"]


def test_the_changelog_has_the_version_and_what_comes_next():
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert lightformers_hf.__version__ in headings


def test_oldest_versions_are_those_promised():
    promised = PROJECT["dependencies"] + [
        requirement for extra in ("ctranslate2", "onnx") for requirement in PROJECT["optional-dependencies"][extra]
    ]
    assert read_pins("constraints-oldest.txt") == dict(map(oldest_allowed, promised))


def test_pinned_versions_are_allowed():
    pins = read_pins("constraints.txt")
    for requirement in map(Requirement, PROJECT["dependencies"]):
        assert pins[requirement.name.lower()] in requirement.specifier


@pytest.mark.quick
@pytest.mark.parametrize("name", sorted(read_pins("constraints.txt")))
def test_a_pinned_version_installs_on_the_oldest_promised_python(name):
    pin = read_pins("constraints.txt")[name]
    try:
        installed = distribution(name)
    except PackageNotFoundError:
        pytest.skip(f"{name} is not installed: its metadata are needed")
    if Version(installed.version.partition("+")[0]) != pin:
        pytest.skip(f"{name} {installed.version} is installed: the metadata of {pin} are needed")
    # x.y stands for x.y.0, which Debian and others are not far from.
    oldest, needs = f"{PROJECT['requires-python'].removeprefix('>=')}.0", installed.metadata["Requires-Python"] or ""
    assert oldest in SpecifierSet(needs), f"{name} {pin} needs Python {needs}: pin the newest for {oldest}"


def test_workflow_tests_the_promised_pythons():
    jobs = read_workflow("tests.yml")["jobs"]
    pythons = jobs["newest"]["strategy"]["matrix"]["python"]
    classified = [line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert pythons == classified
    assert all(f"{python}.0" in SpecifierSet(PROJECT["requires-python"]) for python in pythons)
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert pythons[0] == oldest
    for job in ("check", "pinned", "oldest"):
        (setup,) = [step for step in jobs[job]["steps"] if "setup-python" in step.get("uses", "")]
        assert setup["with"]["python-version"] == oldest


def test_workflow_runs_commands_that_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "".join(path.read_text() for path in WORKFLOWS)
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets
    for path in re.findall(r"\btests/[\w/.]+", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_may_do_little_and_pins_its_actions(path):
    workflow = read_workflow(path.name)
    assert workflow["permissions"] == {}
    for name, job in workflow["jobs"].items():
        allowed = {"id-token": "write"} if name == "publish" else {"contents": "read"}
        allowed |= {"pages": "write"} if (path.name, name) == ("docs.yml", "publish") else {}
        assert job["permissions"] == allowed
        assert job["timeout-minutes"]
        for step in job["steps"]:
            if "uses" in step:
                assert re.search(r"@[0-9a-f]{40}$", step["uses"]), f"{step['uses']}: pin the commit"
            assert "${{" not in step.get("run", ""), "an expression inside a script: hand it over in env"


def test_hooks_use_the_pinned_ruff():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][-1]["hooks"]
    wanted = [f"ruff=={read_pins('constraints.txt')['ruff']}"]
    assert [hook["additional_dependencies"] for hook in hooks] == [wanted] * 2


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name)
def test_issue_forms_ask_something(path):
    form = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        pytest.skip("no form")
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert form["name"]
    assert form["description"]
    assert len({field["id"] for field in fields}) == len(fields) > 0


def test_citation_names_the_three_papers():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["license"] == PROJECT["license"]
    assert [paper["title"].split(":")[0] for paper in citation["references"]] == [
        "LightFormer",
        "Subformer",
        "PartialFormer",
    ]
