"""Packages of Argos Translate and LibreTranslate (`.argosmodel`), made of a folder that was exported to CTranslate2.

A package is a zip archive: `metadata.json`, the CTranslate2 model, and one SentencePiece model for both languages.
Argos encodes a sentence with the SentencePiece model alone, without the tokenizer's special tokens or a prefix.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from ..languages import language_code
from .layers import model_type

if TYPE_CHECKING:
    from ..checkpoints.teacher import Teacher

VERSION = "1.0"
MODEL_FILES = ("model.bin", "shared_vocabulary.json", "source_vocabulary.json", "target_vocabulary.json")
SENTENCEPIECE = "source.spm"  # of a MarianTokenizer
OLDEST = (1980, 1, 1, 0, 0, 0)  # a fixed time: the same model gives the same bytes


def find_languages(source: Teacher, source_lang: str | None, target_lang: str | None) -> tuple[str, str]:
    """Return the two-letter languages of a package, or raise `ValueError` with the reason why there is none."""
    tokenizer = source.tokenizer
    kind = type(tokenizer).__name__
    if tokenizer is None:
        raise ValueError(f"{source.name} has no tokenizer, and an Argos package needs its SentencePiece model")
    if model_type(source) == "t5":
        reason = "a T5 needs a prefix before every sentence"
    elif hasattr(tokenizer, "src_lang"):
        reason = f"a {kind} puts codes of two languages around every sentence"
    elif kind != "MarianTokenizer":
        reason = f"a {kind} is not one SentencePiece model"
    elif getattr(tokenizer, "separate_vocabs", False):
        reason = "the model has two vocabularies, and a package has one SentencePiece model for both languages"
    elif getattr(tokenizer, "supported_language_codes", None):
        reason = f"the model needs a code before every sentence, such as {tokenizer.supported_language_codes[0]}"
    else:
        named = {"source_lang": source_lang, "target_lang": target_lang}
        found = [
            language_code(given) or language_code(getattr(tokenizer, name, None)) for name, given in named.items()
        ]
        for name, code in zip(named, found, strict=True):
            if code is None:
                option = name.replace("_", "-")
                raise ValueError(f"{source.name} does not name its languages: give {name} (--{option} de)")
        return found[0] or "", found[1] or ""
    raise ValueError(f"{source.name} cannot be an Argos package, because {reason}: export it to ctranslate2")


def package_name(languages: tuple[str, str]) -> str:
    """The name of a package, and of the folder in it."""
    return f"translate-{'_'.join(languages)}-{VERSION.replace('.', '_')}"


def write_package(source: Teacher, folder: Path, languages: tuple[str, str]) -> Path:
    """Write the package of an exported folder into it, and return the file."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES  # {code: English name}

    name = package_name(languages)
    metadata: dict[str, object] = {
        "type": "translate",
        "package_version": VERSION,
        "argos_version": "1.9",
        "links": [],
    }
    for side, code in zip(("from", "to"), languages, strict=True):
        metadata |= {f"{side}_code": code, f"{side}_name": LANGUAGES.get(code, code).title()}
    # Argos does not append the end token, which the engine then does.
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"add_source_eos": True}
    texts = {"metadata.json": metadata, "model/config.json": config}
    files = {"sentencepiece.model": folder / SENTENCEPIECE, "README.md": folder / "README.md"}
    files |= {f"model/{file}": folder / file for file in MODEL_FILES}
    target = folder / f"{name}.argosmodel"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in texts.items():
            archive.writestr(_entry(f"{name}/{path}"), json.dumps(content, indent=1))
        for path, file in files.items():
            if file.is_file():
                archive.writestr(_entry(f"{name}/{path}"), file.read_bytes())
    return target


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, OLDEST)
    entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
    return entry
