"""Private parts of transformers that the models read are what they were."""

import pytest
import torch
from models.cases import make_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM

from lightformers_hf.models.transformers_internals import attention_of


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
