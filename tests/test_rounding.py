"""4 bits: near what they stand for, and with less error of the outputs where it is known what the inputs are."""

import json

import numpy as np
import pytest
import torch
from models.cases import make_model
from tiny import restore_rows

from lightformers_hf import export, load_engine
from lightformers_hf.rounding import Moments, applied_factors, collate, rotate_factors, round_rows

VARIANTS = ["lightformer-low-rank", "lightformer-joint-qkv", "lightformer-t5-low-rank", "lightformer-two-vocabularies"]


def correlated(count, width, seed):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=generator, dtype=torch.float64)
    return torch.randn(count, width, generator=generator, dtype=torch.float64) @ mix


@pytest.mark.parametrize("shape", [(1, 1), (5, 31), (3, 32), (7, 33), (2, 100)])
def test_every_value_is_the_nearest_of_its_block(shape):
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    rounded = round_rows(rows)
    steps = torch.from_numpy(rounded.scales.astype(np.float32)).abs().repeat_interleave(32, 1)[:, : shape[1]]
    restored = restore_rows(rounded)
    inside = restored.abs() < 7 * steps  # larger values may be cut off, if that is best for the block
    assert ((restored - rows).abs() <= steps / 2 + 1e-6)[inside].all()
    assert (restored - rows).norm() < 0.12 * rows.norm()
    assert torch.equal(restore_rows(round_rows(restored[:, :32])), restored[:, :32])  # once rounded, it stays
    assert not restore_rows(round_rows(torch.zeros(shape))).any()


@pytest.mark.parametrize("width", [20, 64, 75])
def test_moments_lessen_the_error_of_products(width):
    rows, states = torch.randn(16, width, generator=torch.Generator().manual_seed(1)), correlated(500, width, 2)
    errors = [
        (states @ (restore_rows(round_rows(rows, moments)) - rows).double().T).norm()
        for moments in (None, states.T @ states)
    ]
    assert errors[1] < 0.8 * errors[0]
    plain = round_rows(rows, torch.eye(width))  # independent inputs: nothing can be compensated
    np.testing.assert_array_equal(plain.packed, round_rows(rows).packed)
    round_rows(rows, torch.zeros(width, width))  # inputs that were never seen


@pytest.mark.parametrize("variant", VARIANTS)
def test_rotated_factors_are_the_same_model(variant):
    model = make_model("ConditionalGeneration", variant).eval()
    batch = collate([[5, 6, 7, 2], [8, 2]], [[6, 2], [9, 5, 2]], model.config.pad_token_id)
    before = model(**batch).logits.detach()
    rotate_factors(model)
    torch.testing.assert_close(model(**batch).logits, before, atol=1e-4, rtol=1e-4)
    for module in model.modules():
        if hasattr(module, "factors") and len(factors := module.factors()) == 2:
            second = factors[1]
            torch.testing.assert_close(second @ second.T, torch.eye(len(second)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_moments_are_those_of_the_inputs_at_tokens(variant):
    model = make_model("ConditionalGeneration", variant).eval()
    pairs = [([5, 6, 7, 2], [6, 2]), ([8, 2], [9, 5, 2])]
    batches = [collate([source], [target], model.config.pad_token_id) for source, target in pairs]
    seen: list[torch.Tensor] = []
    module = next(module for name, module in model.named_modules() if name.endswith("layers.0.fc2"))
    hook = module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(0, -2)))
    moments = Moments(model, batches)
    hook.remove()
    padded = Moments(model, [collate(*zip(*pairs, strict=True), model.config.pad_token_id)])
    assert moments._sums.keys() == padded._sums.keys()
    for key, expected in moments._sums.items():
        torch.testing.assert_close(padded._sums[key], expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-4)
    states = torch.cat(seen).double().detach()
    for factor in applied_factors(module):
        expected = states.T @ states
        torch.testing.assert_close(moments.of(factor), expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-4)
        states = states @ factor.detach().double()
    assert all(not each._forward_pre_hooks for each in model.modules())


def test_calibrated_export(tiny_marian, parallel_sentences, tmp_path):
    data, sources = tmp_path / "pairs.jsonl", tmp_path / "sources.txt"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in parallel_sentences * 3), encoding="utf-8")
    sources.write_text("".join(pair["de"] + "\n" for pair in parallel_sentences * 3), encoding="utf-8")
    for name, text in (("plain", None), ("pairs", data), ("sources", sources)):
        sides = {"source_lang": "de", "target_lang": "en"} if text == data else {}
        export(tiny_marian, tmp_path / name, to="onnx", quantization="int4", calibration=text, **sides)
    tokens = [load_engine(tmp_path / name).generate([[5, 6, 2]], num_beams=1) for name in ("plain", "pairs")]
    assert all(tokens)
    files = [
        (tmp_path / name / "onnx" / "encoder_model_q4.onnx").read_bytes() for name in ("plain", "pairs", "sources")
    ]
    assert files[0] != files[1]
    (tmp_path / "few.txt").write_text("Hund.\n")
    with pytest.raises(ValueError, match=r"calibration .* holds"):
        export(tiny_marian, tmp_path / "few", to="onnx", quantization="int4", calibration=tmp_path / "few.txt")
    assert not (tmp_path / "few").exists()
