"""SubformerConfig: errors that name field, value and remedy; defaults; what survives JSON."""

import pytest
import torch
from transformers import AutoConfig

from lightformers_hf.models import (
    SubformerConfig,
    SubformerForCausalLM,
    SubformerForConditionalGeneration,
    SubformerModel,
)
from lightformers_hf.models.configuration_subformer import SHARINGS, default_heads
from lightformers_hf.models.modeling_subformer import stored_at

pytestmark = pytest.mark.quick

TINY = {
    "vocab_size": 40,
    "d_model": 16,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "ffn_dim": 24,
    "sandwich_attention_heads": 2,
    "embedding_dim": 8,
    "embedding_attention_heads": 2,
    "max_position_embeddings": 32,
}
ADAPTIVE = {"embedding": "adaptive", "embedding_dim": None, "adaptive_cutoffs": [10, 20], "adaptive_factor": 2}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sharing": "sandwhich"}, "sharing is 'sandwhich'; it is one of all, .*every_2, none, sandwich"),
        ({"encoder_layers": 2}, "sharing='sandwich' needs 3 layers or more, encoder_layers is 2"),
        ({"decoder_layers": 1}, "sharing='sandwich' needs 3 layers or more, decoder_layers is 1"),
        ({"sharing": "all_except_last", "decoder_layers": 2}, "'all_except_last' needs 3 layers.*decoder_layers is 2"),
        ({"sharing": "every_2", "encoder_layers": 5}, "every_2' needs an even number of layers, encoder_layers is 5"),
        ({"sharing": "none", "decoder_layers": 0}, "decoder_layers is 0; it is at least 1"),
        (
            {"sandwich_dim": 15, "sandwich_attention_heads": 4},
            "sandwich_attention_heads is 4, which does not divide sandwich_dim 15; these do: 1, 3, 5, 15",
        ),
        (
            {"sandwich_dim": 17, "sandwich_attention_heads": None},
            "sandwich_attention_heads is 10, which does not divide sandwich_dim 17; these do: 1, 17",
        ),
        (
            {"sharing": "all", "sandwich_dim": 24},
            "sandwich_dim is 24, but sharing='all' has no sandwich.*None.*16.*sharing='sandwich'",
        ),
        (
            {"sharing": "none", "sandwich_ffn_dim": 30},
            "sandwich_ffn_dim is 30, but sharing='none' has no sandwich.*None.*24.*sharing='sandwich'",
        ),
        ({"encoder_attention_heads": 3}, "encoder_attention_heads is 3, which does not divide d_model 16.*1, 2, 4"),
        ({"decoder_attention_heads": 0}, "decoder_attention_heads is 0, which does not divide d_model 16"),
        (
            {"embedding_attention_heads": 3},
            "embedding_attention_heads is 3, which does not divide embedding_dim 8; these do: 1, 2, 4, 8",
        ),
        ({"embedding": "save"}, "embedding is 'save'; it is one of adaptive, full, linear, safe"),
        ({"embedding": "full"}, "embedding_dim is 8, but embedding='full' is d_model wide.*None.*16.*'linear'"),
        ({**ADAPTIVE, "embedding_dim": 8}, "embedding_dim is 8, but embedding='adaptive' is d_model wide.*None"),
        ({"embedding_dim": -8}, "embedding_dim is -8; it is at least 1"),
        ({"sandwich_dim": -8}, "sandwich_dim is -8; it is at least 1"),
        ({"sandwich_ffn_dim": -8}, "sandwich_ffn_dim is -8; it is at least 1"),
        ({"ffn_dim": 0}, "ffn_dim is 0; it is at least 1"),
        ({**ADAPTIVE, "adaptive_cutoffs": None}, "adaptive_cutoffs is None.*rise from 1 to below.*40 tokens"),
        ({**ADAPTIVE, "adaptive_cutoffs": []}, r"adaptive_cutoffs is \[\].*rise from 1 to below.*40 tokens"),
        ({**ADAPTIVE, "adaptive_cutoffs": [10, 40]}, r"adaptive_cutoffs is \[10, 40\].*below.*40 tokens"),
        ({**ADAPTIVE, "adaptive_cutoffs": [10, 41]}, r"adaptive_cutoffs is \[10, 41\].*below.*40 tokens"),
        ({**ADAPTIVE, "adaptive_cutoffs": [20, 10]}, r"adaptive_cutoffs is \[20, 10\].*rise"),
        ({**ADAPTIVE, "adaptive_cutoffs": [10, 10]}, r"adaptive_cutoffs is \[10, 10\].*rise"),
        ({**ADAPTIVE, "adaptive_cutoffs": [0, 10]}, r"adaptive_cutoffs is \[0, 10\].*rise from 1"),
        ({**ADAPTIVE, "adaptive_factor": 0}, "adaptive_factor is 0.*at least 1"),
        ({**ADAPTIVE, "adaptive_factor": 5}, "adaptive_factor is 5: 3 bands would have widths from 16 down to 0.64"),
        ({**ADAPTIVE, "embedding_rank": 4}, "embedding_rank is 4, but embedding='adaptive' has narrow bands"),
        ({"attention_rank": 0}, "attention_rank is 0; a rank is at least 1, and None means dense"),
        ({"rank_pattern": {"up.projection": 0}}, r"rank_pattern\['up.projection'\] is 0; a rank is at least 1"),
        ({"rank_pattern": {"up(": 3}}, r"rank_pattern has 'up\(', which is no regular expression"),
        ({"activation_function": "sine"}, "activation_function is 'sine'; it is one of .*gelu"),
        ({"decoder_vocab_size": 30}, "decoder_vocab_size is 30 and vocab_size 40.*share_encoder_decoder_emb.*=False"),
    ],
)
def test_impossible_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        SubformerConfig(**{**TINY, **fields})


