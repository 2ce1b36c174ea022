"""The papers' measures beside their equations, closed formulas, and what the models' own outputs say."""

import io
import json
import math
import re
import shutil
from dataclasses import replace

import analyze as script
import pytest
import torch
from analyze import (
    Activation,
    _training,
    activated_neurons,
    analysis_table,
    analyze,
    behaviour,
    generation_macs,
    head_diversity,
    iterations_to_convergence,
    loss_curve,
    matrix_spectra,
    memory_footprint,
    singular_values,
    token_uniformity,
    without_storage,
)
from count_parameters import find_row
from matplotlib.cbook import is_math_text
from matplotlib.image import imread
from matplotlib.text import Text
from models.cases import make_config, make_model, padded, sentences
from rich.console import Console
from tiny import sizes
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    T5Config,
    T5ForConditionalGeneration,
)

from lightformers_hf import convert
from lightformers_hf.evaluation.plots import as_text, save_picture
from lightformers_hf.files import MANIFEST_FILE
from lightformers_hf.loading import load_model
from lightformers_hf.models import LightFormerConfig, SubformerConfig


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_head_diversity_is_equation_7():
    heads = random(2, 3, 4, 5)
    found = head_diversity(heads)
    assert found.shape == (2, 3)
    for sentence in range(2):
        for token in range(3):
            outputs, total = heads[sentence, token], 0.0
            for i in range(4):
                for j in range(4):
                    dot = sum(float(a) * float(b) for a, b in zip(outputs[i], outputs[j], strict=True))
                    total += abs(dot) / (math.hypot(*outputs[i].tolist()) * math.hypot(*outputs[j].tolist()))
            assert found[sentence, token].item() == pytest.approx(math.exp(-total / 16))


def test_head_diversity_at_its_ends():
    head = random(6)
    same = torch.stack([head, 3 * head, -head, 0.01 * head])
    assert head_diversity(same).item() == pytest.approx(math.exp(-1))
    assert head_diversity(2 * torch.eye(4)).item() == pytest.approx(math.exp(-1 / 4))
    assert head_diversity(torch.zeros(3, 5)).item() == 1


def test_token_uniformity_is_the_mean_pearson_correlation_of_pairs():
    states, mask = random(2, 5, 7) + 3, torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0]])
    states[1, 1] = torch.nan_to_num(states[1, 1]) * 100  # does not count
    found = token_uniformity(states, mask)
    for sentence, kept in enumerate(([0, 1, 2, 3, 4], [0, 2, 3])):
        correlations = torch.corrcoef(states[sentence, kept])
        pairs = [correlations[i, j].item() for i in range(len(kept)) for j in range(len(kept)) if i != j]
        assert found[sentence].item() == pytest.approx(sum(pairs) / len(pairs))


def test_token_uniformity_at_its_ends():
    token, mask = random(1, 1, 6), torch.ones(1, 3)
    alike = torch.cat([token, 2 * token + 5, 0.5 * token - 1], dim=1)
    assert token_uniformity(alike, mask).item() == pytest.approx(1)
    assert token_uniformity(torch.cat([token, -token], dim=1), mask[:, :2]).item() == pytest.approx(-1)
    assert token_uniformity(torch.ones(1, 3, 6), mask).item() == 0
    assert token_uniformity(token, mask[:, :1]).isnan()


def test_activated_neurons_are_those_above_zero():
    inner = torch.tensor([[[1.0, 0.0, -2.0], [0.5, 1e-9, 3.0]]])
    assert activated_neurons(inner).tolist() == [[1, 3]]
    # Four networks of two neurons each, inside heads.
    assert activated_neurons(torch.tensor([[[[1.0, 0.0], [1.0, 1.0], [0.0, -1.0], [0.0, 2.0]]]])).tolist() == [[4]]


@pytest.mark.parametrize("shape", [(30, 8), (8, 30), (9, 9)])
def test_singular_values_of_a_matrix_and_of_a_product(shape):
    m, n = shape
    matrix, left, right = random(m, n), random(m, 4, seed=1), random(4, n, seed=2)
    torch.testing.assert_close(singular_values("w", matrix), torch.linalg.svdvals(matrix))
    torch.testing.assert_close(singular_values("w", left, right), torch.linalg.svdvals(left @ right)[:4])
    with pytest.raises(ValueError, match="fc1"):
        singular_values("fc1", matrix * math.nan)


