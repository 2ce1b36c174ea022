"""Tiny LightFormers with weights like trained ones, and batches for them."""

import torch

from lightformers_hf.models import LightFormerConfig

TINY = {
    "vocab_size": 40,
    "d_model": 16,
    "encoder_layers": 4,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 20,
    "max_position_embeddings": 48,
    "dropout": 0.0,
    "init_std": 0.02,
}
LOW_RANK = {
    "attention_rank": 5,
    "ffn_rank": 6,
    "embedding_rank": 7,
    "decoder_attention_rank": 4,
    "decoder_ffn_rank": 3,
}
VARIANTS = {
    "dense": {},
    "low_rank": LOW_RANK,
    "groups": {"decoder_layers": 4, "encoder_groups": 2, "decoder_groups": 2},
    "groups_private_norms": {
        **LOW_RANK,
        "decoder_layers": 4,
        "encoder_groups": 2,
        "decoder_groups": 1,
        "share_layer_norms": False,
    },
    "joint_qkv": {**LOW_RANK, "joint_qkv": True, "attention_output_projection": False},
    "pre_norm": {
        "encoder_groups": 1,
        "normalize_before": True,
        "final_layer_norm": True,
        "layernorm_embedding": True,
        "position_embedding_type": "learned",
        "position_offset": 2,
        "scale_embedding": False,
        "activation_function": "gelu",
        "embedding_rank": 7,
        "rank_pattern": {"encoder_attn.q_proj": 3, r"decoder.layers.0.fc1": None, "fc[12]": 6},
    },
    "two_vocabularies": {
        "share_encoder_decoder_embeddings": False,
        "decoder_vocab_size": 32,
        "embedding_rank": 7,
        "position_embedding_type": "sinusoidal_half",
    },
}


@torch.no_grad()
def like_trained(model, seed: int = 0, spread: float = 0.6):
    """Give every trained parameter, biases and LayerNorms included, and the output bias a value of its own."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):  # not Marian's sines
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(noise, alpha=spread if parameter.dim() > 1 else 0.25)
    for name, buffer in model.named_buffers():
        if name == "final_logits_bias":
            buffer.add_(torch.randn(buffer.shape, generator=generator), alpha=0.25)
    return model.eval()


def make_model(model_class, variant: str = "dense", seed: int = 0, spread: float = 0.6, **fields):
    """The tiny model of a variant, in evaluation mode."""
    config = LightFormerConfig(**{**TINY, **VARIANTS[variant], **fields})
    torch.manual_seed(seed)
    return like_trained(model_class(config), seed, spread)


def padded(sentences: list[list[int]], side: str = "right", pad: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask of a padded batch."""
    width = max(map(len, sentences))
    ids, mask = [], []
    for sentence in sentences:
        filler = width - len(sentence)
        if side == "right":
            ids.append(sentence + [pad] * filler)
            mask.append([1] * len(sentence) + [0] * filler)
        else:
            ids.append([pad] * filler + sentence)
            mask.append([0] * filler + [1] * len(sentence))
    return torch.tensor(ids), torch.tensor(mask)


def sentences(lengths=(9, 5, 7), vocab_size: int = 32, seed: int = 0) -> list[list[int]]:
    """Random ids, special ones excluded."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, vocab_size, (length,), generator=generator).tolist() for length in lengths]
