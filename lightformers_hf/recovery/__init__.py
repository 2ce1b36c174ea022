"""Winning quality back: parallel data, token-budget batches, and a trainer that distils."""

from ..text import load_parallel, tokenize_pairs
from .batching import TokenBatchSampler
from .sharding import gather_model, prepare_sharding
from .trainer import RecoveryTrainer, distillation_loss, find_last_checkpoint, hidden_loss

__all__ = [
    "RecoveryTrainer",
    "TokenBatchSampler",
    "distillation_loss",
    "find_last_checkpoint",
    "gather_model",
    "hidden_loss",
    "load_parallel",
    "prepare_sharding",
    "tokenize_pairs",
]
