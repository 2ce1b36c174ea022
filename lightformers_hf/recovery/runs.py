"""Training runs: loading, scoring, resuming and ending a run, and callbacks that pace it."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import random
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import TrainOutput

from ..loading import check_checkpoint, check_vocabulary, load_pretrained, load_whole, resolve_source
from ..options import OptionError
from ..vocabularies import keep_tokens, match_tokens

# Variables by which launchers of several processes speak to accelerate and transformers.
LAUNCHER = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|FORK_LAUNCHED|"
    r"(ACCELERATE|FSDP|MEGATRON_LM|OMPI|PMI|PMIX|MV2|MPI|TORCHELASTIC|PARALLELISM_CONFIG)_\w+)"
)
logger = logging.getLogger(__name__)


@contextmanager
def one_process() -> Iterator[None]:
    """Inside, a training runs in this process alone, whatever a launcher's variables say. A warning names them."""
    found = {name: os.environ.pop(name) for name in sorted(os.environ) if LAUNCHER.fullmatch(name)}
    if found:
        names = ", ".join([*found][:3]) + (", …" if len(found) > 3 else "")
        logger.warning(
            f"this is a training in one process, which ignores {names} of the environment; the scripts in training/ "
            "train in several"
        )
    try:
        yield
    finally:
        for name in [name for name in os.environ if LAUNCHER.fullmatch(name)]:  # transformers sets some
            del os.environ[name]
        os.environ.update(found)


