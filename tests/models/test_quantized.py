"""Quantized layers, of libraries and self-made, in models of this package beside transformers' Marian."""

import json
import re
import shutil

import pytest
import torch
from models.cases import TINY
from safetensors.torch import load_file, save_file
from tiny import marian_tokens, sizes
from torch import nn
from transformers import AutoModelForSeq2SeqLM, BitsAndBytesConfig, MarianConfig, MarianMTModel, TorchAoConfig

from lightformers_hf import convert
from lightformers_hf.checkpoints.teacher import read as read_teacher
from lightformers_hf.loading import load_network
from lightformers_hf.models import LightFormerConfig, LightFormerForConditionalGeneration

BATCH = {"input_ids": torch.arange(3, 19).view(2, 8), "decoder_input_ids": torch.arange(20, 32).view(2, 6)}


def eight_bits_of_torchao():
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


QUANTIZATIONS = {
    "bitsandbytes, 4 bits": lambda: BitsAndBytesConfig(load_in_4bit=True),
    "bitsandbytes, 8 bits": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "torchao, 8 bits": eight_bits_of_torchao,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A Marian of random weights, and what it becomes with low-rank layers and tables, and with one such layer.

    On processors with AVX-512 and bfloat16, bitsandbytes fails at widths that are no multiples of 64.
    """
    place = tmp_path_factory.mktemp("quantized")
    fields = sizes(128, layers=2, heads=4, max_position_embeddings=32) | marian_tokens(320)
    torch.manual_seed(0)
    MarianMTModel(MarianConfig(**fields, init_std=0.1)).save_pretrained(place / "marian")
    convert(place / "marian", place / "low-rank", rank=64, method="paper", progress=False)
    convert(place / "marian", place / "dense", pattern={"encoder.layers.0.fc1": 64}, method="paper", progress=False)
    return [place / name for name in ("marian", "low-rank", "dense")]


@torch.no_grad()
def relative_error(folder, dtype, quantization):
    """Of the logits, relative to those of the same model in fp32."""
    exact = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()(**BATCH).logits
    loaded = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=dtype, quantization_config=quantization()).eval()
    return ((loaded(**BATCH).logits.float() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_quantization_costs_as_little_as_it_costs_marian(folders, name, dtype):
    """At most twice as much: a low-rank matrix is two layers, each with an error of its own."""
    pytest.importorskip(name.partition(",")[0])
    marian, *own = (relative_error(folder, dtype, QUANTIZATIONS[name]) for folder in folders)
    assert 0 < marian < 0.5
    assert max(own) < 2 * marian


@pytest.mark.parametrize("name", QUANTIZATIONS)
@torch.no_grad()
def test_a_quantized_model_is_saved_and_loaded(folders, name, tmp_path):
    pytest.importorskip(name.partition(",")[0])
    options = {"dtype": torch.bfloat16, "quantization_config": QUANTIZATIONS[name]()}
    model = AutoModelForSeq2SeqLM.from_pretrained(folders[1], **options).eval()
    model.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(**BATCH).logits, model(**BATCH).logits)


@pytest.mark.parametrize("name", [name for name in QUANTIZATIONS if name.startswith("bitsandbytes")])
@torch.no_grad()
def test_a_quantized_teacher_is_dequantized(folders, name, tmp_path):
    """From a folder and from memory, of another family and of this package."""
    pytest.importorskip("bitsandbytes")
    options = {"dtype": torch.bfloat16, "quantization_config": QUANTIZATIONS[name]()}
    for folder in folders[:2]:
        model, place = AutoModelForSeq2SeqLM.from_pretrained(folder, **options).eval(), tmp_path / folder.name
        model.save_pretrained(place / "quantized")
        expected = model.dequantize(torch.float32).float()(**BATCH).logits
        again = AutoModelForSeq2SeqLM.from_pretrained(folder, **options)
        ratio = {"rank": 64} if folder.name == "marian" else {}
        for source, output in [(place / "quantized", place / "a"), (again, place / "b")]:
            convert(source, output, method="paper", progress=False, **ratio)
            assert "quantization_config" not in json.loads((output / "config.json").read_text())
        assert again.is_quantized
        tensors = [load_file(place / output / "model.safetensors") for output in "ab"]
        assert all(torch.equal(tensors[0][key], tensors[1][key]) for key in tensors[0])
        assert torch.allclose(
            load_network(place / "quantized")(**BATCH).logits, expected, atol=5e-3
        )  # sinusoids in bf16 there


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
@torch.no_grad()
def test_a_teacher_that_is_dequantized_when_it_is_loaded(folders, method, tmp_path):
    """Weights in 8 bits of the formats that servers read, made here from their definition."""
    folder = shutil.copytree(folders[0], tmp_path / "quantized")
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    exact = dict(tensors)
    for name in [name for name in tensors if re.search(r"(proj|fc\d)\.weight", name)]:
        scale = tensors[name].abs().amax() / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        exact[name] = tensors[name].float() * scale
        if method == "fp8":
            tensors[f"{name}_scale_inv"] = scale.reshape(1, 1).float()
        else:
            tensors[f"{name}_scale"] = scale.reshape(1).float()
    settings = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    config["quantization_config"] = {
        "fp8": {"quant_method": "fp8", "weight_block_size": [512, 512], "activation_scheme": "dynamic"},
        "compressed-tensors": {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": settings}},
            "ignore": ["lm_head"],
        },
    }[method]
    if method == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    reference = AutoModelForSeq2SeqLM.from_pretrained(folders[0], dtype=torch.float32).eval()
    reference.load_state_dict(exact, strict=False)
    read = read_teacher(folder).model(**BATCH).logits
    assert torch.allclose(read, reference(**BATCH).logits, atol=1e-3)


def test_weights_that_transformers_cannot_dequantize_are_refused(folders, tmp_path):
    pytest.importorskip("torchao")
    options = {"dtype": torch.bfloat16, "quantization_config": QUANTIZATIONS["torchao, 8 bits"]()}
    model = AutoModelForSeq2SeqLM.from_pretrained(folders[1], **options)
    model.save_pretrained(tmp_path / "quantized")
    for source in (model, tmp_path / "quantized"):
        with pytest.raises(ValueError, match="quantized by torchao, which transformers can't dequantize: give the"):
            convert(source, tmp_path / "out", method="paper", progress=False)


class Packed(nn.Module):
    """Linear layer that holds buffers alone, as those of GPTQ, AWQ and HQQ; computes in the type of its input."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        scale = layer.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("packed", (layer.weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())
        self.seen = set()

    def forward(self, states):
        self.seen.add(states.dtype)
        weight = self.packed.to(states.dtype) * self.scale.to(states.dtype)
        return nn.functional.linear(states, weight, None if self.bias is None else self.bias.to(states.dtype))


def make(**fields):
    torch.manual_seed(0)
    return LightFormerForConditionalGeneration(LightFormerConfig(**TINY["lightformer"], **fields)).eval()


@pytest.mark.parametrize("rank", [None, 6])
@pytest.mark.parametrize("normalization", ["layer_norm", "rms_norm"])
@torch.no_grad()
def test_layers_without_parameters_get_the_states_as_they_are(normalization, rank):
    model = make(normalization=normalization, ffn_rank=rank)
    exact = model(**BATCH).logits
    model.half()
    for owner in list(model.model.modules()):
        for name, layer in list(owner.named_children()):
            if type(layer) is nn.Linear:
                setattr(owner, name, Packed(layer.float()))
    packed = [module for module in model.modules() if isinstance(module, Packed)]
    logits = model(**BATCH).logits
    assert logits.dtype == torch.float16
    assert {dtype for module in packed for dtype in module.seen} == {torch.float16}
    assert (logits.float() - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("kept", [torch.float32, torch.float16], ids=str)
@torch.no_grad()
def test_states_are_cast_for_layers_in_fp32_unless_autocast_does(kept):
    """T5's second feed-forward matrix stays in fp32 in a model in fp16."""
    model, seen = make(normalization="rms_norm", ffn_rank=6).half(), set()
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        layer.fc2.to(kept)
        layer.fc2.register_forward_pre_hook(lambda module, states: seen.add(states[0].dtype))
    assert model(**BATCH).logits.isfinite().all()
    assert seen == {kept}
    seen.clear()
    with torch.autocast("cpu", torch.float16):
        model.float()(**BATCH)
    assert seen == {torch.float16}
