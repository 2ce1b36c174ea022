"""Whisper (Radford et al. 2022), and its fine-tuned and distilled checkpoints."""

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from ...models.configuration_lightformer_speech import LightFormerSpeechConfig
from . import SHARED_FIELDS, Family, OwnFamily, register_family

SPEECH_FIELDS = ("num_mel_bins", "max_source_positions", "max_target_positions", "median_filter_width")
SPEECH_CLASS = "LightFormerForSpeechSeq2Seq"


@register_family("whisper")
class Whisper(Family):
    """Pre-norm, convolutions in front of the encoder, learned positions, no bias of keys."""

    architectures: ClassVar[tuple[str, ...]] = ("WhisperForConditionalGeneration",)
    model_class = SPEECH_CLASS

    @classmethod
    def own_config(cls, config: PreTrainedConfig) -> LightFormerSpeechConfig:
        names = {*SHARED_FIELDS, *SPEECH_FIELDS} - {"share_encoder_decoder_embeddings", "decoder_vocab_size"}
        fields = {name: getattr(config, name) for name in names if hasattr(config, name)}
        return LightFormerSpeechConfig(**fields, dtype=config.dtype)

    @classmethod
    def fit_weights(cls, config: Any, tensors: Any, where: Any) -> Any:
        """`own_config`: the encoder has no embedding."""
        return config

    @classmethod
    def own_name(cls, name: str) -> str | None:
        own = super().own_name(name)
        return "lm_head.weight" if own == "proj_out.weight" else own


@register_family("lightformer_speech")
class LightFormerSpeech(OwnFamily):
    """LightFormers for speech, of any rank."""

    architectures = (SPEECH_CLASS,)
