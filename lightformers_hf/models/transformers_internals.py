"""What is read of transformers' private parts, and nothing else of them, each with its reason.

A test fails where one of them changes. What a version does not have costs time there, never right results.
"""

import torch
from transformers import PreTrainedConfig, PreTrainedModel


def attention_of(config: PreTrainedConfig) -> str:
    """Name of the attention that a model of this configuration computes with: `sdpa`, `eager`, …"""
    return config._attn_implementation


def is_loaded(tensor: torch.Tensor) -> bool:
    """Whether `tensor` came from a checkpoint. `transformers.initialization` leaves such a one alone, but a slice or
    a row of it does not know where it belongs."""
    return getattr(tensor, "_is_hf_initialized", False)


def keep_own_names(model: PreTrainedModel) -> None:
    """Have a model that was loaded with a `key_mapping` saved under its own names, not under those it was read from:
    what reads files by itself, as `Trainer` does to go on and to take the best checkpoint, expects its own."""
    vars(model).pop("_weight_conversions", None)
