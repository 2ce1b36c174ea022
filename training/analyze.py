#!/usr/bin/env python
r"""Take the papers' measures of checkpoints on parallel text: heads, tokens, neurons, MACs, memory, singular values.

    python training/analyze.py opus-mt-de-en light --data test.jsonl --pictures inside

Head diversity, token uniformity and activated neurons are measured layer by layer, while the model reads the two sides
of the text. MACs and memory of the matrices follow from the shapes, the steps to convergence from a
`trainer_state.json` beside the weights. Pictures need `pip install 'lightformers_hf[demo]'`.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from arguments import ScriptParser, positive_number
from common import print_answer, run_script
from datasets import Dataset
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.flop_counter import FlopCounterMode
from tqdm.auto import tqdm
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import lightformers_hf  # noqa: F401  registers the architectures with the Auto classes
from lightformers_hf.conversion.rules import rank_for_energy
from lightformers_hf.decoding import repeated_start
from lightformers_hf.evaluation.evaluate import choose_columns
from lightformers_hf.evaluation.speed import translation_memory
from lightformers_hf.files import atomic_output, read_json
from lightformers_hf.loading import build_network, learned_parameters, load_model, printable_name
from lightformers_hf.matrices import factors_of, matrices_of
from lightformers_hf.text import load_parallel, tokenize_pairs

STACKS = ("encoder", "decoder")
SITES = {"encoder": "encoder", "decoder": "decoder self-attention", "cross": "cross-attention"}
ENERGY = 0.9
TOKENS = 20  # tokens of source and of target: PartialFormer, Table 5
INPUTS = ("input_ids", "attention_mask", "decoder_input_ids", "labels")
BATCH, LONGEST = 16, 512  # texts of a batch; tokens of a text, where the model has no limit
MEMORY_SENTENCES = 10  # that are translated while the peak memory is measured


# --- Measures of tensors and of training logs


def head_diversity(heads: Tensor) -> Tensor:
    """D_output of PartialFormer, Eq. 7 (Li et al. 2018): exp(−1/H² Σᵢ Σⱼ |Oⁱ·Oʲ| / (‖Oⁱ‖ ‖Oʲ‖)).

    Outputs of H heads at a position, (…, H, d_k) → (…). From 1/e, all heads point the same way, to exp(−1/H), they are
    orthogonal. A head that is zero is similar to none. Only heads of one width compare: the narrower, the more similar
    they are by chance (|cos| of random directions is about √(2/(π·d_k))).
    """
    unit = normalize(heads, dim=-1, eps=torch.finfo(heads.dtype).tiny)
    return torch.exp(-(unit @ unit.mT).abs().mean(dim=(-2, -1)))


def token_uniformity(states: Tensor, mask: Tensor) -> Tensor:
    """Mean Pearson correlation of two tokens of a sentence (PartialFormer, Appendix H; lower is better).

    States (B, T, d), mask (B, T), 0 where a token does not count → (B): the mean over all pairs of different tokens,
    from −1 to 1, NaN where a sentence has fewer than two. A state whose entries are all equal correlates with none.
    """
    centred = states - states.mean(dim=-1, keepdim=True)
    unit = normalize(centred, dim=-1, eps=torch.finfo(states.dtype).tiny) * mask.unsqueeze(-1)
    tokens = mask.sum(dim=-1)
    # The square of the sum of unit vectors is the sum over all pairs; those of a token with itself are taken off.
    pairs = unit.sum(dim=1).square().sum(dim=-1) - unit.square().sum(dim=(1, 2))
    return pairs / (tokens * (tokens - 1))


def activated_neurons(inner: Tensor) -> Tensor:
    """n_act (PartialFormer, §6.5; Zhang et al. 2022): how many neurons the activation function leaves above 0.

    Hidden states of a feed-forward network (B, T, width), or (B, T, H, width) of networks inside heads, whose widths
    add up → (B, T).
    """
    return (inner.flatten(2) > 0).sum(dim=-1)


def matrix_spectra(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Name and singular values (descending, float64) of every matrix that is stored, one after another.

    A low-rank matrix has those of its product, as many as its rank; the product itself is never made. A tied or shared
    matrix comes once, position tables do not come.

    Raises:
        ValueError: a matrix holds NaN or infinity.
    """
    for name, module in matrices_of(model):
        if "positions" not in name.rpartition(".")[2]:
            yield name, singular_values(name, *factors_of(module))


