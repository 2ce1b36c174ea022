"""PartialFormerConfig: errors that name field, value and remedy; defaults; what survives JSON."""

import pytest
import torch
from transformers import AutoConfig

from lightformers_hf.models import (
    PartialFormerConfig,
    PartialFormerForCausalLM,
    PartialFormerForConditionalGeneration,
    PartialFormerModel,
)

pytestmark = pytest.mark.quick

TINY = {
    "vocab_size": 40,
    "d_model": 16,
    "encoder_layers": 4,
    "decoder_layers": 2,
    "encoder_attention_heads": 5,
    "decoder_attention_heads": 3,
    "head_dim": 6,
    "base_attention_heads": 2,
    "max_position_embeddings": 32,
}
ADAPTIVE = {"embedding": "adaptive", "adaptive_cutoffs": [10, 20], "adaptive_factor": 2}
VANILLA = {"encoder_style": "vanilla"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"head_scaling": False},
            "head_scaling is False, and encoder_attention_heads x head_dim = 5 x 6 = 30 is not d_model 16.*equal",
        ),
        (
            {"head_scaling": False, "encoder_attention_heads": 4, "head_dim": 4},
            "head_scaling is False, and decoder_attention_heads x head_dim = 3 x 4 = 12 is not d_model 16.*equal",
        ),
        ({"head_dim": 0}, "head_dim is 0; it is at least 1"),
        ({"base_attention_heads": 0}, "base_attention_heads is 0; it is at least 1"),
        ({"max_relative_position": 0}, "max_relative_position is 0; it is at least 1"),
        ({"encoder_attention_heads": 0}, "encoder_attention_heads is 0; it is at least 1"),
        ({"decoder_attention_heads": -1}, "decoder_attention_heads is -1; it is at least 1"),
        ({"encoder_ffn_expansion": 0}, "encoder_ffn_expansion is 0; it is at least 1"),
        ({"decoder_ffn_expansion": 0}, "decoder_ffn_expansion is 0; it is at least 1"),
        ({"encoder_groups": 3}, r"encoder_groups is 3, but 4 layers form equal groups only for \[1, 2, 4\]"),
        ({"decoder_groups": 0}, r"decoder_groups is 0, but 2 layers form equal groups only for \[1, 2\]"),
        ({"encoder_groups": 8}, r"encoder_groups is 8, but 4 layers form equal groups only for \[1, 2, 4\]"),
        ({"encoder_layers": 0}, "encoder_layers is 0; it is at least 1"),
        ({"decoder_layers": 0}, "decoder_layers is 0; it is at least 1"),
        ({"gate_activation": "gelu"}, "gate_activation is 'gelu'; it is one of relu, sigmoid, tanh"),
        ({"global_attention": "all"}, "global_attention is 'all'; it is one of content, none, relative"),
        ({"encoder_ffn_in": "cross"}, "encoder_ffn_in is 'cross'; it is one of none, self"),
        ({"decoder_ffn_in": "all"}, "decoder_ffn_in is 'all'; it is one of both, cross, none, self"),
        ({"encoder_style": "plain"}, "encoder_style is 'plain'; it is one of partial, vanilla"),
        ({"decoder_style": "plain"}, "decoder_style is 'plain'; it is one of partial, vanilla"),
        (
            {**VANILLA, "base_attention_heads": 3},
            "base_attention_heads is 3, which does not divide d_model 16; these do: 1, 2, 4, 8, 16",
        ),
        ({"vanilla_head_scaling": True}, "vanilla_head_scaling is True, but neither encoder_style nor decoder_style"),
        ({"embedding": "safe"}, "embedding is 'safe'; it is one of adaptive, full"),
        ({**ADAPTIVE, "adaptive_cutoffs": None}, "adaptive_cutoffs is None.*rise from 1 to below.*40 tokens"),
        ({**ADAPTIVE, "adaptive_cutoffs": [10, 40]}, r"adaptive_cutoffs is \[10, 40\].*below.*40 tokens"),
        ({**ADAPTIVE, "adaptive_factor": 5}, "adaptive_factor is 5: 3 bands would have widths from 16 down to 0.64"),
        ({**ADAPTIVE, "embedding_rank": 4}, "embedding_rank is 4, but embedding='adaptive' has narrow bands"),
        ({"decoder_ffn_rank": 0}, "decoder_ffn_rank is 0; a rank is at least 1, and None means dense"),
        ({"rank_pattern": {"in_proj": -2}}, r"rank_pattern\['in_proj'\] is -2; a rank is at least 1"),
        ({"rank_pattern": {"*": 3}}, r"rank_pattern has '\*', which is no regular expression"),
        ({"activation_function": "sine"}, "activation_function is 'sine'; it is one of .*gelu"),
        ({"decoder_vocab_size": 30}, "decoder_vocab_size is 30 and vocab_size 40.*share_encoder_decoder_emb.*=False"),
    ],
)
def test_impossible_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        PartialFormerConfig(**{**TINY, **fields})


