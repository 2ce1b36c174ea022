"""Files and folders: their names, JSON, and output that is written whole or not at all, by one process at a time."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields, is_dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, BinaryIO, Union, cast, get_args, get_origin, get_type_hints

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
CARD_FILE = "README.md"
REPORT_FILE = "compression.json"
EXPORT_FILE = "export.json"
PAGE_FILE = "page.json"  # manifest of a page that translates in the browser
DISTILL_FILE = "distill.json"  # record of a distillation, in its folder of shards
RECORD_FILE = "recovery.json"  # record of a recovery: options, settings and results
STATE_FILE = "trainer_state.json"  # transformers' Trainer writes it
PATIENCE = 2.0  # seconds
WEIGHT_FILES = (  # the one that is loaded first
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.spm",
    "*.model",
)
# Files that are read from a model's folder.
MODEL_FILES = (
    *("*.safetensors", "*.bin", "*.index.json", "config.json", "generation_config.json"),
    *(*TOKENIZER_FILES, CARD_FILE, REPORT_FILE, STATE_FILE),
)
MANIFEST_FILE = ".lightformers.json"  # in every folder of the package: the names of its files
UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)  # the folder is read-only or full
LARGEST = 2.0**63  # above every measured value
LONGEST_NAME = 255  # bytes, of a file's name
FULL = 1 << 26  # bytes left on a disk that count as none
FULL_DISK = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}


# --- JSON


def read_json(file: Path) -> dict[str, Any]:
    """The object that a file of JSON holds, an empty one where there is no such file; else `ValueError`."""
    try:
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged ({error}): write it again, or remove it") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} is damaged (it holds no object): write it again, or remove it")
    return content


def as_kind(content: Any, kind: Any, where: str) -> Any:
    """Convert the content of a JSON file, which anybody may have written, to the type of a hint.

    Objects become data classes, anything else stays. Raises `ValueError`, which names `where` it is, for anything of
    another type, and for numbers that nobody measures.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return content
    if origin in (Union, UnionType):
        if content is None and NoneType in inner:
            return None
        return as_kind(content, next(hint for hint in inner if hint is not NoneType), where)
    if is_dataclass(kind) and isinstance(content, dict):
        hints, make = get_type_hints(kind), cast(type, kind)
        needed = [field.name for field in fields(kind) if field.default is field.default_factory is MISSING]
        missing = [name for name in needed if name not in content]
        if missing:
            raise ValueError(f"{missing[0]!r} is missing in {where}")
        return make(**{n: as_kind(content[n], hint, f"{where}.{n}") for n, hint in hints.items() if n in content})
    if origin is list and isinstance(content, list):
        return [as_kind(value, inner[0], f"{where}[{index}]") for index, value in enumerate(content)]
    if origin is dict and isinstance(content, dict):
        return {key: as_kind(value, inner[1], f"{where}.{key}") for key, value in content.items()}
    kinds = {float: (int, float)}.get(kind, kind) if origin is None and not is_dataclass(kind) else ()
    if not isinstance(content, kinds) or (isinstance(content, bool) and kind is not bool):
        expected = getattr(kind, "__name__", str(kind)) if origin is None else str(kind)
        raise ValueError(f"{where} is {str(content)[:40]!r}, expected {expected}")
    if isinstance(content, int | float) and not abs(content) < LARGEST:
        raise ValueError(f"{where} is no number that is measured")
    return content


def write_json(content: dict | list, file: Path) -> None:
    """Write `content` as `file`, indented, whole or not at all. Raises `ValueError` as `json_text`."""
    text = json_text(content, file.name)
    with write_whole(file) as opened:
        opened.write(text.encode())


def json_text(content: dict | list, what: str) -> str:
    """`content` as indented JSON."""
    try:
        return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    except ValueError:
        if where := find_not_finite(content):
            raise ValueError(
                f"{what}: {where} is NaN or infinite, which JSON does not allow: nothing was written; it is an error "
                "of lightformers_hf, or of a model that computes such values"
            ) from None
        raise


def find_not_finite(content: object, where: str = "") -> str | None:
    """Return the place of the first NaN or infinity in nested lists and dictionaries: `matrices[3].energy`."""
    if isinstance(content, dict):
        inner = ((value, f"{where}.{key}".lstrip(".")) for key, value in content.items())
    elif isinstance(content, list | tuple):
        inner = ((value, f"{where}[{index}]") for index, value in enumerate(content))
    else:
        return where if isinstance(content, float) and not math.isfinite(content) else None
    return next(filter(None, (find_not_finite(value, name) for value, name in inner)), None)


# --- Single files