@torch.no_grad()
def singular_values(name: str, left: Tensor, right: Tensor | None = None) -> Tensor:
    """Singular values, descending, float64, of a matrix m×n, or of the product of two, m×r and r×n, without making it.

    Raises:
        ValueError: NaN or infinity in a matrix; the message has its `name`.
    """
    factors = [factor.cpu().double() for factor in (left, right) if factor is not None]
    if not all(factor.isfinite().all() for factor in factors):
        raise ValueError(f"{name} holds NaN or infinity: the checkpoint is damaged, or its training diverged")
    if right is None:
        return torch.linalg.svdvals(factors[0])
    # The orthonormal outer factors of the product change no singular value; the inner matrix is r×r.
    first, second = (torch.linalg.qr(factor, mode="r").R for factor in (factors[0], factors[1].T))
    return torch.linalg.svdvals(first @ second.T)


def loss_curve(log_history: Sequence[dict]) -> tuple[str, list[tuple[int, float]]]:
    """Name and (step, value) pairs of the loss in a `trainer_state.json`: `eval_loss`, else `loss` of the training.

    Values that are not finite are omitted.

    Raises:
        ValueError: neither was logged as a number.
    """
    for name in ("eval_loss", "loss"):
        logged = [(entry["step"], entry[name]) for entry in log_history if isinstance(entry.get(name), float | int)]
        if curve := [(step, loss) for step, loss in logged if math.isfinite(loss)]:
            return name, curve
    raise ValueError("the training log has neither eval_loss nor loss: train with --logging-steps or --eval-steps")


def iterations_to_convergence(curve: Sequence[tuple[int, float]], *, tolerance: float = 0.01) -> int | None:
    """The first step whose loss is within `tolerance`, relatively, of the lowest (Subformer, Table 7).

    The paper does not define convergence: here the rest of the training gains less than one percent. `None`
    where that step is the last one, so that the loss may still fall.

    Raises:
        ValueError: an empty curve, or one without a finite value.
    """
    finite = [(step, loss) for step, loss in curve if math.isfinite(loss)]
    if not finite:
        raise ValueError("no finite loss was logged: expected one at least")
    best = min(loss for _, loss in finite)
    step = next(step for step, loss in finite if loss <= best + tolerance * abs(best))
    return step if step < finite[-1][0] else None


# --- Multiply-additions and sizes of matrices, counted on models without storage


class _Parts:
    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class Macs(_Parts):
    """Multiply-additions of the matrix products that translate one sentence; `output` is the layer of the logits."""

    encoder: int
    decoder: int
    output: int


@dataclass(frozen=True)
class Footprint(_Parts):
    """Stored entries of the matrices, each counted once: Subformer, Table 9.

    Attributes:
        embedding: token and position tables, and the layers from them to a stack's first input (SAFE of each stack).
        encoder, decoder: the layers, and projections between layers of different widths.
        output: weights that the output layer does not share with the embedding matrix.
    """

    embedding: int
    encoder: int
    decoder: int
    output: int


def without_storage(config: PreTrainedConfig) -> PreTrainedModel:
    """The sequence-to-sequence model of a configuration on the `meta` device: shapes, no weights, eager attention.

    Raises:
        ValueError: not the configuration of a sequence-to-sequence model.
    """
    with torch.device("meta"):
        return build_network(AutoModelForSeq2SeqLM, config, attn_implementation="eager").eval()