@pytest.mark.parametrize("fields", [{"head_dim": "16"}, {"encoder_groups": 2.5}, {"head_scaling": "yes"}])
def test_wrong_types(fields):
    with pytest.raises(Exception, match=next(iter(fields))):
        PartialFormerConfig(**{**TINY, **fields})


def test_ranks_that_no_matrix_allows():
    with pytest.raises(ValueError, match=r"rank of encoder.layers.0.self_attn.fc1 is 7; a 6x24 matrix.*rank_pattern"):
        PartialFormerModel(PartialFormerConfig(**TINY, ffn_rank=7))


def test_adaptive_is_for_causal_language_models():
    with pytest.raises(ValueError, match=r"embedding is 'adaptive', which is for causal language models.*has 'full'"):
        PartialFormerForConditionalGeneration(PartialFormerConfig(**{**TINY, **ADAPTIVE}))


def test_heads_are_free_of_the_width_under_head_scaling():
    """d_k·H need not be d, nor base_attention_heads·d_k; vanilla layers with head scaling need not divide d either."""
    fields = {**TINY, "base_attention_heads": 3, "vanilla_head_scaling": True, "decoder_style": "vanilla"}
    with torch.device("meta"):
        model = PartialFormerModel(PartialFormerConfig(**fields))
    partial, vanilla = model.encoder.layers[0].self_attn, model.decoder.layers[0].self_attn
    assert partial.in_proj.weight.shape == (6 * (3 + 3 + 5 + 5), 16)
    assert vanilla.in_proj.weight.shape == (6 * (3 + 3 + 3), 16)
    assert (partial.expand.weight.shape, partial.mix.weight.shape) == ((5, 3), (5, 5))
    assert model.decoder.layers[0].fc1.weight.shape == (64, 16)


def test_defaults():
    """§4 and the released code: ρ is 4 and 2, 8 base heads, ReLU gates, residual-like attention from the content."""
    config = PartialFormerConfig()
    assert (config.encoder_ffn_expansion, config.decoder_ffn_expansion, config.base_attention_heads) == (4, 2, 8)
    assert (config.gate_activation, config.global_attention, config.ffn_residual) == ("relu", "content", True)
    assert (config.encoder_style, config.decoder_style, config.head_scaling) == ("partial", "partial", True)
    assert (config.encoder_ffn_in, config.decoder_ffn_in, config.ffn_glu) == ("self", "both", False)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"encoder_groups": 2, "decoder_groups": 1, "ffn_glu": True, "activation_function": "silu"},
        {**VANILLA, "vanilla_head_scaling": True, "global_attention": "relative", "max_relative_position": 3},
        {**ADAPTIVE, "rank_pattern": {"in_proj": 3, "fc[12]": None}, "decoder_ffn_rank": 2},
        {"head_scaling": False, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "head_dim": 8},
    ],
)
def test_json_round_trip(fields, tmp_path):
    config = PartialFormerConfig(**{**TINY, **fields})
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is PartialFormerConfig
    assert loaded.to_dict() | {"_name_or_path": ""} == config.to_dict()
    assert {name: getattr(loaded, name) for name in fields} == fields


def test_causal_language_model_keeps_its_configuration(tmp_path):
    config = PartialFormerConfig(**{**TINY, **ADAPTIVE})
    before = config.to_dict()
    model = PartialFormerForCausalLM(config)
    assert config.to_dict() == before
    assert (config.is_encoder_decoder, model.config.is_encoder_decoder) == (True, False)
    model.config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).to_dict() | {"_name_or_path": ""} == model.config.to_dict()


def test_an_encoder_that_is_not_there_is_not_checked():
    fields = {**TINY, "head_scaling": False, "decoder_attention_heads": 2, "head_dim": 8}
    with pytest.raises(ValueError, match="encoder_attention_heads"):
        PartialFormerConfig(**fields)
    assert PartialFormerForCausalLM(PartialFormerConfig(**fields, is_encoder_decoder=False)).config.decoder_layers == 2
