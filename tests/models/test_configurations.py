"""Configurations: errors that name field, value and remedy; fields that follow from others; what survives JSON."""

import importlib.util
import json
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models.cases import TINY, VARIANTS, config_class, make_config, model_class
from transformers import AutoConfig

from lightformers_hf.models import (
    LightFormerConfig,
    LightFormerForCausalLM,
    LightFormerForConditionalGeneration,
    LightFormerForSequenceClassification,
    LightFormerModel,
    PartialFormerConfig,
    PartialFormerForCausalLM,
    PartialFormerModel,
    SubformerConfig,
    SubformerForCausalLM,
    SubformerForConditionalGeneration,
    SubformerModel,
    configuration_lightformer,
)
from lightformers_hf.models.configuration_subformer import SHARINGS, default_heads
from lightformers_hf.models.modeling_subformer import stored_at
from lightformers_hf.models.stack import LayerStack, group_layers

pytestmark = pytest.mark.quick

SUBFORMER = {**TINY["subformer"], "decoder_layers": 4, "sandwich_attention_heads": 2}
PARTIALFORMER = {**TINY["partialformer"], "head_dim": 6}
ADAPTIVE = {"embedding": "adaptive", "adaptive_cutoffs": [10, 20], "adaptive_factor": 2}
NARROW_BANDS = {**ADAPTIVE, "embedding_dim": None}
VANILLA = {"encoder_style": "vanilla"}
FIELDS = {"lightformer": TINY["lightformer"], "subformer": SUBFORMER, "partialformer": PARTIALFORMER}


