"""Folders and files are written whole or not at all, and replace nothing of others."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from lightformers_hf.files import (
    MANIFEST_FILE,
    atomic_output,
    check_file,
    check_folder,
    check_output,
    find_foreign,
    json_text,
    lock,
    write_json,
    write_whole,
)

pytestmark = pytest.mark.quick


def contents(folder):
    """Names of all that lies in a folder, less that list itself where it was written whole."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != MANIFEST_FILE}


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
        with atomic_output(target) as temporary:
            (temporary / "file").write_text("old")
    before = contents(tmp_path)

    def write():
        with atomic_output(target, overwrite=True) as temporary:
            (temporary / "file").write_text("new")
            raise error

    with pytest.raises(error):
        write()
    assert contents(tmp_path) == before
    assert not old or (target / "file").read_text() == "old"


def test_output_not_empty(tmp_path):
    (tmp_path / "out").mkdir()
    with atomic_output(tmp_path / "out") as temporary:
        (temporary / "file").touch()
    with pytest.raises(FileExistsError, match=r"out is not empty.*--overwrite"), atomic_output(tmp_path / "out"):
        pytest.fail("entered")
    for name in ("file", "file/below"):
        inside = atomic_output(tmp_path / "out" / name, overwrite=True)
        with pytest.raises(FileExistsError, match="file is a file, expected a folder"), inside:
            pytest.fail("entered")
    assert contents(tmp_path) == {"out", "out/file"}


@pytest.mark.parametrize("place", [".", ".."])
def test_the_current_folder_is_not_replaced(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="holds the current folder"), atomic_output(place, overwrite=True):
        pytest.fail("entered")


def test_a_failed_swap_puts_the_old_output_back(tmp_path, monkeypatch):
    target = tmp_path / "out"
    with atomic_output(target) as temporary:
        (temporary / "old").touch()
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
    ("error", "what"),
    [
        (OSError(errno.ENOSPC, "full"), "disk is full"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "disk is full"),
        (OSError(errno.EDQUOT, "full"), "quota is used up"),
        (RuntimeError(f"I/O error: {os.strerror(errno.EDQUOT)} (os error 122)"), "quota is used up"),
    ],
)
def test_disk_full(tmp_path, error, what, monkeypatch):
    free = 1 << 40 if "quota" in what else 4096
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(OSError, match=rf"{what}: .*out could not be written, and nothing was changed"):  # noqa: SIM117
        with atomic_output(tmp_path / "out"):
            raise error
    assert contents(tmp_path) == set()


def test_another_disk_full(tmp_path):
    with (
        pytest.raises(OSError, match=r"a disk is full, but not that of .*out.*HF_HOME"),
        atomic_output(tmp_path / "out"),
    ):
        raise OSError(errno.ENOSPC, "full")
    assert contents(tmp_path) == set()


WRITER = """
import sys
from lightformers_hf.files import atomic_output
with atomic_output(sys.argv[1], overwrite=sys.argv[2] == "True") as temporary:
    (temporary / "half").write_text("new")
    print("ready", flush=True)
    sys.stdin.readline()
    (temporary / "whole").write_text("new")
"""
# Another container on the same volume: there, process numbers are others, and this one's mean nobody.
CONTAINER = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
needs_containers = pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*CONTAINER, "true"], check=False).returncode != 0,
    reason="needs unshare, and the right to it",
)


