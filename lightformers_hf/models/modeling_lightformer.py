"""LightFormer: a Transformer of low-rank matrices (Eq. 7-10) whose layers are shared in groups (§3.2).

Names of modules are those of Marian and BART, so that a converted weight is found where its teacher had it.
"""

import copy
import math

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention import MultiHeadAttention
from .configuration_lightformer import LightFormerConfig
from .embeddings import SinusoidalPositions, check_length, make_positions, position_ids_from
from .heads import (
    CausalLMHead,
    ConditionalGenerationHead,
    EncoderDecoder,
    SequenceClassificationHead,
    encoder_decoder_ties,
    output_ties,
)
from .layer_stack import LayerStack
from .low_rank import (
    init_factors,
    make_embedding,
    make_linear,
    make_output,
    rank_from_pattern,
)


def module_rank(config: LightFormerConfig, name: str, kind: str) -> int | None:
    """r of the module `name` (without the head's `model.`), whose kind is `attention`, `ffn` or `embedding`."""
    stack = "decoder" if name.startswith("decoder.") else "encoder"
    return rank_from_pattern(config.rank_pattern, name, config.rank_of_kind(stack, kind))


def decoder_table_name(config: LightFormerConfig) -> str:
    """Name of the token table that the decoder reads."""
    return "shared" if config.share_encoder_decoder_embeddings else "decoder.embed_tokens"


def make_table(config: LightFormerConfig, stack: str) -> nn.Module:
    """Token table of a stack: V×d, of the rank that the configuration gives to it."""
    name = "shared" if config.share_encoder_decoder_embeddings else f"{stack}.embed_tokens"
    vocab_size = config.decoder_vocab_size if stack == "decoder" else config.vocab_size
    rank = module_rank(config, name, "embedding")
    return make_embedding(vocab_size, config.d_model, rank, name=name, padding_idx=config.pad_token_id)


def make_head(config: LightFormerConfig, table_name: str) -> nn.Module:
    """Output layer, d → V: in the form of the table `table_name` where it is tied to it, else of a rank of its own."""
    rank = module_rank(config, table_name if config.tie_word_embeddings else "lm_head", "embedding")
    return make_output(config.d_model, config.decoder_vocab_size, rank, name="lm_head")


class LayerNorms(nn.Module):
    """The LayerNorms of one depth, for a stack whose layers are shared without them (`share_layer_norms=False`)."""

    def __init__(self, config: LightFormerConfig, stack: str):
        super().__init__()
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        if stack == "decoder" and config.is_encoder_decoder:
            self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model)


class LightFormerLayer(GradientCheckpointingLayer):
    """One layer of either stack: self-attention (Eq. 9), cross-attention in the decoder, feed-forward (Eq. 10).

    Args:
        stack: `encoder` or `decoder`; a decoder of a causal language model has no cross-attention.
        index: number of this stored layer, which names its matrices in `rank_pattern`.
        private_norms: the LayerNorms come with each call, from the depth.
    """

    def __init__(self, config: LightFormerConfig, stack: str, index: int, private_norms: bool):
        super().__init__()
        name = f"{stack}.layers.{index}"
        heads = getattr(config, f"{stack}_attention_heads")
        ffn_dim = getattr(config, f"{stack}_ffn_dim")

        def attention(part: str, is_causal: bool, joint_qkv: bool = False) -> MultiHeadAttention:
            def project(projection: str, in_features: int, out_features: int) -> nn.Module:
                full_name = f"{name}.{part}.{projection}"
                return make_linear(
                    in_features, out_features, module_rank(config, full_name, "attention"), name=full_name
                )

            return MultiHeadAttention(
                config,
                heads,
                project,
                is_causal=is_causal,
                joint_qkv=joint_qkv,
                output_projection=config.attention_output_projection,
            )

        def ffn(part: str, in_features: int, out_features: int) -> nn.Module:
            rank = module_rank(config, f"{name}.{part}", "ffn")
            return make_linear(in_features, out_features, rank, name=f"{name}.{part}")

        self.self_attn = attention("self_attn", is_causal=stack == "decoder", joint_qkv=config.joint_qkv)
        if stack == "decoder" and config.is_encoder_decoder:
            self.encoder_attn = attention("encoder_attn", is_causal=False)
        self.fc1 = ffn("fc1", config.d_model, ffn_dim)
        self.fc2 = ffn("fc2", ffn_dim, config.d_model)
        if not private_norms:
            for norm_name, norm in LayerNorms(config, stack).named_children():
                self.add_module(norm_name, norm)
        self.normalize_before = config.normalize_before
        self.dropout = config.dropout
        self.activation = ACT2FN[config.activation_function]
        self.activation_dropout = config.activation_dropout

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        norms: nn.Module | None = None,
        past_key_values: Cache | None = None,
        layer_idx: int | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """(B, T, d) → (B, T, d). `layer_idx` is the depth, whose cache slot and `norms` this call uses."""
        norms = self if norms is None else norms
        cached = {"past_key_values": past_key_values, "layer_idx": layer_idx, **kwargs}

        def self_attention(states: torch.Tensor) -> torch.Tensor:
            return self.self_attn(states, attention_mask=attention_mask, **cached)[0]

        def cross_attention(states: torch.Tensor) -> torch.Tensor:
            return self.encoder_attn(
                states, key_value_states=encoder_hidden_states, attention_mask=encoder_attention_mask, **cached
            )[0]

        hidden_states = self._sublayer(hidden_states, norms.self_attn_layer_norm, self_attention)
        if encoder_hidden_states is not None:
            hidden_states = self._sublayer(hidden_states, norms.encoder_attn_layer_norm, cross_attention)
        hidden_states = self._sublayer(hidden_states, norms.final_layer_norm, self._feed_forward)
        if hidden_states.dtype == torch.float16:
            limit = torch.finfo(torch.float16).max - 1000
            hidden_states = hidden_states.clamp(-limit, limit)
        return hidden_states

    def _feed_forward(self, states: torch.Tensor) -> torch.Tensor:
        inner = self.activation(self.fc1(states))
        return self.fc2(nn.functional.dropout(inner, p=self.activation_dropout, training=self.training))

    def _sublayer(self, states: torch.Tensor, norm: nn.Module, compute) -> torch.Tensor:
        output = compute(norm(states) if self.normalize_before else states)
        states = states + nn.functional.dropout(output, p=self.dropout, training=self.training)
        return states if self.normalize_before else norm(states)


