"""Tiny models of every family with weights like trained ones, and batches for them."""

import pytest
import torch
from torch import nn

import lightformers_hf.models as models

FAMILIES = {"lightformer": "LightFormer", "subformer": "Subformer", "partialformer": "PartialFormer"}
HEADS = ("ConditionalGeneration", "CausalLM", "Model", "SequenceClassification")
GENERATING = ("ConditionalGeneration", "CausalLM")
TRAINED = (*GENERATING, "SequenceClassification")
COMMON = {
    "vocab_size": 40,
    "d_model": 16,
    "encoder_layers": 4,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "max_position_embeddings": 48,
    "dropout": 0.0,
    "init_std": 0.02,
}
TINY = {
    "lightformer": {**COMMON, "encoder_ffn_dim": 24, "decoder_ffn_dim": 20},
    "subformer": {
        **COMMON,
        "decoder_layers": 3,
        "ffn_dim": 24,
        "embedding_dim": 8,
        "embedding_attention_heads": 2,
        "sandwich_attention_heads": 4,
        "projection_dropout": 0.0,
    },
    "partialformer": {
        **COMMON,
        "head_dim": 4,
        "encoder_attention_heads": 5,
        "decoder_attention_heads": 3,
        "base_attention_heads": 2,
    },
}
LOW_RANK = {
    "attention_rank": 5,
    "ffn_rank": 6,
    "embedding_rank": 7,
    "decoder_attention_rank": 4,
    "decoder_ffn_rank": 3,
}
TWO_VOCABULARIES = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 32}
ADAPTIVE = {"embedding": "adaptive", "adaptive_cutoffs": [12, 24], "adaptive_factor": 2}
FULL = {"embedding": "full", "embedding_dim": None}
NO_HEAD_SCALING = {"head_scaling": False, "encoder_attention_heads": 4, "decoder_attention_heads": 4}

T5 = {
    "scale_embedding": False,
    "scale_attention": False,
    "use_bias": False,
    "gated_ffn": True,
    "position_embedding_type": "relative",
    "relative_buckets": 8,
    "relative_furthest": 12,
    "normalization": "rms_norm",
    "normalize_before": True,
    "final_layer_norm": True,
    "activation_function": "gelu_new",
    "head_dim": 5,
}

