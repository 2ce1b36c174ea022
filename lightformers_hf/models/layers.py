"""Dropout and norms, positions, attention, and one Transformer layer (Vaswani et al. 2017).

The matrices of a layer are dense or low-rank, and several depths may share a layer.

Shapes: B batch, T queries, S keys, d model width, H heads, d_k width of a head.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_torchdynamo_compiling

from .configuration_lightformer import RELATIVE_POSITIONS, FactorizedConfig
from .low_rank import Projection


# Dropout and norms ---------------------------------------------------------------------------------------------------
def apply_dropout(states: torch.Tensor, share: float, training: bool) -> torch.Tensor:
    """Set a share of `states` to zero in training, and divide the rest by 1 − `share`.

    PyTorch on a CPU draws a number for each element in one thread, which takes up to a fifth of a training step. Here
    four elements share the 64 bits of one number, and `share` is rounded to a multiple of 2⁻¹⁶.
    """
    if not (training and share):
        return states
    cut = round(share * 2**16)
    if states.device.type != "cpu" or cut >= 2**16 or torch.compiler.is_compiling():
        return nn.functional.dropout(states, p=share)
    numbers = torch.empty(math.ceil(states.numel() / 4), dtype=torch.int64).random_(-(2**63), None)
    kept = numbers.view(torch.int16)[: states.numel()].view(states.shape) >= cut - 2**15
    return states * kept.to(states.dtype).mul_(2**16 / (2**16 - cut))


class RMSNorm(nn.RMSNorm):
    """x / √(mean of x² + ε) · w (Zhang and Sennrich 2019), without mean and bias. (…, d) → (…, d).

    The result has the type of the weight, because the states of fp16 models may be in fp32.
    """

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(states.dtype)
        return nn.functional.rms_norm(states, self.normalized_shape, weight, self.eps).to(self.weight.dtype)


# Positions -----------------------------------------------------------------------------------------------------------
def find_position_ids(
    attention_mask: torch.Tensor | None, length: int, past_length: int | torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Return the positions of the last `length` tokens, (B, T) or (1, T), counted over the tokens in `attention_mask`.

    A sentence has the same positions however it is padded. The mask is 2-D, (B, past + T), or causal and 4-D,
    (B, 1, T, cache), as `generate` makes it for a static cache. Without a mask positions are past, past + 1, ….
    """
    if attention_mask is None:
        return (torch.arange(length, device=device) + past_length).unsqueeze(0)
    if attention_mask.dim() == 2:
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    seen = attention_mask == 0 if attention_mask.is_floating_point() else attention_mask.bool()
    return (seen[:, 0].sum(-1) - 1).clamp(min=0)


