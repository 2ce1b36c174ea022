"""Calibration on sound: spectrograms with the user's transcripts, or with those of the teacher."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, takewhile

import torch
from torch import Tensor
from transformers import (
    FeatureExtractionMixin,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_outputs import BaseModelOutput

from ..checkpoints.teacher import Teacher
from ..languages import split_language
from ..speech import (
    RATE,
    Piece,
    add_times,
    check_language,
    cut_pieces,
    find_sounds,
    join_pieces,
    prompt_of,
    transcript_tokens,
)
from .options import CompressionOptions, StudyOptions
from .sensitivity import EVERY, GIVEN, Batch
from .workers import Step, cast_weights, fast_products

WINDOWS = 48  # pieces by default, each as long as the encoder reads
HEARD_AT_ONCE = 8  # pieces that are transcribed together: a step takes hardly longer than for one
SAMPLES = 16  # transcripts of a piece with errors of the teacher
# Share of their tokens that are any of the vocabulary: a few minutes of speech show few of its embeddings. The tokens
# of byte-pair encoding begin with common ones, of which so many are about equally likely. A share of them are numbers:
# transcripts of literature write few in digits, and models that had seen none repeated them without end.
REPLACED, COMMON, NUMBERS = 0.3, 200, 0.2
# Of the positions of silence, a share of 1 / SILENT counts: cross-attention sees them, and there are many.
SILENT = 8
# Settings of the teacher's generation that its transcripts follow.
RULES = ("suppress_tokens", "begin_suppress_tokens", "decoder_start_token_id")


def draw_pieces(teacher: Teacher, options: CompressionOptions, study: StudyOptions) -> list[Piece]:
    """Random pieces of the sound that `options` name, joined to longer ones, each as much as the encoder reads.

    Raises:
        ValueError: no sound is given, all is silent, or there is less than was asked for.
    """
    if options.calibration is None:
        raise ValueError(
            f"{teacher.name} is a model for speech, whose calibration needs sound: give a folder of speech with "
            "--calibration, or compress by --method paper. Noise can't replace speech"
        )
    extractor = teacher.need_extractor()
    language, column = (split_language(name)[0] for name in (options.source_lang, options.target_lang))
    check_language(teacher.generation_config, language, teacher.name)
    sounds = find_sounds(options.calibration, column=column)
    random.Random(study.calibration_seed).shuffle(sounds)
    seconds, positions = extractor.chunk_length, teacher.config.max_source_positions
    wanted = (options.calibration_samples or WINDOWS) * seconds * RATE
    parts: list[Piece] = []
    for sound in sounds:
        if sum(len(part.wave) for part in parts) >= wanted:
            break
        parts += cut_pieces([sound], seconds=seconds, positions=positions)
    if not parts:
        raise ValueError(f"{options.calibration} is silent: expected speech")
    pieces = join_pieces(parts, seconds=seconds)
    if options.calibration_samples is not None and len(pieces) < options.calibration_samples:
        raise ValueError(
            f"{options.calibration} holds {len(pieces)} pieces with speech, calibration_samples is "
            f"{options.calibration_samples}: give more sound, or ask for fewer"
        )
    return pieces[: options.calibration_samples or WINDOWS]


def sound_batches(
    model: PreTrainedModel, teacher: Teacher, pieces: Sequence[Piece], language: str | None, seed: int = 0
) -> list[Batch]:
    """Batches of one piece: the spectrogram, the positions to measure as `attention_mask`, and several transcripts.

    They are in one row, each with positions from 0 on: the transcript without and with times, because engines ask for
    times and users do not, and some with errors. A few thousand tokens alone would show too little of the decoder.
    Positions of the prompt, which no model predicts, have the label `GIVEN`.
    """
    config = model.generation_config = teacher.generation_config
    extractor, tokenizer = teacher.need_extractor(), teacher.need_tokenizer()
    positions = torch.arange(model.config.max_source_positions)
    sampled, counted = positions % EVERY == 0, positions % (SILENT * EVERY) == 0
    likely = token_weights(tokenizer, model.config.eos_token_id)
    batches: list[Batch] = []
    with cast_weights(model), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        groups = [pieces[start : start + HEARD_AT_ONCE] for start in range(0, len(pieces), HEARD_AT_ONCE)]
        heard_groups = (hear(model, tokenizer, extractor, group, language) for group in groups)
        all_heard = Step("transcribing", chain.from_iterable(heard_groups), total=len(pieces), unit="piece")
        for piece, heard in zip(pieces, all_heard, strict=True):
            prompt, timed = (prompt_of(config, heard.language, times=times) for times in (False, True))
            samples = draw_errors(model, heard.states, prompt, heard.text, likely)
            rows = [(prompt, heard.text), (timed, add_times([(len(piece.wave), heard.text)], config))]
            rows += [(prompt, sample) for sample in samples]
            batch = _pack(rows, model.config.max_position_embeddings)
            batch["attention_mask"] = (torch.from_numpy(piece.spoken) & sampled | counted).long().unsqueeze(0)
            batches.append({"input_features": heard.features, **batch})
    return batches


@dataclass(frozen=True, eq=False)
class Heard:
    """What a model makes of a piece of sound."""

    features: Tensor  # the spectrogram (1, M, 2·S)
    states: Tensor  # of the encoder (1, S, d)
    language: str | None  # of a multilingual model
    text: list[int]  # tokens of the transcript, and the end


@torch.inference_mode()
def hear(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    extractor: FeatureExtractionMixin,
    pieces: Sequence[Piece],
    language: str | None,
) -> list[Heard]:
    """Find the languages of pieces where none is given, and transcribe those without a transcript, in one batch."""
    config = model.generation_config
    waves = [piece.wave for piece in pieces]
    features = extractor(waves, sampling_rate=extractor.sampling_rate, return_tensors="pt").input_features
    languages = [language] * len(pieces)
    with fast_products(model.device):
        encoded = model.get_encoder()(features.to(model.device))
        if getattr(config, "is_multilingual", False) and language is None:
            found = model.detect_language(encoder_outputs=encoded)
            languages = [name.strip("<|>") for name in tokenizer.convert_ids_to_tokens(found.tolist())]
    states = encoded.last_hidden_state
    texts = [transcript_tokens(tokenizer, piece.text, config) if piece.text is not None else [] for piece in pieces]
    if unknown := [row for row, piece in enumerate(pieces) if piece.text is None]:
        prompts = [prompt_of(config, languages[row]) for row in unknown]
        for row, text in zip(unknown, _generate(model, states[unknown], prompts), strict=True):
            texts[row] = text
    rows = zip(features.split(1), states.split(1), languages, texts, strict=True)
    return [Heard(*row) for row in rows]


def _pack(rows: Sequence[tuple[list[int], list[int]]], longest: int) -> Batch:
    """Prompts and what follows them, behind each other in one row, with positions that begin again at 0."""
    inputs: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    for prompt, tokens in rows:
        sequence = [*prompt, *tokens][: longest + 1]
        inputs += sequence[:-1]
        labels += [*[GIVEN] * (len(prompt) - 1), *sequence[len(prompt) :]]
        positions += range(len(sequence) - 1)
    names = {"labels": labels, "decoder_input_ids": inputs, "decoder_position_ids": positions}
    return {name: torch.tensor([values]) for name, values in names.items()}


def token_weights(tokenizer: PreTrainedTokenizerBase, end: int) -> Tensor:
    """Weights (V,) of the tokens of text as errors: by their rank in the vocabulary, and numbers apart."""
    weights = 1 / (torch.arange(end) + COMMON)
    numbers = torch.tensor([token.lstrip("Ġ").isdecimal() for token in tokenizer.convert_ids_to_tokens(range(end))])
    counted = weights * numbers
    return weights / weights.sum() * (1 - NUMBERS) + counted / counted.sum().clamp_min(1e-9) * NUMBERS


def replace_tokens(tokens: Tensor, likely: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Tokens (…) of which the share `REPLACED` is drawn by the weights `likely`."""
    if not tokens.numel():  # which no draw takes
        return tokens
    others = likely.multinomial(tokens.numel(), replacement=True, generator=generator).view_as(tokens)
    return torch.where(torch.rand(tokens.shape, generator=generator) < REPLACED, others, tokens)