# name → (family, fields). Adaptive ones are causal language models alone.
VARIANTS = {
    "lightformer": ("lightformer", {}),
    "lightformer-low-rank": ("lightformer", LOW_RANK),
    "lightformer-groups": ("lightformer", {"decoder_layers": 4, "encoder_groups": 2, "decoder_groups": 2}),
    "lightformer-private-norms": (
        "lightformer",
        {**LOW_RANK, "decoder_layers": 4, "encoder_groups": 2, "decoder_groups": 1, "share_layer_norms": False},
    ),
    "lightformer-narrow": (
        "lightformer",
        {
            "head_dim": 5,
            "head_dim_pattern": {"decoder.layers.0.encoder_attn": 3, "encoder.layers.1.self_attn": 2},
            "ffn_dim_pattern": {"decoder.layers.1": 7},
        },
    ),
    "lightformer-joint-qkv": ("lightformer", {**LOW_RANK, "joint_qkv": True, "attention_output_projection": False}),
    "lightformer-pre-norm": (
        "lightformer",
        {
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
    ),
    "lightformer-t5": ("lightformer", {**T5, "tie_word_embeddings": False}),
    "lightformer-t5-low-rank": (
        "lightformer",
        {**T5, **LOW_RANK, "gated_ffn": False, "activation_function": "relu", "scale_output": True, "joint_qkv": True},
    ),
    "lightformer-umt5-groups": (
        "lightformer",
        {
            **T5,
            "position_embedding_type": "relative_per_layer",
            "encoder_groups": 2,
            "share_layer_norms": False,
            "layernorm_embedding": True,
        },
    ),
    "lightformer-two-vocabularies": (
        "lightformer",
        {**TWO_VOCABULARIES, "embedding_rank": 7, "position_embedding_type": "sinusoidal_half"},
    ),
    "lightformer-adaptive": ("lightformer", {**ADAPTIVE, "encoder_layers": 1, "decoder_layers": 3}),
    "subformer-sandwich": (
        "subformer",
        {"decoder_layers": 4, "sandwich_dim": 24, "sandwich_ffn_dim": 28},
    ),
    "subformer-same-width": (
        "subformer",
        {
            "decoder_layers": 4,
            "sandwich_ffn_dim": 20,
            "embedding": "linear",
            "embedding_inner_dim": 12,
            "output_inner_dim": 10,
        },
    ),
    "subformer-all": ("subformer", {**FULL, "sharing": "all"}),
    "subformer-independent-ffn": ("subformer", {"sharing": "all_independent_ffn"}),
    "subformer-except-last": (
        "subformer",
        {**FULL, "sharing": "all_except_last", "normalize_before": True, "activation_function": "gelu"},
    ),
    "subformer-every-2": ("subformer", {"sharing": "every_2", "decoder_layers": 4}),
    "subformer-none": ("subformer", {"sharing": "none", "tie_word_embeddings": False, "scale_embedding": False}),
    "subformer-low-rank": (
        "subformer",
        {**LOW_RANK, "decoder_attention_rank": 8, "decoder_ffn_rank": 8, "decoder_layers": 4, "sandwich_dim": 12},
    ),
    "subformer-two-vocabularies": (
        "subformer",
        {**TWO_VOCABULARIES, "embedding": "linear", "embedding_dim": 10, "embedding_rank": 7},
    ),
    "subformer-adaptive": (
        "subformer",
        {**FULL, **ADAPTIVE, "encoder_layers": 3, "decoder_layers": 5, "sandwich_dim": 20},
    ),
    "partialformer": ("partialformer", {}),
    "partialformer-no-head-scaling": ("partialformer", {**NO_HEAD_SCALING, "gate_activation": "sigmoid"}),
    "partialformer-relative": (
        "partialformer",
        {
            "global_attention": "relative",
            "max_relative_position": 3,
            "gate_activation": "tanh",
            "decoder_layers": 4,
            "encoder_groups": 2,
            "decoder_groups": 2,
        },
    ),
    "partialformer-no-global": (
        "partialformer",
        {"global_attention": "none", "ffn_glu": True, "activation_function": "silu", "ffn_residual": False},
    ),
    "partialformer-cross-ffn": (
        "partialformer",
        {"encoder_ffn_in": "none", "decoder_ffn_in": "cross", "decoder_layers": 3, "decoder_groups": 1},
    ),
    "partialformer-self-ffn": ("partialformer", {**TWO_VOCABULARIES, "decoder_ffn_in": "self"}),
    "partialformer-no-ffn": (
        "partialformer",
        {"encoder_ffn_in": "none", "decoder_ffn_in": "none", "tie_word_embeddings": False},
    ),
    "partialformer-vanilla-encoder": ("partialformer", {"encoder_style": "vanilla", "encoder_groups": 2}),
    "partialformer-vanilla-decoder": ("partialformer", {"decoder_style": "vanilla"}),
    "partialformer-vanilla-head-scaling": (
        "partialformer",
        {"encoder_style": "vanilla", "decoder_style": "vanilla", "vanilla_head_scaling": True},
    ),
    "partialformer-low-rank": ("partialformer", {**LOW_RANK, "ffn_rank": 3, "ffn_glu": True}),
    "partialformer-adaptive": ("partialformer", {**ADAPTIVE, "encoder_layers": 2, "decoder_layers": 3}),
}
# One of each family, where every variant would say the same; and those with most of what is special.
PLAIN = ("lightformer", "subformer-sandwich", "partialformer")
SPECIAL = (
    "lightformer-private-norms",
    "lightformer-groups",
    "lightformer-pre-norm",
    "lightformer-t5",
    "lightformer-umt5-groups",
    "subformer-sandwich",
    "subformer-independent-ffn",
    "subformer-low-rank",
    "subformer-adaptive",
    "partialformer",
    "partialformer-relative",
    "partialformer-vanilla-head-scaling",
    "partialformer-low-rank",
    "partialformer-adaptive",
)


def model_class(head: str, family: str) -> type[nn.Module]:
    """The class of a family that has a head: `ConditionalGeneration`, `CausalLM`, …; `Model` is the one without."""
    return getattr(models, FAMILIES[family] + (head if head == "Model" else f"For{head}"))


def config_class(family: str) -> type:
    """Configuration class of a family."""
    return getattr(models, f"{FAMILIES[family]}Config")


def make_config(variant: str, **fields):
    """Configuration of a variant, with other `fields` where they are given."""
    family, own = VARIANTS[variant]
    return config_class(family)(**{**TINY[family], **own, **fields})


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


def make_model(head: str, variant: str, seed: int = 0, spread: float = 0.6, **fields):
    """The tiny model of a variant, in evaluation mode."""
    config = make_config(variant, **fields)
    torch.manual_seed(seed)
    return like_trained(model_class(head, VARIANTS[variant][0])(config), seed, spread)


def has_head(head: str, variant: str) -> bool:
    """Whether a variant has a model of that head."""
    family, fields = VARIANTS[variant]
    if fields.get("embedding") == "adaptive":
        return head == "CausalLM"
    return head != "SequenceClassification" or family == "lightformer"


def every(heads=HEADS, variants=VARIANTS):
    """Parametrise a test by `head` and `variant`: all pairs that there are."""
    pairs = [(head, variant) for variant in variants for head in heads if has_head(head, variant)]
    return pytest.mark.parametrize(("head", "variant"), pairs, ids=[f"{variant}-{head}" for head, variant in pairs])


def every_attention(heads=HEADS, variants=VARIANTS):
    """As `every`, and by `attention`: the implementations that the family has."""
    triples = [
        (head, variant, attention)
        for variant in variants
        for head in heads
        for attention in ("eager", "sdpa")
        if has_head(head, variant)
    ]
    return pytest.mark.parametrize(
        ("head", "variant", "attention"),
        triples,
        ids=[f"{variant}-{head}-{attention}" for head, variant, attention in triples],
    )


def padded(sentences: list[list[int]], side: str = "right", pad: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask of a padded batch."""
    width = max(map(len, sentences))
    ids, mask = torch.full((len(sentences), width), pad), torch.zeros(len(sentences), width, dtype=torch.long)
    for row, sentence in enumerate(sentences):
        place = slice(None, len(sentence)) if side == "right" else slice(width - len(sentence), None)
        ids[row, place], mask[row, place] = torch.tensor(sentence), 1
    return ids, mask


def sentences(lengths=(9, 5, 7), vocab_size: int = 32, seed: int = 0) -> list[list[int]]:
    """Random ids, special ones excluded."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def run_model(model, ids: torch.Tensor, mask: torch.Tensor | None, target=None, target_mask=None, **kwargs):
    """The model's output for ids, and for target ids where it has a decoder for them; the ids' start by default."""
    if model.config.is_encoder_decoder:
        kwargs["decoder_input_ids"] = ids[:, :5] if target is None else target
        if target_mask is not None:
            kwargs["decoder_attention_mask"] = target_mask
    return model(input_ids=ids, attention_mask=mask, **kwargs)
