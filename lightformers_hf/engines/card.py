"""The model card of an export."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import ModelCardData

from ..checkpoints.cards import MARK, inherited_metadata, load_template
from ..files import CARD_FILE
from . import EngineFile
from .layers import Source


def write_card(
    folder: Path, source: Source, *, engine: str, form: str, lines: list[str], library: str, example: str = ""
) -> None:
    """Write the card of an export into `folder`, with remarks (`lines`) and a program (`example`).

    The `form` is the type of the stored numbers, and the `library` loads the export. The program of transformers.js is
    in JavaScript, and others are in Python.
    """
    metadata = inherited_metadata(source.folder, source.hub_name)
    if metadata.get("base_model"):
        metadata["base_model_relation"] = "quantized" if form.startswith("int") else "finetune"
    tags = list(dict.fromkeys([engine, form, library]))
    fields = {"metadata": ModelCardData(**metadata, library_name=library, tags=tags).to_yaml(), "mark": MARK}
    fields |= {"engine": engine, "form": form, "lines": lines, "example": example, "library": library}
    (folder / CARD_FILE).write_text(load_template(__package__).render(**fields), encoding="utf-8")


def fill_example(engine: EngineFile, source: Source, folder: str, prefix: str) -> str:
    """Return the program that runs a folder of an engine without this package; empty if the engine has none."""
    if not hasattr(engine, "EXAMPLE"):
        return ""
    first, begins = source.generation_config.forced_bos_token_id, {"first": "", "skip": ""}
    if first is not None:  # the language of the translation, which comes out, too
        token = json.dumps(source.need_tokenizer().convert_ids_to_tokens(first), ensure_ascii=False)
        begins = {"first": f"target_prefix=[[{token}]] * len(tokens), ", "skip": "[1:]"}
    return engine.EXAMPLE.format(folder=folder, text=f"{prefix}Your text.", **begins)
