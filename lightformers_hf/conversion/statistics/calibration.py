"""What sample sentences say about each matrix: which inputs it gets, and how much the loss feels its outputs.

Let y = x·W. To second order, and treating x and the gradient g at y as independent (K-FAC, Martens and Grosse 2015),
replacing W by Ŵ costs ½ tr(Δᵀ C Δ G) nats a target token, Δ = W − Ŵ, C = E[xᵀx] and G = Σ gᵀg / target tokens: so far
predictions move from the model's own (`Probes`). So errors of different matrices are in one unit, and compare.

They are not independent: of some tokens the loss feels much, of others nothing. So C is a mean with weights |g|²,
which with G is the first step towards the product C ⊗ G that is nearest to E[xᵀx ⊗ gᵀg] (Van Loan and Pitsianis 1993).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import EllipsisType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..steps import Step
from ..workers import (
    Turns,
    algebra_device,
    cast_weights,
    fail_together,
    fast_passes,
    fast_products,
    fast_sums,
    gather_from_all,
    is_distributed,
    map_in_order,
    own_share,
    sum_over_all,
)
from .metric import GRADIENT_DAMPING, INPUT_DAMPING, Damped, Metric, damped_weights
from .moments import Moments
from .probes import Probes, logit_variance, temperature_of, token_keys
from .shelf import Shelf

# Share of the mean variance of inputs by which C is shrunk towards a multiple of the identity: a sample does not show
# all inputs, and random tokens show other inputs than real text (RESULTS.md, "Over-confident teachers").
SHRINKAGE, SELF_GENERATED_SHRINKAGE = 1e-2, 0.3
# Added to every token's weight, relative to their mean: so that tokens without a sample keep something.
TOKEN_DAMPING = 1e-2
# Tokens of a batch at most, on both sides with padding; of those, target tokens whose logits are held together.
TOKENS, LOGIT_ROWS = 512, 64
# Target tokens, about, by which the spread of logits is known, of so many batches.
SPREAD_TOKENS, SPREAD_BATCHES = 256, 4


@dataclass(eq=False)
class Passed:
    """What passes a layer: its name and inputs, where they hold tokens, where errors count, and Σ g² of each token."""

    name: str
    states: Tensor
    tokens: Tensor | EllipsisType
    mask: Tensor | EllipsisType
    weights: Tensor | None = None


class Calibration:
    """The moments of every matrix of a model, from sentence pairs: sums, for which memory is bounded (see `Shelf`).

    Args:
        model: a sequence-to-sequence model of this package, on the device where it is to run.
        linear: names of its linear layers.
        batches: `input_ids`, `attention_mask`, `labels` (−100 is padding) and `decoder_input_ids`. Larger ones than
            `TOKENS` are cut. Each of several processes has its own; sums are over all.
        progress: show a progress bar.
        removed: share of the parameters that compression removes, which `temperature_of` takes.
        self_generated: whether the text is of random tokens.
        alike: whether all tokens have the same weight in C; for comparison.

    Raises:
        ValueError: no token to predict; states or gradients that are not finite, with the module's name.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        linear: list[str],
        batches: Sequence[dict[str, Tensor]],
        *,
        progress: bool,
        removed: float = 0.5,
        self_generated: bool = False,
        alike: bool = False,
    ):
        self.batches = cut_batches(batches)
        self.model = model.eval().requires_grad_(False)
        self._vectors: list[Tensor] = []  # of a batch's tokens: gradients flow from the loss to here
        self._passed: list[Passed] = []  # what a batch has brought to each layer of the stacks
        self._weights: dict[str, list[Tensor]] = {}  # of each batch's tokens at each of these
        self._alike = alike
        self.self_generated = self_generated
        self.moments: dict[str, Moments] = {}
        self.target_tokens = 0
        self._shelf = Shelf(algebra_device(model.device))
        self._masks: dict[str, Tensor] = {}
        count = int(sum_over_all(torch.tensor(len(batches))))
        with fail_together():
            states = self._sample_states(batches, count)
        size = model.config.decoder_vocab_size
        variance = logit_variance(lambda part: model.logits_of(part).to(self.device), states, size)
        self.temperature = temperature_of(variance, removed)
        self._probes = Probes(size, model.device, self.temperature)
        self._turns = Turns()
        tables = [f"model.{stack}.embed_tokens" for stack in ("encoder", "decoder")]
        watched = {**dict.fromkeys(linear, "linear"), **dict.fromkeys(tables, "table"), self.output_name: "output"}
        hooks = [self._watch(name, kind) for name, kind in watched.items()]
        try:
            with fail_together(), cast_weights(self.model), fast_sums(self.device):
                passes = map_in_order(self._accumulate, range(len(self.batches)), model.device)
                for _ in Step("calibrating", passes, total=len(self.batches), unit="batch", shown=progress):
                    pass
        finally:
            for hook in hooks:
                hook.remove()
            self._shelf.settle()
        if is_distributed():
            self._add_up()
        if not self.target_tokens:
            raise ValueError("calibration: the text has no token to predict; give other text with --calibration")
        for what in ("inputs", "gradients", "squares"):  # what is not finite somewhere makes all gradients so
            for name, moments in self.moments.items():
                if not moments.finite(what):
                    what = "gradients" if what == "squares" else what
                    raise ValueError(f"calibration: the {what} at {name} hold NaN or infinite values")

    @property
    def device(self) -> torch.device:
        """Where moments and metrics are."""
        return self._shelf.device

    @property
    def shrinkage(self) -> float:
        """Share of the mean variance of inputs that is added to each."""
        return SELF_GENERATED_SHRINKAGE if self.self_generated else SHRINKAGE

    @property
    def output_name(self) -> str:
        """Name of the layer that makes logits."""
        return "lm_head.output" if hasattr(self.model.lm_head, "projection") else "lm_head"

    def moved(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """A batch, where the model is."""
        return {name: tensor.to(self.model.device) for name, tensor in batch.items()}

    @torch.no_grad()
    def _sample_states(self, batches: Sequence[dict[str, Tensor]], count: int) -> list[Tensor]:
        """Decoder states at some target tokens, from batches of all lengths, of all processes' `count` the same."""
        states, every = [], -(-count // SPREAD_BATCHES)
        for index, batch in zip(own_share(range(count)), batches, strict=False):
            if index % every:
                continue
            parts = []
            for part in map(self.moved, cut_batches([batch])):
                inputs = {name: tensor for name, tensor in part.items() if name != "labels"}
                with fast_products(self.model.device):
                    output = self.model.model(**inputs, use_cache=False)
                parts.append(output.last_hidden_state[token_mask(part, "target")])
            found = torch.cat(parts)
            # Without a last norm, states are bfloat16 where products are.
            states.append(found[:: max(1, len(found) * SPREAD_BATCHES // SPREAD_TOKENS)].float())
        return states

    def _watch(self, name: str, kind: str) -> RemovableHandle:
        moments = self.moments[name] = Moments(name, self._shelf)

        def see(module: nn.Module, arguments: tuple, output: Tensor) -> Tensor | None:
            # Behind the decoder's states there are the tokens that count alone.
            tokens = ... if name.startswith("lm_head") else self._masks[stream_of(name)]
            mask = _where_errors_count(module, kind, arguments[0], output, tokens)
            if kind == "table":
                states = arguments[0].detach()[mask]
                moments.add("tokens", torch.bincount(states, minlength=module.num_embeddings))
                moments.count += states.numel()
                output = output.detach().requires_grad_()
                self._vectors.append(output)
            else:
                passed = Passed(name, arguments[0].detach(), tokens, mask)
                output.register_hook(partial(self._weigh, passed, None if tokens is ... else self._passed))
            output.register_hook(partial(_add_gradients, moments, mask, kind))
            return output if kind == "table" else None

        return self.model.get_submodule(name).register_forward_hook(see)

    def _weigh(self, passed: Passed, later: list[Passed] | None, gradient: Tensor) -> None:
        """Find out how much the loss feels of a module's tokens, and add its inputs, now or later."""
        passed.weights = torch.linalg.vector_norm(gradient, dim=-1, dtype=torch.float32).square_()
        if later is None:
            self._add_inputs(passed)
        else:
            later.append(passed)

    def _add_inputs(self, passed: Passed) -> None:
        weights = torch.ones_like(passed.weights) if self._alike else passed.weights
        weights = weights.where(weights.isfinite(), 1)  # gradients that are not are found by their own sums
        counted = torch.zeros_like(weights)
        counted[passed.mask] = weights[passed.mask]
        weights = counted[passed.tokens].flatten()
        self.moments[passed.name].add_inputs(passed.states[passed.tokens].flatten(0, -2), weights)
        if passed.tokens is not ...:
            self._weights.setdefault(passed.name, []).append(weights.to(self.device))

    def _accumulate(self, index: int) -> None:
        """Add a batch to the sums, each of which only one stage adds to: so they do not depend on what is at once."""
        batch, turns = self.moved(self.batches[index]), self._turns
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        with torch.enable_grad(), fast_products(self.model.device):
            with turns.take("forward", index), fast_passes(self.model.device):
                self._masks = {stream: token_mask(batch, stream) for stream in ("source", "target")}
                kept, self._vectors, self._passed = self._masks["target"], (vectors := []), (layers := [])
                states = self.model.model(**inputs, use_cache=False).last_hidden_state[kept]
            with turns.take("logits", index):
                keys = token_keys(batch)[kept]
                parts = zip(states.detach().split(LOGIT_ROWS), keys.split(LOGIT_ROWS), strict=True)
                gradients = torch.cat([self._gradient(*part) for part in parts])
            with turns.take("backward", index):
                torch.autograd.grad(states, vectors, gradients)
                self.target_tokens += int(kept.sum())
            with turns.take("inputs", index):
                while layers:
                    self._add_inputs(layers.pop())

    def _gradient(self, states: Tensor, keys: Tensor) -> Tensor:
        """At decoder states (tokens×d) what `Probes` are at the logits, which are as wide as the vocabulary."""
        states = states.requires_grad_()
        logits = self.model.logits_of(states).float()
        return torch.autograd.grad(logits, states, self._probes.draw(logits.detach(), keys))[0]

    def _add_up(self) -> None:
        """Sum over all processes."""
        shapes = gather_from_all({name: moments.shapes() for name, moments in self.moments.items()})
        for name, moments in self.moments.items():
            moments.sum_over_all(max((own[name] for own in shapes), key=lambda own: len(own[1])))
        self.target_tokens = int(sum_over_all(torch.tensor(self.target_tokens)))

    def inputs(self, names: list[str]) -> tuple[Tensor, Tensor]:
        """E[xᵀx], shrunk, and E[x], tokens weighted, of one matrix that serves as each of the modules `names`."""
        parts = [self.moments[name] for name in names]
        counts = [part.count or 1 for part in parts]  # none where all inputs or gradients are zero
        second = _mean([part.inputs.div_(count) for part, count in zip(parts, counts, strict=True)])
        mean = _mean([part.vectors["mean"].double() / count for part, count in zip(parts, counts, strict=True)])
        second.diagonal().add_(self.shrinkage * second.diagonal().mean())
        return second, mean

    def token_weights(self, names: list[str]) -> Tensor:
        """How much the loss feels of each of this process's tokens, in their order, at layers of one input.

        The root of Σ |g|² / E[|g|²]: the errors that are left in the end are not those by which it was measured, and
        all of it would have few tokens decide (RESULTS.md, "Tokens").
        """
        none = torch.zeros(0, device=self.device)  # of a process without text
        felt = [(torch.cat([none, *self._weights.get(name, ())]), self.moments[name].count) for name in names]
        return sum(weights / count if count else torch.ones_like(weights) for weights, count in felt).sqrt()

    def forget(self, what: str) -> None:
        """Let go of the second moments of `inputs` or `gradients`, each half of all that is kept: choosing and
        building need both, refitting layers those of gradients."""
        for moments in self.moments.values():
            moments.forget(what)

    def gradients(self, names: list[str]) -> Tensor:
        """G, of one matrix that serves as each of the modules `names`."""
        return _mean([self.moments[name].gradients for name in names]).mul_(len(names) / self.target_tokens)

    def metric(self, names: list[str], kind: str, has_bias: bool, weighting: str = "loss") -> Metric:
        """The norm in which one matrix that serves as each of the modules `names` is to be approximated.

        `weighting`: `loss`, both C and G; for comparison `inputs`, C alone, or `rows`, one weight a row, the mean
        square of its weights' gradients: E[x_i²]·tr G, of which only the first differs from row to row.
        """
        if kind == "embedding":
            metric = self._table_metric(names[0])
            if weighting != "loss":
                metric = replace(metric, columns=self._identity(len(metric.columns.moment)))
            return metric
        inputs, mean = self.inputs(names)
        if weighting != "loss":
            columns = self._identity(self.moments[names[0]].sizes["gradients"])
            if weighting == "rows":
                return Metric(damped_weights(inputs.diagonal(), INPUT_DAMPING), columns)
            return Metric(Damped(inputs, INPUT_DAMPING), columns)
        if has_bias:  # the bias takes the mean of the error; what is left is centred
            inputs.addr_(mean, mean, alpha=-1)
        columns = Damped(self.gradients(names), GRADIENT_DAMPING)
        return Metric(Damped(inputs, INPUT_DAMPING), columns, mean if has_bias else None)

    def _identity(self, size: int) -> Damped:
        return Damped(torch.eye(size, dtype=torch.float64, device=self.device), 0.0)

    def _table_metric(self, name: str) -> Metric:
        """A table's two jobs as one pair of weights.

        As an output layer it costs Σ_v a_v Δ_v H Δ_vᵀ, with a_v the mean of p(1 − p) at token v and H the second
        moment of the states; as a lookup Σ_v f_v Δ_v G Δ_vᵀ, with f_v the frequency of v and G of the gradients.
        One row weight and one matrix stand for both, exact where the two agree.
        """
        jobs = []
        tied = self.model.get_expanded_tied_weights_keys(all_submodels=True)
        serves = [watched for watched in self.moments if self._stored(watched, tied) == name]
        for watched in serves:
            part = self.moments[watched]
            if watched == self.output_name:
                weights = part.vectors["squares"].double() / self.target_tokens
                matrix = part.inputs.div_(part.count)
            else:
                weights = part.vectors["tokens"].double() / part.count
                matrix = part.gradients.div_(self.target_tokens)
            jobs.append((weights, matrix))
        rows = sum(weights * matrix.trace() for weights, matrix in jobs)
        columns = sum(weights.sum() * matrix for weights, matrix in jobs)
        columns = columns / columns.trace() if columns.trace() > 0 else columns
        return Metric(damped_weights(rows, TOKEN_DAMPING), Damped(columns, self.shrinkage))

    @staticmethod
    def _stored(module_name: str, tied: dict[str, str]) -> str:
        """Name of the module that holds the weights of `module_name`."""
        for leaf in ("weight", "output.weight"):
            source = tied.get(f"{module_name}.{leaf}")
            while source in tied:
                source = tied[source]
            if source is not None:
                return source.removesuffix(".weight")
        return module_name


def _mean(tensors: list[Tensor]) -> Tensor:
    """Their mean; of one, itself."""
    return tensors[0] if len(tensors) == 1 else torch.stack(tensors).mean(0)


def token_mask(batch: dict[str, Tensor], stream: str) -> Tensor:
    """Where the `source` or `target` of a batch has tokens: behind a sentence's end, nothing is to be learned."""
    return batch["attention_mask"].bool() if stream == "source" else batch["labels"] != -100


def stream_of(name: str) -> str:
    """Whose tokens a module sees: cross-attention makes keys and values of the encoder's."""
    memory = "encoder_attn" in name and name.rpartition(".")[2] in ("k_proj", "v_proj", "memory_proj")
    return "source" if memory or name.startswith("model.encoder.") else "target"


def _where_errors_count(
    module: nn.Module, kind: str, inputs: Tensor, output: Tensor, mask: Tensor | EllipsisType
) -> Tensor | EllipsisType:
    """`mask` without what an error of the module's weights cannot reach: zero vectors, of a table or into a matrix.

    Gradients may be huge there: a T5 that this package trained starts its decoder with the padding token, whose vector
    is zero, and RMSNorm magnifies what goes back through zero by 1/√epsilon. A bias has errors of its own.
    """
    if kind == "output" or any(name.endswith("bias") for name, _ in module.named_parameters()):
        return mask
    moves = (output if kind == "table" else inputs).detach().ne(0).any(-1)
    return moves if mask is ... else mask & moves


def _add_gradients(moments: Moments, mask: Tensor, kind: str, gradient: Tensor) -> None:
    gradient = gradient[mask].flatten(0, -2)
    if kind == "output":
        moments.add("squares", gradient.float().square().sum(0))
    else:
        moments.add_gradients(gradient)


def cut_batches(batches: Sequence[dict[str, Tensor]], tokens: int = TOKENS) -> list[dict[str, Tensor]]:
    """The same pairs in batches of at most so many tokens, on both sides with padding, or of one pair.

    Neighbours come together where there is room, and should be of about one length.
    """
    cut: list[dict[str, Tensor]] = []
    for batch in batches:
        rows = max(1, tokens // _width(batch))
        for parts in zip(*(tensor.split(rows) for tensor in batch.values()), strict=True):
            some = [*cut[-1:], dict(zip(batch, parts, strict=True))]
            if len(some) == 2 and _width(*some) * sum(len(each["labels"]) for each in some) <= tokens:
                cut[-1] = _join(*some)
            else:
                cut.append(some[-1])
    return cut


def _width(*batches: dict[str, Tensor]) -> int:
    """Tokens of a pair, with padding, in batches that are padded to one width."""
    return sum(max(batch[side].shape[1] for batch in batches) for side in ("input_ids", "labels"))


def _join(*batches: dict[str, Tensor]) -> dict[str, Tensor]:
    """Batches as one, padded at their ends."""
    joined = {}
    for name in batches[0]:
        tensors = [batch[name] for batch in batches]
        width, padding = max(tensor.shape[1] for tensor in tensors), -100 if name == "labels" else 0
        joined[name] = torch.cat([F.pad(tensor, (0, width - tensor.shape[1]), value=padding) for tensor in tensors])
    return joined
