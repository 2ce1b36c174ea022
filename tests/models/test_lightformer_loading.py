"""Saving, loading, ties, resizing, precisions."""

import copy

import pytest
import torch
from lightformer_cases import LOW_RANK, TINY, VARIANTS, make_model, padded, sentences
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from lightformers_hf.models import (
    LightFormerConfig,
    LightFormerForCausalLM,
    LightFormerForConditionalGeneration,
    LightFormerForSequenceClassification,
    LightFormerModel,
)
from lightformers_hf.models.low_rank import LowRankEmbedding

AUTO = {
    LightFormerModel: AutoModel,
    LightFormerForConditionalGeneration: AutoModelForSeq2SeqLM,
    LightFormerForCausalLM: AutoModelForCausalLM,
    LightFormerForSequenceClassification: AutoModelForSequenceClassification,
}
MODELS = pytest.mark.parametrize("model_class", AUTO, ids=lambda model_class: model_class.__name__)


def outputs(model) -> torch.Tensor:
    """What the model says about a fixed padded batch."""
    ids, mask = padded(sentences())
    inputs = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :5]
    with torch.no_grad():
        return model(**inputs)[0]


@MODELS
@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip(model_class, variant, tmp_path):
    model = make_model(model_class, variant)
    model.save_pretrained(tmp_path)
    loaded, report = AUTO[model_class].from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is model_class
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(outputs(loaded), outputs(model))
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert len(stored) == len(list(model.parameters())) + ("final_logits_bias" in stored)
    assert sum(map(torch.Tensor.numel, stored.values())) == sum(p.numel() for p in model.parameters()) + (
        model.config.decoder_vocab_size if "final_logits_bias" in stored else 0
    )


@pytest.mark.parametrize("embedding_rank", [None, 7])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("tie", [True, False])
def test_what_is_tied(embedding_rank, share, tie, tmp_path):
    """Exactly the ties that the two fields name, in a fresh, a loaded and a resized model."""
    fresh = make_model(
        LightFormerForConditionalGeneration,
        embedding_rank=embedding_rank,
        share_encoder_decoder_embeddings=share,
        tie_word_embeddings=tie,
    )
    fresh.save_pretrained(tmp_path)
    loaded = LightFormerForConditionalGeneration.from_pretrained(tmp_path)
    models = [fresh, loaded, copy.deepcopy(loaded)]
    if share:
        models[-1].resize_token_embeddings(50)
    for model in models:
        encoder, decoder = model.model.encoder.embed_tokens, model.model.decoder.embed_tokens
        head = [model.lm_head.weight] if embedding_rank is None else [model.lm_head.output.weight, model.lm_head.basis]
        tables = [
            [table.weight] if embedding_rank is None else [table.weight, table.basis] for table in (encoder, decoder)
        ]
        for encoder_tensor, decoder_tensor, head_tensor in zip(*tables, head, strict=True):
            assert (encoder_tensor is decoder_tensor) == share
            assert (head_tensor is decoder_tensor) == tie
        if share:
            assert model.model.shared.weight is encoder.weight
    assert torch.equal(outputs(loaded), outputs(fresh))


@pytest.mark.parametrize("tie", [True, False])
def test_causal_ties(tie, tmp_path):
    make_model(LightFormerForCausalLM, "low_rank", tie_word_embeddings=tie).save_pretrained(tmp_path)
    model = LightFormerForCausalLM.from_pretrained(tmp_path)
    assert (model.lm_head.output.weight is model.decoder.embed_tokens.weight) == tie
    assert (model.lm_head.basis is model.decoder.embed_tokens.basis) == tie