IMPOSSIBLE = {
    "lightformer": [
        ({"encoder_attention_heads": 3}, "encoder_attention_heads is 3.*d_model 16"),
        ({"encoder_groups": 3}, r"encoder_groups is 3.*4 layers.*\[1, 2, 4\]"),
        ({"d_model": 0}, "d_model is 0; it is at least 1"),
        ({"max_position_embeddings": -5}, "max_position_embeddings is -5; it is at least 1"),
        ({"dropout": 1.5}, "dropout is 1.5; it is a share, from 0 to 1"),
        ({"attention_rank": 0}, "attention_rank is 0"),
        ({"rank_pattern": {"fc1": 0}}, "rank_pattern.*fc1.* is 0"),
        ({"rank_pattern": {"fc(": 3}}, r"rank_pattern has 'fc\('"),
        ({"head_dim": 0}, "head_dim is 0; it is at least 1"),
        ({"group_residual_rank": 4}, "group_residual_rank is 4: only version 0.1 .* has residuals of depths"),
        ({"head_dim_pattern": {"self_attn": 0}}, "head_dim_pattern.*self_attn.* is 0; it is at least 1"),
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
    "subformer": [
        ({"sharing": "sandwhich"}, "sharing is 'sandwhich'; it is one of all, .*every_2, none, sandwich"),
        ({"encoder_layers": 2}, "sharing='sandwich' needs 3 layers or more, encoder_layers is 2"),
        ({"sharing": "all_except_last", "decoder_layers": 2}, "'all_except_last' needs 3 layers.*decoder_layers is 2"),
        ({"sharing": "every_2", "encoder_layers": 5}, "every_2' needs an even number of layers, encoder_layers is 5"),
        ({"sandwich_dim": 15, "sandwich_attention_heads": 4}, "is 4, which .* sandwich_dim 15; these do: 1, 3, 5, 15"),
        ({"sandwich_dim": 17, "sandwich_attention_heads": None}, "is 10, which .* sandwich_dim 17; these do: 1, 17"),
        (
            {"sharing": "all", "sandwich_dim": 24},
            "sandwich_dim is 24, but sharing='all' has no .*None.*16.*'sandwich'",
        ),
        ({"sharing": "none", "sandwich_ffn_dim": 30}, "sandwich_ffn_dim is 30.*'none' has no .*None.*24.*'sandwich'"),
        ({"encoder_attention_heads": 3}, "encoder_attention_heads is 3, which does not divide d_model 16.*1, 2, 4"),
        ({"embedding_attention_heads": 3}, "is 3, which .* embedding_dim 8; these do: 1, 2, 4, 8"),
        ({"embedding": "save"}, "embedding is 'save'; it is one of adaptive, full, linear, safe"),
        ({"embedding": "full"}, "embedding_dim is 8, but embedding='full' is d_model wide.*None.*16.*'linear'"),
        ({**NARROW_BANDS, "embedding_dim": 8}, "embedding_dim is 8, but embedding='adaptive' is d_model wide.*None"),
        ({"embedding_dim": -8}, "embedding_dim is -8; it is at least 1"),
        ({"embedding_inner_dim": 9}, "embedding_inner_dim is 9, but embedding='safe' has no such .*'linear'"),
        ({"output_inner_dim": 0}, "output_inner_dim is 0; it is at least 1"),
        ({**NARROW_BANDS, "adaptive_cutoffs": None}, "adaptive_cutoffs is None.*rise from 1 to below.*40 tokens"),
        ({**NARROW_BANDS, "adaptive_cutoffs": [10, 40]}, r"adaptive_cutoffs is \[10, 40\].*below.*40 tokens"),
        ({**NARROW_BANDS, "adaptive_cutoffs": [20, 10]}, r"adaptive_cutoffs is \[20, 10\].*rise"),
        ({**NARROW_BANDS, "adaptive_cutoffs": [0, 10]}, r"adaptive_cutoffs is \[0, 10\].*rise from 1"),
        ({**NARROW_BANDS, "adaptive_factor": 0}, "adaptive_factor is 0.*at least 1"),
        ({**NARROW_BANDS, "adaptive_factor": 5}, "adaptive_factor is 5: 3 bands .* from 16 down to 0.64"),
        ({**NARROW_BANDS, "embedding_rank": 4}, "embedding_rank is 4, but embedding='adaptive' has narrow bands"),
    ],
    "partialformer": [
        ({"head_scaling": False}, "head_scaling is False, and encoder.* = 5 x 6 = 30 is not d_model 16.*equal"),
        (
            {"head_scaling": False, "encoder_attention_heads": 4, "head_dim": 4},
            "decoder.* = 3 x 4 = 12 is not d_model 16",
        ),
        ({"head_dim": 0}, "head_dim is 0; it is at least 1"),
        ({"encoder_attention_heads": 0}, "encoder_attention_heads is 0; it is at least 1"),
        ({"encoder_ffn_expansion": 0}, "encoder_ffn_expansion is 0; it is at least 1"),
        ({"encoder_groups": 3}, r"encoder_groups is 3, but 4 layers form equal groups only for \[1, 2, 4\]"),
        ({"gate_activation": "gelu"}, "gate_activation is 'gelu'; it is one of relu, sigmoid, tanh"),
        ({"global_attention": "all"}, "global_attention is 'all'; it is one of content, none, relative"),
        ({"encoder_ffn_in": "cross"}, "encoder_ffn_in is 'cross'; it is one of none, self"),
        ({"encoder_style": "plain"}, "encoder_style is 'plain'; it is one of partial, vanilla"),
        ({**VANILLA, "base_attention_heads": 3}, "base_attention_heads is 3, which .* d_model 16; these do: 1, 2, 4"),
        ({"vanilla_head_scaling": True}, "vanilla_head_scaling is True, but neither encoder_style nor decoder_style"),
        ({"embedding": "safe"}, "embedding is 'safe'; it is one of adaptive, full"),
    ],
}


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [(family, fields, message) for family, cases in IMPOSSIBLE.items() for fields, message in cases],
)
def test_impossible_fields(family, fields, message):
    with pytest.raises(ValueError, match=message):
        config_class(family)(**{**FIELDS[family], **fields})


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("lightformer", "d_model", "16"),
        ("lightformer", "attention_rank", 2.5),
        ("lightformer", "joint_qkv", "yes"),
        ("subformer", "embedding_dim", 2.5),
        ("subformer", "normalize_before", "yes"),
        ("partialformer", "head_dim", "16"),
        ("partialformer", "encoder_groups", 2.5),
    ],
)
def test_wrong_types(family, field, value):
    with pytest.raises(Exception, match=field):
        config_class(family)(**{**FIELDS[family], field: value})


@pytest.mark.parametrize(
    ("family", "allowed"), [("subformer", "'safe', 'linear', 'full'"), ("partialformer", "has 'full'")]
)
def test_adaptive_is_for_causal_language_models(family, allowed):
    bands = NARROW_BANDS if family == "subformer" else ADAPTIVE
    with pytest.raises(ValueError, match=f"'adaptive', which is for causal language models.*{allowed}"):
        model_class("ConditionalGeneration", family)(config_class(family)(**{**FIELDS[family], **bands}))


