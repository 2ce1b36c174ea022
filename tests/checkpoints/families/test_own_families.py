"""Checkpoints of Subformer and PartialFormer are compressed further: every matrix by its own truncated SVD."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from lightformers_hf import convert, models, plan

COMMON = {"vocab_size": 48, "d_model": 16, "encoder_layers": 4, "decoder_layers": 3, "max_position_embeddings": 24}
CASES = {
    "subformer": {
        **COMMON,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 2,
        "ffn_dim": 24,
        "sandwich_dim": 20,
        "sandwich_ffn_dim": 28,
        "embedding_dim": 12,
        "sandwich_attention_heads": 5,
        "embedding_attention_heads": 3,
    },
    "partialformer": {
        **COMMON,
        "head_dim": 6,
        "encoder_attention_heads": 5,
        "decoder_attention_heads": 4,
        "base_attention_heads": 3,
        "encoder_groups": 2,
    },
    "subformer_causal": {
        **COMMON,
        "ffn_dim": 24,
        "sharing": "every_2",
        "encoder_layers": 4,
        "decoder_layers": 4,
        "embedding": "linear",
        "embedding_dim": 10,
        "sandwich_attention_heads": 4,
        "tie_word_embeddings": False,
    },
    "partialformer_causal": {
        **COMMON,
        "head_dim": 6,
        "decoder_attention_heads": 4,
        "base_attention_heads": 3,
        "embedding": "adaptive",
        "adaptive_cutoffs": [8, 20],
        "adaptive_factor": 2,
    },
}


def make_teacher(case: str, folder):
    """A model with weights like trained ones, saved in `folder`."""
    family, _, causal = case.partition("_")
    config = AutoConfig.for_model(family, **CASES[case])
    torch.manual_seed(0)
    model = (AutoModelForCausalLM if causal else AutoModelForSeq2SeqLM).from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.3)
    model.save_pretrained(folder)
    return model


def logits(model) -> torch.Tensor:
    ids = torch.arange(4, 24).view(2, 10)
    extra = {"decoder_input_ids": ids[:, 2:8]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(ids, **extra).logits


@pytest.mark.parametrize("case", CASES)
def test_every_matrix_is_truncated(case, tmp_path):
    """The result computes what the teacher computes with its matrices replaced by their best approximations."""
    teacher = make_teacher(case, tmp_path / "teacher")
    report = convert(tmp_path / "teacher", tmp_path / "light", rank=3, method="paper", progress=False)
    light = type(teacher).from_pretrained(tmp_path / "light").eval()
    assert report.architecture == case.partition("_")[0]
    assert report.parameters_after == light.num_parameters() < teacher.num_parameters()
    factorized = [matrix for matrix in report.matrices if matrix.size is not None]
    assert {matrix.kind for matrix in factorized} >= {"attention", "ffn"}
    modules = dict(teacher.named_modules())
    for matrix in factorized:
        weight = (modules.get(matrix.name) or modules[f"model.{matrix.name}"]).weight
        u, s, vh = torch.linalg.svd(weight.detach().double(), full_matrices=False)
        with torch.no_grad():
            weight.copy_((u[:, : matrix.size] * s[: matrix.size]) @ vh[: matrix.size])
    torch.testing.assert_close(logits(light), logits(teacher), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_every_projection_is_found(case, tmp_path):
    """All two-dimensional weights are in the plan, but for position tables, adaptive bands and head scaling."""
    teacher = make_teacher(case, tmp_path)
    names = {matrix.name for matrix in plan(tmp_path, ratio=2, progress=False).matrices}
    others = ("expand", "mix", "distances", "tables", "projections", "classes")
    expected = {
        name.removeprefix("model.").removesuffix(".weight")
        for name, parameter in teacher.named_parameters()
        if parameter.dim() == 2 and not any(part in name.split(".") for part in others)
    }
    assert names == expected


def test_a_compressed_model_is_compressed_again(tmp_path):
    make_teacher("subformer", tmp_path / "teacher")
    once = convert(tmp_path / "teacher", tmp_path / "once", ratio=1.5, progress=False)
    with pytest.raises(ValueError, match=r"ratio is 1.2, .* as small already.*: give more than 1.5"):
        convert(tmp_path / "once", tmp_path / "twice", ratio=1.2, progress=False)
    twice = convert(tmp_path / "once", tmp_path / "twice", ratio=3, progress=False)
    assert twice.parameters_after < once.parameters_after
    assert models.SubformerForConditionalGeneration.from_pretrained(tmp_path / "twice").num_parameters() == (
        twice.parameters_after
    )


def test_partialformer_layers_are_shared_further(tmp_path):
    make_teacher("partialformer", tmp_path / "teacher")
    report = convert(tmp_path / "teacher", tmp_path / "light", encoder_groups=1, progress=False)
    assert report.groups["encoder"] == [1, 4]
    assert logits(models.PartialFormerForConditionalGeneration.from_pretrained(tmp_path / "light")).isfinite().all()


def test_subformers_sharing_stays(tmp_path):
    make_teacher("subformer", tmp_path / "teacher")
    with pytest.raises(ValueError, match=r"encoder_groups is 2.*subformer"):
        convert(tmp_path / "teacher", tmp_path / "light", encoder_groups=2, progress=False)
    assert not (tmp_path / "light").exists()
