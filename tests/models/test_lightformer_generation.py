"""Caches, shared layers, padding: what is generated does not depend on how it is computed."""

import pytest
import torch
from lightformer_cases import VARIANTS, padded, sentences
from lightformer_cases import make_model as make_single_model
from transformers import StaticCache, set_seed
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from lightformers_hf.models import (
    LightFormerForCausalLM,
    LightFormerForConditionalGeneration,
    LightFormerForSequenceClassification,
)

EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)
ATTENTION = pytest.mark.parametrize("attention", ["eager", "sdpa"])
MODES = {
    "greedy": {},
    "beam": {"num_beams": 3},
    "sample": {"do_sample": True, "top_k": 8},
    "beam_sample": {"do_sample": True, "num_beams": 2},
}


def make_model(*args, **fields):
    """In double precision: results may differ where computations do, and rounding decides no tie between tokens."""
    return make_single_model(*args, **fields).double()


def generate(model, ids, mask, **settings):
    """14 new tokens, none twice: tiny random models otherwise say one word again and again."""
    set_seed(3)
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=14, no_repeat_ngram_size=1, bad_words_ids=[[1]], **settings
    )


@EVERY_VARIANT
@ATTENTION
@torch.no_grad()
def test_every_cached_step_equals_the_whole_sequence(variant, attention):
    model = make_model(LightFormerForConditionalGeneration, variant, attn_implementation=attention)
    ids, mask = padded(sentences())
    target = torch.randint(4, 32, (3, 9))
    whole = model(ids, mask, decoder_input_ids=target, use_cache=False)
    assert whole.past_key_values is None
    cache, steps = None, []
    for part in target.split([1, 1, 3, 1, 2, 1], dim=1):
        out = model(ids, mask, decoder_input_ids=part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole.logits, atol=1e-5, rtol=1e-5)
    assert cache.get_seq_length() == 9
    assert (
        len(cache.self_attention_cache.layers)
        == len(cache.cross_attention_cache.layers)
        == model.config.decoder_layers
    )


@EVERY_VARIANT
@ATTENTION
@torch.no_grad()
def test_every_cached_step_of_a_causal_model_equals_the_whole_sequence(variant, attention):
    model = make_model(LightFormerForCausalLM, variant, attn_implementation=attention)
    ids = torch.randint(4, 32, (3, 9))
    cache, steps = DynamicCache(), []
    for part in ids.split([2, 1, 3, 1, 1, 1], dim=1):
        steps.append(model(part, past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), model(ids).logits, atol=1e-5, rtol=1e-5)
    assert len(cache.layers) == model.config.decoder_layers


@EVERY_VARIANT
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model_class", [LightFormerForConditionalGeneration, LightFormerForCausalLM])
def test_the_cache_changes_no_token(model_class, variant, mode):
    model = make_model(model_class, variant)
    ids, mask = padded(sentences(), side="right" if model.config.is_encoder_decoder else "left")
    cached, uncached = (generate(model, ids, mask, use_cache=use, **MODES[mode]) for use in (True, False))
    assert torch.equal(cached, uncached)
    assert len(set(map(tuple, cached.tolist()))) > 1


@pytest.mark.parametrize("variant", ["dense", "groups_private_norms", "pre_norm"])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("model_class", [LightFormerForConditionalGeneration, LightFormerForCausalLM])
def test_static_cache(model_class, variant, beams):
    model = make_model(model_class, variant)
    ids, mask = padded(sentences(), side="right" if model.config.is_encoder_decoder else "left")
    static = generate(
        model, ids, mask, num_beams=beams, cache_implementation="static", disable_compile=True, use_cache=True
    )
    assert torch.equal(static, generate(model, ids, mask, num_beams=beams, use_cache=False))


def test_assisted_generation():
    model, assistant = make_model(LightFormerForCausalLM, "groups"), make_model(LightFormerForCausalLM, "low_rank", 1)
    ids = torch.tensor(sentences((6,)))
    settings = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(ids, assistant_model=assistant, **settings), model.generate(ids, **settings))