def beside(path: Path, word: str) -> Path:
    """The path `.NAME.WORD` beside a file or folder; NAME is a digest of a name that would be too long."""
    name = path.name
    if len(os.fsencode(name)) > LONGEST_NAME - 32:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
    return path.with_name(f".{name}.{word}")


@contextmanager
def write_whole(path: Path) -> Iterator[BinaryIO]:
    """A binary file that takes the place of `path` when all is written; an error leaves `path` as it was.

    A link stays one, to what is written; a device or a pipe is written to.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    path = path.resolve()
    partial = beside(path, secrets.token_hex(4) + ".partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def check_file(file: str | Path, inputs: Iterable[str | os.PathLike | None]) -> None:
    """Raise `ValueError` where writing `file` would write over an input, or over a model's file in an input folder,
    and `OSError` where it cannot be written: a folder, or a file in one that is not there or takes none."""
    resolved = Path(os.path.expanduser(file)).resolve()
    if resolved.is_dir():
        raise IsADirectoryError(f"{file} is a folder: give a file")
    if not resolved.parent.is_dir():
        raise FileNotFoundError(f"{file} cannot be written: there is no folder {Path(file).parent}")
    if (resolved.is_file() or not resolved.exists()) and not os.access(resolved.parent, os.W_OK):
        raise PermissionError(f"{file} cannot be written: nothing can be put into {Path(file).parent}")
    for name in filter(None, inputs):
        is_part = any(fnmatch(resolved.name, pattern) for pattern in MODEL_FILES)
        for path in _find_paths(cast(str, name)):
            if resolved == path or (is_part and resolved.exists() and resolved.parent == path):
                raise ValueError(f"{file} belongs to {name}, which is read: give another file")


def explain_unwritable(error: BaseException, library: str, folder: str | os.PathLike) -> OSError | None:
    """The error to raise where a library's cache in `folder` takes nothing more; `None` for any other `error`."""
    if not isinstance(error, OSError) or error.errno not in UNWRITABLE:
        return None
    return OSError(
        f"the cache of the {library}, {folder}, cannot be written ({error.strerror}): free space or give rights, "
        "or let the environment variable HF_HOME name another folder"
    )


def find_full_disk(error: BaseException) -> str:
    """What is full if an error means a full disk, else ""; writers of tensors wrap the error of the system."""
    code, text = getattr(error, "errno", None), str(error)
    return next((what for number, what in FULL_DISK.items() if code == number or os.strerror(number) in text), "")


# --- The folder of a model


def find_folder(source: str | os.PathLike) -> Path | None:
    """Return the folder of a model by the name that the user gave; `None` for a name on the Hub."""
    path = Path(os.path.expanduser(source))
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"{source} is a file, expected the folder of a checkpoint")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", os.fspath(source)):
        raise FileNotFoundError(f"{source} is no folder: expected the folder of a checkpoint, or a model's Hub name")
    return None


def check_folder(folder: Path) -> None:
    """Raise an error where a folder holds neither checkpoint nor export, or an adapter, ignored without peft."""
    if (folder / "adapter_config.json").is_file():
        beside = any((folder / name).is_file() for name in WEIGHT_FILES)
        raise ValueError(
            f"{folder} holds an adapter (adapter_config.json) "
            + ("beside a model: remove the files of the adapter, or" if beside else "and no whole model:")
            + " merge it into its base with merge_and_unload() of peft, and give the folder where save_pretrained "
            "writes the result"
        )
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}: give that of a checkpoint or an export")
    if not any((folder / name).is_file() for name in ("config.json", EXPORT_FILE)):
        if (folder / PAGE_FILE).is_file():
            raise ValueError(f"{folder} is a page of `lightformers web`: give the checkpoint that it was made of")
        inside = max(folder.glob("*/config.json"), default=None)  # of a compression: recovered
        example = f", such as {inside.parent}" if inside else ""
        raise FileNotFoundError(f"{folder} holds no config.json: give the folder of a checkpoint{example}")


# --- Folders that are complete or absent


def check_output(
    target: str | Path, *, overwrite: bool = False, inputs: Iterable[str | os.PathLike | None] = ()
) -> Path:
    """The folder to write, checked as by `atomic_output`, before work that takes long and would be lost."""
    target = check_place(target, inputs)
    with lock(target) as locked:
        if locked:
            _clean_up(target)
    check_content(target, overwrite)
    return target


