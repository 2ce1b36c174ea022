"""LightFormer for speech: the encoder reads a log-mel spectrogram through two convolutions (Whisper).

Names of modules are those of Whisper. Symbols: B batch, M bands, S positions of the encoder, 2·S frames.
"""

import math
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from .configuration_lightformer_speech import LightFormerSpeechConfig
from .heads import ConditionalGenerationHead, EncoderDecoder
from .layers import apply_dropout
from .low_rank import draw_matrix
from .modeling_lightformer import LightFormerDecoder, LightFormerEncoder, LightFormerPreTrainedModel


class SoundPositions(nn.Embedding):
    """A fixed table of sines and cosines, whose wavelengths rise from 2π to 20000π positions."""

    offset = 0  # as of `LearnedPositions`

    def reset(self) -> None:
        """Fill the table."""
        length, width = self.weight.shape
        frequencies = torch.exp(-math.log(10000) / (width // 2 - 1) * torch.arange(width // 2))
        angles = torch.arange(length).unsqueeze(1) * frequencies
        init.copy_(self.weight, torch.cat([angles.sin(), angles.cos()], dim=1))


class LightFormerSpeechPreTrainedModel(LightFormerPreTrainedModel):
    """Initialization, loading and saving of a LightFormer for speech."""

    config_class = LightFormerSpeechConfig
    config: LightFormerSpeechConfig
    main_input_name = "input_features"
    input_modalities: ClassVar[tuple[str, ...]] = ("audio", "text")

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, SoundPositions):
            module.reset()
        else:
            super()._init_weights(module)


class LightFormerSpeechEncoder(LightFormerEncoder, LightFormerSpeechPreTrainedModel):
    """Two convolutions, the second with a stride of 2, and `encoder_layers` depths of self-attention."""

    input_modalities: ClassVar[tuple[str, ...]] = ("audio",)

    def add_inputs(self, is_classifier: bool) -> None:
        """Add the convolutions, and fixed positions."""
        config = self.config
        self.conv1 = nn.Conv1d(config.num_mel_bins, config.d_model, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(config.d_model, config.d_model, kernel_size=3, stride=2, padding=1)
        for conv in (self.conv1, self.conv2):
            conv.initializer = partial(draw_matrix, std=(conv.in_channels * conv.kernel_size[0]) ** -0.5)
        self.embed_scale, self.layernorm_embedding = 1.0, nn.Identity()
        self.embed_positions = SoundPositions(config.max_source_positions, config.d_model).requires_grad_(False)

    def embed(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None, *args: Any) -> torch.Tensor:
        """Spectrogram (B, M, 2·S) in place of ids, or outputs of the convolutions → states (B, S, d)."""
        if inputs_embeds is None:
            frames = 2 * self.config.max_source_positions
            if input_ids.shape[-1] != frames:
                raise ValueError(
                    f"input_features have {input_ids.shape[-1]} frames, but the model reads {frames}: let the "
                    "checkpoint's feature extractor pad them, as it does by default"
                )
            states = nn.functional.gelu(self.conv1(input_ids.to(self.conv1.weight.dtype)))
            inputs_embeds = nn.functional.gelu(self.conv2(states)).transpose(1, 2)
        # `from_pretrained` makes all parameters trainable.
        states = inputs_embeds + self.embed_positions.weight.detach()
        return apply_dropout(states, self.config.dropout, self.training)

    def forward(
        self, input_features: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutput:
        """Spectrogram (B, M, 2·S) → hidden states (B, S, d). As in Whisper, a mask has no effect."""
        return super().forward(input_features, **kwargs)


class LightFormerSpeechDecoder(LightFormerDecoder, LightFormerSpeechPreTrainedModel):
    """`decoder_layers` depths of causal self-attention and cross-attention."""

    main_input_name = "input_ids"
    input_modalities: ClassVar[tuple[str, ...]] = ("text",)


class LightFormerSpeechModel(EncoderDecoder, LightFormerSpeechPreTrainedModel):
    """Encoder and decoder without a head."""

    stack_classes = (LightFormerSpeechEncoder, LightFormerSpeechDecoder)

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.decoder.embed_tokens = value

    def forward(
        self,
        input_features: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *args: Any,
        decoder_position_ids: torch.LongTensor | None = None,
        **kwargs: Any,
    ) -> Seq2SeqModelOutput:
        """Spectrogram (B, M, 2·S) and, as of `EncoderDecoder`, target ids (B, T) → hidden states (B, T, d).

        As in Whisper, `attention_mask` has no effect. Positions of targets follow from `decoder_attention_mask`. Where
        `decoder_position_ids` (B, T) are given and begin again at 0, texts are packed in one row.
        """
        if decoder_position_ids is not None:
            kwargs["position_ids"] = decoder_position_ids
        return super().forward(input_features, None, *args, **kwargs)


class LightFormerForSpeechSeq2Seq(WhisperGenerationMixin, ConditionalGenerationHead, LightFormerSpeechPreTrainedModel):
    """LightFormer that transcribes and translates speech, as Whisper generates: `AutoModelForSpeechSeq2Seq`."""

    model_class = LightFormerSpeechModel

    def forward(
        self,
        input_features: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Spectrogram (B, M, 2·S) and target ids (B, T) → logits (B, T, V); with `labels` (B, T) also the loss."""
        return super().forward(
            input_features, None, decoder_input_ids, decoder_attention_mask, encoder_outputs=encoder_outputs,
            past_key_values=past_key_values, decoder_inputs_embeds=decoder_inputs_embeds, labels=labels,
            use_cache=use_cache, **kwargs,
        )  # fmt: skip