@contextmanager
def keep_randomness() -> Iterator[None]:
    """Give the caller's generators of random numbers their states back in the end. A Trainer sets their seeds."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def check_reports(report_to: Iterable[str]) -> None:
    """Raise `ValueError` where a service that logs a training is unknown, or its library is not installed."""
    for name in report_to:
        try:
            for callback in get_reporting_integration_callbacks(name):
                callback()
        except (ValueError, RuntimeError, ImportError) as error:
            raise OptionError("report_to", f" is {name!r}: {error}") from error


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
    return load_whole(auto_model, name, config=config, attn_implementation=attention)


def load_distiller(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    attention: str | None = None,
    config: PreTrainedConfig | None = None,
    auto_model: Any = AutoModelForSeq2SeqLM,
) -> PreTrainedModel:
    """The teacher to distil from, with the words of `tokenizer` alone. Raises `ValueError` if it lacks one.

    `config`: the student's. Rows of the teacher's matrices that have no token stay if the student has them, too.
    """
    name = str(resolve_source(name))
    own = load_pretrained(AutoTokenizer, name)
    matched = match_tokens(tokenizer, own)
    teacher = load_trainable(name, attention, auto_model)
    check_vocabulary(own, teacher.config, name)
    if matched is None and config is not None and config.vocab_size < teacher.config.vocab_size:
        target = getattr(config, "decoder_vocab_size", None) or config.vocab_size
        matched = {"source": list(range(config.vocab_size)), "target": list(range(target))}
    return teacher if matched is None else keep_tokens(teacher, **matched)


class ScoredPart:
    """A part of the data whose texts are generated and scored against the untouched references.

    The tokenized pairs and their references stand in the order of their length, so that little is computed on padding.
    """

    def __init__(self, pairs: Dataset, tokens: Dataset, tokenizer: PreTrainedTokenizerBase) -> None:
        self.order = np.argsort(tokens["source_length"][:], kind="stable")
        self.tokens, self.tokenizer = tokens.select(self.order), tokenizer
        self.references = [pairs[int(i)]["target"] for i in self.order]
        self.longest = max(map(len, self.tokens["labels"]))

    def decode(self, predictions: np.ndarray) -> list[str]:
        """The texts of generated tokens (rows, T), padded with negative ids."""
        # With several processes Seq2SeqTrainer appends texts from the beginning, to have as many for each.
        predictions = predictions[: len(self.references)]
        predictions = np.where(predictions < 0, self.tokenizer.pad_token_id, predictions)
        return self.tokenizer.batch_decode(predictions, skip_special_tokens=True)


def train(trainer: Trainer, checkpoint: str | None = None) -> TrainOutput:
    """Train from the beginning, or from `checkpoint`; then save model and state in the output folder.

    From the beginning means: checkpoints of an earlier run are deleted. From one that has all steps, nothing is
    trained: `Trainer` would take one step more.

    Raises:
        ValueError: the checkpoint is of another model or tokenizer, or FSDP is asked for.
    """
    args = trainer.args
    if trainer.is_fsdp_enabled:
        raise ValueError("fsdp is not supported: remove it. Every process then has the whole model")
    if checkpoint is not None:
        check_resume(checkpoint, trainer)
    elif args.should_save:
        remove_checkpoints(args.output_dir)
    if checkpoint is not None and 0 < args.max_steps <= _load_state(checkpoint).global_step:
        result = take_checkpoint(trainer, checkpoint)
    else:
        result = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
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
    return weights and all((checkpoint / name).is_file() for name in ("config.json", "optimizer.pt", "scheduler.pt"))


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


def _load_state(checkpoint: str) -> TrainerState:
    return TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME)))


def take_checkpoint(trainer: Trainer, checkpoint: str) -> TrainOutput:
    """Give a trainer the weights and the state that it would end with after this checkpoint."""
    trainer.state = state = _load_state(checkpoint)
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


# --- Callbacks of a training


class Pace(TrainerCallback, ExportableState):
    """Fits a training into its seconds: the elapsed time decides the learning rate, validations, and the end.

    The rate rises in a line over the first steps, then falls in a line to 0 at the end. The last validation, and
    writing the model, are within the seconds. Most steps end a training before.

    Args:
        settings: `seconds`, `warmup_steps`, `most_steps`, and the number of validations, `steps / eval_steps`.
        began: when the seconds began, by `time.monotonic()`.
    """

    def __init__(self, settings: RecoverySettings, began: float) -> None:
        self.settings, self.began, self.asked, self.before = settings, began, began, 0.0
        self.validations = settings.steps // settings.eval_steps
        self.reserve = FOR_VALIDATION * settings.seconds / self.validations  # for the last one; then what one took
        self.start = self.validated = 0.0  # `done` at the highest rate and at the last validation

    @property
    def elapsed(self) -> float:
        """Seconds of training, those before an interruption included, as far as a checkpoint has them."""
        return self.before + time.monotonic() - self.began

    def state(self) -> dict[str, Any]:
        return {"before": self.elapsed, "start": self.start, "reserve": self.reserve}

    def done(self, step: int) -> float:
        """The share of the training that is over, from 0 to 1, of its steps or its time."""
        return min(1.0, max(step / self.settings.most_steps, self.elapsed / self.until))

    @property
    def until(self) -> float:
        """The seconds after which the last validation begins."""
        return max(self.settings.seconds - self.reserve, self.settings.seconds / 2)

    def rate(self, step: int) -> float:
        """The learning rate of a step as a share of the highest."""
        if step <= self.settings.warmup_steps:
            self.start = self.done(step)
            return step / self.settings.warmup_steps
        return (1 - self.done(step)) / max(1e-9, 1 - self.start)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, lr_scheduler: Any = None, **_: Any
    ) -> None:
        """Adopt the rates, and the time of a checkpoint."""
        kept = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step and kept:
            self.before, self.start, self.reserve = (kept[name] for name in ("before", "start", "reserve"))
        self.validated = self.done(state.global_step)
        lr_scheduler.lr_lambdas = [self.rate] * len(lr_scheduler.lr_lambdas)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Ask for a validation and a checkpoint, or for the end."""
        step, done = state.global_step, self.done(state.global_step)
        state.max_steps = step if done == 1 else max(step + 2, round(step / done))  # a bar shows it
        is_due = int(done * self.validations) > int(self.validated * self.validations)
        if done == 1 or (is_due and self.elapsed + self.reserve < self.until):
            self.asked, self.validated = time.monotonic(), done
            control.should_evaluate = control.should_save = True
            control.should_training_stop = done == 1

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Look how long the validation and the checkpoint took."""
        self.reserve = time.monotonic() - self.asked
        self.validated = max(self.validated, self.done(state.global_step))


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
    """How long a step takes, the first few aside. Ends a training of more than `limit` seconds, after four steps."""

    def __init__(self, limit: float = math.inf) -> None:
        self.limit = limit
        self.times: list[float] = []

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Look at the clock."""
        self.times.append(time.monotonic())
        control.should_training_stop |= len(self.times) > 3 and self.times[-1] - self.times[0] > self.limit

    @property
    def seconds(self) -> float:
        """The median time of a step; moments of high load do not count."""
        first = min(4, len(self.times) - 2)
        return median(after - before for before, after in pairwise(self.times[first:]))


# --- Settings that follow from how far a model was compressed, how wide it is, and the time

# From this ratio on, a model needs large steps, however few, and also learned more from its teacher's translations
# (measured with version 0.1). From them a model with fewer features learns more at lower ratios, too: it can't learn
# from its teacher's hidden states.
FAR = 5.0
# As far is a model with less than this share of its teacher's chrF, as after removing layers: converted models kept
# 0.9 at ratio 4, and 0.8 at 6. If the teacher's translations are the references, they kept 0.70 and 0.6.
# Of little sound, large steps harm a Whisper that kept 0.7.
NEAR, NEAR_OWN, NEAR_SOUND = 0.85, 0.65, 0.5
# The width that rates were measured at; Adam's fall as 1 / width (Yang et al. 2022, arXiv 2203.03466, Table 3), which
# those found at 512 agree with.
MEASURED_WIDTH = 256
# Near its teacher, few large steps do a model harm, the more the wider it is; at `MEASURED_WIDTH`, these are many.
FULL_RATE_STEPS = 600
MAX_TOKENS = {"cpu": 1600, "accelerator": 8192}  # of a batch
# Share of the time for validation.
FOR_VALIDATION = 0.15
MOST_EPOCHS, MOST_EVALUATIONS = 40, 10


