"""Balancing against its definition on whole matrices, and what it keeps."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightformers_hf import convert
from lightformers_hf.conversion import balance as module
from lightformers_hf.conversion.balance import BALANCING, SMOOTHING, WORTH_BALANCING
from lightformers_hf.conversion.statistics.shelf import Shelf

TOKENS, SIZE, WIDTH = 90, 37, 8


def output_layer(seed, spread):
    torch.manual_seed(seed)
    head = nn.Linear(WIDTH, SIZE, bias=False).requires_grad_(False)
    layer = SimpleNamespace(lm_head=head, final_logits_bias=torch.randn(1, SIZE) * spread, device=torch.device("cpu"))
    layer.logits_of = lambda states: head(states) + layer.final_logits_bias
    return layer


def by_definition(logits, teacher, bias):
    """The bias after all steps, and the cross-entropy before and after each, in double precision."""
    logits, wanted, bias = logits.double(), teacher.double().softmax(-1), bias.double().clone()
    target, losses = wanted.sum(0), []
    for step in range(BALANCING + 1):
        losses.append(-(wanted * (logits + bias).log_softmax(-1)).sum().item() / len(logits))
        if step < BALANCING:
            bias += ((target + SMOOTHING) / ((logits + bias).softmax(-1).sum(0) + SMOOTHING)).log()
    return bias, losses


@pytest.mark.parametrize("room", [0, 50 * SIZE * 4, 2**20])
@pytest.mark.parametrize(("spread", "step"), [(0.05, 1), (2.0, 1), (2.0, 3)])
def test_balance_is_what_its_definition_says(room, spread, step, monkeypatch):
    """Whether nothing, some or all of the probabilities are kept between the steps, at all tokens or every third."""
    monkeypatch.setattr(module, "LOGIT_ROWS", 16)
    monkeypatch.setattr(module, "BALANCED", 2 * TOKENS // step)
    student, teacher = output_layer(0, spread), output_layer(1, spread)
    labels = torch.zeros(3, TOKENS // 2, dtype=torch.long)
    labels[2, :] = -100  # padding
    shelf = Shelf()
    states = {who: torch.randn(2, 3, TOKENS // 2, WIDTH) for who in ("student", "teacher")}
    for who, parts in states.items():
        for index, part in enumerate(parts):
            shelf[who, "decoder", index] = part
    shelf.room = room
    kept = {who: parts[:, :2].reshape(2, -1, WIDTH)[:, ::step].flatten(0, 1) for who, parts in states.items()}
    before = student.final_logits_bias.clone()
    wanted = teacher.lm_head(kept["teacher"]) + teacher.final_logits_bias
    expected, losses = by_definition(student.lm_head(kept["student"]), wanted, before)
    batches = [{"labels": labels}, {"labels": labels}]
    passes, probabilities = [], module._probabilities
    monkeypatch.setattr(module, "_probabilities", lambda *args: passes.append(args[0]) or probabilities(*args))
    module.balance(student, teacher, batches, shelf, progress=False)
    won = losses[0] - losses[-1] >= WORTH_BALANCING
    assert won == (spread > 1)
    if not won:  # which is known by the first of the steps: two passes
        assert passes.count(student) <= 2 * passes.count(teacher)
    torch.testing.assert_close(student.final_logits_bias.double(), expected if won else before.double())


def test_nothing_is_kept_for_gradients(tiny_marian, monkeypatch, tmp_path):
    """Of balancing, whose logits are as wide as the vocabulary."""
    found, probabilities = [], module._probabilities

    def look(*arguments):
        found.append(probabilities(*arguments))
        return found[-1]

    monkeypatch.setattr(module, "_probabilities", look)
    convert(tiny_marian, tmp_path / "light", ratio=4, decoder_layers=1, calibration_samples=32, progress=False)
    assert found
    assert not any(each.requires_grad for each in found)
