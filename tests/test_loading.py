"""Where a checkpoint comes from, whether it loads, its tensors in every format, and its size."""

import json
import pickle
import re
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from models.cases import every, like_trained, make_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import marian_tokens, sizes
from torch import nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, BertConfig, MarianConfig, MarianMTModel

from lightformers_hf import convert, loading
from lightformers_hf.checkpoints.teacher import read
from lightformers_hf.loading import (
    all_finite,
    assemble,
    load_model,
    load_skeleton,
    load_tensors,
    resolve_source,
    skeleton,
    stored_tensors,
    unique_parameters,
    weight_bytes,
)
from lightformers_hf.models import LightFormerConfig, LightFormerForConditionalGeneration
from lightformers_hf.recovery import load_distiller, load_trainable
from lightformers_hf.stored import CheckpointReader

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("source", ["./not-there", "/not/there", "a/b/c", "~/not-there", "../x", "two words"])
def test_a_path_that_is_not_there(source, monkeypatch, tmp_path):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(loading, "snapshot_download", lambda *_, **__: pytest.fail("asked the Hub"))
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

    monkeypatch.setattr(loading, "snapshot_download", download)
    folder = resolve_source("Helsinki-NLP/opus-mt-de-en")
    weights = "model.safetensors" if safetensors else "pytorch_model.bin"
    assert {path.name for path in folder.iterdir()} == {"config.json", "source.spm", weights}


def test_the_hub_out_of_reach(monkeypatch):
    def fail(*_, **__):
        raise LocalEntryNotFoundError("no connection\nmore")

    monkeypatch.setattr(loading, "snapshot_download", fail)
    with pytest.raises(FileNotFoundError, match=r"some/model is no folder here.*\(no connection\).*Without network"):
        resolve_source("some/model")


def test_a_model_of_another_kind_is_named(tmp_path):
    BertConfig(num_hidden_layers=1).save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="is a 'bert' model: expected a sequence-to-sequence model"):
        load_model(tmp_path / "bert")


