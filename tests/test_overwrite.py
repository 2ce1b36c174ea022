"""`--overwrite` replaces what this package wrote, and nothing else."""

import os
import re
import shutil
from pathlib import Path

import pytest

from lightformers_hf.files import MANIFEST_FILE, atomic_output, check_file, check_output, find_foreign

pytestmark = pytest.mark.quick


def write(target, content="new", **options):
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
        write(target, overwrite=True, **options)
    assert everything(Path(target).expanduser().parent) == before


def test_what_was_written_is_replaced_wherever_it_was_moved(tmp_path):
    write(tmp_path / "out", "old")
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    for name in ("out", "copy"):
        assert find_foreign(tmp_path / name) == []
        write(tmp_path / name, overwrite=True)
        assert (tmp_path / name / "sub" / "file").read_text() == "new"


@pytest.mark.parametrize("name", ["notes.txt", "sub/notes.txt", "own/notes.txt", "own/", ".hidden"])
def test_what_was_added_is_named_and_kept(tmp_path, name):
    write(tmp_path / "out", "old")
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
        write(place.format(home=home), overwrite=True)
    assert everything(tmp_path) == {home.parent: None, home: None}


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_a_repository_is_kept(tmp_path, make):
    write(tmp_path / "out")
    make(tmp_path / "out" / ".git")
    assert_refused(ValueError, r"out is a repository \(\.git\)", tmp_path / "out")


def test_inputs_are_kept_wherever_their_links_lead(tmp_path):
    out = tmp_path / "out"
    write(out)
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
    write(out, overwrite=True, inputs=[None, "a/name-on-the-hub", "x" * 300, "~nobody/x", tmp_path / "none"])


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
