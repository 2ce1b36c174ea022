"""The trainer that recovers quality: `Seq2SeqTrainer` with token-budget batches, a teacher, and their losses."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, SequentialSampler
from transformers import PreTrainedModel, Seq2SeqTrainer, Trainer
from transformers.trainer_utils import EvalLoopOutput, TrainOutput, has_length
from transformers.utils import ModelOutput

from ..decoding import search_options
from ..models.layers import MultiHeadAttention
from ..processors import EvenProducts, cast_once, has_many_shapes, without_plans
from ..rounding import rounded_matrices
from .batches import EpochCallback, TokenBatchSampler
from .stream import StreamLoader, StreamPosition, TokenBatches

IGNORED = -100  # the label of padding


def training_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    teacher: torch.Tensor | None = None,
    *,
    alpha: float = 0.5,
    temperature: float = 1.0,
    smoothing: float = 0.0,
) -> torch.Tensor:
    """α T² Σ KL(teacher ‖ student) + (1 − α) Σ cross entropy, in nats, summed over the tokens that are no padding.

    The divergence is that at temperature T (Hinton et al. 2015, arXiv 1503.02531, section 2; T² keeps its gradient's
    size the same at every temperature), the cross entropy that of `torch.nn.functional.cross_entropy`.

    Args:
        logits: the student's (..., V), of any floating type; computed with in float32.
        labels: (...), -100 where there is padding.
        teacher: the teacher's logits (..., V), which no gradient reaches; `None`: the cross entropy alone.
        alpha: weight of the teacher, from 0 to 1.
        temperature: divides both models' logits.
        smoothing: share of the labels' probability that all tokens get in equal parts.
    """
    kept = labels != IGNORED
    logits, labels = logits[kept].float(), labels[kept]
    if teacher is None:
        return F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    expected_logs = (teacher[kept].float() / temperature).log_softmax(-1)
    expected = expected_logs.exp()
    entropy = -torch.linalg.vecdot(expected, expected_logs).sum()
    if temperature != 1:
        logs = (logits / temperature).log_softmax(-1)
        divergence = -torch.linalg.vecdot(expected, logs).sum() - entropy
        loss = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
        return alpha * temperature**2 * divergence + (1 - alpha) * loss
    # Both terms are cross entropies of the same log-probabilities: one mixed target halves the passes over memory.
    target = expected.mul_(alpha).add_((1 - alpha) * smoothing / expected.shape[-1])
    share = (1 - alpha) * (1 - smoothing)
    target.scatter_add_(-1, labels[:, None], target.new_full((len(target), 1), share))
    return -torch.linalg.vecdot(target, logits.log_softmax(-1)).sum() - alpha * entropy


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
    tokens = mask.flatten().nonzero()[:, 0]  # looked up once: each time, a GPU would be waited for
    total = 0.0
    for stop in range(1, stops + 1):
        pair = [states[stop * depth // stops] for states, depth in zip((student, teacher), depths, strict=True)]
        if pair[0].shape != pair[1].shape:
            raise ValueError(
                f"The teacher's states are {pair[1].shape[-1]} wide, the model's {pair[0].shape[-1]}: hidden states "
                "compare where the widths agree, set hidden_weight to 0."
            )
        ours, theirs = (F.normalize(states.flatten(0, 1).index_select(0, tokens).float(), dim=-1) for states in pair)
        total = total + (ours - theirs).square().sum()
    return total / stops


class FiniteTrainer(Trainer):
    """`Trainer` that ends at the first loss that is NaN or infinite, and predicts the rows of a dataset in order."""

    def _get_eval_sampler(self, eval_dataset: Dataset) -> Sampler | None:
        """The rows in order, which decides which reference a prediction has. The private method of `Trainer` sorts
        them by length where it sorts those of the training (`train_sampling_strategy`).
        """
        return SequentialSampler(eval_dataset) if has_length(eval_dataset) else None

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As in `Trainer`. Raises `ValueError` for such a loss."""
        loss = super().training_step(*args, **kwargs)
        if not loss.isfinite():
            raise ValueError(
                f"the loss of step {self.state.global_step + 1} is {'NaN' if loss.isnan() else 'infinite'}, from "
                "which no training recovers: choose a lower learning_rate, or fp32 or bf16 instead of fp16, and begin "
                "from the last checkpoint"
            )
        return loss


