"""Comparison of a teacher as this package reads it with the class of transformers that its checkpoint is for."""

from __future__ import annotations

import copy
from typing import cast

import torch
from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, PreTrainedModel

from ..loading import load_pretrained, position_limit
from ..speech import reads_sound
from .families import FAMILIES, OwnFamily
from .teacher import Teacher

TEXTS, SOURCE, TARGET = 2, 130, 20  # texts and their tokens; relative positions of T5 differ up to a distance of 128
# Of the largest logit, and so many roundings: sinusoids are computed in float32, also if stored ones were rounded.
TOLERANCE, ROUNDINGS = 1e-3, 8


@torch.no_grad()
def check_outputs(teacher: Teacher) -> None:
    """Raise `ValueError` unless a teacher gives the logits of the class of transformers that it was read from.

    Both compute in float32 on random tokens, a part of which is padding. Tensors that the class would draw at random
    are those of the teacher.
    """
    model, family = teacher.model, FAMILIES[teacher.family]
    if issubclass(family, OwnFamily):
        return
    if teacher.folder is None:
        source = copy.deepcopy(cast(PreTrainedModel, teacher.source)).float().cpu()
    else:
        options = {"dtype": torch.float32, "output_loading_info": True}
        auto = AutoModelForSpeechSeq2Seq if reads_sound(model.config) else AutoModelForSeq2SeqLM
        source, info = load_pretrained(auto, teacher.folder, **options)
        state = model.state_dict()
        substitutes = {key: state[name] for key in info["missing_keys"] if (name := family.own_name(key)) in state}
        source.load_state_dict(substitutes, strict=False)
    inputs = draw_inputs(model, position_limit(source.config) or SOURCE)
    expected, found = (side.eval()(**inputs, use_cache=False).logits for side in (source, model))
    error, largest = (found - expected).abs().max().item(), expected.abs().max().item()
    if not error <= (TOLERANCE + ROUNDINGS * torch.finfo(model.config.dtype).eps) * largest:
        raise ValueError(
            f"{type(source).__name__} of transformers gives other logits for {teacher.folder or teacher.name} than "
            f"the model that was read: they differ by {error:.2g}, and the largest is {largest:.2g}. Please report "
            "the checkpoint's name"
        )


def draw_inputs(model: PreTrainedModel, longest: int) -> dict[str, torch.Tensor]:
    """Return random source tokens (2, 130 or fewer), half of the second text padding, and random target tokens.

    A model for speech gets one random spectrogram.
    """
    config, generator, pad = model.config, torch.Generator().manual_seed(0), model.config.pad_token_id
    if reads_sound(config):
        features = torch.rand(1, config.num_mel_bins, 2 * config.max_source_positions, generator=generator) - 0.5
        length = min(TARGET, config.max_position_embeddings)
        ids = torch.randint(config.decoder_vocab_size, (1, length), generator=generator)
        return {"input_features": features, "decoder_input_ids": ids}
    sizes = {"input_ids": (SOURCE, config.vocab_size), "decoder_input_ids": (TARGET, config.decoder_vocab_size)}
    inputs = {
        name: torch.randint(tokens, (TEXTS, min(length, longest)), generator=generator)
        for name, (length, tokens) in sizes.items()
    }
    if pad is not None:
        inputs = {name: ids.where(ids != pad, pad - 1 if pad else 1) for name, ids in inputs.items()}
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, mask.shape[1] // 2 :] = 0
    inputs["input_ids"].masked_fill_(mask == 0, pad or 0)
    return inputs | {"attention_mask": mask}