@contextmanager
def atomic_output(
    target: str | Path, *, overwrite: bool = False, inputs: Iterable[str | os.PathLike | None] = ()
) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its place when the block ends without an exception.

    Otherwise, Ctrl-C included, it is removed and `target` stays as it was. Remains of a killed process are removed
    by the next run for the same target: it held a lock on a file beside `target`, which the system took from it. Where
    there are no locks (Windows, some network file systems), the folder of a dead process cannot be recognized. Its
    remains stay, and the later of two writers finds the output of the earlier at its end, and fails without
    `overwrite`.

    Args:
        target: the folder to write; folders above it are made.
        overwrite: replace the content of `target`, if `atomic_output` wrote all of it.
        inputs: folders or files that the work reads (`None` and names that are no path, such as a name on the Hub, do
            not matter); `target` must neither be nor hold any, wherever their links lead, nor lie in one.

    Raises:
        FileExistsError: `target` is a file, or a folder that is not empty and `overwrite` is not set, or one that
            holds files that this function did not write.
        BlockingIOError: another process is writing `target`.
        ValueError: `target` lies at a forbidden place: an input, the current folder, the home folder or one above
            them, a repository.
        OSError: the disk is full, or the place cannot be written.
    """
    target = check_place(target, inputs)
    with parents(target), lock(target) as locked:
        if locked:
            _clean_up(target)
        check_content(target, overwrite)
        temporary = beside(target, "tmp-" + secrets.token_hex(4))
        temporary.mkdir()
        try:
            yield temporary
            write_json({"files": list_entries(temporary)}, temporary / MANIFEST_FILE)
            open_to_readers(temporary, MANIFEST_FILE)
            _synchronize(temporary)
            _replace(target, temporary, overwrite)
        except BaseException as error:
            _explain_full_disk(error, temporary, target)
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _explain_full_disk(error: BaseException, temporary: Path, target: Path) -> None:
    """Raise `OSError` if a disk is full: that of the output, or that of the input."""
    if not (what := find_full_disk(error)):
        return
    if what == FULL_DISK[errno.EDQUOT] or shutil.disk_usage(temporary).free < FULL:
        raise OSError(f"{what}: {target} could not be written, and nothing was changed") from error
    raise OSError(
        f"a disk is full, but not that of {target}, of which nothing was changed: look at the cache of downloads and "
        f"data (HF_HOME), and at the temporary folder ({tempfile.gettempdir()})"
    ) from error


def find_foreign(folder: Path, manifest: str = MANIFEST_FILE) -> list[str]:
    """Files in a folder, at any depth, that are not among `files` of its manifest, in alphabetical order."""
    try:
        own = read_json(folder / manifest).get("files")
    except (ValueError, OSError, RecursionError):
        own = None
    own = own if isinstance(own, list) else []
    return [name for name in list_entries(folder, manifest) if name not in own]


def list_entries(folder: Path, manifest: str = MANIFEST_FILE) -> list[str]:
    """Files and folders in a folder, at any depth, less the manifest, in alphabetical order."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path != folder / manifest)


def shorten_list(names: Sequence[str], most: int) -> str:
    """The first names, with commas between, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def refuse_foreign(folder: Path, foreign: list[str]) -> None:
    """Raise `FileExistsError` where a folder that is to be replaced holds anything `foreign`."""
    if foreign:
        raise FileExistsError(
            f"{folder} holds {shorten_list(foreign, 3)}, which this package did not write there and does not "
            "overwrite: give another folder, or remove it yourself"
        )


def check_place(target: str | Path, inputs: Iterable[str | os.PathLike | None]) -> Path:
    """The folder to write, without links. Raises `ValueError` where none may be written."""
    target = Path(os.path.abspath(os.path.expanduser(target)))
    if (size := len(os.fsencode(target.name))) > LONGEST_NAME:
        raise ValueError(
            f"the output's name {target.name[:40]}… has {size} bytes, more than the {LONGEST_NAME} that file systems "
            "take: give a shorter one"
        )
    target = target.resolve()
    home, here = Path(os.path.expanduser("~")).resolve(), Path.cwd()
    if target == target.parent or target in (home, *home.parents):
        raise ValueError(f"the output {target} is or holds your home folder: give a new folder in it")
    if target in (here, *here.parents):
        raise ValueError(f"the output {target} holds the current folder and would be replaced: give another folder")
    for name in filter(None, inputs):
        for path in _find_paths(cast(str, name)):
            if target in (path, *path.parents) or (path in target.parents and path.is_dir()):
                raise ValueError(f"the output {target} must be apart from {path}, which is read: give another folder")
    if os.path.ismount(target):
        raise ValueError(f"the output {target} is where a disk is mounted, give a folder in it")
    for name in (".git", ".hg", ".svn"):
        if (target / name).exists():
            raise ValueError(f"the output {target} is a repository ({name}): give another folder")
    for path in (target, *target.parents):
        if path.exists() and not path.is_dir():
            raise FileExistsError(f"{path} is a file, expected a folder to write")
    above = next(path for path in target.parents if path.exists())
    if not os.access(above, os.W_OK | os.X_OK):
        raise PermissionError(f"{target} cannot be written: nothing can be put into {above}")
    return target


def _find_paths(name: str | os.PathLike) -> Iterator[Path]:
    """Where an input lies: as it is named, where its links and its files' lead; nothing if it is no path."""
    path = Path(os.path.abspath(os.path.expanduser(name)))
    links = [entry for entry in path.iterdir() if entry.is_symlink()] if os.path.isdir(path) else []
    for found in (path, *links):
        if os.path.lexists(found):
            yield found.parent.resolve() / found.name
            yield Path(os.path.realpath(found))


