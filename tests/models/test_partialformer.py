"""PartialFormer against references written from its equations, in float64 to 1e-10."""

import math
import re

import pytest
import torch
from models import references
from models.references import SOURCES, TARGETS, double_model, padded

from lightformers_hf.models import PartialFormerConfig, PartialFormerForCausalLM, PartialFormerForConditionalGeneration

pytestmark = pytest.mark.quick

TINY = {
    "vocab_size": 24,
    "d_model": 12,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 5,
    "decoder_attention_heads": 3,
    "head_dim": 4,
    "base_attention_heads": 2,
    "max_position_embeddings": 16,
    "dropout": 0.1,
}
UNSCALED = {"head_scaling": False, "encoder_attention_heads": 3}  # 3 heads of width 4 are d
VANILLA = {"encoder_style": "vanilla", "decoder_style": "vanilla"}
VARIANTS = {
    "default": {},
    "without_head_scaling": UNSCALED,
    "without_ffn_residual": {"ffn_residual": False},
    "glu": {"ffn_glu": True, "activation_function": "silu"},
    "glu_without_residual": {"ffn_glu": True, "ffn_residual": False, "gate_activation": "sigmoid"},
    "gate_sigmoid": {"gate_activation": "sigmoid"},
    "gate_tanh": {"gate_activation": "tanh"},
    "relative": {"global_attention": "relative", "max_relative_position": 2},
    "relative_without_head_scaling": {**UNSCALED, "global_attention": "relative", "max_relative_position": 16},
    "no_global_attention": {"global_attention": "none"},
    "no_ffn_in_encoder": {"encoder_ffn_in": "none"},
    "ffn_in_cross": {"decoder_ffn_in": "cross"},
    "ffn_in_self": {"decoder_ffn_in": "self"},
    "no_ffn": {"encoder_ffn_in": "none", "decoder_ffn_in": "none"},
    "vanilla_decoder": {"decoder_style": "vanilla"},
    "vanilla_encoder": {"encoder_style": "vanilla"},
    "vanilla": VANILLA,
    "vanilla_with_head_scaling": {**VANILLA, "vanilla_head_scaling": True},
    "groups": {"encoder_layers": 4, "encoder_groups": 2, "decoder_groups": 1},
    "vanilla_groups": {**VANILLA, "encoder_groups": 1, "decoder_layers": 4, "decoder_groups": 2},
    "two_tables": {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 30},
    "low_rank": {"attention_rank": 4, "ffn_rank": 2, "embedding_rank": 6, "decoder_attention_rank": 3},
}
ADAPTIVE = {"embedding": "adaptive", "adaptive_cutoffs": [9, 15], "adaptive_factor": 3}
CAUSAL = {
    "adaptive": ADAPTIVE,
    "adaptive_untied": {**ADAPTIVE, "tie_word_embeddings": False, "decoder_layers": 4, "decoder_groups": 2},
    "relative": {"global_attention": "relative", "max_relative_position": 3},
    "without_head_scaling": UNSCALED,
    "vanilla": VANILLA,
    "vanilla_with_head_scaling": {**VANILLA, "vanilla_head_scaling": True},
}


def make(variant: dict, model_class=PartialFormerForConditionalGeneration, seed: int = 0, **fields):
    return double_model(model_class, PartialFormerConfig(**{**TINY, **variant, **fields}), seed)


@pytest.mark.parametrize("side", ["right", "left", None])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(variant, side):
    references.check_logits(make(VARIANTS[variant]), references.partialformer_logits, side)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("variant", CAUSAL)
def test_causal_logits(variant, side):
    model = make(CAUSAL[variant], PartialFormerForCausalLM)
    references.check_causal_logits(model, references.partialformer_causal_logits, side)


PATTERN = {
    "encoder.layers.0.self_attn.in_proj": 4,
    "encoder.global_attention.in_proj": 3,
    "encoder_attn.query_proj": 5,
    "decoder.layers.1.encoder_attn.memory_proj": 2,
    "out_proj": 6,
    "decoder.layers.[01].self_attn.fc1": 2,
    "encoder_attn.fc2": 3,
    "shared": 7,
}
RANKS = {"attention_rank": 4, "ffn_rank": 2, "embedding_rank": 6}


