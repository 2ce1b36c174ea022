"""Layers without calling their modules: nothing comes out that the modules would not give."""

import copy

import pytest
import torch
from models.cases import VARIANTS, every, make_model, padded, run_model, sentences
from torch import nn

from lightformers_hf.models import modeling_lightformer as module

LIGHTFORMERS = [variant for variant, (family, _) in VARIANTS.items() if family == "lightformer"]
MODES = {"greedy": {}, "beam 4": {"num_beams": 4}}


@pytest.fixture
def ran_fast(monkeypatch):
    """Whether each stack that has run did so without its modules, in their order."""
    real, seen = module.run_layers_fast, []

    def watched(*arguments, **others):
        states = real(*arguments, **others)
        seen.append(states is not None)
        return states

    monkeypatch.setattr(module, "run_layers_fast", watched)
    return seen


def by_modules(compute):
    """What `compute` returns with every module called."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "run_layers_fast", lambda *arguments, **others: None)
        return compute()


def batch_for(model) -> tuple[torch.Tensor, torch.Tensor]:
    return padded(sentences(), "right" if model.config.is_encoder_decoder else "left")


def logits_of(model) -> torch.Tensor:
    return run_model(model, *batch_for(model)).logits


@every(("ConditionalGeneration", "CausalLM", "SequenceClassification"), LIGHTFORMERS)
@torch.no_grad()
def test_the_same_logits(head, variant, ran_fast):
    model = make_model(head, variant)
    computed = logits_of(model)
    assert set(ran_fast) == {True}
    torch.testing.assert_close(computed, by_modules(lambda: logits_of(model)), atol=1e-5, rtol=1e-5)


@every(("ConditionalGeneration", "CausalLM"), LIGHTFORMERS)
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_the_same_tokens(head, variant, mode, use_cache, ran_fast):
    model = make_model(head, variant, seed=2).double()
    ids, mask = batch_for(model)

    def generate():
        return model.generate(
            ids, attention_mask=mask, max_new_tokens=8, no_repeat_ngram_size=1, use_cache=use_cache, **MODES[mode]
        )

    generated = generate()
    assert set(ran_fast) == {True}
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
def test_modules_that_do_more_are_called(change, ran_fast):
    model = make_model("ConditionalGeneration", "lightformer-low-rank")
    before = logits_of(model)
    change(model.model.decoder.layers[0].encoder_attn)
    ran_fast.clear()
    after = logits_of(model)
    assert ran_fast == [True, False]  # encoder, decoder
    assert not torch.allclose(before, after)


@torch.no_grad()
def test_hooks_on_all_modules_are_called(ran_fast):
    model, called = make_model("ConditionalGeneration", "lightformer"), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: called.append(module))
    try:
        logits_of(model)
    finally:
        handle.remove()
    assert not any(ran_fast)
    assert model.model.decoder.layers[1].fc2 in called


def test_training_calls_the_modules(ran_fast):
    model = make_model("ConditionalGeneration", "lightformer-low-rank", dropout=0.5).train()
    logits_of(model).sum().backward()
    assert not any(ran_fast)
    assert all(parameter.grad is not None for parameter in model.model.decoder.layers.parameters())
    with torch.no_grad():
        assert not torch.equal(logits_of(model), logits_of(model))  # dropout
        assert not any(ran_fast)
        model.eval().model.decoder.layers[0].train()
        assert not torch.equal(logits_of(model), logits_of(model))


def record(model, by: str) -> tuple[torch.Tensor, ...]:
    """What the model records of its decoder when that is asked for in a call, or by the configuration."""
    if by == "output_attentions":
        model.set_attn_implementation("eager")
        recorded = run_model(model, *batch_for(model), output_attentions=True).cross_attentions
        model.set_attn_implementation("sdpa")
        return recorded
    if by == "output_hidden_states":
        return run_model(model, *batch_for(model), output_hidden_states=True).decoder_hidden_states
    for stack in (model, model.model.encoder, model.model.decoder):
        stack.config.output_hidden_states = True
    recorded = run_model(model, *batch_for(model)).decoder_hidden_states
    for stack in (model, model.model.encoder, model.model.decoder):
        stack.config.output_hidden_states = False
    return recorded


@pytest.mark.parametrize("by", ["output_attentions", "output_hidden_states", "configuration"])
@torch.no_grad()
def test_what_is_recorded_once_slows_nothing_down_later(by, ran_fast):
    """The hooks of transformers that record stay on the layers."""
    model = make_model("ConditionalGeneration", "lightformer-private-norms")
    before = logits_of(model)
    ran_fast.clear()
    recorded = record(model, by)
    assert ran_fast == [False, False]
    assert len(recorded) == (4 if by == "output_attentions" else 5)
    assert model.model.decoder.layers[0]._forward_hooks
    ran_fast.clear()
    assert torch.equal(logits_of(model), before)
    assert ran_fast == [True, True]
    assert all(map(torch.equal, record(model, by), recorded))


@torch.no_grad()
def test_a_hook_beside_those_that_record_is_called(ran_fast):
    model = make_model("ConditionalGeneration", "lightformer")
    record(model, "output_hidden_states")
    layer, called = model.model.decoder.layers[1], []
    layer.register_forward_hook(lambda module, inputs, output: called.append(module))
    ran_fast.clear()
    logits_of(model)
    assert ran_fast == [True, False]
    assert called == [layer]


def test_training_by_hidden_states_evaluates_fast(ran_fast):
    model = make_model("ConditionalGeneration", "lightformer-low-rank").train()
    run_model(model, *batch_for(model), output_hidden_states=True).logits.sum().backward()
    with torch.no_grad():
        logits_of(model.eval())
    assert ran_fast == [False, False, True, True]


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
