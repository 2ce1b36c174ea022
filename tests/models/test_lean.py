"""Layers without their modules: nothing comes out that the modules would not give."""

import copy

import pytest
import torch
from models.cases import VARIANTS, every, make_model, padded, run_model, sentences
from torch import nn

from lightformers_hf.models import modeling_lightformer as module

LIGHTFORMERS = [variant for variant, (family, _) in VARIANTS.items() if family == "lightformer"]
MODES = {"greedy": {}, "beam 4": {"num_beams": 4}}


@pytest.fixture
def leanly(monkeypatch):
    """Whether each stack that has run did so without its modules, in their order."""
    real, seen = module.lean_layers, []

    def watched(*arguments, **others):
        states = real(*arguments, **others)
        seen.append(states is not None)
        return states

    monkeypatch.setattr(module, "lean_layers", watched)
    return seen


def by_modules(compute):
    """What `compute` returns with every module called."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "lean_layers", lambda *arguments, **others: None)
        return compute()


def batch_for(model) -> tuple[torch.Tensor, torch.Tensor]:
    return padded(sentences(), "right" if model.config.is_encoder_decoder else "left")


def logits_of(model) -> torch.Tensor:
    return run_model(model, *batch_for(model)).logits


@every(("ConditionalGeneration", "CausalLM", "SequenceClassification"), LIGHTFORMERS)
@torch.no_grad()
def test_the_same_logits(head, variant, leanly):
    model = make_model(head, variant)
    computed = logits_of(model)
    assert set(leanly) == {True}
    torch.testing.assert_close(computed, by_modules(lambda: logits_of(model)), atol=1e-5, rtol=1e-5)


@every(("ConditionalGeneration", "CausalLM"), LIGHTFORMERS)
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_the_same_tokens(head, variant, mode, use_cache, leanly):
    model = make_model(head, variant, seed=2).double()
    ids, mask = batch_for(model)

    def generate():
        return model.generate(
            ids, attention_mask=mask, max_new_tokens=8, no_repeat_ngram_size=1, use_cache=use_cache, **MODES[mode]
        )

    generated = generate()
    assert set(leanly) == {True}
    assert torch.equal(generated, by_modules(generate))


@torch.no_grad()
def test_changed_weights_are_seen():
    model = make_model("ConditionalGeneration", "lightformer-low-rank")
    before = logits_of(model)
    model.model.decoder.layers[0].fc1.u.weight.mul_(2)
    model.model.encoder.layers[0].self_attn.q_proj.v.weight = nn.Parameter(torch.zeros(16, 5))
    after = logits_of(model)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, by_modules(lambda: logits_of(model)), atol=1e-5, rtol=1e-5)


class Adapted(nn.Module):
    """A layer and what is added to it, as adapters do."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.layer(states) + 1


def hook(owner: nn.Module) -> None:
    owner.v_proj.register_forward_hook(lambda module, inputs, output: output + 1)


def hook_factor(owner: nn.Module) -> None:
    owner.v_proj.v.register_forward_hook(lambda module, inputs, output: output + 1)


def pre_hook(owner: nn.Module) -> None:
    owner.v_proj.u.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))


def adapt(owner: nn.Module) -> None:
    owner.v_proj = Adapted(owner.v_proj)


def adapt_factor(owner: nn.Module) -> None:
    owner.v_proj.u = Adapted(owner.v_proj.u)


def replace_forward(owner: nn.Module) -> None:
    """As accelerate does to load weights for each call."""
    real = owner.v_proj.forward
    owner.v_proj.forward = lambda states: real(states) + 1


@pytest.mark.parametrize("change", [hook, hook_factor, pre_hook, adapt, adapt_factor, replace_forward])
@torch.no_grad()
def test_modules_that_do_more_are_called(change, leanly):
    model = make_model("ConditionalGeneration", "lightformer-low-rank")
    before = logits_of(model)
    change(model.model.decoder.layers[0].encoder_attn)
    leanly.clear()
    after = logits_of(model)
    assert leanly == [True, False]  # encoder, decoder
    assert not torch.allclose(before, after)


@torch.no_grad()
def test_hooks_on_all_modules_are_called(leanly):
    model, called = make_model("ConditionalGeneration", "lightformer"), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: called.append(module))
    try:
        logits_of(model)
    finally:
        handle.remove()
    assert not any(leanly)
    assert model.model.decoder.layers[1].fc2 in called


def test_training_calls_the_modules(leanly):
    model = make_model("ConditionalGeneration", "lightformer-low-rank", dropout=0.5).train()
    logits_of(model).sum().backward()
    assert not any(leanly)
    assert all(parameter.grad is not None for parameter in model.model.decoder.layers.parameters())
    with torch.no_grad():
        assert not torch.equal(logits_of(model), logits_of(model))  # dropout
        assert not any(leanly)
        model.eval().model.decoder.layers[0].train()
        assert not torch.equal(logits_of(model), logits_of(model))


@torch.no_grad()
def test_recorded_states_are_all_there():
    model = make_model("ConditionalGeneration", "lightformer-private-norms")
    ids, mask = batch_for(model)
    plain = run_model(model, ids, mask)
    recorded = run_model(model, ids, mask, output_hidden_states=True)
    assert len(recorded.decoder_hidden_states) == 5
    torch.testing.assert_close(recorded.logits, plain.logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "autocast"])
@torch.no_grad()
def test_other_precisions(precision):
    model = make_model("ConditionalGeneration", "lightformer-low-rank", spread=0.3)
    exact = logits_of(model)
    if precision == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            computed = logits_of(model)
            expected = by_modules(lambda: logits_of(model))
    else:
        model = copy.deepcopy(model).to(getattr(torch, precision))
        computed, expected = logits_of(model), by_modules(lambda: logits_of(model))
    assert torch.equal(computed, expected)
    torch.testing.assert_close(computed.float(), exact, atol=0.2, rtol=0.1)
