"""What all model cards share: the mark of a generated card, harmless text, and the metadata that models inherit."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jinja2
import yaml
from huggingface_hub import ModelCard, constants

from ..files import CARD_FILE, REPORT_FILE, read_json

logger = logging.getLogger(__name__)
# A card with this line is written anew by every push.
MARK = "<!-- Written by lightformers. Remove this line to keep your changes when you push again. -->"
# Metadata that a card passes to the cards of models made from its model.
INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")


def inherited_metadata(folder: Path | None, hub_name: str | None) -> dict[str, str | list[str]]:
    """Licence, languages and task that the card of a model names, for the cards of what is made from it.

    Args:
        folder: where the model lies; `None` for a loaded one. Without a card, as `recover` leaves it, its report of
            the conversion has what the teacher's card named. Of metadata that cannot be read nothing is inherited.
        hub_name: the model's name on the Hub, which becomes `base_model`; `None` for a folder, which leaves its own.
    """
    metadata: dict[str, str | list[str]] = {"base_model": hub_name} if hub_name else {}
    files = (folder / CARD_FILE, folder / REPORT_FILE) if folder else ()
    file = next((path for path in files if path.is_file()), None)
    if file is None:
        return metadata
    data: Any = {}
    try:
        if file.name == REPORT_FILE:
            data = read_json(file).get("inherited")
        elif (text := file.read_text(encoding="utf-8")).lstrip().startswith("---"):
            data = ModelCard(text, ignore_metadata_errors=True).data.to_dict()
    except (ValueError, TypeError, yaml.YAMLError) as error:
        reason = str(error).partition("\n")[0]
        logger.warning(f"The metadata of {file} cannot be read, so nothing is inherited: {reason}")
        return metadata
    for name in INHERITED if hub_name else (*INHERITED, "base_model"):
        value = data.get(name) if isinstance(data, dict) else None
        values = ["no" if item is False else item for item in (value if isinstance(value, list) else [value])]
        if all(isinstance(item, str) for item in values):  # YAML reads the code of Norwegian as a truth value
            metadata[name] = cast(Any, values if isinstance(value, list) else values[0])
    link = metadata.get("license_link")
    if hub_name and isinstance(link, str) and "://" not in link:  # a file of the source's repository
        metadata["license_link"] = f"{constants.ENDPOINT}/{hub_name}/blob/main/{link}"
    return drop_strange_link(metadata)


def drop_strange_link(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata without a `license_link` that leads elsewhere than to a file or a page (`javascript:`)."""
    link = metadata.get("license_link")
    is_page = isinstance(link, str) and link.isprintable() and (":" not in link or re.match("https?://", link))
    return {name: value for name, value in metadata.items() if name != "license_link" or is_page}


def load_template(package: str) -> jinja2.Template:
    """Return the template `card.md` of a package, whose filters `code` and `plain` make foreign text harmless."""
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "undefined": jinja2.StrictUndefined}
    environment = jinja2.Environment(loader=jinja2.PackageLoader(package, ""), **options)
    environment.filters |= {"code": as_code, "plain": as_plain_text}
    return environment.get_template("card.md")


def as_code(text: object) -> str:
    """A code span of one line, which nothing in `text` ends."""
    words = "".join(c for c in str(text) if c not in "`|" and (c.isprintable() or c.isspace())).split()
    return f"`{' '.join(words) or ' '}`"


def as_plain_text(text: str) -> str:
    """The text in one line without the characters that mean something in Markdown or HTML."""
    return " ".join("".join(c for c in text if c.isalnum() or c in " ,.()-").split())