def generation_macs(
    config: PreTrainedConfig, *, source_tokens: int = TOKENS, target_tokens: int = TOKENS, use_cache: bool = False
) -> Macs:
    """Multiply-additions to generate `target_tokens` greedily from `source_tokens` (PartialFormer, §5.1).

    The printed figures ("20 source and target tokens", Tables 5 and 10) fit a decoder without a cache. For its k-th
    token it computes all k positions again, their logits too, and the keys and values of the source. That is what is
    counted here; with `use_cache` those of `generate()`. All matrix products count, those of attention among
    them; sums, norms and activations do not. Printed rows are met within 1.5 %, but PartialFormer with head scaling
    (Table 5, #4) comes to 7.2 billion, 5 % above what is printed.

    Raises:
        ValueError: not the configuration of a sequence-to-sequence model, or fewer than one token of either.
    """
    if source_tokens < 1 or target_tokens < 1:
        raise ValueError(f"{source_tokens} source and {target_tokens} target tokens: expected 1 or more of each")
    model = without_storage(config)
    steps, cache, more = [], None, target_tokens - 1
    with torch.device("meta"), torch.inference_mode():
        with FlopCounterMode(display=False) as counter:
            states = model.get_encoder()(torch.zeros(1, source_tokens, dtype=torch.long))
        encoder = counter.get_total_flops() // 2  # a multiply-addition is two operations
        for length in (1, 2, 3, 4):
            ids = torch.zeros(1, 1 if use_cache else length, dtype=torch.long)
            with FlopCounterMode(display=False) as counter:
                found = model(
                    encoder_outputs=states, decoder_input_ids=ids, past_key_values=cache, use_cache=use_cache
                )
            cache = found.past_key_values
            output = sum(counter.get_flop_counts()[f"{type(model).__name__}.lm_head"].values()) // 2
            steps.append((counter.get_total_flops() // 2 - output, output))
    # The operations of all steps follow from those of four, of which the first may fill a cache: a polynomial.
    decoder, output = (
        first + more * a + comb(more, 2) * (b - a) + comb(more, 3) * (c - 2 * b + a)
        for first, a, b, c in zip(*steps, strict=True)
    )
    return Macs(encoder, decoder, output)


def memory_footprint(model: PreTrainedModel) -> Footprint:
    """How many entries the matrices of an encoder-decoder have, part by part (Subformer, Appendix A, Table 9).

    As in the table, vectors (biases, LayerNorms) do not count. Its last term has 4·d_s·d_m for the way up to the
    sandwich and down again; the architecture has two matrices d_m×d_s, which are counted here.
    """
    parts = dict.fromkeys(("embedding", "encoder", "decoder", "output"), 0)
    for name, parameter in learned_parameters(model):
        stack, _, rest = name.removeprefix("model.").partition(".")
        is_embedding = stack == "shared" or rest.startswith(("embed_", "safe."))
        part = "output" if stack == "lm_head" else "embedding" if is_embedding else stack
        parts[part] += parameter.numel() if parameter.dim() > 1 else 0
    return Footprint(**parts)


# --- Behaviour of a model on text


@dataclass(frozen=True)
class Activation:
    """The feed-forward networks of one depth, a mean over tokens (PartialFormer, §6.5).

    Attributes:
        activated: n_act, neurons above 0.
        neurons: hidden width; of PartialFormer the sum over its heads, and over self- and cross-attention.
        parameters: those of the networks (W₁, b₁, W₂, b₂ of Eq. 4), without gates of heads.
    """

    activated: float
    neurons: int
    parameters: int

    @property
    def ratio(self) -> float:
        """R_act: the share of the neurons that is activated."""
        return self.activated / self.neurons

    @property
    def efficiency(self) -> float:
        """η_ffn: activated neurons a parameter."""
        return self.activated / self.parameters


@dataclass(frozen=True)
class Behaviour:
    """Behaviour of a model on text: a value for every depth, beginning with the input.

    Attributes:
        head_diversity: `encoder`, `decoder` (self-attention) and `cross` → means over tokens.
        token_uniformity: `encoder`, `decoder` → of each layer's outputs, means over sentences of two tokens or more.
        ffn: `encoder`, `decoder` → of each layer; none where no layer has a feed-forward network.
    """

    head_diversity: dict[str, list[float]]
    token_uniformity: dict[str, list[float]]
    ffn: dict[str, list[Activation]]


@torch.inference_mode()
def behaviour(model: PreTrainedModel, batches: Iterable[dict[str, Tensor]], *, progress: bool = False) -> Behaviour:
    """Run an encoder-decoder over text (the decoder sees the references) and measure heads, tokens and neurons.

    Nothing but sums outlives a layer, so that memory is that of one batch. Padding does not count. The self-attention
    below a Subformer's first layer (SAFE) and its network belong to no depth, and are not measured.

    Args:
        model: LightFormer, Subformer, PartialFormer, or one of transformers' that is built like Marian and BART.
        batches: each with `input_ids`, `attention_mask` (B, S), `decoder_input_ids` and `labels` (B, T; −100 pads).

    Raises:
        ValueError: no batches, or an architecture whose parts have other names.
    """
    meter = _Meter(model)
    training = model.training
    with ExitStack() as stack:
        stack.callback(model.train, training)
        for handle in meter.handles:
            stack.callback(handle.remove)
        model.eval()
        for batch in tqdm(batches, desc="looking inside", disable=not progress, unit="batch", leave=False):
            batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
            meter.start({"encoder": batch["attention_mask"] != 0, "decoder": batch.pop("labels") != -100})
            # Without the head, because logits are the largest tensor and are not needed.
            model.base_model(**batch, use_cache=False)
    return meter.result()


class _Meter:
    """Sums over the inputs of hooks. The order of the calls distinguishes the depths of a shared layer."""

    def __init__(self, model: PreTrainedModel):
        self.sums: dict[tuple, float] = defaultdict(float)
        self.networks: dict[tuple[str, int], set[nn.Module]] = defaultdict(set)
        self.tokens, self.sentences = dict.fromkeys(STACKS, 0), dict.fromkeys(STACKS, 0)
        self.kept: dict[str, Tensor] = {}
        self.depth: dict[str, int] = {}
        self.handles = []
        for stack in STACKS:
            root = getattr(model, f"get_{stack}")()
            layers = getattr(root, "layers", None)
            attentions = {
                name: module
                for name, module in root.named_modules()
                if hasattr(module, "out_proj") and (hasattr(module, "head_dim") or hasattr(module, "heads"))
            }
            if layers is None or not attentions:
                raise ValueError(
                    f"{type(model).__name__} can't be analyzed: expected a LightFormer, Subformer, PartialFormer, or "
                    "a model built like Marian and BART (layers, attention with out_proj)"
                )
            for layer in layers:
                self.handles.append(layer.register_forward_pre_hook(partial(self._enter, stack)))
                self.handles.append(layer.register_forward_hook(partial(self._leave, stack)))
            for name, module in attentions.items():
                site = "cross" if "encoder_attn" in name else stack
                see = partial(self._see_heads, stack, site, module)
                self.handles.append(module.out_proj.register_forward_pre_hook(see))
            for module in root.modules():
                if hasattr(module, "fc1") and hasattr(module, "fc2"):
                    gate = getattr(module, "fc_gate", None)
                    see = partial(self._see_network, stack, {module.fc1, module.fc2, gate} - {None})
                    # In a gated network the gate has the activation function, which does not change the sign.
                    hook = module.fc2.register_forward_pre_hook if gate is None else gate.register_forward_hook
                    self.handles.append(hook(see))

    def start(self, kept: dict[str, Tensor]) -> None:
        """A batch begins; `kept` (B, T) of each stack masks the tokens that count."""
        self.kept, self.depth = kept, dict.fromkeys(STACKS, -1)
        for stack, mask in kept.items():
            self.tokens[stack] += int(mask.sum())
            self.sentences[stack] += int((mask.sum(dim=1) > 1).sum())

    def _enter(self, stack: str, *_: Any) -> None:
        self.depth[stack] += 1

    def _leave(self, stack: str, _layer: nn.Module, _arguments: tuple, output: Tensor | tuple) -> None:
        states = output if isinstance(output, Tensor) else output[0]
        uniformity = token_uniformity(states.float(), self.kept[stack])
        self.sums["uniformity", stack, self.depth[stack]] += uniformity.nan_to_num().sum().item()

    def _see_heads(self, stack: str, site: str, attention: nn.Module, _: nn.Module, inputs: tuple[Tensor]) -> None:
        if self.depth[stack] >= 0:
            sizes = (attention.heads, -1) if hasattr(attention, "heads") else (-1, attention.head_dim)
            diversity = head_diversity(inputs[0].float().unflatten(-1, sizes))[self.kept[stack]]
            self.sums["diversity", site, self.depth[stack]] += diversity.sum().item()

    def _see_network(self, stack: str, parts: set[nn.Module], _: nn.Module, inputs: tuple, *output: Tensor) -> None:
        inner, kept, depth = (*output, *inputs)[0], self.kept[stack], self.depth[stack]
        if depth >= 0:
            self.sums["activated", stack, depth] += activated_neurons(inner)[kept].sum().item()
            self.sums["neurons", stack, depth] += inner[0, 0].numel() * int(kept.sum())
            self.networks[stack, depth] |= parts

    def result(self) -> Behaviour:
        """The means over all batches."""
        if not min(self.tokens.values()):
            raise ValueError("there is no token to analyze: expected at least one pair of texts")

        def means(measure: str, site: str, count: int) -> list[float]:
            depths = sorted(key[2] for key in self.sums if key[:2] == (measure, site))
            return [self.sums[measure, site, depth] / max(count, 1) for depth in depths]

        def networks(stack: str) -> list[Activation]:
            activated, neurons = (means(measure, stack, self.tokens[stack]) for measure in ("activated", "neurons"))
            layers = [self.networks[key] for key in sorted(self.networks) if key[0] == stack]
            sizes = [sum(weight.numel() for part in parts for weight in part.parameters()) for parts in layers]
            return [Activation(*layer) for layer in zip(activated, map(round, neurons), sizes, strict=True)]

        tokens = self.tokens | {"cross": self.tokens["decoder"]}
        return Behaviour(
            head_diversity={site: means("diversity", site, tokens[site]) for site in SITES},
            token_uniformity={stack: means("uniformity", stack, self.sentences[stack]) for stack in STACKS},
            ffn={stack: networks(stack) for stack in STACKS},
        )


# --- All measures of checkpoints


@dataclass(frozen=True)
class Analysis(Behaviour):
    """All measures of one checkpoint; loss and step are `None` where it has no `trainer_state.json`, and the step also
    where the loss had not converged.
    """

    name: str
    label: str  # in tables and pictures
    macs: Macs
    macs_cached: Macs
    footprint: Footprint
    memory_bytes: int  # peak of a process that loads the checkpoint and translates
    libraries_bytes: int  # the part of it that was there before the checkpoint was loaded
    spectra: dict[str, list[float]]  # singular values of every matrix
    loss_name: str | None = None
    loss_curve: list[tuple[int, float]] = field(default_factory=list)
    convergence_step: int | None = None

    @property
    def own_memory_bytes(self) -> int:
        """Peak memory without that of the libraries."""
        return self.memory_bytes - self.libraries_bytes

    @staticmethod
    def kind_of(matrix: str) -> str:
        """`embedding`, `attention` or `feed-forward`, from a matrix's name."""
        if re.search(r"fc\d|fc_gate|\.up\.|\.down\.", matrix):
            return "feed-forward"
        return "attention" if "attn" in matrix or "attention" in matrix else "embedding"

    def energy_rank(self, kind: str) -> float:
        """Singular values that hold 90 % of a matrix's energy, the mean over the matrices of a kind."""
        spectra = [values for name, values in self.spectra.items() if self.kind_of(name) == kind]
        return fmean(rank_for_energy(torch.tensor(values), ENERGY) for values in spectra) if spectra else 0.0

    def to_dict(self) -> dict:
        """Everything as nested dictionaries and lists of numbers, for JSON."""
        ffn = {
            stack: [asdict(layer) | {"ratio": layer.ratio, "efficiency": layer.efficiency} for layer in layers]
            for stack, layers in self.ffn.items()
        }
        return asdict(self) | {"ffn": ffn}


def analyze(
    names: Sequence[str],
    data: str,
    *,
    source: str | None = None,
    target: str | None = None,
    split: str = "test",
    max_samples: int | None = None,
    device: str = "cpu",
    progress: bool = False,
) -> list[Analysis]:
    """Take every measure of the papers of checkpoints, one after another.

    Args:
        names: folders or Hub names of sequence-to-sequence checkpoints. The loss is that of a `trainer_state.json` in
            a folder, where there is one.
        data, split, max_samples: as for `load_parallel`.
        source, target: as `source_lang` and `target_lang` of `evaluate`.
        device: where a model runs over the text; the peak memory is that of translating on the CPU.

    Raises:
        FileNotFoundError, ValueError: a checkpoint or data is missing or does not fit; the message has the remedy.
    """
    short = [printable_name(name) for name in names]
    labels = short if len(set(short)) == len(short) else names
    languages: dict[str, Any] = {"source": source, "target": target}
    analyses = []
    with tqdm(total=3 * len(names), disable=not progress, unit="step") as bar:
        for name, label in zip(names, labels, strict=True):
            bar.set_description(f"{label}: reading text")
            model, tokenizer = load_model(name, device=device, **languages)
            columns = choose_columns(name, model, tokenizer, **languages)
            pairs = load_parallel(data, source=columns[0], target=columns[1], split=split, max_samples=max_samples)
            found = behaviour(model, list(text_batches(model, tokenizer, pairs)), progress=progress)
            bar.update()
            bar.set_description(f"{label}: measuring memory in a process of its own")
            memory, libraries = translation_memory(name, pairs[:MEMORY_SENTENCES]["source"])
            bar.update()
            bar.set_description(f"{label}: singular values")
            analysis = Analysis(
                **vars(found),
                **_training(Path(name)),
                name=printable_name(name),
                label=label,
                macs=generation_macs(model.config),
                macs_cached=generation_macs(model.config, use_cache=True),
                footprint=memory_footprint(model),
                memory_bytes=memory,
                libraries_bytes=libraries,
                spectra={matrix: values.tolist() for matrix, values in matrix_spectra(model)},
            )
            bar.update()
            analyses.append(analysis)
    return analyses


def text_batches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: Dataset
) -> Iterator[dict[str, Tensor]]:
    """Padded batches of the columns `source` and `target`, with the inputs of the decoder."""
    limit = min(getattr(model.config, "max_position_embeddings", None) or LONGEST, tokenizer.model_max_length)
    first = repeated_start(model, tokenizer)
    tokens = tokenize_pairs(pairs, tokenizer, max_source_length=limit, max_target_length=limit, start=first)
    tokens = tokens.remove_columns(["source_length", "target_length"])
    collate = DataCollatorForSeq2Seq(tokenizer, model=model)
    for batch in (tokens[start : start + BATCH] for start in range(0, len(tokens), BATCH)):
        rows = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
        yield {name: value for name, value in collate(rows).items() if name in INPUTS}


def _training(folder: Path) -> dict:
    history = read_json(folder / "trainer_state.json").get("log_history", [])
    try:
        name, curve = loss_curve(history)
    except ValueError:  # it was shorter than its logging_steps, or had no loss that is a number
        return {}
    return {"loss_name": name, "loss_curve": curve, "convergence_step": iterations_to_convergence(curve)}


def analysis_table(analyses: list[Analysis]) -> Table:
    """A rich table: one row a measure, one column a model; means over layers where a measure has one for each."""
    table = Table(caption="heads, tokens and neurons: means over the layers")
    table.add_column("", no_wrap=True)
    for analysis in analyses:
        table.add_column(escape(analysis.label), justify="right", overflow="fold")

    def row(label: str, values: list[float | None], form: str = "{:.3f}") -> None:
        if any(value is not None for value in values):
            table.add_row(label, *("" if value is None else form.format(value) for value in values))

    def mean(values: list[float]) -> float | None:
        return fmean(values) if values else None

    for site, words in SITES.items():
        row(f"head diversity, {words}", [mean(analysis.head_diversity[site]) for analysis in analyses])
    for stack in STACKS:
        row(f"token uniformity, {stack}", [mean(analysis.token_uniformity[stack]) for analysis in analyses])
    for stack in STACKS:
        for label, measure, scale, form in (
            (f"activated neurons, {stack}", "activated", 1, "{:,.0f}"),
            ("  of", "neurons", 1, "{:,.0f}"),
            ("  share", "ratio", 1, "{:.1%}"),
            ("  a thousand parameters", "efficiency", 1000, "{:.3g}"),
        ):
            layers = [[getattr(layer, measure) * scale for layer in analysis.ffn[stack]] for analysis in analyses]
            row(label, [mean(values) for values in layers], form)
    table.add_section()
    row(f"million MACs, {TOKENS}/{TOKENS} tokens", [analysis.macs.total / 1e6 for analysis in analyses], "{:,.0f}")
    row("  with a cache", [analysis.macs_cached.total / 1e6 for analysis in analyses], "{:,.0f}")
    for part in ("embedding", "encoder", "decoder", "output"):
        row(f"matrices, {part}, MB", [getattr(analysis.footprint, part) * 4 / 1e6 for analysis in analyses], "{:,.1f}")
    row("peak memory beyond libraries, MB", [analysis.own_memory_bytes / 1e6 for analysis in analyses], "{:,.1f}")
    for kind in ("embedding", "attention", "feed-forward"):
        row(f"rank of 90 % energy, {kind}", [analysis.energy_rank(kind) for analysis in analyses], "{:.0f}")
    if any(analysis.loss_curve for analysis in analyses):
        steps = [
            "not converged" if analysis.convergence_step is None else f"{analysis.convergence_step:,}"
            for analysis in analyses
        ]
        shown = [step if analysis.loss_curve else "" for analysis, step in zip(analyses, steps, strict=True)]
        table.add_row("steps to convergence", *shown)
    return table


def main() -> None:
    """Print the table, and write JSON and pictures."""
    parser = ScriptParser(__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folders or Hub names, shown side by side")
    parser.add_argument("--data", required=True, help="parallel text: a file, or a Hub name")
    parser.add_argument("--pictures", metavar="FOLDER", help="picture of every measure, for light and for dark pages")
    parser.add_argument("--overwrite", action="store_true", help="replace that folder, if this script wrote all of it")
    parser.add_argument("--source-lang", metavar="de", help="column of the source; multilingual models: de=de_DE")
    parser.add_argument("--target-lang", metavar="en", help="the same for the target")
    parser.add_argument("--split", default="test", help="split of a data set on the Hub (test)")
    parser.add_argument("--max-samples", type=positive_number, metavar="N", help="use only the first N pairs")
    parser.add_argument("--device", default="cpu", help="where to compute: cpu, cuda, … (cpu)")
    parser.add_argument("--json", metavar="FILE", help="write the measures as JSON; -: to stdout, and nothing else")
    args = parser.parse_args()
    if args.pictures and find_spec("matplotlib") is None:
        raise ValueError("--pictures needs matplotlib: pip install 'lightformers_hf[demo]'")
    inputs, settings = [*args.models, args.data], {"overwrite": args.overwrite}
    languages = {"source": args.source_lang, "target": args.target_lang}
    options = {"split": args.split, "max_samples": args.max_samples, "device": args.device}
    with atomic_output(args.pictures, inputs=inputs, **settings) if args.pictures else nullcontext() as folder:
        analyses = analyze(args.models, args.data, **languages, **options, progress=True)
        if folder:
            from analysis_pictures import draw_analyses  # needs matplotlib

            draw_analyses(analyses, folder)
    print_answer([analysis_table(analyses)], [analysis.to_dict() for analysis in analyses], args.json)


if __name__ == "__main__":
    run_script(main)
