"""Narrower heads and networks: optimal by an independent computation, and exact where nothing is lost."""

import itertools
import json

import pytest
import torch
from conversion.metrics import logits
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import marian_tokens, sizes
from transformers import AutoModelForSeq2SeqLM, MarianConfig, MarianMTModel

from lightformers_hf import StudyOptions, convert
from lightformers_hf.conversion import sensitivity
from lightformers_hf.conversion.forms import change_outputs
from lightformers_hf.conversion.forms.heads import Bottlenecks
from lightformers_hf.conversion.forms.low_rank import join_ranks
from lightformers_hf.conversion.forms.neurons import Elimination, find_widths, nested_energies
from lightformers_hf.conversion.moments import Damped, Metric
from lightformers_hf.matrices import Weight


def moment(generator: torch.Generator, size: int) -> torch.Tensor:
    square = torch.randn(size, size + 2, generator=generator, dtype=torch.float64)
    return square @ square.T


def test_outputs_in_the_coordinates_of_what_is_left():
    """Of neurons and of heads, as one matrix would make them."""
    outputs, kept, heads = torch.randn(5, 12), torch.tensor([0, 3, 11]), torch.randn(3, 4, 2).double()
    assert change_outputs(outputs, None) is outputs
    torch.testing.assert_close(change_outputs(outputs, kept), outputs @ torch.eye(12)[:, kept])
    for rows in (outputs, outputs.double()):
        found = change_outputs(rows, heads)
        torch.testing.assert_close(found, rows @ torch.block_diag(*heads).to(rows))


@settings(max_examples=25)
@given(st.integers(2, 7), st.integers(1, 3), st.integers(0, 10_000))
def test_no_other_bottleneck_costs_less(width, heads, seed):
    generator = torch.Generator().manual_seed(seed)
    second, gradients = (torch.stack([moment(generator, width) for _ in range(heads)]) for _ in range(2))
    bottlenecks = Bottlenecks.of(second, gradients)
    inner = 1 + seed % width

    def cost(maps):
        lost = torch.eye(width) - maps
        return torch.einsum("hij,hik,hkl,hjl->", lost, second, lost, gradients).item()

    into, out_of = bottlenecks.at(inner)
    found = cost(into @ out_of)
    # The damping is part of what is minimised: 1 % of the gradients' mean.
    slack = 0.05 * bottlenecks.costs()[0].item() + 1e-9
    assert found == pytest.approx(bottlenecks.costs()[inner].item(), abs=slack)
    for _ in range(5):
        other = torch.randn(heads, width, inner, generator=generator, dtype=torch.float64) * 0.3
        back = torch.linalg.pinv(other)
        assert found <= cost(other @ back) + slack
    full = torch.matmul(*bottlenecks.at(width))
    torch.testing.assert_close(full, torch.eye(width).double().expand(heads, -1, -1), atol=1e-6, rtol=0)


@settings(max_examples=25)
@given(st.integers(3, 12), st.integers(2, 6), st.integers(0, 10_000))
def test_the_cost_of_removing_neurons_is_that_of_the_regression(size, outputs, seed):
    generator = torch.Generator().manual_seed(seed)
    second, gradients = moment(generator, size), moment(generator, outputs)
    weight = torch.randn(size, outputs, generator=generator, dtype=torch.float64)
    elimination = Elimination.of(second, weight, gradients)
    assert sorted(elimination.order.tolist()) == list(range(size))
    damped = gradients + 0.01 * gradients.diagonal().mean() * torch.eye(outputs)
    measured = second + 1e-6 * second.diagonal().mean() * torch.eye(size)
    for width, cost in zip(find_widths(size), elimination.costs, strict=True):
        kept, new = elimination.at(width, weight, second)
        lost = weight.clone()
        lost[kept] -= new
        expected = torch.einsum("io,ij,jp,op->", lost, measured, lost, damped)
        torch.testing.assert_close(cost, expected, rtol=1e-6, atol=1e-6)
    # The first to go is the cheapest of all.
    kept_by = [[other for other in range(size) if other != gone] for gone in range(size)]
    each = []
    for kept in kept_by:
        lost = weight.clone()
        lost[kept] -= torch.linalg.solve(second[kept][:, kept], second[kept] @ weight)
        each.append(torch.einsum("io,ij,jp,op->", lost, second, lost, damped).item())
    assert elimination.costs[1].item() == pytest.approx(min(each), rel=2e-2, abs=1e-3)


