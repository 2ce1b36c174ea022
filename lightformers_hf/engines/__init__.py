"""Other formats: `export` writes a model for an engine, `load_engine` runs any exported model.

Each engine of `ENGINES` is the file of that name here. It may import any library, also one that is not installed: the
file is imported when its engine is used. The extra of `pyproject.toml` that installs the library has the engine's
name. The file has:

- `QUANTIZATIONS`, the types of numbers that it can write, `float32` among them;
- `write(source, folder, quantization)`, which writes a `Teacher` and returns the `Expansion` of its expanded matrices,
  or raises `ValueError` for a model that the engine does not support;
- `load(folder, search, threads)`, which returns a model ready to run (see `RunningModel`);
- `describe_loading(folder)`, which returns one sentence about running the folder without this package, or `None`;
- if it has another name in sentences than its file, `NAME`; `EXPANDS_LOW_RANK = True` if it has no low-rank matrix
  multiplications;
- and if it can compute a part of the output layer, `write_shortlist(source, folder, quantization, shortlist)`, which
  writes a `Shortlist` to one of `SHORTLIST_FILES` beside the files of `write`;
- and if one folder can hold several quantizations, `BESIDE`, those that are written before int8;
- and if the Hub has another name for the program that loads the folder, `LIBRARY`; if ten lines of Python run the
  folder without this package, `EXAMPLE`, with `{folder}`, `{text}`, and `{first}` and `{skip}` for a forced token;
- and if it runs models for speech, `write_speech(source, folder, quantization)`, `load_speech(folder, generation,
  threads)`, which returns a model as of `RunningSpeech`, and the program that loads the folder, `SPEECH_PROGRAM`, with
  `SPEECH_EXAMPLE`, with `{folder}`, and `{dtype}` of `DTYPES`, by quantization;
- and if other programs need a configuration, `write_config(source, folder, prefix)`, which writes it.

This file imports neither PyTorch nor any engine: its names are imported when they are first used.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, cast

from ..registration import lazy_names

if TYPE_CHECKING:
    import numpy as np
    from transformers import GenerationConfig

    from ..checkpoints.teacher import Teacher
    from .engine import Engine, load_engine
    from .layers import Expansion
    from .search import Search
    from .shortlist import Shortlist
    from .write import ExportReport, export

__all__ = ["Engine", "ExportReport", "export", "load_engine"]

__getattr__, __dir__ = lazy_names(
    __name__, {"Engine": ".engine", "load_engine": ".engine", "ExportReport": ".write", "export": ".write"}
)

ENGINES = ("ctranslate2", "onnx")
ARGOS = "argos"  # CTranslate2, packed for Argos Translate and LibreTranslate
CHECKPOINTS = "transformers"  # the engine that runs checkpoints as they are


class RunningModel(Protocol):
    """A model under an engine; what it gets was checked by `Engine`, whose methods these are."""

    def generate(self, batch: list[list[int]], search: Search) -> list[list[int]]: ...

    def score(self, sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]: ...


class RunningSpeech(Protocol):
    """A model for speech under an engine. Features are one spectrogram (1, M, 2·S)."""

    def find_language(self, features: np.ndarray) -> str: ...

    def transcribe(
        self, features: np.ndarray, prompt: list[int], *, num_beams: int, max_new_tokens: int
    ) -> tuple[list[int], float]:
        """The tokens after a prompt, without the end, and the sum of their log p, with the end's; of beams, 0."""
        ...


class EngineFile(Protocol):
    """Names of an engine's file."""

    QUANTIZATIONS: tuple[str, ...]

    def write(self, source: Teacher, folder: Path, quantization: str) -> Expansion: ...

    def write_shortlist(self, source: Teacher, folder: Path, quantization: str, shortlist: Shortlist) -> None: ...

    SPEECH_EXAMPLE: str
    SPEECH_PROGRAM: str

    def write_speech(self, source: Teacher, folder: Path, quantization: str) -> Expansion: ...

    def load_speech(self, folder: Path, generation: GenerationConfig, threads: int) -> RunningSpeech: ...

    def load(self, folder: Path, search: Search, threads: int) -> RunningModel: ...

    def describe_loading(self, folder: Path) -> str | None: ...


def deployment_names() -> list[str]:
    """All ways to run a model that a benchmark compares: `transformers`, and every engine in float32 and in int8."""
    return [CHECKPOINTS, *(f"{name}{form}" for name in ENGINES for form in ("", "-int8"))]


def split_deployment(name: str) -> tuple[str, str | None]:
    """Engine and quantization of one of those, or of another type of numbers: `onnx-int4` → `onnx`, `int4`.

    Raises `ValueError` for another name.
    """
    engine, _, quantization = name.partition("-")
    if name in deployment_names() or (engine in ENGINES and quantization in load_engine_file(engine).QUANTIZATIONS):
        return engine, quantization or None
    raise ValueError(f"unknown engine {name!r}, expected one of {', '.join(deployment_names())}, or onnx-int4")


def check_engine_name(name: str) -> None:
    """Raise `ValueError` for the name of no engine that models are exported to."""
    if name not in ENGINES:
        raise ValueError(
            f"unknown engine {name!r}: models are exported to {' or '.join(ENGINES)}, and by `export` alone to {ARGOS}"
        )


def check_cpu(name: str | os.PathLike, device: object) -> None:
    """Raise `ValueError` where an export is to run on another device than the CPU."""
    if str(device) != "cpu":
        raise ValueError(f"{name} was exported to run on the CPU, not on {device}")


def load_engine_file(name: str) -> EngineFile:
    """The file of an engine. Raises `ValueError` where it is unknown, not installed, or lacks a part."""
    check_engine_name(name)
    try:
        module: ModuleType = importlib.import_module(f".{name}", __name__)
    except ModuleNotFoundError as error:
        if (error.name or __name__).partition(".")[0] == __name__.partition(".")[0]:
            raise
        extra = f"pip install 'lightformers_hf[{name}]'"
        raise ValueError(f"{name} needs {error.name}, which is not installed: {extra}") from error
    for part in ("QUANTIZATIONS", "write", "load", "describe_loading"):
        if not hasattr(module, part):
            raise ValueError(f"{module.__file__} is no engine: it lacks {part}")
    return cast("EngineFile", module)