class SinusoidalPositions(nn.Module):
    """Fixed sines in the first half of the d dimensions, cosines in the second. Position ids (B, T) → (B, T, d).

    Wavelengths are 2π·10000^(2i/d) (Vaswani et al. 2017; Marian, Pegasus), with `spacing="half"` 2π·10000^(i/(d/2−1))
    (tensor2tensor; M2M100, NLLB). `offset` is added to every position id.
    """

    def __init__(self, num_positions: int, d_model: int, spacing: str = "d", offset: int = 0):
        super().__init__()
        self.num_positions, self.d_model, self.spacing, self.offset = num_positions, d_model, spacing, offset
        self.register_buffer("table", self.compute_table(), persistent=False)

    def compute_table(self) -> torch.Tensor:
        """Return the table, (num_positions + offset)×d, in the precision of each model family; on `meta` empty."""
        d, rows = self.d_model, self.num_positions + self.offset
        if torch.get_default_device().type == "meta":
            return torch.empty(rows, d)
        if self.spacing == "half":
            frequency = torch.arange(d // 2, dtype=torch.int64).float()
            frequency = torch.exp(frequency * -(math.log(10000) / max(d // 2 - 1, 1)))
            angle = torch.arange(rows, dtype=torch.int64).float().unsqueeze(1) * frequency
            table = torch.cat([angle.sin(), angle.cos(), torch.zeros(rows, d % 2)], dim=1)
        else:
            position, dimension = torch.arange(rows, dtype=torch.float64), torch.arange(d, dtype=torch.float64)
            wavelength = torch.pow(torch.tensor(10000.0, dtype=torch.float64), 2 * (dimension // 2) / d)
            angle = position.unsqueeze(1) / wavelength
            table = torch.cat([angle[:, 0::2].sin(), angle[:, 1::2].cos()], dim=1)
        return table.to(torch.get_default_dtype())

    def reset(self) -> None:
        """Fill the table again, after the module was built on `meta` and has been given memory."""
        init.copy_(self.table, self.compute_table())

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        return self.table[position_ids + self.offset]


class LearnedPositions(nn.Embedding):
    """A trained table; `offset` rows come before position 0 (2 in BART). Position ids (B, T) → (B, T, d)."""

    def __init__(self, num_positions: int, d_model: int, offset: int = 0):
        super().__init__(num_positions + offset, d_model)
        self.num_positions, self.offset = num_positions, offset

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(position_ids + self.offset)


def make_positions(config: FactorizedConfig) -> nn.Module | None:
    """Return the positions that `config` describes; `None` for relative positions, which belong to attention."""
    kind, size, d = config.position_embedding_type, config.max_position_embeddings, config.d_model
    if kind in RELATIVE_POSITIONS:
        return None
    if kind == "learned":
        return LearnedPositions(size, d, config.position_offset)
    return SinusoidalPositions(size, d, "half" if kind == "sinusoidal_half" else "d", config.position_offset)


def check_length(positions: nn.Module, length: int | torch.Tensor, position_ids: torch.Tensor | None = None) -> None:
    """Raise `ValueError` if an input is longer than the positions; the lookup's error would not give the reason."""
    if is_torchdynamo_compiling() or not isinstance(length, int) or length <= positions.num_positions:
        return
    if position_ids is not None:  # which may start again at 0
        length = int(position_ids.max()) + 1
    if length > positions.num_positions:
        raise ValueError(
            f"an input of {length} tokens is longer than the model's {positions.num_positions} positions "
            "(max_position_embeddings): truncate it, e.g. tokenizer(..., truncation=True)"
        )


def find_distances(states: torch.Tensor, mask: torch.Tensor | None, past_key_values: Cache | None) -> torch.Tensor:
    """Return the position of every key minus that of every query (T, S), before the cache takes the new keys.

    The queries are `states` (B, T, d). The keys are those of the mask (…, S), otherwise those of the cache.
    """
    length, past, device = states.shape[1], 0, states.device
    keys: int | torch.Tensor = length
    if past_key_values is not None:
        past, keys = past_key_values.get_seq_length(), past_key_values.get_mask_sizes(length, 0)[0]
    keys = keys if mask is None else mask.shape[-1]
    return torch.arange(keys, device=device) - (torch.arange(length, device=device) + past).unsqueeze(-1)


class RelativePositions(nn.Embedding):
    """Relative positions of T5 (Raffel et al. 2020, §2.1): a trained bias for every bucket of distances and head.

    `weight` is buckets×H. Each of the nearest distances has a bucket; farther distances share buckets, whose width
    grows with the distance, and from `furthest` on one. An encoder uses half of its buckets for keys after the query.
    """

    def __init__(self, num_buckets: int, num_heads: int, furthest: int, *, is_causal: bool):
        super().__init__(num_buckets, num_heads)
        self.furthest, self.is_causal = furthest, is_causal

    def find_buckets(self, distances: torch.Tensor) -> torch.Tensor:
        """Return the bucket of each distance; the same shape."""
        if self.is_causal:
            buckets, start, far = self.num_embeddings, 0, (-distances).clamp(min=0)
        else:
            buckets = self.num_embeddings // 2
            start, far = (distances > 0).long() * buckets, distances.abs()
        exact = buckets // 2
        # The result at the boundaries depends on fp32 and on the order of operations. The logarithm of 0 is not used.
        wide = torch.log(far.float() / exact) / math.log(self.furthest / exact) * (buckets - exact)
        wide = (exact + wide.clamp(min=0).long()).clamp(max=buckets - 1)
        return start + torch.where(far < exact, far, wide)

    def forward(self, distances: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return what is added to scores: the biases, and for hidden keys a large negative number.

        Shapes: distances (T, S) → (B or 1, H, T, S). `mask` as of `add_mask`. Without a mask a decoder hides the keys
        after the query.
        """
        biases = super().forward(self.find_buckets(distances)).permute(2, 0, 1).unsqueeze(0)
        if mask is None and self.is_causal:
            mask = distances <= 0
        return add_mask(biases, mask)


# Attention -----------------------------------------------------------------------------------------------------------
def add_mask(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return scores (…, T, S) with a mask (B, 1, T, S): a summand, or true (or 1) if a key is seen."""
    if mask is None or mask.is_floating_point():
        return scores if mask is None else scores + mask
    # Infinity would give NaN in a row of padding, which sees nothing. In fp16 half of it leaves space for scores.
    lowest = torch.finfo(scores.dtype).min / (2 if scores.dtype == torch.float16 else 1)
    return torch.where(mask.bool(), scores, lowest)


def attention_weights(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """softmax(scores + mask), computed in fp32 or better, because the sum of exponentials overflows in fp16."""
    masked = add_mask(scores, mask)
    precision = torch.promote_types(masked.dtype, torch.float32)
    return nn.functional.softmax(masked, dim=-1, dtype=precision).to(scores.dtype)


def eager_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float, dropout: float = 0.0, **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """softmax(q·kᵀ·scaling + mask)·v. Shapes: (B, H, T, d_k), (B, H, S, d_k) → (B, T, H, d_k), (B, H, T, S)."""
    weights = attention_weights(torch.matmul(query, key.transpose(2, 3)) * scaling, attention_mask)
    weights = apply_dropout(weights, dropout, module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def find_attention(config: FactorizedConfig) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """Return the attention that a model was loaded with: `eager_attention`, or a function of transformers."""
    # The name of the attention is private in transformers, but every model of transformers reads it here.
    return ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager_attention)


def cached_states(
    past_key_values: Cache | None,
    layer_idx: int | None,
    is_cross_attention: bool,
    compute: Callable[[], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all keys and values (B, H, S, w) of the cache slot `layer_idx`, with those that `compute` returns.

    Keys and values of cross-attention are computed once a sentence. Without a cache, return the result of `compute`.
    """
    if past_key_values is None:
        return compute()
    if not isinstance(past_key_values, EncoderDecoderCache):
        return past_key_values.update(*compute(), layer_idx)
    if not is_cross_attention:
        return past_key_values.self_attention_cache.update(*compute(), layer_idx)
    if past_key_values.is_updated.get(layer_idx):
        slot = past_key_values.cross_attention_cache.layers[layer_idx]
        return slot.keys, slot.values
    past_key_values.is_updated[layer_idx] = True
    return past_key_values.cross_attention_cache.update(*compute(), layer_idx)


class Attention(nn.Module):
    """Base class of every attention: transformers records the weights of its instances (`output_attentions`)."""


class MultiHeadAttention(Attention):
    """Attention with H heads of width d_k (Eq. 9), whose projections d → H·d_k, and back, come from `project`.

    The cache slot (`layer_idx`, the depth) is an argument of the call, because a layer that is applied at several
    depths has one slot for each of them.

    Args:
        width, num_heads, head_dim: d, H and d_k; `None` means d/H.
        is_causal: whether a position sees only those before it. SDPA reads it if there is no mask.
        joint_qkv: one projection d → 3·H·d_k in place of three (self-attention only; LightFormer Table 1).
        output_projection: whether `out_proj` mixes the outputs of the heads.
        scale: whether scores are divided by √d_k.
    """

    def __init__(
        self,
        config: FactorizedConfig,
        width: int,
        num_heads: int,
        project: Projection,
        *,
        is_causal: bool,
        head_dim: int | None = None,
        joint_qkv: bool = False,
        output_projection: bool = True,
        scale: bool = True,
    ):
        super().__init__()
        self.config = config
        self.head_dim = head_dim or width // num_heads
        self.scaling = self.head_dim**-0.5 if scale else 1.0
        self.dropout = config.attention_dropout
        self.is_causal, self.joint_qkv = is_causal, joint_qkv
        inner = num_heads * self.head_dim
        if joint_qkv:
            self.qkv_proj = project("qkv_proj", width, 3 * inner)
        else:
            self.q_proj = project("q_proj", width, inner)
            self.k_proj = project("k_proj", width, inner)
            self.v_proj = project("v_proj", width, inner)
        self.out_proj = project("out_proj", inner, width) if output_projection else nn.Identity()

    def forward(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        layer_idx: int | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B, T, d) → (B, T, d) and, from eager attention, the weights (B, H, T, S).

        With `key_value_states` (B, S, d) this is cross-attention.
        """
        batch, length, _ = hidden_states.shape
        is_cross_attention = key_value_states is not None
        source = key_value_states if is_cross_attention else hidden_states
        joint = self.qkv_proj(hidden_states).chunk(3, dim=-1) if self.joint_qkv else None
        query = joint[0] if joint else self.q_proj(hidden_states)

        def compute() -> tuple[torch.Tensor, torch.Tensor]:
            shape = (batch, source.shape[1], -1, self.head_dim)
            key, value = joint[1:] if joint else (self.k_proj(source), self.v_proj(source))
            return key.view(shape).transpose(1, 2), value.view(shape).transpose(1, 2)

        query = query.view(batch, length, -1, self.head_dim).transpose(1, 2)
        key, value = cached_states(past_key_values, layer_idx, is_cross_attention, compute)
        attend = find_attention(self.config)
        share = self.dropout if self.training else 0.0
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=share, scaling=self.scaling, **kwargs
        )
        return self.out_proj(output.reshape(batch, length, -1)), weights


# One layer -----------------------------------------------------------------------------------------------------------
def add_layer_norms(
    module: nn.Module, width: int, has_cross_attention: bool, norm: Callable[[int], nn.Module] = nn.LayerNorm
) -> None:
    """Give `module` the norms of a layer of that width."""
    module.self_attn_layer_norm = norm(width)
    if has_cross_attention:
        module.encoder_attn_layer_norm = norm(width)
    module.final_layer_norm = norm(width)


def add_feed_forward(module: nn.Module, width: int, ffn_dim: int, project: Projection, *, gated: bool = False) -> None:
    """Give `module` the linear layers of a feed-forward network (Eq. 10), and of its gate if `gated`."""
    if gated:
        module.fc_gate = project("fc_gate", width, ffn_dim)
    module.fc1 = project("fc1", width, ffn_dim)
    module.fc2 = project("fc2", ffn_dim, width)


def cast_for(layer: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """Return fp16 `states` in fp32 if `layer` is kept in fp32 beside a model in fp16, as T5's is; else unchanged.

    A quantized layer, whose weight has another type or is no parameter, takes the states unchanged.
    """
    if states.dtype != torch.float16 or torch.is_autocast_enabled(states.device.type):
        return states
    weight = getattr(getattr(layer, "u", layer), "weight", None)
    return states.float() if isinstance(weight, nn.Parameter) and weight.dtype == torch.float32 else states


class Depth(nn.Module):
    """Modules of one depth of a shared layer that are not shared: LayerNorms, and maybe the feed-forward network."""

    def to(self, *args: Any, **kwargs: Any) -> "Depth":
        """Return the module unchanged: accelerate moves arguments of a layer, but here each module has its hook."""
        return self


class TransformerLayer(GradientCheckpointingLayer):
    """One layer of either stack: self-attention, cross-attention in a decoder, feed-forward network.

    LayerNorms and feed-forward network are attributes of the layer (`add_layer_norms`, `add_feed_forward`). If they
    are private to a depth, they come with each call in a `Depth`.
    """

    def __init__(
        self,
        config: FactorizedConfig,
        self_attn: nn.Module,
        encoder_attn: nn.Module | None = None,
        *,
        normalize_before: bool,
    ):
        super().__init__()
        self.self_attn = self_attn
        if encoder_attn is not None:
            self.encoder_attn = encoder_attn
        self.normalize_before = normalize_before
        self.dropout, self.activation_dropout = config.dropout, config.activation_dropout
        self.activation = ACT2FN[config.activation_function]
        self.gated_ffn = getattr(config, "gated_ffn", False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        private: Depth | None = None,
        layer_idx: int | None = None,
        cross_layer_idx: int | None = None,
        distances: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """(B, T, d) → (B, T, d). For the cache slots see `LayerStack.by_depth`.

        With `distances` (T, S) the layer adds the biases of its `relative_positions` to the mask.
        """
        if distances is not None:
            attention_mask = self.relative_positions(distances, attention_mask)
        norms = self if private is None else private
        states = self.attend(
            hidden_states, norms.self_attn_layer_norm, self.self_attn,
            attention_mask=attention_mask, layer_idx=layer_idx, **kwargs,
        )  # fmt: skip
        if encoder_hidden_states is not None:
            states = self.attend(
                states, norms.encoder_attn_layer_norm, self.encoder_attn, key_value_states=encoder_hidden_states,
                attention_mask=encoder_attention_mask, layer_idx=cross_layer_idx, **kwargs,
            )  # fmt: skip
        return self.feed_forward(states, norms.final_layer_norm, norms if hasattr(norms, "fc1") else self)

    def attend(self, states: torch.Tensor, norm: nn.Module, attention: nn.Module, **kwargs: Any) -> torch.Tensor:
        """Attention with its norm and residual connection: (B, T, d) → (B, T, d)."""
        output = attention(norm(states) if self.normalize_before else states, **kwargs)[0]
        return self.add(states, output, norm)

    def feed_forward(self, states: torch.Tensor, norm: nn.Module, network: nn.Module) -> torch.Tensor:
        """The feed-forward network of `network`, with norm and residual connection: (B, T, d) → (B, T, d)."""
        inputs = norm(states) if self.normalize_before else states
        if self.gated_ffn:
            inner = self.activation(network.fc_gate(inputs)) * network.fc1(inputs)
        else:
            inner = self.activation(network.fc1(inputs))
        inner = apply_dropout(inner, self.activation_dropout, self.training)
        return self.add(states, network.fc2(cast_for(network.fc2, inner)), norm)

    def add(self, states: torch.Tensor, output: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        """The residual connection: states + dropout(output), and the norm after it unless it comes before."""
        states = states + apply_dropout(output, self.dropout, self.training)
        if states.dtype == torch.float16:  # infinity would be NaN after the next norm
            limit = torch.finfo(torch.float16).max - 1000
            states = states.clamp(-limit, limit)
        return states if self.normalize_before else norm(states)
