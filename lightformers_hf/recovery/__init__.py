"""Recovering quality: batches of a budget of tokens, and a trainer that distils. The data comes from `text`."""

from .batching import TokenBatchSampler
from .runs import (
    ScoredPart,
    find_last_checkpoint,
    gather_model,
    load_distiller,
    load_trainable,
    prepare_sharding,
    remove_checkpoints,
    train,
)
from .trainer import RecoveryTrainer, hidden_loss, training_loss

__all__ = [
    "RecoveryTrainer",
    "ScoredPart",
    "TokenBatchSampler",
    "find_last_checkpoint",
    "gather_model",
    "hidden_loss",
    "load_distiller",
    "load_trainable",
    "prepare_sharding",
    "remove_checkpoints",
    "train",
    "training_loss",
]
