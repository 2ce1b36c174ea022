"""Benchmarks, and the checkpoints that people have, by their shapes: what `--shapes` takes. Read without PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def _flan_t5(d_model: int, d_ff: int, *, layers: int, heads: int) -> tuple[str, dict[str, Any]]:
    shapes = {"d_model": d_model, "d_ff": d_ff, "num_layers": layers, "num_heads": heads}
    return "T5ForConditionalGeneration", shapes | {"feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0}


# {name: (transformers' class, the fields of its configuration that are not the usual)}
TEACHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "opus-mt": (
        "MarianMTModel",
        {
            "d_model": 512,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_ffn_dim": 2048,
            "decoder_ffn_dim": 2048,
            "encoder_attention_heads": 8,
            "decoder_attention_heads": 8,
            "max_position_embeddings": 512,
        },
    ),
    "bart-large": ("BartForConditionalGeneration", {}),
    "nllb-600m": ("M2M100ForConditionalGeneration", {"vocab_size": 256206}),
    "flan-t5-base": _flan_t5(768, 2048, layers=12, heads=12),
    "flan-t5-large": _flan_t5(1024, 2816, layers=24, heads=16),
}
_PAIR = {"vocab_size": 24_004}  # NLLB's tokens in a corpus of German and English
# {name: {row of the benchmark of vocabularies: differences to the dense checkpoint}}; the first row is the dense
# checkpoint.
VOCABULARY_ROWS: dict[str, dict[str, dict[str, int]]] = {
    "opus-mt": {
        "dense": {},
        "ratio 8, two decoder layers": {
            "decoder_layers": 2,
            "head_dim": 16,
            "encoder_ffn_dim": 160,
            "decoder_ffn_dim": 160,
            "embedding_rank": 56,
        },
    },
    "nllb-600m": {
        "dense": {},
        "one pair": _PAIR,
        "one pair, ratio 2": _PAIR
        | {"head_dim": 32, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "embedding_rank": 491},
    },
}


def teacher_class(shapes: str) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """The class and the configuration of a checkpoint of these shapes.

    Raises:
        ValueError: unknown shapes.
    """
    import transformers

    if shapes not in TEACHERS:
        raise ValueError(f"unknown shapes {shapes!r}, expected one of {', '.join(TEACHERS)}")
    name, fields = TEACHERS[shapes]
    model_class = getattr(transformers, name)
    return model_class, model_class.config_class(**fields)
