"""Losses, gradients, recorded states."""

import pytest
import torch
from lightformer_cases import VARIANTS, make_model, padded, sentences
from torch import nn

from lightformers_hf.models import (
    LightFormerForCausalLM,
    LightFormerForConditionalGeneration,
    LightFormerForSequenceClassification,
)

HEADS = [LightFormerForConditionalGeneration, LightFormerForCausalLM, LightFormerForSequenceClassification]
EVERY_HEAD = pytest.mark.parametrize("model_class", HEADS, ids=lambda model_class: model_class.__name__)
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)


def batch_for(model) -> dict[str, torch.Tensor]:
    """A padded batch with the labels that the head learns from."""
    ids, mask = padded(sentences((9, 5, 7, 6)))
    if isinstance(model, LightFormerForSequenceClassification):
        labels = torch.tensor([0, 1, 1, 0])
    elif isinstance(model, LightFormerForConditionalGeneration):
        target, target_mask = padded(sentences((4, 8, 3, 6), seed=1))
        labels = target.masked_fill(target_mask == 0, -100)
    else:
        labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def gradients(model, batch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**batch).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_seq2seq_loss_is_the_cross_entropy_of_the_labels():
    model = make_model(LightFormerForConditionalGeneration, "two_vocabularies")
    batch = batch_for(model)
    out = model(**batch)
    decoder_ids = torch.cat([torch.full((4, 1), 2), batch["labels"][:, :-1]], dim=1)
    decoder_ids[decoder_ids == -100] = 1
    logits = model(batch["input_ids"], batch["attention_mask"], decoder_input_ids=decoder_ids).logits
    torch.testing.assert_close(out.logits, logits)
    expected = nn.functional.cross_entropy(logits.reshape(-1, 32), batch["labels"].reshape(-1))
    torch.testing.assert_close(out.loss, expected)
    assert torch.equal(model.prepare_decoder_input_ids_from_labels(labels=batch["labels"]), decoder_ids)
    assert out.past_key_values is None


def test_causal_loss_is_the_cross_entropy_of_the_next_token():
    model = make_model(LightFormerForCausalLM)
    batch = batch_for(model)
    out = model(**batch)
    expected = nn.functional.cross_entropy(out.logits[:, :-1].reshape(-1, 40), batch["labels"][:, 1:].reshape(-1))
    torch.testing.assert_close(out.loss, expected)
    last = model(batch["input_ids"], batch["attention_mask"], logits_to_keep=2).logits
    torch.testing.assert_close(last, out.logits[:, -2:])


@pytest.mark.parametrize(
    ("labels", "loss"),
    [
        (torch.tensor([0, 2, 1, 0]), nn.functional.cross_entropy),
        (torch.tensor([[0.3, 2.0, 1.0]] * 4), nn.functional.mse_loss),
    ],
)
def test_classification_loss(labels, loss):
    problem = "regression" if labels.is_floating_point() else "single_label_classification"
    model = make_model(LightFormerForSequenceClassification, num_labels=3, problem_type=problem, embedding_dim=10)
    out = model(**batch_for(model) | {"labels": labels})
    torch.testing.assert_close(out.loss, loss(out.logits, labels))


@pytest.mark.parametrize("model_class", HEADS[:2])
def test_gradient_accumulation_equals_one_batch(model_class):
    """Four parts of different numbers of tokens, each divided by the tokens of all of them, add up to the batch."""
    model = make_model(model_class, "groups")
    batch = batch_for(model)
    whole = gradients(model, batch)
    loss = model(**batch).loss
    shift = model_class is LightFormerForCausalLM
    tokens = (batch["labels"][:, shift:] != -100).sum()
    model.zero_grad()
    parts = 0
    for row in range(4):
        part = model(**{name: tensor[row : row + 1] for name, tensor in batch.items()}, num_items_in_batch=tokens).loss
        part.backward()
        parts += part.detach()
    torch.testing.assert_close(parts, loss.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name], atol=1e-5, rtol=1e-4)