@pytest.mark.parametrize("variant", ["lightformer-low-rank", "lightformer-groups", "subformer-sandwich"])
def test_spectra_of_a_model_are_those_of_every_stored_matrix_once(variant):
    model = make_model("ConditionalGeneration", variant)
    spectra = dict(matrix_spectra(model))
    # Of every module that maps vectors, what it does to a basis, whatever it is made of.
    for name, values in spectra.items():
        module = model.get_submodule(name)
        if isinstance(module, torch.nn.Embedding):
            matrix = module(torch.arange(module.num_embeddings))
        else:
            identity = torch.eye(module.in_features)
            matrix = module(identity) - module(torch.zeros_like(identity))
        expected = torch.linalg.svdvals(matrix.detach().double())
        assert values.tolist() == pytest.approx(expected[: len(values)].tolist(), rel=1e-4, abs=1e-5)
        assert expected[len(values) :].sum() < 1e-4
    stored = [name for name, parameter in model.named_parameters() if parameter.dim() == 2]
    second_factors = [name for name in stored if name.endswith((".u.weight", "shared.basis"))]
    assert len(spectra) == len(stored) - len(second_factors)


def test_the_loss_is_that_of_the_evaluation_where_there_is_one():
    log = [{"step": 1, "loss": 4.0}, {"step": 2, "loss": 3.0, "eval_bleu": 1}, {"step": 2, "train_loss": 3.5}]
    assert loss_curve(log) == ("loss", [(1, 4.0), (2, 3.0)])
    assert loss_curve([*log, {"step": 2, "eval_loss": 3.2}]) == ("eval_loss", [(2, 3.2)])
    with pytest.raises(ValueError, match="neither eval_loss nor loss"):
        loss_curve([{"step": 1, "eval_bleu": 3}])


def test_convergence_is_the_first_step_near_the_lowest_loss():
    curve = [(100, math.nan), (200, 3.0), (300, 2.015), (400, 2.05), (500, 2.0), (600, 2.4)]
    assert iterations_to_convergence(curve) == 300
    assert iterations_to_convergence(curve, tolerance=0.001) == 500
    assert iterations_to_convergence(curve, tolerance=1) == 200
    assert iterations_to_convergence([(100, 3.0), (200, 2.5), (300, 2.0)]) is None  # it still falls
    with pytest.raises(ValueError, match="finite"):
        iterations_to_convergence([(1, math.inf)])


S, T = 5, 7  # source and target tokens
STEPS, SQUARES = T * (T + 1) // 2, T * (T + 1) * (2 * T + 1) // 6  # sums of k and k²


def shapes(width, layers, ffn_dim, vocab_size=34040, heads=8):
    """Of a model with six layers in the decoder."""
    return sizes(width, layers, heads, ffn_dim, decoder_layers=6, vocab_size=vocab_size)


def marian(*sizes, **named):
    return MarianConfig(**shapes(*sizes, **named), pad_token_id=1, decoder_start_token_id=1)


@pytest.mark.parametrize(
    ("config", "printed", "difference"),
    [
        (marian(512, 6, 2048), 9.9, 0.015),  # PartialFormer, Table 5, #1
        (marian(512, 6, 384), 7.7, 0.015),  # Table 10
        (find_row("PartialFormer T10 Transformer, PG-FFNs").model_config(), 7.7, 0.015),
        (find_row("PartialFormer T5 #3 without head scaling").model_config(), 5.2, 0.015),
        (find_row("PartialFormer T1 24-6 360/45 30-16").model_config(), 6.9, 0.05),  # Table 5, #4
    ],
    ids=["transformer", "light-ffn", "pg-ffn", "no-head-scaling", "head-scaling"],
)
def test_macs_as_printed(config, printed, difference):
    assert generation_macs(config).total / 1e9 == pytest.approx(printed, rel=difference)


def test_macs_of_a_transformer_in_a_formula():
    d, f, V = 16, 24, 40
    config = marian(d, 2, f, vocab_size=V)
    attention = 4 * d * d
    encoder = 2 * (S * (attention + 2 * d * f) + 2 * S * S * d)
    cross_keys = 6 * 2 * S * d * d
    a_token = 6 * (attention + 2 * d * d + 2 * d * f)

    macs = generation_macs(config, source_tokens=S, target_tokens=T)
    decoder = STEPS * a_token + T * cross_keys + 6 * 2 * d * (SQUARES + STEPS * S)
    assert (macs.encoder, macs.decoder, macs.output) == (encoder, decoder, STEPS * d * V)

    macs = generation_macs(config, source_tokens=S, target_tokens=T, use_cache=True)
    decoder = T * a_token + cross_keys + 6 * 2 * d * (STEPS + T * S)
    assert (macs.encoder, macs.decoder, macs.output) == (encoder, decoder, T * d * V)
    assert macs.total == encoder + decoder + T * d * V


