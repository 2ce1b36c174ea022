"""Matrices stored as the product of two thin ones: W ≈ U·V (LightFormer, Eq. 1 and 7; the embedding: Eq. 8).

Symbols are the paper's: a weight W is m×n with y = x·W, U is m×r, V is r×n, r is the rank.
"""

import re
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn
from transformers.utils import logging

from .configuration_base import FactorizedConfig
from .starts import layer_start, set_start

logger = logging.get_logger(__name__)

# (name of a linear layer, input width, output width) → the module: dense or low-rank, the configuration decides.
Projection = Callable[[str, int, int], nn.Module]


def pattern_matches(pattern: str, name: str) -> bool:
    """Whether `pattern`, a regular expression, matches the end of the module name `name` from a dot on.

    `q_proj` matches every `….q_proj`; `decoder.layers.0.fc1` exactly one; `fc[12]` both linear layers of each FFN.
    """
    return re.fullmatch(rf"(?:.*\.)?(?:{pattern})", name) is not None


def from_pattern(patterns: Mapping[str, int | None], name: str, default: int | None) -> int | None:
    """What `patterns` say of the module `name`, a rank or a width: the first that matches decides, else `default`."""
    for pattern, value in patterns.items():
        if pattern_matches(pattern, name):
            return value
    return default


def warn_of_patterns(model: nn.Module, config: FactorizedConfig) -> None:
    """Log every pattern of `config` that is of no module of `model`, as a misspelt one is: it changes nothing."""
    names = {name for name, _ in model.named_modules()}
    for field in config.patterns:
        for pattern in getattr(config, field):
            if pattern not in names and not any(pattern_matches(pattern, name) for name in names):
                logger.warning(f"{field} has {pattern!r}, which is the end of no module's name: it changes nothing.")


def _check_rank(rank: int, m: int, n: int, name: str) -> None:
    if not 1 <= rank <= min(m, n):
        raise ValueError(
            f"rank of {name} is {rank}; a {m}x{n} matrix allows 1 to {min(m, n)} (rank_pattern can give it its own)"
        )


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

    @property
    def bias(self) -> torch.Tensor | None:
        """b (n)."""
        return self.v.bias

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """U (m×r) and V (r×n)."""
        return self.u.weight.T, self.v.weight.T

    @staticmethod
    def state_of(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """State dict of the layer that has these factors and this bias."""
        state = {"u.weight": left.T, "v.weight": right.T}
        return state if bias is None else {**state, "v.bias": bias}

    def extra_repr(self) -> str:
        # peft prints this text where `target_modules` names the pair, which it cannot adapt.
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}"
        return f"{sizes}; for adapters, target_modules are its layers u and v, as in 'q_proj.u'"


def make_linear(in_features: int, out_features: int, rank: int | None, *, name: str, bias: bool = True) -> nn.Module:
    """A dense layer where `rank` is `None`, else a `LowRankLinear`. A rank above min(m, n) raises `ValueError`."""
    if rank is None:
        return nn.Linear(in_features, out_features, bias=bias)
    _check_rank(rank, in_features, out_features, name)
    return LowRankLinear(in_features, out_features, rank, bias=bias)


class WeightLayer(nn.Module):
    """Weight (n×m) and bias (n) of an `nn.Linear`, in a layer that computes something else with them.

    Not a subclass of `nn.Linear`: libraries put layers of their own in the place of every such module (bitsandbytes,
    peft).
    """

    product_rank = None  # a matrix that is drawn as that of a linear layer

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        nn.init.normal_(self.weight)

    def factors(self) -> tuple[torch.Tensor]:
        """W (m×n)."""
        return (self.weight.T,)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def module_rank(config: FactorizedConfig, name: str, kind: str) -> int | None:
    """r of the module `name` (without the head's `model.`), whose kind is `attention`, `ffn` or `embedding`."""
    stack = "decoder" if name.startswith("decoder.") else "encoder"
    return from_pattern(config.rank_pattern, name, config.rank_of_kind(stack, kind))


def projections(config: FactorizedConfig, prefix: str, kind: str, *, bias: bool = True) -> Projection:
    """What builds the linear layers of the module `prefix`, each of the rank that `config` gives to its kind.

    A layer carries its kind as the attribute `kind`: what may be factorized is known from the model itself.
    """

    def project(name: str, in_features: int, out_features: int) -> nn.Module:
        full_name = f"{prefix}.{name}"
        rank = module_rank(config, full_name, kind)
        layer = make_linear(in_features, out_features, rank, name=full_name, bias=bias)
        layer.kind = kind
        set_start(layer, layer_start(config, full_name, in_features, out_features))
        return layer

    return project


