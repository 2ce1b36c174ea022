"""The trainer that wins the quality back: `Seq2SeqTrainer` with token-budget batches and a teacher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Seq2SeqTrainer
from transformers.trainer_utils import TrainOutput
from transformers.utils import ModelOutput

from ..products import EvenProducts, cast_once, has_many_shapes, without_plans
from .batching import EpochCallback, TokenBatchSampler
from .losses import IGNORED, hidden_loss, training_loss
from .rates import slow_queries


class RecoveryTrainer(Seq2SeqTrainer):
    """`Seq2SeqTrainer` for a compressed model, or any other: adds token-budget batches and distillation.

    Every loss is a mean over the target tokens of the whole optimizer step: over all micro-batches of gradient
    accumulation and over all processes, whatever the model's own loss does.

    Args:
        max_tokens: budget of a training batch (`TokenBatchSampler`) instead of `per_device_train_batch_size`. The
            training set needs the columns `source_length` and `target_length` of `tokenize_pairs`.
        teacher: a model of the same vocabulary (a larger one after `vocabularies.keep_tokens`). It is put on the
            training device, frozen, in evaluation mode, and never part of a checkpoint.
        distillation_alpha: weight of the teacher in the loss, from 0 to 1; see `training_loss`.
        distillation_temperature: divides both models' logits, above 0.
        hidden_weight: weight of `hidden_loss` between the encoders' and between the decoders' layers, beside the
            loss of logits and labels; 0 leaves it out.

    Evaluation reports the loss against the labels alone, so that runs with and without a teacher compare; smoothed as
    in training, and, as in every `Trainer`, the mean of its batches' means.

    Raises:
        ValueError: a teacher of another vocabulary size, alpha or temperature out of range.
    """

    def __init__(
        self,
        *args: Any,
        max_tokens: int | None = None,
        teacher: PreTrainedModel | None = None,
        distillation_alpha: float = 0.5,
        distillation_temperature: float = 1.0,
        hidden_weight: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        # Trainer then counts the target tokens of the step and leaves the loss as compute_loss scales it.
        self.model_accepts_loss_kwargs = True
        self.max_tokens = max_tokens
        self.alpha, self.temperature = distillation_alpha, distillation_temperature
        self.hidden_weight, self.teacher = hidden_weight, None
        self.seen = 0  # samples that were trained on
        if hidden_weight < 0 or (hidden_weight and teacher is None):
            raise ValueError(f"hidden_weight is {hidden_weight}: expected 0 or more, and a teacher.")
        if teacher is not None:
            _check_teacher(self.model, teacher, distillation_alpha, distillation_temperature)
            self.teacher = teacher.to(self.args.device).eval().requires_grad_(False)

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """As in `Seq2SeqTrainer`."""
        self.seen = 0
        with cast_once(self.teacher) if self.teacher is not None and self.casts_on_cpu else nullcontext():
            return super().train(*args, **kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As in `Seq2SeqTrainer`, with smaller steps for the queries of a T5 (`slow_queries`)."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new:
            slow_queries(optimizer, self.model)
        return optimizer

    def get_train_dataloader(self) -> DataLoader:
        """Batches within `max_tokens` where that is given, otherwise those of `Seq2SeqTrainer`."""
        if self.max_tokens is None:
            return super().get_train_dataloader()
        missing = {"source_length", "target_length"} - set(self.train_dataset.column_names)
        if missing:
            raise ValueError(f"max_tokens needs the column {sorted(missing)[0]!r}: prepare data with tokenize_pairs.")
        sampler = TokenBatchSampler(
            self.train_dataset["source_length"][:],
            self.train_dataset["target_length"][:],
            self.max_tokens,
            num_processes=self.args.world_size,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
        )
        self.add_callback(EpochCallback(sampler))
        dataset = self.train_dataset.remove_columns(["source_length", "target_length"])
        loader = DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            persistent_workers=self.args.dataloader_persistent_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )
        return self.accelerator.prepare(loader)

    def with_decoder_inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch with `decoder_input_ids`: without them and without labels a model would make up its own."""
        if "decoder_input_ids" not in batch:
            model = self.accelerator.unwrap_model(self.model)
            batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
        return batch

    def ask_teacher(self, inputs: dict[str, Any]) -> ModelOutput:
        """The teacher's outputs for a batch without labels, with the hidden states that the loss compares."""
        with torch.inference_mode(), self.accelerator.autocast():
            return self.teacher(**inputs, use_cache=False, output_hidden_states=self.hidden_weight > 0)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As in `Seq2SeqTrainer`; samples a second are those of the batches that were trained on."""
        if "train_samples_per_second" in logs:
            logs["train_samples_per_second"] = round(self.seen / max(logs["train_runtime"], 1e-9), 3)
        super().log(logs, start_time)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As in `Seq2SeqTrainer`, with matrix multiplications of few shapes (`EvenProducts`).

        Raises:
            ValueError: the loss is NaN.
        """
        self.seen += len(args[1]["labels"]) * self.accelerator.num_processes
        with self.even_products(), without_plans():
            loss = super().training_step(*args, **kwargs)
        if loss.isnan():
            raise ValueError(
                f"the loss of step {self.state.global_step + 1} is NaN, from which no training recovers: choose a "
                "lower learning_rate, or fp32 or bf16 instead of fp16, and begin from the last checkpoint"
            )
        return loss

    def even_products(self) -> EvenProducts | nullcontext[None]:
        """`EvenProducts` where those help: on a CPU, in bfloat16, with many shapes. Compiled models have programs of
        their own, and layers that are computed again, for their gradients, have to be computed alike."""
        return EvenProducts() if self.evens_products else nullcontext()

    @cached_property
    def evens_products(self) -> bool:
        """Whether those help: found out once, by the first step, before which a training may change its model."""
        again = any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules())
        return self.casts_on_cpu and not again and has_many_shapes(self.model)

    @property
    def casts_on_cpu(self) -> bool:
        """Whether autocast is what makes a CPU's products bfloat16, as they come."""
        return self.args.device.type == "cpu" and self.args.bf16 and not self.args.torch_compile

    def prediction_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor | None, ...]:
        """As in `Seq2SeqTrainer`; on a CPU in float32, in which a few tokens at a time take half as long."""
        with without_autocast(self.model) if self.casts_on_cpu else nullcontext(), without_plans():
            return super().prediction_step(model, *args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ModelOutput]:
        """Label loss, smoothed by `label_smoothing_factor`, and the teacher's share while training; in nats a token.

        Args:
            inputs: ids, masks and `labels` (B, T), padded with -100.
            num_items_in_batch: target tokens of the whole optimizer step; `None` means those of this batch.
        """
        inputs = self.with_decoder_inputs(inputs)
        labels = inputs.pop("labels")
        distils = self.teacher is not None and model.training
        hidden = {"output_hidden_states": True} if distils and self.hidden_weight else {}
        outputs = model(**inputs, **hidden)
        teacher = self.ask_teacher(inputs) if distils else None
        loss = training_loss(
            outputs.logits,
            labels,
            teacher.logits if teacher is not None else None,
            alpha=self.alpha,
            temperature=self.temperature,
            smoothing=self.args.label_smoothing_factor,
        )
        kept = labels != IGNORED
        if teacher is not None and hidden:
            source = inputs["attention_mask"].bool()
            loss = loss + self.hidden_weight * (
                hidden_loss(outputs.encoder_hidden_states, teacher.encoder_hidden_states, source)
                + hidden_loss(outputs.decoder_hidden_states, teacher.decoder_hidden_states, kept)
            )
        if num_items_in_batch is None:
            loss = loss / kept.sum()
        else:
            # The count is over all processes, and DistributedDataParallel averages gradients over them.
            averaged = self.args.average_tokens_across_devices
            loss = loss / num_items_in_batch * (self.accelerator.num_processes if averaged else 1)
        return (loss, outputs) if return_outputs else loss


@contextmanager
def without_autocast(model: nn.Module) -> Iterator[None]:
    """Inside, `model` computes in the type of its weights: accelerate enters autocast in a `forward` of its own."""
    forward = vars(model).pop("forward", None)
    try:
        yield
    finally:
        if forward is not None:
            model.forward = forward


def _check_teacher(student: PreTrainedModel, teacher: PreTrainedModel, alpha: float, temperature: float) -> None:
    """Raise a `ValueError` for a teacher of another vocabulary, or for settings out of their range."""
    sizes = [model.get_output_embeddings().weight.shape[0] for model in (student, teacher)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"The teacher's vocabulary has {sizes[1]} entries, the model's {sizes[0]}: distillation compares their "
            "predictions entry by entry, choose a teacher with the same tokenizer, or leave it the model's tokens "
            "(vocabularies.keep_tokens)."
        )
    if not 0 <= alpha <= 1:
        raise ValueError(f"distillation_alpha is {alpha}: expected from 0 (labels only) to 1 (teacher only).")
    if temperature <= 0:
        raise ValueError(
            f"distillation_temperature is {temperature}: expected above 0 (1 leaves the logits as they are)."
        )