def test_macs_of_low_rank_matrices_are_those_of_their_factors():
    d, f, V, r, q, e = 16, 24, 40, 3, 5, 7
    ranks = {"attention_rank": r, "ffn_rank": q, "embedding_rank": e}
    config = LightFormerConfig(**shapes(d, 2, f, V, 4), encoder_groups=1, **ranks)  # stored once, computed twice
    macs = generation_macs(config, source_tokens=S, target_tokens=T)
    layer = 4 * r * 2 * d + 2 * q * (d + f)
    assert macs.encoder == S * e * d + 2 * (S * layer + 2 * S * S * d)
    assert macs.output == STEPS * e * (d + V)


def test_macs_of_heads_with_networks_inside():
    config = make_config("partialformer", encoder_layers=1, decoder_layers=1)
    d, w, H, h = 16, 4, 5, 2
    macs = generation_macs(config, source_tokens=S, target_tokens=T)
    projections = d * w * (2 * h + 2 * H) + H * w * d  # q and k of h heads; values, gates and output of H
    networks = H * 2 * w * 4 * w
    maps = S * S * (h * w + h * H + H * H + H * w)  # logits, from h heads to H, and what they weigh
    once = S * d * 2 * H * w + S * S * H * w  # global attention
    assert macs.encoder == S * (projections + networks) + maps + once


@pytest.mark.parametrize("tokens", [(0, 1), (1, 0)])
def test_macs_of_nothing(tokens):
    with pytest.raises(ValueError, match="expected 1 or more"):
        generation_macs(marian(16, 1, 16), source_tokens=tokens[0], target_tokens=tokens[1])


def footprint(**fields):
    defaults = {"vocab_size": 300, "d_model": 64, "ffn_dim": 96, "encoder_layers": 6, "decoder_layers": 6}
    config = SubformerConfig(**{**defaults, "embedding_dim": 32, "embedding_attention_heads": 4, **fields})
    return memory_footprint(without_storage(config))


def test_footprint_is_table_9_of_subformer():
    V, d_m, f_m, d_s, f_s, d_e, L = 300, 64, 96, 80, 112, 32, 6
    full = {"embedding": "full", "embedding_dim": None}
    transformer = footprint(sharing="none", **full)
    assert transformer.embedding == d_m * V
    assert transformer.encoder == L * (4 * d_m**2 + 2 * f_m * d_m)

    naive = footprint(sandwich_dim=d_m, sandwich_ffn_dim=4 * d_m, ffn_dim=4 * d_m, sandwich_attention_heads=4, **full)
    assert naive.encoder == 3 * (4 * d_m**2 + 2 * (4 * d_m * d_m))

    subformer = footprint(sandwich_dim=d_s, sandwich_ffn_dim=f_s, sandwich_attention_heads=4)
    safe = 5 * d_e**2 + d_e * d_m
    assert subformer.embedding == d_e * V + 2 * safe  # the table has one stack
    printed = 2 * (4 * d_m**2 + 2 * f_m * d_m) + (4 * d_s**2 + 2 * (f_s * d_s + 2 * d_s * d_m))
    assert subformer.encoder == printed - 2 * d_s * d_m  # the table counts the ways up and down twice
    assert subformer.output == d_m * d_e


@pytest.mark.parametrize(
    ("model", "learned_positions"),
    [
        (MarianMTModel(marian(16, 2, 24, vocab_size=40)), 0),  # they are computed
        (BartForConditionalGeneration(BartConfig(**shapes(16, 2, 24, 40), max_position_embeddings=30)), 2 * 32 * 16),
    ],
    ids=["marian", "bart"],
)
def test_footprint_of_a_dense_checkpoint(model, learned_positions):
    found = memory_footprint(model)
    assert found.embedding == 40 * 16 + learned_positions
    assert found.encoder == 2 * (4 * 16**2 + 2 * 16 * 24)
    assert found.decoder == 6 * (8 * 16**2 + 2 * 16 * 24)
    assert found.output == 0
    assert found.total == found.embedding + found.encoder + found.decoder