@settings(max_examples=25)
@given(st.integers(3, 12), st.integers(2, 6), st.integers(0, 10_000))
def test_what_directions_of_fewer_neurons_are_worth(size, width, seed):
    """Of both matrices, as the singular values of the smaller ones in their metrics, computed one by one."""
    generator = torch.Generator().manual_seed(seed)
    inputs, before, inner, after = (moment(generator, one) for one in (width, size, size, width))
    first = torch.randn(width, size, generator=generator, dtype=torch.float64)
    last = torch.randn(size, width, generator=generator, dtype=torch.float64)
    metric = Metric(Damped(inputs, 1e-6), Damped(before, 1e-2))
    elimination = Elimination.of(inner, last, after, range(1, size))
    nested = nested_energies(Weight(first), metric, elimination.order.flip(0), range(1, size))

    def values(left, matrix, right):
        return torch.linalg.svdvals(torch.linalg.cholesky(left).T @ matrix @ torch.linalg.cholesky(right)).square()

    damped = [one + 0.01 * one.diagonal().mean() * torch.eye(len(one)) for one in (before, after)]
    for number in range(1, size):
        kept, new = elimination.at(number, last, inner)
        expected = values(inputs, first[:, kept], damped[0][kept][:, kept])
        torch.testing.assert_close(nested[number], expected, rtol=1e-3, atol=1e-3)
        expected = values(inner[kept][:, kept], new, damped[1])
        torch.testing.assert_close(elimination.energies[number], expected, rtol=1e-3, atol=1e-3)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(2, 6), st.integers(2, 6)), min_size=2, max_size=3), st.integers(0, 10_000))
def test_no_other_ranks_with_that_sum_cost_less(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    energies = [
        torch.rand(min(shape), generator=generator, dtype=torch.float64).sort(descending=True).values
        for shape in shapes
    ]
    sizes = {}
    for ranks in itertools.product(*(range(1, min(shape) + 1) for shape in shapes)):
        cost = size = 0.0
        for rank, (m, n), values in zip(ranks, shapes, energies, strict=True):
            smaller = rank * (m + n) < m * n
            cost, size = cost + smaller * values[rank:].sum().item(), size + min(rank * (m + n), m * n)
        lost = sum(values[rank:].sum().item() for rank, values in zip(ranks, energies, strict=True))
        sizes.setdefault(sum(ranks), []).append((lost, cost, size))
    found = join_ranks(shapes, energies)
    expected = [min(sizes[total]) for total in sorted(sizes)][-len(found.settings) :]
    assert found.costs.tolist() == pytest.approx([cost for _, cost, _ in expected])
    assert found.sizes.tolist() == [size for *_, size in expected]


@pytest.fixture(scope="module")
def narrow_inside(tmp_path_factory):
    """A Marian whose heads, eight wide, use four dimensions of their products, and with dead and twin neurons."""
    folder = tmp_path_factory.mktemp("teacher")
    fields = sizes(16, layers=2, ffn=16, max_position_embeddings=64) | marian_tokens(40)
    config = MarianConfig(**fields, bos_token_id=None, activation_function="relu")
    torch.manual_seed(0)
    model = MarianMTModel(config).eval()
    with torch.no_grad():
        for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):  # not the sines
            parameter.add_(torch.randn(parameter.shape), alpha=0.3)
        for name in dict(model.named_modules()):
            if name.endswith("q_proj"):  # queries in four dimensions of a head, and values too
                attention = model.get_submodule(name.rpartition(".")[0])
                for part in (attention.q_proj, attention.v_proj):
                    flat = torch.randn(2, 8, 4) @ torch.randn(2, 4, 8)
                    part.weight.copy_(torch.block_diag(*flat) @ part.weight)
                    part.bias.copy_(torch.block_diag(*flat) @ part.bias)
            if name.endswith("fc1"):
                layer = model.get_submodule(name.rpartition(".")[0])
                layer.fc1.weight[:4], layer.fc1.bias[:4] = 0, -1  # never fire
                layer.fc1.weight[4:8], layer.fc1.bias[4:8] = 2 * layer.fc1.weight[8:12], 2 * layer.fc1.bias[8:12]
    model.save_pretrained(folder)
    return folder, model


