"""Losses, gradients, recorded states."""

import pytest
import torch
from models.cases import GENERATING, PLAIN, SPECIAL, TRAINED, VARIANTS, every, make_model, padded, run_model, sentences
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions


def batch_for(model) -> dict[str, torch.Tensor]:
    """A padded batch with the labels that the head learns from."""
    ids, mask = padded(sentences((9, 5, 7, 6)))
    if hasattr(model, "classifier"):
        labels = torch.tensor([0, 1, 1, 0])
    elif model.config.is_encoder_decoder:
        target, target_mask = padded(sentences((4, 8, 3, 6), seed=1))
        labels = target.masked_fill(target_mask == 0, -100)
    else:
        labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def gradients(model, batch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**batch).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "variant", ["lightformer-two-vocabularies", "subformer-two-vocabularies", "partialformer-self-ffn"]
)
def test_seq2seq_loss_is_the_cross_entropy_of_the_labels(variant):
    model = make_model("ConditionalGeneration", variant)
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


@every(["CausalLM"], [*PLAIN, *(variant for variant in VARIANTS if variant.endswith("-adaptive"))])
def test_causal_loss_is_the_cross_entropy_of_the_next_token(head, variant):
    model = make_model(head, variant)
    batch = batch_for(model)
    labels = batch["labels"]
    out, logits = model(**batch), model(batch["input_ids"], batch["attention_mask"]).logits
    expected = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 40), labels[:, 1:].reshape(-1))
    torch.testing.assert_close(out.loss, expected)
    last = model(batch["input_ids"], batch["attention_mask"], logits_to_keep=2).logits
    torch.testing.assert_close(last, logits[:, -2:])


@every(["CausalLM"], PLAIN)
def test_trainer_smooths_the_labels_of_the_next_token(head, variant, tmp_path):
    """It goes by the name of the class, and smoothed every token's own before."""
    model = make_model(head, variant)
    batch = batch_for(model)
    arguments = TrainingArguments(tmp_path, use_cpu=True, label_smoothing_factor=0.1, report_to="none")
    with torch.no_grad():
        loss = Trainer(model, arguments).compute_loss(model, dict(batch))
        scores = model(batch["input_ids"], batch["attention_mask"]).logits[:, :-1].log_softmax(-1)
    labels = batch["labels"][:, 1:]
    kept = labels != -100
    chosen = scores[kept].gather(-1, labels[kept, None]).mean()
    torch.testing.assert_close(loss, -0.9 * chosen - 0.1 * scores[kept].mean())


@pytest.mark.parametrize(
    ("labels", "loss"),
    [
        (torch.tensor([0, 2, 1, 0]), nn.functional.cross_entropy),
        (torch.tensor([[0.3, 2.0, 1.0]] * 4), nn.functional.mse_loss),
    ],
)
def test_classification_loss(labels, loss):
    problem = "regression" if labels.is_floating_point() else "single_label_classification"
    model = make_model("SequenceClassification", "lightformer", num_labels=3, problem_type=problem, embedding_dim=10)
    out = model(**batch_for(model) | {"labels": labels})
    torch.testing.assert_close(out.loss, loss(out.logits, labels))


@every(GENERATING, SPECIAL)
def test_gradient_accumulation_equals_one_batch(head, variant):
    """Four parts of different numbers of tokens, each divided by the tokens of all of them, add up to the batch."""
    model = make_model(head, variant).double()
    batch = batch_for(model)
    whole = gradients(model, batch)
    loss = model(**batch).loss
    shift = head == "CausalLM"
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


# They add the same to the logits of all keys, which softmax does not see. The last is head scaling's.
WITHOUT_GRADIENT = ("k_proj.bias", "k_proj.v.bias", "mix.bias")


@every(TRAINED)
def test_gradients_reach_every_parameter(head, variant):
    model = make_model(head, variant, spread=0.3).double().train()
    for name, gradient in gradients(model, batch_for(model)).items():
        assert gradient.isfinite().all(), name
        assert gradient.abs().max() > 1e-7 or name.endswith(WITHOUT_GRADIENT), name