@EVERY_VARIANT
@ATTENTION
@pytest.mark.parametrize("side", ["right", "left"])
@torch.no_grad()
def test_a_padded_sentence_gets_what_it_gets_alone(variant, attention, side):
    """The encoder hides padding from its own layers and from cross-attention, the decoder from itself."""
    texts, targets = sentences(), sentences((4, 6, 3), seed=1)
    ids, mask = padded(texts, side)
    target_ids, target_mask = padded(targets, side)
    seq2seq = make_model(LightFormerForConditionalGeneration, variant, attn_implementation=attention)
    causal = make_model(LightFormerForCausalLM, variant, attn_implementation=attention)
    classifier = make_model(LightFormerForSequenceClassification, variant, attn_implementation=attention, num_labels=3)
    states = seq2seq.model.encoder(ids, mask).last_hidden_state
    logits = seq2seq(ids, mask, decoder_input_ids=target_ids, decoder_attention_mask=target_mask).logits
    causal_logits, classes = causal(ids, mask).logits, classifier(ids, mask).logits
    for row, (text, target) in enumerate(zip(texts, targets, strict=True)):
        source, decoder_ids = torch.tensor([text]), torch.tensor([target])
        pairs = [
            (states[row, mask[row] == 1], seq2seq.model.encoder(source).last_hidden_state[0]),
            (logits[row, target_mask[row] == 1], seq2seq(source, decoder_input_ids=decoder_ids).logits[0]),
            (causal_logits[row, mask[row] == 1], causal(source).logits[0]),
            (classes[row], classifier(source).logits[0]),
        ]
        for in_batch, alone in pairs:
            torch.testing.assert_close(in_batch, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", ["dense", "groups_private_norms", "pre_norm", "two_vocabularies"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("beams", [1, 3])
def test_a_padded_sentence_is_continued_as_alone(variant, side, beams):
    models = [make_model(LightFormerForConditionalGeneration, variant)]
    if side == "left":
        models.append(make_model(LightFormerForCausalLM, variant))
    ids, mask = padded(sentences(), side)
    for model in models:
        together = generate(model, ids, mask, num_beams=beams)
        together = together[:, 1 if model.config.is_encoder_decoder else ids.shape[1] :]
        for row, text in enumerate(sentences()):
            alone = generate(model, torch.tensor([text]), None, num_beams=beams)[0]
            alone = alone[1:] if model.config.is_encoder_decoder else alone[len(text) :]
            assert together[row, : len(alone)].tolist() == alone.tolist()


@ATTENTION
@torch.no_grad()
def test_sentences_packed_in_one_row(attention):
    """Positions that start again at 0 separate sentences of a causal model."""
    model = make_model(LightFormerForCausalLM, attn_implementation=attention)
    texts = sentences()
    packed = torch.cat([torch.tensor([text]) for text in texts], dim=1)
    positions = torch.cat([torch.arange(len(text)) for text in texts]).unsqueeze(0)
    logits = model(packed, position_ids=positions, use_cache=False).logits[0]
    for text, part in zip(texts, logits.split([len(text) for text in texts]), strict=True):
        torch.testing.assert_close(part, model(torch.tensor([text])).logits[0], atol=1e-5, rtol=1e-5)


@ATTENTION
@torch.no_grad()
def test_who_sees_whom(attention):
    """Every token reaches every encoder state; a decoder state knows nothing of later tokens."""
    model = make_model(LightFormerForConditionalGeneration, attn_implementation=attention, encoder_layers=1)
    ids = torch.tensor(sentences((6,)))
    changed = ids.clone()
    changed[0, -1] = 33
    for mask in (None, torch.ones_like(ids)):
        states = model.model.encoder(ids, mask).last_hidden_state
        difference = (states - model.model.encoder(changed, mask).last_hidden_state).abs().amax(-1)[0]
        assert (difference > 1e-4).all()
        logits = [
            model(ids, decoder_input_ids=target, decoder_attention_mask=mask).logits for target in (ids, changed)
        ]
        assert torch.equal(logits[0][:, :-1], logits[1][:, :-1])


def test_an_input_that_is_too_long():
    model = make_model(LightFormerForConditionalGeneration)
    ids = torch.full((1, 49), 5)
    with pytest.raises(ValueError, match=r"49 tokens.*48 positions.*max_position_embeddings"):
        model(ids, decoder_input_ids=ids[:, :2])
    with pytest.raises(ValueError, match="49 tokens"):
        model.generate(ids[:, :3], max_new_tokens=60, min_new_tokens=60)


@torch.no_grad()
def test_compile_has_no_graph_break():
    model = make_model(LightFormerForConditionalGeneration, "groups_private_norms", encoder_layers=2, decoder_layers=2)
    ids, mask = padded(sentences())
    target = torch.randint(4, 32, (3, 5))
    encoder = torch.compile(model.model.encoder, fullgraph=True, backend="eager")
    states = encoder(ids, mask)
    torch.testing.assert_close(states.last_hidden_state, model.model.encoder(ids, mask).last_hidden_state)
    whole = torch.compile(model, fullgraph=True, backend="eager")
    expected = model(ids, mask, decoder_input_ids=target).logits
    torch.testing.assert_close(whole(ids, mask, decoder_input_ids=target, use_cache=False).logits, expected)

    cache = EncoderDecoderCache(
        StaticCache(config=model.config, max_cache_len=8), StaticCache(config=model.config, max_cache_len=9)
    )
    step = torch.compile(model, fullgraph=True, backend="eager")
    for position in range(5):
        out = (model if position == 0 else step)(
            attention_mask=mask,
            encoder_outputs=states,
            decoder_input_ids=target[:, position : position + 1],
            past_key_values=cache,
        )
        torch.testing.assert_close(out.logits[:, 0], expected[:, position], atol=1e-5, rtol=1e-5)
