"""lightformers_hf: a trained translation or summarization model in, a smaller and faster one out.

Importing the package lets `AutoModelForSeq2SeqLM.from_pretrained` load its architectures (see `registration.py`). Its
public names are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .registration import register_when_used

if TYPE_CHECKING:
    from .conversion.convert import convert, plan
    from .conversion.options import CompressionOptions, StudyOptions
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
    "StudyOptions",
    "SubformerConfig",
    "SubformerForCausalLM",
    "SubformerForConditionalGeneration",
    "SubformerModel",
    "convert",
    "plan",
    "push_to_hub",
    "translate",
]

# Public names that are no architecture's → the module that has them. All others are in `.models`.
_HOMES = {
    "CompressionOptions": ".conversion.options",
    "StudyOptions": ".conversion.options",
    "convert": ".conversion.convert",
    "plan": ".conversion.convert",
    "push_to_hub": ".hub",
    "translate": ".evaluation.translate",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES.get(name, ".models"), __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_when_used()
