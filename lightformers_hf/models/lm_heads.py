"""What every model with a head does alike, whatever its architecture: outputs, losses, ties, resizing.

A head's class lists `GenerationMixin` itself as a base, because transformers looks for it there.
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
    SequenceClassifierOutput,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import can_return_tuple

from .embeddings import AdaptiveEmbedding, AdaptiveOutput, adaptive_ties
from .matrices import make_output, module_rank, table_parameters, warn_of_patterns
from .stacks import make_table


def shift_right(labels: torch.Tensor, pad_token_id: int | None, decoder_start_token_id: int | None) -> torch.Tensor:
    """Decoder inputs for teacher forcing: the labels one step later, behind the start token. (B, T) → (B, T).

    Raises:
        ValueError: one of the tokens is `None`.
    """
    for field, value in {"pad_token_id": pad_token_id, "decoder_start_token_id": decoder_start_token_id}.items():
        if value is None:
            raise ValueError(f"{field} is None in the configuration: labels need it to become decoder inputs")
    shifted = labels.new_full(labels.shape, decoder_start_token_id)
    shifted[:, 1:] = labels[:, :-1]
    return shifted.masked_fill(shifted == -100, pad_token_id)


def encoder_decoder_ties(model: PreTrainedModel) -> dict[str, str]:
    """{tied parameter: stored parameter} of a base model whose two stacks read the one table `shared`."""
    if not model.config.share_encoder_decoder_embeddings:
        return {}
    names = table_parameters(model.shared)
    return {f"{stack}.embed_tokens.{name}": f"shared.{name}" for stack in ("encoder", "decoder") for name in names}


class ProjectedOutput(nn.Module):
    """Output layer of a table of width w: logits = output(projection(h)). Shapes: (…, d) → (…, w) → (…, V)."""

    def __init__(self, projection: nn.Module, output: nn.Module):
        super().__init__()
        self.projection, self.output = projection, output

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.output(self.projection(hidden_states))


class Vocabulary:
    """The token table of any model: a low-rank one keeps its basis when the vocabulary changes its size."""

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Resize the one vocabulary of the model. Arguments and result: see `PreTrainedModel`.

        Raises `ValueError` where encoder and decoder have vocabularies of their own.
        """
        if new_num_tokens is None and pad_to_multiple_of is None:
            return self.get_input_embeddings()
        if isinstance(self.get_input_embeddings(), AdaptiveEmbedding):
            raise ValueError(
                "an adaptive embedding (embedding='adaptive') can't be resized: its bands follow the vocabulary's "
                "frequencies"
            )
        if self.config.is_encoder_decoder and not self.config.share_encoder_decoder_embeddings:
            raise ValueError(
                "this model has separate source and target vocabularies "
                "(share_encoder_decoder_embeddings=False); resizing one of them is not supported"
            )
        table = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        self.config.decoder_vocab_size = self.config.vocab_size
        return table


class EncoderDecoder(Vocabulary):
    """An encoder-decoder without a head: `encoder`, `decoder` and, where they read one token table, `shared`."""

    def add_stacks(self, encoder_class: type[nn.Module], decoder_class: type[nn.Module]) -> None:
        """Build both stacks from the configuration. Raises `ValueError` where it is that of a single stack."""
        config = self.config
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
        if config.share_encoder_decoder_embeddings:
            self.shared = make_table(config, "encoder")
        self.encoder = encoder_class(config)
        self.decoder = decoder_class(config)
        self._tied_weights_keys = encoder_decoder_ties(self)
        warn_of_patterns(self, config)

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.embed_tokens = value
        if self.config.share_encoder_decoder_embeddings:
            self.shared = value
            self.decoder.embed_tokens = value

    @can_return_tuple
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
        **kwargs: Any,
    ) -> Seq2SeqModelOutput:
        """Source ids (B, S) and target ids (B, T) → hidden states of the decoder (B, T, d).

        `encoder_outputs` replaces the encoder's pass. `inputs_embeds` are unscaled: what `get_input_embeddings()`
        returns for ids.
        """
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            raise ValueError(
                "decoder_input_ids is missing: give decoder_input_ids, or labels to a model with a head. A Trainer "
                "with label smoothing passes no labels: its collator must be "
                "DataCollatorForSeq2Seq(tokenizer, model=model), which makes decoder_input_ids."
            )
        if encoder_outputs is None:
            encoded = self.encoder(input_ids, attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        elif isinstance(encoder_outputs, BaseModelOutput):
            encoded = encoder_outputs
        else:
            encoded = BaseModelOutput(*encoder_outputs)
        decoder_outputs = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            encoder_hidden_states=encoded.last_hidden_state,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            past_key_values=decoder_outputs.past_key_values,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
        )


