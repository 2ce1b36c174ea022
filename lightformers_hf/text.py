"""Parallel text as two string columns, from a local file or from the Hub.

The libraries that read it are imported when something is read: translating needs none of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .data_files import is_file_name, load_file, load_lines
from .languages import split_language, split_prefix

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

CHECKED = 1000  # pairs whose tokens are looked at


def load_parallel(
    data: str, *, source: str, target: str, split: str = "train", max_samples: int | None = None
) -> Dataset:
    """Load sentence pairs as a dataset of two string columns, `source` and `target`, in the order of the data.

    Args:
        data: a local file (.json, .jsonl, .csv, .tsv, the same with .gz, .parquet) or a dataset on the Hub, `name` or
            `name:configuration`. Cells of a .tsv file are taken as they stand (a quote is a character).
        source, target: names of columns, or languages inside a column `translation`:
            `{"translation": {"de": "Guten Tag.", "en": "Good day."}}`. A prefix for every source goes behind its
            column, as T5 asks for: `de=translate German to English: ` (see `split_prefix`).
        split: the split of a Hub dataset. A local file is one split, this argument does not matter to it.
        max_samples: keep the first so many pairs (default: all).

    Raises:
        FileNotFoundError: no such file, or no such dataset on the Hub.
        ValueError: an unknown file type, unreadable or empty data, columns that are missing, values that are not text.
    """
    (source, prefix), target = split_prefix(source), split_language(target)[0] or ""
    pairs = load_rows(data, split=split)
    pairs = _select_columns(pairs, data, source, target)
    pairs = take_rows(pairs, max_samples)
    _check_text(pairs, data, {"source": source, "target": target})
    return pairs.map(lambda pair: {"source": prefix + pair["source"]}) if prefix else pairs


def take_rows(rows: Dataset, max_samples: int | None) -> Dataset:
    """The first so many rows, or all. Raises `ValueError` for a number below 1."""
    if max_samples is None:
        return rows
    if max_samples < 1:
        raise ValueError(f"max_samples is {max_samples}: expected 1 or more, or None for all.")
    return rows.select(range(min(max_samples, len(rows))))


def load_text(
    data: str, *, source: str | None, target: str | None, default: tuple[str, str], split: str = "train"
) -> Dataset:
    """Sentence pairs as of `load_parallel`, or text of the source language alone: a dataset with no column `target`.

    Text alone is a .txt file (a line is a text, also with .gz), data of one column, and data without the column
    `default` names for the target where `source` is named and `target` is not.

    Args:
        data: a file, or a dataset on the Hub.
        source, target: the columns, or languages inside a column `translation`, that were asked for.
        default: what they are where they are `None`. The source's may bring a prefix, as in `load_parallel`.

    Raises:
        FileNotFoundError, ValueError: as `load_parallel`.
    """
    column, prefix = split_prefix(source or default[0])
    source, names = column if source else None, (column, target or default[1])
    if data.removesuffix(".gz").endswith(".txt"):
        rows, only = load_lines(Path(data)), "text"
        if len(rows) == 0:
            raise ValueError(f"{data} is empty: expected at least one line.")
    else:
        rows = _find_languages(load_rows(data, split=split), names)
        single = len(rows.column_names) == 1
        alone = single or (source in rows.column_names and target is None and default[1] not in rows.column_names)
        if not alone:
            return load_parallel(data, source=f"{column}={prefix}" if prefix else column, target=names[1], split=split)
        only = rows.column_names[0] if single and source not in rows.column_names else names[0]
        if (source is not None and only != source) or only == names[1]:
            raise ValueError(f"{data} has no column {names[0]!r}: it has {_shorten(only)} alone.")
    texts = rows.select_columns([only]).rename_columns({only: "source"} if only != "source" else {})
    _check_text(texts, data, {"source": only})
    return texts.map(lambda row: {"source": prefix + row["source"]}) if prefix else texts


def load_rows(data: str, *, split: str = "train") -> Dataset:
    """All columns of a file or a Hub dataset, as `load_parallel` finds them; at least one row.

    Raises:
        FileNotFoundError: no such file, or no such dataset on the Hub.
        ValueError: an unknown file type, unreadable or empty data.
    """
    rows = load_file(Path(data)) if is_file_name(data) else _load_hub(data, split)
    if len(rows) == 0:
        raise ValueError(f"{data} holds no rows: expected at least one.")
    return rows


def _load_hub(name: str, split: str) -> Dataset:
    """A split of the dataset `name` or `name:configuration`."""
    from datasets import load_dataset

    name, _, configuration = name.partition(":")
    if not name.strip("/ "):
        raise ValueError("the data has no name: give a file, or a dataset of the Hub")
    return load_dataset(name, configuration or None, split=split)


def _select_columns(pairs: Dataset, data: str, source: str, target: str) -> Dataset:
    """The columns `source` and `target` of `pairs`, wherever they stand."""
    pairs = _find_languages(pairs, (source, target))
    missing = [name for name in (source, target) if name not in pairs.column_names]
    if missing:
        wanted, there = " nor ".join(map(repr, missing)), ", ".join(map(_shorten, pairs.column_names))
        header = data.removesuffix(".gz").endswith((".csv", ".tsv"))
        raise ValueError(
            f"{data} has no column {wanted}: it has {there}. "
            + ("Its first line must name the columns. " if header else "")
            + "Name the columns (or the languages inside a column 'translation') that hold the two texts."
        )
    if source == target:
        raise ValueError(f"Source and target are both {source!r}: name two columns or languages.")
    return pairs.select_columns([source, target]).rename_columns({source: "source", target: "target"})


def _find_languages(pairs: Dataset, names: tuple[str, str]) -> Dataset:
    """The languages inside a column `translation` as columns of their own, unless there are columns of these names."""
    if "translation" in pairs.column_names and not {*names} <= set(pairs.column_names):
        pairs = pairs.flatten()
        languages = {n: n.removeprefix("translation.") for n in pairs.column_names if n.startswith("translation.")}
        if languages:
            pairs = pairs.select_columns(list(languages)).rename_columns(languages)
    return pairs


def _shorten(name: str) -> str:
    """A column's name; what stands there may be a sentence."""
    return repr(name if len(name) <= 30 else f"{name[:29]}…")


