"""Caches, shared layers, padding: what is generated does not depend on how it is computed."""

import logging

import pytest
import torch
from models.cases import (
    GENERATING,
    PLAIN,
    SPECIAL,
    TRAINED,
    every,
    every_attention,
    has_head,
    padded,
    run_model,
    sentences,
)
from models.cases import make_model as make_single_model
from transformers import StaticCache, set_seed
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

MODES = {"greedy": {}, "beam_sample": {"do_sample": True, "num_beams": 2}}


def make_model(*args, **fields):
    """In double precision: results may differ where computations do, and rounding decides no tie between tokens."""
    return make_single_model(*args, **fields).double()


def generate(model, ids, mask, **settings):
    """10 new tokens, none twice: tiny random models otherwise say one word again and again."""
    set_seed(3)
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=10, no_repeat_ngram_size=1, bad_words_ids=[[1]], **settings
    )


def batch_for(model, lengths=(9, 5, 7)) -> tuple[torch.Tensor, torch.Tensor]:
    """A padded batch, so that the model continues from the end."""
    return padded(sentences(lengths), "right" if model.config.is_encoder_decoder else "left")


@every_attention(["ConditionalGeneration"])
@torch.no_grad()
def test_every_cached_step_equals_the_whole_sequence(head, variant, attention):
    """Also with a cache of self-attention alone that the caller makes, and gives again at every step."""
    model = make_single_model(head, variant, attn_implementation=attention, spread=0.3)
    ids, mask = batch_for(model)
    target = torch.randint(4, 32, (3, 9))
    whole = model(ids, mask, decoder_input_ids=target, use_cache=False)
    assert whole.past_key_values is None
    cache, steps, own, own_steps = None, [], DynamicCache(), []
    for part in target.split([1, 1, 3, 1, 2, 1], dim=1):
        out = model(ids, mask, decoder_input_ids=part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits)
        own_steps.append(model(ids, mask, decoder_input_ids=part, past_key_values=own, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat(own_steps, dim=1), whole.logits, atol=1e-5, rtol=1e-5)
    assert cache.get_seq_length() == 9
    slots = model.config.decoder_layers + model.config.extra_cache_slots
    assert len(cache.self_attention_cache.layers) == slots
    assert [layer.get_seq_length() for layer in cache.self_attention_cache.layers] == [9] * slots
    # A layer's keys and values of the encoder's states are kept once, at its first depth.
    stored_at = model.model.decoder.layers.stored_at
    filled = [depth for depth, layer in enumerate(cache.cross_attention_cache.layers) if layer.get_seq_length()]
    assert filled == [stored_at.index(index) for index in range(max(stored_at) + 1)]


@every_attention(["CausalLM"])
@torch.no_grad()
def test_every_cached_step_of_a_causal_model_equals_the_whole_sequence(head, variant, attention):
    model = make_single_model(head, variant, attn_implementation=attention, spread=0.3)
    ids = torch.randint(4, 32, (3, 9))
    cache, steps = DynamicCache(), []
    for part in ids.split([2, 1, 3, 1, 1, 1], dim=1):
        steps.append(model(part, past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), model(ids).logits, atol=1e-5, rtol=1e-5)
    assert len(cache.layers) == model.config.decoder_layers + model.config.extra_cache_slots


@every(GENERATING, SPECIAL)
@pytest.mark.parametrize("mode", MODES)
def test_the_cache_changes_no_token(head, variant, mode):
    model = make_model(head, variant, seed=3)
    ids, mask = batch_for(model, (9, 5, 7, 1))
    cached, uncached = (generate(model, ids, mask, use_cache=use, **MODES[mode]) for use in (True, False))
    assert torch.equal(cached, uncached)
    assert len(set(map(tuple, cached.tolist()))) > 1


@every(GENERATING, PLAIN)
@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_a_cache_has_a_slot_for_every_depth(head, variant, implementation):
    """Also of decoders deeper than the encoder and than the default, which caches ask twice for their depth."""
    model = make_model(head, variant, encoder_layers=3, decoder_layers=8)
    slots = 8 + model.config.extra_cache_slots
    config = model.config.get_text_config(decoder=True)
    assert config.num_hidden_layers == config.get_text_config(decoder=True).num_hidden_layers == slots
    settings = {"cache_implementation": implementation, "disable_compile": True, "return_dict_in_generate": True}
    cache = generate(model, *batch_for(model), **settings).past_key_values
    assert len(cache.self_attention_cache if head == "ConditionalGeneration" else cache) == slots


@every(GENERATING, SPECIAL)
def test_static_cache(head, variant):
    model = make_model(head, variant)
    ids, mask = batch_for(model)
    static = generate(
        model, ids, mask, num_beams=3, cache_implementation="static", disable_compile=True, use_cache=True
    )
    assert torch.equal(static, generate(model, ids, mask, num_beams=3, use_cache=False))


@pytest.mark.parametrize(
    ("variant", "assistant_variant"),
    [
        ("lightformer-groups", "lightformer-low-rank"),
        ("subformer-sandwich", "subformer-all"),
        ("partialformer", "partialformer-relative"),
    ],
)
def test_assisted_generation(variant, assistant_variant):
    model, assistant = make_model("CausalLM", variant), make_model("CausalLM", assistant_variant, 1)
    ids = torch.tensor(sentences((6,)))
    settings = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(ids, assistant_model=assistant, **settings), model.generate(ids, **settings))