@every(TRAINED, (*SPECIAL, "lightformer-low-rank", "subformer-same-width", "partialformer-cross-ffn"))
@pytest.mark.parametrize("use_reentrant", [False])
def test_gradient_checkpointing_changes_no_gradient(head, variant, use_reentrant):
    model = make_model(head, variant, dropout=0.1, attention_dropout=0.1).double().train()
    batch = batch_for(model)
    torch.manual_seed(0)
    expected = gradients(model, batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    depths = sum(len(module.stored_at) for module in model.modules() if hasattr(module, "stored_at"))
    calls = []
    for layer in layers:
        layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    torch.manual_seed(0)
    for name, gradient in gradients(model, batch).items():
        torch.testing.assert_close(gradient, expected[name], msg=name)
    assert len(calls) == 2 * depths  # it does compute every depth again


@every(TRAINED, PLAIN)
def test_reentrant_checkpointing_changes_no_gradient(head, variant):
    test_gradient_checkpointing_changes_no_gradient(head, variant, use_reentrant=True)


def heads_by_depth(config, stack: str, part: str) -> list[int]:
    """Heads of the attention weights at every depth of a stack; `part` is `self` or `cross`."""
    layers, heads = getattr(config, f"{stack}_layers"), getattr(config, f"{stack}_attention_heads")
    if config.model_type == "partialformer" and getattr(config, f"{stack}_style") == "vanilla":
        heads = heads if config.vanilla_head_scaling else config.base_attention_heads
    heads = [heads] * layers
    if config.model_type == "subformer" and config.sharing == "sandwich" and part == "self":
        heads[1:-1] = [config.sandwich_attention_heads] * (layers - 2)
    return heads


def widths_by_depth(config, stack: str) -> list[int]:
    """Width of what goes into the first depth and of what comes out of each."""
    widths = [config.d_model] * (getattr(config, f"{stack}_layers") + 1)
    if config.model_type == "subformer" and config.sharing == "sandwich":
        widths[2:-1] = [config.sandwich_dim] * (len(widths) - 3)
    return widths


@every(variants=SPECIAL)
@torch.no_grad()
def test_recorded_states(head, variant):
    """One attention a depth and one state more than depths, also where layers are shared."""
    model = make_model(head, variant, attn_implementation="eager")
    config, (ids, mask) = model.config, padded(sentences())
    target = torch.randint(4, 32, (3, 4))
    out = run_model(model, ids, mask, target, output_attentions=True, output_hidden_states=True)
    if config.is_encoder_decoder:
        kinds = [("encoder_", "encoder", 9), ("decoder_", "decoder", 4)]
        expected = {"cross_attentions": [(3, heads, 4, 9) for heads in heads_by_depth(config, "decoder", "cross")]}
    else:
        kinds, expected = [("", "encoder" if head == "SequenceClassification" else "decoder", 9)], {}
    for prefix, stack, length in kinds:
        expected[f"{prefix}hidden_states"] = [(3, length, width) for width in widths_by_depth(config, stack)]
        expected[f"{prefix}attentions"] = [
            (3, heads, length, length) for heads in heads_by_depth(config, stack, "self")
        ]
    for name, shapes in expected.items():
        assert [tuple(state.shape) for state in out[name]] == shapes, name
        for before, state in zip((None, *out[name]), out[name], strict=False):
            assert before is None or before.shape != state.shape or not torch.equal(before, state), name
            if name.endswith("attentions"):
                torch.testing.assert_close(state.sum(-1), torch.ones_like(state.sum(-1)))
    if config.is_encoder_decoder:
        assert torch.equal(out.encoder_hidden_states[-1], out.encoder_last_hidden_state)
    plain = run_model(model, ids, mask, target)
    assert all(plain.get(name) is None for name in expected)
    assert torch.equal(plain[0], out[0])
    assert torch.equal(run_model(model, ids, mask, target, return_dict=False)[0], out[0])


@pytest.mark.parametrize("variant", ["lightformer", "subformer-sandwich", "subformer-all"])
@torch.no_grad()
def test_the_attention_implementation_can_be_changed(variant):
    model = make_model("ConditionalGeneration", variant, attn_implementation="sdpa")
    ids, mask = padded(sentences())
    expected = run_model(model, ids, mask).logits
    model.set_attn_implementation("eager")
    out = run_model(model, ids, mask, output_attentions=True)
    assert len(out.cross_attentions) == model.config.decoder_layers
    torch.testing.assert_close(out.logits, expected, atol=1e-4, rtol=1e-4)


@every(TRAINED, SPECIAL)
@torch.no_grad()
def test_embeddings_in_place_of_ids(head, variant):
    model = make_model(head, variant, **({"embedding_dim": 10} if head == "SequenceClassification" else {}))
    batch = batch_for(model)
    labels = batch.pop("labels")
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
    expected = model(**batch).logits
    vectors = model.get_input_embeddings()(batch.pop("input_ids"))
    torch.testing.assert_close(model(inputs_embeds=vectors, **batch).logits, expected)
    if model.config.is_encoder_decoder:
        target = model.model.decoder.embed_tokens(batch.pop("decoder_input_ids"))
        torch.testing.assert_close(
            model(inputs_embeds=vectors, decoder_inputs_embeds=target, **batch).logits, expected
        )
    with pytest.raises(ValueError, match=r"exactly one|decoder_input_ids is missing"):
        model(**batch)


@pytest.mark.parametrize(
    "kind", [BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions, lambda states: (states,)]
)
@torch.no_grad()
def test_the_output_of_any_encoder_replaces_its_pass(kind):
    model = make_model("ConditionalGeneration", "lightformer")
    batch = batch_for(model)
    expected = model(**batch).logits
    states = model.get_encoder()(batch.pop("input_ids"), batch["attention_mask"]).last_hidden_state
    torch.testing.assert_close(model(**batch, encoder_outputs=kind(states)).logits, expected)


@pytest.mark.parametrize("field", ["pad_token_id", "decoder_start_token_id"])
def test_labels_without_the_tokens_that_shift_them(field):
    model = make_model("ConditionalGeneration", "lightformer", **{field: None})
    ids = torch.tensor(sentences((6,)))
    with pytest.raises(ValueError, match=f"{field} is None in the configuration: labels need it"):
        model(ids, labels=ids)
