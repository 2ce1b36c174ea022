"""A model whose configuration names no number of positions."""

from pathlib import Path

import torch
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration


def make_unlimited(folder: Path, tokenizer_of: Path) -> Path:
    """A tiny random T5 with another model's tokenizer, which names no limit either."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of, model_max_length=int(1e30))
    config = T5Config(
        vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
        decoder_start_token_id=tokenizer.pad_token_id, pad_token_id=tokenizer.pad_token_id, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    T5ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
