"""Positions (sinusoidal ones hold no parameters, learned ones are a table), and adaptive input and softmax."""

import math

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.utils import is_torchdynamo_compiling

from .configuration_lightformer import RELATIVE_POSITIONS
from .matrices import WeightLayer
from .transformers_internals import is_loaded


def position_ids_from(
    attention_mask: torch.Tensor | None, length: int, past_length: int | torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Positions of the last `length` tokens, counted over the tokens that `attention_mask` keeps.

    With a 2-D mask, shape (B, past + length), a sentence gets the same positions however it is padded, and with a
    causal 4-D one (B, 1, length, cache), which `generate` makes for a static cache. Without a mask they are past,
    past + 1, ….
    Shape: (B, length) or (1, length).
    """
    if attention_mask is not None and attention_mask.dim() == 2:
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    if attention_mask is not None and attention_mask.dim() == 4:
        seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        return (seen[:, 0].sum(-1) - 1).clamp(min=0)
    return (torch.arange(length, device=device) + past_length).unsqueeze(0)


class SinusoidalPositions(nn.Module):
    """Fixed sines in the first half of the d dimensions, cosines in the second. Position ids (B, T) → (B, T, d).

    Args:
        num_positions: length of the table; longer inputs raise `ValueError`.
        d_model: d.
        spacing: `d` gives wavelengths 2π·10000^(2i/d) (Vaswani et al. 2017; Marian, Pegasus), `half` gives
            2π·10000^(i/(d/2−1)) (tensor2tensor; M2M100, NLLB).
        offset: added to every position id.
    """

    def __init__(self, num_positions: int, d_model: int, spacing: str = "d", offset: int = 0):
        super().__init__()
        self.num_positions, self.d_model, self.spacing, self.offset = num_positions, d_model, spacing, offset
        self.register_buffer("table", self.compute_table(), persistent=False)

    def compute_table(self) -> torch.Tensor:
        """The table, (num_positions + offset)×d, in the precision each family computes its own; on `meta` empty."""
        d, rows = self.d_model, self.num_positions + self.offset
        if torch.get_default_device().type == "meta":  # where sines take as long, and are nothing
            return torch.empty(rows, d)
        if self.spacing == "half":
            half = d // 2
            step = math.log(10000) / max(half - 1, 1)
            frequency = torch.exp(torch.arange(half, dtype=torch.int64).float() * -step)
            angle = torch.arange(rows, dtype=torch.int64).float().unsqueeze(1) * frequency
            table = torch.cat([angle.sin(), angle.cos(), torch.zeros(rows, d % 2)], dim=1)
        else:
            position = torch.arange(rows, dtype=torch.float64).unsqueeze(1)
            dimension = torch.arange(d, dtype=torch.float64)
            angle = position / torch.pow(torch.tensor(10000.0, dtype=torch.float64), 2 * (dimension // 2) / d)
            table = torch.cat([angle[:, 0::2].sin(), angle[:, 1::2].cos()], dim=1)
        return table.to(torch.get_default_dtype())

    def reset(self) -> None:
        """Fill the table again, where the module was built without storage and has been given some."""
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


def make_positions(config: PreTrainedConfig) -> nn.Module | None:
    """The position module that `position_embedding_type` and `position_offset` of `config` describe.

    `None` for relative positions, which belong to attention.
    """
    if config.position_embedding_type in RELATIVE_POSITIONS:
        return None
    size, d, offset = config.max_position_embeddings, config.d_model, config.position_offset
    if config.position_embedding_type == "learned":
        return LearnedPositions(size, d, offset)
    spacing = "half" if config.position_embedding_type == "sinusoidal_half" else "d"
    return SinusoidalPositions(size, d, spacing, offset)


def check_length(positions: nn.Module, length: int | torch.Tensor, position_ids: torch.Tensor | None = None) -> None:
    """Raise `ValueError` where an input is longer than the position table (an index error would not say why).

    Positions that are given may start again at 0: they are looked at where the input is long enough to go beyond.
    """
    if is_torchdynamo_compiling() or not isinstance(length, int) or length <= positions.num_positions:
        return
    if position_ids is not None:
        length = int(position_ids.max()) + 1
    if length > positions.num_positions:
        raise ValueError(
            f"an input of {length} tokens is longer than the model's {positions.num_positions} positions "
            "(max_position_embeddings): truncate it, e.g. tokenizer(..., truncation=True)"
        )


def _band_sizes(vocab_size: int, cutoffs: list[int]) -> list[int]:
    return [end - start for start, end in zip([0, *cutoffs], [*cutoffs, vocab_size], strict=True)]


class AdaptiveTable(nn.Embedding):
    """Table of one band. It draws itself: transformers passes over modules without parameters of their own."""

    @torch.no_grad()
    def reset(self) -> None:
        """Draw the vectors with a variance of 1/width: whatever the width, projected ones are as long."""
        fresh = not is_loaded(self.weight)
        init.normal_(self.weight, std=self.embedding_dim**-0.5)
        if fresh and self.padding_idx is not None:
            init.zeros_(self.weight[self.padding_idx])


class AdaptiveEmbedding(nn.Module):
    """Adaptive input (Baevski and Auli 2019): the rarer a token, the narrower its vector. Ids (…) → vectors (…, d).

    Ids are in order of falling frequency; `cutoffs` cut them into bands. Band i has vectors of width d/factorⁱ
    (`tables`) and a projection to d without bias (`projections`), the widest band too.
    """

    def __init__(self, vocab_size: int, d_model: int, cutoffs: list[int], factor: int, padding_idx: int | None = None):
        super().__init__()
        self.starts = [0, *cutoffs]
        sizes = _band_sizes(vocab_size, cutoffs)
        widths = [d_model // factor**band for band in range(len(sizes))]
        self.tables = nn.ModuleList(
            AdaptiveTable(size, width, self._local(padding_idx, band, size))
            for band, (size, width) in enumerate(zip(sizes, widths, strict=True))
        )
        self.projections = nn.ModuleList(nn.Linear(width, d_model, bias=False) for width in widths)

    def _local(self, token: int | None, band: int, size: int) -> int | None:
        local = None if token is None else token - self.starts[band]
        return local if local is not None and 0 <= local < size else None

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        vectors = None
        # Every band for every token, and then a choice: no shape depends on the data, so that it compiles and exports.
        for start, table, projection in zip(self.starts, self.tables, self.projections, strict=True):
            # The outermost bands leave ids that there are not as they are: then the table says so.
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
    one band. `tables` and `projections` are the embedding's own tensors where the two are tied, used transposed.
    """

    def __init__(self, vocab_size: int, d_model: int, cutoffs: list[int], factor: int):
        super().__init__()
        self.starts = [0, *cutoffs]
        sizes = _band_sizes(vocab_size, cutoffs)
        widths = [d_model // factor**band for band in range(len(sizes))]
        self.tables = nn.ModuleList(
            nn.Linear(width, size, bias=False) for width, size in zip(widths, sizes, strict=True)
        )
        self.projections = nn.ModuleList(TransposedLinear(width, d_model, bias=False) for width in widths)
        self.classes = nn.Linear(d_model, len(cutoffs), bias=False)

    def _band(self, states: torch.Tensor, band: int) -> torch.Tensor:
        return self.tables[band](self.projections[band](states))

    def _first(self, states: torch.Tensor) -> torch.Tensor:
        return _log_softmax(torch.cat([self._band(states, 0), self.classes(states)], dim=-1))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        first = self._first(states)
        tokens, *classes = first.split([self.starts[1]] + [1] * (len(self.starts) - 1), dim=-1)
        tails = (
            class_log_p + _log_softmax(self._band(states, band)) for band, class_log_p in enumerate(classes, start=1)
        )
        return torch.cat([tokens, *tails], dim=-1).to(states.dtype)

    def loss(self, states: torch.Tensor, labels: torch.Tensor, num_items: int | None = None) -> torch.Tensor:
        """Cross-entropy in nats of labels (…; −100 is ignored), each in its own band only: no V-wide tensor is made.

        The mean over the labels, or their sum over `num_items` where that is given.
        """
        kept = labels != -100
        states, labels = states[kept], labels[kept]
        band_of = torch.bucketize(labels, labels.new_tensor(self.starts[1:]), right=True)
        target = torch.where(band_of == 0, labels, self.starts[1] + band_of - 1)
        loss = nn.functional.nll_loss(self._first(states), target, reduction="sum")
        for band in range(1, len(self.starts)):
            rows = band_of == band
            log_p = _log_softmax(self._band(states[rows], band))
            loss = loss + nn.functional.nll_loss(log_p, labels[rows] - self.starts[band], reduction="sum")
        return loss / (labels.numel() if num_items is None else num_items)


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return nn.functional.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def adaptive_ties(embedding_name: str, bands: int) -> dict[str, str]:
    """{tied parameter: stored parameter} of an `AdaptiveOutput` named `lm_head` and its embedding."""
    return {
        f"lm_head.{part}.{band}.weight": f"{embedding_name}.{part}.{band}.weight"
        for part in ("tables", "projections")
        for band in range(bands)
    }