@every_attention(TRAINED, SPECIAL)
@pytest.mark.parametrize("side", ["right", "left"])
@torch.no_grad()
def test_a_padded_sentence_gets_what_it_gets_alone(head, variant, attention, side):
    """The encoder hides padding from its own layers and from cross-attention, the decoder from itself."""
    model = make_model(head, variant, attn_implementation=attention)
    texts, targets = sentences(), sentences((4, 6, 3), seed=1)
    ids, mask = padded(texts, side)
    target_ids, target_mask = padded(targets, side)
    together = run_model(model, ids, mask, target_ids, target_mask)
    for row, (text, target) in enumerate(zip(texts, targets, strict=True)):
        alone = run_model(model, torch.tensor([text]), None, torch.tensor([target]))
        if model.config.is_encoder_decoder:
            pairs = [
                (together[0][row, target_mask[row] == 1], alone[0][0]),
                (together.encoder_last_hidden_state[row, mask[row] == 1], alone.encoder_last_hidden_state[0]),
            ]
        elif head == "SequenceClassification":
            pairs = [(together.logits[row], alone.logits[0])]
        else:
            pairs = [(together.logits[row, mask[row] == 1], alone.logits[0])]
        for in_batch, by_itself in pairs:
            torch.testing.assert_close(in_batch, by_itself, atol=1e-5, rtol=1e-5)


@every(GENERATING, (*SPECIAL, "lightformer-two-vocabularies", "subformer-two-vocabularies", "partialformer-self-ffn"))
def test_a_padded_sentence_is_continued_as_alone(head, variant):
    model = make_model(head, variant)
    new_from = 1 if head == "ConditionalGeneration" else None  # a causal model repeats the sentence
    alone = [generate(model, torch.tensor([text]), None, num_beams=3)[0] for text in sentences()]
    alone = [row[new_from or len(text) :].tolist() for row, text in zip(alone, sentences(), strict=True)]
    for side in ("right", "left") if head == "ConditionalGeneration" else ("left",):
        ids, mask = padded(sentences(), side)
        together = generate(model, ids, mask, num_beams=3)[:, new_from or ids.shape[1] :]
        assert [row[: len(expected)] for row, expected in zip(together.tolist(), alone, strict=True)] == alone


@every_attention(["CausalLM"], SPECIAL)
@torch.no_grad()
def test_sentences_packed_in_one_row(head, variant, attention):
    """Positions that start again at 0 separate sentences of a causal model."""
    model = make_model(head, variant, attn_implementation=attention)
    texts = sentences()
    packed = torch.cat([torch.tensor([text]) for text in texts], dim=1)
    positions = torch.cat([torch.arange(len(text)) for text in texts]).unsqueeze(0)
    logits = model(packed, position_ids=positions, use_cache=False).logits[0]
    for text, part in zip(texts, logits.split([len(text) for text in texts]), strict=True):
        torch.testing.assert_close(part, model(torch.tensor([text])).logits[0], atol=1e-5, rtol=1e-5)
    losses = [model(packed, position_ids=positions, labels=packed, use_cache=use).loss for use in (None, False)]
    torch.testing.assert_close(*losses)


@every_attention(GENERATING, SPECIAL)
@torch.no_grad()
def test_a_mask_of_pairs_of_tokens(head, variant, attention):
    """A causal one hides nothing more, whether it is of truth values, or of summands; eager also takes 0 and 1."""
    model = make_model(head, variant, attn_implementation=attention)
    ids = torch.tensor([sentences((9,))[0]] * 2)
    seen = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    summands = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    key = "decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    expected = model(**inputs).logits
    for mask in (seen, summands, seen.long())[: 3 if attention == "eager" else 2]:
        torch.testing.assert_close(model(**inputs, **{key: mask}).logits, expected)


@pytest.mark.parametrize("variant", PLAIN)
def test_an_input_that_is_too_long(variant):
    model = make_model("ConditionalGeneration", variant)
    ids = torch.full((1, 49), 5)
    with pytest.raises(ValueError, match=r"49 tokens.*48 positions.*max_position_embeddings"):
        model(ids, decoder_input_ids=ids[:, :2])
    with pytest.raises(ValueError, match="49 tokens"):
        model.generate(ids[:, :3], max_new_tokens=60, min_new_tokens=60)
    with pytest.raises(ValueError, match="49 tokens"):
        make_model("CausalLM", variant).generate(ids[:, :3], max_new_tokens=60, min_new_tokens=60)


