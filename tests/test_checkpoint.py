"""Reading checkpoints lazily, in every format."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lightformers_hf.checkpoint import CheckpointReader, all_finite

pytestmark = pytest.mark.quick

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


def test_what_is_held_is_mapped_once(tmp_path):
    """And nothing else is: each reading of it has pages of its own, which go with it."""
    save_file(TENSORS, tmp_path / "model.safetensors")
    with CheckpointReader(tmp_path) as reader:
        reader.hold(TENSORS)
        for name, tensor in TENSORS.items():
            one, other = reader.read(name), reader.read(name)
            assert (one.data_ptr() == other.data_ptr()) == (tensor.dtype == torch.float32)
            assert torch.equal(one, tensor)
            assert reader.shape(name) == tuple(tensor.shape)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_that_is_none_is_found(dtype, bad):
    tensor = torch.full((30, 50), torch.finfo(dtype).max, dtype=dtype)  # whose sum is not finite
    assert all_finite(tensor)
    assert all_finite(tensor[:0])
    tensor[29, 49] = bad
    assert not all_finite(tensor)
    assert not all_finite(tensor.T)
