"""Private parts of torch and transformers that the models read are what they were."""

import pytest
import torch
from models.cases import make_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForSeq2SeqLM

from lightformers_hf.models.torch_internals import is_plain, parts_of, weights_of
from lightformers_hf.models.transformers_internals import attention_of


class Shouting(nn.Linear):
    """A class of its own: it says itself what calling it is."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states) + 1


def test_a_module_is_plain_whatever_its_class_and_mode():
    assert is_plain(nn.Linear(2, 3))
    assert is_plain(nn.Linear(2, 3).eval())
    assert is_plain(Shouting(2, 3))


@pytest.mark.parametrize(
    "attach",
    [
        lambda layer: layer.register_forward_hook(lambda module, inputs, output: None),
        lambda layer: layer.register_forward_pre_hook(lambda module, inputs: None),
        lambda layer: setattr(layer, "forward", lambda states: states),
        lambda layer: layer.compile(backend="eager"),
    ],
    ids=["hook", "pre-hook", "forward", "compiled"],
)
def test_a_module_with_something_attached_is_not(attach):
    layer = nn.Linear(2, 3)
    attach(layer)
    assert not is_plain(layer)


@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
def test_no_module_is_while_all_are_watched(kind):
    handle = getattr(nn.modules.module, f"register_module_{kind}_hook")(lambda *arguments: None)
    assert not is_plain(nn.Linear(2, 3))
    handle.remove()
    assert is_plain(nn.Linear(2, 3))


def test_what_is_in_a_module():
    stack = nn.Sequential(nn.Linear(2, 3, bias=False))
    assert parts_of(stack) == {"0": stack[0]}
    assert weights_of(stack[0]) == {"weight": stack[0].weight, "bias": None}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_attention_of_a_model(attention):
    model = make_model("Model", "lightformer")
    model.set_attn_implementation(attention)
    assert attention_of(model.config) == attention


def test_a_tensor_that_was_loaded_keeps_its_row_of_padding(tmp_path):
    """Where its module is drawn, because another tensor of it is missing."""
    model = make_model("ConditionalGeneration", "lightformer-low-rank")
    row = model.model.shared.weight[model.config.pad_token_id]
    assert row.abs().min() > 0
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.shared.basis"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.shared.weight, model.model.shared.weight)
    assert not torch.equal(loaded.model.shared.basis, model.model.shared.basis)
