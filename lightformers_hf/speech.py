"""Sound and its transcripts: folders in the layout of `audiofolder`, data sets with a column of sound, sound files.

soundfile decodes (WAV, FLAC, OGG, MP3 …) and is imported when something is read. Sound is decoded when it is needed.
"""

from __future__ import annotations

import glob
import hashlib
import io
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .data_files import SOUNDS, is_file_name, split_names, visible_files
from .files import write_json
from .text import load_rows

if TYPE_CHECKING:
    from transformers import FeatureExtractionMixin, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

RATE = 16_000  # samples of a second, of all models
TABLES = tuple(f"metadata.{suffix}" for suffix in ("jsonl", "csv", "parquet"))
TRANSCRIPTS = ("text", "transcription", "transcript", "sentence", "normalized_text")
FILES = ("file_name", "audio", "file", "path")
# Sound of this power, relative to the loudest parts of a piece, is silence; so is that of all pieces below the second.
SILENCE, QUIETEST = 1e-4, 1e-9
STEP = RATE / 50  # samples of sound from one time to the next
ALONE = 4  # as of `join_lengths`
AROUND = 5  # positions around speech that belong to it
# A first token with such a name is that of a language.
LANGUAGE, NO_TIMES = "<|{}|>", "<|notimestamps|>"