def check_content(target: Path, overwrite: bool) -> None:
    """Raise `FileExistsError` if a folder holds files that must not be replaced."""
    if not _is_full(target):
        return
    if not overwrite:
        raise FileExistsError(
            f"{target} is not empty: give another folder, or replace it with overwrite=True (--overwrite)"
        )
    refuse_foreign(target, find_foreign(target))


def _is_full(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


@contextmanager
def parents(target: Path) -> Iterator[None]:
    """Make the folders above `target`; after an exception those that are empty go again."""
    made = [folder for folder in target.parents if not folder.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise


@contextmanager
def lock(target: Path) -> Iterator[bool]:
    """Let no other process write `target`. Gives whether it is locked: there are locks, and a folder to hold one.

    The lock of a process that was killed is gone a moment after the process: a lock that is held is tried for a while.
    """
    if not target.parent.is_dir():
        yield False
        return
    path, descriptor, end = beside(target, "lock"), None, time.monotonic() + PATIENCE
    try:
        while fcntl is not None and descriptor is None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_there = os.path.samestat(os.fstat(descriptor), os.stat(path))
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                is_there = False
                time.sleep(0.05)
            except FileNotFoundError:
                is_there = False
            if not is_there:  # its previous holder removed it, or it is held
                os.close(descriptor)
                descriptor = None
        locked = descriptor is not None
    except BlockingIOError:
        os.close(cast(int, descriptor))
        raise BlockingIOError(f"{target} is being written by another process: wait, or give another folder") from None
    except OSError:
        if descriptor is None:
            raise
        locked = False
    try:
        yield locked
    finally:
        if descriptor is not None:
            with suppress(OSError):
                path.unlink()
            os.close(descriptor)


def _replace(target: Path, temporary: Path, overwrite: bool) -> None:
    """Rename `temporary` to `target`, or fail and keep both; another process may have written the target."""
    check_content(target, overwrite)
    old = beside(target, "old-" + secrets.token_hex(4))
    try:
        if _is_full(target):
            target.rename(old)
        elif os.name == "nt" and target.exists():
            target.rmdir()
        temporary.rename(target)  # fails where another put a folder that is not empty
    finally:
        if old.exists() and not target.exists():
            old.rename(target)
    _synchronize(target.parent, deep=False)
    if old.exists():
        _remove(old, target)


def open_to_readers(folder: Path, known: str) -> None:
    """Give the other files the read permissions of the file `known`: safetensors makes files for their owner alone."""
    mode = (folder / known).stat().st_mode & 0o666
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink() and mode & ~file.stat().st_mode:
            file.chmod(file.stat().st_mode | mode)


def _synchronize(folder: Path, *, deep: bool = True) -> None:
    """Make sure that the disk holds a folder and its files, so that no power cut after the rename loses them."""
    for path in (*(folder.rglob("*") if deep else ()), folder):
        if os.name == "nt" and path.is_dir():
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove(folder: Path, target: Path) -> None:
    """Remove a folder beside `target`, which at no moment is there in part under a name that anybody trusts."""
    with suppress(OSError):
        folder = folder.rename(beside(target, "tmp-" + secrets.token_hex(4)))
        shutil.rmtree(folder, ignore_errors=True)


def _clean_up(target: Path) -> None:
    """Remove files of dead processes beside the locked `target`; restore the old output if one died replacing it."""
    start = re.escape(beside(target, "").name)
    pattern = re.compile(rf"{start}(tmp|old)-(\d+-)?[0-9a-f]{{8}}")  # older versions wrote a process number, too
    found = [(match[1], path) for path in target.parent.iterdir() if (match := pattern.fullmatch(path.name))]
    aside = sorted((path for word, path in found if word == "old"), key=lambda path: path.stat().st_ctime_ns)
    if aside and not _is_full(target):
        if target.exists():
            target.rmdir()
        aside.pop().rename(target)
    # If another process has taken the place of the old output, this may be the only copy.
    finished = aside if (target / MANIFEST_FILE).is_file() else []
    for path in (*finished, *(path for word, path in found if word == "tmp")):
        _remove(path, target)
