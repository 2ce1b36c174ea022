"""Names of data: local files, folders of files, patterns, and data sets of the Hub."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .files import shorten_list
from .options import OptionError

logger = logging.getLogger(__name__)
SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow")
SOUNDS = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".aif", ".aiff", ".au", ".caf", ".w64")
# Words in names of files and folders, as the datasets library knows them.
SPLITS = {"train": "train|training", "validation": "validation|valid|dev|val", "test": "test|testing|eval|evaluation"}
HUB_NAME = re.compile(r"(\w[\w.-]*(/\w[\w.-]*)?)?(:.*)?")  # of a dataset and its configuration


def is_lines(data: str) -> bool:
    """Whether `data` is a file of plain lines: it is there, and its ending is none of data's."""
    return os.path.isfile(os.path.expanduser(data)) and suffix_of(data) not in SUFFIXES


def suffix_of(file: str | os.PathLike) -> str:
    """The ending that tells the type of a file: `.jsonl` of `train.jsonl.gz` and of `TRAIN.JSONL`."""
    return Path(Path(file).name.removesuffix(".gz")).suffix.lower()


def is_file_name(data: str) -> bool:
    """Whether `data` is the name of a file: it exists, has a known suffix, or is no name of a dataset on the Hub."""
    known = suffix_of(data) in (*SUFFIXES, ".txt")
    return os.path.exists(os.path.expanduser(data)) or known or not HUB_NAME.fullmatch(data)


def is_sound(data: str) -> bool:
    """Whether `data` names sound: a file, a pattern, a folder that holds sound files, or several of them."""
    path = os.path.expanduser(data)
    if os.path.isdir(path):
        return any(file.suffix.lower() in SOUNDS for file in visible_files(path))
    if "," in data and not os.path.exists(path):
        return bool(parts := split_names(data)) and all(map(is_sound, parts))
    return Path(path).suffix.lower() in SOUNDS


def visible_files(folder: str | os.PathLike) -> list[Path]:
    """The files in a folder and its subfolders, in the order of their names, without hidden ones."""
    files = (file for file in sorted(Path(folder).rglob("*")) if file.is_file())
    return [file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts)]


def split_names(data: str) -> list[str]:
    """Names that stand between commas; none where one is empty."""
    parts = [part.strip() for part in data.split(",")]
    return parts if all(parts) else []


def split_of(name: str) -> str:
    """The split that the name of a file or of one of its folders contains as a word, otherwise ""."""
    found = (split for split, words in SPLITS.items() if re.search(rf"(?<![^\W\d_])({words})(?![^\W\d_])", name))
    return next(found, "")


def find_files(data: str) -> list[str] | None:
    """The files that `data` names, in the order of their names; `None` for a name on the Hub.

    A name that exists is that file, whatever its characters are, or the folder whose files of data are read. Only
    where there is none is it a pattern of glob, or several names with commas between.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a folder without files of data, or with those of several splits.
    """
    path = os.path.expanduser(data)
    if os.path.isdir(path):
        inside = [file.relative_to(path) for file in visible_files(path)]
        visible = [file for file in inside if not any(part.startswith("_") for part in file.parts)]
        known = [file for file in visible if suffix_of(file) in (*SUFFIXES, ".txt")]
        # The datasets library writes results of `map` beside the data.
        found = [file for file in known if not re.fullmatch(r"cache-.*\.arrow", file.name)]
        # Beside others, a .json file describes them.
        found = [file for file in found if suffix_of(file) != ".json"] or found
        if not found:
            raise ValueError(f"{data} is a folder without data: expected files of {', '.join(SUFFIXES)} or .txt in it")
        if len(splits := sorted({split_of(str(file)) for file in found} - {""})) > 1:
            raise ValueError(
                f"{data} has files of the splits {' and '.join(splits)}: give the files of one, or their folder, such "
                f"as {os.path.join(path, found[-1])}"
            )
        return [os.path.join(path, file) for file in found]
    if os.path.exists(path):
        return [path]
    if not is_file_name(data):
        return None
    if "," in data and (parts := split_names(data)):
        return [file for part in parts for file in find_files(part) or [part]]
    if files := sorted(file for file in glob.glob(path, recursive=True) if os.path.isfile(file)):
        return files
    pattern = ", and no file matches the pattern" if glob.has_magic(path) else ""
    raise FileNotFoundError(
        f"No data file {data}{pattern}: give an existing file, or the name of a dataset on the Hub."
    )


def check_data(data: str) -> None:
    """Raise an error where `data` is local, of text, and not there; sound is checked when it is found."""
    if not is_sound(data):
        find_files(data)


def check_split(call: Any) -> None:
    """Raise `OptionError` where the record of a call names a split of data that is not on the Hub."""
    named = isinstance(call.data, str | os.PathLike)  # no loaded rows
    if named and call.split != type(call).split and is_file_name(os.fspath(call.data)):
        raise OptionError("split", f" is for data sets on the Hub, but {call.data} is local: remove ", "split")


def list_files(data: str, files: Sequence[str]) -> None:
    """Log which files a folder or a pattern stands for."""
    if [os.path.expanduser(data)] != [*files]:
        names = [os.path.basename(file) for file in files]
        logger.warning(f"{data}: {len(names)} file{'s' * (len(names) != 1)}, {shorten_list(names, 10)}")


def check_file_type(path: Path) -> None:
    """Raise an error where a file of data is not there or of an unknown type."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give one of its files, or the name of a dataset on the Hub.")
    if not path.is_file():
        raise FileNotFoundError(f"No data file {path}: give an existing file, or the name of a dataset on the Hub.")
    if (suffix := suffix_of(path)) not in (*SUFFIXES, ".txt"):
        raise ValueError(
            f"{path} has an unknown type {suffix!r}: expected one of {', '.join(SUFFIXES)} (.gz allowed)."
        )
