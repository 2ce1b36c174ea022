"""A T5, mT5 or UMT5 read as a LightFormer computes what transformers computes."""

import pytest
import torch
import transformers
from models.cases import like_trained, padded, sentences
from torch import nn
from transformers.models.t5.modeling_t5 import T5Attention

from lightformers_hf import convert
from lightformers_hf.checkpoints.teacher import read
from lightformers_hf.models.layers import RelativePositions

SHAPES = {
    "vocab_size": 40,
    "d_model": 16,
    "d_kv": 5,  # times heads is not d_model
    "num_heads": 4,
    "d_ff": 24,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "dropout_rate": 0.0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
GATED = {"feed_forward_proj": "gated-gelu"}
# name → family, fields, whether the output layer is the table
CASES = {
    "v1.0": ("T5", {}, True),
    "v1.1": ("T5", {**GATED, "tie_word_embeddings": False}, False),
    "v1.1 tied": ("T5", {**GATED, "tie_word_embeddings": False}, True),
    "gated silu": ("T5", {"feed_forward_proj": "gated-silu"}, True),
    "mt5": ("MT5", GATED, False),
    "umt5": ("UMT5", GATED, False),
    "umt5 tied": ("UMT5", GATED, True),
}


def make_teacher(case: str, seed: int = 1) -> transformers.PreTrainedModel:
    """A tiny model of transformers with weights like trained ones."""
    family, fields, tied = CASES[case]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**SHAPES, **fields)
    teacher = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    if not tied:
        teacher.lm_head.weight = nn.Parameter(torch.randn_like(teacher.lm_head.weight) * 0.3)
        teacher.all_tied_weights_keys.pop("lm_head.weight")
    return like_trained(teacher, seed, spread=0.3)


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """A teacher, and the LightFormer that is read of its checkpoint."""
    teacher, folder = make_teacher(request.param), tmp_path_factory.mktemp("teacher")
    teacher.save_pretrained(folder)
    ours = read(folder).model
    assert ours.config.tie_word_embeddings == CASES[request.param][2]
    return teacher, ours


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("side", ["right", "left"])
@torch.no_grad()
def test_logits(pair, side, attention):
    ids, mask = padded(sentences((31, 5, 17)), side)
    decoder_ids, decoder_mask = padded(sentences((26, 8, 13), seed=1), side)
    arguments = {"attention_mask": mask, "decoder_input_ids": decoder_ids, "decoder_attention_mask": decoder_mask}
    logits = []
    for model in pair:
        model.set_attn_implementation(attention)
        logits.append(model(input_ids=ids, **arguments).logits)
    kept = decoder_mask.bool()
    torch.testing.assert_close(logits[1][kept], logits[0][kept], atol=1e-4, rtol=0)
    assert logits[0][kept].std() > 0.01


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("use_cache", [True, False])
@torch.no_grad()
def test_generated_tokens(pair, beams, use_cache):
    ids, mask = padded(sentences((9, 5, 21)), "left" if beams == 1 else "right")
    settings = transformers.GenerationConfig(
        max_new_tokens=20,
        num_beams=beams,
        use_cache=use_cache,
        bad_words_ids=[[1]],
        no_repeat_ngram_size=1,  # tiny random models say one word again and again
        pad_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    teacher, ours = (model.generate(ids, attention_mask=mask, generation_config=settings) for model in pair)
    assert torch.equal(teacher, ours)
    assert len(set(map(tuple, ours.tolist()))) == len(ours)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 12), (32, 17), (10, 600), (4, 3)])
def test_every_distance_is_in_the_bucket_of_transformers(is_causal, buckets, furthest):
    distances = torch.arange(600) - torch.arange(600).unsqueeze(-1)
    ours = RelativePositions(buckets, 2, furthest, is_causal=is_causal).find_buckets(distances)
    expected = T5Attention._relative_position_bucket(distances, not is_causal, buckets, furthest)
    if is_causal:  # what comes after is masked
        ours, expected = ours.tril(), expected.tril()
    assert torch.equal(ours, expected)
    assert ours.max() == buckets - 1


