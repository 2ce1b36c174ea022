"""Heads and feed-forward networks of any width."""

import torch
from models.cases import make_config, make_model, padded, run_model, sentences

from lightformers_hf.models import LightFormerConfig, LightFormerForConditionalGeneration


def widened(tensor: torch.Tensor, axis: int, heads: int, width: int) -> torch.Tensor:
    """Every head's share of `axis` filled up with zeros to `width`."""
    parts = tensor.movedim(axis, 0).unflatten(0, (heads, -1))
    filled = torch.zeros(heads, width, *parts.shape[2:])
    filled[:, : parts.shape[1]] = parts
    return filled.flatten(0, 1).movedim(0, axis)


@torch.no_grad()
def test_narrow_modules_are_wide_ones_filled_up_with_zeros():
    narrow = make_model("ConditionalGeneration", "lightformer-narrow").eval()
    fields = {"head_dim": 8, "head_dim_pattern": {}, "ffn_dim_pattern": {}}
    wide = LightFormerForConditionalGeneration(
        LightFormerConfig(**{**make_config("lightformer-narrow").to_dict(), **fields})
    ).eval()
    state = {}
    for name, tensor in narrow.state_dict().items():
        head, _, leaf = name.rpartition(".")
        module = head.rpartition(".")[2]
        if module.endswith("_proj"):
            attention = narrow.get_submodule(head.rpartition(".")[0])
            heads = 4 if "encoder.layers" in name else 2
            if module == "q_proj":  # the scores are divided by the root of the width
                tensor = tensor * (8 / attention.head_dim) ** 0.5
            if module != "out_proj":
                tensor = widened(tensor, 0, heads, 8)
            elif leaf == "weight":
                tensor = widened(tensor, 1, heads, 8)
        elif module == "fc1":
            tensor = widened(tensor, 0, 1, 24 if "encoder.layers" in name else 20)
        elif module == "fc2" and leaf == "weight":
            tensor = widened(tensor, 1, 1, 24 if "encoder.layers" in name else 20)
        state[name] = tensor
    wide.load_state_dict(state)
    batch = (*padded(sentences()), *padded(sentences((6, 8, 3), seed=1)))
    expected, logits = (run_model(model, *batch).logits for model in (wide, narrow))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert narrow.model.decoder.layers[0].encoder_attn.q_proj.weight.shape == (6, 16)
    assert narrow.model.decoder.layers[1].fc1.weight.shape == (7, 16)