@contextmanager
def writer(target, *, overwrite=False, container=False):
    """A process in the middle of writing to `target`, which ends when a line is written to it."""
    command = [*(CONTAINER if container else []), sys.executable, "-c", WRITER, str(target), str(overwrite)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        try:
            yield process
        finally:
            process.kill()


def finish(process):
    """Let a writer end; its exit status and last words."""
    errors = process.communicate("go on\n")[1]
    return process.returncode, errors


def write(target, content, **options):
    with atomic_output(target, **options) as temporary:
        (temporary / "file").write_text(content)


def test_a_killed_process_leaves_the_old_output_and_the_next_run_cleans_up(tmp_path):
    target = tmp_path / "out"
    write(target, "old")
    with writer(target, overwrite=True) as process:
        process.send_signal(signal.SIGKILL)
    assert contents(target) == {"file"}
    left = {path.name for path in tmp_path.iterdir() if path != target}
    assert all(re.fullmatch(r"\.out\.(tmp-[0-9a-f]{8}|lock)", name) for name in left)
    assert len(left) == 2

    # Another target's remains are not ours to remove; those of older versions and of living process numbers are.
    other = tmp_path / ".other.tmp-00000000"
    other.mkdir()
    (tmp_path / f".out.tmp-{os.getppid()}-00000000").mkdir()
    write(target, "new", overwrite=True)
    assert contents(tmp_path) == {"out", "out/file", other.name}
    assert (target / "file").read_text() == "new"


@pytest.mark.parametrize("empty", [True, False])
@pytest.mark.parametrize(
    "name", [f".out.old-{os.getpid()}-00000000", ".out.old-00000000"], ids=["of this process", "of none"]
)
def test_what_was_set_aside_comes_back(tmp_path, name, empty):
    """Killed between the two renames, by a process whose number is a living one's today."""
    target = tmp_path / "out"
    write(target, "new")
    target.rename(tmp_path / name)
    if empty:
        target.mkdir()
    with pytest.raises(FileExistsError):
        check_output(target)
    assert contents(tmp_path) == {"out", "out/file"}
    assert (target / "file").read_text() == "new"


def test_what_was_set_aside_is_not_lost_to_what_somebody_else_put_there(tmp_path):
    target = tmp_path / "out"
    write(target, "new")
    target.rename(tmp_path / ".out.old-00000000")
    target.mkdir()
    (target / "mine").touch()
    with pytest.raises(FileExistsError):
        check_output(target, overwrite=True)
    assert contents(tmp_path) == {"out", "out/mine", ".out.old-00000000", ".out.old-00000000/file"}


def test_what_is_being_removed_is_not_taken_for_what_was_set_aside(tmp_path, monkeypatch):
    """Killed while the old output is removed, and then the user removes the new one: half the old one stays away."""
    target = tmp_path / "out"
    write(target, "old")
    monkeypatch.setattr("lightformers_hf.files.shutil.rmtree", lambda *_, **__: None)
    write(target, "new", overwrite=True)
    (left,) = (path for path in tmp_path.iterdir() if path != target)
    assert (left / "file").read_text() == "old"
    monkeypatch.undo()
    shutil.rmtree(target)
    assert check_output(target) == target
    assert contents(tmp_path) == set()


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("container", [pytest.param(True, marks=needs_containers), False])
def test_of_two_writers_the_second_is_told(tmp_path, container, overwrite):
    target = tmp_path / "out"
    if overwrite:
        write(target, "old")
    with writer(target, overwrite=overwrite, container=container) as first:
        for attempt in (check_output, lambda *args, **options: write(*args, "mine", **options)):
            with pytest.raises(BlockingIOError, match="out is being written by another process"):
                attempt(target, overwrite=overwrite)
        assert finish(first) == (0, "")
    assert contents(tmp_path) == {"out", "out/half", "out/whole"}
    write(target, "later", overwrite=True)


def test_the_lock_of_a_process_that_was_killed_is_gone_a_moment_later(tmp_path):
    with ThreadPoolExecutor() as pool, lock(tmp_path / "out"):
        writing = pool.submit(write, tmp_path / "out", "mine")
        time.sleep(0.3)
        assert not writing.done()
    writing.result()
    assert contents(tmp_path / "out") == {"file"}


@needs_containers
def test_two_containers(tmp_path):
    with writer(tmp_path / "out", container=True) as first:
        with pytest.raises(AssertionError, match="being written"), writer(tmp_path / "out", container=True):
            pytest.fail("both write")
        assert finish(first) == (0, "")
    assert contents(tmp_path) == {"out", "out/half", "out/whole"}


NO_LOCKS = SimpleNamespace(LOCK_EX=0, LOCK_NB=0, flock=Mock(side_effect=OSError(errno.ENOLCK, "no locks")))


@pytest.mark.parametrize("module", [None, NO_LOCKS])
def test_without_locks_the_later_looks_again_and_removes_nothing(tmp_path, monkeypatch, module):
    monkeypatch.setattr("lightformers_hf.files.fcntl", module)
    target = tmp_path / "out"
    (tmp_path / ".out.old-00000000").mkdir()
    with pytest.raises(FileExistsError, match="not empty"), atomic_output(target) as first:  # noqa: PT012
        (first / "file").write_text("first")
        write(target, "second")
    assert (target / "file").read_text() == "second"
    with atomic_output(target, overwrite=True) as first:
        (first / "file").write_text("first")
        write(target, "third", overwrite=True)
    assert (target / "file").read_text() == "first"
    assert contents(tmp_path) == {"out", "out/file", ".out.old-00000000"}


@pytest.mark.parametrize("name", ["x" * 255, "ü" * 120])
def test_long_names(tmp_path, name):
    target = tmp_path / name
    for content in ("old", "new"):
        write(target, content, overwrite=True)
    with write_whole(tmp_path / name[::-1].replace("x", "y").replace("ü", "ä")) as file:
        file.write(b"new")
    assert (target / "file").read_text() == "new"
    with pytest.raises(ValueError, match=r"xxx… has 256 bytes, more than the 255"):
        check_output(tmp_path / ("x" * 256))


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


def test_a_device_and_a_link_stay_what_they_are(tmp_path):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "file").write_text("before")
    link.symlink_to(tmp_path / "file")
    for path in (pipe, link):
        with write_whole(path) as file:
            file.write(b"after")
    assert os.read(reader, 100) == b"after"
    os.close(reader)
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert (tmp_path / "file").read_text() == "after"


