"""Fresh weights: their spread against the equations, and what signals and gradients become at the papers' sizes."""

import math

import pytest
import torch
from models.cases import TINY as STARTED
from torch import nn

from lightformers_hf import (
    LightFormerConfig,
    LightFormerForConditionalGeneration,
    PartialFormerConfig,
    PartialFormerForConditionalGeneration,
    SubformerConfig,
    SubformerForCausalLM,
    SubformerForConditionalGeneration,
)
from lightformers_hf.matrices import bias_of, factors_of, matrices_of, product_of
from lightformers_hf.models.low_rank import LowRankEmbedding, LowRankLinear, LowRankOutput, draw_matrix
from lightformers_hf.models.modeling_partialformer import PartialAttention, draw_parts
from lightformers_hf.models.modeling_subformer import SAFE

TINY = {kind: {**fields, "init_std": None} for kind, fields in STARTED.items()}
CLASSES = {
    LightFormerConfig: LightFormerForConditionalGeneration,
    SubformerConfig: SubformerForConditionalGeneration,
    PartialFormerConfig: PartialFormerForConditionalGeneration,
}


def fresh(config):
    torch.manual_seed(0)
    return CLASSES[type(config)](config)


def xavier(m, n):
    return math.sqrt(2 / (m + n))


@pytest.mark.parametrize("rank", [2, 16, 200])
def test_fresh_product_has_the_spread_of_a_fresh_matrix(rank):
    torch.manual_seed(0)
    std = 0.02
    linear, embedding, output = (
        LowRankLinear(256, 300, rank),
        LowRankEmbedding(300, 256, rank),
        LowRankOutput(256, 300, rank),
    )
    for module in (linear.u, linear.v, embedding, output, output.output):
        draw_matrix(module, std)
    for module in (linear, embedding, output):
        assert product_of(module).std().item() == pytest.approx(std, rel=0.15)
        assert abs(product_of(module).mean().item()) < std / 10


@pytest.mark.parametrize("rank", [None, 24])
def test_matrices_side_by_side_start_as_if_each_were_alone(rank):
    torch.manual_seed(0)
    parts = [96, 0, 400]
    layer = nn.Linear(128, 496) if rank is None else LowRankLinear(128, 496, rank)
    for module in [layer] if rank is None else [layer.u, layer.v]:
        draw_parts(module, m=128, parts=parts, last_bias=1.0)
    for part, width in zip(product_of(layer).split(parts, dim=1), parts, strict=True):
        if width:
            assert part.std().item() == pytest.approx(xavier(128, width) / math.sqrt(2), rel=0.1)
    assert torch.equal(bias_of(layer), torch.cat([torch.zeros(96), torch.ones(400)]))


@pytest.mark.parametrize("ranks", [{}, {"attention_rank": 48, "ffn_rank": 48}])
def test_layers_start_with_xaviers_spread_and_small_ends_in_the_encoder(ranks):
    sizes = {"d_model": 256, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512, "encoder_layers": 8, "vocab_size": 400}
    model = fresh(LightFormerConfig(**sizes, decoder_layers=2, **ranks)).model
    expected = {
        "encoder.layers.3.self_attn.q_proj": xavier(256, 256) / math.sqrt(2),
        "encoder.layers.3.self_attn.out_proj": xavier(256, 256) / 4,
        "encoder.layers.3.fc1": xavier(256, 512),
        "encoder.layers.3.fc2": xavier(256, 512) / 4,
        "decoder.layers.1.encoder_attn.v_proj": xavier(256, 256) / math.sqrt(2),
        "decoder.layers.1.encoder_attn.out_proj": xavier(256, 256),
        "decoder.layers.1.fc2": xavier(256, 512),
        "shared": 1 / 16,
    }
    for name, std in expected.items():
        assert product_of(model.get_submodule(name)).std().item() == pytest.approx(std, rel=0.1), name


def test_a_decoder_with_an_output_layer_of_its_own_has_small_ends_too():
    sizes = {**TINY["lightformer"], "d_model": 256, "decoder_layers": 8}
    for tied, divisor in ((True, 1), (False, 4)):
        layer = fresh(LightFormerConfig(**sizes | {"tie_word_embeddings": tied})).model.decoder.layers[0]
        std = layer.encoder_attn.out_proj.weight.std().item()
        assert std == pytest.approx(xavier(256, 256) / divisor, rel=0.1)


@pytest.mark.parametrize("kind", ["lightformer", "subformer", "partialformer"])
@pytest.mark.parametrize("ranks", [{}, {"attention_rank": 4, "ffn_rank": 4, "embedding_rank": 4}])
def test_init_std_replaces_every_start(kind, ranks):
    config_class = {config.model_type: config for config in CLASSES}[kind]
    model = fresh(config_class(**TINY[kind] | ranks | {"init_std": 0.01}))
    weights = torch.cat([product_of(module).flatten() for _, module in matrices_of(model)])
    assert weights.std().item() == pytest.approx(0.01, rel=0.1)
    biases = [tensor for name, tensor in model.named_parameters() if name.endswith("bias")]
    assert biases
    assert not any(torch.count_nonzero(bias) for bias in biases)
    assert not model.get_input_embeddings()(torch.tensor([model.config.pad_token_id])).any()
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    assert all(torch.equal(norm.weight, torch.ones_like(norm.weight)) for norm in norms)


