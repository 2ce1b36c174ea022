"""Encoder and decoder of every architecture: shared layers, initialization and loading, masks and caches."""

import json
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_lightformer import FactorizedConfig
from .layers import Attention, SinusoidalPositions, apply_dropout, check_length, find_position_ids
from .low_rank import AdaptiveEmbedding, draw_matrix


def group_layers(layers: int, groups: int | None) -> list[int]:
    """Return the index of the stored layer at every depth: each of `groups` contiguous groups has one (Eq. 4-6)."""
    return [depth if groups is None else depth * groups // layers for depth in range(layers)]


class LayerStack(nn.ModuleList):
    """The layers of a stack, each stored once. `stored_at` has the index of the stored layer of every depth."""

    def __init__(self, build: Callable[[int], nn.Module], stored_at: list[int]):
        super().__init__(build(index) for index in range(max(stored_at) + 1))
        self.stored_at = stored_at

    def by_depth(self) -> Iterator[tuple[nn.Module, dict[str, int]]]:
        """Yield the layer of every depth, and the cache slots of that depth as arguments of the layer's call.

        `layer_idx`, the slot of self-attention, is the depth. `cross_layer_idx`, the slot of cross-attention, is the
        first depth of the layer: its keys and values depend on the encoder alone, so that all its depths share them.
        """
        for depth, index in enumerate(self.stored_at):
            yield self[index], {"layer_idx": depth, "cross_layer_idx": self.stored_at.index(index)}


def clamp_mask(mask: Any) -> Any:
    """Return a mask in fp16 with space for the scores it is added to: below -65504 a row of padding would be NaN."""
    if isinstance(mask, torch.Tensor) and mask.dtype == torch.float16:
        return mask.clamp(min=torch.finfo(torch.float16).min / 2)
    return mask


class FactorizedPreTrainedModel(PreTrainedModel):
    """Initialization, loading and saving of the weights of every architecture."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    def __init__(self, config: FactorizedConfig, *inputs: Any, **kwargs: Any):
        config.check()  # fields may have been changed since it was made
        super().__init__(config, *inputs, **kwargs)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return cls._supports_attention_backend  # the base class looks for attention in the file of the class

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std, initializer = self.config.init_std, getattr(module, "initializer", None)
        if std is None and initializer is not None:
            initializer(module)
        elif isinstance(module, nn.Linear | nn.Embedding) or hasattr(module, "product_rank"):
            draw_matrix(module, self.config.d_model**-0.5 if std is None else std)
        else:
            super()._init_weights(module)
        if isinstance(module, SinusoidalPositions):
            module.reset()
        elif getattr(module, "final_logits_bias", None) is not None:
            init.zeros_(module.final_logits_bias)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return the ties of this configuration. The base class drops all of them if `tie_word_embeddings` is false,
        also the tie between the embeddings of encoder and decoder."""
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        return dict(self._tied_weights_keys or {})

    def tie_weights(self, missing_keys: set[str] | None = None, recompute_mapping: bool = True) -> None:
        """Extend the base class: a tensor that was not loaded because its size differs (`ignore_mismatched_sizes`) is
        tied to the new one. The base class ties the new tensor to it, and leaves it without values (on `meta`)."""
        missing, new = set() if missing_keys is None else missing_keys, set()
        for target, source in () if missing_keys is None else self.all_tied_weights_keys.items():
            is_lost = target not in missing and self.get_parameter(target).is_meta
            if is_lost and not self.get_parameter(source).is_meta:
                missing.add(target)
                new.add(source)
        new &= missing
        missing -= new
        super().tie_weights(missing_keys, recompute_mapping)
        missing |= new

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **options: Any) -> None:
        """Save as `PreTrainedModel` does, and so that weights of torchao can be loaded again.

        torchao 0.18 fails at the names without a dot in its list of tensors, which need no entry: `final_logits_bias`.
        """
        quantizer = getattr(self, "hf_quantizer", None)
        collect = getattr(quantizer, "get_state_dict_and_metadata", None)

        def collect_named(model: nn.Module) -> tuple[dict, dict]:
            state, metadata = collect(model)
            if "tensor_names" in metadata:
                names = [name for name in json.loads(metadata["tensor_names"]) if "." in name]
                metadata["tensor_names"] = json.dumps(names)
            return state, metadata

        if quantizer is not None:
            quantizer.get_state_dict_and_metadata = collect_named
        try:
            super().save_pretrained(save_directory, *args, **options)
        finally:
            if quantizer is not None:
                del quantizer.get_state_dict_and_metadata

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Resize the vocabulary, as `PreTrainedModel` does. Two vocabularies and adaptive ones raise `ValueError`."""
        if new_num_tokens is None and pad_to_multiple_of is None:
            return self.get_input_embeddings()
        if isinstance(self.get_input_embeddings(), AdaptiveEmbedding):
            raise ValueError(
                "an adaptive embedding (embedding='adaptive') can't be resized: its bands follow token frequencies"
            )
        if self.config.has_two_vocabularies:
            raise ValueError(
                "this model has separate source and target vocabularies "
                "(share_encoder_decoder_embeddings=False); resizing one of them is not supported"
            )
        table = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        size = self.config.decoder_vocab_size = self.config.vocab_size
        if getattr(self, "final_logits_bias", None) is not None:  # new tokens have a bias of zero
            missing = size - self.final_logits_bias.shape[-1]
            self.final_logits_bias = nn.functional.pad(self.final_logits_bias, (0, missing))
        return table


class Stack:
    """Token embeddings and positions. Subclasses apply their layers in `run(states, mask, *cross, **kwargs)`."""

    side: str  # `encoder` or `decoder`, as in the names of fields and tensors

    def add_embeddings(
        self, embedding: nn.Module, positions: nn.Module | None, width: int, projection: nn.Module | None = None
    ) -> None:
        """Add an embedding, whose vectors `projection` brings to width w, and positions unless they are relative."""
        self.embed_tokens = embedding
        self.embed_projection = nn.Identity() if projection is None else projection
        self.embed_scale = math.sqrt(width) if self.config.scale_embedding else 1.0
        self.embed_positions = positions
        self.layernorm_embedding = nn.Identity()

    def embed(
        self,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None = None,
        past_length: int | torch.Tensor = 0,
    ) -> torch.Tensor:
        """Ids (B, T), or their rows of the embedding → scaled vectors with positions (B, T, w)."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input ids and input embeddings")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        states = self.embed_projection(inputs_embeds) * self.embed_scale
        if self.embed_positions is not None:
            length = states.shape[1]
            check_length(self.embed_positions, length + past_length, position_ids)
            if position_ids is None:
                position_ids = find_position_ids(attention_mask, length, past_length, states.device)
            states = states + self.embed_positions(position_ids).to(states)
        return apply_dropout(self.layernorm_embedding(states), self.config.dropout, self.training)


