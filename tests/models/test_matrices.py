"""Factors act as their product does, and say what they are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models.cases import TINY, make_model
from torch import nn

from lightformers_hf.matrices import bias_of, factors_of, low_rank_state, matrices_of, product_of, rank_of
from lightformers_hf.models import LightFormerConfig, LightFormerForConditionalGeneration
from lightformers_hf.models.low_rank import (
    LowRankEmbedding,
    LowRankLinear,
    from_pattern,
    make_embedding,
    make_output,
    pattern_matches,
    projections,
)

pytestmark = pytest.mark.quick


def of_rank(rank: int | None) -> LightFormerConfig:
    return LightFormerConfig(vocab_size=11, d_model=8, ffn_rank=rank, embedding_rank=rank)


MAKERS = {
    "linear": lambda rank: projections(of_rank(rank), "encoder.layers.0", "ffn")("fc1", 8, 11),
    "linear without bias": lambda rank: projections(of_rank(rank), "encoder", "ffn", bias=False)("fc1", 8, 11),
    "embedding": lambda rank: make_embedding(of_rank(rank), "encoder"),
    "output": lambda rank: make_output(of_rank(rank), "lm_head"),
}


def matrix_by_calls(module: nn.Module) -> torch.Tensor:
    """A module's matrix, m×n or V×d, read off what it makes of one-hot vectors, or of ids."""
    if isinstance(module, nn.Embedding):
        return module(torch.arange(module.num_embeddings))
    is_output = getattr(module, "kind", None) == "embedding"
    width = getattr(module, "in_features", 8)
    rows = module(torch.eye(width)) - module(torch.zeros(1, width))
    return rows.T if is_output else rows


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@torch.no_grad()
def test_a_module_says_what_it_is(make, rank):
    torch.manual_seed(0)
    module = make(rank)
    expected = matrix_by_calls(module)
    factors = factors_of(module)
    assert rank_of(module) == rank
    assert [tuple(factor.shape) for factor in factors] == (
        [tuple(expected.shape)] if rank is None else [(len(expected), rank), (rank, expected.shape[1])]
    )
    torch.testing.assert_close(product_of(module), expected)
    assert product_of(module.bfloat16()).dtype == torch.bfloat16
    assert product_of(module, torch.float64).dtype == torch.float64
    bias = [parameter for name, parameter in module.named_parameters() if name.endswith("bias")]
    assert bias_of(module) is (bias[0] if bias else None)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@torch.no_grad()
def test_the_state_of_a_low_rank_module_follows_from_the_dense_one(make):
    dense, low_rank, third = make(None), make(3), make(3)
    factors, bias = factors_of(low_rank), bias_of(low_rank)
    for module in (dense, low_rank):
        third.load_state_dict(low_rank_state(module, *factors, bias))
        assert all(map(torch.equal, factors_of(third), factors))
        assert (bias is None) == (bias_of(third) is None)
        assert bias is None or torch.equal(bias_of(third), bias)


@pytest.mark.parametrize("variant", ["lightformer", "lightformer-low-rank", "subformer-sandwich"])
def test_every_matrix_comes_once(variant):
    """By the configuration: matrices of the layers, tables and output layers, whatever their form and their ties."""
    model = make_model("ConditionalGeneration", variant)
    names = [name for name, _ in matrices_of(model)]
    assert len(names) == len(set(names))
    assert not any(name.endswith((".u", ".v", ".output", "embed_tokens")) for name in names)
    stored = {id(parameter) for parameter in model.parameters() if parameter.dim() > 1}
    found = [
        id(parameter) for _, module in matrices_of(model) for parameter in module.parameters() if parameter.dim() > 1
    ]
    assert sorted(found) == sorted(stored)


@pytest.mark.parametrize("embedding_rank", [None, 7])
def test_a_resized_output_layer_still_says_what_it_is(embedding_rank):
    model = make_model(
        "ConditionalGeneration", "lightformer", embedding_rank=embedding_rank, tie_word_embeddings=False
    )
    model.resize_token_embeddings(50)
    assert tuple(product_of(model.lm_head).shape) == (50, 16)


def test_a_table_has_no_bias():
    with pytest.raises(ValueError, match=r"bias of 4 numbers.*embedding"):
        low_rank_state(nn.Embedding(4, 5), torch.ones(4, 1), torch.ones(1, 5), torch.zeros(4))


@pytest.mark.parametrize(
    ("variant", "fields", "message"),
    [
        ("lightformer", {"attention_rank": 17}, "encoder.layers.0.self_attn.q_proj is 17"),
        ("lightformer", {"decoder_ffn_rank": 17}, "decoder.layers.0.fc1 is 17"),
        ("lightformer", {"embedding_rank": 17}, "shared is 17"),
        ("lightformer", {"rank_pattern": {r"layers\.1\.fc2": 99}}, "encoder.layers.1.fc2 is 99"),
        ("subformer-sandwich", {"attention_rank": 9}, "encoder.safe.attn.q_proj is 9; a 8x8 matrix.*rank_pattern"),
        ("partialformer", {"ffn_rank": 7}, "encoder.layers.0.self_attn.fc1 is 7; a 4x16 matrix.*rank_pattern"),
    ],
)
def test_impossible_rank_in_a_configuration(variant, fields, message):
    with pytest.raises(ValueError, match=f"rank of {message}"):
        make_model("Model", variant, **fields)