@torch.no_grad()
def test_logits_of_600_tokens(tmp_path):
    """Cached in two parts, where the second begins far from the first."""
    teacher = make_teacher("v1.1")
    teacher.save_pretrained(tmp_path)
    ours = read(tmp_path).model
    ids, target = torch.randint(3, 40, (1, 600)), torch.randint(3, 40, (1, 600))
    expected = teacher(input_ids=ids, decoder_input_ids=target).logits
    torch.testing.assert_close(ours(input_ids=ids, decoder_input_ids=target).logits, expected, atol=1e-4, rtol=0)
    first = ours(input_ids=ids, decoder_input_ids=target[:, :590], use_cache=True)
    known = {"encoder_outputs": (first.encoder_last_hidden_state,), "past_key_values": first.past_key_values}
    rest = ours(decoder_input_ids=target[:, 590:], **known).logits
    torch.testing.assert_close(torch.cat([first.logits, rest], 1), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", ["v1.0", "v1.1", "umt5"])
@torch.no_grad()
def test_fp16_stays_finite_where_networks_overflow(case, tmp_path):
    """As in transformers: the last matrix of a network, and with it the sum of all layers, stay in fp32."""
    teacher = make_teacher(case)
    for name, weight in teacher.named_parameters():
        if name.endswith("wo.weight"):
            weight.mul_(3000)
    teacher.save_pretrained(tmp_path / "teacher")
    read(tmp_path / "teacher").model.save_pretrained(tmp_path / "ours")
    ids, mask = padded(sentences((31, 5, 17)))
    batch = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids}
    exact, errors = teacher(**batch).logits[mask.bool()], []
    for folder in ("teacher", "ours"):
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / folder, dtype=torch.float16).eval()
        errors.append((model(**batch).logits[mask.bool()].float() - exact).abs().mean())
    layer = model.model.encoder.layers[0]
    assert (layer.fc1.weight.dtype, layer.fc2.weight.dtype) == (torch.float16, torch.float32)
    assert errors[1] < 1.5 * errors[0] < 0.1
    assert torch.isfinite(model.half()(**batch).logits[mask.bool()]).all()  # `fc2`, too


REFUSED = {
    "T5EncoderModel": "T5Config",
    "T5ForTokenClassification": "T5Config",
    "T5ForSequenceClassification": "T5Config",
    "T5ForQuestionAnswering": "T5Config",
    "T5ForCausalLM": "T5Config",  # a decoder alone, as others publish it
    "MT5EncoderModel": "MT5Config",
    "UMT5EncoderModel": "UMT5Config",
    "LongT5ForConditionalGeneration": "LongT5Config",
    "SwitchTransformersForConditionalGeneration": "SwitchTransformersConfig",
    "T5GemmaForConditionalGeneration": "T5GemmaConfig",
}


@pytest.mark.parametrize("architecture", REFUSED)
def test_other_models_with_its_name_are_refused_with_what_can_be_converted(architecture, tmp_path):
    config = getattr(transformers, REFUSED[architecture])(architectures=[architecture])
    config.save_pretrained(tmp_path / "source")
    known = "T5ForConditionalGeneration" if config.model_type in ("t5", "mt5", "umt5") else "t5, mt5, umt5"
    named = architecture if known[0] == "T" else repr(config.model_type)
    with pytest.raises(ValueError, match=f"{named}.*can.*be converted.*{known}"):
        convert(tmp_path / "source", tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_adapters_inside_a_model_are_refused(tmp_path):
    teacher = make_teacher("v1.0")
    teacher.encoder.block[0].adapter = nn.Linear(16, 2, bias=False)
    teacher.save_pretrained(tmp_path / "inside")
    with pytest.raises(ValueError, match=r"has no place for: encoder\.block\.0\.adapter\.weight"):
        convert(tmp_path / "inside", tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()
