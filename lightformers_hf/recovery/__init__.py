"""Recovering quality: batches of a budget of tokens, and a trainer that distils. The data comes from `text`."""

from .batches import TokenBatchSampler
from .runs import (
    ScoredPart,
    check_reports,
    find_last_checkpoint,
    load_distiller,
    load_trainable,
    one_process,
    remove_checkpoints,
    train,
)
from .stream import TokenBatches, TokenizedPool
from .trainer import FiniteTrainer, RecoveryTrainer, hidden_loss, training_loss

__all__ = [
    "FiniteTrainer",
    "RecoveryTrainer",
    "ScoredPart",
    "TokenBatchSampler",
    "TokenBatches",
    "TokenizedPool",
    "check_reports",
    "find_last_checkpoint",
    "hidden_loss",
    "load_distiller",
    "load_trainable",
    "one_process",
    "remove_checkpoints",
    "train",
    "training_loss",
]
