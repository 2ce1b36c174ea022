"""M2M100 (Fan et al. 2021) and NLLB (NLLB Team 2022)."""

from . import POSITION_TABLES, Family, register_family


@register_family("m2m_100")
class M2M100(Family):
    """Pre-norm, sines and cosines with the spacing of tensor2tensor."""

    architectures = ("M2M100ForConditionalGeneration",)
    fields = {  # noqa: RUF012
        "normalize_before": True,
        "final_layer_norm": True,
        "position_embedding_type": "sinusoidal_half",
        "position_offset": 2,
    }
    ignored = POSITION_TABLES
