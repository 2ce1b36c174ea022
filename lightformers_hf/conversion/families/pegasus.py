"""Pegasus (Zhang et al. 2020)."""

from . import POSITION_TABLES, Family, register_family


@register_family("pegasus")
class Pegasus(Family):
    """Pre-norm, sinusoidal positions."""

    architectures = ("PegasusForConditionalGeneration",)
    fields = {"normalize_before": True, "final_layer_norm": True}  # noqa: RUF012
    ignored = POSITION_TABLES
