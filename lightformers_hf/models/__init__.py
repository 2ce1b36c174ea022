"""The architectures. Importing this package registers each of them with transformers' Auto classes.

The files of this folder travel to the Hub beside a checkpoint: they import torch, transformers and each other, nothing
else of the package.
"""

import transformers

from .configuration_lightformer import AUTO_MAP, LightFormerConfig
from .modeling_lightformer import (
    LightFormerForCausalLM,
    LightFormerForConditionalGeneration,
    LightFormerForSequenceClassification,
    LightFormerModel,
)

__all__ = [
    "LightFormerConfig",
    "LightFormerForCausalLM",
    "LightFormerForConditionalGeneration",
    "LightFormerForSequenceClassification",
    "LightFormerModel",
]


def _register(config_class: type, auto_map: dict[str, str]) -> None:
    """Tell every Auto class of `auto_map` about its class, and let `save_pretrained` copy the class's code along."""
    transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    config_class.register_for_auto_class()
    for auto_name, reference in auto_map.items():
        if auto_name != "AutoConfig":
            model_class = globals()[reference.split(".")[-1]]
            getattr(transformers, auto_name).register(config_class, model_class, exist_ok=True)
            model_class.register_for_auto_class(auto_name)


_register(LightFormerConfig, AUTO_MAP)
