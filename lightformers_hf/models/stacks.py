"""What encoder and decoder of every architecture do alike: token tables, positions, masks, caches, initialisation."""

import math
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_base import FactorizedConfig
from .embeddings import AdaptiveEmbedding, AdaptiveTable, SinusoidalPositions, check_length, position_ids_from
from .matrices import make_embedding, module_rank
from .starts import draw
from .transformer_layer import drop

# What attention takes: a tensor, a block mask of flex attention, or none.
Mask = TypeVar("Mask")


def make_table(config: FactorizedConfig, stack: str) -> nn.Module:
    """Token table of a stack: V×`embedding_width`, of the rank that the configuration gives to it, or adaptive."""
    if config.embedding == "adaptive":
        return AdaptiveEmbedding(
            config.vocab_size, config.d_model, config.adaptive_cutoffs, config.adaptive_factor, config.pad_token_id
        )
    name = "shared" if config.share_encoder_decoder_embeddings else f"{stack}.embed_tokens"
    vocab_size = config.decoder_vocab_size if stack == "decoder" else config.vocab_size
    rank = module_rank(config, name, "embedding")
    return make_embedding(vocab_size, config.embedding_width, rank, name=name, padding_idx=config.pad_token_id)


def clamp_mask(mask: Mask) -> Mask:
    """`mask` for attention, where it is added to logits in fp16 kept far enough from -65504 to leave room for them.

    Below is -inf, and a row of padding, which sees nothing, would be NaN: the states of every token would be, in the
    next layer.
    """
    if isinstance(mask, torch.Tensor) and mask.dtype == torch.float16:
        return mask.clamp(min=torch.finfo(torch.float16).min / 2)
    return mask


class FactorizedPreTrainedModel(PreTrainedModel):
    """Weights, loading and saving of every architecture."""

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
        # transformers looks for its attention interface in the file of the class, but here `attention` has it.
        return cls._supports_attention_backend

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std, start = self.config.init_std, getattr(module, "start", None)
        if std is None and start is not None:
            start(module)
        elif isinstance(module, nn.Linear | nn.Embedding) or hasattr(module, "product_rank"):
            draw(module, self.config.d_model**-0.5 if std is None else std)
        else:
            super()._init_weights(module)
        if isinstance(module, SinusoidalPositions) or (isinstance(module, AdaptiveTable) and std is None):
            module.reset()
        elif getattr(module, "final_logits_bias", None) is not None:
            init.zeros_(module.final_logits_bias)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Ties as this configuration has them. The base class drops every tie where `tie_word_embeddings` is false,
        the one between encoder and decoder tables included."""
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        return dict(self._tied_weights_keys or {})

    def tie_weights(self, missing_keys: set[str] | None = None, recompute_mapping: bool = True) -> None:
        """As the base class does; and a tensor that was not loaded, being of another size (`ignore_mismatched_sizes`),
        is tied to the fresh one. The base class ties the fresh one to it, and leaves it without values (on `meta`)."""
        if missing_keys is None:
            super().tie_weights(recompute_mapping=recompute_mapping)
            return
        without_values = {
            target: source
            for target, source in self.all_tied_weights_keys.items()
            if target not in missing_keys
            and self.get_parameter(target).is_meta
            and not self.get_parameter(source).is_meta
        }
        fresh = missing_keys & set(without_values.values())
        missing_keys.update(without_values)
        missing_keys.difference_update(fresh)
        super().tie_weights(missing_keys, recompute_mapping)
        missing_keys.update(fresh)


class Stack:
    """Token and position embeddings of a stack, and what its layers make of them.

    Each stack has its `run(hidden_states, attention_mask, *cross, **kwargs)`: its layers, (B, T, w) → (B, T, d).
    """

    def add_embeddings(
        self, table: nn.Module, positions: nn.Module | None, *, width: int, projection: nn.Module | None = None
    ) -> None:
        """Give the stack a token table, whose vectors `projection` brings to width w, and positions of that width.

        Without `positions` the vectors say nothing of where their tokens stand.
        """
        self.embed_tokens = table
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
        """Ids (B, T), or their rows of the table → scaled vectors with positions (B, T, w)."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input ids and input embeddings")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        vectors = self.embed_projection(inputs_embeds)
        states, length = vectors * self.embed_scale, vectors.shape[1]
        if self.embed_positions is not None:
            check_length(self.embed_positions, length + past_length, position_ids)
            if position_ids is None:
                position_ids = position_ids_from(attention_mask, length, past_length, vectors.device)
            states = states + self.embed_positions(position_ids).to(vectors)
        return drop(self.layernorm_embedding(states), self.config.dropout, self.training)


class EncoderStack(Stack):
    """Bidirectional self-attention."""

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Ids (B, S) → states (B, S, d); `attention_mask` (B, S) is 0 where a token is padding.

        With a mask of pairs of tokens (B, 1, S, S), which gives no order, positions are 0 to S − 1.
        """
        padding = attention_mask if attention_mask is None or attention_mask.dim() == 2 else None
        hidden_states = self.embed(input_ids, inputs_embeds, padding)
        mask = create_bidirectional_mask(
            config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask
        )
        return BaseModelOutput(last_hidden_state=self.run(hidden_states, clamp_mask(mask), **kwargs))


class DecoderStack(Stack):
    """Causal self-attention, and cross-attention if `config.is_encoder_decoder`."""

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
        """Ids (B, T), and the encoder's states (B, S, d) → states (B, T, d)."""
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        is_pair = isinstance(past_key_values, EncoderDecoderCache)
        if past_key_values is not None and self.config.is_encoder_decoder and not is_pair:
            # Cross-attention needs slots of its own, also beside a cache that the caller made.
            past_key_values = EncoderDecoderCache(past_key_values, DynamicCache(config=self.config))
            is_pair = True
        past_length = 0 if past_key_values is None else past_key_values.get_seq_length()
        hidden_states = self.embed(input_ids, inputs_embeds, attention_mask, position_ids, past_length)

        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            past_key_values=past_key_values.self_attention_cache if is_pair else past_key_values,
            position_ids=position_ids,  # positions that start again at 0 are sentences packed in one row
        )
        if encoder_hidden_states is not None:
            encoder_attention_mask = create_bidirectional_mask(
                config=self.config,
                inputs_embeds=hidden_states,
                attention_mask=encoder_attention_mask,
                encoder_hidden_states=encoder_hidden_states,
            )
        hidden_states = self.run(
            hidden_states,
            clamp_mask(mask),
            encoder_hidden_states,  # positional: reentrant checkpointing follows gradients of positional inputs only
            clamp_mask(encoder_attention_mask),
            past_key_values=past_key_values,
            **kwargs,
        )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden_states, past_key_values=past_key_values
        )