class LowRankEmbedding(nn.Embedding):
    """E = E_a·E_b (Eq. 8): `weight` is E_a (V×r), one row a token; `basis` is E_b (r×d). Ids (…) → vectors (…, d).

    A subclass of `nn.Embedding`, so that resizing the vocabulary changes E_a alone and the table stays low-rank.
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

    @staticmethod
    def state_of(left: torch.Tensor, right: torch.Tensor, bias: None) -> dict[str, torch.Tensor]:
        """State dict of the table that has these factors; a table has no bias."""
        return {"weight": left, "basis": right}


class LowRankOutput(nn.Module):
    """The output layer of a low-rank embedding: logits = (h·E_bᵀ)·E_aᵀ. Shapes: (…, d) → (…, V).

    `basis` (r×d) and `output.weight` (V×r) are the embedding's own tensors where the two are tied.
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
        """E_a (V×r) and E_b (r×d), as the table has them: the layer multiplies by their product transposed."""
        return self.output.weight, self.basis

    @staticmethod
    def state_of(left: torch.Tensor, right: torch.Tensor, bias: None) -> dict[str, torch.Tensor]:
        """State dict of the layer that has these factors; an output layer has no bias."""
        return {"output.weight": left, "basis": right}


def make_embedding(
    vocab_size: int, width: int, rank: int | None, *, name: str, padding_idx: int | None
) -> nn.Embedding:
    """Token table, V×width: dense where `rank` is `None`. A rank above min(V, width) raises `ValueError`."""
    if rank is None:
        table = nn.Embedding(vocab_size, width, padding_idx)
    else:
        _check_rank(rank, vocab_size, width, name)
        table = LowRankEmbedding(vocab_size, width, rank, padding_idx)
    table.kind = "embedding"
    return table


def make_output(width: int, vocab_size: int, rank: int | None, *, name: str) -> nn.Module:
    """Output layer without bias, width → V, in the form that its embedding has."""
    if rank is None:
        output = nn.Linear(width, vocab_size, bias=False)
    else:
        _check_rank(rank, width, vocab_size, name)
        output = LowRankOutput(width, vocab_size, rank)
    output.kind = "embedding"
    return output


def table_parameters(module: nn.Module) -> dict[str, str]:
    """Names of an embedding's parameters → names of the same tensors in its output layer."""
    if isinstance(module, LowRankEmbedding):
        return {"weight": "output.weight", "basis": "basis"}
    return {"weight": "weight"}


def factors_of(module: nn.Module) -> tuple[torch.Tensor, ...]:
    """The matrices whose product is the module's weight, in order: one where it is dense, two where it is low-rank.

    The weight is as the paper writes it: m×n of a linear layer, V×d of a token table and of the output layer above
    it (whose `kind` is `embedding`). Every low-rank class says its `factors()`.
    """
    if hasattr(module, "factors"):
        return module.factors()
    is_table = isinstance(module, nn.Embedding) or getattr(module, "kind", None) == "embedding"
    return (module.weight if is_table else module.weight.T,)


def product_of(
    module: nn.Module, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """The whole weight of a module (m×n, or V×d), multiplied out in fp32 or better.

    Args:
        dtype: precision of the product and of the result; by default the result has the module's own.
        device: where it is multiplied, unless where the module is: not every device knows float64.
    """
    first, *others = (factor.to(device or factor.device) for factor in factors_of(module))
    precision = dtype or torch.promote_types(first.dtype, torch.float32)
    if not others:
        return first if dtype is None else first.to(dtype)
    product = torch.linalg.multi_dot([factor.to(precision) for factor in (first, *others)])
    return product if dtype else product.to(first.dtype)


def matrices_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of every matrix that is stored: linear layers, tables, output layers, dense or low-rank.

    A shared or tied matrix comes once, the factors of a low-rank one not by themselves.
    """
    seen: set[int] = set()
    for name, module in model.named_modules():
        if not (isinstance(module, nn.Linear | nn.Embedding) or hasattr(module, "factors")):
            continue
        own = {id(parameter) for parameter in module.parameters() if parameter.dim() > 1}
        if not own <= seen:
            seen |= own
            yield name, module


def bias_of(module: nn.Module) -> torch.Tensor | None:
    """The bias (n) of a linear layer; `None` where there is none, as in every table."""
    return getattr(module, "bias", None)


def rank_of(module: nn.Module) -> int | None:
    """r of a low-rank module; `None` means dense."""
    left, *others = factors_of(module)
    return left.shape[1] if others else None


def low_rank_state(
    module: nn.Module, left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """State dict of the low-rank module that takes the place of `module`, or that `module` is.

    Args:
        module: a linear layer, a token table or an output layer, dense or low-rank.
        left, right: factors, m×r and r×n (V×r and r×d), as `factors_of` gives them.
        bias: n, of a linear layer.

    Raises:
        ValueError: a bias for a table or an output layer, which have none.
    """
    low_rank_class = type(module)
    if not hasattr(module, "factors"):
        is_output = getattr(module, "kind", None) == "embedding"
        low_rank_class = LowRankOutput if is_output else LowRankLinear
        low_rank_class = LowRankEmbedding if isinstance(module, nn.Embedding) else low_rank_class
    if bias is not None and low_rank_class is not LowRankLinear:
        raise ValueError(f"a bias of {len(bias)} numbers is given for a {low_rank_class.__name__}, which has none")
    return low_rank_class.state_of(left, right, bias)
