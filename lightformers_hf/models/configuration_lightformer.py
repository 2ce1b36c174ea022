"""Configuration of LightFormer (Lu et al. 2023): a Transformer of low-rank matrices and shared layers."""

from typing import Any

from .configuration_base import FactorizedConfig, check_at_least, check_heads, check_one_of, strict
from .layer_sharing import check_groups

RELATIVE_POSITIONS = ("relative", "relative_per_layer")
POSITION_EMBEDDING_TYPES = ("sinusoidal", "sinusoidal_half", "learned", *RELATIVE_POSITIONS)
NORMALIZATIONS = ("layer_norm", "rms_norm")


@strict
class LightFormerConfig(FactorizedConfig):
    r"""Every shape of a LightFormer follows from these fields and those of `FactorizedConfig`. With every rank `None`
    and no groups it is the Transformer (Vaswani et al. 2017) that the paper compares with.

    Args:
        encoder_ffn_dim, decoder_ffn_dim: inner width of the feed-forward networks.
        ffn_dim_pattern: layer name pattern → that width, for layers that differ (`decoder.layers.0`).
        head_dim: d_k, width of a head; `None` means d_model / heads, and stays `None` where heads differ.
        head_dim_pattern: attention name pattern → d_k, for those that differ (`decoder.layers.0.encoder_attn`).
        encoder_groups, decoder_groups: N, number of stored layers, in contiguous groups (§3.2). `None`: one a depth.
        share_layer_norms: whether the LayerNorms of a group are shared too; else each depth has its own.
        joint_qkv: one projection d → 3d in self-attention (Table 1 of the paper).
        attention_output_projection: whether attention has `out_proj` (Table 1 leaves it out).
        scale_attention: scores divided by √d_k. T5's are not.
        use_bias: whether linear layers of attention and feed-forward networks add a bias. T5's do not.
        gated_ffn: networks of three matrices, fc2(activation(fc_gate(x)) · fc1(x)) (GEGLU, Shazeer 2020; T5 v1.1).
        position_embedding_type: `sinusoidal` (Marian, Pegasus), `sinusoidal_half` (M2M100, NLLB), `learned` (BART), or
            biases of attention by distance, `relative` ones for all layers of a stack (T5) or `relative_per_layer`
            (UMT5): these know no longest input (max_position_embeddings is `None` then), and are for eager attention
            and SDPA.
        relative_buckets, relative_furthest: how many biases a head has, and the distance from which all are alike.
        position_offset: added to positions before the table is read (2 in BART and M2M100).
        normalization: `layer_norm`, or `rms_norm` without mean and bias (T5); everywhere.
        norm_epsilon: ε, added to the variance.
        normalize_before: LayerNorm before each sublayer (mBART) rather than after it (Marian, BART).
        layernorm_embedding: LayerNorm on the embeddings.
        final_layer_norm: LayerNorm after the last layer of each stack.
        classifier_dropout: before the classifier of `LightFormerForSequenceClassification`, in training.
        embedding_dim: width of a separate word-vector table below a `Linear(embedding_dim, d)`; only for
            `LightFormerForSequenceClassification` (GloVe vectors: 300).

    Raises:
        ValueError: fields that cannot go together; the message names the field, its value and what would be right.
    """

    model_type = "lightformer"
    # Every Auto class finds its model in the code that travels with a checkpoint, whichever head was saved.
    auto_classes = {  # noqa: RUF012
        "AutoConfig": "configuration_lightformer.LightFormerConfig",
        "AutoModel": "modeling_lightformer.LightFormerModel",
        "AutoModelForSeq2SeqLM": "modeling_lightformer.LightFormerForConditionalGeneration",
        "AutoModelForCausalLM": "modeling_lightformer.LightFormerForCausalLM",
        "AutoModelForSequenceClassification": "modeling_lightformer.LightFormerForSequenceClassification",
    }

    encoder_ffn_dim: int = 2048
    decoder_ffn_dim: int = 2048
    ffn_dim_pattern: dict[str, int] | None = None
    head_dim: int | None = None
    head_dim_pattern: dict[str, int] | None = None
    encoder_groups: int | None = None
    decoder_groups: int | None = None
    share_layer_norms: bool = True
    joint_qkv: bool = False
    attention_output_projection: bool = True
    scale_attention: bool = True
    use_bias: bool = True
    gated_ffn: bool = False
    position_embedding_type: str = "sinusoidal"
    position_offset: int = 0
    relative_buckets: int = 32
    relative_furthest: int = 128
    normalization: str = "layer_norm"
    norm_epsilon: float = 1e-5
    normalize_before: bool = False
    layernorm_embedding: bool = False
    final_layer_norm: bool = False
    classifier_dropout: float | int = 0.0
    embedding_dim: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if (rank := kwargs.pop("group_residual_rank", None)) is not None:  # version 0.1 stores it
            raise ValueError(
                f"group_residual_rank is {rank}: only version 0.1 of lightformers_hf has residuals of depths. "
                "Load the checkpoint with `pip install lightformers_hf==0.1.*`, or convert its teacher again"
            )
        if self.position_embedding_type in RELATIVE_POSITIONS:
            self.max_position_embeddings = None
        super().__post_init__(**kwargs)

    def set_defaults(self) -> None:
        """Set `head_dim`, which tools read (caches, servers), if all heads have one width."""
        super().set_defaults()
        heads = self.encoder_attention_heads
        are_alike = not self.head_dim_pattern and heads == self.decoder_attention_heads
        if self.head_dim is None and are_alike and heads > 0 and self.d_model % heads == 0:
            self.head_dim = self.d_model // heads

    @property
    def needs_positions(self) -> bool:
        """Relative positions belong to attention."""
        return self.position_embedding_type not in RELATIVE_POSITIONS

    def check(self) -> None:
        """Raise `ValueError` where fields cannot go together."""
        super().check()
        check_at_least("head_dim", self.head_dim, 1)
        for field in ("ffn_dim_pattern", "head_dim_pattern"):
            for pattern, width in getattr(self, field).items():
                check_at_least(f"{field}[{pattern!r}]", width, 1)
        for stack in ("encoder", "decoder"):
            heads = f"{stack}_attention_heads"
            if self.head_dim is None:
                check_heads(heads, getattr(self, heads), "d_model", self.d_model)
            check_at_least(heads, getattr(self, heads), 1)
            inner = {self.head_dim or self.d_model // getattr(self, heads), *self.head_dim_pattern.values()}
            if not self.attention_output_projection and inner != {self.d_model // getattr(self, heads)}:
                raise ValueError(
                    f"head_dim is {self.head_dim} and head_dim_pattern {self.head_dim_pattern}; heads that together "
                    "are not d_model wide need attention_output_projection=True"
                )
            check_groups(f"{stack}_groups", getattr(self, f"{stack}_groups"), getattr(self, f"{stack}_layers"))
        check_one_of("position_embedding_type", self.position_embedding_type, POSITION_EMBEDDING_TYPES)
        check_one_of("normalization", self.normalization, NORMALIZATIONS)
        check_at_least("norm_epsilon", self.norm_epsilon, 0)
        check_at_least("relative_buckets", self.relative_buckets, 4)
        if self.relative_furthest <= self.relative_buckets // 2:
            raise ValueError(
                f"relative_furthest is {self.relative_furthest}: with {self.relative_buckets} relative_buckets, half "
                f"of them for one distance each, it is at least {self.relative_buckets // 2 + 1}"
            )
