"""The configuration: errors that name the field, and what survives JSON."""

import importlib.util
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models.cases import TINY, VARIANTS, make_config
from transformers import AutoConfig

from lightformers_hf.models import (
    LightFormerConfig,
    LightFormerForCausalLM,
    LightFormerForConditionalGeneration,
    LightFormerForSequenceClassification,
    LightFormerModel,
    PartialFormerConfig,
    SubformerConfig,
    configuration_lightformer,
)
from lightformers_hf.models.stack import LayerStack, group_layers

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("variant", VARIANTS)
def test_json_round_trip(variant, tmp_path):
    config, (_, fields) = make_config(variant), VARIANTS[variant]
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).to_dict() | {"_name_or_path": ""} == config.to_dict()
    given = {name: value for name, value in fields.items() if value is not None}
    assert {name: getattr(config, name) for name in given} == given


@pytest.mark.parametrize("field", ["rank_pattern", "head_dim_pattern", "ffn_dim_pattern"])
def test_patterns_keep_their_order(field, tmp_path):
    """The first that matches decides, after loading too."""
    pattern = {"layers.1": 4, "decoder.layers.1": 3, "a.*": 2}
    LightFormerConfig(**TINY["lightformer"], **{field: pattern}).save_pretrained(tmp_path)
    assert list(getattr(AutoConfig.from_pretrained(tmp_path), field).items()) == list(pattern.items())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"encoder_attention_heads": 3}, "encoder_attention_heads is 3.*d_model 16"),
        ({"decoder_attention_heads": 0}, "decoder_attention_heads is 0.*d_model 16"),
        ({"encoder_groups": 3}, r"encoder_groups is 3.*4 layers.*\[1, 2, 4\]"),
        ({"decoder_groups": 0}, r"decoder_groups is 0.*2 layers"),
        ({"encoder_groups": 8}, r"encoder_groups is 8.*4 layers"),
        ({"d_model": 0}, "d_model is 0; it is at least 1"),
        ({"vocab_size": 0}, "vocab_size is 0; it is at least 1"),
        ({"decoder_layers": 0}, "decoder_layers is 0; it is at least 1"),
        ({"max_position_embeddings": -5}, "max_position_embeddings is -5; it is at least 1"),
        ({"dropout": 1.5}, "dropout is 1.5; it is a share, from 0 to 1"),
        ({"attention_dropout": -0.1}, "attention_dropout is -0.1; it is a share"),
        ({"attention_rank": 0}, "attention_rank is 0"),
        ({"ffn_rank": -1}, "ffn_rank is -1"),
        ({"embedding_rank": 0}, "embedding_rank is 0"),
        ({"decoder_attention_rank": 0}, "decoder_attention_rank is 0"),
        ({"decoder_ffn_rank": 0}, "decoder_ffn_rank is 0"),
        ({"rank_pattern": {"fc1": 0}}, "rank_pattern.*fc1.* is 0"),
        ({"rank_pattern": {"fc(": 3}}, r"rank_pattern has 'fc\('"),
        ({"head_dim": 0}, "head_dim is 0; it is at least 1"),
        ({"group_residual_rank": 4}, "group_residual_rank is 4: only version 0.1 .* has residuals of depths"),
        ({"head_dim_pattern": {"self_attn": 0}}, "head_dim_pattern.*self_attn.* is 0; it is at least 1"),
        ({"head_dim_pattern": {"self_attn(": 3}}, r"head_dim_pattern has 'self_attn\('"),
        ({"ffn_dim_pattern": {"layers.0": 0}}, "ffn_dim_pattern.*layers.0.* is 0; it is at least 1"),
        ({"head_dim": 3, "encoder_attention_heads": 0}, "encoder_attention_heads is 0; it is at least 1"),
        ({"head_dim": 3, "attention_output_projection": False}, "head_dim is 3.*attention_output_projection=True"),
        ({"position_embedding_type": "rotary"}, "position_embedding_type is 'rotary'.*sinusoidal_half"),
        ({"max_position_embeddings": None}, "max_position_embeddings is None, but the table of positions"),
        ({"normalization": "batch_norm"}, "normalization is 'batch_norm'.*rms_norm"),
        ({"norm_epsilon": -1e-6}, "norm_epsilon is -1e-06; it is at least 0"),
        ({"relative_buckets": 2}, "relative_buckets is 2; it is at least 4"),
        ({"relative_furthest": 16}, "relative_furthest is 16: with 32 relative_buckets.* at least 17"),
        ({"activation_function": "sine"}, "activation_function is 'sine'"),
        ({"decoder_vocab_size": 30}, "decoder_vocab_size is 30.*share_encoder_decoder_embeddings=False"),
    ],
)
def test_impossible_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        LightFormerConfig(**{**TINY["lightformer"], **fields})


def test_relative_positions_have_no_limit_and_no_flash_attention():
    config = LightFormerConfig(**TINY["lightformer"], position_embedding_type="relative")
    assert config.max_position_embeddings is None
    assert LightFormerConfig(**config.to_dict()).max_position_embeddings is None
    config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="does not support Flash Attention"):
        LightFormerModel(config)


@pytest.mark.parametrize("fields", [{"d_model": "16"}, {"attention_rank": 2.5}, {"joint_qkv": "yes"}])
def test_wrong_types(fields):
    with pytest.raises(Exception, match=next(iter(fields))):
        LightFormerConfig(**{**TINY["lightformer"], **fields})


@pytest.mark.parametrize(
    "model_class", [LightFormerModel, LightFormerForConditionalGeneration, LightFormerForCausalLM]
)
def test_word_vectors_are_for_classification(model_class):
    config = LightFormerConfig(**TINY["lightformer"], embedding_dim=10)
    with pytest.raises(ValueError, match="embedding_dim"):
        model_class(config)
    assert LightFormerForSequenceClassification(config).get_input_embeddings().weight.shape == (40, 10)


def test_no_group_field_is_one_layer_a_depth():
    assert group_layers(3, None) == [0, 1, 2]


@given(st.integers(1, 6), st.integers(1, 6))
def test_groups_are_contiguous_and_equal(groups, size):
    expected = [index for index in range(groups) for _ in range(size)]
    assert group_layers(groups * size, groups) == expected
    stack = LayerStack(lambda index: torch.nn.Identity(), expected)
    assert len(stack) == groups
    for depth, (layer, slots) in enumerate(stack.by_depth()):
        assert layer is stack[depth // size]
        assert slots == {"layer_idx": depth, "cross_layer_idx": depth // size * size}


def test_fresh_weights_have_the_architectures_own_start_unless_told_otherwise():
    assert LightFormerConfig(d_model=64).init_std is None
    assert LightFormerConfig(d_model=64, init_std=0.02).init_std == 0.02


def test_every_head_has_a_width_that_tools_can_read(tmp_path):
    config = LightFormerConfig(d_model=96, encoder_attention_heads=6, decoder_attention_heads=6)
    assert config.head_dim == 16
    assert LightFormerConfig(head_dim=24).head_dim == 24
    causal = LightFormerForCausalLM(LightFormerConfig(**TINY["lightformer"])).config
    assert causal.head_dim == 8
    config.save_pretrained(tmp_path)
    assert LightFormerConfig.from_pretrained(tmp_path).head_dim == 16


@pytest.mark.parametrize(
    "fields", [{"decoder_attention_heads": 2}, {"head_dim_pattern": {"decoder.layers.0.encoder_attn": 3}}]
)
def test_heads_that_differ_have_no_width_in_common(fields):
    config = LightFormerConfig(**fields)
    assert config.head_dim is None


def test_an_old_transformers_is_named(monkeypatch):
    code = Path(configuration_lightformer.__file__)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.6")
    spec = importlib.util.spec_from_file_location("configuration_of_a_stranger", code)
    with pytest.raises(ImportError, match=r"needs transformers 5\.\d+ or newer, and 4\.57\.6 is installed: run pip"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_the_oldest_transformers_is_that_of_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"transformers>={configuration_lightformer.OLDEST_TRANSFORMERS}" in [
        requirement.partition(",")[0].replace(" ", "") for requirement in project["dependencies"]
    ]


@pytest.mark.parametrize("config_class", [LightFormerConfig, SubformerConfig, PartialFormerConfig])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_position_embeddings": None}, "max_position_embeddings is None, but the table of positions"),
        ({"vocab_size": 40, "pad_token_id": 58100}, "pad_token_id is 58100, but there are 40 tokens"),
        ({"vocab_size": 40, "pad_token_id": -1}, "pad_token_id is -1, but there are 40 tokens"),
    ],
)
def test_every_architecture_refuses_what_no_table_has(config_class, fields, message):
    with pytest.raises(ValueError, match=message):
        config_class(**fields)
