"""What the card of a model leaves to the cards of what is made from it."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, constants

from ..files import CARD_FILE

logger = logging.getLogger(__name__)

INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")


def inherited_metadata(folder: Path, hub_name: str | None) -> dict[str, str | list[str]]:
    """Licence, languages and task that the card of a model names, for the cards of what is made from it.

    Args:
        folder: where the model lies; its card is the `README.md` there. Without one, or with metadata that cannot be
            read, nothing is inherited.
        hub_name: the model's name on the Hub, which becomes `base_model`; `None` for a folder, which leaves its own.
    """
    metadata: dict[str, str | list[str]] = {"base_model": hub_name} if hub_name else {}
    try:
        text = (folder / CARD_FILE).read_text(encoding="utf-8")
        if not text.lstrip().startswith("---"):  # no metadata: nothing to warn of
            return metadata
        card = ModelCard(text, ignore_metadata_errors=True)
    except FileNotFoundError:
        return metadata
    except (ValueError, TypeError, yaml.YAMLError) as error:
        reason = str(error).partition("\n")[0]
        logger.warning(f"The metadata of {folder / CARD_FILE} cannot be read, so nothing is inherited: {reason}")
        return metadata
    for field in INHERITED if hub_name else (*INHERITED, "base_model"):
        value = card.data.get(field)
        values = ["no" if item is False else item for item in (value if isinstance(value, list) else [value])]
        if all(isinstance(item, str) for item in values):  # YAML reads the code of Norwegian as a truth value
            metadata[field] = values if isinstance(value, list) else values[0]
    link = metadata.get("license_link")
    if hub_name and isinstance(link, str) and "://" not in link:  # a file of the source's repository
        metadata["license_link"] = f"{constants.ENDPOINT}/{hub_name}/blob/main/{link}"
    return drop_strange_link(metadata)


def drop_strange_link(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata without a `license_link` that leads elsewhere than to a file or a page (`javascript:`)."""
    link = metadata.get("license_link")
    is_page = isinstance(link, str) and link.isprintable() and (":" not in link or re.match("https?://", link))
    return {field: value for field, value in metadata.items() if field != "license_link" or is_page}