@dataclass(frozen=True)
class RecoverySettings:
    """Settings of a training, besides model and data."""

    learning_rate: float  # the highest; it rises for `warmup_steps` and then falls to 0 by `steps`
    alpha: float  # weight of the teacher's predictions beside the labels
    hidden_weight: float  # weight of the distance between the layers' states of model and teacher
    max_tokens: int  # tokens of a batch
    bf16: bool  # whether matrices are multiplied in bfloat16
    steps: int = 0  # as planned
    warmup_steps: int = 0
    eval_steps: int = 0  # between validations
    seconds: float = 0.0  # by which the steps are planned anew while it trains (`Pace`)
    most_steps: int = 0


def find_distance(ratio: float, kept: float, near: float) -> float:
    """The ratio by which settings are chosen: that of the parameters, and at least `FAR` where less than `near` is
    `kept`, shares of the teacher's chrF."""
    return ratio if kept >= near else max(ratio, FAR)


def choose_settings(
    ratio: float, width: int, *, same_width: bool, bf16: bool, on_cpu: bool, random_text: bool = False
) -> RecoverySettings:
    """Settings for a model that has 1/`ratio` of its teacher's parameters and is `width` wide; steps come later.

    Learning rates were measured with version 0.1: 1e-3 up to ratio 6, 1.2e-3 at 8, 1.5e-3 from 12 on, at
    `MEASURED_WIDTH`. On random text half the rate and no labels, because more training damages the language model.
    """
    rate = (1e-3 + 5e-4 * min(max((ratio - 6) / 6, 0), 1)) * (0.5 if random_text else 1)
    return RecoverySettings(
        learning_rate=rate * min(1.0, MEASURED_WIDTH / width),
        alpha=1.0 if random_text else 0.7,
        hidden_weight=5.0 if same_width else 0.0,
        max_tokens=MAX_TOKENS["cpu" if on_cpu else "accelerator"],
        bf16=bf16,
    )


def plan_steps(
    settings: RecoverySettings,
    seconds: float,
    step_seconds: float,
    evaluation_seconds: float,
    epoch_steps: int,
    *,
    ratio: float,
    width: int,
) -> RecoverySettings:
    """The settings with the steps of a training that takes about so many seconds, validation included.

    Below ratio `FAR`, few steps lower the learning rate.
    """
    evaluations = max(1, min(MOST_EVALUATIONS, int(FOR_VALIDATION * seconds / evaluation_seconds)))
    steps = int((seconds - evaluations * evaluation_seconds) / step_seconds)
    most_steps = MOST_EPOCHS * epoch_steps
    eval_steps = max(1, min(steps, most_steps) // evaluations)
    steps = eval_steps * evaluations
    warmup_steps = max(1, min(100, steps // 10))
    planned = replace(settings, steps=steps, warmup_steps=warmup_steps, eval_steps=eval_steps)
    planned = replace(planned, seconds=seconds, most_steps=most_steps)
    if ratio >= FAR:
        return planned
    many = FULL_RATE_STEPS * max(1.0, width / MEASURED_WIDTH)
    return replace(planned, learning_rate=settings.learning_rate * min(1.0, steps / many))


def training_arguments(
    settings: RecoverySettings, *, saves: bool, best_by: str, **others: Any
) -> Seq2SeqTrainingArguments:
    """The settings, and others, as transformers' Trainer takes them.

    If it `saves`, it validates and writes checkpoints; the best one by the metric `best_by` is loaded in the end.
    """
    watched: dict[str, Any] = {"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True}
    return Seq2SeqTrainingArguments(
        bf16=settings.bf16,
        max_steps=max(settings.steps, settings.most_steps),
        learning_rate=settings.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=settings.warmup_steps,
        adam_beta2=0.98,
        logging_steps=max(1, settings.steps // 50),
        eval_steps=1 << 40,  # `Pace` asks for validations and checkpoints
        save_steps=1 << 40,
        save_total_limit=2,
        metric_for_best_model=best_by,
        predict_with_generate=True,
        generation_num_beams=1,
        per_device_eval_batch_size=32 if others.get("use_cpu") else 128,  # an accelerator takes hardly longer for more
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **(watched if saves else {"eval_strategy": "no", "save_strategy": "no"}),
        **others,
    )
