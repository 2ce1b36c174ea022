"""Configuration of Subformer (Reid et al. 2021): sandwich sharing and self-attentive factorized embeddings."""

from typing import ClassVar

from .configuration_lightformer import FactorizedConfig, check_at_least, check_heads, check_one_of, strict

SHARINGS = ("sandwich", "all", "all_independent_ffn", "all_except_last", "every_2", "none")


def default_heads(width: int) -> int:
    """Heads of SAFE and of sandwich self-attention: 64 wide (128 above a width of 1024, 80 at 640), otherwise 10."""
    head_dim = 80 if width == 640 else 128 if width > 1024 else 64
    return width // head_dim if width % head_dim == 0 else 10


@strict
class SubformerConfig(FactorizedConfig):
    r"""Every shape of a Subformer follows from these fields and those of `FactorizedConfig`.

    Symbols of the paper: d_m is `d_model`, d_s `sandwich_dim`, d_e `embedding_dim`, L the layers of a stack.

    Args:
        ffn_dim: inner width of the feed-forward networks at d_m.
        sharing: which depths share a layer (§2.2, Table 2). LayerNorms are always private to each depth.
            `sandwich`: depths 2 to L−1, at width d_s. `all`: all of them. `all_independent_ffn`: all of them, but each
            depth has its own feed-forward network. `all_except_last`: depths 1 to L−1. `every_2`: pairs. `none`.
        sandwich_dim, sandwich_ffn_dim: d_s and the inner width there; `None` means d_m and `ffn_dim`. Where d_s is not
            d_m, projections lead up and down, and cross-attention stays at d_m (Appendix A).
        sandwich_attention_heads: heads of sandwich self-attention; `None` means heads of width 64 (128 where d_s is
            above 1024, 80 at 640), or 10 where that does not divide d_s.
        embedding: `safe`: a table of width d_e under a small self-attention layer (§2.1). `linear`: a table of width
            d_e under a linear layer. `full`: a table of width d_m. `adaptive`: adaptive input and softmax, for causal
            language models (Baevski and Auli 2019).
        embedding_dim: d_e; `None` means d_m/2 for `safe` and `linear`. The other two are d_m wide.
        embedding_inner_dim: with `linear`, inner width of two linear layers in place of one ("2-Layer Linear", Table
            1). The paper prints no activation between the two, and the model has none. `None`: one layer.
        output_inner_dim: inner width of a two-layer MLP with ReLU, d_m to d_e, before the output layer (Appendix A).
            `None`: one linear layer, as in the released code.
        embedding_attention_heads: heads of SAFE; `None` as `sandwich_attention_heads`.
        decoder_embedding_scale: factor of the decoder's token vectors; `None`: with `scale_embedding` the
            square root of their width, as in the encoder. The paper's released code has √d_m.
        projection_dropout: in the projections up and down.
        normalize_before: LayerNorm before each sublayer rather than after it. `None`: as in the paper, after it in an
            encoder-decoder, before it in a causal language model.

    Raises:
        ValueError: fields that contradict each other; the message names the field, its value and the expected one.
    """

    model_type = "subformer"
    auto_classes = {  # noqa: RUF012
        "AutoConfig": "configuration_subformer.SubformerConfig",
        "AutoModel": "modeling_subformer.SubformerModel",
        "AutoModelForSeq2SeqLM": "modeling_subformer.SubformerForConditionalGeneration",
        "AutoModelForCausalLM": "modeling_subformer.SubformerForCausalLM",
    }

    embeddings: ClassVar[tuple[str, ...]] = ("safe", "linear", "full", "adaptive")

    ffn_dim: int = 2048
    sharing: str = "sandwich"
    sandwich_dim: int | None = None
    sandwich_ffn_dim: int | None = None
    sandwich_attention_heads: int | None = None
    embedding: str = "safe"
    embedding_dim: int | None = None
    embedding_inner_dim: int | None = None
    output_inner_dim: int | None = None
    embedding_attention_heads: int | None = None
    decoder_embedding_scale: float | int | None = None
    projection_dropout: float | int = 0.05
    normalize_before: bool | None = None

    def set_defaults(self) -> None:
        super().set_defaults()
        own = {
            "sandwich_dim": self.d_model,
            "sandwich_ffn_dim": self.ffn_dim,
            "embedding_dim": self.d_model // (2 if self.is_factorized else 1),
        }
        for field, value in own.items():
            if getattr(self, field) is None:
                setattr(self, field, value)
        if self.sandwich_attention_heads is None:
            self.sandwich_attention_heads = default_heads(self.sandwich_dim)
        if self.embedding_attention_heads is None and self.embedding == "safe":
            self.embedding_attention_heads = default_heads(self.embedding_dim)

    @property
    def is_factorized(self) -> bool:
        """Whether the token table is narrower than d_m."""
        return self.embedding in ("safe", "linear")

    @property
    def embedding_width(self) -> int:
        return self.embedding_dim

    @property
    def extra_cache_slots(self) -> int:  # type: ignore[override]
        """SAFE attends too, and has the slot after those of the depths."""
        return int(self.embedding == "safe")

    def check(self) -> None:
        super().check()
        check_one_of("sharing", self.sharing, SHARINGS)
        for field in ("ffn_dim", "sandwich_dim", "sandwich_ffn_dim", "embedding_dim"):
            check_at_least(field, getattr(self, field), 1)
        for stack in self.stacks:
            heads, layers = f"{stack}_attention_heads", getattr(self, f"{stack}_layers")
            check_heads(heads, getattr(self, heads), "d_model", self.d_model)
            if self.sharing in ("sandwich", "all_except_last") and layers < 3:
                raise ValueError(f"sharing={self.sharing!r} needs 3 layers or more, {stack}_layers is {layers}")
            if self.sharing == "every_2" and layers % 2:
                raise ValueError(f"sharing='every_2' needs an even number of layers, {stack}_layers is {layers}")
        if self.sharing == "sandwich":
            check_heads("sandwich_attention_heads", self.sandwich_attention_heads, "sandwich_dim", self.sandwich_dim)
        else:
            for field, there in (("sandwich_dim", self.d_model), ("sandwich_ffn_dim", self.ffn_dim)):
                if getattr(self, field) != there:
                    raise ValueError(
                        f"{field} is {getattr(self, field)}, but sharing={self.sharing!r} has no sandwich: leave it "
                        f"None (that is {there} here), or take sharing='sandwich'"
                    )
        if self.embedding in ("full", "adaptive") and self.embedding_dim != self.d_model:
            raise ValueError(
                f"embedding_dim is {self.embedding_dim}, but embedding={self.embedding!r} is d_model wide: leave it "
                f"None (that is {self.d_model} here), or take embedding='safe' or 'linear'"
            )
        inner = {"embedding_inner_dim": ("linear",), "output_inner_dim": ("safe", "linear")}
        for field, embeddings in inner.items():
            if (width := getattr(self, field)) is not None:
                check_at_least(field, width, 1)
                if self.embedding not in embeddings:
                    raise ValueError(
                        f"{field} is {width}, but embedding={self.embedding!r} has no such projection: leave it None, "
                        f"or take embedding={' or '.join(map(repr, embeddings))}"
                    )
        if self.embedding == "safe":
            check_heads(
                "embedding_attention_heads", self.embedding_attention_heads, "embedding_dim", self.embedding_dim
            )
