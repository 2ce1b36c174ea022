"""BART (Lewis et al. 2020) and mBART (Liu et al. 2020)."""

from . import Family, register_family

LEARNED_POSITIONS = {"position_embedding_type": "learned", "position_offset": 2}


@register_family("bart")
class Bart(Family):
    """Post-norm, learned positions, a LayerNorm on the embeddings."""

    architectures = ("BartForConditionalGeneration", "BartModel")
    fields = LEARNED_POSITIONS | {"layernorm_embedding": True}


@register_family("mbart")
class MBart(Family):
    """BART with its LayerNorms before each sublayer."""

    architectures = ("MBartForConditionalGeneration",)
    fields = Bart.fields | {"normalize_before": True, "final_layer_norm": True}