PATTERNS = {  # pattern → the names it selects
    "q_proj": lambda name: name.endswith(".q_proj"),
    "self_attn.q_proj": lambda name: name.endswith(".self_attn.q_proj"),
    r"encoder\.layers\.1\.fc1": lambda name: name == "encoder.layers.1.fc1",
    r"decoder\..*": lambda name: name.startswith("decoder."),
    "fc[12]": lambda name: name.endswith((".fc1", ".fc2")),
    r"layers\.0\..*_proj": lambda name: ".layers.0." in name and name.endswith("_proj"),
    "shared": lambda name: name == "shared",
    "proj": lambda name: False,  # no whole component of any name
    "hared": lambda name: False,
}


@settings(max_examples=25)
@given(
    pattern=st.lists(st.tuples(st.sampled_from(sorted(PATTERNS)), st.none() | st.integers(1, 8)), max_size=5),
    attention=st.none() | st.integers(1, 8),
    ffn=st.none() | st.integers(1, 8),
    decoder_attention=st.none() | st.integers(1, 8),
)
def test_every_module_has_the_rank_of_its_first_pattern(pattern, attention, ffn, decoder_attention):
    rank_pattern = dict(pattern)
    config = LightFormerConfig(
        **{**TINY["lightformer"], "encoder_layers": 2},
        rank_pattern=rank_pattern,
        attention_rank=attention,
        ffn_rank=ffn,
        decoder_attention_rank=decoder_attention,
    )
    with torch.device("meta"):
        model = LightFormerForConditionalGeneration(config).model
    kinds = {"shared": None}
    for name, _ in model.named_modules():
        if name.endswith("_proj"):
            in_decoder = name.startswith("decoder.") and decoder_attention is not None
            kinds[name] = decoder_attention if in_decoder else attention
        elif name.endswith((".fc1", ".fc2")):
            kinds[name] = ffn
    assert len(kinds) == 1 + 2 * (4 + 2) + 2 * (8 + 2)
    for name, default in kinds.items():
        expected = next((rank for key, rank in rank_pattern.items() if PATTERNS[key](name)), default)
        assert rank_of(model.get_submodule(name)) == expected, name


@given(st.from_regex(r"[a-z]{1,4}(\.[a-z0-9]{1,3}){0,3}", fullmatch=True), st.integers(0, 3))
def test_a_pattern_matches_whole_components_from_the_end(name, dropped):
    parts = name.split(".")
    tail = r"\.".join(parts[min(dropped, len(parts) - 1) :])
    assert pattern_matches(tail, name)
    assert pattern_matches(tail, f"model.{name}")
    assert not pattern_matches(tail, f"{name}.more")
    assert not pattern_matches(tail, f"x{parts[-1]}")
    assert from_pattern({tail: None, ".*": 3}, name, 5) is None


def test_a_low_rank_model_is_the_dense_one_of_its_products():
    low_rank, dense = (
        make_model("ConditionalGeneration", variant) for variant in ("lightformer-low-rank", "lightformer")
    )
    with torch.no_grad():
        for name, module in low_rank.named_modules():
            if isinstance(module, LowRankLinear):
                dense.get_submodule(name).weight.copy_(module.v.weight @ module.u.weight)
                dense.get_submodule(name).bias.copy_(module.v.bias)
            elif isinstance(module, LowRankEmbedding):
                dense.get_submodule(name).weight.copy_(module.weight @ module.basis)
            elif isinstance(module, nn.LayerNorm):
                dense.get_submodule(name).load_state_dict(module.state_dict())
        dense.final_logits_bias.copy_(low_rank.final_logits_bias)
    ids = torch.randint(4, 40, (2, 6))
    torch.testing.assert_close(
        dense(ids, decoder_input_ids=ids).logits, low_rank(ids, decoder_input_ids=ids).logits, atol=1e-4, rtol=1e-4
    )


def test_a_pattern_of_no_module_is_told(caplog):
    fields = {
        "rank_pattern": {"fcl": 2, "decoder.layers.0.fc1": 2, "q_proj|k_proj": 2},
        "head_dim_pattern": {"self": 4},
    }
    LightFormerForConditionalGeneration(LightFormerConfig(**TINY["lightformer"], **fields))
    told = caplog.text
    assert told.count("changes nothing") == 2
    assert "rank_pattern has 'fcl'" in told
    assert "head_dim_pattern has 'self'" in told