@torch.inference_mode()
def draw_errors(
    model: PreTrainedModel, states: Tensor, prompt: list[int], text: list[int], likely: Tensor
) -> list[list[int]]:
    """Transcripts in which every token is drawn from what the model predicts after the tokens before it in `text`.

    They hold its likely errors. Samples of whole transcripts would take a pass for each token. There are others, too
    (`replace_tokens`).
    """
    end = model.config.eos_token_id
    inputs = torch.tensor([[*prompt, *text[:-1]]], device=states.device)
    with fast_products(model.device):
        encoded = BaseModelOutput(last_hidden_state=states)
        logits = model(encoder_outputs=encoded, decoder_input_ids=inputs, use_cache=False).logits
    logits = logits[0, len(prompt) - 1 : -1, :end].float()
    if not len(logits):
        return []
    drawn = logits.softmax(-1).multinomial(SAMPLES, replacement=True).T.cpu()
    return [[*row, end] for row in replace_tokens(drawn, likely).tolist()]


@torch.inference_mode()
def _generate(model: PreTrainedModel, states: Tensor, prompts: list[list[int]]) -> list[list[int]]:
    """The likeliest tokens after each prompt of equal length, with the end, for the encoder's states."""
    own, end = model.generation_config, model.config.eos_token_id
    settings = GenerationConfig(
        **{name: getattr(own, name) for name in RULES},
        max_new_tokens=model.config.max_target_positions - len(prompts[0]),
        eos_token_id=end,
        pad_token_id=prompts[0][0],  # the end would be warned of
    )
    model.generation_config = GenerationConfig()  # which would give its longest text, with a warning
    try:
        with fast_products(model.device):
            tokens = GenerationMixin.generate(
                model,
                encoder_outputs=BaseModelOutput(last_hidden_state=states),
                decoder_input_ids=torch.tensor(prompts, device=states.device),
                generation_config=settings,
            )
    finally:
        model.generation_config = own
    texts = tokens[:, len(prompts[0]) :].tolist()
    return [[*takewhile(lambda token: token != end, text), end] for text in texts]
