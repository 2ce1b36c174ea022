"""A dense LightFormer is the model of transformers whose weights it holds."""

import pytest
import torch
import transformers
from models.cases import like_trained, padded, sentences

from lightformers_hf.models import LightFormerConfig, LightFormerForConditionalGeneration

pytestmark = pytest.mark.quick

SHAPES = {
    "vocab_size": 40,
    "d_model": 16,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 20,
    "max_position_embeddings": 48,
    "dropout": 0.0,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
BART = {"position_embedding_type": "learned", "position_offset": 2, "layernorm_embedding": True}
PRE_NORM = {"normalize_before": True, "final_layer_norm": True}
# family → fields that both configurations have, fields that only LightFormer's has
FAMILIES = {
    "Marian": ({"activation_function": "swish", "scale_embedding": True}, {}),
    "Marian two vocabularies": (
        {
            "activation_function": "relu",
            "scale_embedding": True,
            "share_encoder_decoder_embeddings": False,
            "decoder_vocab_size": 32,
        },
        {},
    ),
    "Bart": ({"activation_function": "gelu", "scale_embedding": False}, BART),
    "MBart": ({"activation_function": "gelu", "scale_embedding": True}, BART | PRE_NORM),
    "Pegasus": ({"activation_function": "relu", "scale_embedding": True}, PRE_NORM),
    "M2M100": (
        {"activation_function": "relu", "scale_embedding": True},
        {"position_embedding_type": "sinusoidal_half", "position_offset": 2, **PRE_NORM},
    ),
}
CLASSES = {"Marian": "MarianMTModel", "Marian two vocabularies": "MarianMTModel"}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    """A teacher of the family, and a LightFormer with its weights."""
    family = request.param.split()[0]
    both, ours_only = FAMILIES[request.param]
    teacher_class = getattr(transformers, CLASSES.get(request.param, f"{family}ForConditionalGeneration"))
    torch.manual_seed(1)
    teacher = like_trained(teacher_class(getattr(transformers, f"{family}Config")(**SHAPES, **both)), seed=1)
    teacher.tie_weights()
    ours = LightFormerForConditionalGeneration(LightFormerConfig(**SHAPES, **both, **ours_only)).eval()
    missing, unexpected = ours.load_state_dict(teacher.state_dict(), strict=False)
    assert all("embed_positions" in key for key in unexpected)  # sines are no weights
    assert set(missing) <= {"final_logits_bias"}
    return teacher, ours


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_logits(pair, attention):
    teacher, ours = pair
    ids, mask = padded(sentences())
    decoder_ids, decoder_mask = padded(sentences((6, 8, 3), seed=1))
    logits = []
    for model in (teacher, ours):
        model.set_attn_implementation(attention)
        logits.append(model(input_ids=ids, attention_mask=mask, decoder_input_ids=decoder_ids).logits)
    kept = decoder_mask.bool()
    assert torch.allclose(logits[0][kept], logits[1][kept], atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("sizes", [(9,), (4, 5)])
@torch.no_grad()
def test_encoder_states_with_a_mask_of_blocks(pair, sizes, dtype):
    """Sentences side by side in one row, each of which sees itself alone."""
    ids = torch.cat([torch.randint(4, 40, (2, size)) for size in sizes], dim=1)
    blocks = torch.block_diag(*(torch.ones(size, size) for size in sizes)).bool().expand(2, 1, -1, -1)
    mask = blocks if dtype == torch.bool else torch.zeros(blocks.shape).masked_fill(~blocks, torch.finfo(dtype).min)
    expected, states = (model.get_encoder()(ids, mask).last_hidden_state for model in pair)
    torch.testing.assert_close(states, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("use_cache", [True, False])
@torch.no_grad()
def test_generated_tokens(pair, beams, use_cache):
    ids, mask = padded(sentences())
    settings = transformers.GenerationConfig(
        max_new_tokens=14,
        num_beams=beams,
        use_cache=use_cache,
        bad_words_ids=[[1]],
        no_repeat_ngram_size=1,  # tiny random models say one word again and again
        pad_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
    )
    teacher, ours = (model.generate(ids, attention_mask=mask, generation_config=settings) for model in pair)
    assert torch.equal(teacher, ours)
    assert len(set(map(tuple, ours.tolist()))) == len(ours)  # the output depends on the input