DENSE = shapes(16, 3, 24, 40, 4) | {"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 20}
DENSE |= {"max_position_embeddings": 48, "pad_token_id": 1, "decoder_start_token_id": 1}
CLASSES = {"marian": (MarianMTModel, MarianConfig), "bart": (BartForConditionalGeneration, BartConfig)}
POST_NORM = ("marian", "bart", "lightformer", "lightformer-low-rank", "lightformer-groups", "subformer-sandwich")
OURS = ("lightformer-groups", "lightformer-narrow", "lightformer-joint-qkv", "lightformer-pre-norm")
OURS += ("subformer-independent-ffn", "partialformer", "partialformer-vanilla-head-scaling")


def build(kind, **fields):
    if kind not in CLASSES:
        return make_model("ConditionalGeneration", kind, **fields)
    model_class, config_class = CLASSES[kind]
    torch.manual_seed(0)
    return model_class(config_class(**DENSE, **fields)).eval()


def batch_of(sources, targets):
    (ids, mask), (labels, label_mask) = padded(sources), padded(targets)
    shifted = torch.cat([torch.full_like(labels[:, :1], 1), labels[:, :-1]], dim=1)
    labels = labels.masked_fill(label_mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": shifted, "labels": labels}


SOURCES, TARGETS = sentences((9, 5, 7)), sentences((4, 8, 6), seed=1)


@pytest.fixture
def batch():
    return batch_of(SOURCES, TARGETS)


@torch.no_grad()
def outputs_of(model, batch):
    """The model's own records, from eager attention."""
    model.set_attn_implementation("eager")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "decoder_input_ids")}
    return model(**inputs, output_hidden_states=True, output_attentions=True, use_cache=False)


def mean_correlation(states, lengths):
    """Mean over sentences, of the mean over pairs of their tokens."""
    found = []
    for sentence, length in zip(states, lengths, strict=True):
        correlations = torch.corrcoef(sentence[:length].double())
        found.append((correlations.sum() - correlations.trace()).item() / (length * (length - 1)))
    return sum(found) / len(found)


@pytest.mark.parametrize("kind", POST_NORM)
def test_token_uniformity_is_that_of_the_hidden_states(kind, batch):
    model = build(kind)
    found = behaviour(model, [batch]).token_uniformity
    outputs = outputs_of(model, batch)
    for stack, states, texts in (
        ("encoder", outputs.encoder_hidden_states, SOURCES),
        ("decoder", outputs.decoder_hidden_states, TARGETS),
    ):
        lengths = list(map(len, texts))
        expected = [mean_correlation(layer, lengths) for layer in states[-len(found[stack]) :]]
        assert len(found[stack]) == getattr(model.config, f"{stack}_layers")
        assert found[stack] == pytest.approx(expected, abs=1e-5)


def heads_of(attention, weights, states):
    """A·V of every head, (B, T, H, d_k), from the weights (B, H, T, S) and what the values are made of (B, S, d)."""
    values = attention.v_proj(states).unflatten(-1, (weights.shape[1], -1))
    return torch.einsum("bhts,bshd->bthd", weights, values)


def mean_diversity(heads, lengths):
    return torch.cat([head_diversity(one[:length]) for one, length in zip(heads, lengths, strict=True)]).mean().item()


@pytest.mark.parametrize("kind", ["marian", "bart", "lightformer", "lightformer-low-rank", "lightformer-groups"])
def test_head_diversity_is_that_of_attention_weights_and_values(kind, batch):
    model = build(kind)
    found = behaviour(model, [batch]).head_diversity
    outputs = outputs_of(model, batch)
    encoder, decoder = model.model.encoder, model.model.decoder
    of_depth = getattr(encoder.layers, "stored_at", range(len(encoder.layers)))
    for depth, index in enumerate(of_depth):
        attention, weights = encoder.layers[index].self_attn, outputs.encoder_attentions[depth]
        heads = heads_of(attention, weights, outputs.encoder_hidden_states[depth])
        assert found["encoder"][depth] == pytest.approx(mean_diversity(heads, map(len, SOURCES)), abs=1e-5)
    of_depth = getattr(decoder.layers, "stored_at", range(len(decoder.layers)))
    assert len(found["cross"]) == len(found["decoder"]) == len(of_depth)
    for depth, index in enumerate(of_depth):
        layer = decoder.layers[index]
        heads = heads_of(layer.self_attn, outputs.decoder_attentions[depth], outputs.decoder_hidden_states[depth])
        assert found["decoder"][depth] == pytest.approx(mean_diversity(heads, map(len, TARGETS)), abs=1e-5)
        weights, states = outputs.cross_attentions[depth], outputs.encoder_last_hidden_state
        heads = heads_of(layer.encoder_attn, weights, states)
        assert found["cross"][depth] == pytest.approx(mean_diversity(heads, map(len, TARGETS)), abs=1e-5)


