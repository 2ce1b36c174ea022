"""Layers shared by a conversion: exact where they compute the same, however their heads and neurons are arranged."""

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, MarianConfig, MarianMTModel

from lightformers_hf import StudyOptions, convert, plan

HEADS, WIDTH = 2, 8


def make_teacher(folder):
    config = MarianConfig(
        vocab_size=40, d_model=HEADS * WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, encoder_ffn_dim=24, decoder_ffn_dim=20, max_position_embeddings=64,
        pad_token_id=39, decoder_start_token_id=39, eos_token_id=0, forced_eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MarianMTModel(config).eval()
    with torch.no_grad():
        for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):  # not the sines
            parameter.add_(torch.randn(parameter.shape), alpha=0.3)
    return model, folder


@torch.no_grad()
def rearrange(layer):
    """Other heads first, other bases inside them, other neurons first: the same function."""
    for name in ("self_attn", "encoder_attn"):
        if not hasattr(layer, name):
            continue
        attention = getattr(layer, name)
        order = torch.cat([torch.arange(WIDTH, 2 * WIDTH), torch.arange(WIDTH)])
        keys, values = (torch.block_diag(*(torch.linalg.qr(torch.randn(8, 8))[0] for _ in range(2))) for _ in range(2))
        for part, basis in (("q_proj", keys), ("k_proj", keys), ("v_proj", values)):
            linear = getattr(attention, part)
            linear.weight.copy_((basis @ linear.weight)[order])
            linear.bias.copy_((basis @ linear.bias)[order])
        attention.out_proj.weight.copy_((attention.out_proj.weight @ values.T)[:, order])
    order = torch.randperm(layer.fc1.out_features)
    layer.fc1.weight.copy_(layer.fc1.weight[order])
    layer.fc1.bias.copy_(layer.fc1.bias[order])
    layer.fc2.weight.copy_(layer.fc2.weight[:, order])


def logits(model) -> torch.Tensor:
    ids = torch.arange(1, 21).view(2, 10)
    with torch.no_grad():
        return model(ids, attention_mask=torch.ones_like(ids), decoder_input_ids=ids[:, 3:9]).logits


GROUPS = {"encoder_groups": 1, "decoder_groups": 1, "progress": False}


@pytest.mark.parametrize("calibrated", [True, False])
def test_layers_that_compute_the_same_become_one_without_loss(tmp_path, calibrated):
    teacher, folder = make_teacher(tmp_path / "teacher")
    for stack in (teacher.model.encoder, teacher.model.decoder):
        stack.layers[1].load_state_dict(stack.layers[0].state_dict())
        rearrange(stack.layers[1])
    teacher.save_pretrained(folder)
    expected = logits(teacher)
    # A rank that is no compression makes the conversion calibrate all the same.
    pattern = {"pattern": {"shared": 16}} if calibrated else {}
    convert(folder, tmp_path / "light", **GROUPS, **pattern)
    light = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "light").eval()
    assert light.config.encoder_groups == light.config.decoder_groups == 1
    torch.testing.assert_close(logits(light), expected, atol=2e-4, rtol=1e-3)
    convert(folder, tmp_path / "mean", **GROUPS, method="paper")
    mean = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "mean").eval()
    assert (logits(mean) - expected).abs().max() > 0.5


def test_private_norms_need_layers_that_share(tmp_path):
    teacher, folder = make_teacher(tmp_path / "teacher")
    teacher.save_pretrained(folder)
    with pytest.raises(ValueError, match="share_layer_norms is for layers that share"):
        convert(folder, tmp_path / "light", ratio=2, study=StudyOptions(share_layer_norms=False), progress=False)
    assert not (tmp_path / "light").exists()


def test_layers_of_different_widths_are_not_merged(tmp_path):
    teacher, folder = make_teacher(tmp_path / "teacher")
    teacher.save_pretrained(folder)
    convert(folder, tmp_path / "narrow", params="6k", method="narrow", progress=False)
    narrow = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "narrow")
    assert narrow.config.head_dim_pattern or narrow.config.ffn_dim_pattern
    with pytest.raises(ValueError, match=r"encoder_groups is 1, but layers of narrow differ in shape"):
        convert(tmp_path / "narrow", tmp_path / "light", encoder_groups=1, progress=False)


@pytest.mark.parametrize(("own", "asked"), [(True, False), (False, True)])
def test_norms_that_are_shared_otherwise_are_refused_before_anything_takes_long(tmp_path, own, asked):
    teacher, folder = make_teacher(tmp_path / "teacher")
    teacher.save_pretrained(folder)
    study = StudyOptions(share_layer_norms=own)
    convert(folder, tmp_path / "shared", encoder_groups=1, study=study, method="paper", progress=False)
    again = StudyOptions(share_layer_norms=asked)
    with pytest.raises(ValueError, match=rf"share_layer_norms={asked}, but layers of shared are shared with .*{own}"):
        plan(tmp_path / "shared", decoder_groups=1, study=again, method="paper", progress=False)