def _check_text(pairs: Dataset, data: str, names: dict[str, str]) -> None:
    """Raise a ValueError that names the first row where a column holds something else than text."""
    import pyarrow
    import pyarrow.compute as pc
    from datasets import Value

    for column, name in names.items():
        values = pairs.data.column(column)
        try:
            values.validate(full=True)
        except pyarrow.ArrowInvalid:
            row = next(i for i, value in enumerate(values.cast("large_binary")) if not _is_utf8(value.as_py()))
            raise ValueError(f"{data}, row {row + 1}, {name!r}: the text is not UTF-8: write it anew") from None
        if pairs.features[column] in (Value("string"), Value("large_string")):
            bad = pc.index(pc.is_null(values), True).as_py() if values.null_count else None
        else:
            bad = next((i for i, value in enumerate(pairs[column]) if not isinstance(value, str)), None)
        if bad is not None and pairs[bad][column] is None:
            raise ValueError(f"{data}, row {bad + 1} has no {name!r}: expected text in every row.")
        if bad is not None:
            raise ValueError(f"{data}, row {bad + 1}, {name!r}: expected text, found {pairs[bad][column]!r}.")


def _is_utf8(text: bytes | None) -> bool:
    try:
        (text or b"").decode()
    except UnicodeDecodeError:
        return False
    return True


def fingerprint(sentence: str) -> str:
    """Twelve hexadecimal digits that tell sentences apart, letter case and spaces aside."""
    return hashlib.sha256(" ".join(sentence.casefold().split()).encode()).hexdigest()[:12]


def tokenize_pairs(
    pairs: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_source_length: int,
    max_target_length: int,
    num_proc: int | None = None,
) -> Dataset:
    """Tokenize the pairs of `load_parallel` into what a seq2seq model trains on.

    Columns: `input_ids`, `attention_mask`, `labels`, and their lengths in tokens, `source_length` and
    `target_length`, which `TokenBatchSampler` reads.

    Args:
        max_source_length, max_target_length: tokens, end-of-sentence token included, which always stays; longer texts
            are cut.
        num_proc: worker processes (default: none, in this process).

    Raises:
        ValueError: the tokenizer does not know most of the text.
    """
    tokens = pairs.map(
        _tokenize,
        fn_kwargs={"tokenizer": tokenizer, "limits": (max_source_length, max_target_length)},
        batched=True,
        remove_columns=pairs.column_names,
        num_proc=num_proc,
        desc="Tokenizing",
    )
    for column in ("input_ids", "labels"):
        check_known(tokens[:CHECKED][column], tokenizer)
    return tokens


def check_known(token_ids: Iterable[Sequence[int]], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ValueError` where a tokenizer maps most of a text to its unknown token.

    Args:
        token_ids: ids of texts. Special tokens and spaces do not count.
    """
    unknown = tokenizer.unk_token_id
    if unknown is None:
        return
    others = {*tokenizer.all_special_ids, *tokenizer.convert_tokens_to_ids(["▁", "Ġ"])} - {unknown}
    words = [token for ids in token_ids for token in ids if token not in others]
    if (count := words.count(unknown)) > len(words) / 2:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path} maps {count:,} of {len(words):,} tokens of the text to its "
            f"unknown token {tokenizer.unk_token!r}: give text in its languages, or the checkpoint its own tokenizer"
        )


def cut_texts(tokens: Dataset, limit: int) -> list[str]:
    """What there is to say of the texts that `tokenize_pairs` cut after so many tokens: a line a side, or none."""
    lengths = {side: tokens[f"{side}_length"][:] for side in ("source", "target")}
    cut = {side: sum(length >= limit for length in found) for side, found in lengths.items()}
    return [f"{n:,} of {len(tokens):,} {side}s are cut after {limit:,} tokens" for side, n in cut.items() if n]


def _tokenize(batch: dict[str, list], tokenizer: PreTrainedTokenizerBase, limits: tuple[int, int]) -> dict[str, list]:
    """The columns of `tokenize_pairs`; `limits` are the longest source and target."""
    source = tokenizer(batch["source"], max_length=limits[0], truncation=True)
    target = tokenizer(text_target=batch["target"], max_length=limits[1], truncation=True)
    return {
        "input_ids": source["input_ids"],
        "attention_mask": source["attention_mask"],
        "labels": target["input_ids"],
        "source_length": [len(ids) for ids in source["input_ids"]],
        "target_length": [len(ids) for ids in target["input_ids"]],
    }