@torch.no_grad()
def test_heads_of_partialformer_are_gated_and_went_through_their_network(batch):
    model = build("partialformer")
    found = behaviour(model, [batch]).head_diversity["encoder"]
    outputs = outputs_of(model, batch)
    for depth, layer in enumerate(model.model.encoder.layers):
        attention = layer.self_attn
        states = layer.self_attn_layer_norm(outputs.encoder_hidden_states[depth])
        *_, values, gate = attention.in_proj(states).split(attention.parts, dim=-1)
        values, gate = (part.unflatten(-1, (5, 4)) for part in (values, gate))
        heads = torch.einsum("bhts,bshd->bthd", outputs.encoder_attentions[depth], values)
        heads = (heads + attention.fc2(attention.fc1(heads).relu())) * gate.relu()
        assert found[depth] == pytest.approx(mean_diversity(heads, map(len, SOURCES)), abs=1e-5)


@torch.no_grad()
def activate(model, neurons):
    """Every network gets so many neurons that are above 0 whatever comes in, and others that are not."""
    for name, module in model.named_modules():
        if name.endswith(("fc1", "fc_gate")):
            last = getattr(module, "v", module)
            last.weight.zero_()
            last.bias.fill_(-1)
            last.bias[:neurons] = 1


@pytest.mark.parametrize(
    ("kind", "encoder", "decoder"),
    [
        ("marian", Activation(3, 24, 2 * 16 * 24 + 24 + 16), Activation(3, 20, 2 * 16 * 20 + 20 + 16)),
        ("bart", Activation(3, 24, 2 * 16 * 24 + 24 + 16), Activation(3, 20, 2 * 16 * 20 + 20 + 16)),
        ("lightformer", Activation(3, 24, 2 * 16 * 24 + 24 + 16), Activation(3, 20, 2 * 16 * 20 + 20 + 16)),
        ("lightformer-low-rank", Activation(3, 24, 6 * 80 + 24 + 16), Activation(3, 20, 3 * 72 + 20 + 16)),
        ("subformer-all", Activation(3, 24, 2 * 16 * 24 + 24 + 16), Activation(3, 24, 2 * 16 * 24 + 24 + 16)),
        # 5 heads of width 4, four times as wide inside; in the decoder 3, twice as wide, in two attentions.
        ("partialformer", Activation(15, 80, 2 * 4 * 16 + 16 + 4), Activation(18, 48, 2 * (2 * 4 * 8 + 8 + 4))),
    ],
)
def test_activation_of_networks_with_a_known_number_of_neurons(kind, encoder, decoder, batch):
    model = build(kind)
    activate(model, 3)
    found = behaviour(model, [batch]).ffn
    assert found["encoder"] == [encoder] * model.config.encoder_layers
    assert found["decoder"] == [decoder] * model.config.decoder_layers
    assert encoder.ratio == encoder.activated / encoder.neurons
    assert encoder.efficiency == encoder.activated / encoder.parameters


def test_activation_of_gated_networks_is_that_of_the_gate(batch):
    model = build("partialformer", ffn_glu=True)
    activate(model, 3)
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith("fc1"):
                module.bias.fill_(-1)
    found = behaviour(model, [batch]).ffn
    assert {layer.activated for layer in found["encoder"]} == {15}


def test_wide_layers_of_a_sandwich_have_their_own_width(batch):
    found = behaviour(build("subformer-sandwich"), [batch]).ffn
    assert [layer.neurons for layer in found["encoder"]] == [24, 28, 28, 24]


