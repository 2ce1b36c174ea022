"""Recovery of a model for speech, whose pairs are the names of pieces of sound and their transcripts."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSpeechSeq2Seq

from ..conversion.calibration_speech import HEARD_AT_ONCE, SILENT, hear, replace_tokens, token_weights
from ..corpus import Corpus, Pairs
from ..evaluation.quality import SPEECH, choose_metrics
from ..evaluation.transcribe import load_processor, normalizer_of
from ..files import read_json, write_json
from ..options import OptionError
from ..recovery import load_trainable
from ..recovery.runs import NEAR_SOUND, RecoverySettings
from ..recovery.trainer import IGNORED
from ..speech import (
    RATE,
    Piece,
    add_times,
    check_extractor,
    check_language,
    cut_pieces,
    find_sounds,
    join_lengths,
    prompt_of,
    save_extractor,
    transcript_tokens,
)
from .run import FOR_TRANSLATIONS, TRANSLATIONS_FILE, Recovery, Run

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_SECONDS = 7200  # of sound, which stays in memory
PIECE = 400  # what a piece counts of the tokens of a batch
SPEEDS = 0.88, 1.12  # of sound in training: a little sound is heard again and again
POSITIONS = 16  # of the encoder for each token of a transcript, about
QUIETER = 5, 30  # decibels by which backgrounds are quieter than the sound
FEWEST = 20  # pieces that are transcribed, however short the time is


@dataclass(eq=False)
class SoundRun(Run):
    """Models and data of one recovery from sound.

    Pieces of a batch are joined to windows as long as the encoder reads, because silence costs as much as speech.

    Attributes:
        pieces: {name: piece} of all sound that was read.
        spoken: {name of a piece: its language, of a multilingual model}.
        known: {(data, name of a piece): its transcript and its language}.
    """

    pieces: dict[str, Piece] = field(init=False, default_factory=dict)
    spoken: dict[str, str | None] = field(init=False, default_factory=dict)
    known: dict[tuple[str, str], list] = field(init=False, default_factory=dict)
    auto_model, unit = AutoModelForSpeechSeq2Seq, "sounds"
    cpu_attention = None
    near = NEAR_SOUND
    averages = True  # whisper-base at ratio 2: the mean was nearer to its teacher on other speech than either

    @classmethod
    def load_model(
        cls, folder: Path, tokenizer: Any, languages: Any, attention: str | None, quantization: str | None = None
    ) -> PreTrainedModel:
        return load_trainable(str(folder), attention, cls.auto_model, dropout=False)

    @property
    def one_language(self) -> bool:
        """Whether the teacher makes the transcripts."""
        return any(piece.text is None for piece in self.pieces.values())

    @property
    def compares_with_teacher(self) -> bool:
        """Whether most references of the validation are transcripts of the teacher."""
        texts = [self.pieces[name].text for name in self.held_out["source"]]
        return 2 * texts.count(None) > len(texts)

    @cached_property
    def extractor(self) -> Any:
        extractor = load_processor(self.folder).feature_extractor
        check_extractor(extractor, self.model.config, str(self.folder))
        return extractor

    def open_corpus(self) -> Corpus:
        """Pieces of the sound, with the user's transcripts or those of the teacher."""
        if self.data is None:
            raise OptionError("data", " is missing: a model for speech recovers from sound, give a folder of it")
        return Corpus.of(self.read_sound(self.data), name=self.data)

    def fingerprints(self, sources: list[str]) -> list[str]:
        return [self.pieces[name].sounds[0] for name in sources]

    def read_validation(self, data: str) -> Dataset:
        return self.read_sound(data)

    def read_sound(self, data: str) -> Dataset:
        """Names of pieces, and transcripts. The teacher transcribes for a quarter of the time at most."""
        language, column = self.languages
        self.distiller.generation_config = self.model.generation_config  # complete since the conversion
        check_language(self.distiller.generation_config, language, str(self.teacher))
        sounds = find_sounds(data, column=column)
        random.Random(self.call.seed).shuffle(sounds)
        file = self.output / TRANSLATIONS_FILE
        known = {tuple(row[:2]): row[2:] for row in read_json(file)["sound"]} if self.resumes else {}
        rows: dict[str, list[str]] = {"source": [], "target": []}
        end, seconds = time.monotonic() + FOR_TRANSLATIONS * 60 * self.call.minutes, 0.0
        settings = {"seconds": self.extractor.chunk_length, "positions": self.model.config.max_source_positions}
        named = (
            (f"{data}/{sound.name}#{number}", piece)
            for sound in sounds
            for number, piece in enumerate(cut_pieces([sound], **settings))
        )
        while group := dict(islice(named, HEARD_AT_ONCE)):
            if self.resumes:
                group = {name: piece for name, piece in group.items() if (data, name) in known}
            untold = next((name for name, piece in group.items() if piece.text is None), None)
            if self.call.translations and data == self.data:
                group = {name: replace(piece, text=None) for name, piece in group.items()}
            elif self.call.translations is False and untold:
                raise OptionError(
                    "translations",
                    f" is False, but {untold} has no transcript: remove it, and the teacher transcribes",
                )
            if not self.resumes:
                texts = self.transcribe([*group.values()], language)
                known |= {(data, name): [*text] for name, text in zip(group, texts, strict=True)}
            for name, piece in group.items():
                text, self.spoken[name] = known[data, name]
                self.pieces[name] = piece
                rows["source"].append(name)
                rows["target"].append(text)
                seconds += len(piece.wave) / RATE
            is_enough = time.monotonic() > end or seconds > MOST_SECONDS
            if not self.resumes and is_enough and len(rows["source"]) >= FEWEST:
                break
        if not rows["source"]:
            raise ValueError(f"{data} is silent: expected speech")
        self.known |= known
        return Dataset.from_dict(rows)

    def transcribe(self, pieces: Sequence[Piece], language: str | None) -> list[tuple[str, str | None]]:
        """Transcripts of pieces, the teacher's where they have none, and their languages, of a multilingual model."""
        multilingual = getattr(self.distiller.generation_config, "is_multilingual", False)
        texts = [piece.text for piece in pieces if piece.text is not None]
        if len(texts) == len(pieces) and (language is not None or not multilingual):
            return [(text, language) for text in texts]
        return [
            (self.tokenizer.decode(heard.text, skip_special_tokens=True).strip(), heard.language)
            for heard in hear(self.distiller, self.tokenizer, self.extractor, pieces, language)
        ]

    def adapt(self, settings: RecoverySettings) -> RecoverySettings:
        """Smaller steps; the teacher's predictions alone if it makes the transcripts, which say little after errors.

        The states of the encoder, 1,500 of a window, would otherwise count more than all else.
        """
        alpha, hidden = 1.0 if self.one_language else settings.alpha, settings.hidden_weight / POSITIONS
        return replace(settings, learning_rate=settings.learning_rate / 2, alpha=alpha, hidden_weight=hidden)

    def ask_for_texts(self, seconds: float, wanted: bool | None, *, lost: bool) -> int:
        """Write the transcripts, and return that no pairs are beside them."""
        write_json({"sound": [[*key, *row] for key, row in self.known.items()]}, self.output / TRANSLATIONS_FILE)
        return 0

    def choose_metrics(self, sources: list[str], references: list[str]) -> list[str]:
        return choose_metrics(self.call.metrics, sources, references, default=SPEECH)

    def time_each(self) -> float:
        """Seconds of the transcription of a piece."""
        start, names = time.monotonic(), self.held_out["source"][:HEARD_AT_ONCE]
        pieces = [replace(self.pieces[name], text=None) for name in names]
        hear(self.distiller, self.tokenizer, self.extractor, pieces, self.spoken[names[0]])
        return (time.monotonic() - start) / len(names)

    def tokenize_pool(self, pairs: Pairs) -> SoundPool:
        self.last_pool = pairs, SoundPool(self, pairs)
        return self.last_pool[1]

    @cached_property
    def scored(self) -> ScoredSound:
        return ScoredSound(self, self.held_out[:])

    def train(self, record: dict[str, Any]) -> Recovery:
        recovery = super().train(record)
        save_extractor(self.extractor, self.tokenizer, self.output)
        return recovery

    def collator(self, model: PreTrainedModel) -> Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]:
        return self.collate

    @cached_property
    def likely(self) -> torch.Tensor:
        """Weights of the tokens that are errors."""
        return token_weights(self.tokenizer, self.model.config.eos_token_id)

    def window(
        self, parts: list[tuple[str, np.ndarray, str]], *, times: bool, errors: random.Random | None = None
    ) -> dict[str, Any]:
        """Pieces of one language (name, sound, transcript) behind each other: decoder inputs, labels, and sound.

        `errors` draws wrong tokens for the inputs. The labels stay those of the transcript.
        """
        config = self.distiller.generation_config
        prompt = prompt_of(config, self.spoken[parts[0][0]], times=times)
        said = [(len(wave), transcript_tokens(self.tokenizer, text, config)) for _, wave, text in parts]
        joined = [token for _, text in said for token in text[:-1]]
        sequence = [*prompt, *(add_times(said, config) if times else [*joined, config.eos_token_id])]
        sequence = sequence[: self.longest + 1]
        labels = [*[IGNORED] * (len(prompt) - 1), *sequence[len(prompt) :]]
        inputs = sequence[:-1]
        if errors:
            text = torch.tensor(inputs[len(prompt) :])
            mixed = replace_tokens(text, self.likely, torch.Generator().manual_seed(errors.getrandbits(32)))
            inputs[len(prompt) :] = torch.where(text < config.eos_token_id, mixed, text).tolist()
        wave = np.concatenate([wave for _, wave, _ in parts])
        return {"input_features": wave, "decoder_input_ids": inputs, "labels": labels}

    def collate(self, windows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """A batch of windows."""
        extractor, end = self.extractor, self.model.config.eos_token_id
        waves = [window["input_features"] for window in windows]
        features = extractor(waves, sampling_rate=extractor.sampling_rate, return_tensors="pt").input_features
        positions = self.model.config.max_source_positions
        step = round(RATE * extractor.chunk_length / positions)
        places = torch.arange(positions)
        mask = (places % SILENT == 0) | (places < torch.tensor([[-(-len(wave) // step)] for wave in waves]))
        padded = {
            name: pad_sequence(
                [torch.tensor(window[name]) for window in windows], batch_first=True, padding_value=value
            )
            for name, value in (("decoder_input_ids", end), ("labels", IGNORED))
        }
        return {"input_features": features, "attention_mask": mask.long(), **padded}


def change_speed(wave: np.ndarray, speed: float, longest: int) -> np.ndarray:
    """Sound that is so many times as fast, and higher, but not above so many samples (Ko et al. 2015)."""
    from scipy.signal import resample

    return resample(wave, min(round(len(wave) / speed), longest)).astype(np.float32)


def add_background(wave: np.ndarray, others: Sequence[np.ndarray], draw: random.Random) -> np.ndarray:
    """Sound with some of the `others` in the background, each with a chance of a half, at a random level."""
    power = float(np.square(wave).mean())
    for other in others:
        if draw.random() < 0.5 and (own := float(np.square(other).mean())) > 0:
            level = 10 ** (-draw.uniform(*QUIETER) / 20) * math.sqrt(power / own)
            wave = wave + np.float32(level) * np.resize(other, len(wave))
    return wave


class SoundPool:
    """Pieces of sound and their transcripts, as a `TokenizedPool` has pairs of sentences."""

    def __init__(self, run: SoundRun, pairs: Pairs):
        self.run, self.pairs = run, pairs
        size = len(pairs["source"])
        self.lengths = {"source": [min(PIECE, run.longest)] * size, "target": [0] * size}

    def __len__(self) -> int:
        return len(self.pairs["source"])

    def features(self, rows: list[int]) -> list[dict[str, Any]]:
        """The windows of a batch: at random are speeds, speech and noise in the background, times, and errors."""
        run, draw = self.run, random.Random(repr(rows))
        longest = RATE * run.extractor.chunk_length
        names, texts = ([self.pairs[side][row] for row in rows] for side in ("source", "target"))
        waves = [change_speed(run.pieces[name].wave, draw.uniform(*SPEEDS), longest) for name in names]
        noise = np.random.default_rng(draw.getrandbits(32)).standard_normal(longest).astype(np.float32)
        speech = run.pieces[self.pairs["source"][draw.randrange(len(self))]].wave
        waves = [add_background(wave, (speech, noise), draw) for wave in waves]
        groups = join_lengths([len(wave) for wave in waves], longest, [run.spoken[name] for name in names])
        parts = [*zip(names, waves, texts, strict=True)]
        return [
            run.window(
                [parts[number] for number in group],
                times=draw.random() < 0.5,
                errors=draw if draw.random() < 0.5 else None,
            )
            for group in groups
        ]


class ScoredSound(torch.utils.data.Dataset):
    """The validation, as a `ScoredPart` has sentences: a piece in a row, in their order."""

    def __init__(self, run: SoundRun, pairs: Pairs):
        self.run, self.pairs, self.tokens = run, pairs, self
        self.normalize = normalizer_of(load_processor(run.folder), run.languages[0])
        self.references = [self.normalize(text) for text in pairs["target"]]
        self.longest = max(len(run.tokenizer(text)["input_ids"]) for text in pairs["target"])

    def __len__(self) -> int:
        return len(self.references)

    def __getitem__(self, row: int) -> dict[str, Any]:
        name = self.pairs["source"][row]
        return self.run.window([(name, self.run.pieces[name].wave, self.pairs["target"][row])], times=False)

    def decode(self, predictions: np.ndarray) -> list[str]:
        """The normalized texts of generated tokens (rows, T), padded with negative ids."""
        tokenizer = self.run.tokenizer
        predictions = np.where(predictions < 0, tokenizer.pad_token_id, predictions)[: len(self.references)]
        return [self.normalize(text) for text in tokenizer.batch_decode(predictions, skip_special_tokens=True)]
