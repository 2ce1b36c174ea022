"""Token tables of untied checkpoints, which transformers stores apart."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import sizes
from transformers import AutoModelForSeq2SeqLM

from lightformers_hf import convert
from lightformers_hf.loading import unique_parameters

SIZES = {"vocab_size": 60, "d_model": 16, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
FAMILIES = {
    "M2M100": sizes(16, ffn=24),
    "MBart": sizes(16, ffn=24),
    "T5": {"d_ff": 24, "d_kv": 8, "num_heads": 2, "num_layers": 1},
}
TABLES = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("values", "own"),
    [
        ((0, 1, 2, 3), (False, False)),  # as after training without ties: the first is read by nothing
        ((0, 1, 2, 2), (False, None)),
        ((0, None, 2, 3), (False, False)),
        ((0, 0, 0, 3), (True, False)),
    ],
)
@torch.no_grad()
def test_tables_are_taken_as_they_are_stored(family, values, own, tmp_path):
    torch.manual_seed(0)
    settings = {**SIZES, **FAMILIES[family], "encoder_layers": 1, "decoder_layers": 1, "tie_word_embeddings": False}
    model_class = getattr(transformers, f"{family}ForConditionalGeneration")
    teacher = model_class(getattr(transformers, f"{family}Config")(**settings)).eval()
    teacher.save_pretrained(tmp_path / "teacher")
    file = tmp_path / "teacher" / "model.safetensors"
    tensors = load_file(file)
    made = [torch.randn(60, 16) for _ in range(4)]
    for name, value in zip(TABLES, values, strict=True):
        tables = [key for key in tensors if key.endswith(name)]
        stored = tables[0] if tables else ("" if family == "T5" or name.startswith("lm") else "model.") + name
        tensors |= {} if value is None else {stored: made[value].clone()}
        if value is None:
            tensors.pop(stored, None)
    save_file(tensors, file, {"format": "pt"})
    report = convert(
        tmp_path / "teacher", tmp_path / "light", pattern={"encoder.layers.0.fc1": 4}, method="paper", progress=False
    )
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "teacher")
    if own[1] is not None:  # T5 has an output layer of its own only where that differs from the table
        assert report.parameters_before == unique_parameters(loaded)
    light = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "light").eval()
    assert light.config.share_encoder_decoder_embeddings == own[0]
    assert own[1] in (None, light.config.tie_word_embeddings)
    assert [matrix.name for matrix in report.smaller] == ["encoder.layers.0.fc1"]
    used = [made[0 if value is None else value] for value in values]
    assert torch.equal(light.model.encoder.embed_tokens.weight, used[1])
    assert torch.equal(light.model.decoder.embed_tokens.weight, used[2])
    assert torch.equal(light.lm_head.weight, used[3])
