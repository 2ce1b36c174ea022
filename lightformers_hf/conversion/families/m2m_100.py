"""M2M100 (Fan et al. 2021) and NLLB (NLLB Team 2022)."""

from transformers import PreTrainedConfig

from ...models.configuration_lightformer import FactorizedConfig
from . import POSITION_TABLES, Family, register_family


@register_family("m2m_100")
class M2M100(Family):
    """Pre-norm, sines and cosines with the spacing of tensor2tensor."""

    architectures = ("M2M100ForConditionalGeneration",)
    fields = {  # noqa: RUF012
        "normalize_before": True,
        "final_layer_norm": True,
        "position_embedding_type": "sinusoidal_half",
    }
    ignored = POSITION_TABLES

    @classmethod
    def own_config(cls, config: PreTrainedConfig) -> FactorizedConfig:
        """Positions are counted from the one behind the padding token's id."""
        own = super().own_config(config)
        own.position_offset = config.pad_token_id + 1
        return own
