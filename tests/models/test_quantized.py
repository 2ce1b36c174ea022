"""Quantized layers, of libraries and self-made, in models of this package beside transformers' Marian."""

import pytest
import torch
from models.cases import TINY
from tiny import marian_tokens, sizes
from torch import nn
from transformers import AutoModelForSeq2SeqLM, BitsAndBytesConfig, MarianConfig, MarianMTModel, TorchAoConfig

from lightformers_hf import convert
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
