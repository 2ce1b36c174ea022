"""Training runs: loading, scoring, sharding, resuming and ending a run, and callbacks that pace it."""

from __future__ import annotations

import copy
import json
import logging
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import TrainOutput

from ..loading import check_checkpoint, check_vocabulary, load_pretrained, resolve_source
from ..vocabularies import keep_tokens, match_tokens


def load_trainable(
    name: str,
    attention: str | None = None,
    auto_model: Any = AutoModelForSeq2SeqLM,
    config: PreTrainedConfig | None = None,
    *,
    dropout: bool = True,
) -> PreTrainedModel:
    """A checkpoint in fp32, whatever it is stored in: fp16 weights do not train. Every weight must be there.

    Its configuration is `config`, or its own; without `dropout` there is no dropout, whatever the configuration
    contains. Raises `ValueError` if its weights are not those of the configuration, or as `check_checkpoint`.
    """
    name = str(resolve_source(name))
    check_checkpoint(Path(name))
    if not dropout:
        config = copy.deepcopy(config or load_pretrained(AutoConfig, name))
        for kind in [name for name in vars(config) if "dropout" in name]:
            setattr(config, kind, 0.0)
    try:
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": attention}
        model, info = load_pretrained(auto_model, name, config=config, output_loading_info=True, **options)
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

    The tokenized pairs and their references stand in the order of their length, so that little is computed on padding.
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
    # Evaluation sets its defaults; a classifier generates nothing.
    generation_config = copy.deepcopy(getattr(trainer.model, "generation_config", None))
    prepare_sharding(trainer)
    trained = 0 if checkpoint is None or trainer.is_fsdp_enabled else load_state(checkpoint).global_step
    if checkpoint is not None and 0 < args.max_steps <= trained:
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


def find_last_checkpoint(output_dir: str | Path) -> str | None:
    """The newest `checkpoint-<step>` folder of `output_dir` that was written to the end, or None.

    `trainer_state.json` is the last file Trainer writes: a folder without it, or with a torn one, was cut off by a
    kill. A folder whose weights or optimizer are gone (a kill while it was being deleted) does not count either.
    """
    newest = sorted(list_checkpoints(output_dir), key=lambda folder: int(folder.name.split("-")[1]), reverse=True)
    return next(map(str, filter(_is_complete, newest)), None)


def list_checkpoints(output_dir: str | Path) -> list[Path]:
    """The `checkpoint-<step>` folders of a run, whole or not."""
    return [f for f in Path(output_dir).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", f.name)]


def _is_complete(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    weights = any(checkpoint.glob("*.safetensors"))
    optimizer = any((checkpoint / name).is_file() for name in ("optimizer.pt", "optimizer.bin"))  # .bin is of FSDP
    return weights and optimizer and all((checkpoint / name).is_file() for name in ("config.json", "scheduler.pt"))


def check_resume(checkpoint: str, trainer: Trainer) -> None:
    """Raise a `ValueError` if `checkpoint` is of another model or tokenizer: Trainer would load the part that fits."""
    # Fields without effect on the weights, and those that Trainer aligns with the tokenizer before the first step.
    passing = {"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"}
    passing |= {f"{token}_token_id" for token in ("bos", "eos", "pad")}
    before, now = load_pretrained(AutoConfig, checkpoint).to_dict(), trainer.model.config.to_dict()
    for name in sorted((before.keys() | now.keys()) - passing):
        if before.get(name) != now.get(name):
            raise ValueError(
                f"{checkpoint} was trained with {name} {before.get(name)!r}, this run has {now.get(name)!r}: resume "
                "with the same configuration, or choose another output_dir."
            )
    tokenizer = trainer.processing_class
    if tokenizer is not None and load_pretrained(AutoTokenizer, checkpoint).get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"{checkpoint} was trained with another tokenizer than {tokenizer.name_or_path}.")


def load_state(checkpoint: str) -> TrainerState:
    """Data about the training in a checkpoint."""
    return TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME)))


