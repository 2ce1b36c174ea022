"""lightformers_hf: a trained translation or summarization model in, a smaller and faster one out.

Importing the package lets `AutoModelForSeq2SeqLM.from_pretrained` load its architectures (see `registration.py`). Its
public names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from .registration import lazy_names, register_when_used

if TYPE_CHECKING:
    from .conversion.options import CompressionOptions, StudyOptions
    from .engines.engine import load_engine
    from .engines.write import export
    from .evaluation.evaluate import evaluate
    from .evaluation.translate import translate
    from .hub import push_to_hub
    from .models import (
        LightFormerConfig,
        LightFormerForCausalLM,
        LightFormerForConditionalGeneration,
        LightFormerForSequenceClassification,
        LightFormerForSpeechSeq2Seq,
        LightFormerModel,
        LightFormerSpeechConfig,
        LightFormerSpeechModel,
        PartialFormerConfig,
        PartialFormerForCausalLM,
        PartialFormerForConditionalGeneration,
        PartialFormerModel,
        SubformerConfig,
        SubformerForCausalLM,
        SubformerForConditionalGeneration,
        SubformerModel,
    )
    from .workflows.compress import compress
    from .workflows.convert import convert, plan
    from .workflows.distill import distill
    from .workflows.recover import recover

__version__ = "0.2.0"

__all__ = [
    "CompressionOptions",
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
    "StudyOptions",
    "SubformerConfig",
    "SubformerForCausalLM",
    "SubformerForConditionalGeneration",
    "SubformerModel",
    "compress",
    "convert",
    "distill",
    "evaluate",
    "export",
    "load_engine",
    "plan",
    "push_to_hub",
    "recover",
    "translate",
]

# Public names that are no architecture's → the module that has them. All others are in `.models`.
_HOMES = {
    "CompressionOptions": ".conversion.options",
    "StudyOptions": ".conversion.options",
    "compress": ".workflows.compress",
    "convert": ".workflows.convert",
    "distill": ".workflows.distill",
    "evaluate": ".evaluation.evaluate",
    "export": ".engines.write",
    "load_engine": ".engines.engine",
    "plan": ".workflows.convert",
    "push_to_hub": ".hub",
    "recover": ".workflows.recover",
    "translate": ".evaluation.translate",
}

__getattr__, __dir__ = lazy_names(__name__, {name: _HOMES.get(name, ".models") for name in __all__})

register_when_used()
