"""Tiny teachers of every source family, with weights like trained ones, saved as their users save them."""

from pathlib import Path

import torch
from models.cases import like_trained
from tiny import marian_tokens, sizes
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
)

COMMON = sizes(16, layers=4, heads=4, ffn=40, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=24)
COMMON |= {"vocab_size": 60, "max_position_embeddings": 40, "dropout": 0.0, "pad_token_id": 1}
COMMON |= dict.fromkeys(("eos_token_id", "decoder_start_token_id", "forced_eos_token_id"), 2)
MARIAN = {**COMMON, **marian_tokens(60), "activation_function": "swish", "scale_embedding": True}
TEACHERS = {
    "marian": (MarianMTModel, MarianConfig(**MARIAN)),
    "marian_two_vocabularies": (
        MarianMTModel,
        MarianConfig(
            **{
                **MARIAN,
                "decoder_vocab_size": 50,
                "pad_token_id": 49,
                "decoder_start_token_id": 49,
                "share_encoder_decoder_embeddings": False,
                "activation_function": "relu",
            }
        ),
    ),
    "marian_untied": (
        MarianMTModel,
        MarianConfig(**{**MARIAN, "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}),
    ),
    "bart": (BartForConditionalGeneration, BartConfig(**COMMON)),
    "mbart": (MBartForConditionalGeneration, MBartConfig(**COMMON, scale_embedding=True)),
    "pegasus": (PegasusForConditionalGeneration, PegasusConfig(**{**COMMON, "pad_token_id": 0})),
    "m2m_100": (M2M100ForConditionalGeneration, M2M100Config(**COMMON)),
}


def make_teacher(name: str, folder: Path) -> torch.nn.Module:
    """Build the teacher `name`, save it in `folder`, and return it ready for inference."""
    model_class, config = TEACHERS[name]
    torch.manual_seed(0)
    model = like_trained(model_class(config))
    with torch.no_grad():  # the row that decoding starts from, as trained checkpoints of Marian have it
        model.get_decoder().get_input_embeddings().weight[config.pad_token_id] = 0
    model.generation_config.update(num_beams=2, max_length=20)
    model.save_pretrained(folder)
    return model


def batch(teacher: torch.nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    """Right-padded sources and decoder inputs that every vocabulary holds."""
    config = teacher.config
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 48, (3, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    ids[1, 5:] = config.pad_token_id
    decoder_ids = torch.randint(3, 48, (3, 7), generator=generator)
    decoder_ids[:, 0] = config.decoder_start_token_id
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": decoder_ids}