class LightFormerPreTrainedModel(PreTrainedModel):
    """Weights, loading and saving of every LightFormer."""

    config_class = LightFormerConfig
    config: LightFormerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LightFormerLayer"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        init_factors(module, self.config.init_std)
        if isinstance(module, SinusoidalPositions):
            module.reset()
        elif isinstance(module, LightFormerForConditionalGeneration):
            init.zeros_(module.final_logits_bias)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Ties as this configuration has them. The base class drops every tie where `tie_word_embeddings` is false,
        the one between encoder and decoder tables included."""
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        return dict(self._tied_weights_keys or {})


class LightFormerStack(LightFormerPreTrainedModel):
    """What encoder and decoder have in common: token and position embeddings, layers by depth, final LayerNorm."""

    def __init__(self, config: LightFormerConfig, stack: str, table: nn.Module):
        super().__init__(config)
        layers, groups = getattr(config, f"{stack}_layers"), getattr(config, f"{stack}_groups")
        private_norms = groups is not None and not config.share_layer_norms
        self.embed_scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.embed_tokens = table
        self.embed_positions = make_positions(config)
        self.layers = LayerStack(
            lambda index: LightFormerLayer(config, stack, index, private_norms), layers=layers, groups=groups
        )
        self.norms = nn.ModuleList(LayerNorms(config, stack) for _ in range(layers)) if private_norms else None
        self.layernorm_embedding = nn.LayerNorm(config.d_model) if config.layernorm_embedding else nn.Identity()
        self.layer_norm = nn.LayerNorm(config.d_model) if config.final_layer_norm else nn.Identity()
        self.gradient_checkpointing = False

    def embed(
        self,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None = None,
        past_length=0,
    ) -> torch.Tensor:
        """Ids (B, T), or their unscaled vectors (B, T, d) → input of the first layer (B, T, d)."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input ids and input embeddings")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        length = inputs_embeds.shape[1]
        if position_ids is None:
            check_length(self.embed_positions, length + past_length)
            position_ids = position_ids_from(attention_mask, length, past_length, inputs_embeds.device)
        states = inputs_embeds * self.embed_scale + self.embed_positions(position_ids).to(inputs_embeds)
        return nn.functional.dropout(self.layernorm_embedding(states), p=self.config.dropout, training=self.training)

    def run(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, *cross, **kwargs) -> torch.Tensor:
        """Apply the layers depth by depth. (B, T, d) → (B, T, d)."""
        for depth, layer in self.layers.by_depth():
            norms = None if self.norms is None else self.norms[depth]
            hidden_states = layer(hidden_states, attention_mask, *cross, norms=norms, layer_idx=depth, **kwargs)
        return self.layer_norm(hidden_states)