@pytest.mark.parametrize(
    "fields",
    [
        RANKS,
        {**RANKS, "ffn_glu": True, "decoder_attention_rank": 3, "decoder_ffn_rank": 1},
        {**RANKS, **VANILLA},
        {**RANKS, "tie_word_embeddings": False, "global_attention": "relative"},
        {"rank_pattern": PATTERN},
        {**RANKS, "rank_pattern": {"decoder": 2, "out_proj": None, "shared": None}},
    ],
)
def test_low_rank_is_its_product(fields):
    model = make(fields)
    factorized = {name.removesuffix(".u") for name, _ in model.named_modules() if name.endswith(".u")}
    plain = {
        name
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear and not name.endswith((".u", ".v", ".expand", ".mix"))
    }
    if fields.get("rank_pattern") == PATTERN:
        assert len(factorized) == 1 + 1 + 2 + 1 + 6 + 2 + 2
    elif "rank_pattern" in fields:
        outputs = {name for name in plain if name.endswith("out_proj")}
        assert len(outputs) == 6
        assert plain == {*outputs, "lm_head"}
        assert type(model.model.shared) is torch.nn.Embedding
    else:
        assert plain == {"lm_head.output"}  # every other one is a product
    dense_fields = {field: value for field, value in fields.items() if "rank" not in field}
    dense = references.multiplied_out(model, PartialFormerConfig(**{**TINY, **dense_fields}))
    (source, source_mask), (target, target_mask) = padded(SOURCES, "right", 1), padded(TARGETS, "right", 1)
    batch = (source, source_mask, target, target_mask)
    torch.testing.assert_close(model(*batch).logits, dense(*batch).logits, rtol=0, atol=1e-10)


def in_units_of_xavier(matrix: torch.Tensor) -> float:
    """Standard deviation of a matrix, Xavier's being 1."""
    return matrix.std().item() / math.sqrt(2 / sum(matrix.shape))


@pytest.mark.parametrize(
    "variant", [{}, {"head_scaling": False, "encoder_attention_heads": 4, "decoder_attention_heads": 4}]
)
def test_initialisation(variant):
    torch.manual_seed(0)
    sizes = {
        "d_model": 128,
        "head_dim": 32,
        "base_attention_heads": 2,
        "encoder_attention_heads": 9,
        "decoder_attention_heads": 6,
        "vocab_size": 500,
    }
    config = PartialFormerConfig(**{**TINY, **sizes, **variant, "init_std": None})
    model = PartialFormerForConditionalGeneration(config)
    joint = 2**-0.5
    end = {"encoder": (2 * config.encoder_layers) ** -0.5, "decoder": 1}
    for stack, heads in (("encoder", config.encoder_attention_heads), ("decoder", config.decoder_attention_heads)):
        base = 2 if config.head_scaling else heads
        layer = model.model.get_submodule(stack).layers[0]
        q = k = base * 32
        v = gate = heads * 32
        parts = [(layer.self_attn.in_proj, [q, k, v, gate])]
        parts.append((model.model.get_submodule(stack).global_attention.in_proj, [heads * 32] * 2))
        if stack == "decoder":
            parts += [(layer.encoder_attn.query_proj, [q, gate]), (layer.encoder_attn.memory_proj, [k, v])]
        for module, widths in parts:
            assert len(module.weight) == sum(widths)
            for part in module.weight.split(widths):
                assert in_units_of_xavier(part) == pytest.approx(joint, rel=0.05)
        assert in_units_of_xavier(layer.self_attn.out_proj.weight) == pytest.approx(end[stack], rel=0.05)
        for module in (layer.self_attn.fc1, layer.self_attn.fc2):
            assert in_units_of_xavier(module.weight) == pytest.approx(1, rel=0.05)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") and not re.search("in_proj|query_proj|expand|mix", name):  # see test_starts.py
            assert not parameter.any(), name
        elif "norm" in name and not name.endswith("bias"):
            assert (parameter == 1).all(), name
    table = model.model.shared.weight
    assert not table[config.pad_token_id].any()
    assert table.std().item() == pytest.approx(128**-0.5, rel=0.05)


def test_dropout_behind_the_heads_network():
    """All of it dropped, heads are left as attention made them: its weights get no gradient."""
    dropped, whole = (make({"ffn_dropout": share, "dropout": 0.0}).train() for share in (1.0, 0.0))
    for model, reached in ((dropped, False), (whole, True)):
        model(input_ids=torch.tensor([SOURCES[0]]), labels=torch.tensor([TARGETS[0]])).loss.backward()
        gradient = model.model.encoder.layers[0].self_attn.fc2.weight.grad
        assert bool(gradient is not None and gradient.any()) is reached
