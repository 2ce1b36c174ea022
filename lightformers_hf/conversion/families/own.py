"""The architectures of this package, which are read as they are."""

from typing import Any

from . import Family, register_family


class OwnFamily(Family):
    """Names and configuration are this package's already."""

    @classmethod
    def own_config(cls, config: Any) -> Any:
        """The checkpoint's own."""
        return config

    @classmethod
    def own_name(cls, name: str) -> str | None:
        """The same name."""
        return name


@register_family("lightformer")
class LightFormer(OwnFamily):
    """LightFormers, of any rank."""

    architectures = (
        "LightFormerForConditionalGeneration",
        "LightFormerForCausalLM",
        "LightFormerForSequenceClassification",
    )


@register_family("subformer")
class Subformer(OwnFamily):
    """Subformers."""

    architectures = ("SubformerForConditionalGeneration", "SubformerForCausalLM")


@register_family("partialformer")
class PartialFormer(OwnFamily):
    """PartialFormers."""

    architectures = ("PartialFormerForConditionalGeneration", "PartialFormerForCausalLM")
