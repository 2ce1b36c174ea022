"""Sensitivity of the loss to an error in each matrix, measured on calibration text (docs/explanation/weighting.md).

Let y = x·W, and g the gradient at y. Replacing W by Ŵ costs ½ tr(Δᵀ C Δ G) nats per target token, with Δ = W − Ŵ.
Here C = E[|g|² xᵀx] / E[|g|²] and G = Σ gᵀg / target tokens. Errors of different matrices are thus comparable.
"""

from __future__ import annotations

import copy
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import EllipsisType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..processors import give_back_memory
from .moments import GRADIENT_DAMPING, INPUT_DAMPING, Damped, Metric, Moments, TensorStore, damped_weights
from .workers import (
    AT_ONCE,
    Step,
    algebra_device,
    cast_weights,
    fast_passes,
    fast_products,
    map_in_threads,
    packed_attention,
)

# Share of the mean variance of inputs that is added to C; the second for random tokens, which have other inputs than
# real text.
SHRINKAGE, SELF_GENERATED_SHRINKAGE = 1e-2, 0.3
# For sound, the share for inputs from the encoder: 0.1 gave whisper-base a 40 % higher divergence on other speech.
# For n features of N tokens of transcripts, the share is at least n / (FEW · N): a few thousand tokens show little of
# 2,048 neurons.
SOUND_SHARE, FEW = 1e-3, 8
# Of the positions of an encoder of sound, every so many are measured, because neighbours are alike.
EVERY = 2
# Added to every token's weight, relative to their mean: so that tokens without a sample keep something.
TOKEN_DAMPING = 1e-2
# Tokens of a batch at most, on both sides with padding; of those, target tokens whose logits are held together.
TOKENS, LOGIT_ROWS = 512, 64
# Positions after which freed memory goes to the system: batches of unequal sizes would leave more and more of it.
FREED = 8192
# Number of target tokens, about, and of batches, from which the spread of logits is estimated.
SPREAD_TOKENS, SPREAD_BATCHES = 256, 4
# Signs of `Probes` repeat after so many tokens: a prime, small enough for float32 to distinguish fractions of its
# multiples apart.
PERIOD = 4093

# The label of a token that is given, as that of a prompt: no model predicts it, and later tokens attend to it.
GIVEN = -1

Batch = dict[str, Tensor]


class Probes:
    """Random vectors z, one for each token, with E[zᵀz] = diag(p) − pᵀp, p the softmax of the logits over T.

    z = ε√p − p Σ ε√p with random signs ε. A label drawn from p is a poorer estimate.
    """

    def __init__(self, size: int, device: torch.device, temperature: float = 1.0) -> None:
        self.phases = torch.rand(size, generator=torch.Generator().manual_seed(0)).to(device)
        self.temperature = temperature

    def draw(self, logits: Tensor, keys: Tensor) -> Tensor:
        """z (N, V), of logits (N, V) and the tokens' `token_keys` (N)."""
        roots = logits.div(self.temperature).softmax(-1).sqrt_()
        probes = (keys[:, None] * self.phases).frac_().sub_(0.5).sign_().mul_(roots)
        return probes.sub_(roots.square_().mul_(probes.sum(-1, keepdim=True)))


