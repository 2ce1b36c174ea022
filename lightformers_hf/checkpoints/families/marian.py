"""Marian (Tiedemann and Thottingal 2020) and the families with its names: BART, mBART, Pegasus, M2M100 and NLLB."""

from transformers import PreTrainedConfig

from ...models.configuration_lightformer import FactorizedConfig
from . import Family, register_family

PRE_NORM = {"normalize_before": True, "final_layer_norm": True}
LEARNED = {"position_embedding_type": "learned", "position_offset": 2, "layernorm_embedding": True}


@register_family("marian")
class Marian(Family):
    """Post-norm, sinusoidal positions unless trained ones are stored: a LightFormer's defaults."""

    architectures, tokenizers, translates = ("MarianMTModel",), ("MarianTokenizer",), True
    reads_positions = True


@register_family("pegasus")
class Pegasus(Family):
    """Pegasus (Zhang et al. 2020): pre-norm, sinusoidal positions unless trained ones are stored."""

    architectures = ("PegasusForConditionalGeneration",)
    fields = PRE_NORM
    reads_positions = True


@register_family("bart")
class Bart(Family):
    """BART (Lewis et al. 2020): post-norm, learned positions, a LayerNorm on the embeddings."""

    architectures = ("BartForConditionalGeneration", "BartModel")
    fields = LEARNED


@register_family("mbart")
class MBart(Family):
    """mBART (Liu et al. 2020): BART with its LayerNorms before each sublayer."""

    architectures = ("MBartForConditionalGeneration",)
    tokenizers = ("MBartTokenizer", "MBart50Tokenizer")
    fields = LEARNED | PRE_NORM


@register_family("m2m_100")
class M2M100(Family):
    """M2M100 (Fan et al. 2021) and NLLB (NLLB Team 2022): pre-norm, sines and cosines as in tensor2tensor."""

    architectures = ("M2M100ForConditionalGeneration",)
    tokenizers, translates = ("M2M100Tokenizer", "NllbTokenizer"), True
    fields = PRE_NORM | {"position_embedding_type": "sinusoidal_half"}

    @classmethod
    def own_config(cls, config: PreTrainedConfig) -> FactorizedConfig:
        """Positions are counted from the one behind the padding token's id."""
        own = super().own_config(config)
        own.position_offset = config.pad_token_id + 1
        return own
