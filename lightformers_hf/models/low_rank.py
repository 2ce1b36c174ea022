"""Matrices stored as the product of two low-rank factors: W ≈ U·V (LightFormer, Eq. 1 and 7; the embedding: Eq. 8).

This module contains linear layers, embeddings and output layers, the choice of the rank of each, and their
initialization. Symbols are the paper's: a weight W is m×n with y = x·W, U is m×r, V is r×n, r is the rank.
"""

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
from torch import nn
from transformers import initialization as init
from transformers.utils import logging

from .configuration_lightformer import FactorizedConfig

logger = logging.get_logger(__name__)

# (name of a linear layer, input width, output width) → the module: dense or low-rank, by the configuration.
Projection = Callable[[str, int, int], nn.Module]


# Initialization ------------------------------------------------------------------------------------------------------
# A module has its initialization as the attribute `initializer`, because transformers passes modules without names.
# Without it a matrix is normal with a variance of 1/d, which gives scaled embeddings the variance of the positions. If
# the configuration has `init_std`, every matrix has that standard deviation instead.

# Queries, keys, values and gates have half the variance of other matrices, as if they were one (fairseq).
JOINT_GAIN = 2**-0.5
JOINT = ("q_proj", "k_proj", "v_proj", "qkv_proj")
# The last matrix of each residual branch: `out_proj`, and the `fc2` that is not inside heads.
BRANCH_ENDS = r"(layers|depths)\..*(out_proj|\d+\.fc2)"


def xavier_std(m: int, n: int, gain: float = 1.0) -> float:
    """Return gain·√(2 / (m + n)), for an m×n matrix (Glorot and Bengio 2010, Eq. 16)."""
    return gain * (2 / (m + n)) ** 0.5


def factor_std(std: float, rank: int) -> float:
    """Return the standard deviation of two factors, m×rank and rank×n, whose product has entries with `std`."""
    return (std**2 / rank) ** 0.25


@torch.no_grad()
def draw_matrix(module: nn.Module, std: float) -> None:
    """Draw the parameters of `module`, without those of its children: normal; biases and the padding row are zero.

    A factor of a low-rank matrix (marked by `product_rank`, the rank) is drawn so that entries of the product have the
    standard deviation `std`. Parameters that were loaded from a checkpoint are not changed.
    """
    rank, padding = getattr(module, "product_rank", None), getattr(module, "padding_idx", None)
    for name, parameter in module.named_parameters(recurse=False):
        if name == "bias":
            init.zeros_(parameter)
            continue
        values = torch.empty_like(parameter).normal_(std=std if rank is None else factor_std(std, rank))
        if name == "weight" and padding is not None:
            values[padding] = 0
        init.copy_(parameter, values)


def set_initializer(layer: nn.Module, initializer: Callable[[nn.Module], None]) -> None:
    """Let `initializer` draw the layer, or each of the two factors of a low-rank layer."""
    for module in layer.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.initializer = initializer


