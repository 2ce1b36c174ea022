"""Names that are imported when they are first used: all are there, and nothing is imported before."""

import subprocess
import sys

import pytest

from lightformers_hf import export


def test_every_public_name_is_found_and_no_other():
    assert set(export.__all__) <= set(dir(export))
    for name in export.__all__:
        assert getattr(export, name).__name__ == name
    with pytest.raises(AttributeError, match=r"'lightformers_hf\.export' has no attribute 'Exporter'"):
        _ = export.Exporter


def test_a_name_does_not_import_its_neighbours():
    script = "import sys; from lightformers_hf.export import Engine; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = {name for name in done.stdout.split() if name.startswith("lightformers_hf.export")}
    assert "lightformers_hf.export.engine" in loaded
    assert "lightformers_hf.export.write" not in loaded
