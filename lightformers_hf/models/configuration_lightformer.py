"""Configuration of LightFormer (Lu et al. 2023): a Transformer of low-rank matrices and shared layers."""

from huggingface_hub.dataclasses import strict

from .configuration_base import FactorizedConfig, check_heads, check_one_of
from .layer_stack import check_groups

POSITION_EMBEDDING_TYPES = ("sinusoidal", "sinusoidal_half", "learned")


@strict
class LightFormerConfig(FactorizedConfig):
    r"""Every shape of a LightFormer follows from these fields and those of `FactorizedConfig`. With every rank `None`
    and no groups it is the Transformer (Vaswani et al. 2017) that the paper compares with.

    Args:
        encoder_ffn_dim, decoder_ffn_dim: inner width of the feed-forward networks.
        encoder_groups, decoder_groups: N, number of stored layers, in contiguous groups (§3.2). `None`: one a depth.
        share_layer_norms: whether the LayerNorms of a group are shared too; else each depth has its own.
        joint_qkv: one projection d → 3d in self-attention (Table 1 of the paper).
        attention_output_projection: whether attention has `out_proj` (Table 1 leaves it out).
        position_embedding_type: `sinusoidal` (Marian, Pegasus), `sinusoidal_half` (M2M100, NLLB) or `learned` (BART).
        position_offset: added to positions before the table is read (2 in BART and M2M100).
        normalize_before: LayerNorm before each sublayer (mBART) rather than after it (Marian, BART).
        layernorm_embedding: LayerNorm on the embeddings.
        final_layer_norm: LayerNorm after the last layer of each stack.
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
    encoder_groups: int | None = None
    decoder_groups: int | None = None
    share_layer_norms: bool = True
    joint_qkv: bool = False
    attention_output_projection: bool = True
    position_embedding_type: str = "sinusoidal"
    position_offset: int = 0
    normalize_before: bool = False
    layernorm_embedding: bool = False
    final_layer_norm: bool = False
    classifier_dropout: float | int = 0.0
    embedding_dim: int | None = None

    def check(self) -> None:
        """Raise `ValueError` where fields cannot go together."""
        super().check()
        for stack in ("encoder", "decoder"):
            heads = f"{stack}_attention_heads"
            check_heads(heads, getattr(self, heads), "d_model", self.d_model)
            check_groups(f"{stack}_groups", getattr(self, f"{stack}_groups"), getattr(self, f"{stack}_layers"))
        check_one_of("position_embedding_type", self.position_embedding_type, POSITION_EMBEDDING_TYPES)
