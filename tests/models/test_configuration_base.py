"""Fields that follow from others are filled in, and what was changed is checked when a model is made of it."""

import json

import pytest
from models.cases import config_class, make_config, model_class
from transformers import AutoConfig


@pytest.mark.parametrize("variant", ["lightformer", "subformer-sandwich", "partialformer"])
@pytest.mark.parametrize("head", ["ConditionalGeneration", "CausalLM"])
def test_one_vocabulary_has_one_size(variant, head, tmp_path):
    """Which is a number in `config.json`; files of 0.1.0 have `null` there."""
    build = model_class(head, variant.partition("-")[0])
    config = make_config(variant)
    config.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["decoder_vocab_size"] == content["vocab_size"] == 40
    (tmp_path / "config.json").write_text(json.dumps(content | {"decoder_vocab_size": None, "vocab_size": 50}))
    model = build(AutoConfig.from_pretrained(tmp_path)).eval()
    assert model.get_output_embeddings().weight.shape[0] == model.config.decoder_vocab_size == 50
    config.vocab_size = 50
    with pytest.raises(ValueError, match="decoder_vocab_size is 40 and vocab_size 50: set both alike"):
        build(config)


def test_two_vocabularies_stay_two():
    config = make_config("lightformer-two-vocabularies")
    config.vocab_size = 60
    assert config.decoder_vocab_size == 32
    assert config_class("lightformer")(**config.to_dict()).decoder_vocab_size == 32


def test_widths_of_a_subformer_follow_from_others():
    fresh = config_class("subformer")
    config = fresh(d_model=128, ffn_dim=300)
    assert (config.sandwich_dim, config.sandwich_ffn_dim, config.sandwich_attention_heads) == (128, 300, 2)
    assert (config.embedding_dim, config.embedding_attention_heads) == (64, 1)
    assert fresh(d_model=128, embedding="full").embedding_attention_heads is None
    with pytest.raises(ValueError, match="sandwich_dim is 0; it is at least 1"):
        fresh(sandwich_dim=0)


@pytest.mark.parametrize("variant", ["lightformer", "subformer-sandwich", "partialformer"])
def test_what_was_changed_is_checked_when_a_model_is_made(variant):
    config = make_config(variant)
    config.dropout = 7.0
    with pytest.raises(ValueError, match=r"dropout is 7.0"):
        model_class("ConditionalGeneration", variant.partition("-")[0])(config)


@pytest.mark.parametrize(
    ("name", "near"),
    [("attention_ranks", "attention_rank"), ("d_modle", "d_model"), ("num_decoder_layers", "decoder_layers")],
)
def test_a_misspelt_field_is_named(name, near, monkeypatch, tmp_path):
    said = []
    monkeypatch.setattr("lightformers_hf.models.configuration_lightformer.logger.warning", said.append)
    config = config_class("lightformer")(**{name: 3})
    assert said == [f"LightFormerConfig has no field {name!r}, which has no effect: {near!r} is one"]
    for variant in ("lightformer", "subformer-sandwich", "partialformer"):
        make_config(variant).save_pretrained(tmp_path / variant)
        known = json.loads((tmp_path / variant / "config.json").read_text())
        others = {"num_labels": 3, "forced_bos_token_id": 1, "num_beams": 4, "max_length": 9, "torch_dtype": "float32"}
        AutoConfig.for_model(**known | others)
        type(make_config(variant))(**make_config(variant).to_dict() | others)
    assert len(said) == 1, said
    assert config.attention_rank is None