class LightFormerEncoder(LightFormerStack):
    """`encoder_layers` depths of bidirectional self-attention."""

    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": LightFormerLayer,
        "attentions": MultiHeadAttention,
    }

    def __init__(self, config: LightFormerConfig, embedding_dim: int | None = None):
        if embedding_dim is None:
            super().__init__(config, "encoder", make_table(config, "encoder"))
            self.embed_projection = nn.Identity()
        else:
            super().__init__(config, "encoder", nn.Embedding(config.vocab_size, embedding_dim, config.pad_token_id))
            self.embed_projection = nn.Linear(embedding_dim, config.d_model)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs,
    ) -> BaseModelOutput:
        """Ids (B, S) → states (B, S, d); `attention_mask` (B, S) is 0 where a token is padding."""
        if inputs_embeds is None and input_ids is not None:
            inputs_embeds, input_ids = self.embed_tokens(input_ids), None
        if inputs_embeds is not None:
            inputs_embeds = self.embed_projection(inputs_embeds)
        hidden_states = self.embed(input_ids, inputs_embeds, attention_mask)
        mask = create_bidirectional_mask(
            config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask
        )
        return BaseModelOutput(last_hidden_state=self.run(hidden_states, mask, **kwargs))


class LightFormerDecoder(LightFormerStack):
    """`decoder_layers` depths of causal self-attention, and of cross-attention if `config.is_encoder_decoder`."""

    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": LightFormerLayer,
        "attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="encoder_attn"),
    }

    def __init__(self, config: LightFormerConfig):
        if config.embedding_dim is not None:
            raise ValueError(
                f"embedding_dim is {config.embedding_dim}, but word vectors are for "
                "LightFormerForSequenceClassification alone: leave it None here"
            )
        super().__init__(config, "decoder", make_table(config, "decoder"))
        self.post_init()

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
        **kwargs,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Ids (B, T), and the encoder's states (B, S, d) → states (B, T, d)."""
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
            if self.config.is_encoder_decoder:
                past_key_values = EncoderDecoderCache(past_key_values, DynamicCache(config=self.config))
        past_length = 0 if past_key_values is None else past_key_values.get_seq_length()
        hidden_states = self.embed(input_ids, inputs_embeds, attention_mask, position_ids, past_length)

        is_pair = isinstance(past_key_values, EncoderDecoderCache)
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
            mask,
            encoder_hidden_states,  # positional: reentrant checkpointing follows gradients of positional inputs only
            encoder_attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden_states, past_key_values=past_key_values
        )


class LightFormerModel(EncoderDecoder, LightFormerPreTrainedModel):
    """Encoder and decoder without a head."""

    def __init__(self, config: LightFormerConfig):
        super().__init__(config)
        if not config.is_encoder_decoder:
            raise ValueError(
                "is_encoder_decoder is False: this is the configuration of a single stack, which "
                "LightFormerForCausalLM and LightFormerForSequenceClassification load"
            )
        if config.share_encoder_decoder_embeddings:
            self.shared = make_table(config, "encoder")
        self.encoder = LightFormerEncoder(config)
        self.decoder = LightFormerDecoder(config)
        self._tied_weights_keys = encoder_decoder_ties(self)
        self.post_init()


class LightFormerForConditionalGeneration(ConditionalGenerationHead, LightFormerPreTrainedModel, GenerationMixin):
    """LightFormer for translation and summarization: `AutoModelForSeq2SeqLM`."""

    def __init__(self, config: LightFormerConfig):
        super().__init__(config)
        self.loss_type = "ForMaskedLM"  # decoder inputs are shifted already; the default would shift the labels again
        self.model = LightFormerModel(config)
        table_name = decoder_table_name(config)
        self.lm_head = make_head(config, table_name)
        self.register_buffer("final_logits_bias", torch.zeros(1, config.decoder_vocab_size))
        self._tied_weights_keys = output_ties(
            self.model.decoder.embed_tokens, f"model.{table_name}", config.tie_word_embeddings
        )
        self.post_init()


class LightFormerForCausalLM(CausalLMHead, LightFormerPreTrainedModel, GenerationMixin):
    """The decoder alone, as a causal language model: `AutoModelForCausalLM`. Uses the `decoder_*` fields."""

    def __init__(self, config: LightFormerConfig):
        config = copy.deepcopy(config)  # the caller's configuration stays an encoder-decoder's
        config.is_encoder_decoder = False
        config.share_encoder_decoder_embeddings, config.vocab_size = False, config.decoder_vocab_size
        super().__init__(config)
        self.decoder = LightFormerDecoder(config)
        self.lm_head = make_head(config, "decoder.embed_tokens")
        self._tied_weights_keys = output_ties(
            self.decoder.embed_tokens, "decoder.embed_tokens", config.tie_word_embeddings
        )
        self.post_init()


class LightFormerForSequenceClassification(SequenceClassificationHead, LightFormerPreTrainedModel):
    """The encoder alone with a classifier (§4.2): `AutoModelForSequenceClassification`."""

    def __init__(self, config: LightFormerConfig):
        config = copy.deepcopy(config)
        config.is_encoder_decoder = False
        super().__init__(config)
        self.encoder = LightFormerEncoder(config, embedding_dim=config.embedding_dim)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.d_model, config.num_labels)
        self.post_init()