class EncoderStack(Stack):
    """Bidirectional self-attention."""

    side = "encoder"
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": GradientCheckpointingLayer,
        "attentions": OutputRecorder(Attention, index=1, layer_name="self_attn"),
    }

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Ids (B, S) → hidden states (B, S, d); `attention_mask` (B, S) is 0 at padding.

        With a mask of pairs of tokens (B, 1, S, S), which gives no order, positions are 0 to S − 1.
        """
        padding = attention_mask if attention_mask is None or attention_mask.dim() == 2 else None
        hidden_states = self.embed(input_ids, inputs_embeds, padding)
        mask = create_bidirectional_mask(self.config, hidden_states, attention_mask)
        return BaseModelOutput(last_hidden_state=self.run(hidden_states, clamp_mask(mask), **kwargs))


class DecoderStack(Stack):
    """Causal self-attention, and cross-attention if `config.is_encoder_decoder`."""

    side = "decoder"
    _can_record_outputs = {  # noqa: RUF012
        **EncoderStack._can_record_outputs,
        "cross_attentions": OutputRecorder(Attention, index=1, layer_name="encoder_attn"),
    }

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Ids (B, T), and the encoder's hidden states (B, S, d) → hidden states (B, T, d)."""
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        is_single = past_key_values is not None and not isinstance(past_key_values, EncoderDecoderCache)
        if is_single and self.config.is_encoder_decoder:  # also if the caller made it: cross-attention needs its own
            past_key_values = EncoderDecoderCache(past_key_values, DynamicCache(config=self.config))
        past_length = 0 if past_key_values is None else past_key_values.get_seq_length()
        hidden_states = self.embed(input_ids, inputs_embeds, attention_mask, position_ids, past_length)

        mask = create_causal_mask(  # positions that start again at 0 are sentences packed in one row
            config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=getattr(past_key_values, "self_attention_cache", past_key_values),
        )  # fmt: skip
        if encoder_hidden_states is not None:
            encoder_attention_mask = create_bidirectional_mask(
                self.config, hidden_states, encoder_attention_mask, encoder_hidden_states
            )
        # Hidden states are positional, because reentrant checkpointing ignores gradients of keyword arguments.
        cross = encoder_hidden_states, clamp_mask(encoder_attention_mask)
        hidden_states = self.run(hidden_states, clamp_mask(mask), *cross, past_key_values=past_key_values, **kwargs)
        return BaseModelOutputWithPastAndCrossAttentions(hidden_states, past_key_values)
