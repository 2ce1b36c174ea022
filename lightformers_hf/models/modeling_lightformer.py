"""LightFormer: a Transformer of low-rank matrices (Eq. 7-10) whose layers are shared in groups (§3.2).

Names of modules are those of Marian and BART, so that the conversion finds each weight under the teacher's name.
"""

import copy
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring, can_return_tuple

from .configuration_lightformer import RELATIVE_POSITIONS, LightFormerConfig
from .heads import CausalLMHead, ConditionalGenerationHead, EncoderDecoder
from .layers import (
    Depth,
    MultiHeadAttention,
    RelativePositions,
    RMSNorm,
    TransformerLayer,
    add_feed_forward,
    add_layer_norms,
    find_distances,
    make_positions,
)
from .low_rank import from_pattern, make_embedding, projections
from .stack import DecoderStack, EncoderStack, FactorizedPreTrainedModel, LayerStack, group_layers

# Names of an encoder-decoder's encoder → names of the classifier's.
ENCODER_NAMES = {r"^model\.encoder\.": "encoder.", r"^(?:model\.)?shared\.": "encoder.embed_tokens."}


def make_norm(config: LightFormerConfig, width: int) -> nn.Module:
    """Return the norm that `normalization` names, for states of that width."""
    norm = RMSNorm if config.normalization == "rms_norm" else nn.LayerNorm
    return norm(width, eps=config.norm_epsilon)


def make_relative_positions(config: LightFormerConfig, stack: str) -> RelativePositions:
    """Return the biases of the `encoder` or the `decoder`, or of one layer of it."""
    heads = getattr(config, f"{stack}_attention_heads")
    return RelativePositions(config.relative_buckets, heads, config.relative_furthest, is_causal=stack == "decoder")


class LightFormerLayer(TransformerLayer):
    """Stored layer `index` of either stack: self-attention (Eq. 9), cross-attention in the decoder of an
    encoder-decoder, feed-forward network (Eq. 10). Private LayerNorms belong to the depth, not to the layer."""

    def __init__(self, config: LightFormerConfig, stack: str, index: int, private_norms: bool):
        name = f"{stack}.layers.{index}"

        def attention(part: str, **options: bool) -> MultiHeadAttention:
            heads = getattr(config, f"{stack}_attention_heads")
            unbiased = () if config.key_bias else ("k_proj",)
            project = projections(config, f"{name}.{part}", "attention", bias=config.use_bias, unbiased=unbiased)
            options |= {"output_projection": config.attention_output_projection, "scale": config.scale_attention}
            head_dim = from_pattern(config.head_dim_pattern, f"{name}.{part}", config.head_dim)
            return MultiHeadAttention(config, config.d_model, heads, project, head_dim=head_dim, **options)

        has_cross = stack == "decoder" and config.is_encoder_decoder
        super().__init__(
            config,
            attention("self_attn", is_causal=stack == "decoder", joint_qkv=config.joint_qkv),
            attention("encoder_attn", is_causal=False) if has_cross else None,
            normalize_before=config.normalize_before,
        )
        ffn_dim = from_pattern(config.ffn_dim_pattern, name, getattr(config, f"{stack}_ffn_dim"))
        project = projections(config, name, "ffn", bias=config.use_bias)
        add_feed_forward(self, config.d_model, ffn_dim, project, gated=config.gated_ffn)
        if config.position_embedding_type == "relative_per_layer":
            self.relative_positions = make_relative_positions(config, stack)
        if not private_norms:
            add_layer_norms(self, config.d_model, has_cross, partial(make_norm, config))


class LightFormerPreTrainedModel(FactorizedPreTrainedModel):
    """Initialization, loading and saving of every LightFormer."""

    config_class = LightFormerConfig
    config: LightFormerConfig
    _no_split_modules = ["LightFormerLayer"]  # noqa: RUF012

    @property
    def _supports_flash_attn(self) -> bool:  # type: ignore[override]
        return self.config.position_embedding_type not in RELATIVE_POSITIONS  # it has no argument for biases

    _supports_flex_attn = _supports_flash_attn


