"""What transformers expects of its models: sizes that change, the base model, continuous batching, shifted labels."""

import pytest
import torch
from models.cases import make_config, make_model, model_class
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification
from transformers.utils.logging import get_logger

VARIANTS = ("lightformer", "subformer-sandwich", "partialformer")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_vocabulary_of_another_size_is_drawn_anew(variant, tmp_path):
    make_model("ConditionalGeneration", variant).save_pretrained(tmp_path)
    options = {"vocab_size": 50, "ignore_mismatched_sizes": True}
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, **options)
    assert model.get_output_embeddings().weight.shape[0] == model.config.decoder_vocab_size == 50


def test_a_classifier_has_another_vocabulary(tmp_path):
    make_model("SequenceClassification", "lightformer").save_pretrained(tmp_path)
    options = {"vocab_size": 50, "ignore_mismatched_sizes": True}
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, **options)
    assert classifier.get_input_embeddings().num_embeddings == 50
    classifier.config.vocab_size = 60
    assert type(classifier)(classifier.config).get_input_embeddings().num_embeddings == 60


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_base_model_is_the_stack(variant):
    causal = make_model("CausalLM", variant)
    assert causal.base_model is causal.decoder
    if variant == "lightformer":
        classifier = make_model("SequenceClassification", variant)
        assert classifier.base_model is classifier.encoder


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_causal_model_refuses_what_needs_an_encoder(variant, tmp_path):
    make_model("ConditionalGeneration", variant).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is an encoder-decoder, not a .*ForCausalLM"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    causal, ids = make_model("CausalLM", variant), torch.tensor([[3, 4]])
    with pytest.raises(ValueError, match=r"encoder_hidden_states is given, but .* has no cross-attention"):
        causal(ids, encoder_hidden_states=torch.zeros(1, 2, 16))


@pytest.mark.parametrize("variant", VARIANTS)
def test_continuous_batching_is_refused(variant):
    with pytest.raises(NotImplementedError, match="has no continuous batching"):
        make_model("CausalLM", variant).generate_batch([[3, 4]])


def test_an_adaptive_loss_takes_shifted_labels():
    model, ids = make_model("CausalLM", "lightformer-adaptive"), torch.tensor([[3, 15, 30, 7]])
    shifted = torch.tensor([[15, 30, 7, -100]])
    same = model(ids, labels=ids, shift_labels=shifted).loss
    torch.testing.assert_close(same, model(ids, labels=ids).loss)
    other = torch.tensor([[15, 30, -100, -100]])
    assert not torch.isclose(model(ids, labels=ids, shift_labels=other).loss, same)


def test_the_pattern_of_an_output_layer_is_found(caplog):
    logger = get_logger("transformers")  # its messages reach no other logger
    logger.addHandler(caplog.handler)
    try:
        config = make_config("lightformer", tie_word_embeddings=False, rank_pattern={"lm_head": 3, "nothing": 3})
        model = model_class("ConditionalGeneration", "lightformer")(config)
    finally:
        logger.removeHandler(caplog.handler)
    assert model.lm_head.output.in_features == 3
    found = [message for message in caplog.messages if "no module's name" in message]
    assert len(found) == 1
    assert "'nothing'" in found[0]
    assert "lm_head" not in found[0]
