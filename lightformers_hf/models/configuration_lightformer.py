"""Configuration of LightFormer (Lu et al. 2023): a Transformer of low-rank matrices and shared layers."""

import re

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from .layer_stack import check_groups

# Every Auto class finds its model in the code that travels with a checkpoint, whichever head was saved.
AUTO_MAP = {
    "AutoConfig": "configuration_lightformer.LightFormerConfig",
    "AutoModel": "modeling_lightformer.LightFormerModel",
    "AutoModelForSeq2SeqLM": "modeling_lightformer.LightFormerForConditionalGeneration",
    "AutoModelForCausalLM": "modeling_lightformer.LightFormerForCausalLM",
    "AutoModelForSequenceClassification": "modeling_lightformer.LightFormerForSequenceClassification",
}
RANK_FIELDS = ("attention_rank", "ffn_rank", "embedding_rank", "decoder_attention_rank", "decoder_ffn_rank")
POSITION_EMBEDDING_TYPES = ("sinusoidal", "sinusoidal_half", "learned")


@strict
class LightFormerConfig(PreTrainedConfig):
    r"""Every shape of a LightFormer follows from these fields. With every rank `None` and no groups it is the
    Transformer (Vaswani et al. 2017) that the paper compares with.

    Args:
        vocab_size: V, tokens of the encoder's table, and of the decoder's where they share one.
        decoder_vocab_size: tokens of the decoder's own table; `None` means V.
        d_model: d, width of the model.
        encoder_layers, decoder_layers: depths. Causal language models use the `decoder_*` fields.
        encoder_attention_heads, decoder_attention_heads: H; must divide d.
        encoder_ffn_dim, decoder_ffn_dim: inner width of the feed-forward networks.
        encoder_groups, decoder_groups: N, number of stored layers, in contiguous groups (§3.2). `None`: one a depth.
        share_layer_norms: whether the LayerNorms of a group are shared too; else each depth has its own.
        attention_rank, ffn_rank, embedding_rank: r of every matrix of that kind; `None` means dense.
        decoder_attention_rank, decoder_ffn_rank: r of the decoder's; `None` means as the encoder's.
        rank_pattern: module name pattern → r, or `None` for dense; the first that matches decides, before the fields
            above. A pattern is a regular expression for the end of the name: `fc1`, `decoder.layers.0.fc2`.
        joint_qkv: one projection d → 3d in self-attention (Table 1 of the paper).
        attention_output_projection: whether attention has `out_proj` (Table 1 leaves it out).
        position_embedding_type: `sinusoidal` (Marian, Pegasus), `sinusoidal_half` (M2M100, NLLB) or `learned` (BART).
        position_offset: added to positions before the table is read (2 in BART and M2M100).
        max_position_embeddings: longest input, in tokens.
        normalize_before: LayerNorm before each sublayer (mBART) rather than after it (Marian, BART).
        layernorm_embedding: LayerNorm on the embeddings.
        final_layer_norm: LayerNorm after the last layer of each stack.
        scale_embedding: embeddings times √d.
        activation_function: of the feed-forward networks.
        share_encoder_decoder_embeddings: one token table for both stacks.
        tie_word_embeddings: output layer = the decoder's token table.
        embedding_dim: width of a separate word-vector table below a `Linear(embedding_dim, d)`; only for
            `LightFormerForSequenceClassification` (GloVe vectors: 300).
        init_std: standard deviation of fresh weights; factors are drawn so that their product has it. `None` means
            1/√d: Xavier's for a d×d matrix, and what gives scaled embeddings the variance of the positions.

    Raises:
        ValueError: fields that cannot go together; the message names the field, its value and what would be right.
    """

    model_type = "lightformer"
    keys_to_ignore_at_inference = ("past_key_values",)
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    }

    vocab_size: int = 32000
    decoder_vocab_size: int | None = None
    d_model: int = 512
    encoder_layers: int = 6
    decoder_layers: int = 6
    encoder_attention_heads: int = 8
    decoder_attention_heads: int = 8
    encoder_ffn_dim: int = 2048
    decoder_ffn_dim: int = 2048
    encoder_groups: int | None = None
    decoder_groups: int | None = None
    share_layer_norms: bool = True
    attention_rank: int | None = None
    ffn_rank: int | None = None
    embedding_rank: int | None = None
    decoder_attention_rank: int | None = None
    decoder_ffn_rank: int | None = None
    rank_pattern: dict[str, int | None] | None = None
    joint_qkv: bool = False
    attention_output_projection: bool = True
    position_embedding_type: str = "sinusoidal"
    position_offset: int = 0
    max_position_embeddings: int = 1024
    normalize_before: bool = False
    layernorm_embedding: bool = False
    final_layer_norm: bool = False
    scale_embedding: bool = True
    activation_function: str = "relu"
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    classifier_dropout: float | int = 0.0
    share_encoder_decoder_embeddings: bool = True
    tie_word_embeddings: bool = True
    embedding_dim: int | None = None
    init_std: float | int | None = None
    use_cache: bool = True
    is_encoder_decoder: bool = True
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 2
    forced_eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs):
        self.decoder_vocab_size = self.decoder_vocab_size or self.vocab_size
        self.rank_pattern = self.rank_pattern or {}
        self.init_std = self.d_model**-0.5 if self.init_std is None else self.init_std
        kwargs.setdefault("auto_map", dict(AUTO_MAP))
        super().__post_init__(**kwargs)
        self._check()

    def _check(self) -> None:
        for stack in ("encoder", "decoder"):
            heads = getattr(self, f"{stack}_attention_heads")
            if heads < 1 or self.d_model % heads:
                raise ValueError(f"{stack}_attention_heads is {heads}, which does not divide d_model {self.d_model}")
            check_groups(f"{stack}_groups", getattr(self, f"{stack}_groups"), getattr(self, f"{stack}_layers"))
        ranks = {field: getattr(self, field) for field in RANK_FIELDS}
        ranks |= {f"rank_pattern[{pattern!r}]": rank for pattern, rank in self.rank_pattern.items()}
        for field, rank in ranks.items():
            if rank is not None and rank < 1:
                raise ValueError(f"{field} is {rank}; a rank is at least 1, and None means dense")
        for pattern in self.rank_pattern:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"rank_pattern has {pattern!r}, which is no regular expression: {error}") from error
        if self.position_embedding_type not in POSITION_EMBEDDING_TYPES:
            raise ValueError(
                f"position_embedding_type is {self.position_embedding_type!r}; "
                f"it is one of {', '.join(POSITION_EMBEDDING_TYPES)}"
            )
        if self.activation_function not in ACT2FN:
            raise ValueError(f"activation_function is {self.activation_function!r}; transformers has {sorted(ACT2FN)}")
        if self.share_encoder_decoder_embeddings and self.decoder_vocab_size != self.vocab_size:
            raise ValueError(
                f"decoder_vocab_size is {self.decoder_vocab_size} and vocab_size {self.vocab_size}: "
                "two vocabularies need share_encoder_decoder_embeddings=False"
            )

    def rank_of_kind(self, stack: str, kind: str) -> int | None:
        """r that the fields give to `attention`, `ffn` or `embedding` matrices of the `encoder` or `decoder`."""
        rank = getattr(self, f"{kind}_rank")
        if stack == "decoder" and kind != "embedding":
            own = getattr(self, f"decoder_{kind}_rank")
            rank = rank if own is None else own
        return rank