def linear_initializer(config: FactorizedConfig, name: str, m: int, n: int) -> Callable[[nn.Module], None]:
    """Return the initializer of the linear layer `name` (without the head's `model.`), m → n.

    It is Xavier's, with a gain for JOINT. BRANCH_ENDS are divided by √(2L), so that the sum of 2L branches is as large
    as one: a shared layer adds the same vector at each depth, which would grow with L. A decoder with an output layer
    tied to its input must not be divided: it would predict each input token, with a logit of √d, and unlearn that.
    """
    stack, _, path = name.partition(".")
    leaf = path.rpartition(".")[2]
    gain = JOINT_GAIN if leaf in JOINT else 1.0
    if leaf == "q_proj" and not getattr(config, "scale_attention", True):
        gain *= (n // getattr(config, f"{stack}_attention_heads")) ** -0.5  # in place of the division of scores
    if re.fullmatch(BRANCH_ENDS, path) and not (stack == "decoder" and config.output_is_input_table):
        gain = (2 * getattr(config, f"{stack}_layers")) ** -0.5
    return partial(draw_matrix, std=xavier_std(m, n // 3 if leaf == "qkv_proj" else n, gain))


# Ranks by name -------------------------------------------------------------------------------------------------------
def pattern_matches(pattern: str, name: str) -> bool:
    """Return whether `pattern`, a regular expression, matches the end of the module name `name` from a dot on.

    `q_proj` matches every `….q_proj`; `decoder.layers.0.fc1` exactly one; `fc[12]` both linear layers of each FFN.
    """
    return re.fullmatch(rf"(?:.*\.)?(?:{pattern})", name) is not None


def from_pattern(patterns: Mapping[str, int | None], name: str, default: int | None) -> int | None:
    """Return the rank or width of the module `name`: the value of the first pattern that matches, else `default`."""
    return next((value for pattern, value in patterns.items() if pattern_matches(pattern, name)), default)


def warn_about_patterns(model: nn.Module, config: FactorizedConfig) -> None:
    """Log every pattern of `config` that matches no module of `model`, because a misspelled one changes nothing."""
    names = {name for name, _ in model.named_modules()}
    for field in config.patterns:
        for pattern in getattr(config, field):
            if pattern not in names and not any(pattern_matches(pattern, name) for name in names):
                logger.warning(f"{field} has {pattern!r}, which is the end of no module's name: it changes nothing.")


def module_rank(config: FactorizedConfig, name: str, kind: str, m: int, n: int) -> int | None:
    """Return r of the m×n matrix `name` (without the head's `model.`), of kind `attention`, `ffn` or `embedding`.

    `None` means dense. A rank above min(m, n) raises `ValueError`.
    """
    stack = "decoder" if name.startswith("decoder.") else "encoder"
    rank = from_pattern(config.rank_pattern, name, config.rank_of_kind(stack, kind))
    if rank is not None and not 1 <= rank <= min(m, n):
        raise ValueError(
            f"rank of {name} is {rank}; a {m}x{n} matrix allows 1 to {min(m, n)} (rank_pattern can give it its own)"
        )
    return rank


# Linear layers -------------------------------------------------------------------------------------------------------
class LowRankLinear(nn.Module):
    """y = x·U·V + b: `u` is U (m×r, no bias), `v` is V with the bias b (r×n). Shapes: (…, m) → (…, n)."""

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool = True):
        super().__init__()
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        self.u = nn.Linear(in_features, rank, bias=False)
        self.v = nn.Linear(rank, out_features, bias=bias)
        self.u.product_rank = self.v.product_rank = rank

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.v(self.u(hidden_states))

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """U (m×r) and V (r×n)."""
        return self.u.weight.T, self.v.weight.T

    def extra_repr(self) -> str:
        # peft prints this text if `target_modules` names the low-rank layer, which peft cannot adapt.
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}"
        return f"{sizes}; for adapters, target_modules are its layers u and v, as in 'q_proj.u'"


def projections(
    config: FactorizedConfig, prefix: str, kind: str, *, bias: bool = True, unbiased: Collection[str] = ()
) -> Projection:
    """Return a function that builds the linear layers of the module `prefix`, each with the rank of its kind.

    Those named in `unbiased` have no bias. Each layer has its kind as the attribute `kind`, by which the conversion
    finds the layers that may be factorized.
    """

    def project(name: str, in_features: int, out_features: int) -> nn.Module:
        full_name = f"{prefix}.{name}"
        rank, has_bias = module_rank(config, full_name, kind, in_features, out_features), bias and name not in unbiased
        if rank is None:
            layer = nn.Linear(in_features, out_features, bias=has_bias)
        else:
            layer = LowRankLinear(in_features, out_features, rank, bias=has_bias)
        layer.kind = kind
        set_initializer(layer, linear_initializer(config, full_name, in_features, out_features))
        return layer

    return project


class WeightLayer(nn.Module):
    """Weight (n×m) and bias (n) of an `nn.Linear`, whose modules bitsandbytes and peft would replace by their own."""

    product_rank = None  # drawn as the matrix of a linear layer

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        nn.init.normal_(self.weight)

    def factors(self) -> tuple[torch.Tensor]:
        """W (m×n)."""
        return (self.weight.T,)


# Embeddings and output layers ----------------------------------------------------------------------------------------
class LowRankEmbedding(nn.Embedding):
    """E = E_a·E_b (Eq. 8): `weight` is E_a (V×r), one row a token; `basis` is E_b (r×d). Ids (…) → vectors (…, d).

    It is a subclass of `nn.Embedding`: resizing the vocabulary changes E_a alone, and the embedding stays low-rank.
    """

    def __init__(self, num_embeddings: int, d_model: int, rank: int, padding_idx: int | None = None):
        super().__init__(num_embeddings, rank, padding_idx)
        self.product_rank = rank
        self.basis = nn.Parameter(torch.empty(rank, d_model))
        nn.init.normal_(self.basis)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids) @ self.basis

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """E_a (V×r) and E_b (r×d)."""
        return self.weight, self.basis


class LowRankOutput(nn.Module):
    """The output layer of a low-rank embedding: logits = (h·E_bᵀ)·E_aᵀ. Shapes: (…, d) → (…, V).

    `basis` (r×d) and `output.weight` (V×r) are the embedding's own tensors if the two are tied.
    """

    def __init__(self, d_model: int, vocab_size: int, rank: int):
        super().__init__()
        self.basis = nn.Parameter(torch.empty(rank, d_model))
        nn.init.normal_(self.basis)
        self.output = nn.Linear(rank, vocab_size, bias=False)
        self.product_rank = self.output.product_rank = rank

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.output(nn.functional.linear(hidden_states, self.basis))

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """E_a (V×r) and E_b (r×d), as in the embedding: the layer multiplies by their product transposed."""
        return self.output.weight, self.basis


class AdaptiveEmbedding(nn.Module):
    """Adaptive input (Baevski and Auli 2019): the rarer a token, the narrower its vector. Ids (…) → vectors (…, d).

    Ids are in order of falling frequency; `cutoffs` cut them into bands. Band i has vectors of width d/factorⁱ
    (`tables`) and a projection to d without bias (`projections`), the widest band too.
    """

    def __init__(self, vocab_size: int, d_model: int, cutoffs: list[int], factor: int, padding_idx: int | None = None):
        super().__init__()
        self.starts, bands = [0, *cutoffs], adaptive_bands(vocab_size, d_model, cutoffs, factor)
        self.tables, self.projections = nn.ModuleList(), nn.ModuleList()
        for start, (size, width) in zip(self.starts, bands, strict=True):
            has_padding = padding_idx is not None and start <= padding_idx < start + size
            self.tables.append(nn.Embedding(size, width, padding_idx - start if has_padding else None))
            # Projected vectors then have one length, whatever the width.
            set_initializer(self.tables[-1], partial(draw_matrix, std=width**-0.5))
            self.projections.append(nn.Linear(width, d_model, bias=False))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        vectors = None
        # Every token is looked up in every band: no shape depends on the data, so that the model compiles and exports.
        for start, table, projection in zip(self.starts, self.tables, self.projections, strict=True):
            # The first and the last band keep invalid ids as they are, so that the lookup raises an error.
            least = None if start == 0 else 0
            most = None if start == self.starts[-1] else table.num_embeddings - 1
            ids = input_ids - start
            band = projection(table(ids if least is most is None else ids.clamp(least, most)))
            vectors = band if vectors is None else torch.where((input_ids >= start).unsqueeze(-1), band, vectors)
        return vectors


class TransposedLinear(WeightLayer):
    """The weight of an `nn.Linear` used the other way: (…, out_features) → (…, in_features)."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states @ self.weight


class AdaptiveOutput(nn.Module):
    """Adaptive softmax (Grave et al. 2017) in the bands of an `AdaptiveEmbedding`: states (…, d) → log p (…, V).

    The first softmax is over the tokens of band 0 and one class for each other band; the others are over the tokens of
    one band. `tables` and `projections` are the embedding's own tensors if the two are tied, used transposed.
    """

    def __init__(self, vocab_size: int, d_model: int, cutoffs: list[int], factor: int):
        super().__init__()
        self.starts, bands = [0, *cutoffs], adaptive_bands(vocab_size, d_model, cutoffs, factor)
        self.tables = nn.ModuleList(nn.Linear(width, size, bias=False) for size, width in bands)
        self.projections = nn.ModuleList(TransposedLinear(width, d_model, bias=False) for _, width in bands)
        self.classes = nn.Linear(d_model, len(cutoffs), bias=False)

    def log_softmax(self, states: torch.Tensor, band: int) -> torch.Tensor:
        """States (…, d) → log p (…, tokens of the band), in band 0 also of the classes, in fp32 or better."""
        logits = self.tables[band](self.projections[band](states))
        logits = logits if band else torch.cat([logits, self.classes(states)], dim=-1)
        return nn.functional.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        sizes = [self.starts[1]] + [1] * (len(self.starts) - 1)
        tokens, *classes = self.log_softmax(states, 0).split(sizes, dim=-1)
        tails = (class_log_p + self.log_softmax(states, band) for band, class_log_p in enumerate(classes, 1))
        return torch.cat([tokens, *tails], dim=-1).to(states.dtype)

    def loss(self, states: torch.Tensor, labels: torch.Tensor, num_items: int | None = None) -> torch.Tensor:
        """Return the mean cross-entropy in nats of labels (…; −100 is ignored), or its sum over `num_items`.

        Each label is computed in its band only.
        """
        kept = labels != -100
        states, labels = states[kept], labels[kept]
        band_of = torch.bucketize(labels, labels.new_tensor(self.starts[1:]), right=True)
        target = torch.where(band_of == 0, labels, self.starts[1] + band_of - 1)
        loss = nn.functional.nll_loss(self.log_softmax(states, 0), target, reduction="sum")
        for band in range(1, len(self.starts)):
            rows = band_of == band
            log_p = self.log_softmax(states[rows], band)
            loss = loss + nn.functional.nll_loss(log_p, labels[rows] - self.starts[band], reduction="sum")
        return loss / (labels.numel() if num_items is None else num_items)


def adaptive_bands(vocab_size: int, d_model: int, cutoffs: list[int], factor: int) -> list[tuple[int, int]]:
    """Return the number of tokens and the width of every band."""
    edges = zip([0, *cutoffs], [*cutoffs, vocab_size], strict=True)
    return [(end - start, d_model // factor**band) for band, (start, end) in enumerate(edges)]


def make_embedding(config: FactorizedConfig, stack: str) -> nn.Module:
    """Return the embedding of a stack, V×`embedding_width`: dense, low-rank or adaptive, by the configuration."""
    if config.embedding == "adaptive":
        bands = (config.vocab_size, config.d_model, config.adaptive_cutoffs, config.adaptive_factor)
        return AdaptiveEmbedding(*bands, config.pad_token_id)
    name = "shared" if config.share_encoder_decoder_embeddings else f"{stack}.embed_tokens"
    vocab_size = config.decoder_vocab_size if stack == "decoder" else config.vocab_size
    width = config.embedding_width
    rank = module_rank(config, name, "embedding", vocab_size, width)
    if rank is None:
        embedding = nn.Embedding(vocab_size, width, config.pad_token_id)
    else:
        embedding = LowRankEmbedding(vocab_size, width, rank, config.pad_token_id)
    embedding.kind = "embedding"
    return embedding


def make_output(config: FactorizedConfig, name: str) -> nn.Module:
    """Return an output layer without bias, `embedding_width` → V, of the rank of the matrix `name`."""
    width, vocab_size = config.embedding_width, config.decoder_vocab_size
    rank = module_rank(config, name, "embedding", vocab_size, width)
    output = nn.Linear(width, vocab_size, bias=False) if rank is None else LowRankOutput(width, vocab_size, rank)
    output.kind = "embedding"
    return output


def tied_parameters(embedding: nn.Module) -> dict[str, str]:
    """Return {name of a parameter of the embedding: name of the same tensor in its output layer}."""
    if isinstance(embedding, AdaptiveEmbedding):
        return {name: name for name, _ in embedding.named_parameters()}
    if isinstance(embedding, LowRankEmbedding):
        return {"weight": "output.weight", "basis": "basis"}
    return {"weight": "weight"}
