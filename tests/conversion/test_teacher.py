"""A teacher with fewer layers against transformers' own model with layers taken out."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianMTModel

from lightformers_hf import convert
from lightformers_hf.conversion.teacher import Teacher


def without(model, stack: str, kept: list[int]) -> None:
    layers = getattr(model.model, stack).layers
    getattr(model.model, stack).layers = nn.ModuleList(layers[i] for i in kept)


@pytest.mark.parametrize(
    ("stack", "count", "kept"), [("decoder", 1, [0]), ("encoder", 1, [0]), ("encoder", 2, [0, 1])]
)
def test_logits_are_those_of_the_model_without_the_layers(tiny_marian, stack, count, kept):
    reference = MarianMTModel.from_pretrained(tiny_marian).eval()
    without(reference, stack, kept)
    model = Teacher(tiny_marian, "t").keep_layers({stack: count}).load().eval()
    assert getattr(model.config, f"{stack}_layers") == count
    batch = AutoTokenizer.from_pretrained(tiny_marian)(["Zwei Hunde spielen."], return_tensors="pt")
    start = torch.tensor([[reference.config.decoder_start_token_id]])
    expected = reference(**batch, decoder_input_ids=start).logits
    torch.testing.assert_close(model(**batch, decoder_input_ids=start).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("before", "count", "kept"), [(6, 3, [0, 2, 5]), (6, 1, [0]), (5, 3, [0, 2, 4]), (3, 2, [0, 2])]
)
def test_layers_that_stay_are_spread_evenly(tiny_marian, tmp_path, before, count, kept):
    config = MarianMTModel.from_pretrained(tiny_marian).config
    config.decoder_layers = before
    torch.manual_seed(0)
    deep = MarianMTModel(config)
    deep.save_pretrained(tmp_path)
    model = Teacher(tmp_path, "t").keep_layers({"decoder": count}).load()
    for layer, index in zip(model.model.decoder.layers, kept, strict=True):
        assert torch.equal(layer.fc1.weight, deep.model.decoder.layers[index].fc1.weight)


def test_convert_keeps_layers_and_counts_from_the_whole_teacher(tiny_marian, tmp_path):
    report = convert(tiny_marian, tmp_path / "light", decoder_layers=1, ratio=2, progress=False)
    weights = MarianMTModel.from_pretrained(tiny_marian).named_parameters()
    whole = sum(weight.numel() for name, weight in weights if "embed_positions" not in name)  # constants, there
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "light")
    assert (model.config.encoder_layers, model.config.decoder_layers) == (2, 1)
    assert report.parameters_before == whole
    assert report.layers == {"encoder": [2, 2], "decoder": [1, 2]}
    assert report.parameters_after == model.num_parameters()
    saved = json.loads((tmp_path / "light" / "compression.json").read_text())
    assert saved["layers"]["decoder"] == [1, 2]


def test_layers_alone_leave_the_matrices_dense(tiny_marian, tmp_path):
    report = convert(tiny_marian, tmp_path / "light", encoder_layers=1, progress=False)
    assert {matrix.form for matrix in report.matrices} == {"dense"}
    reference = MarianMTModel.from_pretrained(tiny_marian).eval()
    without(reference, "encoder", [0])
    batch = AutoTokenizer.from_pretrained(tiny_marian)(["Der Hund schläft."], return_tensors="pt")
    options = {"num_beams": 1, "max_new_tokens": 12}
    light = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "light")
    assert torch.equal(light.generate(**batch, **options), reference.generate(**batch, **options))


@pytest.mark.parametrize("count", [0, 3])
def test_a_count_that_is_not_there_is_refused(tiny_marian, tmp_path, count):
    with pytest.raises(ValueError, match=f"decoder_layers is {count}.*2 layers: give 1 to 2"):
        convert(tiny_marian, tmp_path / "light", decoder_layers=count, progress=False)
    assert not (tmp_path / "light").exists()


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn, torch.int64])
@pytest.mark.parametrize("name", ["model.encoder.layers.0.fc1.weight", "final_logits_bias"])
def test_weights_that_are_no_floats_are_refused_by_name(tiny_marian, tmp_path, dtype, name):
    shutil.copytree(tiny_marian, tmp_path / "teacher")
    tensors = load_file(tmp_path / "teacher" / "model.safetensors")
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, tmp_path / "teacher" / "model.safetensors")
    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=f"{name} of .*teacher holds {kind}; weights are expected in float32"):
        convert(tmp_path / "teacher", tmp_path / "light", progress=False)
    assert not (tmp_path / "light").exists()


@pytest.mark.parametrize("method", ["auto", "paper"])
def test_a_tokenizer_larger_than_the_tables_is_refused(tiny_marian, tmp_path, method):
    shutil.copytree(tiny_marian, tmp_path / "teacher")
    tokenizer = AutoTokenizer.from_pretrained(tiny_marian)
    size = len(tokenizer)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(tmp_path / "teacher")
    with pytest.raises(ValueError, match=f"gives '<more>' the number {size}, but vocab_size is {size}"):
        convert(tmp_path / "teacher", tmp_path / "light", ratio=2, method=method, progress=False)
    assert not (tmp_path / "light").exists()


def test_denormal_weights_are_read(tiny_marian, tmp_path):
    shutil.copytree(tiny_marian, tmp_path / "teacher")
    tensors = load_file(tmp_path / "teacher" / "model.safetensors")
    name = "model.encoder.layers.0.fc1.weight"
    tensors[name] = tensors[name] * 1e-40
    save_file(tensors, tmp_path / "teacher" / "model.safetensors")
    assert torch.equal(Teacher(tmp_path / "teacher", "t").read(name), tensors[name])


def test_layers_that_share_weights_are_refused(tiny_marian, tmp_path):
    convert(tiny_marian, tmp_path / "shared", encoder_groups=1, progress=False)
    with pytest.raises(ValueError, match=r"encoder_layers can't be changed: .*encoder_groups"):
        convert(tmp_path / "shared", tmp_path / "light", encoder_layers=1, progress=False)


def test_the_papers_procedure_leaves_no_layers_out(tiny_marian, tmp_path):
    with pytest.raises(ValueError, match="no encoder_layers"):
        convert(tiny_marian, tmp_path / "light", encoder_layers=1, method="paper", ratio=2, progress=False)
