"""Configuration of a LightFormer for speech: Whisper's encoder-decoder (Radford et al. 2022)."""

from typing import Any

from huggingface_hub.dataclasses import strict

from .configuration_lightformer import LightFormerConfig, check_at_least


@strict
class LightFormerSpeechConfig(LightFormerConfig):
    r"""Fields of a LightFormer whose encoder reads a log-mel spectrogram. Names and defaults are Whisper's.

    Args:
        num_mel_bins: bands of the spectrogram, the channels of the first convolution.
        max_source_positions: S, positions of the encoder. Inputs have 2·S frames (30 seconds), always.
        max_target_positions: another name of `max_position_embeddings`, the longest transcript in tokens.
        median_filter_width: width of the filter of cross-attention, for time stamps of words.
    """

    model_type = "lightformer_speech"
    auto_classes = {  # noqa: RUF012
        "AutoConfig": "configuration_lightformer_speech.LightFormerSpeechConfig",
        "AutoModel": "modeling_lightformer_speech.LightFormerSpeechModel",
        "AutoModelForSpeechSeq2Seq": "modeling_lightformer_speech.LightFormerForSpeechSeq2Seq",
    }
    attribute_map = {  # noqa: RUF012
        **LightFormerConfig.attribute_map,
        "max_target_positions": "max_position_embeddings",
    }

    vocab_size: int = 51865
    num_mel_bins: int = 80
    max_source_positions: int = 1500
    max_position_embeddings: int | None = 448
    median_filter_width: int = 7
    d_model: int = 384
    dropout: float | int = 0.0
    scale_embedding: bool = False
    activation_function: str = "gelu"
    share_encoder_decoder_embeddings: bool = False
    key_bias: bool = False
    position_embedding_type: str = "learned"
    normalize_before: bool = True
    final_layer_norm: bool = True
    pad_token_id: int | None = 50256
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256
    decoder_start_token_id: int | None = 50257

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        # Of the object, not of the class: `generate` and the pipeline of speech recognition compare it with this text
        # to accept prompts, long sound and time stamps. `to_dict` stores that of the class.
        self.model_type = "whisper"

    def check(self) -> None:
        super().check()
        check_at_least("num_mel_bins", self.num_mel_bins, 1)
        check_at_least("max_source_positions", self.max_source_positions, 1)
        if self.median_filter_width < 1 or self.median_filter_width % 2 == 0:
            raise ValueError(f"median_filter_width is {self.median_filter_width}; it is odd, and at least 1")
        if not self.is_encoder_decoder or self.share_encoder_decoder_embeddings:
            raise ValueError(
                "a model for speech has an encoder without tokens: set is_encoder_decoder=True and "
                "share_encoder_decoder_embeddings=False"
            )

    @property
    def has_two_vocabularies(self) -> bool:
        """Whether encoder and decoder have separate embeddings. Here the encoder has none."""
        return False
