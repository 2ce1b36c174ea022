"""Giving a model the tensors of a checkpoint: all of them, and no other."""

import pytest
import torch
from models.cases import like_trained

from lightformers_hf.loading import load_tensors, skeleton, stored_tensors
from lightformers_hf.models import LightFormerConfig, LightFormerForConditionalGeneration

CONFIG = LightFormerConfig(
    vocab_size=20, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=12, decoder_ffn_dim=12, max_position_embeddings=10, attention_rank=2,
)  # fmt: skip


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
