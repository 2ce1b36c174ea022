"""Parts of a training run: what is loaded, what is scored, how it goes on where it was cut off, what it leaves."""

from __future__ import annotations

import copy
import re
import shutil
from pathlib import Path
from typing import cast

import numpy as np
import torch
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import TrainOutput

from ..checkpoint import check_vocabulary
from ..loading import AutoClass, check_checkpoint, load_pretrained, resolve_source
from ..vocabularies import keep_tokens, match_tokens
from .sharding import gather_model, prepare_sharding


def load_trainable(
    name: str,
    attention: str | None = None,
    auto_model: AutoClass = AutoModelForSeq2SeqLM,
    config: PreTrainedConfig | None = None,
    *,
    dropout: bool = True,
) -> PreTrainedModel:
    """A checkpoint in fp32, whatever it is stored in: fp16 weights do not train. Every weight must be there.

    Its configuration is `config`, or its own; without `dropout` nothing is dropped, whatever that says. Raises
    `ValueError` if its weights are not those of the configuration, or as `check_checkpoint`.
    """
    name = str(resolve_source(name))
    check_checkpoint(Path(name))
    if not dropout:
        config = copy.deepcopy(config or load_pretrained(AutoConfig, name))
        for kind in [name for name in vars(config) if "dropout" in name]:
            setattr(config, kind, 0.0)
    try:
        model, info = load_pretrained(
            auto_model,
            name,
            config=config,
            dtype=torch.float32,
            attn_implementation=attention,
            output_loading_info=True,
        )
    except RuntimeError as error:
        if config is None or "mismatch" not in str(error):
            raise
        raise ValueError(
            f"The weights of {name} do not have the shapes of the fields of model that are given."
        ) from error
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{name} lacks {len(missing)} of the model's weights, such as {missing[0]}.")
    return model


def load_distiller(name: str, tokenizer: PreTrainedTokenizerBase, attention: str | None = None) -> PreTrainedModel:
    """The teacher to distil from, with the words of `tokenizer` alone. Raises `ValueError` if it lacks one."""
    name = str(resolve_source(name))
    own = load_pretrained(AutoTokenizer, name)
    matched = match_tokens(tokenizer, own)
    teacher = load_trainable(name, attention)
    check_vocabulary(own, teacher.config, name)
    return teacher if matched is None else keep_tokens(teacher, **matched)


class ScoredPart:
    """A part of the data whose texts are generated and scored against the untouched references.

    Texts of similar length stand together, so that little is computed on padding.

    Attributes:
        tokens: the tokenized pairs in that order.
        references: their targets in that order.
    """

    def __init__(self, pairs: Dataset, tokens: Dataset, tokenizer: PreTrainedTokenizerBase) -> None:
        self.order = np.argsort(tokens["source_length"][:], kind="stable")
        self.tokens, self.tokenizer = tokens.select(self.order), tokenizer
        self.references = [pairs[int(i)]["target"] for i in self.order]

    def decode(self, predictions: np.ndarray) -> list[str]:
        """The texts of generated tokens (rows, T), padded with negative ids."""
        # With several processes Seq2SeqTrainer appends texts from the beginning, to have as many for each.
        predictions = predictions[: len(self.references)]
        predictions = np.where(predictions < 0, self.tokenizer.pad_token_id, predictions)
        return self.tokenizer.batch_decode(predictions, skip_special_tokens=True)


def check_resume(checkpoint: str, trainer: Trainer) -> None:
    """Raise a `ValueError` if `checkpoint` is of another model or tokenizer than `trainer`'s.

    Its Trainer would load what fits of the weights, and train on.
    """
    # What says nothing of the weights, or what Trainer itself makes agree with the tokenizer before the first step.
    passing = {"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"}
    passing |= {f"{token}_token_id" for token in ("bos", "eos", "pad")}
    before, now = load_pretrained(AutoConfig, checkpoint).to_dict(), trainer.model.config.to_dict()
    for name in sorted((before.keys() | now.keys()) - passing):
        if before.get(name) != now.get(name):
            raise ValueError(
                f"{checkpoint} was trained with {name} {before.get(name)!r}, this run has {now.get(name)!r}: go on "
                "with the same configuration, or choose another output_dir."
            )
    tokenizer = trainer.processing_class
    if tokenizer is not None and load_pretrained(AutoTokenizer, checkpoint).get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"{checkpoint} was trained with another tokenizer than {tokenizer.name_or_path}.")


def train(trainer: Trainer, checkpoint: str | None = None) -> TrainOutput:
    """Train from the beginning, or from `checkpoint`; then save model and state in the output folder.

    From the beginning means: checkpoints of an earlier run are deleted. From one that has all steps, nothing is
    trained: `Trainer` would take one step more, as it does with sharded weights (FSDP).

    Raises:
        ValueError: the checkpoint is of another model or tokenizer.
    """
    args = trainer.args
    if checkpoint is not None:
        check_resume(checkpoint, trainer)
    elif args.should_save:
        remove_checkpoints(args.output_dir)
    # Evaluation fills in its own defaults; a classifier generates nothing.
    generation_config = copy.deepcopy(getattr(trainer.model, "generation_config", None))
    prepare_sharding(trainer)
    if checkpoint is not None and not trainer.is_fsdp_enabled and has_all_steps(checkpoint, args):
        result = take_checkpoint(trainer, checkpoint)
    else:
        result = trainer.train(resume_from_checkpoint=checkpoint)
    if generation_config is not None:
        trainer.model.generation_config = generation_config
    if not trainer.accelerator.is_fsdp2:
        trainer.save_model()
    elif model := gather_model(trainer):
        model.save_pretrained(args.output_dir)
        trainer.processing_class.save_pretrained(args.output_dir)
    trainer.save_state()
    return result


def has_all_steps(checkpoint: str, args: TrainingArguments) -> bool:
    """Whether a checkpoint has taken all the steps that `args` ask for."""
    return 0 < args.max_steps <= load_state(checkpoint).global_step


def load_state(checkpoint: str) -> TrainerState:
    """What a checkpoint tells of its training."""
    return TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME)))


def take_checkpoint(trainer: Trainer, checkpoint: str) -> TrainOutput:
    """Give a trainer the weights and the state that it would end with after this checkpoint."""
    trainer.state = state = load_state(checkpoint)
    state.is_local_process_zero = trainer.is_local_process_zero()  # it was written by the first one
    state.is_world_process_zero = trainer.is_world_process_zero()
    best = trainer.state.best_model_checkpoint if trainer.args.load_best_model_at_end else None
    if best:  # beside the other one, wherever the folder is now
        checkpoint = str(Path(checkpoint).with_name(Path(best).name))
    weights = load_trainable(checkpoint, auto_model=cast(AutoClass, type(trainer.model)))
    trainer.model.load_state_dict(weights.state_dict())
    return TrainOutput(trainer.state.global_step, 0.0, {"train_runtime": 0.0})


def remove_checkpoints(folder: str | Path) -> None:
    """Delete the `checkpoint-<step>` folders of a run."""
    for stale in Path(folder).glob("checkpoint-*"):
        if re.fullmatch(r"checkpoint-\d+", stale.name):
            shutil.rmtree(stale)
