"""Marian: the opus-mt models (Tiedemann and Thottingal 2020)."""

from . import POSITION_TABLES, Family, register_family


@register_family("marian")
class Marian(Family):
    """Post-norm, sinusoidal positions: a LightFormer's defaults."""

    architectures = ("MarianMTModel",)
    ignored = POSITION_TABLES
