"""How a recovery trains: settings that follow from how far a model was compressed, how wide it is, and the time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from transformers import Seq2SeqTrainingArguments

from ..evaluation.quality import METRICS

# From this ratio on, a model needs large steps, however few, and also learned more from its teacher's translations
# (RESULTS.md, "Recovered").
FAR = 5.0
# So does a model with less than this share of its teacher's chrF, as after removing layers: converted models kept 0.9
# at ratio 4, and 0.8 at 6 (RESULTS.md, "Without any training"). With the teacher's own translations for references,
# of which it has all itself, these keep 0.70 and 0.6.
NEAR, NEAR_OWN = 0.85, 0.65
# The width that rates were measured at; Adam's fall as 1 / width (Yang et al. 2022, arXiv 2203.03466, Table 3), which
# those found at 512 agree with (RESULTS.md, "At the size of the paper").
MEASURED_WIDTH = 256
# Near its teacher, few large steps do a model harm, the more the wider it is; at `MEASURED_WIDTH`, these are many.
FULL_RATE_STEPS = 600
# Near its teacher, dropout harms and states help where so few epochs are trained (measured with a half); seven were
# measured with dropout and without states.
FEW_EPOCHS = 2
# Shares of the time: for the teacher's translations, and for validation.
FOR_TRANSLATIONS, FOR_VALIDATION = 0.25, 0.15
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
    dropout: float = 0.0  # dropout during training; 0 or the value of its configuration
    seconds: float = 0.0  # by which the steps are planned anew while it trains (`Pace`)
    most_steps: int = 0


def find_distance(ratio: float, kept: float, *, own: bool) -> float:
    """The ratio by which settings are chosen: that of the parameters, and at least `FAR` of a model that lost much.

    Args:
        kept: chrF of the model, untrained, as a share of its teacher's.
        own: whether the references are the teacher's own translations.
    """
    return ratio if kept >= (NEAR_OWN if own else NEAR) else max(ratio, FAR)


def choose_settings(
    ratio: float, width: int, *, same_width: bool, bf16: bool, on_cpu: bool, random_text: bool = False
) -> RecoverySettings:
    """Settings for a model that has 1/`ratio` of its teacher's parameters and is `width` wide; steps come later.

    Learning rates are those of RESULTS.md: 1e-3 up to ratio 6, 1.2e-3 at 8, 1.5e-3 from 12 on, at a width of 256,
    as many times less as the model is wider. Hidden states compare with those of a teacher of the same width. With
    random text the teacher's predictions and states alone are learned, with half the rate: more training
    damages the language model.
    """
    rate = (1e-3 + 5e-4 * min(max((ratio - 6) / 6, 0), 1)) * (0.5 if random_text else 1)
    return RecoverySettings(
        learning_rate=rate * min(1.0, MEASURED_WIDTH / width),
        alpha=1.0 if random_text else 0.7,
        hidden_weight=5.0 if same_width else 0.0,
        max_tokens=1600 if on_cpu else 8192,
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
    dropout: float = 0.0,
) -> RecoverySettings:
    """The settings with the steps of a training of about `seconds`, validation included. Below ratio 5,
    of fewer than 600 steps (1200 at a width of 512, and so on), with a learning rate as much lower, and of two epochs
    and more, with dropout and without states.

    Args:
        step_seconds, evaluation_seconds: as measured.
        epoch_steps: steps of an epoch; more than 40 epochs are not trained.
        dropout: value of the model's configuration.
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
    planned = replace(planned, learning_rate=settings.learning_rate * min(1.0, steps / many))
    repeats = dropout and steps >= FEW_EPOCHS * epoch_steps
    return replace(planned, dropout=dropout, hidden_weight=0.0) if repeats else planned


def check_minutes(minutes: float) -> None:
    """Raise `ValueError` where a time to train is none."""
    if not 0 < minutes < math.inf:
        raise ValueError(f"minutes is {minutes}, expected a number above 0")


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
        eval_steps=settings.eval_steps,
        save_steps=settings.eval_steps,
        save_total_limit=2,
        metric_for_best_model=best_by,
        greater_is_better=METRICS[best_by].higher_is_better,
        predict_with_generate=True,
        generation_num_beams=1,
        per_device_eval_batch_size=32 if others.get("use_cpu") else 128,  # an accelerator takes hardly longer for more
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **(watched if saves else {"eval_strategy": "no", "save_strategy": "no"}),
        **others,
    )