def test_what_heads_and_neurons_do_not_use_is_left_out_without_loss(narrow_inside, tmp_path, monkeypatch):
    folder, teacher = narrow_inside
    monkeypatch.setattr(sensitivity, "SELF_GENERATED_SHRINKAGE", 0.0)  # otherwise all inputs count as seen
    halved = {"method": "narrow", "pattern": {"attention": "2x", "ffn": "2x"}}
    report = convert(folder, tmp_path / "light", **halved, study=StudyOptions(refit=False), progress=False)
    light = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "light").eval()
    assert light.config.head_dim == 4
    assert light.config.encoder_ffn_dim == light.config.decoder_ffn_dim == 8
    assert light.config.head_dim_pattern == light.config.ffn_dim_pattern == {}
    torch.testing.assert_close(logits(light), logits(teacher), atol=1e-4, rtol=1e-4)
    for attention in (layer.self_attn for layer in light.model.encoder.layers):  # fit for training
        sizes = [attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj]
        sizes = [linear.weight.norm().item() for linear in sizes]
        assert max(sizes) < 4 * min(sizes)
    matrix = next(matrix for matrix in report.matrices if matrix.name == "decoder.layers.0.encoder_attn.out_proj")
    assert (matrix.m, matrix.n, matrix.size, matrix.parameters_after) == (16, 16, 4, 8 * 16)
    assert report.parameters_after == light.num_parameters()
    saved = json.loads((tmp_path / "light" / "compression.json").read_text())
    assert {entry["setting"] for entry in saved["matrices"]} == {"dense", "heads 4 wide", "8 neurons"}


def test_fewer_neurons_of_low_rank_where_neither_is_enough(narrow_inside, tmp_path, monkeypatch):
    folder, _ = narrow_inside
    monkeypatch.setattr(sensitivity, "SELF_GENERATED_SHRINKAGE", 0.0)
    teacher = MarianMTModel.from_pretrained(folder)
    with torch.no_grad():
        for layer in (*teacher.model.encoder.layers, *teacher.model.decoder.layers):
            layer.fc1.weight[8:] = torch.randn(8, 2) @ torch.randn(2, 16)
            layer.fc1.weight[4:8] = 2 * layer.fc1.weight[8:12]
    teacher.save_pretrained(tmp_path / "teacher")
    asked = {"ratio": 2.8, "pattern": {"embedding": "dense", "attention": "dense"}}
    for method in ("auto", "low-rank", "narrow"):
        study = StudyOptions(refit=False)
        convert(tmp_path / "teacher", tmp_path / method, method=method, **asked, study=study, progress=False)
    light, *others = (
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path / method).eval() for method in ("auto", "low-rank", "narrow")
    )
    saved = json.loads((tmp_path / "auto" / "compression.json").read_text())
    assert "8 neurons, rank 2" in {entry["setting"] for entry in saved["matrices"]}
    assert light.config.encoder_ffn_dim == 8
    errors = [(logits(model) - logits(teacher)).norm() for model in (light, *others)]
    assert errors[0] < 0.05 * min(errors[1:])
