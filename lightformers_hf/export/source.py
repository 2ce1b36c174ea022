"""The source of an export: a complete checkpoint, with its tokenizer and options of the generation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import transformers
from transformers import PreTrainedTokenizerBase

from ..conversion.teacher import Teacher
from ..models.modeling_lightformer import LightFormerForConditionalGeneration


@dataclass(frozen=True)
class Source:
    """A checkpoint to export.

    Attributes:
        name: its name as the user gave it.
        folder: where it lies.
        model: the LightFormer with the outputs of the checkpoint, fp32, in evaluation mode.
        tokenizer: the checkpoint's, or `None` where it has none.
        generation: how it generates.
    """

    name: str
    folder: Path
    model: LightFormerForConditionalGeneration
    tokenizer: PreTrainedTokenizerBase | None
    generation: transformers.GenerationConfig


def read_source(
    folder: Path, name: str, engine: str, languages: tuple[str | None, str | None] = (None, None)
) -> Source:
    """Read a LightFormer, or a dense checkpoint of a family that this package converts, as the equal LightFormer.

    Args:
        languages: languages of a multilingual one, if they must be set (`set_language_codes`).

    Raises:
        FileNotFoundError, ValueError: as `convert`; also an architecture or a head that no engine gets.
    """
    teacher = Teacher(folder, name, languages)
    if teacher.model_class is not LightFormerForConditionalGeneration:
        raise ValueError(
            f"{name} holds a {teacher.model_class.__name__}, which {engine} does not support: exported models "
            "are LightFormers for translation or summarization, and the dense models that become one (Marian, BART, "
            "mBART, Pegasus, M2M100, T5, mT5, UMT5). Run it in transformers, or convert its dense teacher and export "
            "that."
        )
    return Source(
        name,
        folder,
        teacher.load().eval().requires_grad_(False),
        teacher.tokenizer() if teacher.has_tokenizer else None,
        teacher.generation_config(),
    )