@EVERY_HEAD
@EVERY_VARIANT
def test_gradients_reach_every_parameter(model_class, variant):
    model = make_model(model_class, variant, spread=0.3).train()
    key_biases = ("k_proj.bias", "k_proj.v.bias")  # softmax does not see what is added to all keys alike
    for name, gradient in gradients(model, batch_for(model)).items():
        assert gradient.isfinite().all(), name
        assert gradient.abs().max() > 1e-7 or name.endswith(key_biases), name


@EVERY_HEAD
@pytest.mark.parametrize("variant", ["low_rank", "groups_private_norms", "pre_norm"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(model_class, variant, use_reentrant):
    model = make_model(model_class, variant, dropout=0.1).double().train()
    batch = batch_for(model)
    torch.manual_seed(0)
    expected = gradients(model, batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    calls = []
    layer = next(module for module in model.modules() if type(module).__name__ == "LightFormerLayer")
    layer.fc1.register_forward_hook(lambda *_: calls.append(1))
    torch.manual_seed(0)
    for name, gradient in gradients(model, batch).items():
        torch.testing.assert_close(gradient, expected[name], msg=name)
    assert len(calls) >= 2  # it does compute the layer again


@EVERY_VARIANT
@torch.no_grad()
def test_recorded_states(variant):
    """One attention a depth and one state more than depths, also where layers are shared."""
    seq2seq = make_model(LightFormerForConditionalGeneration, variant, attn_implementation="eager")
    config, (ids, mask) = seq2seq.config, padded(sentences())
    target = torch.randint(4, 32, (3, 4))
    record = {"output_attentions": True, "output_hidden_states": True}
    out = seq2seq(ids, mask, decoder_input_ids=target, **record)
    L, N = config.encoder_layers, config.decoder_layers
    heads, decoder_heads = config.encoder_attention_heads, config.decoder_attention_heads
    expected = {
        "encoder_hidden_states": (L + 1, (3, 9, 16)),
        "decoder_hidden_states": (N + 1, (3, 4, 16)),
        "encoder_attentions": (L, (3, heads, 9, 9)),
        "decoder_attentions": (N, (3, decoder_heads, 4, 4)),
        "cross_attentions": (N, (3, decoder_heads, 4, 9)),
    }
    for name, (number, shape) in expected.items():
        assert [tuple(state.shape) for state in out[name]] == [shape] * number, name
    for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        for weights in out[name]:
            torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
    for first, second in zip(out.decoder_hidden_states, out.decoder_hidden_states[1:], strict=False):
        assert not torch.equal(first, second)
    assert torch.equal(out.encoder_hidden_states[-1], out.encoder_last_hidden_state)
    plain = seq2seq(ids, mask, decoder_input_ids=target)
    assert plain.encoder_hidden_states is None
    assert plain.cross_attentions is None
    assert torch.equal(plain.logits, out.logits)
    as_tuple = seq2seq(ids, mask, decoder_input_ids=target, return_dict=False)
    assert torch.equal(as_tuple[0], out.logits)

    causal = make_model(LightFormerForCausalLM, variant, attn_implementation="eager")(ids, mask, **record)
    assert [tuple(state.shape) for state in causal.hidden_states] == [(3, 9, 16)] * (N + 1)
    assert [tuple(weights.shape) for weights in causal.attentions] == [(3, decoder_heads, 9, 9)] * N
    classifier = make_model(LightFormerForSequenceClassification, variant, attn_implementation="eager")
    recorded = classifier(ids, mask, **record)
    assert [tuple(state.shape) for state in recorded.hidden_states] == [(3, 9, 16)] * (L + 1)
    assert [tuple(weights.shape) for weights in recorded.attentions] == [(3, heads, 9, 9)] * L


@EVERY_HEAD
@torch.no_grad()
def test_embeddings_in_place_of_ids(model_class):
    model = make_model(model_class, "low_rank", **({"embedding_dim": 10} if model_class is HEADS[2] else {}))
    batch = batch_for(model)
    expected = model(**batch).logits
    vectors = model.get_input_embeddings()(batch.pop("input_ids"))
    torch.testing.assert_close(model(inputs_embeds=vectors, **batch).logits, expected)
    with pytest.raises(ValueError, match="exactly one"):
        model(**{name: tensor for name, tensor in batch.items() if name != "labels"})
