"""Configuration of PartialFormer (Zheng et al. 2024): small gated feed-forward networks inside attention heads."""

from .configuration_lightformer import (
    FactorizedConfig,
    check_at_least,
    check_groups,
    check_heads,
    check_one_of,
    strict,
)

STYLES = ("partial", "vanilla")
GATE_ACTIVATIONS = ("relu", "sigmoid", "tanh")
GLOBAL_ATTENTIONS = ("content", "relative", "none")
FFN_IN = {"encoder_ffn_in": ("self", "none"), "decoder_ffn_in": ("both", "cross", "self", "none")}


@strict
class PartialFormerConfig(FactorizedConfig):
    r"""Every shape of a PartialFormer follows from these fields and those of `FactorizedConfig`.

    Symbols of the paper: d is `d_model`, d_k `head_dim`, H the heads of a stack, ρ a stack's `ffn_expansion`.

    Args:
        head_dim: d_k, width of a head, free of d / H.
        encoder_attention_heads, decoder_attention_heads: H.
        head_scaling: queries and keys have `base_attention_heads` heads, whose attention maps a small network expands
            to H (§3.4). Without it they have H heads, and H·d_k must be d.
        base_attention_heads: heads of queries and keys under head scaling, and of plain `vanilla` layers.
        encoder_ffn_expansion, decoder_ffn_expansion: ρ, inner width of the heads' feed-forward network over d_k.
        encoder_ffn_in, decoder_ffn_in: which attention has the feed-forward network and the gate (Tables 7 and 15):
            `self` or `none` in the encoder, `both`, `cross`, `self` or `none` in the decoder.
        ffn_dropout: behind the second layer of that network; the released language model has it, the paper does not.
        ffn_residual: a residual connection around the heads' feed-forward network.
        ffn_glu: a gated linear unit in it (Table 18; Swi-GLU: `activation_function="silu"`).
        gate_activation: σ of the gate, `relu`, `sigmoid` or `tanh` (Eq. 5, Table 7).
        global_attention: A^G of residual-like attention (Eq. 6): from the `content` of the embeddings, from content
            and `relative` positions (Appendix F; Shaw et al. 2018), or `none`.
        max_relative_position: distance from which on relative positions are the same.
        encoder_style, decoder_style: `partial` layers, or `vanilla` ones: attention and a feed-forward network of
            width 4·d (Table 7).
        vanilla_head_scaling: vanilla layers have H heads of width d_k by head scaling (Figure 3b), instead of
            `base_attention_heads` heads of width d / `base_attention_heads`.
        encoder_groups, decoder_groups: number of stored layers, in contiguous groups; `None` means one a depth.

    Raises:
        ValueError: fields that contradict each other; the message names the field, its value and the expected one.
    """

    model_type = "partialformer"
    auto_classes = {  # noqa: RUF012
        "AutoConfig": "configuration_partialformer.PartialFormerConfig",
        "AutoModel": "modeling_partialformer.PartialFormerModel",
        "AutoModelForSeq2SeqLM": "modeling_partialformer.PartialFormerForConditionalGeneration",
        "AutoModelForCausalLM": "modeling_partialformer.PartialFormerForCausalLM",
    }

    head_dim: int = 64
    head_scaling: bool = True
    base_attention_heads: int = 8
    encoder_ffn_expansion: int = 4
    decoder_ffn_expansion: int = 2
    encoder_ffn_in: str = "self"
    decoder_ffn_in: str = "both"
    ffn_dropout: float | int = 0.0
    ffn_residual: bool = True
    ffn_glu: bool = False
    gate_activation: str = "relu"
    global_attention: str = "content"
    max_relative_position: int = 16
    encoder_style: str = "partial"
    decoder_style: str = "partial"
    vanilla_head_scaling: bool = False
    encoder_groups: int | None = None
    decoder_groups: int | None = None

    def has_global_attention(self, stack: str) -> bool:
        """Whether the `encoder` or `decoder` has A^G: vanilla layers have none."""
        return self.global_attention != "none" and getattr(self, f"{stack}_style") == "partial"

    @property
    def extra_cache_slots(self) -> int:  # type: ignore[override]
        """The keys of A^G have the slot after those of the depths."""
        return int(self.has_global_attention("decoder"))

    def check(self) -> None:
        super().check()
        check_one_of("gate_activation", self.gate_activation, GATE_ACTIVATIONS)
        check_one_of("global_attention", self.global_attention, GLOBAL_ATTENTIONS)
        for field, allowed in FFN_IN.items():
            check_one_of(field, getattr(self, field), allowed)
        for field in ("head_dim", "base_attention_heads", "max_relative_position"):
            check_at_least(field, getattr(self, field), 1)
        styles = [getattr(self, f"{stack}_style") for stack in self.stacks]
        for stack, style in zip(self.stacks, styles, strict=True):
            check_one_of(f"{stack}_style", style, STYLES)
            check_groups(f"{stack}_groups", getattr(self, f"{stack}_groups"), getattr(self, f"{stack}_layers"))
            heads = getattr(self, f"{stack}_attention_heads")
            check_at_least(f"{stack}_attention_heads", heads, 1)
            check_at_least(f"{stack}_ffn_expansion", getattr(self, f"{stack}_ffn_expansion"), 1)
            if style == "partial" and not self.head_scaling and heads * self.head_dim != self.d_model:
                raise ValueError(
                    f"head_scaling is False, and {stack}_attention_heads x head_dim = {heads} x {self.head_dim} = "
                    f"{heads * self.head_dim} is not d_model {self.d_model}: without head scaling they must be equal"
                )
            if style == "vanilla" and not self.vanilla_head_scaling:
                check_heads("base_attention_heads", self.base_attention_heads, "d_model", self.d_model)
        if self.vanilla_head_scaling and "vanilla" not in styles:
            raise ValueError("vanilla_head_scaling is True, but neither encoder_style nor decoder_style is 'vanilla'")
