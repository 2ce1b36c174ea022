"""Winning quality back: parallel data, token-budget batches, and a trainer that distils."""

from .batching import TokenBatchSampler
from .data import load_parallel, tokenize_pairs
from .trainer import RecoveryTrainer, distillation_loss, find_last_checkpoint, hidden_loss

__all__ = [
    "RecoveryTrainer",
    "TokenBatchSampler",
    "distillation_loss",
    "find_last_checkpoint",
    "hidden_loss",
    "load_parallel",
    "tokenize_pairs",
]
