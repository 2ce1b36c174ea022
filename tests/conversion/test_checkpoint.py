"""Reading checkpoints lazily; writing folders whole or not at all."""

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file

from lightformers_hf.conversion import checkpoint
from lightformers_hf.conversion.checkpoint import CheckpointReader
from lightformers_hf.files import atomic_output
from lightformers_hf.loading import resolve_source

TENSORS = {
    "a.weight": torch.arange(6.0).reshape(2, 3),
    "b.weight": torch.ones(4, dtype=torch.bfloat16),
    "c.bias": torch.zeros(1, 5, dtype=torch.float16),
}


def write_index(folder, files, suffix):
    index = {name: file for file, names in files.items() for name in names}
    (folder / f"{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


@pytest.fixture(params=["model.safetensors", "sharded safetensors", "pytorch_model.bin", "old bin", "sharded bin"])
def folder(request, tmp_path):
    """A checkpoint in each of the ways there are to store it."""
    names = list(TENSORS)
    shards = {"1": names[:1], "2": names[1:]}
    if request.param == "model.safetensors":
        save_file(TENSORS, tmp_path / "model.safetensors")
    elif request.param == "sharded safetensors":
        files = {f"model-{shard}.safetensors": held for shard, held in shards.items()}
        for file, held in files.items():
            save_file({name: TENSORS[name] for name in held}, tmp_path / file)
        write_index(tmp_path, files, "model.safetensors")
    elif request.param == "sharded bin":
        files = {f"pytorch_model-{shard}.bin": held for shard, held in shards.items()}
        for file, held in files.items():
            torch.save({name: TENSORS[name] for name in held}, tmp_path / file)
        write_index(tmp_path, files, "pytorch_model.bin")
    else:
        zipped = request.param != "old bin"
        torch.save(TENSORS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    return tmp_path


def test_reads_every_format(folder):
    with CheckpointReader(folder) as reader:
        assert reader.keys() == sorted(TENSORS)
        for name, tensor in TENSORS.items():
            assert reader.shape(name) == tuple(tensor.shape)
            assert reader.dtype(name) == tensor.dtype
            assert torch.equal(reader.read(name), tensor)
        kept = reader.read("a.weight")
        with pytest.raises(ValueError, match=r"holds no tensor named d\.weight"):
            reader.read("d.weight")
    assert torch.equal(kept, TENSORS["a.weight"])


def test_safetensors_come_before_bin(tmp_path):
    save_file({"from": torch.ones(1)}, tmp_path / "model.safetensors")
    torch.save({"other": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert CheckpointReader(tmp_path).keys() == ["from"]


def test_folder_without_weights(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no weights: looked for model\.safetensors, "):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("folder", ["sharded safetensors", "sharded bin"], indirect=True)
def test_missing_shard_is_named(folder):
    shard = next(path for path in folder.iterdir() if "-2" in path.name)
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=rf"index\.json names files that are not there.*{shard.name}"):
        CheckpointReader(folder)


def test_truncated_file_is_named(folder):
    shard = max((path for path in folder.iterdir() if path.suffix != ".json"), key=lambda path: path.name)
    content = shard.read_bytes()
    for length in (len(content) - 5, 20, 0):
        shard.write_bytes(content[:length])
        with pytest.raises(ValueError, match=rf"{shard.name} is damaged"):
            CheckpointReader(folder)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a.weight": "model-1.safetensors", "z": "model-1.safetensors"}, "z is promised but not in model-1"),
        ({"a.weight": "model-2.safetensors"}, "a.weight is promised but not in model-2"),
        ({"b.weight": "model-2.safetensors"}, "c.bias is in model-2.safetensors but not promised"),
        ({"a.weight": "../model-1.safetensors"}, "expected a file name in the same folder"),
        ({"a.weight": 3}, "expected a file name in the same folder"),
        (None, "is damaged: expected JSON"),
    ],
)
@pytest.mark.parametrize("folder", ["sharded safetensors"], indirect=True)
def test_index_that_disagrees_with_its_shards(folder, weight_map, message):
    content = "{broken" if weight_map is None else json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        CheckpointReader(folder)


class Dangerous:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


@pytest.mark.parametrize("write", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))])
def test_pickles_are_never_run(tmp_path, write):
    write({"a": Dangerous(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is damaged, or holds more than tensors.*safetensors"):
        CheckpointReader(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_bin_that_is_no_state_dict(tmp_path):
    torch.save({"state": {"a": torch.ones(1)}}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="expected a dictionary of tensors"):
        CheckpointReader(tmp_path)


# Sources


def test_a_folder_is_its_own_source(tmp_path):
    assert resolve_source(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("source", ["./not-there", "/not/there", "a/b/c", "~/not-there", "../x", "two words"])
def test_a_path_that_is_not_there(source, monkeypatch, tmp_path):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(checkpoint, "snapshot_download", lambda *_, **__: pytest.fail("asked the Hub"))
    with pytest.raises(FileNotFoundError, match="is no folder: expected the folder of a checkpoint, or a model's Hub"):
        resolve_source(source)


def test_a_file_is_no_source(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="is a file, expected the folder"):
        resolve_source(tmp_path / "model.safetensors")


@pytest.mark.parametrize("safetensors", [True, False])
def test_hub_bin_weights_only_where_there_are_no_safetensors(tmp_path, monkeypatch, safetensors):
    repository = ["config.json", "source.spm", "pytorch_model.bin", "tf_model.h5", "train.py", "training_args.bin"]
    repository += ["model.safetensors"] if safetensors else []

    def download(name, allow_patterns):
        assert name == "Helsinki-NLP/opus-mt-de-en"
        for file in huggingface_hub.utils.filter_repo_objects(repository, allow_patterns=allow_patterns):
            (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr(checkpoint, "snapshot_download", download)
    folder = resolve_source("Helsinki-NLP/opus-mt-de-en")
    weights = "model.safetensors" if safetensors else "pytorch_model.bin"
    assert {path.name for path in folder.iterdir()} == {"config.json", "source.spm", weights}


def test_the_hub_out_of_reach(monkeypatch):
    def fail(*_, **__):
        raise LocalEntryNotFoundError("no connection\nmore")

    monkeypatch.setattr(checkpoint, "snapshot_download", fail)
    with pytest.raises(FileNotFoundError, match=r"some/model is no folder here.*\(no connection\).*Without network"):
        resolve_source("some/model")


# Output


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
from lightformers_hf.conversion.checkpoint import atomic_output
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
