"""Position embeddings: sinusoidal ones hold no parameters, learned ones are a table."""

import math

import torch
from torch import nn
from transformers import initialization as init
from transformers.utils import is_torchdynamo_compiling


def position_ids_from(attention_mask: torch.Tensor | None, length: int, past_length, device) -> torch.Tensor:
    """Positions of the last `length` tokens, counted over the tokens that `attention_mask` keeps.

    With a 2-D mask, shape (B, past + length), a sentence gets the same positions however it is padded; without one
    they are past, past + 1, …. Shape: (B, length) or (1, length).
    """
    if attention_mask is not None and attention_mask.dim() == 2:
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
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
        """The table, (num_positions + offset)×d, in the precision each family computes its own."""
        d, rows = self.d_model, self.num_positions + self.offset
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
        """Fill the table again, where the module was built without storage."""
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


def make_positions(config) -> nn.Module:
    """The position module that `position_embedding_type` and `position_offset` of `config` describe."""
    size, d, offset = config.max_position_embeddings, config.d_model, config.position_offset
    if config.position_embedding_type == "learned":
        return LearnedPositions(size, d, offset)
    spacing = "half" if config.position_embedding_type == "sinusoidal_half" else "d"
    return SinusoidalPositions(size, d, spacing, offset)


def check_length(positions: nn.Module, length) -> None:
    """Raise `ValueError` where an input is longer than the position table (an index error would not say why)."""
    if not is_torchdynamo_compiling() and isinstance(length, int) and length > positions.num_positions:
        raise ValueError(
            f"an input of {length} tokens is longer than the model's {positions.num_positions} positions "
            "(max_position_embeddings): truncate it, e.g. tokenizer(..., truncation=True)"
        )