class LanguageModelHead(Vocabulary):
    """Access to an output layer `lm_head` that may be a pair of factors: the inner V-wide layer is what is resized."""

    def add_output(self, table: nn.Module, table_name: str, projection: nn.Module | None) -> None:
        """Build `lm_head`: in the form of the token table, and tied to it, if `tie_word_embeddings`, else of its own.

        `projection` brings the states to the table's width, where that is not the model's.
        """
        config, tie = self.config, self.config.tie_word_embeddings
        self.output_scale = config.d_model**-0.5 if config.scale_output else None
        if isinstance(table, AdaptiveEmbedding):
            bands = (config.vocab_size, config.d_model, config.adaptive_cutoffs, config.adaptive_factor)
            self.lm_head = AdaptiveOutput(*bands)
            self._tied_weights_keys = adaptive_ties(table_name, len(table.tables)) if tie else {}
            self._keep_whole(table, self.lm_head)
            return
        name = "lm_head" if projection is None else "lm_head.output"
        rank = module_rank(config, table_name.removeprefix("model.") if tie else name, "embedding")
        output = make_output(config.embedding_width, config.decoder_vocab_size, rank, name=name)
        self.lm_head = output if projection is None else ProjectedOutput(projection, output)
        if rank is not None:
            self._keep_whole(output)
        parameters = table_parameters(table) if tie else {}
        self._tied_weights_keys = {f"{name}.{there}": f"{table_name}.{here}" for here, there in parameters.items()}

    def _keep_whole(self, *modules: nn.Module) -> None:
        """Have `device_map="auto"` put each module on one device: accelerate cannot part tied tensors within it."""
        self._no_split_modules = {*self._no_split_modules, *(type(module).__name__ for module in modules)}

    def before_output(self, states: torch.Tensor) -> torch.Tensor:
        """What the output layer takes of the decoder's states: (…, d) → (…, d)."""
        return states if self.output_scale is None else states * self.output_scale

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As the base class. The configuration says that the output layer is tied, if it is.

        peft says otherwise when it merges adapters, where the output layer is tied to the table of the decoder alone.
        """
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
        value.kind = "embedding"  # a resized one is a new one
        if not hasattr(self.lm_head, "output"):
            self.lm_head = value
            return
        layer = self.lm_head
        while hasattr(layer.output, "output"):
            layer = layer.output
        layer.output = value


class ConditionalGenerationHead(LanguageModelHead):
    """An encoder-decoder `model`, an output layer `lm_head`, and maybe a fixed bias `final_logits_bias` (Marian)."""

    def add_head(self, model: nn.Module, projection: nn.Module | None = None) -> None:
        """Put the output layer on `model`."""
        self.loss_type = "ForMaskedLM"  # decoder inputs are shifted already; the default would shift the labels again
        self.register_buffer("final_logits_bias", None)
        self.model = model
        name = "shared" if self.config.share_encoder_decoder_embeddings else "decoder.embed_tokens"
        self.add_output(model.decoder.embed_tokens, f"model.{name}", projection)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.set_input_embeddings(value)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """As `Vocabulary` does; the output bias goes along, with zeros for new tokens."""
        table = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        if self.final_logits_bias is not None:
            missing = self.config.decoder_vocab_size - self.final_logits_bias.shape[-1]
            self.final_logits_bias = nn.functional.pad(self.final_logits_bias, (0, missing))
        return table

    def logits_of(self, states: torch.Tensor) -> torch.Tensor:
        """What the output layer makes of the decoder's states: (…, d) → (…, V)."""
        logits = self.lm_head(self.before_output(states))
        return logits if self.final_logits_bias is None else logits + self.final_logits_bias.to(logits.device)

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """What `DataCollatorForSeq2Seq(tokenizer, model=model)` asks for: see `shift_right`."""
        return shift_right(labels, self.config.pad_token_id, self.config.decoder_start_token_id)

    @can_return_tuple
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
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Source ids (B, S) and target ids (B, T) → logits (B, T, V).

        With `labels` (B, T; −100 is ignored) also the mean cross-entropy, over `num_items_in_batch` where the trainer
        passes it; missing decoder inputs are then the shifted labels.
        """
        if labels is not None:
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs: Seq2SeqModelOutput = self.model(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.logits_of(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1], **kwargs)
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )


class CausalLMHead(LanguageModelHead):
    """A `decoder` without cross-attention, and an output layer `lm_head`."""

    def add_head(self, decoder: nn.Module, projection: nn.Module | None = None) -> None:
        """Put the output layer on `decoder`."""
        self.decoder = decoder
        self.add_output(decoder.embed_tokens, "decoder.embed_tokens", projection)

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.decoder.embed_tokens = value

    def get_decoder(self) -> nn.Module:
        return self.decoder

    @can_return_tuple
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
        **kwargs: Any,
    ) -> CausalLMOutputWithCrossAttentions:
        """Ids (B, T) → logits (B, T, V), only the last `logits_to_keep` positions where it is not 0.

        `labels` are the input ids themselves: they are shifted here, as in every causal model of transformers. With
        labels, an adaptive softmax computes the loss in each label's band, and no logits: they are `None`.
        """
        if labels is not None:
            use_cache = False  # which nobody reads, and with which sentences packed in one row would not be kept apart
        outputs = self.decoder(
            input_ids,
            attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        states, loss, logits = self.before_output(outputs.last_hidden_state), None, None
        if labels is not None and isinstance(self.lm_head, AdaptiveOutput):
            loss = self.lm_head.loss(states[:, :-1], labels[:, 1:], kwargs.get("num_items_in_batch"))
        else:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(states[:, kept])
        if labels is not None and loss is None:
            loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1], **kwargs)
        return CausalLMOutputWithCrossAttentions(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class SequenceClassificationHead(Vocabulary):
    """An `encoder`, the mean of its states over the tokens, and a linear `classifier` above it."""

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Ids (B, S) → logits (B, num_labels); with `labels` (B) also the loss that `config.problem_type` asks for."""
        outputs = self.encoder(input_ids, attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        states = outputs.last_hidden_state
        if attention_mask is None:
            pooled = states.mean(dim=1)
        else:
            kept = attention_mask.unsqueeze(-1).to(states.dtype)
            pooled = (states * kept).sum(dim=1) / kept.sum(dim=1).clamp(min=1)
        logits = self.classifier(self.dropout(pooled))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )
