"""The trainer that wins the quality back: `Seq2SeqTrainer` with token-budget batches and a teacher."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Seq2SeqTrainer

from .batching import SetEpoch, TokenBatchSampler

IGNORED = -100  # the label of padding


class RecoveryTrainer(Seq2SeqTrainer):
    """`Seq2SeqTrainer` for a compressed model, or any other: adds token-budget batches and distillation.

    Every loss is a mean over the target tokens of the whole optimizer step: over all micro-batches of gradient
    accumulation and over all processes, whatever the model's own loss does.

    Args:
        max_tokens: budget of a training batch (`TokenBatchSampler`) instead of `per_device_train_batch_size`. The
            training set needs the columns `source_length` and `target_length` of `tokenize_pairs`.
        teacher: a model of the same vocabulary. It is put on the training device, frozen, in evaluation mode, and
            never part of a checkpoint.
        distillation_alpha: weight of the teacher in the loss, from 0 to 1; see `distillation_loss`.
        distillation_temperature: divides both models' logits, above 0.
        hidden_weight: weight of `hidden_loss` between the encoders' and between the decoders' layers, beside the
            loss of logits and labels; 0 leaves it out.

    Evaluation reports the loss against the labels alone, so that runs with and without a teacher compare.

    Raises:
        ValueError: a teacher of another vocabulary size, alpha or temperature out of range.
    """

    def __init__(
        self,
        *args,
        max_tokens: int | None = None,
        teacher: PreTrainedModel | None = None,
        distillation_alpha: float = 0.5,
        distillation_temperature: float = 1.0,
        hidden_weight: float = 0.0,
        **kwargs,
    ) -> None:
        super().__init__(*args, **kwargs)
        # Trainer then counts the target tokens of the step and leaves the loss as compute_loss scales it.
        self.model_accepts_loss_kwargs = True
        self.max_tokens = max_tokens
        self.alpha, self.temperature = distillation_alpha, distillation_temperature
        self.hidden_weight, self.teacher = hidden_weight, None
        if hidden_weight < 0 or (hidden_weight and teacher is None):
            raise ValueError(f"hidden_weight is {hidden_weight}: expected 0 or more, and a teacher.")
        if teacher is not None:
            _check_teacher(self.model, teacher, distillation_alpha, distillation_temperature)
            self.teacher = teacher.to(self.args.device).eval().requires_grad_(False)

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
        self.add_callback(SetEpoch(sampler))
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

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Label loss, smoothed by `label_smoothing_factor`, and the teacher's share while training."""
        labels = inputs.pop("labels")
        if "decoder_input_ids" not in inputs:  # without them and without labels a model would make up its own
            unwrapped = self.accelerator.unwrap_model(model)
            inputs["decoder_input_ids"] = unwrapped.prepare_decoder_input_ids_from_labels(labels=labels)
        distils = self.teacher is not None and model.training
        hidden = {"output_hidden_states": True} if distils and self.hidden_weight else {}
        outputs = model(**inputs, **hidden)
        kept = labels != IGNORED
        logits, labels = outputs.logits[kept].float(), labels[kept]
        loss = F.cross_entropy(logits, labels, label_smoothing=self.args.label_smoothing_factor, reduction="sum")
        if distils:
            with torch.inference_mode(), self.accelerator.autocast():
                teacher = self.teacher(**inputs, **hidden)
            divergence = distillation_loss(logits, teacher.logits[kept].float(), self.temperature)
            loss = self.alpha * divergence + (1 - self.alpha) * loss
            if hidden:
                source = inputs["attention_mask"].bool()
                loss += self.hidden_weight * (
                    hidden_loss(outputs.encoder_hidden_states, teacher.encoder_hidden_states, source)
                    + hidden_loss(outputs.decoder_hidden_states, teacher.decoder_hidden_states, kept)
                )
        if num_items_in_batch is None:
            loss = loss / labels.numel()
        else:
            # The count is over all processes, and DistributedDataParallel averages gradients over them.
            averaged = self.args.average_tokens_across_devices
            loss = loss / num_items_in_batch * (self.accelerator.num_processes if averaged else 1)
        return (loss, outputs) if return_outputs else loss


def distillation_loss(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    """T² · Σ KL(teacher ‖ student) at temperature T (Hinton et al. 2015, arXiv 1503.02531, section 2), in nats.

    Args:
        student, teacher: logits (tokens, V), padding left out.

    The sum over the tokens; T² keeps the gradient's size the same at every temperature.
    """
    student, teacher = (F.log_softmax(logits / temperature, dim=-1) for logits in (student, teacher))
    return temperature**2 * F.kl_div(student, teacher, log_target=True, reduction="sum")


def hidden_loss(student: Sequence[torch.Tensor], teacher: Sequence[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    """Σ ‖s/‖s‖ − t/‖t‖‖² over tokens, a mean over layers (PKD: Sun et al. 2019, arXiv 1908.09355, Eq. 7).

    Args:
        student, teacher: states (B, T, d) before the first layer and after each, of equal d. Stacks of unequal depth
            are compared where both are equally far: with 6 and 3 layers after 2 and 1, 4 and 2, 6 and 3.
        mask: (B, T), true where there is a token.

    Raises:
        ValueError: the widths differ.
    """
    depths = [len(states) - 1 for states in (student, teacher)]
    stops = math.gcd(*depths)
    total = 0.0
    for stop in range(1, stops + 1):
        pair = [states[stop * depth // stops] for states, depth in zip((student, teacher), depths, strict=True)]
        if pair[0].shape != pair[1].shape:
            raise ValueError(
                f"The teacher's states are {pair[1].shape[-1]} wide, the model's {pair[0].shape[-1]}: hidden states "
                "compare where the widths agree, set hidden_weight to 0."
            )
        ours, theirs = (F.normalize(states[mask].float(), dim=-1) for states in pair)
        total = total + (ours - theirs).square().sum()
    return total / stops


def _check_teacher(student: PreTrainedModel, teacher: PreTrainedModel, alpha: float, temperature: float) -> None:
    sizes = [model.get_output_embeddings().weight.shape[0] for model in (student, teacher)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"The teacher's vocabulary has {sizes[1]} entries, the model's {sizes[0]}: distillation compares their "
            "predictions entry by entry, choose a teacher with the same tokenizer."
        )
    if not 0 <= alpha <= 1:
        raise ValueError(f"distillation_alpha is {alpha}: expected from 0 (labels only) to 1 (teacher only).")
    if temperature <= 0:
        raise ValueError(
            f"distillation_temperature is {temperature}: expected above 0 (1 leaves the logits as they are)."
        )


def find_last_checkpoint(output_dir: str | Path) -> str | None:
    """The newest `checkpoint-<step>` folder of `output_dir` that was written to the end, or None.

    `trainer_state.json` is the last file Trainer writes: a folder without it, or with a torn one, was cut off by a
    kill. A folder whose weights or optimizer are gone (a kill while it was being deleted) does not count either.
    """
    folders = [f for f in Path(output_dir).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", f.name)]
    complete = filter(_is_complete, sorted(folders, key=lambda f: int(f.name.split("-")[1]), reverse=True))
    return next(map(str, complete), None)


def _is_complete(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    weights = any(checkpoint.glob("*.safetensors"))
    optimizer = any((checkpoint / name).is_file() for name in ("optimizer.pt", "optimizer.bin"))  # .bin is of FSDP
    return weights and optimizer and all((checkpoint / name).is_file() for name in ("config.json", "scheduler.pt"))
