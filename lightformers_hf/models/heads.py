"""Models with and without a head, of every architecture: outputs, losses, tied weights, resizing of the vocabulary.

A model class with `generate` lists `GenerationMixin` itself as a base, because transformers looks for it there.
"""

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import (
    BaseModelOutput,
    CausalLMOutputWithCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import ModelOutput, TransformersKwargs, auto_docstring, can_return_tuple

from .configuration_lightformer import FactorizedConfig, causal_config
from .low_rank import (
    AdaptiveEmbedding,
    AdaptiveOutput,
    make_embedding,
    make_output,
    tied_parameters,
    warn_about_patterns,
)


class EncoderDecoder:
    """An encoder-decoder without a head: `encoder`, `decoder` and, if they have one embedding, `shared`."""

    stack_classes: tuple[type[nn.Module], type[nn.Module]]  # encoder and decoder

    def __init__(self, config: FactorizedConfig, has_head: bool = False):
        super().__init__(config)  # type: ignore[call-arg]  # of the family's PreTrainedModel
        if not config.is_encoder_decoder:
            raise ValueError(
                "is_encoder_decoder is False: this is the configuration of a single stack, which the causal language "
                "models and classifiers load"
            )
        if config.embedding == "adaptive":
            raise ValueError(
                "embedding is 'adaptive', which is for causal language models; an encoder-decoder has "
                f"{', '.join(repr(name) for name in config.embeddings if name != 'adaptive')}"
            )
        ties = {}
        if config.share_encoder_decoder_embeddings:
            self.shared = make_embedding(config, "encoder")
            names, stacks = tied_parameters(self.shared), ("encoder", "decoder")
            ties = {f"{stack}.embed_tokens.{name}": f"shared.{name}" for stack in stacks for name in names}
        self.encoder, self.decoder = (stack_class(config) for stack_class in self.stack_classes)
        self._tied_weights_keys = ties
        if not has_head:  # its output layer may have patterns, too
            warn_about_patterns(self, config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.embed_tokens = value
        if self.config.share_encoder_decoder_embeddings:
            self.shared = self.decoder.embed_tokens = value

    @can_return_tuple
    @auto_docstring(
        custom_intro="""
        Source ids (B, S) and target ids (B, T) → hidden states of the decoder (B, T, d).

        `encoder_outputs` replaces the encoder's pass. `inputs_embeds` are unscaled: as `get_input_embeddings()`
        returns for ids.
        """
    )
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            raise ValueError(
                "decoder_input_ids is missing: give decoder_input_ids, or labels to a model with a head. A Trainer "
                "with label smoothing passes no labels: its collator must be "
                "DataCollatorForSeq2Seq(tokenizer, model=model), which makes decoder_input_ids."
            )
        if encoder_outputs is None:
            encoded = self.encoder(input_ids, attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        else:
            is_output = isinstance(encoder_outputs, ModelOutput)  # T5's encoder has another class of them
            encoded = encoder_outputs if is_output else BaseModelOutput(*encoder_outputs)
        decoded = self.decoder(
            decoder_input_ids, decoder_attention_mask,
            encoder_hidden_states=encoded.last_hidden_state, encoder_attention_mask=attention_mask,
            past_key_values=past_key_values, inputs_embeds=decoder_inputs_embeds, use_cache=use_cache, **kwargs,
        )  # fmt: skip
        return Seq2SeqModelOutput(
            last_hidden_state=decoded.last_hidden_state, past_key_values=decoded.past_key_values,
            decoder_hidden_states=decoded.hidden_states, decoder_attentions=decoded.attentions,
            cross_attentions=decoded.cross_attentions, encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states, encoder_attentions=encoded.attentions,
        )  # fmt: skip


class LanguageModelHead:
    """The output layer `lm_head`. Its innermost linear layer, with V outputs, is the one that is resized."""

    def add_output(self, embedding: nn.Module, embedding_name: str, name: str = "lm_head") -> None:
        """Build the output layer `name` in the form of the embedding and tied to it, or a separate one."""
        config, tie = self.config, self.config.tie_word_embeddings
        self.output_scale = config.d_model**-0.5 if config.scale_output else None
        if isinstance(embedding, AdaptiveEmbedding):
            bands = (config.vocab_size, config.d_model, config.adaptive_cutoffs, config.adaptive_factor)
            self.lm_head = AdaptiveOutput(*bands)
        else:
            self.lm_head = make_output(config, embedding_name.removeprefix("model.") if tie else name)
        tied = tied_parameters(embedding) if tie else {}
        self._tied_weights_keys = {f"{name}.{there}": f"{embedding_name}.{here}" for here, there in tied.items()}
        # `device_map="auto"` must put each on one device: accelerate cannot separate tied tensors within a module.
        whole = {type(module).__name__ for module in (embedding, self.lm_head)} - {"Embedding", "Linear"}
        self._no_split_modules = {*self._no_split_modules, *whole}

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse continuous batching: its cache has one slot for every module, but here layers may be shared."""
        raise NotImplementedError(
            f"{type(self).__name__} has no continuous batching (generate_batch), because several depths may share a "
            "layer: use generate with padded inputs"
        )

    generate_batch = continuous_batching_context_manager = init_continuous_batching

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Extend the base class: `max_new_tokens` replaces the `max_length` of the generation configuration, without a
        warning."""
        if kwargs.get("max_new_tokens") is not None and kwargs.get("generation_config") is None:
            kwargs.setdefault("max_length", None)
        return super().generate(*args, **kwargs)

    def scale(self, states: torch.Tensor) -> torch.Tensor:
        """Hidden states of the decoder → input of the output layer: (…, d) → (…, d)."""
        return states if self.output_scale is None else states * self.output_scale

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Extend the base class: set `tie_word_embeddings`, which peft changes when it merges adapters."""
        ties = self._tied_weights_keys.items()
        if ties and all(self.get_parameter(name) is self.get_parameter(stored) for name, stored in ties):
            self.config.tie_word_embeddings = True
        super().save_pretrained(*args, **kwargs)

    def get_output_embeddings(self) -> nn.Module:
        layer = self.lm_head
        while hasattr(layer, "output"):
            layer = layer.output
        return layer

    def set_output_embeddings(self, value: nn.Linear) -> None:
        value.kind = "embedding"  # a resized layer is a new module
        parent, name = self, "lm_head"
        while hasattr(getattr(parent, name), "output"):
            parent, name = getattr(parent, name), "output"
        setattr(parent, name, value)


class ConditionalGenerationHead(LanguageModelHead):
    """An encoder-decoder `model`, an output layer `lm_head`, and maybe a fixed bias `final_logits_bias` (Marian)."""

    model_class: type[nn.Module]
    has_logits_bias = False

    def __init__(self, config: FactorizedConfig):
        super().__init__(config)  # type: ignore[call-arg]  # of the family's PreTrainedModel
        self.loss_type = "ForMaskedLM"  # decoder inputs are already shifted; the default would shift the labels again
        bias = torch.zeros(1, config.decoder_vocab_size) if self.has_logits_bias else None
        self.register_buffer("final_logits_bias", bias)
        self.model = self.model_class(config, has_head=True)
        name = "shared" if config.share_encoder_decoder_embeddings else "decoder.embed_tokens"
        self.add_output(self.model.decoder.embed_tokens, f"model.{name}")
        warn_about_patterns(self, config)
        self.post_init()

    def logits_of(self, states: torch.Tensor) -> torch.Tensor:
        """Hidden states of the decoder (…, d) → logits (…, V)."""
        logits = self.lm_head(self.scale(states))
        return logits if self.final_logits_bias is None else logits + self.final_logits_bias.to(logits.device)

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the labels one step later, after the start token: (B, T) → (B, T). For `DataCollatorForSeq2Seq`."""
        for field in ("pad_token_id", "decoder_start_token_id"):
            if getattr(self.config, field) is None:
                raise ValueError(f"{field} is None in the configuration: labels need it to become decoder inputs")
        shifted = labels.new_full(labels.shape, self.config.decoder_start_token_id)
        shifted[:, 1:] = labels[:, :-1]
        return shifted.masked_fill(shifted == -100, self.config.pad_token_id)

    @can_return_tuple
    @auto_docstring(
        custom_intro="""
        Source ids (B, S) and target ids (B, T) → logits (B, T, V).

        With `labels` (B, T; −100 is ignored) also the mean cross-entropy, over `num_items_in_batch` if the trainer
        passes it; missing decoder inputs are then the shifted labels.
        """
    )
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        if labels is not None:
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids, attention_mask, decoder_input_ids, decoder_attention_mask, encoder_outputs=encoder_outputs,
            past_key_values=past_key_values, inputs_embeds=inputs_embeds, decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache, **kwargs,
        )  # fmt: skip
        logits, loss = self.logits_of(outputs.last_hidden_state), None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1], **kwargs)
        others = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return Seq2SeqLMOutput(loss=loss, logits=logits, **others)


