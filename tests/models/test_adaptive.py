"""Adaptive input and softmax, against torch's own adaptive softmax and a literal one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import references
from models.references import Weights, double_model, like_trained
from torch import nn

from lightformers_hf.models import PartialFormerConfig, PartialFormerForCausalLM, SubformerConfig, SubformerForCausalLM
from lightformers_hf.models.low_rank import AdaptiveEmbedding, AdaptiveOutput

pytestmark = pytest.mark.quick

SIZES = {
    "vocab_size": 40,
    "d_model": 16,
    "decoder_layers": 3,
    "decoder_attention_heads": 2,
    "embedding": "adaptive",
    "adaptive_cutoffs": [10, 25],
    "adaptive_factor": 2,
    "max_position_embeddings": 16,
    "dropout": 0.0,
}
SUBFORMER = {**SIZES, "encoder_attention_heads": 2, "sandwich_attention_heads": 2, "ffn_dim": 20}
PARTIALFORMER = {**SIZES, "head_dim": 8, "base_attention_heads": 2}
FAMILIES = {
    "subformer": lambda **fields: double_model(SubformerForCausalLM, SubformerConfig(**{**SUBFORMER, **fields})),
    "partialformer": lambda **fields: double_model(
        PartialFormerForCausalLM, PartialFormerConfig(**{**PARTIALFORMER, **fields})
    ),
}


def output_of(vocab_size: int = 40, d: int = 16, cutoffs=(10, 25), factor: int = 2) -> AdaptiveOutput:
    return like_trained(AdaptiveOutput(vocab_size, d, list(cutoffs), factor).double())


def torch_softmax(output: AdaptiveOutput, vocab_size: int, d: int, cutoffs, factor: int):
    """torch's adaptive softmax with the weights of `output`. In its first band table and projection are one matrix."""
    theirs = nn.AdaptiveLogSoftmaxWithLoss(d, vocab_size, list(cutoffs), div_value=factor).double()
    with torch.no_grad():
        first = output.tables[0].weight @ output.projections[0].weight.T
        theirs.head.weight.copy_(torch.cat([first, output.classes.weight]))
        for band, (down, up) in enumerate(theirs.tail, start=1):
            down.weight.copy_(output.projections[band].weight.T)
            up.weight.copy_(output.tables[band].weight)
    return theirs


def states_of(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@st.composite
def bands(draw):
    """vocab_size, d, cutoffs, factor: any that go together."""
    vocab_size = draw(st.integers(2, 60))
    cutoffs = sorted(draw(st.sets(st.integers(1, vocab_size - 1), min_size=1, max_size=4)))
    factor = draw(st.integers(1, 4))
    d = draw(st.integers(factor ** len(cutoffs), 3 * factor ** len(cutoffs)).filter(lambda d: d <= 300))
    return vocab_size, d, cutoffs, factor


@settings(max_examples=40)
@given(bands())
def test_softmax_is_that_of_torch(sizes):
    vocab_size, d, cutoffs, factor = sizes
    output = output_of(*sizes)
    theirs = torch_softmax(output, vocab_size, d, cutoffs, factor)
    states = states_of(vocab_size + 3, d)
    labels = torch.arange(vocab_size + 3) % vocab_size  # every token, so every band
    log_p = output(states)
    torch.testing.assert_close(log_p, theirs.log_prob(states), rtol=0, atol=1e-10)
    torch.testing.assert_close(output.loss(states, labels), theirs(states, labels).loss, rtol=0, atol=1e-10)
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(vocab_size + 3, dtype=torch.float64))


