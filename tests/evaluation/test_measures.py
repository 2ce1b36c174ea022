"""The papers' measures beside their equations written out term by term, and at the ends of their ranges."""

import math

import pytest
import torch
from models.cases import make_model

from lightformers_hf.evaluation.analysis import (
    activated_neurons,
    head_diversity,
    iterations_to_convergence,
    loss_curve,
    matrix_spectra,
    singular_values,
    token_uniformity,
)


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