@torch.no_grad()
def test_packed_sentences_may_be_longer_together_than_positions():
    model = make_model("CausalLM", "lightformer")
    ids, positions = torch.full((1, 60), 5), torch.arange(60)[None] % 30
    logits = model(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(logits[:, 30:], logits[:, :30])


@every_attention(GENERATING, SPECIAL)
@torch.no_grad()
def test_a_row_that_sees_nothing_stays_finite(head, variant, attention):
    """Masks in fp16 are -65504: a negative logit on top is -inf, and a row of nothing else would be NaN."""
    model = make_single_model(head, variant, attn_implementation=attention, spread=0.3)
    for name, parameter in model.named_parameters():  # logits of -72, and biases of A^G and of head scaling
        if name.endswith(("q_proj.bias", "q_proj.v.bias")):
            parameter.fill_(6.0)
        elif name.endswith(("k_proj.bias", "k_proj.v.bias")):
            parameter.fill_(-6.0)
        elif name.endswith("mix.bias"):
            parameter.fill_(-60.0)
    model.half()
    ids, mask = padded(sentences(), "left")
    out = run_model(model, ids, mask, ids, mask)
    assert out[0].isfinite().all()
    assert out.encoder_last_hidden_state.isfinite().all() if model.config.is_encoder_decoder else True


COMPILED = ("lightformer-private-norms", "subformer-sandwich", "partialformer-relative", "partialformer-adaptive")


@pytest.mark.parametrize("variant", COMPILED)
@torch.no_grad()
def test_compile_has_no_graph_break(variant):
    torch.compiler.reset()
    head = "ConditionalGeneration" if has_head("ConditionalGeneration", variant) else "CausalLM"
    model = make_model(head, variant)
    ids, mask = padded(sentences())
    target, rows = torch.randint(4, 32, (3, 5)), {}
    if model.config.is_encoder_decoder:
        encoder = torch.compile(model.model.encoder, fullgraph=True, backend="eager")
        states = encoder(ids, mask)
        torch.testing.assert_close(states.last_hidden_state, model.model.encoder(ids, mask).last_hidden_state)
        rows = {"attention_mask": mask, "encoder_outputs": states}
    name = "decoder_input_ids" if rows else "input_ids"
    whole = torch.compile(model, fullgraph=True, backend="eager")
    expected = model(**rows, **{name: target}, use_cache=False).logits
    torch.testing.assert_close(whole(**rows, **{name: target}, use_cache=False).logits, expected)

    cache = StaticCache(config=model.config, max_cache_len=8)
    if rows:
        cache = EncoderDecoderCache(cache, StaticCache(config=model.config, max_cache_len=9))
    step = torch.compile(model, fullgraph=True, backend="eager")
    for position in range(5):
        token = {name: target[:, position : position + 1]}
        out = (model if position == 0 else step)(**rows, **token, past_key_values=cache)
        torch.testing.assert_close(out.logits[:, 0], expected[:, position], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_a_decoders_prompt_may_be_padded_on_the_left(implementation):
    """As `generate` takes one that begins with the start token, here Marian's, which is the padding."""
    model = make_model("ConditionalGeneration", "lightformer", decoder_start_token_id=1)
    ids, mask = batch_for(model)
    options = {"num_beams": 1, "cache_implementation": implementation, "disable_compile": True}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    prompt = torch.tensor([[1, 7, 9]]).expand(len(ids), 3)
    alone = generate(model, ids, mask, decoder_input_ids=prompt, **options)
    padding = torch.tensor([[1, 1]]).expand(len(ids), 2)
    seen = torch.cat([torch.zeros_like(padding), torch.ones_like(prompt)], 1)
    padded = generate(
        model, ids, mask, decoder_input_ids=torch.cat([padding, prompt], 1), decoder_attention_mask=seen, **options
    )
    length = len(alone.logits) - 2
    assert length > 4
    torch.testing.assert_close(torch.stack(padded.logits[:length]), torch.stack(alone.logits[:length]))


@pytest.mark.parametrize("head", ["ConditionalGeneration", "CausalLM"])
def test_a_call_names_the_length_without_a_warning(head, caplog, monkeypatch):
    """Trained checkpoints have a `max_length`, which `max_new_tokens` replaces."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model, ids = make_model(head, "lightformer"), torch.tensor(sentences((4,)))
    model.generation_config.max_length, model.generation_config.eos_token_id = 12, None
    first = 1 if head == "ConditionalGeneration" else 4
    lengths = [model.generate(ids, **given).shape[1] for given in ({}, {"max_length": 9}, {"max_new_tokens": 5})]
    assert lengths == [12, 9, first + 5]
    assert "max_new_tokens" not in caplog.text


@every(GENERATING, PLAIN)
def test_a_static_cache_gives_the_same_tokens(head, variant):
    """Without padding no mask is made, and the cache has more places than tokens."""
    model, ids = make_model(head, variant), torch.tensor(sentences((6,)))
    options = {"max_new_tokens": 8, "do_sample": False, "disable_compile": True}
    static = model.generate(ids, cache_implementation="static", **options)
    assert torch.equal(static, model.generate(ids, **options))
