"""Subformer against references written from its equations, in float64 to 1e-10."""

import pytest
import torch
from models import references
from models.references import SOURCES, TARGETS, Weights, double_model, padded

from lightformers_hf.models import SubformerConfig, SubformerForCausalLM, SubformerForConditionalGeneration

pytestmark = pytest.mark.quick

TINY = {
    "vocab_size": 24,
    "d_model": 12,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 2,
    "ffn_dim": 14,
    "sandwich_attention_heads": 4,
    "embedding_dim": 10,
    "embedding_attention_heads": 5,
    "max_position_embeddings": 16,
    "dropout": 0.1,
}
SANDWICH = {"sandwich_dim": 16, "sandwich_ffn_dim": 22}
VARIANTS = {
    "sandwich": SANDWICH,
    "sandwich_narrower": {"sandwich_dim": 8, "sandwich_ffn_dim": 9},
    "sandwich_same_width": {"sandwich_ffn_dim": 18},
    "three_layers": {**SANDWICH, "encoder_layers": 3, "decoder_layers": 5},
    "all": {"sharing": "all"},
    "all_independent_ffn": {"sharing": "all_independent_ffn"},
    "all_except_last": {"sharing": "all_except_last"},
    "every_2": {"sharing": "every_2"},
    "none": {"sharing": "none"},
    "linear": {**SANDWICH, "embedding": "linear", "embedding_dim": 7},
    "two_layers": {**SANDWICH, "embedding": "linear", "embedding_inner_dim": 9, "output_inner_dim": 8},
    "safe_two_layers": {"output_inner_dim": 8, "ffn_rank": 3},
    "full": {**SANDWICH, "embedding": "full", "embedding_dim": None},
    "released_scale": {**SANDWICH, "decoder_embedding_scale": 12**0.5},
    "odd_widths": {"embedding_dim": 5, "embedding_attention_heads": 1, "sharing": "none"},
    "two_tables": {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 30, "sharing": "all"},
    "low_rank": {**SANDWICH, "attention_rank": 3, "ffn_rank": 4, "embedding_rank": 6, "decoder_ffn_rank": 2},
}
ADAPTIVE = {"embedding": "adaptive", "embedding_dim": None, "adaptive_cutoffs": [9, 15], "adaptive_factor": 3}
CAUSAL = {
    "adaptive": {**SANDWICH, **ADAPTIVE},
    "adaptive_untied": {**SANDWICH, **ADAPTIVE, "tie_word_embeddings": False},
    "safe": SANDWICH,
    "linear_every_2": {"embedding": "linear", "sharing": "every_2"},
    "full_none": {"embedding": "full", "embedding_dim": None, "sharing": "none"},
}


def make(variant: dict, model_class=SubformerForConditionalGeneration, seed: int = 0, **fields):
    return double_model(model_class, SubformerConfig(**{**TINY, **variant, **fields}), seed)


@pytest.mark.parametrize("side", ["right", "left", None])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(variant, side):
    references.check_logits(make(VARIANTS[variant]), references.subformer_logits, side)