@pytest.mark.parametrize("variant", ["lightformer", "subformer-sandwich", "partialformer"])
@pytest.mark.parametrize("head", ["ConditionalGeneration", "CausalLM"])
def test_one_vocabulary_has_one_size(variant, head, tmp_path):
    """Which is a number in `config.json`; files of 0.1.0 have `null` there."""
    build = model_class(head, variant.partition("-")[0])
    config = make_config(variant)
    config.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["decoder_vocab_size"] == content["vocab_size"] == 40
    (tmp_path / "config.json").write_text(json.dumps(content | {"decoder_vocab_size": None, "vocab_size": 50}))
    model = build(AutoConfig.from_pretrained(tmp_path)).eval()
    assert model.get_output_embeddings().weight.shape[0] == model.config.decoder_vocab_size == 50
    config.vocab_size = 50
    assert config.decoder_vocab_size == 50
    config.decoder_vocab_size = 40
    with pytest.raises(ValueError, match="decoder_vocab_size is 40 and vocab_size 50: set both equal"):
        build(config)


def test_two_vocabularies_stay_two():
    config = make_config("lightformer-two-vocabularies")
    config.vocab_size = 60
    assert config.decoder_vocab_size == 32
    assert config_class("lightformer")(**config.to_dict()).decoder_vocab_size == 32


@pytest.mark.parametrize("variant", ["lightformer", "subformer-sandwich", "partialformer"])
def test_what_was_changed_is_checked_when_a_model_is_made(variant):
    config = make_config(variant)
    config.dropout = 7.0
    with pytest.raises(ValueError, match=r"dropout is 7.0"):
        model_class("ConditionalGeneration", variant.partition("-")[0])(config)


@pytest.mark.parametrize(
    ("name", "near"),
    [("attention_ranks", "attention_rank"), ("d_modle", "d_model"), ("num_decoder_layers", "decoder_layers")],
)
def test_a_misspelt_field_is_named(name, near, monkeypatch, tmp_path):
    said = []
    monkeypatch.setattr("lightformers_hf.models.configuration_lightformer.logger.warning", said.append)
    config = config_class("lightformer")(**{name: 3})
    assert said == [f"LightFormerConfig has no field {name!r}, which has no effect: {near!r} is one"]
    for variant in ("lightformer", "subformer-sandwich", "partialformer"):
        make_config(variant).save_pretrained(tmp_path / variant)
        known = json.loads((tmp_path / variant / "config.json").read_text())
        others = {"num_labels": 3, "forced_bos_token_id": 1, "num_beams": 4, "max_length": 9, "torch_dtype": "float32"}
        AutoConfig.for_model(**known | others)
        type(make_config(variant))(**make_config(variant).to_dict() | others)
    assert len(said) == 1, said
    assert config.attention_rank is None


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


def test_relative_positions_have_no_limit_and_no_flash_attention():
    config = LightFormerConfig(**TINY["lightformer"], position_embedding_type="relative")
    assert config.max_position_embeddings is None
    assert LightFormerConfig(**config.to_dict()).max_position_embeddings is None
    config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="does not support Flash Attention"):
        LightFormerModel(config)


@pytest.mark.parametrize(
    "model_class", [LightFormerModel, LightFormerForConditionalGeneration, LightFormerForCausalLM]
)
def test_word_vectors_are_for_classification(model_class):
    config = LightFormerConfig(**TINY["lightformer"], embedding_dim=10)
    with pytest.raises(ValueError, match="embedding_dim"):
        model_class(config)
    assert LightFormerForSequenceClassification(config).get_input_embeddings().weight.shape == (40, 10)