def test_loading_draws_only_what_is_missing(tmp_path):
    """Half of a low-rank table is missing: the other half stays, its padding row, which is not zero here, included."""
    model = make_model(LightFormerForConditionalGeneration, "low_rank")
    assert model.model.shared.weight[1].abs().min() > 0
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.shared.basis"], state["model.encoder.layers.1.fc1.v.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, report = LightFormerForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert {"model.shared.basis", "model.encoder.layers.1.fc1.v.weight"} <= set(report["missing_keys"])
    now = loaded.state_dict()
    assert all(torch.equal(now[name], tensor) for name, tensor in state.items())
    spread = (0.02 * 6**-0.5) ** 0.5  # of each of the two factors of a matrix of rank 6
    assert now["model.encoder.layers.1.fc1.v.weight"].std().item() == pytest.approx(spread, rel=0.25)


@pytest.mark.parametrize("kind", ["sinusoidal", "sinusoidal_half"])
def test_sines_are_filled_when_nothing_holds_them(kind, tmp_path):
    model = make_model(LightFormerModel, position_embedding_type=kind, position_offset=2)
    model.save_pretrained(tmp_path)
    table = model.encoder.embed_positions.table
    assert table.shape == (50, 16)
    assert torch.count_nonzero(table[1:]) > 700
    assert torch.equal(LightFormerModel.from_pretrained(tmp_path).encoder.embed_positions.table, table)
    with torch.device("meta"):
        empty = LightFormerModel(model.config)
    assert empty.encoder.embed_positions.table.is_meta
    empty.to_empty(device="cpu")
    empty.encoder.embed_positions.reset()
    assert torch.equal(empty.encoder.embed_positions.table, table)


@MODELS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(model_class, dtype, tmp_path):
    model = make_model(model_class, "low_rank", spread=0.3)
    model.save_pretrained(tmp_path)
    loaded = model_class.from_pretrained(tmp_path, dtype=dtype).eval()
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    result = outputs(loaded)
    assert result.dtype == dtype
    torch.testing.assert_close(result.float(), outputs(model), atol=0.1, rtol=0.1)


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}])
def test_device_map(device_map, tmp_path):
    model = make_model(LightFormerForConditionalGeneration, "groups_private_norms")
    model.save_pretrained(tmp_path)
    loaded = LightFormerForConditionalGeneration.from_pretrained(tmp_path, device_map=device_map)
    assert torch.equal(outputs(loaded), outputs(model))
    assert loaded.lm_head.basis is loaded.model.shared.basis


@MODELS
@pytest.mark.parametrize("embedding_rank", [None, 7])
@pytest.mark.parametrize(("arguments", "size"), [((47,), 47), ((34,), 34), ((None, 32), 64), ((41, 16), 48)])
def test_resize(model_class, embedding_rank, arguments, size, tmp_path):
    """Old tokens keep their meaning, the table keeps its form, and the result survives saving."""
    model = make_model(model_class, embedding_rank=embedding_rank)
    before = outputs(model)
    table = model.resize_token_embeddings(*arguments)
    assert table is model.get_input_embeddings()
    assert type(table) is (nn.Embedding if embedding_rank is None else LowRankEmbedding)
    assert table.weight.shape == (size, embedding_rank or 16)
    assert model.config.vocab_size == model.config.decoder_vocab_size == size
    after, kept = outputs(model), min(size, 40)
    if hasattr(model, "lm_head"):
        assert after.shape[-1] == size
        before, shared = before[..., :kept], after[..., :kept]
    else:
        shared = after
    torch.testing.assert_close(shared, before)
    model.save_pretrained(tmp_path)
    assert torch.equal(outputs(model_class.from_pretrained(tmp_path)), after)


def test_resize_without_a_size_changes_nothing():
    model = make_model(LightFormerForConditionalGeneration)
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    assert model.config.vocab_size == 40


@pytest.mark.parametrize("model_class", [LightFormerModel, LightFormerForConditionalGeneration])
def test_two_vocabularies_are_not_resized(model_class):
    with pytest.raises(ValueError, match="separate source and target vocabularies"):
        make_model(model_class, "two_vocabularies").resize_token_embeddings(50)


def test_heads_leave_the_callers_configuration_alone():
    config = LightFormerConfig(**TINY, **LOW_RANK)
    before = config.to_dict()
    for model_class in AUTO:
        model_class(config)
    assert config.to_dict() == before