def take_checkpoint(trainer: Trainer, checkpoint: str) -> TrainOutput:
    """Give a trainer the weights and the state that it would end with after this checkpoint."""
    trainer.state = state = load_state(checkpoint)
    state.is_local_process_zero = trainer.is_local_process_zero()  # it was written by the first one
    state.is_world_process_zero = trainer.is_world_process_zero()
    best = trainer.state.best_model_checkpoint if trainer.args.load_best_model_at_end else None
    if best:  # beside the other one, wherever the folder is now
        checkpoint = str(Path(checkpoint).with_name(Path(best).name))
    weights = load_trainable(checkpoint, auto_model=type(trainer.model))
    trainer.model.load_state_dict(weights.state_dict())
    return TrainOutput(trainer.state.global_step, 0.0, {"train_runtime": 0.0})


def remove_checkpoints(folder: str | Path) -> None:
    """Delete the `checkpoint-<step>` folders of a run."""
    for stale in list_checkpoints(folder):
        shutil.rmtree(stale)


def prepare_sharding(trainer: Trainer) -> None:
    """Make the model of an FSDP2 run ready for accelerate to shard; before `trainer.train()`, on every process.

    A parameter must not lie in two FSDP groups, and accelerate, which makes one of every layer and one of what is
    left, handles a tied input and output matrix, but not separate matrices of encoder and decoder beside it. So the
    modules that share parameters become one group here; accelerate skips sharded modules. Of the layer classes
    in `_no_split_modules` those are named to it that the model has. Without FSDP2 nothing is done.
    """
    if not trainer.accelerator.is_fsdp2:
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    plugin, model = trainer.accelerator.state.fsdp_plugin, trainer.model
    tables = {model.get_input_embeddings(), *getattr(model, "lm_head", torch.nn.Module()).modules()}
    classes = {type(module).__name__ for module in model.modules() if module not in tables}
    if plugin.transformer_cls_names_to_wrap is None:
        plugin.transformer_cls_names_to_wrap = sorted(classes & set(model._no_split_modules or ()))
    model.is_remote_code = lambda: False  # checkpoints would take torch's code of the sharded class for the model's
    owners: dict[torch.nn.Parameter, list[torch.nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    tied = list(dict.fromkeys(module for modules in owners.values() if len(modules) > 1 for module in modules))
    inner = {part for module in tied for part in module.modules() if part is not module}
    if tied:
        group = [module for module in tied if module not in inner]
        fully_shard(
            group,
            reshard_after_forward=False,  # the output layer needs the gathered first embedding
            mp_policy=plugin.mixed_precision_policy or MixedPrecisionPolicy(),
            offload_policy=plugin.cpu_offload,
        )
        output = model.get_output_embeddings()  # in a low-rank output layer only a part is sharded
        whole = next((module for module in group if output in set(module.modules())), output)
        model.get_output_embeddings = lambda: whole


def gather_model(trainer: Trainer) -> PreTrainedModel | None:
    """The model of an FSDP2 run as it was before it was sharded, on the CPU of the process that saves; None on others.

    To be called by every process. Its `save_pretrained` stores tied tables once, with the architecture's own code.
    The checkpoints that `Trainer` writes meanwhile load as well, but hold every tied table under all of its names.
    """
    from torch.distributed.fsdp import FSDPModule

    state = trainer.accelerator.get_state_dict(trainer.model)
    if not trainer.args.should_save:
        return None
    model_class = next(base for base in type(trainer.model).__mro__ if not issubclass(base, FSDPModule))
    model = model_class(trainer.model.config)
    model.load_state_dict(state)
    model.generation_config = trainer.model.generation_config
    return model


# --- Callbacks of a training


class Fall:
    """The learning rate of a step as a share of the highest: up in a line, then down in a line to 0 at `end`."""

    def __init__(self, warmup_steps: int, end: int) -> None:
        self.warmup_steps, self.start, self.share, self.end = warmup_steps, warmup_steps, 1.0, end

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return step / self.warmup_steps
        return self.share * max(0.0, (self.end - step) / max(1, self.end - self.start))

    def move(self, step: int, end: int) -> None:
        """From `step` on, fall to `end` instead, from where the rate is then; on the way up, later."""
        if step > self.start:
            self.start, self.share = step, self(step)
        self.end = end


class Pace(TrainerCallback, ExportableState):
    """After every validation, fits the steps that are left into the time that is left, in whole parts between two.

    The time of a step changes with the load of the machine; the last steps show the current time. The learning rate
    falls to 0 by the last step. A resumed training has the remaining time.

    Args:
        seconds: for the training, validation included; 0: the steps stay as they are.
        steps, warmup_steps: as planned. At most `max_steps` of the training's arguments are trained.
    """

    def __init__(self, seconds: float, steps: int, warmup_steps: int) -> None:
        self.seconds, self.fall = seconds, Fall(warmup_steps, steps)
        self.before, self.began, self.looked = 0.0, time.monotonic(), time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds of training, those before an interruption included, as far as a checkpoint has them."""
        return self.before + time.monotonic() - self.began

    def state(self) -> dict[str, Any]:
        """Content of a checkpoint."""
        return {"before": self.elapsed, "fall": dict(vars(self.fall))}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, lr_scheduler: Any = None, **_: Any
    ) -> None:
        """Adopt the number of steps and the rates, and those of a checkpoint."""
        kept = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step and kept:
            self.before = kept["before"]
            vars(self.fall).update(kept["fall"])
        self.began = self.looked = time.monotonic()
        state.max_steps = self.fall.end
        lr_scheduler.lr_lambdas = [self.fall] * len(lr_scheduler.lr_lambdas)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Plan anew, unless it was the last."""
        step, now = state.global_step, time.monotonic()
        part, self.looked = now - self.looked, now
        if not self.seconds or step >= self.fall.end:
            return
        most = (args.max_steps - step) // state.eval_steps
        parts = max(1, min(most, round((self.seconds - self.elapsed) / part)))
        self.fall.move(step, step + parts * state.eval_steps)
        state.max_steps = self.fall.end


@contextmanager
def hush_trainer() -> Iterator[None]:
    """Inside, transformers' trainer does not warn of tied tables, which checkpoints hold once, as of missing ones."""
    logger = logging.getLogger("transformers.trainer")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


class Progress(TrainerCallback):
    """A bar of steps, and a line for every validation with metrics by their `labels`."""

    def __init__(self, bar: tqdm, labels: dict[str, str] | None = None) -> None:
        self.bar, self.labels, self.start = bar, labels or {}, time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Move the bar on; how many steps there are may change."""
        self.bar.total = state.max_steps
        self.bar.update(state.global_step - self.bar.n)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        """Show the loss."""
        if logs and "loss" in logs:
            self.bar.set_postfix(loss=f"{float(logs['loss']):.3f}", refresh=False)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **_: Any
    ) -> None:
        """Print a line."""
        if not self.bar.disable and metrics and self.labels and all(f"eval_{name}" in metrics for name in self.labels):
            minutes = (time.monotonic() - self.start) / 60
            scores = [f"{label} {metrics[f'eval_{name}']:.1f}" for name, label in self.labels.items()]
            self.bar.write(
                f"step {state.global_step:,} of {self.bar.total:,}, {minutes:.1f} min: "
                f"validation {', '.join(scores)}, loss {metrics['eval_loss']:.3f}"
            )


class Clock(TrainerCallback):
    """How long a step takes, the first few aside."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Look at the clock."""
        self.times.append(time.monotonic())

    @property
    def seconds(self) -> float:
        """The median time of a step; moments of high load do not count."""
        first = min(4, len(self.times) - 2)
        return median(after - before for before, after in pairwise(self.times[first:]))