def logit_variance(logits_of: Callable[[Tensor], Tensor], states: Sequence[Tensor], size: int) -> float:
    """Return V = Σ_v p_v Var(l_v), in nats², with p the mean probability, and l the logits less their mean under p."""
    count = sum(map(len, states))

    def moments(rows_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Mean and second moment of a function of the logits."""
        sums = torch.zeros(2, size, dtype=torch.float64)
        for part in states:
            rows = rows_of(logits_of(part).to(algebra_device(part.device)).double())
            sums += torch.stack([rows.sum(0), rows.square().sum(0)]).cpu()
        return sums / count

    likely = moments(lambda logits: logits.softmax(-1))[0]
    mean, square = moments(lambda logits: logits - (logits @ likely.to(logits.device))[:, None])
    return (likely * (square - mean.square())).sum().item()


def find_temperature(variance: float, removed: float) -> float:
    """Return the temperature T at which probabilities have the sensitivity that finite errors meet.

    Compression adds noise to the logits, in the difference of two with a variance s² of about 2 · `removed` · V, V
    their `logit_variance`. A probability expected under such noise is nearly that of a higher temperature: T² =
    1 + π s² / 8 (MacKay 1992).

    Args:
        removed: share of the matrices' parameters that compression removes, in [0, 1].
    """
    return math.sqrt(1 + math.pi / 4 * removed * variance)


def token_keys(batch: Batch) -> Tensor:
    """A number from 1 to `PERIOD` for every target token (B, T), of its source sentence and its place."""
    ids = batch["input_ids"] * batch["attention_mask"] if "input_ids" in batch else batch["decoder_input_ids"]
    sentences = ids.sum(1, keepdim=True)
    places = torch.arange(batch["labels"].shape[1], device=sentences.device)
    return ((sentences * 7919 + places * 104_729) % PERIOD + 1).float()


class Calibration:
    """The moments of every matrix of a model, from sentence pairs: sums, for which memory is bounded (`TensorStore`).

    Worker threads pass batches through the model and back, one thread adds them to the sums, in their order.

    Args:
        model: a sequence-to-sequence model of this package, on the device where it is to run.
        linear: names of its linear layers.
        batches: `input_ids`, `attention_mask`, `labels` and `decoder_input_ids`; of a model for speech
            `input_features`, whose mask marks the positions that count. The label of padding is −100, that of a prompt
            `GIVEN`. Larger batches than `TOKENS` are cut.
        removed: share of the parameters that compression removes, which `find_temperature` takes.
        self_generated: whether the text is of random tokens.
        alike: whether all tokens have the same weight in C; for comparison.

    Raises:
        ValueError: no token to predict; states or gradients that are not finite, with the module's name.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        linear: list[str],
        batches: Sequence[Batch],
        *,
        removed: float = 0.5,
        self_generated: bool = False,
        alike: bool = False,
    ):
        self.batches = cut_batches(batches)
        self.model = model.eval().requires_grad_(False)
        self.self_generated, self._alike = self_generated, alike
        # The share of the mean variance of inputs that is added to each; the name of the layer that makes logits.
        self.shrinkage = SELF_GENERATED_SHRINKAGE if self_generated else SHRINKAGE
        self._output_name = "lm_head.output" if hasattr(model.lm_head, "projection") else "lm_head"
        self.moments: dict[str, Moments] = {}
        self.target_tokens = 0
        self._token_weights: dict[str, list[Tensor]] = {}  # of each batch's tokens at each linear layer of the stacks
        self._store = TensorStore(algebra_device(model.device))
        # Its `batch` is that of a thread: where `source` and `target` have tokens, the vectors of the tokens, to which
        # gradients flow, and calls that add the batch to the sums.
        self._current = threading.local()
        states = self._sample_states(batches)
        size = model.config.decoder_vocab_size
        self.temperature = find_temperature(logit_variance(model.logits_of, states, size), removed)
        self._probes = Probes(size, model.device, self.temperature)
        first = "conv2" if hasattr(model.model.encoder, "conv2") else "embed_tokens"
        tables = {f"model.encoder.{first}": "table", "model.decoder.embed_tokens": "table"}
        kinds = {**dict.fromkeys(linear, "linear"), **tables, self._output_name: "output"}
        hooks = [self._watch(name, kind) for name, kind in kinds.items()]
        try:
            with cast_weights(self.model):
                passes = map_in_threads(self._pass, self.batches, model.device, AT_ONCE)
                unfreed, bar = 0, Step("calibrating", passes, total=len(self.batches), unit="batch")
                for batch, additions in zip(self.batches, bar, strict=True):
                    while additions:
                        additions.popleft()()
                    if (unfreed := unfreed + _width(batch) * len(batch["labels"])) > FREED:
                        give_back_memory()
                        unfreed = 0
        finally:
            for hook in hooks:
                hook.remove()
        self.target_tokens = sum(int(predicted_mask(batch).sum()) for batch in self.batches)
        if not self.target_tokens:
            raise ValueError("calibration: the text has no token to predict; give other text with --calibration")
        for what in ("inputs", "gradients", "squares"):  # one value that is not finite makes all gradients so
            for name, moments in self.moments.items():
                if not moments.finite(what):
                    what = "gradients" if what == "squares" else what
                    raise ValueError(f"calibration: the {what} at {name} hold NaN or infinite values")

    def copy(self, model: PreTrainedModel) -> Calibration:
        """Return the same moments, to be changed into those of another model."""
        other = copy.copy(self)
        other.model, other._store = model, TensorStore(self._store.device)
        other.moments = {name: moments.copy(other._store) for name, moments in self.moments.items()}
        return other

    @torch.no_grad()
    def _sample_states(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Decoder states at some target tokens, from batches of all lengths."""
        states = []
        for batch in batches[:: max(1, -(-len(batches) // SPREAD_BATCHES))]:
            found = torch.cat([target_states(self.model, part) for part in cut_batches([batch])])
            # Without a last norm, states are bfloat16 where matrix multiplications are.
            states.append(found[:: max(1, len(found) * SPREAD_BATCHES // SPREAD_TOKENS)].float())
        return states

    def _watch(self, name: str, kind: str) -> RemovableHandle:
        """Have a module's inputs and gradients added to its moments."""
        moments = self.moments[name] = Moments(name, self._store)

        def see(module: nn.Module, arguments: tuple, output: Tensor) -> Tensor | None:
            masks, vectors, additions = self._current.batch
            if name.endswith("conv2"):  # in place of a table: the gradients of the encoder flow to its output
                vectors.append(output.detach().requires_grad_())
                return vectors[-1]
            # Behind the decoder's states there are the tokens that count alone.
            tokens = ... if name.startswith("lm_head") else masks[stream_of(name)]
            mask = _where_errors_count(module, kind, arguments[0], output, tokens)

            def see_gradient(gradient: Tensor) -> None:
                if kind != "table":
                    weights = torch.linalg.vector_norm(gradient, dim=-1, dtype=torch.float32).square_()
                    additions.append(partial(self._add_inputs, name, arguments[0].detach(), tokens, mask, weights))
                add = moments.add_squares if kind == "output" else moments.add_gradients
                additions.append(partial(add, gradient[mask].flatten(0, -2)))

            if kind == "table":
                ids = arguments[0].detach()[mask]
                additions.append(partial(moments.add_lookups, ids, module.num_embeddings))
                output = output.detach().requires_grad_()
                vectors.append(output)
            output.register_hook(see_gradient)
            return output if kind == "table" else None

        return self.model.get_submodule(name).register_forward_hook(see)

    def _add_inputs(
        self, name: str, states: Tensor, tokens: Tensor | EllipsisType, mask: Tensor | EllipsisType, weights: Tensor
    ) -> None:
        """Add inputs of a linear layer, where they hold `tokens`, with weights Σ g² where errors count (`mask`)."""
        if self._alike:
            weights = torch.ones_like(weights)
        weights = weights.where(weights.isfinite(), 1)  # gradients that are not finite are found by their sums
        counted = torch.zeros_like(weights)
        counted[mask] = weights[mask]
        weights = counted[tokens].flatten()
        self.moments[name].add_inputs(states[tokens].flatten(0, -2), weights)
        if tokens is not ...:
            self._token_weights.setdefault(name, []).append(weights.to(self._store.device))

    def _pass(self, batch: Batch) -> deque[Callable[[], None]]:
        """Pass a batch through the model and back, and return the function that adds it to the sums."""
        device = self.model.device
        masks = {stream: token_mask(batch, stream).to(device) for stream in ("source", "target")}
        vectors: list[Tensor] = []
        additions: deque[Callable[[], None]] = deque()
        self._current.batch = masks, vectors, additions
        with torch.enable_grad(), fast_products(device):
            with fast_passes(device), packed_attention(batch):
                states = self.model.model(**model_inputs(batch, device), use_cache=False).last_hidden_state
            predicted = predicted_mask(batch).to(device)
            states, keys = states[predicted], token_keys(batch).to(device)[predicted]
            parts = zip(states.detach().split(LOGIT_ROWS), keys.split(LOGIT_ROWS), strict=True)
            gradients = torch.cat([self._gradient(*part) for part in parts])
            torch.autograd.grad(states, vectors, gradients)
        return additions

    def _gradient(self, states: Tensor, keys: Tensor) -> Tensor:
        """Return the gradients at decoder states (tokens×d) of the `Probes` at the logits."""
        logits = self.model.logits_of(states.requires_grad_()).float()
        return torch.autograd.grad(logits, states, self._probes.draw(logits.detach(), keys))[0]

    def inputs(self, names: list[str]) -> tuple[Tensor, Tensor]:
        """E[xᵀx], shrunk, and E[x], tokens weighted, of one matrix that serves as each of the modules `names`."""
        parts = [self.moments[name] for name in names]
        counts = [part.count or 1 for part in parts]  # none where all inputs or gradients are zero
        second = _mean([part.inputs.div_(count) for part, count in zip(parts, counts, strict=True)])
        mean = _mean([part.vectors["mean"].double() / count for part, count in zip(parts, counts, strict=True)])
        share = adapt_share(self.shrinkage, self.batches, names[0], len(second))
        second.diagonal().add_(share * second.diagonal().mean())
        return second, mean

    def token_weights(self, names: list[str]) -> Tensor:
        """Return weights of all tokens, in their order: the sensitivity of the loss at layers of one input.

        They are the root of Σ |g|² / E[|g|²]: without the root, few tokens would decide. In an encoder of sound they
        are the root of that, because the gradients at a few minutes of speech say little of other speech.
        """
        found = [(torch.cat(self._token_weights[name]), self.moments[name].count) for name in names]
        weights = sum(part / count if count else torch.ones_like(part) for part, count in found).sqrt()
        return weights.sqrt() if self._is_sound and names[0].startswith("model.encoder.") else weights

    @property
    def _is_sound(self) -> bool:
        return any("input_features" in batch for batch in self.batches)

    def gradients(self, names: list[str]) -> Tensor:
        """G, of one matrix that serves as each of the modules `names`."""
        stands_for = EVERY if self._is_sound and stream_of(names[0]) == "source" else 1
        count = self.target_tokens / (stands_for * len(names))
        return _mean([self.moments[name].gradients for name in names]).div_(count)

    def metric(self, names: list[str], kind: str, has_bias: bool) -> Metric:
        """The norm in which one matrix that serves as each of the modules `names` is to be approximated.

        It has both C and G, or C alone if tokens have equal weight.
        """
        if kind == "embedding":
            metric = self._embedding_metric(names[0])
            size, like = len(metric.columns.moment), metric.columns.moment
            return replace(metric, columns=Damped.identity(size, like)) if self._alike else metric
        inputs, mean = self.inputs(names)
        if self._alike:
            columns = Damped.identity(self.moments[names[0]].sizes["gradients"], inputs)
            return Metric(Damped(inputs, INPUT_DAMPING), columns)
        if has_bias:  # the bias takes the mean of the error; the rest is centred
            inputs.addr_(mean, mean, alpha=-1)
        columns = Damped(self.gradients(names), GRADIENT_DAMPING)
        return Metric(Damped(inputs, INPUT_DAMPING), columns, mean if has_bias else None)

    def _embedding_metric(self, name: str) -> Metric:
        """Return one row weight and one matrix for both jobs of an embedding matrix, exact where the two agree.

        As an output layer it costs Σ_v a_v Δ_v H Δ_vᵀ, with a_v the mean of p(1 − p) at token v and H the second
        moment of the states. As a lookup, Σ_v f_v Δ_v G Δ_vᵀ, with f_v the frequency of v and G of the gradients.
        """
        jobs = []
        tied = self.model.get_expanded_tied_weights_keys(all_submodels=True)
        for watched, part in self.moments.items():
            if self._stored(watched, tied) != name:
                continue
            if watched == self._output_name:
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


def adapt_share(
    share: float, batches: Sequence[Batch], name: str, features: int = 0, positions: float = SOUND_SHARE
) -> float:
    """Return the share of the mean variance that is added to inputs of a module: of text, `share` itself.

    For sound, inputs from the encoder, whose positions are many and alike, have the share `positions`. Transcripts
    have few tokens for many `features`, and therefore a larger share than text.
    """
    sound = [batch for batch in batches if "input_features" in batch]
    if not sound:
        return share
    if stream_of(name) == "source":
        return positions
    tokens = sum(int(token_mask(batch, "target").sum()) for batch in sound)
    return max(share, features / (FEW * tokens)) if tokens else share


def _mean(tensors: list[Tensor]) -> Tensor:
    """Their mean; of one, itself."""
    return tensors[0] if len(tensors) == 1 else torch.stack(tensors).mean(0)


def model_inputs(batch: Batch, device: torch.device) -> Batch:
    """A batch without its labels, on the device of a model."""
    return {name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}


def encoder_inputs(batch: Batch) -> Batch:
    """The part of a batch that an encoder reads."""
    return {name: batch[name] for name in ("input_ids", "input_features", "attention_mask") if name in batch}


def memory_mask(batch: Batch) -> Tensor | None:
    """The positions of the encoder that cross-attention sees: those of tokens, or all positions of sound."""
    return batch["attention_mask"] if "input_ids" in batch else None


def target_states(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Return the decoder states at the target tokens of a batch, tokens×d."""
    with fast_products(model.device), packed_attention(batch):
        states = model.model(**model_inputs(batch, model.device), use_cache=False).last_hidden_state
    return states[predicted_mask(batch).to(states.device)]


def token_mask(batch: Batch, stream: str) -> Tensor:
    """Return the mask of the tokens of a batch's `source` or `target`, without padding."""
    return batch["attention_mask"].bool() if stream == "source" else batch["labels"] != -100


def predicted_mask(batch: Batch) -> Tensor:
    """Return the mask of the target tokens that the model is to predict: not padding, not a prompt."""
    return batch["labels"] >= 0


def stream_of(name: str) -> str:
    """Return whose tokens a module gets: keys and values of cross-attention come from the `source`."""
    memory = "encoder_attn" in name and name.rpartition(".")[2] in ("k_proj", "v_proj", "memory_proj")
    return "source" if memory or name.startswith("model.encoder.") else "target"


def _where_errors_count(
    module: nn.Module, kind: str, inputs: Tensor, output: Tensor, mask: Tensor | EllipsisType
) -> Tensor | EllipsisType:
    """Return `mask` without tokens that errors of the module's weights cannot reach: zero vectors of tables or inputs.

    Gradients may be huge there: RMSNorm magnifies gradients through zero. A bias has errors of its own.
    """
    if kind == "output" or any(name.endswith("bias") for name, _ in module.named_parameters()):
        return mask
    moves = (output if kind == "table" else inputs).detach().ne(0).any(-1)
    return moves if mask is ... else mask & moves


def cut_batches(batches: Sequence[Batch], tokens: int = TOKENS) -> list[Batch]:
    """Return the pairs in batches of at most so many tokens, on both sides with padding, or of one pair."""
    cut: list[Batch] = []
    for batch in batches:
        rows = max(1, tokens // _width(batch))
        for parts in zip(*(tensor.split(rows) for tensor in batch.values()), strict=True):
            some = [*cut[-1:], dict(zip(batch, parts, strict=True))]
            if len(some) == 2 and _width(*some) * sum(len(each["labels"]) for each in some) <= tokens:
                cut[-1] = join_batches(*some)
            else:
                cut.append(some[-1])
    return cut


def _width(*batches: Batch) -> int:
    """Tokens of a pair, with padding, in batches that are padded to one width."""
    source = "input_ids" if "input_ids" in batches[0] else "attention_mask"  # of sound, the positions of the encoder
    return sum(max(batch[side].shape[1] for batch in batches) for side in (source, "labels"))


def join_batches(*batches: Batch) -> Batch:
    """Batches as one, padded at their ends."""
    joined = {}
    for name in batches[0]:
        tensors = [batch[name] for batch in batches]
        width, padding = max(tensor.shape[1] for tensor in tensors), -100 if name == "labels" else 0
        joined[name] = torch.cat([F.pad(tensor, (0, width - tensor.shape[1]), value=padding) for tensor in tensors])
    return joined