def test_json_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    write_json({"a": 1}, file)
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        write_json({"a": 2}, file)
    assert json.loads(file.read_text()) == {"a": 1}
    assert contents(tmp_path) == {"a.json"}


def write_sub(target, content="new", **options):
    with atomic_output(target, **options) as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "file").write_text(content)


def everything(folder):
    """{every path below `folder`: its bytes}."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def assert_refused(error, match, target, **options):
    """Neither the check nor the writing lets it pass, and nothing changes."""
    before = everything(Path(target).expanduser().parent)
    with pytest.raises(error, match=match):
        check_output(target, overwrite=True, **options)
    with pytest.raises(error, match=match):
        write_sub(target, overwrite=True, **options)
    assert everything(Path(target).expanduser().parent) == before


def test_what_was_written_is_replaced_wherever_it_was_moved(tmp_path):
    write(tmp_path / "out", "old")
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    for name in ("out", "copy"):
        assert find_foreign(tmp_path / name) == []
        write_sub(tmp_path / name, overwrite=True)
        assert contents(tmp_path / name) == {"sub", "sub/file"}
        assert (tmp_path / name / "sub" / "file").read_text() == "new"


@pytest.mark.parametrize("name", ["notes.txt", "sub/notes.txt", "own/notes.txt", "own/", ".hidden"])
def test_what_was_added_is_named_and_kept(tmp_path, name):
    write_sub(tmp_path / "out", "old")
    path = tmp_path / "out" / name
    if name.endswith("/"):
        path.mkdir()
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    named = re.escape(name.split("/n")[0].rstrip("/") if name.startswith("own") else name)
    assert_refused(FileExistsError, rf"out holds {named}\b.* did not write", tmp_path / "out")


@pytest.mark.parametrize(
    "manifest", [None, "", "[]", "{}", '{"files": 3}', '{"files": [[]]}', '{"files": ["x"]}', "[" * 200_000]
)
def test_a_folder_of_somebody_elses_is_kept(tmp_path, manifest):
    folder = tmp_path / "photos"
    folder.mkdir()
    for index in range(5):
        (folder / f"{index}.png").touch()
    if manifest is not None:
        (folder / MANIFEST_FILE).write_text(manifest)
    assert_refused(FileExistsError, r"photos holds 0\.png, 1\.png, 2\.png and 2 more", folder)


@pytest.mark.parametrize("place", ["{home}", "{home}/..", "/", "~"])
def test_home_and_what_holds_it_are_kept(tmp_path, monkeypatch, place):
    home = tmp_path / "users" / "me"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(ValueError, match="home folder"):
        write_sub(place.format(home=home), overwrite=True)
    assert everything(tmp_path) == {home.parent: None, home: None}


def test_a_disk_that_takes_nothing_is_said_before_anything_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    for name in ("out", "above/out"):
        assert_refused(PermissionError, f"out cannot be written: nothing can be put into {tmp_path}$", tmp_path / name)


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_a_repository_is_kept(tmp_path, make):
    write_sub(tmp_path / "out")
    make(tmp_path / "out" / ".git")
    assert_refused(ValueError, r"out is a repository \(\.git\)", tmp_path / "out")


def test_inputs_are_kept_wherever_their_links_lead(tmp_path):
    out = tmp_path / "out"
    write_sub(out)
    inside, source = out / "sub" / "file", tmp_path / "source"
    source.mkdir()
    (source / "config.json").touch()
    (source / "weights").symlink_to(inside)
    (tmp_path / "data.jsonl").symlink_to(tmp_path / "second")
    (tmp_path / "second").symlink_to(inside)
    (tmp_path / "lost").symlink_to(out / "gone")
    (tmp_path / "link").symlink_to(out)
    for read in (out, inside, inside.parent, source, tmp_path / "data.jsonl", tmp_path / "lost", tmp_path / "link"):
        assert_refused(ValueError, "must be apart from .*, which is read", out, inputs=[None, "an/other", str(read)])
    assert_refused(ValueError, "must be apart from .*source, which is read", source / "new", inputs=[source])
    assert_refused(ValueError, "must be apart from .*out, which is read", tmp_path / "link", inputs=[out])
    write_sub(out, overwrite=True, inputs=[None, "a/name-on-the-hub", "x" * 300, "~nobody/x", tmp_path / "none"])


def test_a_link_in_the_output_that_is_read_is_kept(tmp_path):
    (tmp_path / "data").touch()
    with atomic_output(tmp_path / "out") as temporary:
        (temporary / "data").symlink_to(tmp_path / "data")
    assert_refused(ValueError, "must be apart", tmp_path / "out", inputs=[tmp_path / "out" / "data"])


def test_a_file_that_is_read_is_not_written_over(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "evaluation.json"):
        (model / name).touch()
    (tmp_path / "link").symlink_to(model / "evaluation.json")
    for name, inputs in (
        ("model/config.json", [model]),
        ("model/tokenizer.json", [None, model]),
        ("model/evaluation.json", [tmp_path / "link"]),
        ("link", [model / "evaluation.json"]),
    ):
        with pytest.raises(ValueError, match="is read"):
            check_file(tmp_path / name, inputs)
    check_file(model / "evaluation.json", [model, None, "a/name"])
    check_file(model / "new.json", [model])


def test_a_file_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    with pytest.raises(IsADirectoryError, match="is a folder: give a file"):
        check_file(tmp_path, [])
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*none"):
        check_file(tmp_path / "none" / "page.html", [])
    check_file(os.devnull, [])
    monkeypatch.setattr(os, "access", lambda *_: False)  # as on a disk that takes nothing
    with pytest.raises(PermissionError, match="nothing can be put into"):
        check_file(tmp_path / "page.html", [])


def test_a_folder_of_checkpoints_is_answered_with_one(tmp_path):
    """As `compress` leaves them."""
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} holds no config.json: give the folder of a checkpoint$"):
        check_folder(tmp_path)
    for name in ("converted", "deployed", "recovered"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    with pytest.raises(FileNotFoundError, match=f"give the folder of a checkpoint, such as {tmp_path / 'recovered'}$"):
        check_folder(tmp_path)
    (tmp_path / "page.json").touch()
    with pytest.raises(ValueError, match="is a page of `lightformers web`: give the checkpoint that it was made of"):
        check_folder(tmp_path)
