"""Low-rank residuals of the depths that share a layer."""

import pytest
import torch
from models.cases import make_config, make_model, padded, run_model, sentences

from lightformers_hf.models import LightFormerConfig, LightFormerForConditionalGeneration

BATCH = (*padded(sentences()), *padded(sentences((6, 8, 3), seed=1)))


def fields_of(**fields):
    return {**make_config("lightformer-residuals").to_dict(), "ffn_rank": None, **fields}


@torch.no_grad()
def test_a_shared_layer_with_residuals_is_as_many_layers_of_sums():
    shared = make_model("ConditionalGeneration", "lightformer-residuals", ffn_rank=None)
    without = {"encoder_groups": None, "decoder_groups": None, "group_residual_rank": None}
    separate = LightFormerForConditionalGeneration(LightFormerConfig(**fields_of(**without))).eval()
    state = shared.double().state_dict()
    sums = {name: tensor for name, tensor in state.items() if ".layers." not in name and ".depths." not in name}
    for name, tensor in separate.state_dict().items():
        head, _, rest = name.partition(".layers.")
        if not rest:
            continue
        depth, _, rest = rest.partition(".")
        sums[name] = state[f"{head}.layers.{int(depth) // 2}.{rest}"]
        if tensor.dim() == 2:
            residual = f"{head}.depths.{depth}.residuals.{rest.removesuffix('.weight')}"
            sums[name] = sums[name] + state[f"{residual}.v.weight"] @ state[f"{residual}.u.weight"]
    separate.double().load_state_dict(sums)
    expected, found = (run_model(model, *BATCH).logits for model in (separate, shared))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_fresh_residuals_change_nothing(tmp_path):
    grouped = make_model("ConditionalGeneration", "lightformer-groups")
    grouped.save_pretrained(tmp_path)
    fresh, info = LightFormerForConditionalGeneration.from_pretrained(
        tmp_path, group_residual_rank=3, output_loading_info=True
    )
    expected, found = (run_model(model, *BATCH).logits for model in (grouped, fresh.eval()))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    # 4 matrices d×d and two of the FFN in the encoder, 4 d×d more in the decoder; 4 depths each, 3·(m + n) a matrix.
    added = 3 * 4 * ((4 * 32 + 2 * (16 + 24)) + (8 * 32 + 2 * (16 + 20)))
    assert sum(p.numel() for p in fresh.parameters()) - sum(p.numel() for p in grouped.parameters()) == added
    assert all(".residuals." in name for name in info["missing_keys"])
    first = fresh.model.encoder.depths[0].residuals.self_attn.q_proj
    assert first.u.weight.abs().min() > 0  # so that the second factor learns
    assert not first.v.weight.any()


def test_a_rank_that_no_matrix_has_is_refused():
    with pytest.raises(ValueError, match=r"rank of encoder.depths.0.residuals.self_attn.q_proj is 17"):
        LightFormerForConditionalGeneration(LightFormerConfig(**fields_of(group_residual_rank=17)))
