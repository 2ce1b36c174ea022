"""The architectures. Importing this package registers each of them with transformers' Auto classes.

The files of this folder travel to the Hub beside a checkpoint: they import torch, transformers and each other, nothing
else of the package.
"""

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .configuration_lightformer import LightFormerConfig
from .configuration_lightformer_speech import LightFormerSpeechConfig
from .configuration_partialformer import PartialFormerConfig
from .configuration_subformer import SubformerConfig
from .modeling_lightformer import (
    LightFormerForCausalLM,
    LightFormerForConditionalGeneration,
    LightFormerForSequenceClassification,
    LightFormerModel,
)
from .modeling_lightformer_speech import LightFormerForSpeechSeq2Seq, LightFormerSpeechModel
from .modeling_partialformer import PartialFormerForCausalLM, PartialFormerForConditionalGeneration, PartialFormerModel
from .modeling_subformer import SubformerForCausalLM, SubformerForConditionalGeneration, SubformerModel

__all__ = [
    "LightFormerConfig",
    "LightFormerForCausalLM",
    "LightFormerForConditionalGeneration",
    "LightFormerForSequenceClassification",
    "LightFormerForSpeechSeq2Seq",
    "LightFormerModel",
    "LightFormerSpeechConfig",
    "LightFormerSpeechModel",
    "PartialFormerConfig",
    "PartialFormerForCausalLM",
    "PartialFormerForConditionalGeneration",
    "PartialFormerModel",
    "SubformerConfig",
    "SubformerForCausalLM",
    "SubformerForConditionalGeneration",
    "SubformerModel",
]


def _register(config_class: type) -> None:
    """Register the classes with the Auto classes, and let `save_pretrained` copy the class's code along."""
    transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    config_class.register_for_auto_class()
    for auto_name, reference in config_class.auto_classes.items():
        if auto_name != "AutoConfig":
            model_class = globals()[reference.split(".")[-1]]
            getattr(transformers, auto_name).register(config_class, model_class, exist_ok=True)
            model_class.register_for_auto_class(auto_name)
            if auto_name == "AutoModelForCausalLM":  # Trainer shifts labels of this class name where it smooths them
                MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config_class.model_type] = model_class.__name__


for _config_class in (LightFormerConfig, LightFormerSpeechConfig, SubformerConfig, PartialFormerConfig):
    _register(_config_class)