@pytest.mark.parametrize("kind", [*POST_NORM, *OURS])
def test_batching_and_padding_change_nothing(kind, batch):
    model = build(kind)
    together = behaviour(model, [batch])
    alone = behaviour(model, [batch_of([source], [target]) for source, target in zip(SOURCES, TARGETS, strict=True)])
    for measure in ("head_diversity", "token_uniformity"):
        first, second = getattr(together, measure), getattr(alone, measure)
        assert {site: pytest.approx(values, abs=1e-5) for site, values in first.items()} == second
        for stack in ("encoder", "decoder"):
            assert len(first[stack]) == getattr(model.config, f"{stack}_layers")
    for stack, layers in together.ffn.items():
        assert [layer.activated for layer in layers] == pytest.approx([layer.activated for layer in alone.ffn[stack]])


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(batch, training):
    model = build("lightformer").train(training)
    behaviour(model, [batch])
    assert model.training == training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_what_cannot_be_analyzed(batch):
    config = T5Config(vocab_size=40, d_model=16, d_kv=4, d_ff=20, num_layers=1, num_heads=4)
    with pytest.raises(ValueError, match="T5ForConditionalGeneration can't be analyzed"):
        behaviour(T5ForConditionalGeneration(config), [batch])
    with pytest.raises(ValueError, match="no token to analyze"):
        behaviour(build("marian"), [])


LOSSES = [{"step": 10, "loss": 5.0}, {"step": 20, "loss": 2.01}, {"step": 30, "loss": 2.0}]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, tiny_marian, parallel_sentences):
    """Paths of a teacher, of a compressed model with a training log, and of parallel text."""
    folder = tmp_path_factory.mktemp("analyze")
    shutil.copytree(tiny_marian, folder / "teacher")
    convert(tiny_marian, folder / "light $x_1$", rank=4, method="paper", progress=False)
    (folder / "light $x_1$" / "trainer_state.json").write_text(json.dumps({"log_history": LOSSES}))
    text = "".join(json.dumps({"translation": pair}) + "\n" for pair in parallel_sentences)
    (folder / "text.jsonl").write_text(text)
    return folder


@pytest.fixture
def no_process(monkeypatch):
    """Peak memory is not measured, which takes seconds (`test_size` does)."""
    monkeypatch.setattr("analyze.translation_memory", lambda *_: (3_000_000, 1_000_000))


@pytest.mark.usefixtures("no_process")
def test_analyze_models_side_by_side(run_script, checkpoints, tmp_path):
    models = [checkpoints / "teacher", checkpoints / "light $x_1$"]
    text, pictures = checkpoints / "text.jsonl", tmp_path / "inside"
    code, printed, error = run_script(
        script, *models, "--data", text, "--pictures", pictures, "--json", tmp_path / "a.json"
    )
    assert code == 0, error
    for expected in ("head diversity, encoder", "million MACs", "peak memory", "rank of 90 % energy", "steps to"):
        assert expected in printed
    teacher, light = json.loads((tmp_path / "a.json").read_text())

    network, _ = load_model(models[0])
    macs = generation_macs(network.config)
    assert teacher["macs"] == {"encoder": macs.encoder, "decoder": macs.decoder, "output": macs.output}
    assert light["macs"]["output"] < teacher["macs"]["output"]
    assert len(teacher["spectra"]["model.encoder.layers.0.fc1"]) == 32
    assert len(light["spectra"]["model.encoder.layers.0.fc1"]) == 4
    assert light["footprint"]["encoder"] == 2 * 4 * (4 * 64 + 2 * 96)
    assert (teacher["memory_bytes"], teacher["libraries_bytes"]) == (3_000_000, 1_000_000)
    assert re.search(r"peak memory beyond libraries, MB\W+2.0\W+2.0", printed)
    assert (teacher["loss_name"], teacher["convergence_step"]) == (None, None)
    assert (light["loss_name"], light["convergence_step"], light["loss_curve"][0]) == ("loss", 20, [10, 5.0])
    assert 0 < teacher["ffn"]["decoder"][1]["ratio"] < 1

    measures = ("head-diversity", "token-uniformity", "ffn-activation", "macs", "memory", "spectra", "convergence")
    assert {path.name for path in pictures.iterdir()} == {MANIFEST_FILE} | {
        f"{measure}{suffix}.png" for measure in measures for suffix in ("", "-dark")
    }
    for path in pictures.glob("*.png"):
        picture = imread(path)
        assert picture.shape[1] == 1600
        corner = picture[0, 0, :3]
        assert corner.max() < 0.15 if "dark" in path.stem else corner.min() == 1
        assert picture[..., :3].std() > 0.03  # something is drawn