@dataclass(frozen=True)
class Sound:
    """Sound that is not decoded yet, and its transcript, if there is one."""

    name: str  # no other sound of the same data has it
    content: Path | bytes
    text: str | None = None

    def read(self) -> np.ndarray:
        """Return the samples, `RATE` a second, all channels as one; float32.

        Raises:
            ValueError: no sound, nothing in it, or values that are not finite.
        """
        try:
            import soundfile
        except ImportError:
            raise ValueError("sound is read by soundfile: pip install 'lightformers_hf[speech]'") from None
        file = io.BytesIO(self.content) if isinstance(self.content, bytes) else self.content
        try:
            samples, rate = soundfile.read(file, dtype="float32", always_2d=True)
        except (RuntimeError, OSError, TypeError) as error:
            reason = str(error).rstrip(".")
            raise ValueError(f"{self.name} can't be read as sound: {reason}. Convert it to FLAC or WAV") from None
        if not len(samples) or not np.isfinite(samples).all():
            what = "holds NaN or infinite values" if len(samples) else "holds no samples"
            raise ValueError(f"{self.name} {what}: remove it from the data")
        wave = samples.mean(axis=1)
        if rate != RATE:
            from scipy.signal import resample_poly

            divisor = math.gcd(rate, RATE)
            wave = resample_poly(wave, RATE // divisor, rate // divisor).astype(np.float32)
        return wave


def reads_sound(config: PreTrainedConfig) -> bool:
    """Whether a model with this configuration reads spectrograms."""
    return hasattr(config, "num_mel_bins")


def find_sounds(data: str, *, column: str | None = None, split: str = "train") -> list[Sound]:
    """Return the sounds of a folder, of a table of files, of a data set with a column of sound, or of one file.

    Args:
        data: a folder with `metadata.jsonl` or `metadata.csv`, or with sound files and folders alone; a sound file; a
            table (.jsonl, .csv, .parquet) with a column `file_name` or `audio`; a pattern of these, or several with
            commas between; or a data set on the Hub.
        column: the column of transcripts. `None`: one of `TRANSCRIPTS`, if there is one.
        split: the split of a data set on the Hub.

    Raises:
        FileNotFoundError: no such folder or file, or one that a table names.
        ValueError: no sound, or no such column.
    """
    path = Path(os.path.expanduser(data))
    if not os.path.exists(path) and is_file_name(data):
        names = split_names(data) if "," in data else sorted(glob.glob(str(path), recursive=True))
        if names:
            return _distinct([sound for name in names for sound in find_sounds(name, column=column, split=split)])
    if path.is_file() and path.suffix.lower() in SOUNDS:
        return [Sound(path.name, path)]
    if path.is_dir():
        table = next((path / name for name in TABLES if (path / name).is_file()), None)
        if table is None:
            return _find_in_subfolders(path, column)
        data, path = str(table), table
    rows = load_rows(data, split=split)
    names = [name for name in FILES if name in rows.column_names]
    if not names:
        raise ValueError(
            f"{data} has no column of sound: it has {', '.join(rows.column_names)}. Expected {' or '.join(FILES)}"
        )
    if column is not None and column not in rows.column_names:
        raise ValueError(f"{data} has no column {column!r} of transcripts: it has {', '.join(rows.column_names)}")
    column = column or next((name for name in TRANSCRIPTS if name in rows.column_names), None)
    if type(rows.features[names[0]]).__name__ == "Audio":
        rows = rows.cast_column(names[0], type(rows.features[names[0]])(decode=False))
    folder = path.parent if is_file_name(data) else Path()
    texts = rows[column] if column else [None] * len(rows)
    sounds = [_sound(value, text, folder, data) for value, text in zip(rows[names[0]], texts, strict=True)]
    return _distinct(sounds)


def _find_in_subfolders(folder: Path, column: str | None) -> list[Sound]:
    """The sounds of a folder without a table, with the transcripts of the tables that its subfolders have."""
    files = visible_files(folder)
    tables = sorted({file.parent for file in files if file.name in TABLES})
    known = {sound.content: sound for inner in tables for sound in find_sounds(str(inner), column=column)}
    inside = [file for file in files if file.suffix.lower() in SOUNDS]
    if not inside:
        raise ValueError(f"{folder} holds no sound: expected files such as {', '.join(SOUNDS[:5])}")
    return [replace(known.get(file, Sound("", file)), name=str(file.relative_to(folder))) for file in inside]


def _distinct(sounds: list[Sound]) -> list[Sound]:
    """Sounds with their rows in names that several have: sounds made of arrays have none, and folders equal ones."""
    counts = Counter(sound.name for sound in sounds)
    return [
        sound if counts[sound.name] == 1 else replace(sound, name=f"{sound.name} (row {row})")
        for row, sound in enumerate(sounds, 1)
    ]


def _sound(value: Any, text: Any, folder: Path, data: str) -> Sound:
    """The sound of a row: a file's name, or what `datasets` stores in a column of sound."""
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{data}: a transcript is {type(text).__name__}, expected text")
    text = text.strip() or None if text else None
    if isinstance(value, dict) and value.get("bytes"):
        return Sound(str(value.get("path") or data), value["bytes"], text)
    name = value.get("path") if isinstance(value, dict) else value
    if not isinstance(name, str):
        raise ValueError(f"{data} has a row without sound: expected the name of a file")
    if not (file := folder / name).is_file():
        raise FileNotFoundError(f"{file}, which {data} names, is not there")
    return Sound(name, file, text)


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a sound that a model hears at once."""

    wave: np.ndarray
    text: str | None
    spoken: np.ndarray  # whether there is speech at each position of the encoder, also those behind the sound
    sounds: tuple[str, ...]  # fingerprints of the sounds that it is of


def sound_fingerprint(wave: np.ndarray) -> str:
    """Twelve hexadecimal digits that identify a sound, by its samples in 16 bits."""
    return hashlib.sha256(np.round(wave * 2**15).astype("<i4").tobytes()).hexdigest()[:12]


def cut_pieces(sounds: Sequence[Sound], *, seconds: float, positions: int) -> list[Piece]:
    """Return the sounds in pieces of at most so many seconds, without the silent ones.

    A sound that is cut loses its transcript, because nothing tells which words are in which piece.
    """
    longest, pieces = round(seconds * RATE), []
    for sound in sounds:
        wave = sound.read()
        known = (sound_fingerprint(wave),)
        text = sound.text if len(wave) <= longest else None
        for start in range(0, len(wave), longest):
            spoken = find_speech(part := wave[start : start + longest], longest // positions, positions)
            if spoken.any():
                pieces.append(Piece(part, text, spoken, known))
    return pieces


def join_lengths(lengths: Sequence[int], longest: int, kinds: Sequence[Any] | None = None) -> list[list[int]]:
    """Return indices of consecutive lengths of one kind in groups of at most `longest` in total.

    An encoder takes as long for silence as for speech. Every `ALONE`-th group has one index, so that silence is heard.
    """
    groups: list[list[int]] = []
    for index, length in enumerate(lengths):
        last = groups[-1] if len(groups) % ALONE else []
        fits = last and sum(lengths[number] for number in last) + length <= longest
        if fits and (kinds is None or kinds[last[0]] == kinds[index]):
            last.append(index)
        else:
            groups.append([index])
    return groups


def join_pieces(pieces: Sequence[Piece], *, seconds: float) -> list[Piece]:
    """Return pieces joined to longer ones of at most so many seconds, as of `join_lengths`.

    A piece has a transcript if all of its parts have one.
    """
    joined = []
    for group in join_lengths([len(piece.wave) for piece in pieces], round(seconds * RATE)):
        parts = [pieces[index] for index in group]
        wave, texts = np.concatenate([part.wave for part in parts]), [part.text for part in parts if part.text]
        positions = len(parts[0].spoken)
        spoken = find_speech(wave, round(seconds * RATE) // positions, positions)
        sounds = tuple(sound for part in parts for sound in part.sounds)
        joined.append(Piece(wave, " ".join(texts) if len(texts) == len(parts) else None, spoken, sounds))
    return joined


def find_speech(wave: np.ndarray, step: int, positions: int) -> np.ndarray:
    """Return whether each of so many positions, `step` samples long, is loud, or near one that is."""
    padded = np.zeros(step * positions, np.float32)
    padded[: len(wave)] = wave[: len(padded)]
    power = np.square(padded).reshape(positions, step).mean(axis=1)
    heard = power[: -(-len(wave) // step)]
    loud = (power > SILENCE * np.quantile(heard, 0.95)) & (power > QUIETEST)
    return np.convolve(loud, np.ones(2 * AROUND + 1), mode="same") > 0


def prompt_of(config: GenerationConfig, language: str | None, *, times: bool = False) -> list[int]:
    """Return the tokens before a transcript: start, language and task of a multilingual model, and without times."""
    tokens = [config.decoder_start_token_id]
    if getattr(config, "is_multilingual", False):
        tokens += [config.lang_to_id[LANGUAGE.format(language)], config.task_to_id["transcribe"]]
    return tokens if times else [*tokens, config.no_timestamps_token_id]


def complete_generation(config: GenerationConfig, tokenizer: PreTrainedTokenizerBase | None, name: str) -> None:
    """Add what an old generation configuration of Whisper lacks, by the names of the tokenizer's tokens.

    Raises `ValueError` if the tokenizer has no such tokens.
    """
    found = [getattr(config, name, None) for name in ("no_timestamps_token_id", "is_multilingual")]
    if None not in found or tokenizer is None:
        return
    tokens = tokenizer.get_vocab()
    tasks = {name: tokens.get(LANGUAGE.format(name)) for name in ("transcribe", "translate")}
    if NO_TIMES not in tokens or None in tasks.values():
        raise ValueError(
            f"{name} has neither a generation_config.json with no_timestamps_token_id, nor a tokenizer with "
            f"{NO_TIMES}: put these files of the model that it was trained from there"
        )
    config.update(_from_model_config=False)  # with which transformers would ignore the fields below in a file
    config.no_timestamps_token_id, config.max_initial_timestamp_index = tokens[NO_TIMES], 50
    config.is_multilingual = "" in tokens  # as in OpenAI's tokenizers
    if config.is_multilingual:
        config.task_to_id = tasks
        config.lang_to_id = {
            token: index for token, index in tokens.items() if re.fullmatch(r"<\|[a-z]{2,3}\|>", token)
        }


def check_language(config: GenerationConfig, language: str | None, name: str) -> None:
    """Raise `ValueError` for a language that a model does not transcribe."""
    if language is None:
        return
    if not getattr(config, "is_multilingual", False):
        if language != "en":
            raise ValueError(f"the language is {language!r}, but {name} transcribes English only: remove the language")
    elif LANGUAGE.format(language) not in config.lang_to_id:
        known = ", ".join(sorted(token.strip("<|>") for token in config.lang_to_id))
        raise ValueError(f"the language is {language!r}; {name} transcribes {known}")


def check_extractor(extractor: Any, config: PreTrainedConfig, name: str) -> None:
    """Raise `ValueError` where the spectrograms of a feature extractor are not those that a model reads."""
    made = extractor.feature_size, extractor.nb_max_frames, extractor.sampling_rate
    expected = config.num_mel_bins, 2 * config.max_source_positions, RATE
    if made != expected:
        bands, frames, rate = made
        raise ValueError(
            f"the feature extractor (preprocessor_config.json) of {name} makes {bands} bands and {frames} frames of "
            f"sound with {rate} samples a second, but the model reads {expected}: put the file of the model that it "
            "was trained from there"
        )


def transcript_tokens(tokenizer: PreTrainedTokenizerBase, text: str, config: GenerationConfig) -> list[int]:
    """Return the tokens of a transcript, and the end."""
    return [*tokenizer(f" {text}", add_special_tokens=False)["input_ids"], config.eos_token_id]


def add_times(parts: Sequence[tuple[int, list[int]]], config: GenerationConfig) -> list[int]:
    """Return the tokens of a transcript with times, and the end.

    Args:
        parts: of each part, the samples of its sound, and the tokens of its transcript with their end.
    """
    tokens, start, first = [], 0, config.no_timestamps_token_id + 1
    for length, text in parts:
        tokens += [first + round(start / STEP), *text[:-1], first + round((start + length) / STEP)]
        start += length
    return [*tokens, config.eos_token_id]


def save_extractor(
    extractor: FeatureExtractionMixin, tokenizer: PreTrainedTokenizerBase | None, folder: str | Path
) -> None:
    """Write a feature extractor beside a tokenizer, and the spellings of the tokenizer, which it does not write."""
    extractor.save_pretrained(folder)
    if spelling := getattr(tokenizer, "english_spelling_normalizer", None):
        write_json(spelling, Path(folder, "normalizer.json"))
