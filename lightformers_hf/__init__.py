"""lightformers_hf: a trained translation or summarization model in, a smaller and faster one out.

Importing the package registers its architectures, so that `AutoModelForSeq2SeqLM.from_pretrained` loads them.
"""

from .conversion import CompressionOptions, convert, plan
from .evaluation.translate import translate
from .hub import push_to_hub
from .models import (
    LightFormerConfig,
    LightFormerForCausalLM,
    LightFormerForConditionalGeneration,
    LightFormerForSequenceClassification,
    LightFormerModel,
    PartialFormerConfig,
    PartialFormerForCausalLM,
    PartialFormerForConditionalGeneration,
    PartialFormerModel,
    SubformerConfig,
    SubformerForCausalLM,
    SubformerForConditionalGeneration,
    SubformerModel,
)

__version__ = "0.1.0"

__all__ = [
    "CompressionOptions",
    "LightFormerConfig",
    "LightFormerForCausalLM",
    "LightFormerForConditionalGeneration",
    "LightFormerForSequenceClassification",
    "LightFormerModel",
    "PartialFormerConfig",
    "PartialFormerForCausalLM",
    "PartialFormerForConditionalGeneration",
    "PartialFormerModel",
    "SubformerConfig",
    "SubformerForCausalLM",
    "SubformerForConditionalGeneration",
    "SubformerModel",
    "convert",
    "plan",
    "push_to_hub",
    "translate",
]
