"""Winning quality back: batches of a budget of tokens, and a trainer that distils.

The data comes from `lightformers_hf.text`. Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .batching import TokenBatchSampler
    from .checkpoints import find_last_checkpoint
    from .losses import hidden_loss, training_loss
    from .runs import ScoredPart, load_distiller, load_trainable, remove_checkpoints, train
    from .sharding import gather_model, prepare_sharding
    from .trainer import RecoveryTrainer

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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "RecoveryTrainer": ".trainer",
        "TokenBatchSampler": ".batching",
        "find_last_checkpoint": ".checkpoints",
        "gather_model": ".sharding",
        "hidden_loss": ".losses",
        "load_distiller": ".runs",
        "load_trainable": ".runs",
        "prepare_sharding": ".sharding",
        "remove_checkpoints": ".runs",
        "train": ".runs",
        "training_loss": ".losses",
        "ScoredPart": ".runs",
    },
)
