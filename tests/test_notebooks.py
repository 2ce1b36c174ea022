"""Every notebook runs from top to bottom in its quick mode, and what is committed is of a full run."""

import re
from pathlib import Path

import nbformat
import pytest

pytestmark = pytest.mark.slow

nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory):
    """Where the notebooks of a session find the one tiny teacher that the first of them trains."""
    return tmp_path_factory.mktemp("notebooks")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.usefixtures("warm_python")
def test_a_notebook_runs(path, shared_cache, monkeypatch):
    if path.stem.startswith("4-"):  # whose other process reads the Hub's address when it imports the client
        monkeypatch.setenv("WARM_ALONE", "1")
    monkeypatch.setenv("LIGHTFORMERS_QUICK", "1")
    monkeypatch.setenv("LIGHTFORMERS_NOTEBOOKS", str(shared_cache))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(FOLDER)}}).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs_are_whole_and_name_no_machine(path):
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    text = "\n".join(
        value for output in outputs for value in (output.get("text", ""), output.get("data", {}).get("text/plain", ""))
    )
    assert not re.search(r"(?<![\w.])/(home|root|tmp|work|Users|usr)/|127\.0\.0\.1|localhost", text)


def test_a_notebook_opens_with_goal_time_and_needs():
    for path in NOTEBOOKS:
        opening = nbformat.read(path, as_version=4).cells[0].source
        assert all(f"**{part}:**" in opening for part in ("Goal", "Time", "You need")), path.name