@given(st.integers(1, 6), st.integers(1, 6))
def test_groups_are_contiguous_and_equal(groups, size):
    expected = [index for index in range(groups) for _ in range(size)]
    assert group_layers(groups * size, groups) == expected
    stack = LayerStack(lambda index: torch.nn.Identity(), expected)
    assert len(stack) == groups
    for depth, (layer, slots) in enumerate(stack.by_depth()):
        assert layer is stack[depth // size]
        assert slots == {"layer_idx": depth, "cross_layer_idx": depth // size * size}


def test_every_head_has_a_width_that_tools_can_read(tmp_path):
    config = LightFormerConfig(d_model=96, encoder_attention_heads=6, decoder_attention_heads=6)
    assert config.head_dim == 16
    assert LightFormerConfig(head_dim=24).head_dim == 24
    causal = LightFormerForCausalLM(LightFormerConfig(**TINY["lightformer"])).config
    assert causal.head_dim == 8
    config.save_pretrained(tmp_path)
    assert LightFormerConfig.from_pretrained(tmp_path).head_dim == 16


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


@pytest.mark.parametrize(
    ("width", "heads"),
    [(64, 1), (768, 12), (1024, 16), (2048, 16), (640, 8), (350, 10), (256, 4), (512, 8), (3072, 24)],
)
def test_default_heads(width, heads):
    """Width 64 where it divides, 128 above 1024, 80 at 640, otherwise 10 heads."""
    assert default_heads(width) == heads
    config = SubformerConfig(sandwich_dim=width, embedding_dim=width)
    assert (config.sandwich_attention_heads, config.embedding_attention_heads) == (heads, heads)


def test_defaults_of_subformer():
    config = SubformerConfig(d_model=512, ffn_dim=2048)
    assert (config.embedding, config.sharing) == ("safe", "sandwich")
    assert (config.embedding_dim, config.embedding_attention_heads) == (256, 4)
    assert (config.sandwich_dim, config.sandwich_ffn_dim, config.sandwich_attention_heads) == (512, 2048, 8)
    assert SubformerConfig(d_model=512, embedding="linear").embedding_dim == 256
    assert SubformerConfig(d_model=512, embedding="full").embedding_dim == 512
    assert SubformerConfig(d_model=512, embedding="adaptive", adaptive_cutoffs=[100]).embedding_dim == 512
    assert config.projection_dropout == 0.05


@pytest.mark.parametrize(
    ("sharing", "stored"),
    [
        ("sandwich", [0, 1, 1, 1, 1, 2]),
        ("all", [0, 0, 0, 0, 0, 0]),
        ("all_independent_ffn", [0, 0, 0, 0, 0, 0]),
        ("all_except_last", [0, 0, 0, 0, 0, 1]),
        ("every_2", [0, 0, 1, 1, 2, 2]),
        ("none", [0, 1, 2, 3, 4, 5]),
    ],
)
def test_stored_layers(sharing, stored):
    """§2.2, which counts from 1: the sandwich is 2 to L−1, pairs are [1, 2], [3, 4], [5, 6]."""
    assert stored_at(sharing, 6) == stored
    with torch.device("meta"):
        model = SubformerModel(SubformerConfig(**{**SUBFORMER, "sharing": sharing, "encoder_layers": 6}))
    assert len(model.encoder.layers) == max(stored) + 1
    own_ffn = [hasattr(depth, "fc1") for depth in model.encoder.depths]
    assert own_ffn == [sharing == "all_independent_ffn"] * 6


@pytest.mark.parametrize("sharing", SHARINGS)
def test_the_fewest_layers(sharing):
    layers = {"sandwich": 3, "all_except_last": 3, "every_2": 2}.get(sharing, 1)
    fields = {**SUBFORMER, "sharing": sharing, "encoder_layers": layers, "decoder_layers": layers}
    logits = SubformerForConditionalGeneration(SubformerConfig(**fields))(
        torch.tensor([[4, 5]]), decoder_input_ids=torch.tensor([[2, 6, 7]])
    ).logits
    assert logits.shape == (1, 3, 40)


def test_a_causal_subformer_keeps_its_configuration(tmp_path):
    """The caller's configuration stays an encoder-decoder's; the model's says pre-norm, and survives JSON."""
    config = SubformerConfig(**{**SUBFORMER, **NARROW_BANDS})
    before = config.to_dict()
    model = SubformerForCausalLM(config)
    assert config.to_dict() == before
    assert config.is_encoder_decoder
    assert (model.config.normalize_before, model.config.is_encoder_decoder) == (True, False)
    assert SubformerForCausalLM(SubformerConfig(**SUBFORMER, normalize_before=False)).config.normalize_before is False
    model.config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).to_dict() | {"_name_or_path": ""} == model.config.to_dict()


def test_heads_are_free_of_the_width_under_head_scaling():
    """d_k·H need not be d, nor base_attention_heads·d_k; vanilla layers with head scaling need not divide d either."""
    fields = {**PARTIALFORMER, "base_attention_heads": 3, "vanilla_head_scaling": True, "decoder_style": "vanilla"}
    with torch.device("meta"):
        model = PartialFormerModel(PartialFormerConfig(**fields))
    partial, vanilla = model.encoder.layers[0].self_attn, model.decoder.layers[0].self_attn
    assert partial.in_proj.weight.shape == (6 * (3 + 3 + 5 + 5), 16)
    assert vanilla.in_proj.weight.shape == (6 * (3 + 3 + 3), 16)
    assert (partial.expand.weight.shape, partial.mix.weight.shape) == ((5, 3), (5, 5))
    assert model.decoder.layers[0].fc1.weight.shape == (64, 16)


def test_an_encoder_that_is_not_there_is_not_checked():
    fields = {**PARTIALFORMER, "head_scaling": False, "decoder_attention_heads": 2, "head_dim": 8}
    with pytest.raises(ValueError, match="encoder_attention_heads"):
        PartialFormerConfig(**fields)
    assert PartialFormerForCausalLM(PartialFormerConfig(**fields, is_encoder_decoder=False)).config.decoder_layers == 2
