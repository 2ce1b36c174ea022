"""Benchmarks, and the shapes of common checkpoints, the values of `--shapes`. Read without PyTorch."""

from __future__ import annotations

from typing import Any

_OPUS = {"d_model": 512, "max_position_embeddings": 512, "encoder_layers": 6, "decoder_layers": 6}
_OPUS |= {"encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "encoder_attention_heads": 8, "decoder_attention_heads": 8}
T5 = "T5ForConditionalGeneration"
_FLAN = {"feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0}
# {name: (transformers' class, the fields of its configuration that are not the usual)}
TEACHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "opus-mt": ("MarianMTModel", _OPUS),
    "bart-large": ("BartForConditionalGeneration", {}),
    "nllb-600m": ("M2M100ForConditionalGeneration", {"vocab_size": 256206}),
    "flan-t5-base": (T5, {"d_model": 768, "d_ff": 2048, "num_layers": 12, "num_heads": 12, **_FLAN}),
    "flan-t5-large": (T5, {"d_model": 1024, "d_ff": 2816, "num_layers": 24, "num_heads": 16, **_FLAN}),
}
