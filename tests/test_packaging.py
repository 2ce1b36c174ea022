"""What is installed: the pinned versions fit the Python versions that the project promises."""

import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
PINS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]


@pytest.mark.parametrize("pin", PINS, ids=str)
def test_pinned_version_installs_on_the_oldest_promised_python(pin):
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    try:
        installed = distribution(pin.name)
    except PackageNotFoundError:
        pytest.skip(f"{pin.name} is not installed: its metadata are needed")
    if installed.version.partition("+")[0] not in pin.specifier:
        pytest.skip(f"{pin.name} {installed.version} is installed: the pinned version's metadata are needed")
    needs = installed.metadata["Requires-Python"] or ""
    # x.y stands for x.y.0, which Debian and others are not far from.
    assert f"{oldest}.0" in SpecifierSet(needs), (
        f"{pin} needs Python {needs}: pin the newest that installs on {oldest}.0"
    )