@pytest.mark.parametrize("kind", ["bart", "mbart", "t5", "nllb-moe", "marian"])
@pytest.mark.parametrize("said", [None, {}, {"model_max_length": 512}])
def test_a_folder_without_a_tokenizer_is_said_to_be_one(tmp_path, kind, said):
    """Of most kinds transformers makes a tokenizer without words."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    if said is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=r"holds no tokenizer|cannot be loaded"):
        loading.load_pretrained(AutoTokenizer, tmp_path)


def wrap(folder, prefix):
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {prefix + key: tensor for key, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def add_row(folder):
    path = folder / "vocab.json"
    words = json.loads(path.read_text())
    path.write_text(json.dumps(words | {"<tag>": len(words)}))


def quantize(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "other"}}))


def diverge(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.decoder.layers.0.fc1.weight"][3, 4] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def lose(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.decoder.layers.1.fc1.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lose, r"lacks .*model\.decoder\.layers\.1\.fc1\.weight"),
        (diverge, r"model\.decoder\.layers\.0\.fc1\.weight of .* holds NaN"),
        (
            lambda folder: wrap(folder, "_orig_mod."),
            r"'_orig_mod\.'.* torch.compile.*model\._orig_mod\.save_pretrained",
        ),
        (lambda folder: wrap(folder, "module."), r"'module\.'.*model\.module\.save_pretrained"),
        (lambda folder: wrap(folder, "base_model.model."), r"'base_model\.model\.'.* peft .*merge_and_unload\(\)"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "an adapter .* beside a model: remove"),
        (lambda folder: shutil.move(folder / "config.json", folder / "adapter_config.json"), "an adapter"),
        (quantize, "quantized by other, which transformers can't dequantize: give the checkpoint before"),
        (add_row, "gives '<tag>' the number 120, but vocab_size is 120"),
    ],
)
def test_what_cannot_be_loaded_as_it_is_has_one_answer(tmp_path, tiny_marian, monkeypatch, spoil, message):
    """Before any work."""
    monkeypatch.setattr("lightformers_hf.conversion.convert.fit", lambda *_, **__: pytest.fail("too late"))
    folder = shutil.copytree(tiny_marian, tmp_path / "model")
    spoil(folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_marian)
    loaders = [load_model, lambda name: convert(name, tmp_path / "out", method="paper", progress=False)]
    own = [] if "tag" in message else [lambda name: load_trainable(str(name))]
    own += [load_skeleton] if own and not re.search("NaN|quant|fc1", message) else []  # which reads no weights
    for load in [*loaders, *own]:
        with pytest.raises(ValueError, match=message):
            load(folder)
    if "tag" in message:
        with pytest.raises(ValueError, match=message):
            load_distiller(str(folder), tokenizer)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (MemoryError(), MemoryError, None),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), RuntimeError, "^Default"),
        (ImportError("it requires the SentencePiece library"), ValueError, "a library is missing: .*SentencePiece"),
    ],
)
def test_memory_and_libraries_are_no_damaged_files(tiny_marian, tmp_path, monkeypatch, error, kind, message):
    def fail(*args, **options):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(MarianMTModel, "__init__", fail)
        with pytest.raises(kind, match=message):
            load_model(tiny_marian)
    with monkeypatch.context() as patch:
        patch.setattr(LightFormerForConditionalGeneration, "__init__", fail)
        with pytest.raises(kind, match=message):
            read(tiny_marian)
    monkeypatch.setattr(torch, "load", fail)
    shutil.copy(tiny_marian / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(kind, match=message):
        CheckpointReader(tmp_path)


def test_shared_and_tied_tensors_count_once_and_buffers_not():
    layer = nn.Linear(3, 5)  # 20
    head = nn.Linear(5, 3, bias=False)
    head.weight = nn.Parameter(torch.zeros(3, 5))  # 15
    tied = nn.Linear(5, 3, bias=False)
    tied.weight = head.weight
    model = nn.ModuleList([layer, layer, head, tied])
    model.register_buffer("table", torch.zeros(100))
    assert unique_parameters(model) == 35


def test_marian_counts_what_it_learned():
    d, ffn, vocabulary = 8, 16, 11
    fields = sizes(d, ffn=ffn, encoder_layers=2, max_position_embeddings=512) | marian_tokens(vocabulary)
    model = MarianMTModel(MarianConfig(**fields))
    attention, norm, feed_forward = 4 * (d * d + d), 2 * d, 2 * d * ffn + ffn + d
    encoder_layer, decoder_layer = attention + feed_forward + 2 * norm, 2 * attention + feed_forward + 3 * norm
    # Embedding and output layer are one matrix; the sinusoids, 512×d in encoder and decoder, are not learned.
    assert unique_parameters(model) == vocabulary * d + 2 * encoder_layer + decoder_layer


def test_bytes_are_those_of_the_files_that_load(tiny_marian, tmp_path):
    size = (tiny_marian / "model.safetensors").stat().st_size
    assert weight_bytes(tiny_marian) == size
    with safe_open(tiny_marian / "model.safetensors", "pt") as tensors:
        assert size > sum(4 * tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118

    AutoModelForSeq2SeqLM.from_pretrained(tiny_marian).save_pretrained(tmp_path, max_shard_size="60KB")
    shards = list(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    (tmp_path / "model-of-another-run.safetensors").write_bytes(bytes(1000))
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(1000))
    assert weight_bytes(tmp_path) == sum(shard.stat().st_size for shard in shards)


CONFIG = LightFormerConfig(**sizes(8, ffn=12), vocab_size=20, max_position_embeddings=10, attention_rank=2)


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    model = like_trained(LightFormerForConditionalGeneration(CONFIG))
    return {name: tensor.clone() for name, tensor in stored_tensors(model).items()}


@pytest.mark.parametrize("assign", [False, True])
def test_all_tensors_arrive_and_ties_stay(tensors, assign):
    if assign:
        model = skeleton(LightFormerForConditionalGeneration, CONFIG)
    else:
        model = LightFormerForConditionalGeneration(CONFIG)
    load_tensors(model, tensors, assign=assign)
    assert stored_tensors(model).keys() == tensors.keys()
    for name, tensor in stored_tensors(model).items():
        assert torch.equal(tensor, tensors[name])
    assert model.lm_head.weight is model.get_decoder().embed_tokens.weight


@every(["ConditionalGeneration"])
@torch.no_grad()
def test_an_assembled_model_is_the_model_and_has_no_copies(head, variant):
    model = make_model(head, variant)
    tensors = stored_tensors(model)
    found = assemble(type(model), model.config, tensors)
    assert not found.training
    for name, tensor in stored_tensors(found).items():
        assert tensor.data_ptr() == tensors[name].data_ptr()
    ids = torch.arange(3, 9)[None]
    batch = {"input_ids": ids, "decoder_input_ids": ids}
    assert torch.equal(found(**batch).logits, model(**batch).logits)


def test_what_repeats_a_tensor_may_be_there(tensors):
    model = LightFormerForConditionalGeneration(CONFIG)
    load_tensors(model, tensors | {"lm_head.weight": model.lm_head.weight.detach()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.encoder.layers.0.fc1.bias"), r"encoder\.layers\.0\.fc1\.bias is not there"),
        (lambda t: t.pop("final_logits_bias"), r"final_logits_bias is not there"),
        (lambda t: t.update({"model.stranger": torch.ones(1)}), r"model\.stranger has no place"),
        (
            lambda t: t.update({"final_logits_bias": torch.ones(1, 3)}),
            r"final_logits_bias \(1, 3\) instead of \(1, 20\)",
        ),
    ],
)
@pytest.mark.parametrize("assign", [False, True])
def test_what_does_not_fit_is_an_error_that_names_it(tensors, change, message, assign):
    change(tensors)
    model = LightFormerForConditionalGeneration(CONFIG)
    before = model.lm_head.weight.clone()
    with pytest.raises(ValueError, match=message):
        load_tensors(model, tensors, assign=assign)
    assert torch.equal(model.lm_head.weight, before)


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
    reader = CheckpointReader(folder)
    assert reader.keys() == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        assert reader.shapes()[name] == tuple(tensor.shape)
        assert reader.read(name).dtype == tensor.dtype
        assert torch.equal(reader.read(name), tensor)
    with pytest.raises(ValueError, match=r"holds no tensor named d\.weight"):
        reader.read("d.weight")


def test_safetensors_come_before_bin(tmp_path):
    save_file({"from": torch.ones(1)}, tmp_path / "model.safetensors")
    torch.save({"other": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert CheckpointReader(tmp_path).keys() == ["from"]


@pytest.mark.parametrize("read_folder", [CheckpointReader, weight_bytes])
def test_folder_without_weights(tmp_path, read_folder):
    with pytest.raises(FileNotFoundError, match=r"holds no weights: looked for model\.safetensors, "):
        read_folder(tmp_path)


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


def test_a_dropout_that_is_no_probability_is_named(tiny_marian, tmp_path):
    config = json.loads((tiny_marian / "config.json").read_text()) | {"activation_dropout": 7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"activation_dropout in config.json of .* is 7: expected a probability"):
        loading.load_pretrained(AutoConfig, tmp_path)
