"""Transcripts of sound by a model for speech, their error rates, and the time that they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForSpeechSeq2Seq, AutoProcessor, GenerationConfig

from .. import speech
from ..engines import RunningSpeech, check_cpu, load_engine_file
from ..files import EXPORT_FILE, read_json
from ..loading import load_pretrained, no_extractor
from ..speech import RATE, Sound, check_extractor, complete_generation, find_sounds, prompt_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin

PROMPT = 4  # tokens before a transcript: start, language, task, and no time stamps


@dataclass(frozen=True, eq=False)
class SpeechEngine:
    """An exported model for speech, run by its engine."""

    model: RunningSpeech
    generation_config: GenerationConfig
    parameters: int
    positions: int  # tokens at most

    @classmethod
    def load(cls, folder: Path, threads: int) -> SpeechEngine:
        """Raises `ValueError` if the engine is not installed."""
        description = read_json(folder / EXPORT_FILE)
        generation = GenerationConfig.from_pretrained(folder)
        running = load_engine_file(description["engine"]).load_speech(folder, generation, threads)
        return cls(running, generation, description["parameters"], description["max_position_embeddings"])

    def transcribe(
        self, sound: Sound, processor: ProcessorMixin, language: str | None, num_beams: int, max_new_tokens: int
    ) -> str:
        """Return the transcript of a sound, each piece as long as the encoder reads by itself."""
        wave, extractor, texts = sound.read(), processor.feature_extractor, []
        for start in range(0, len(wave), size := extractor.chunk_length * RATE):
            piece = wave[start : start + size]
            features = extractor(piece, sampling_rate=RATE, return_tensors="np").input_features
            if language is None and getattr(self.generation_config, "is_multilingual", False):
                language = self.model.find_language(features)
            prompt = prompt_of(self.generation_config, language)
            tokens, _ = self.model.transcribe(features, prompt, num_beams=num_beams, max_new_tokens=max_new_tokens)
            texts.append(processor.decode(tokens, skip_special_tokens=True).strip())
        return " ".join(texts)


def reads_sound(folder: Path) -> bool:
    """Whether a checkpoint, or an export, is a model for speech."""
    if description := read_json(folder / EXPORT_FILE):
        return bool(description.get("reads_sound"))
    return speech.reads_sound(load_pretrained(AutoConfig, folder))


def load_processor(folder: Path) -> ProcessorMixin:
    """Return the processor of a model for speech. Raises `ValueError` if it has no feature extractor."""
    try:
        processor = load_pretrained(AutoProcessor, folder)
        processor.feature_extractor.chunk_length  # noqa: B018, a tokenizer alone has none
    except (OSError, AttributeError):
        raise no_extractor(folder) from None
    return processor


def load_speech(
    folder: Path, device: str = "cpu", threads: int = 1
) -> tuple[PreTrainedModel | SpeechEngine, ProcessorMixin]:
    """Return a model for speech in float32, or an export with so many threads, and its processor.

    Raises `ValueError` if it has no feature extractor, its engine is not installed, or a device is not the export's.
    """
    processor = load_processor(folder)
    if (folder / EXPORT_FILE).is_file():
        check_cpu(str(folder), device)
        return SpeechEngine.load(folder, threads), processor
    model = load_pretrained(AutoModelForSpeechSeq2Seq, folder, dtype=torch.float32)
    check_extractor(processor.feature_extractor, model.config, str(folder))
    complete_generation(model.generation_config, processor.tokenizer, str(folder))
    return model.eval().to(device), processor


@torch.inference_mode()
def transcribe(
    sounds: Sequence[Sound],
    model: PreTrainedModel | SpeechEngine,
    processor: ProcessorMixin,
    *,
    language: str | None = None,
    num_beams: int = 1,
    max_new_tokens: int | None = None,
    batch_size: int = 8,
    progress: bool = False,
) -> list[str]:
    """Return the transcript of each sound, of any length. The language of a multilingual model is found if `None`.

    A transcript has at most `max_new_tokens`, and at most as many tokens as the decoder has positions.
    """
    extractor = processor.feature_extractor
    is_multilingual = getattr(model.generation_config, "is_multilingual", False)
    known: dict[str, Any] = {"language": language} if language and is_multilingual else {}
    longest = extractor.chunk_length * RATE
    positions = model.positions if isinstance(model, SpeechEngine) else model.config.max_target_positions
    most = min(max_new_tokens or positions, positions - PROMPT)
    texts: list[str] = []
    if isinstance(model, SpeechEngine):
        bar = tqdm(sounds, desc="transcribing", unit="sound", disable=not progress)
        return [model.transcribe(sound, processor, language, num_beams, most) for sound in bar]
    for start in tqdm(range(0, len(sounds), batch_size), desc="transcribing", unit="batch", disable=not progress):
        waves = [sound.read() for sound in sounds[start : start + batch_size]]
        options: dict[str, Any] = {"return_attention_mask": True}
        rules = dict(known)
        if any(len(wave) > longest for wave in waves):
            options |= {"truncation": False, "padding": "longest"}
            rules["return_timestamps"] = True
        inputs = extractor(waves, sampling_rate=RATE, return_tensors="pt", **options).to(model.device)
        if is_multilingual and not language:  # `generate` would take that of the first sound for all
            found = model.detect_language(inputs.input_features[..., : 2 * model.config.max_source_positions])
            rules["language"] = processor.tokenizer.convert_ids_to_tokens(found.tolist())
        tokens = model.generate(**inputs, num_beams=num_beams, max_new_tokens=most, do_sample=False, **rules)
        texts += processor.batch_decode(tokens, skip_special_tokens=True)
    return [text.strip() for text in texts]


def normalizer_of(processor: ProcessorMixin, language: str | None) -> Callable[[str], str]:
    """Whisper's normalizer of texts: English spelling, numbers and words, or of other languages the punctuation."""
    from transformers.models.whisper.english_normalizer import BasicTextNormalizer, EnglishTextNormalizer

    if language not in (None, "en"):
        return BasicTextNormalizer()
    return EnglishTextNormalizer(getattr(processor.tokenizer, "english_spelling_normalizer", None) or {})


def read_transcribed(
    data: str, *, column: str | None, split: str = "test", max_samples: int | None = None
) -> list[Sound]:
    """As `find_sounds`. Raises `ValueError` for a sound without a transcript."""
    sounds = find_sounds(data, column=column, split=split)[:max_samples]
    if bare := [sound.name for sound in sounds if not sound.text]:
        raise ValueError(f"{data} has no transcript of {bare[0]}, with which a model's is compared: add it")
    return sounds