@pytest.mark.usefixtures("no_process")
def test_folders_of_the_same_name_are_told_apart(checkpoints, tmp_path):
    names = [str(shutil.copytree(checkpoints / "teacher", tmp_path / parent / "[red]model")) for parent in "ab"]
    analyses = analyze(names, str(checkpoints / "text.jsonl"), max_samples=2)
    assert [analysis.label for analysis in analyses] == names
    printed = io.StringIO()
    Console(file=printed, width=400).print(analysis_table(analyses))
    assert all(name in printed.getvalue() for name in names)
    first = replace(analyses[0], loss_name="loss", loss_curve=[(1, 3.0), (2, 2.0)])
    Console(file=printed, width=400).print(analysis_table([first, analyses[1]]))
    assert re.search(r"steps to convergence\W+not converged", printed.getvalue())


def test_bad_input_is_one_message_and_leaves_nothing(run_script, checkpoints, tmp_path):
    teacher, text = checkpoints / "teacher", checkpoints / "text.jsonl"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for arguments, message in (
        ((tmp_path / "missing", "--data", text), "is no folder"),
        ((teacher, "--data", tmp_path / "missing.jsonl"), "missing.jsonl"),
        ((teacher, "--data", text, "--source-lang", "fr"), "'fr'"),
        ((teacher, "--data", text, "--pictures", tmp_path / "full"), "is not empty"),
        ((teacher, "--data", text, "--pictures", teacher, "--overwrite"), "must be apart from"),
        ((teacher, "--data", text, "--pictures", text.parent, "--overwrite"), "must be apart from"),
    ):
        code, _, error = run_script(script, "--pictures", tmp_path / "new", *arguments)
        assert code == 1
        assert message in error.replace("\n", " ")
        assert "Traceback" not in error
    assert {path.name for path in tmp_path.iterdir()} == {"full"}


def test_pictures_need_matplotlib(run_script, checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "find_spec", lambda _: None)
    arguments = (checkpoints / "teacher", "--data", checkpoints / "text.jsonl")
    code, _, error = run_script(script, *arguments, "--pictures", tmp_path / "new")
    assert code == 1
    assert "pip install" in error
    assert not list(tmp_path.iterdir())


def test_names_with_dollar_signs_are_text_and_logarithmic_axes_are_not(monkeypatch, tmp_path):
    texts = []
    draw = Text.draw
    monkeypatch.setattr(Text, "draw", lambda self, *arguments: (texts.append(self), draw(self, *arguments))[1])

    def paint(panels):
        panels[0].plot([1, 2], [1, 1e6], label=as_text("model $x_1$"))
        panels[0].set(yscale="log")

    save_picture(tmp_path / "picture.png", paint)
    formulas = {text.get_text() for text in texts if text.get_parse_math() and is_math_text(text.get_text())}
    assert any("10^{4}" in text for text in formulas)
    assert not any("model" in text for text in formulas)
    assert any("model" in text.get_text() for text in texts)


@pytest.mark.parametrize("curves", [2, 16])
def test_a_legend_of_many_lines_leaves_the_panels_their_height(tmp_path, curves):
    kept = []

    def paint(panels):
        kept.extend(panels)
        for curve in range(curves):
            panels[0].plot([1, 2], [curve, curve], label=f"a curve with quite a long name, number {curve}")

    save_picture(tmp_path / "picture.png", paint)
    assert kept[0].get_window_extent().height > 0.6 * 4.2 * kept[0].figure.dpi


NAN, FALLING = float("nan"), [{"step": 1, "eval_loss": 4.0}, {"step": 2, "eval_loss": 3.0}]


@pytest.mark.parametrize(
    ("log", "found"),
    [
        ([{"train_runtime": 3.0, "step": 2}], {}),
        ([{"step": 1, "loss": NAN}], {}),
        ([{"loss": 3.0, "step": 2}], {"loss_curve": [(2, 3.0)], "convergence_step": None}),  # of one nothing is known
        ([*FALLING, {"step": 3, "eval_loss": NAN}], {"loss_curve": [(1, 4.0), (2, 3.0)]}),
    ],
)
def test_losses_that_are_missing_or_no_numbers_are_in_no_curve(tmp_path, log, found):
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    read = _training(tmp_path)
    assert bool(read) == bool(found)
    assert {name: read[name] for name in found} == found