@pytest.mark.parametrize("fields", [{"sandwich_dim": "16"}, {"embedding_dim": 2.5}, {"normalize_before": "yes"}])
def test_wrong_types(fields):
    with pytest.raises(Exception, match=next(iter(fields))):
        SubformerConfig(**{**TINY, **fields})


def test_ranks_that_no_matrix_allows():
    config = SubformerConfig(**{**TINY, "sandwich_dim": 12, "attention_rank": 9, "sharing": "sandwich"})
    with pytest.raises(ValueError, match=r"rank of encoder.safe.attn.q_proj is 9; a 8x8 matrix.*rank_pattern"):
        SubformerModel(config)


def test_adaptive_is_for_causal_language_models():
    with pytest.raises(ValueError, match=r"'adaptive', which is for causal language models.*'safe', 'linear', 'full'"):
        SubformerForConditionalGeneration(SubformerConfig(**{**TINY, **ADAPTIVE}))


@pytest.mark.parametrize(
    ("width", "heads"),
    [(64, 1), (768, 12), (1024, 16), (2048, 16), (640, 8), (350, 10), (256, 4), (512, 8), (3072, 24)],
)
def test_default_heads(width, heads):
    """Width 64 where it divides, 128 above 1024, 80 at 640, otherwise 10 heads."""
    assert default_heads(width) == heads
    config = SubformerConfig(sandwich_dim=width, embedding_dim=width)
    assert (config.sandwich_attention_heads, config.embedding_attention_heads) == (heads, heads)


def test_defaults():
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
        model = SubformerModel(SubformerConfig(**{**TINY, "sharing": sharing, "encoder_layers": 6}))
    assert len(model.encoder.layers) == max(stored) + 1
    own_ffn = [hasattr(depth, "fc1") for depth in model.encoder.depths]
    assert own_ffn == [sharing == "all_independent_ffn"] * 6


@pytest.mark.parametrize("sharing", SHARINGS)
def test_the_fewest_layers(sharing):
    layers = {"sandwich": 3, "all_except_last": 3, "every_2": 2}.get(sharing, 1)
    fields = {**TINY, "sharing": sharing, "encoder_layers": layers, "decoder_layers": layers}
    logits = SubformerForConditionalGeneration(SubformerConfig(**fields))(
        torch.tensor([[4, 5]]), decoder_input_ids=torch.tensor([[2, 6, 7]])
    ).logits
    assert logits.shape == (1, 3, 40)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sandwich_dim": 24, "sandwich_ffn_dim": 40, "sandwich_attention_heads": 3},
        {"sharing": "every_2", "embedding": "full", "embedding_dim": None, "normalize_before": True},
        {**ADAPTIVE, "rank_pattern": {"fc1": 3, "up": None}, "decoder_ffn_rank": 2},
        {"embedding": "linear", "attention_rank": 4, "share_encoder_decoder_embeddings": False},
    ],
)
def test_json_round_trip(fields, tmp_path):
    config = SubformerConfig(**{**TINY, **fields})
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is SubformerConfig
    assert loaded.to_dict() | {"_name_or_path": ""} == config.to_dict()
    assert {name: getattr(loaded, name) for name, value in fields.items() if value is not None} == {
        name: value for name, value in fields.items() if value is not None
    }


def test_causal_language_model_keeps_its_configuration(tmp_path):
    """The caller's configuration stays an encoder-decoder's; the model's says pre-norm, and survives JSON."""
    config = SubformerConfig(**{**TINY, **ADAPTIVE})
    before = config.to_dict()
    model = SubformerForCausalLM(config)
    assert config.to_dict() == before
    assert config.is_encoder_decoder
    assert (model.config.normalize_before, model.config.is_encoder_decoder) == (True, False)
    assert SubformerForCausalLM(SubformerConfig(**TINY, normalize_before=False)).config.normalize_before is False
    model.config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).to_dict() | {"_name_or_path": ""} == model.config.to_dict()