def test_safe_starts_as_a_linear_map_that_keeps_lengths():
    """Behind its attention and LayerNorm: LN(Q·x) with a semi-orthogonal Q, its ReLU passing (nearly) everything."""
    config = SubformerConfig(**TINY["subformer"] | {"d_model": 128, "embedding_dim": 64, "embedding": "safe"})
    safe = fresh(config).model.encoder.safe.eval()
    assert isinstance(safe, SAFE)
    states = safe.attn_layer_norm(torch.randn(500, 64))
    output = safe.fc2(safe.fc1(states).relu())
    isometry = factors_of(safe.fc2)[0]
    torch.testing.assert_close(isometry @ isometry.T, torch.eye(64))
    linear = states @ isometry
    share = (output - linear).square().mean() / linear.square().mean()
    assert share < 0.02
    rows = states.abs().amax(-1) < 2  # in these the ReLU passes everything
    torch.testing.assert_close(output[rows], linear[rows], atol=1e-5, rtol=1e-5)


def test_low_rank_safe_starts_as_other_layers():
    model = fresh(SubformerConfig(**TINY["subformer"] | {"embedding": "safe", "ffn_rank": 3}))
    assert not any(
        torch.count_nonzero(p) for name, p in model.named_parameters() if "safe.fc" in name and "bias" in name
    )


def test_heads_start_as_copies_of_base_heads():
    config = PartialFormerConfig(**TINY["partialformer"])
    attention = fresh(config).model.encoder.layers[0].self_attn
    assert isinstance(attention, PartialAttention)
    logits = torch.randn(2, attention.base, 5, 7)
    expected = logits[:, torch.arange(attention.heads) % attention.base]
    torch.testing.assert_close(attention._scale_heads(logits), expected)


def test_gates_start_open():
    for layer in fresh(PartialFormerConfig(**TINY["partialformer"])).model.decoder.layers:
        joint = layer.encoder_attn.query_proj
        query, gate = joint.bias.split(layer.encoder_attn.parts)
        assert torch.count_nonzero(query) == 0
        assert torch.equal(gate, torch.ones_like(gate))


def own_share(states):
    """Share of the states' (B, T, d) mean square that tells the tokens of a sentence from each other."""
    return ((states - states.mean(1, keepdim=True)).square().mean() / states.square().mean()).item()


@pytest.mark.parametrize(
    ("config", "least"),
    [
        pytest.param(LightFormerConfig(), (0.6, 0.01), id="transformer-base"),
        pytest.param(LightFormerConfig(attention_rank=64, ffn_rank=64), (0.6, 0.01), id="low-rank"),
        pytest.param(LightFormerConfig(encoder_groups=2, decoder_groups=2), (0.5, 0.005), id="groups"),
        pytest.param(SubformerConfig(), (0.3, 0.2), id="subformer-base"),
        pytest.param(PartialFormerConfig(), (0.6, 0.3), id="partialformer-base"),
    ],
)
def test_tokens_stay_apart_and_every_layer_learns_at_the_papers_sizes(config, least):
    """With 1/√d as the deviation of everything, 0.03 of a Transformer's encoder was left, 0.00 of a Subformer's."""
    config.vocab_size = config.decoder_vocab_size = 1000  # the table's size changes nothing here, and takes time
    config.dropout = 0.0
    model = fresh(config)
    source, target = torch.randint(4, 1000, (2, 4, 20))
    output = model(input_ids=source, labels=target, output_hidden_states=True)
    shares = [
        [own_share(states) for states in part] for part in (output.encoder_hidden_states, output.decoder_hidden_states)
    ]
    assert min(shares[0]) >= least[0]
    assert min(shares[1]) >= least[1]
    assert output.loss.item() < 1.5 * math.log(1000)
    output.loss.backward()
    for stack in ("encoder", "decoder"):
        norms = [
            layer.self_attn.out_proj.weight.grad.norm()
            if not hasattr(layer.self_attn.out_proj, "v")
            else layer.self_attn.out_proj.v.weight.grad.norm()
            for layer in getattr(model.model, stack).layers
        ]
        assert min(norms) > 0
        assert max(norms) / min(norms) < 12, norms


def test_a_causal_model_starts_with_a_loss_near_that_of_chance():
    torch.manual_seed(0)
    config = SubformerConfig(**TINY["subformer"] | {"d_model": 128, "embedding_dim": 64, "vocab_size": 500})
    model = SubformerForCausalLM(config).eval()
    ids = torch.randint(4, 500, (8, 24))
    assert model(input_ids=ids, labels=ids).loss.item() < 1.2 * math.log(500)