@pytest.mark.parametrize("side", ["right", "left"])
def test_logits_with_eager_attention(side):
    model = make(SANDWICH, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    references.check_logits(model, references.subformer_logits, side)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("variant", CAUSAL)
def test_causal_logits(variant, side):
    references.check_causal_logits(
        make(CAUSAL[variant], SubformerForCausalLM), references.subformer_causal_logits, side
    )


def test_pre_norm_encoder_decoder():
    model = make(SANDWICH, normalize_before=True)
    weights = Weights.of(model)

    def logits(weights, config, source, target):
        memory = references.subformer_stack(weights["model.encoder"], config, "encoder", source, pre_norm=True)
        stack = weights["model.decoder"]
        states = references.subformer_stack(stack, config, "decoder", target, memory, pre_norm=True)
        return [references.output_logits(weights, stack.table("embed_tokens"), x) for x in states]

    assert weights["model.decoder"].tensor("layer_norm.weight").shape == (12,)
    references.check_logits(model, logits, "right")


def outputs_of(model, *names: str) -> list[list[torch.Tensor]]:
    """What the modules `names` give, call by call, filled while the model runs."""
    outputs = []
    for name in names:
        calls = []
        model.get_submodule(name).register_forward_hook(lambda _, inputs, output, calls=calls: calls.append(output))
        outputs.append(calls)
    return outputs


@pytest.mark.parametrize("side", ["right", "left"])
def test_safe(side):
    """§2.1: masked where there is padding, causal in the decoder."""
    model = make({"sharing": "none", "encoder_layers": 1, "decoder_layers": 1})
    weights = Weights.of(model)
    calls = outputs_of(model, "model.encoder.safe", "model.decoder.safe")
    (source, source_mask), (target, target_mask) = padded(SOURCES, side, 1), padded(TARGETS, side, 1)
    model(source, source_mask, target, target_mask)
    for (output,), stack, sentences, mask in zip(
        calls, ("encoder", "decoder"), (SOURCES, TARGETS), (source_mask, target_mask), strict=True
    ):
        expected = [
            references.subformer_embed(weights[f"model.{stack}"], model.config, ids, causal=stack == "decoder")
            for ids in sentences
        ]
        references.assert_real_positions_equal(output, mask, expected)


def test_sandwich_cross_attention():
    """Appendix A: the query goes up to d_m, LayerNorm, attention there, down to d_s, LayerNorm."""
    model = make(SANDWICH)
    module = model.model.decoder.layers[1].encoder_attn
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2, 3, 16, dtype=torch.float64, generator=generator)
    memory = torch.randn(2, 4, 12, dtype=torch.float64, generator=generator)
    keep = torch.tensor([[True, True, True, False], [True, True, True, True]])[:, None, None]
    actual, _ = module(states, key_value_states=memory, attention_mask=keep)
    weights = Weights.of(model)["model.decoder.layers.1.encoder_attn"]
    expected = [
        references.sandwich_cross_attention(weights, list(states[row].numpy()), list(memory[row, :length].numpy()), 2)
        for row, length in enumerate((3, 4))
    ]
    references.assert_real_positions_equal(actual, torch.ones(2, 3), expected)


def test_layer_norms_are_private_and_the_rest_is_stored_once():
    model = make(SANDWICH, encoder_layers=6)
    names = [name for name, _ in model.model.encoder.named_parameters()]
    assert sum(name.endswith("self_attn_layer_norm.weight") for name in names) == 6
    assert sum(name.endswith("final_layer_norm.weight") for name in names if "depths" in name) == 6
    assert sum(name.endswith("self_attn.q_proj.weight") for name in names) == 3
    assert [tuple(depth.final_layer_norm.weight.shape) for depth in model.model.encoder.depths] == [
        (12,),
        (16,),
        (16,),
        (16,),
        (16,),
        (12,),
    ]


RANKS = {"attention_rank": 3, "ffn_rank": 4, "embedding_rank": 6}
PATTERN = {
    "up.projection": 3,
    "down.projection": 2,
    "safe.attn.[qk]_proj": 2,
    "safe.fc2": 4,
    "encoder_attn.query_projection": 3,
    "encoder_attn.attention.v_proj": 5,
    "decoder.layers.1.encoder_attn.output_projection": 1,
    "encoder.layers.0.fc1": 2,
    "lm_head.projection": 6,
    "shared": 4,
}


def factorized(model) -> set[str]:
    return {name.removesuffix(".u") for name, _ in model.named_modules() if name.endswith(".u")}


@pytest.mark.parametrize(
    "fields",
    [
        {**SANDWICH, **RANKS},
        {**SANDWICH, **RANKS, "embedding": "linear"},
        {**SANDWICH, **RANKS, "tie_word_embeddings": False},
        {"sharing": "all_independent_ffn", **RANKS, "decoder_attention_rank": 5, "decoder_ffn_rank": 2},
        {**SANDWICH, "rank_pattern": PATTERN},
    ],
)
def test_low_rank_is_its_product(fields):
    model = make(fields)
    if "rank_pattern" in fields:
        assert len(factorized(model)) == 2 + 2 + 4 + 2 + 1 + 1 + 1 + 1 + 1
    else:
        plain = {name for name, module in model.named_modules() if type(module) is torch.nn.Linear}
        assert {name for name in plain if not name.endswith((".u", ".v"))} == {"lm_head.output.output"}
    dense_fields = {field: value for field, value in fields.items() if "rank" not in field}
    dense = references.multiplied_out(model, SubformerConfig(**{**TINY, **dense_fields}))
    (source, source_mask), (target, target_mask) = padded(SOURCES, "right", 1), padded(TARGETS, "right", 1)
    batch = (source, source_mask, target, target_mask)
    torch.testing.assert_close(model(*batch).logits, dense(*batch).logits, rtol=0, atol=1e-10)