class RecoveryTrainer(FiniteTrainer, Seq2SeqTrainer):
    """`Seq2SeqTrainer` for a compressed model, or any other: adds token-budget batches and distillation.

    Every loss is a mean over the target tokens of the whole optimizer step: over all micro-batches of gradient
    accumulation and over all processes, whatever the model's own loss does.

    Args:
        max_tokens: budget of a training batch (`TokenBatchSampler`) instead of `per_device_train_batch_size`. The
            training set needs the columns `source_length` and `target_length` of `tokenize_pairs`. `TokenBatches`, as
            training set, are batches already.
        teacher: a model of the same vocabulary (a larger one after `vocabularies.keep_tokens`). It is put on the
            training device, frozen, in evaluation mode, and never part of a checkpoint.
        distillation_alpha: weight of the teacher in the loss, from 0 to 1; see `training_loss`.
        distillation_temperature: divides both models' logits, above 0.
        hidden_weight: weight of `hidden_loss` between the encoders' and between the decoders' layers, beside the
            loss of logits and labels; 0 removes it.
        quantization: int8 or int4: predictions, and evaluations, are those of weights that are rounded to it
            (`rounded_matrices`), and so are training steps while `rounds()` is true. Saved weights are not rounded.

    Evaluation reports the loss against the labels alone: runs with and without a teacher compare. It is smoothed as
    in training, and, as in every `Trainer`, is the mean of its batches' means.

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
        quantization: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.quantization = quantization
        self.rounds: Callable[[], bool] = lambda: True
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
        if isinstance(self.train_dataset, TokenBatches):
            return self._stream(self.train_dataset)
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
        names = ("num_workers", "persistent_workers", "pin_memory")
        options = {name: getattr(self.args, f"dataloader_{name}") for name in names}
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=self.data_collator, **options)
        return self.accelerator.prepare(loader)

    def _stream(self, batches: TokenBatches) -> StreamLoader:
        """The batches of this process, of a corpus that each process reads itself."""
        batches.num_processes, batches.rank = self.args.world_size, self.args.process_index
        self.args.ignore_data_skip = True  # a checkpoint has the position
        self.add_callback(StreamPosition(batches))
        workers = min(1, self.args.dataloader_num_workers)
        return StreamLoader(
            batches, self.data_collator, num_workers=workers, pin_memory=self.args.dataloader_pin_memory
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As in `Seq2SeqTrainer`; samples a second are those of the batches that were trained on."""
        if "train_samples_per_second" in logs:
            logs["train_samples_per_second"] = round(self.seen / max(logs["train_runtime"], 1e-9), 3)
        super().log(logs, start_time)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As in `FiniteTrainer`, with matrix multiplications of few shapes (`EvenProducts`)."""
        self.seen += len(args[1]["labels"]) * self.accelerator.num_processes
        with ExitStack() as stack:
            if self.quantization and self.rounds():
                stack.enter_context(rounded_matrices(self.model, self.quantization))
            if self.evens_products:
                stack.enter_context(EvenProducts())
            stack.enter_context(without_plans())
            return super().training_step(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As in `Seq2SeqTrainer`, with rounded weights if they are asked for; settings of generation stay."""
        rounded = rounded_matrices(self.model, self.quantization) if self.quantization else nullcontext()
        settings = self.model.generation_config
        # Its defaults, such as a length of 20 tokens, are written into the settings that it finds.
        self.model.generation_config = copy.deepcopy(settings)
        try:
            with torch.no_grad(), rounded:
                return super().evaluation_loop(*args, **kwargs)
        finally:
            self.model.generation_config = settings

    @cached_property
    def evens_products(self) -> bool:
        """Whether `EvenProducts` help: on a CPU, in bfloat16, with many shapes. Determined by the first step.

        Compiled models have their own kernels. Layers recomputed for their gradients must be computed in one way.
        """
        again = any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules())
        return self.casts_on_cpu and not again and has_many_shapes(self.model)

    @property
    def casts_on_cpu(self) -> bool:
        """Whether autocast casts each matrix multiplication of a CPU to bfloat16."""
        return self.args.device.type == "cpu" and self.args.bf16 and not self.args.torch_compile

    def prediction_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor | None, ...]:
        """As in `Seq2SeqTrainer`; on a CPU in float32, in which a few tokens at a time take half as long."""
        with without_autocast(self.model) if self.casts_on_cpu else nullcontext(), without_plans():
            # Greedy or beam search, and every argument of the caller, as the first gives up those of `evaluate()`.
            searched: dict[str, Any] = {}
            if self.args.predict_with_generate:
                searched = search_options(self.model.generation_config) | self._languages(*args)
            kwargs = (getattr(self, "_gen_kwargs", {}) | searched if searched else {}) | kwargs
            return super().prediction_step(model, *args, **kwargs)

    def _languages(self, inputs: dict[str, torch.Tensor], *_: Any) -> dict[str, list[str]]:
        """The languages of the sounds of a batch, if they stand behind the start token of their decoder inputs."""
        known = getattr(self.model.generation_config, "lang_to_id", None) or {}
        names = {number: name for name, number in known.items()}
        if not {"input_features", "decoder_input_ids"} <= inputs.keys():
            return {}
        second = inputs["decoder_input_ids"][:, 1].tolist()
        return {"language": [names[number] for number in second]} if names.keys() >= set(second) else {}

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
        labels = inputs.pop("labels")
        if "decoder_input_ids" not in inputs:  # without them and without labels, the model would shift its inputs
            own = self.accelerator.unwrap_model(self.model)
            inputs["decoder_input_ids"] = own.prepare_decoder_input_ids_from_labels(labels=labels)
        distils = self.teacher is not None and model.training
        hidden = {"output_hidden_states": True} if distils and self.hidden_weight else {}
        outputs = model(**inputs, **hidden)
        teacher, kept = None, labels != IGNORED
        if distils:
            with torch.inference_mode(), self.accelerator.autocast():
                teacher = cast(Any, self.teacher)(**inputs, use_cache=False, **hidden)
        expected = teacher.logits if teacher is not None else None
        weights = {"alpha": self.alpha, "temperature": self.temperature}
        loss = training_loss(outputs.logits, labels, expected, **weights, smoothing=self.args.label_smoothing_factor)
        if teacher is not None and hidden:
            for stack, mask in (("encoder", inputs["attention_mask"].bool()), ("decoder", kept)):
                ours, theirs = (getattr(output, f"{stack}_hidden_states") for output in (outputs, teacher))
                loss = loss + self.hidden_weight * hidden_loss(ours, theirs, mask)
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
        raise ValueError(f"distillation_temperature is {temperature}: expected above 0 (1 keeps logits as they are).")


def slow_queries(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Let queries of attention whose scores nothing divides (T5's) learn as if the scores were divided by √d_k.

    A step of Adam is as large as the learning rate, whatever the size of the matrix: scores would grow √d_k times as
    fast as in other models. The factors of a low-rank matrix share the divisor. Other optimizers stay as they are.
    """
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return
    shares: dict[nn.Parameter, float] = {}
    for module in model.modules():
        if isinstance(module, MultiHeadAttention) and module.scaling == 1 and not module.joint_qkv:
            learned = [weight for weight in module.q_proj.parameters() if weight.requires_grad and weight.dim() > 1]
            shares |= dict.fromkeys(learned, module.head_dim ** (-0.5 / max(len(learned), 1)))
    for group in list(optimizer.param_groups):
        for share in sorted({shares[weight] for weight in group["params"] if weight in shares}):
            slow = [weight for weight in group["params"] if shares.get(weight) == share]
            group["params"] = [weight for weight in group["params"] if shares.get(weight) != share]
            optimizer.add_param_group({**group, "params": slow, "lr": group["lr"] * share})
