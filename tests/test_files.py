"""Folders and files are written whole or not at all, and JSON is what every reader of JSON knows."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightformers_hf.files import atomic_output, json_text, write_whole

pytestmark = pytest.mark.quick


def contents(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_output_is_there_whole(tmp_path):
    target = tmp_path / "above" / "out"
    with atomic_output(target) as temporary:
        assert temporary.parent == target.parent
        (temporary / "sub").mkdir()
        (temporary / "sub" / "file").write_text("new")
        assert not target.exists()
    assert contents(tmp_path) == {"above", "above/out", "above/out/sub", "above/out/sub/file"}
    plain = tmp_path / "plain"
    plain.mkdir()
    assert target.stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
@pytest.mark.parametrize("old", [True, False])
def test_an_exception_leaves_everything_as_it_was(tmp_path, error, old):
    target = tmp_path / "above" / "out"
    if old:
        target.mkdir(parents=True)
        (target / "file").write_text("old")
    before = contents(tmp_path)

    def write():
        with atomic_output(target, overwrite=True) as temporary:
            (temporary / "file").write_text("new")
            raise error

    with pytest.raises(error):
        write()
    assert contents(tmp_path) == before
    assert not old or (target / "file").read_text() == "old"


def test_overwrite_replaces_everything(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").touch()
    with atomic_output(target, overwrite=True) as temporary:
        (temporary / "new").touch()
    assert contents(tmp_path) == {"out", "out/new"}


def test_output_not_empty(tmp_path):
    (tmp_path / "out").mkdir()
    with atomic_output(tmp_path / "out") as temporary:
        (temporary / "file").touch()
    with pytest.raises(FileExistsError, match=r"out is not empty.*--overwrite"), atomic_output(tmp_path / "out"):
        pytest.fail("entered")
    with pytest.raises(FileExistsError, match="is a file"), atomic_output(tmp_path / "out" / "file", overwrite=True):
        pytest.fail("entered")
    assert contents(tmp_path) == {"out", "out/file"}


@pytest.mark.parametrize("place", ["source", "source/inside", ".", "link"])
def test_output_apart_from_the_source(tmp_path, place):
    source = tmp_path / "source"
    source.mkdir()
    (tmp_path / "link").symlink_to(source)
    with (
        pytest.raises(ValueError, match="must be apart from the source"),
        atomic_output(tmp_path / place, overwrite=True, forbidden=source),
    ):
        pytest.fail("entered")
    assert contents(tmp_path) == {"source", "link"}


@pytest.mark.parametrize("place", [".", ".."])
def test_the_current_folder_is_not_replaced(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="holds the current folder"), atomic_output(place, overwrite=True):
        pytest.fail("entered")


def test_a_failed_swap_puts_the_old_output_back(tmp_path, monkeypatch):
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").touch()
    rename = Path.rename

    def fail(path, to):
        if ".tmp-" in path.name:
            raise PermissionError("not now")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(PermissionError), atomic_output(target, overwrite=True) as temporary:
        (temporary / "new").touch()
    assert contents(tmp_path) == {"out", "out/old"}


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), RuntimeError("I/O error: No space left on device (os error 28)")]
)
def test_disk_full(tmp_path, error):
    with pytest.raises(OSError, match=r"disk is full: .*out could not be written, and nothing was changed"):  # noqa: SIM117
        with atomic_output(tmp_path / "out"):
            raise error
    assert contents(tmp_path) == set()


WRITER = """
import sys, time
from lightformers_hf.files import atomic_output
with atomic_output(sys.argv[1], overwrite=True) as temporary:
    (temporary / "half").write_text("new")
    print("ready", flush=True)
    time.sleep(60)
"""


def killed_writer(target):
    """Start a process that writes to `target`, kill it in mid-write, and return its process number."""
    with subprocess.Popen([sys.executable, "-c", WRITER, str(target)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
    return process.pid


def test_a_killed_process_leaves_the_old_output_and_the_next_run_cleans_up(tmp_path):
    target = tmp_path / "out"
    with atomic_output(target) as temporary:
        (temporary / "file").write_text("old")
    pid = killed_writer(target)
    assert contents(target) == {"file"}
    left = [path.name for path in tmp_path.iterdir() if path != target]
    assert len(left) == 1
    assert left[0].startswith(f".out.tmp-{pid}-")

    # Another target's remains and a living process's folder are not ours to remove.
    other = tmp_path / f".other.tmp-{pid}-00000000"
    living = tmp_path / f".out.tmp-{os.getppid()}-00000000"
    other.mkdir()
    living.mkdir()
    with atomic_output(target, overwrite=True) as temporary:
        (temporary / "file").write_text("new")
    assert contents(tmp_path) == {"out", "out/file", other.name, living.name}
    assert (target / "file").read_text() == "new"

    # Killed between the two renames: the old output comes back even if the next run then fails.
    target.rename(tmp_path / f".out.old-{pid}-00000000")
    with pytest.raises(FileExistsError), atomic_output(target):
        pytest.fail("entered")
    assert (target / "file").read_text() == "new"


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("old")
    file = write_whole(path)
    file.__enter__().write(b"half")
    with pytest.raises(KeyboardInterrupt):
        file.gen.throw(KeyboardInterrupt)
    assert path.read_text() == "old"
    with write_whole(path) as file:
        file.write(b"new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_json_never_holds_what_json_cannot_say():
    assert json.loads(json_text({"ü": [1, 2.5, None]}, "x")) == {"ü": [1, 2.5, None]}
    for content, place in (({"a": [{"b": 1.0}, {"b": float("nan")}]}, r"a\[1\]\.b"), ([0.0, float("-inf")], r"\[1\]")):
        with pytest.raises(ValueError, match=rf"--json: {place} is NaN or infinite"):
            json_text(content, "--json")