class CausalLMHead(LanguageModelHead):
    """A `decoder` without cross-attention, and an output layer `lm_head`."""

    base_model_prefix = "decoder"
    decoder_class: type[nn.Module]

    def __init__(self, config: FactorizedConfig):
        super().__init__(causal_config(config))  # type: ignore[call-arg]  # of the family's PreTrainedModel
        self.decoder = self.decoder_class(self.config)
        self.add_output(self.decoder.embed_tokens, "decoder.embed_tokens")
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.decoder.embed_tokens = value

    def get_decoder(self) -> nn.Module:
        return self.decoder

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Extend the base class: refuse an encoder-decoder's checkpoint, whose decoder needs an encoder."""
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        if any("encoder.layers." in name for name in info["unexpected_keys"]):
            raise ValueError(
                f"{args[0] if args else 'the checkpoint'} is an encoder-decoder, not a {cls.__name__}: load it with "
                "AutoModelForSeq2SeqLM"
            )
        return (model, info) if output_loading_info else model

    @can_return_tuple
    @auto_docstring(
        custom_intro="""
        Ids (B, T) → logits (B, T, V), only the last `logits_to_keep` positions if it is not 0.

        `labels` are the input ids themselves: they are shifted here, as in every causal model of transformers. With
        labels, an adaptive softmax computes the loss in each label's band, and no logits: they are `None`.
        """
    )
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithCrossAttentions:
        if kwargs.pop("encoder_hidden_states", None) is not None:
            raise ValueError(
                f"encoder_hidden_states is given, but {type(self).__name__} has no cross-attention: use a model for "
                "conditional generation"
            )
        if labels is not None:
            use_cache = False  # the cache is not returned, and would join sentences that are packed in one row
        outputs = self.decoder(
            input_ids, attention_mask, position_ids=position_ids, past_key_values=past_key_values,
            inputs_embeds=inputs_embeds, use_cache=use_cache, **kwargs,
        )  # fmt: skip
        states, loss, logits = self.scale(outputs.last_hidden_state), None, None
        if labels is not None and isinstance(self.lm_head, AdaptiveOutput):
            shifted = kwargs.get("shift_labels")  # of a sequence that is split over several devices
            pair = (states[:, :-1], labels[:, 1:]) if shifted is None else (states, shifted)
            loss = self.lm_head.loss(*pair, kwargs.get("num_items_in_batch"))
        else:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(states[:, kept])
        if labels is not None and loss is None:
            loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1], **kwargs)
        return CausalLMOutputWithCrossAttentions(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states, attentions=outputs.attentions,
        )  # fmt: skip