@settings(max_examples=40)
@given(bands(), st.integers(0, 2**31))
def test_loss_is_the_cross_entropy_of_the_log_probabilities(sizes, seed):
    """Whichever bands the labels are in, and whichever labels are ignored."""
    output, generator = output_of(*sizes), torch.Generator().manual_seed(seed)
    states = states_of(3, 4, sizes[1], seed=seed)
    labels = torch.randint(0, sizes[0], (3, 4), generator=generator)
    labels[torch.rand(3, 4, generator=generator) < 0.4] = -100
    labels[0, 0] = 0
    flat = (output(states).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(output.loss(states, labels), nn.functional.nll_loss(*flat), rtol=0, atol=1e-10)
    torch.testing.assert_close(
        output.loss(states, labels, 7), nn.functional.nll_loss(*flat, reduction="sum") / 7, rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("band", [0, 1, 2])
def test_labels_of_one_band(band):
    """Bands without a label: the loss is right, and their tables get no gradient but through the classes."""
    output, states = output_of(), states_of(6, 16)
    start, end = [0, 10, 25, 40][band : band + 2]
    labels = torch.arange(start, end)[:6]
    loss = output.loss(states, labels)
    torch.testing.assert_close(loss, nn.functional.nll_loss(output(states), labels), rtol=0, atol=1e-10)
    loss.backward()
    for number, table in enumerate(output.tables):
        moved = table.weight.grad is not None and bool(table.weight.grad.any())
        assert moved == (number in (0, band))
    assert output.classes.weight.grad.any()


def test_loss_without_any_label():
    """All labels ignored: `num_items` decides (several devices, one of them idle), and the gradient is zero."""
    output, states = output_of(), states_of(2, 3, 16).requires_grad_()
    loss = output.loss(states, torch.full((2, 3), -100), 5)
    loss.backward()
    assert loss.item() == 0
    assert not states.grad.any()


@settings(max_examples=30)
@given(bands(), st.data())
def test_embedding_is_a_lookup(sizes, data):
    vocab_size, d, cutoffs, factor = sizes
    pad = data.draw(st.none() | st.integers(0, vocab_size - 1))
    embedding = like_trained(AdaptiveEmbedding(vocab_size, d, cutoffs, factor, pad).double())
    config = SubformerConfig(
        vocab_size=vocab_size,
        d_model=d,
        encoder_attention_heads=1,
        decoder_attention_heads=1,
        sandwich_attention_heads=1,
        embedding="adaptive",
        adaptive_cutoffs=cutoffs,
        adaptive_factor=factor,
    )
    ids = torch.arange(vocab_size).view(1, -1)
    expected = [references.adaptive_embedding(Weights.of(embedding), config, token) for token in range(vocab_size)]
    np.testing.assert_allclose(embedding(ids)[0].detach().numpy(), np.array(expected), rtol=0, atol=1e-12)
    assert [table.weight.shape[1] for table in embedding.tables] == [
        d // factor**band for band in range(len(cutoffs) + 1)
    ]


@pytest.mark.parametrize(("pad", "band", "row"), [(1, 0, 1), (9, 0, 9), (10, 1, 0), (39, 2, 14)])
def test_fresh_tables(pad, band, row):
    """The padding row is zero, in whichever band it is, and projected vectors are as spread in every band."""
    torch.manual_seed(0)
    config = PartialFormerConfig(**{**PARTIALFORMER, "pad_token_id": pad})
    tables = PartialFormerForCausalLM(config).decoder.embed_tokens.tables
    zero = [(i, j) for i, table in enumerate(tables) for j, vector in enumerate(table.weight) if not vector.any()]
    assert zero == [(band, row)]
    large = {**PARTIALFORMER, "vocab_size": 3000, "d_model": 128, "adaptive_cutoffs": [1000, 2000]}
    for std in (None, 0.03):
        embedding = PartialFormerForCausalLM(PartialFormerConfig(**large, init_std=std)).decoder.embed_tokens
        for table in embedding.tables:
            assert table.weight.std().item() == pytest.approx(std or table.embedding_dim**-0.5, rel=0.05)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_model_loss_and_gradients(family, tie):
    model = FAMILIES[family](tie_word_embeddings=tie)
    ids = torch.randint(0, 40, (4, 16), generator=torch.Generator().manual_seed(0))
    ids[:, :3] = torch.tensor([2, 12, 30])  # every band is an input and a label
    labels = ids.clone()
    labels[1, 5:] = -100
    log_p = model(ids).logits
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(4, 16, dtype=torch.float64))
    flat = (log_p[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    outputs = model(ids, labels=labels)
    assert outputs.logits is None
    torch.testing.assert_close(outputs.loss, nn.functional.nll_loss(*flat), rtol=0, atol=1e-10)
    torch.testing.assert_close(
        model(ids, labels=labels, num_items_in_batch=11).loss,
        nn.functional.nll_loss(*flat, reduction="sum") / 11,
        rtol=0,
        atol=1e-10,
    )
    outputs.loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("strange", [40, -1])
def test_ids_that_there_are_not_are_refused_as_by_any_table(family, strange):
    with pytest.raises(IndexError):
        FAMILIES[family]()(torch.tensor([[3, strange]]))