class LightFormerStack(LightFormerPreTrainedModel):
    """Embeddings, layers by depth and final LayerNorm of encoder and decoder."""

    def __init__(self, config: LightFormerConfig, is_classifier: bool = False):
        super().__init__(config)
        self.add_inputs(is_classifier)
        d_model, stack = config.d_model, self.side
        is_relative = config.position_embedding_type == "relative"
        self.relative_positions = make_relative_positions(config, stack) if is_relative else None
        layers, groups = getattr(config, f"{stack}_layers"), getattr(config, f"{stack}_groups")
        private_norms = groups is not None and not config.share_layer_norms
        self.layers = LayerStack(
            lambda index: LightFormerLayer(config, stack, index, private_norms), group_layers(layers, groups)
        )
        self.depths = nn.ModuleList(Depth() for _ in range(layers)) if private_norms else None
        for depth in self.depths or ():
            has_cross = stack == "decoder" and config.is_encoder_decoder
            add_layer_norms(depth, d_model, has_cross, partial(make_norm, config))
        self.layer_norm = make_norm(config, d_model) if config.final_layer_norm else nn.Identity()
        self.gradient_checkpointing = False
        if private_norms:  # which must be on the device of their layers
            self._no_split_modules = [type(self).__name__]
        if config.normalization == "rms_norm":
            self._keep_in_fp32_modules = ["fc2"]  # its outputs exceed fp16 in many T5 models
        self.post_init()

    def add_inputs(self, is_classifier: bool) -> None:
        """Add the embedding of tokens, or of a classifier's word vectors, and the positions."""
        config, width, positions = self.config, self.config.embedding_dim, make_positions(self.config)
        if width is None:
            self.add_embeddings(make_embedding(config, self.side), positions, config.d_model)
        elif is_classifier:
            words = nn.Embedding(config.vocab_size, width, config.pad_token_id)
            self.add_embeddings(words, positions, config.d_model, nn.Linear(width, config.d_model))
        else:
            raise ValueError(
                f"embedding_dim is {width}, but word vectors are for LightFormerForSequenceClassification alone: "
                "leave it None here"
            )
        if config.layernorm_embedding:
            self.layernorm_embedding = make_norm(config, config.d_model)

    def run(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *cross: torch.Tensor | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Apply the layers depth by depth. (B, T, d) → (B, T, d)."""
        if self.config.position_embedding_type in RELATIVE_POSITIONS:
            distances = find_distances(hidden_states, attention_mask, kwargs.get("past_key_values"))
            if self.relative_positions is None:  # one per layer; all together would fill the memory
                kwargs["distances"] = distances
            else:
                attention_mask = self.relative_positions(distances, attention_mask)
        states = hidden_states
        for depth, (layer, slots) in enumerate(self.layers.by_depth()):
            private = None if self.depths is None else self.depths[depth]
            states = layer(states, attention_mask, *cross, private=private, **slots, **kwargs)
        return self.layer_norm(states).to(hidden_states.dtype)


class LightFormerEncoder(EncoderStack, LightFormerStack):
    """`encoder_layers` depths of bidirectional self-attention."""


class LightFormerDecoder(DecoderStack, LightFormerStack):
    """`decoder_layers` depths of causal self-attention, and of cross-attention if `config.is_encoder_decoder`."""


class LightFormerModel(EncoderDecoder, LightFormerPreTrainedModel):
    """Encoder and decoder without a head."""

    stack_classes = (LightFormerEncoder, LightFormerDecoder)


class LightFormerForConditionalGeneration(ConditionalGenerationHead, LightFormerPreTrainedModel, GenerationMixin):
    """LightFormer for translation and summarization: `AutoModelForSeq2SeqLM`."""

    model_class = LightFormerModel
    has_logits_bias = True


class LightFormerForCausalLM(CausalLMHead, LightFormerPreTrainedModel, GenerationMixin):
    """The decoder alone, as a causal language model: `AutoModelForCausalLM`. Uses the `decoder_*` fields."""

    decoder_class = LightFormerDecoder


class LightFormerForSequenceClassification(LightFormerPreTrainedModel):
    """Encoder and a classifier of its mean hidden state (§4.2): `AutoModelForSequenceClassification`."""

    base_model_prefix = "encoder"

    def __init__(self, config: LightFormerConfig):
        config = copy.deepcopy(config)
        config.is_encoder_decoder = False
        super().__init__(config)
        self.encoder = LightFormerEncoder(config, is_classifier=True)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.d_model, config.num_labels)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.embed_tokens = value

    @can_return_tuple
    @auto_docstring(
        custom_intro="""
        Ids (B, S) → logits (B, num_labels); with `labels` (B) also the loss that `config.problem_type` asks for.
        """
    )
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        outputs = self.encoder(input_ids, attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        states = outputs.last_hidden_state
        kept = states.new_ones(states.shape[:2]) if attention_mask is None else attention_mask.to(states.dtype)
        pooled = (states * kept.unsqueeze(-1)).sum(dim=1) / kept.sum(dim=1, keepdim=True).clamp(min=1)
        logits, loss = self.classifier(self.dropout(pooled)), None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )

    @classmethod
    def from_pretrained(cls, *args: Any, key_mapping: dict[str, str] | None = None, **kwargs: Any) -> Any:
        """Extend the base class: a sequence-to-sequence checkpoint gives its encoder and the encoder's embedding."""
        loaded = super().from_pretrained(*args, key_mapping=ENCODER_NAMES | (key_mapping or {}), **kwargs)
        # Without this private attribute transformers saves the model under its own names, which `Trainer` expects.
        vars(loaded[0] if isinstance(loaded, tuple) else loaded).pop("_weight_conversions", None)
        return loaded
