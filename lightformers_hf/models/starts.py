"""How fresh weights start, in all three architectures.

A layer carries its start from where it is built (`module.start`, which draws it), because transformers draws weights
module by module and says no names. Tables, and what has no start of its own, are normal with a variance of 1/d, which
gives scaled embeddings that of the positions. The configuration's `init_std` replaces all of it by one standard
deviation, where a paper prints one.
"""

import re
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from transformers import initialization as init

from .configuration_base import FactorizedConfig
from .transformers_internals import is_loaded

# Queries, keys, values and gates have half the variance of other matrices, as if they were one (fairseq's start).
JOINT_GAIN = 2**-0.5
JOINT = ("q_proj", "k_proj", "v_proj", "qkv_proj")
# What a layer adds to the states comes out of these: `out_proj`, and the `fc2` that is not inside heads.
ENDS = r"(layers|depths)\..*(out_proj|\d+\.fc2)"


def xavier_std(m: int, n: int, gain: float = 1.0) -> float:
    """gain·√(2 / (m + n)), for an m×n matrix (Glorot and Bengio 2010, Eq. 16)."""
    return gain * (2 / (m + n)) ** 0.5


def factor_std(std: float, rank: int) -> float:
    """That of two factors whose product, a sum of `rank` terms in every entry, has the standard deviation `std`."""
    return (std**2 / rank) ** 0.25


@torch.no_grad()
def draw(module: nn.Module, std: float) -> None:
    """Draw what `module` itself holds of a matrix: normal, and biases and the padding token's vector zero.

    A module that holds a factor (marked by `product_rank`, the rank) gets what makes the product's entries have the
    standard deviation `std`; a `product_rank` of 0 marks a factor that starts at zero. What came from a checkpoint
    stays.
    """
    rank = getattr(module, "product_rank", None)
    if rank is not None:
        std = factor_std(std, rank) if rank else 0.0
    for name, tensor in module.named_parameters(recurse=False):
        if name == "bias":
            init.zeros_(tensor)
            continue
        fresh = not is_loaded(tensor)  # `init` leaves a loaded tensor alone, but a row of it does not know
        init.normal_(tensor, std=std)
        if fresh and name == "weight" and getattr(module, "padding_idx", None) is not None:
            init.zeros_(tensor[module.padding_idx])


def set_start(layer: nn.Module, start: Callable[[nn.Module], None]) -> None:
    """Let `start` draw the layer, or the two factors of a low-rank one each by itself."""
    for module in layer.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.start = start


def layer_start(config: FactorizedConfig, name: str, m: int, n: int) -> Callable[[nn.Module], None]:
    """The start of a linear layer, m → n, from its name: Xavier's, JOINT with a gain, ENDS of small stacks divided.

    By √(2L), so that 2L sums (L layers of two) are as large as one. A layer that serves several depths needs it most:
    it adds the same at each of them, so that what all tokens of a sentence have in common grows with L and drowns
    what is a token's own. A decoder whose states go to the output layer of its own token table must not start so: it
    would say each token again, with a logit of √d, and unlearn that first.

    Args:
        config: of the model; has L.
        name: of the layer, without the head's `model.`.
    """
    stack, _, path = name.partition(".")
    leaf = path.rpartition(".")[2]
    gain = JOINT_GAIN if leaf in JOINT else 1.0
    if leaf == "q_proj" and not getattr(config, "scale_attention", True):
        gain *= (n // getattr(config, f"{stack}_attention_heads")) ** -0.5  # what scores are not divided by
    if re.fullmatch(ENDS, path) and not (stack == "decoder" and config.output_is_input_table):
        gain = (2 * getattr(config, f"{stack}_layers")) ** -0.5
    return partial(draw, std=xavier_std(m, n // 3 if leaf == "qkv_proj" else n, gain))


@torch.no_grad()
def draw_parts(module: nn.Linear, m: int, parts: list[int], last_bias: float) -> None:
    """Draw a matrix m×n that holds several of JOINT side by side, each as if it were alone, or one factor of it.

    Args:
        module: the layer, or `u` (without bias) or `v` (with it) of a low-rank one.
        parts: their widths, whose sum is n; 0 where one is not there.
        last_bias: bias of the last part; all others are zero.
    """
    rank, scale = getattr(module, "product_rank", None), 1.0
    if rank is not None:
        left = factor_std(xavier_std(m, sum(parts)), rank)
        if module.bias is None:
            init.normal_(module.weight, std=left)
            return
        scale = rank**-0.5 / left
    if not is_loaded(module.weight):  # a slice of it does not know
        for part in filter(torch.numel, module.weight.split(parts)):
            nn.init.normal_(part, std=scale * xavier_std(m, len(part), JOINT_GAIN))
    init.copy_(module.bias, torch.cat([torch.zeros(sum(parts[:-1])), torch.full((parts[-1],), last_bias)]))


@torch.no_grad()
def draw_identity(layer: nn.Linear, bias: float) -> None:
    """Output = input + `bias`: with a bias of 2 and input of unit variance a ReLU behind it starts (nearly) linear."""
    init.eye_(layer.weight)
    init.constant_(layer.bias, bias)


@torch.no_grad()
def draw_isometry(layer: nn.Linear, input_bias: float) -> None:
    """A semi-orthogonal matrix, whose bias takes back `input_bias`, which every input has."""
    init.orthogonal_(layer.weight)
    init.copy_(layer.bias, -input_bias * layer.weight.sum(1))


@torch.no_grad()
def draw_copies(layer: nn.Linear, bias: float) -> None:
    """Output j = input j modulo their number, + `bias`."""
    init.copy_(layer.weight, torch.eye(layer.in_features)[torch.arange(layer.out_features) % layer.in_features])
    init.constant_(layer.bias, bias)
