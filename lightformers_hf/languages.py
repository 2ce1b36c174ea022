"""The two languages of a translation: columns of the data, codes of a multilingual tokenizer, prefixes of sources.

Importing this file imports nothing else: reading options needs no library.
"""

from __future__ import annotations

import difflib
import logging
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
OTHER_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # special tokens that are no language


def split_language(text: str | None) -> tuple[str | None, str | None]:
    """(column of the data, code of a multilingual tokenizer) of an option: `de=de_DE`, or `de` for both."""
    column, separator, code = (text or "").partition("=")
    return column or None, (code if separator else column) or None


def language_code(text: str | None, tokenizer: PreTrainedTokenizerBase | None = None) -> str | None:
    """The two-letter language (`de`) of an option or of a tokenizer's target; `None` if neither names one."""
    for name in (
        split_language(text)[1],
        getattr(tokenizer, "target_lang", None),
        getattr(tokenizer, "tgt_lang", None),
    ):
        if found := re.fullmatch(r"([a-z]{2})([_-].*)?", name or ""):
            return found[1]
    return None


def split_prefix(text: str) -> tuple[str, str]:
    """Split an option into (column of the data, prefix of each of its texts); T5 has prefixes for its tasks.

    `de=translate German to English: ` ends with a space. Without one, the text after `=` is a code.
    """
    column, code = split_language(text)
    return column or "", code if code and code.endswith(" ") and "=" in text else ""


def named_columns(source: str | None, target: str | None) -> tuple[str | None, str | None]:
    """The columns that the options of two languages name: without codes, the source's with its prefix."""
    has_prefix = source is not None and split_prefix(source)[1]
    return source if has_prefix else split_language(source)[0], split_language(target)[0]


def task_prefixes(config: object) -> dict[str, str]:
    """Return {task: prefix of its sources} of a configuration.

    `task_specific_params` of a T5 has `{"translation_en_to_de": {"prefix": "translate English to German: "}}`.
    """
    tasks = getattr(config, "task_specific_params", None)
    named = tasks.items() if isinstance(tasks, dict) else ()
    found = {name: task.get("prefix") for name, task in named if isinstance(task, dict)}
    return {name: prefix for name, prefix in found.items() if prefix and isinstance(prefix, str)}


def add_prefix(config: object, source: str, target: str | None) -> str:
    """`source` unchanged if it contains a prefix, otherwise with the prefix of the configuration for the two
    languages.
    """
    if split_prefix(source)[1]:
        return source
    column, goal = split_language(source)[0], split_language(target)[0]
    prefix = task_prefixes(config).get(f"translation_{column}_to_{goal}")
    return f"{column}={prefix}" if prefix else source


def find_prefixes(config: object, source: str | None, target: str | None) -> list[str]:
    """Prefixes of sources: that of the two languages if they are given, otherwise those of every task; at least ""."""
    prefix = split_prefix(add_prefix(config, source, target))[1] if source else ""
    return [prefix] if prefix else list(task_prefixes(config).values()) or [""]


def choose_prefix(config: object, source: str | None, target: str | None, *, name: str, columns: bool = True) -> str:
    """Prefix of every source: that of the two languages; without languages the only one."""
    prefixes = task_prefixes(config)
    prefix = split_prefix(add_prefix(config, source or "", target))[1]
    if prefix or not prefixes or (columns and source):
        return prefix
    known = ", ".join(prefixes)
    if source or target:
        raise ValueError(
            f"source_lang and target_lang are {source!r} and {target!r}, for which {name} has no prefix; it has those "
            f"of {known}. Give the languages of one of them, or a prefix that ends with a space: 'en=translate it: '"
        )
    if len(prefixes) == 1:
        return next(iter(prefixes.values()))
    logger.warning(
        f"{name} has a prefix for each of its tasks ({known}), and none is added: give source_lang and target_lang, "
        "or write a prefix before every text"
    )
    return ""


def keep_prefix(config: Any, source: str | None, target: str | None) -> None:
    """Write a prefix that is given into `task_specific_params`, where `add_prefix` finds it."""
    (column, prefix), goal = split_prefix(source or ""), split_language(target)[0]
    if prefix and goal:
        tasks = dict(getattr(config, "task_specific_params", None) or {})
        config.task_specific_params = tasks | {f"translation_{column}_to_{goal}": {"prefix": prefix}}


def set_language_codes(
    tokenizer: PreTrainedTokenizerBase, source: str | None, target: str | None, *, columns: bool = True
) -> int | None:
    """Set the language codes of a multilingual tokenizer, and return the first token of a translation.

    Args:
        source, target: codes as the tokenizer has them, such as `de_DE` (mBART-50), `deu_Latn` (NLLB) or `de`
            (M2M100), or `COLUMN=CODE`. Without either nothing is done, and `None` returned. So it is where a plain
            name can be a column alone: the tokenizer has one pair of languages, or its pair was set before.
        columns: whether plain names can be columns. Otherwise they are languages, which the tokenizer must have.

    Raises:
        ValueError: one code alone, an unknown code, or one for a tokenizer without codes.
    """
    if not (source or target):
        return None
    if source and split_prefix(source)[1]:
        source = split_prefix(source)[0]
    explicit = "=" in f"{source}{target}"
    if not hasattr(tokenizer, "src_lang"):
        if explicit:
            raise ValueError(
                f"source_lang and target_lang are {source!r} and {target!r}, but codes go with a multilingual "
                "tokenizer only: give columns alone, or before = that of the source and behind it a prefix that ends "
                "with a space"
            )
        own = [getattr(tokenizer, side, None) for side in ("source_lang", "target_lang")]
        if not columns and all(own) and [source or own[0], target or own[1]] != own:
            raise ValueError(
                f"the languages {source or own[0]!r} and {target or own[1]!r} are asked for, but "
                f"{tokenizer.name_or_path} translates from {own[0]} to {own[1]}: remove both"
            )
        return None
    token_of = getattr(tokenizer, "lang_code_to_token", {})  # M2M100's codes are no tokens
    others = {getattr(tokenizer, f"{kind}_token", None) for kind in OTHER_TOKENS}
    known = [*token_of] or [token for token in tokenizer.all_special_tokens if token not in others]
    codes = {name: split_language(text)[1] for name, text in (("source_lang", source), ("target_lang", target))}
    if columns and not explicit and tokenizer.tgt_lang is not None and not set(codes.values()) <= set(known):
        return None
    for name, code in codes.items():
        if code is None:
            raise ValueError(f"{name} is missing: the codes of a multilingual tokenizer's languages go together")
        if code not in known:
            near = difflib.get_close_matches(code, known) or [one for one in known if one[:2] == code[:2]][:5]
            raise ValueError(
                f"{name} is {code!r}, which {tokenizer.name_or_path} does not support; there is "
                f"{' or '.join(near or known[-5:])} (where the data's column has another name, COLUMN=CODE)"
            )
    tokenizer.src_lang, tokenizer.tgt_lang = codes["source_lang"], codes["target_lang"]
    return tokenizer.convert_tokens_to_ids(token_of.get(tokenizer.tgt_lang, tokenizer.tgt_lang))


def set_languages(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str | None,
    target: str | None,
    *,
    columns: bool = True,
) -> None:
    """As `set_language_codes`, and let the model's translations begin in the target language."""
    first = set_language_codes(tokenizer, source, target, columns=columns)
    if first is not None:
        model.generation_config.forced_bos_token_id = first
