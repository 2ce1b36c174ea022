"""Calibration without pairs: the teacher translates the user's texts, or random tokens.

Random sources are tokens drawn one by one with the frequencies that the tokenizer knows; targets are what the teacher
makes of them. That is no language, yet layers get inputs, and losses gradients, much like those of sentences. Teachers
that are told their task (T5) are told all that they are known for, in turn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from itertools import cycle

import sentencepiece
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...languages import find_prefixes
from ...loading import position_limit
from ...processors import keep_large
from ..steps import Step
from ..teacher import Teacher
from ..workers import cast_weights, fast_products, map_in_order, own_share
from .samples import BATCH
from .samples import LONGEST as MOST

# Sources, unless told otherwise, of a large model, and the tokens that each has.
SOURCES, SHORTEST, LONGEST = 256, 5, 30
SMALL, MOST_TIMES = 20_000_000, 4  # parameters of models that take more, and how many times as many
# Of the teacher's own way to generate: which tokens begin and end a text, and which may not follow.
TOKEN_RULES = (
    "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_bos_token_id",
    "forced_eos_token_id", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "repetition_penalty",
    "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
)  # fmt: skip


def synthetic_batches(
    model: PreTrainedModel, teacher: Teacher, samples: int | None, seed: int, *, progress: bool
) -> list[dict[str, Tensor]]:
    """This process's batches as `Calibration` takes them, from the teacher alone.

    Args:
        model: the teacher in fp32, on the device where it is to run.
        samples: sources; `None` means `own_sources`.
        seed: which ones.

    Raises:
        ValueError: the teacher has no positions for text.
    """
    tokenizer = teacher.tokenizer() if teacher.has_tokenizer else None
    limit = position_limit(model.config) or MOST
    number, size = (samples, BATCH) if samples else own_sources(model)
    sources = random_sources(tokenizer, model.config, number, seed, name=teacher.name)
    prefixes = find_prefixes(model.config, *teacher.languages)
    shares = own_share([sources[start : start + size] for start in range(0, number, size)])
    # Random tokens may have translations without end.
    most = [min(2 * max(map(len, some)), limit - 1) for some in shares]
    padded = (_padded(some, tokenizer, model.config, prefixes) for some in shares)
    return _with_targets("making text", model, teacher, padded, most, progress=progress)


def own_sources(model: PreTrainedModel) -> tuple[int, int]:
    """How many sources a model makes by default, and of what size batches are, which are then as many for all.

    What more of them cost grows with the model, what they save does not: 256, and for models below 20M parameters as
    many times that, four at most, as these have parameters less.
    """
    times = max(1, min(MOST_TIMES, SMALL // model.num_parameters()))
    return times * SOURCES, times * BATCH


def random_sources(
    tokenizer: PreTrainedTokenizerBase | None, config: PreTrainedConfig, number: int, seed: int, *, name: str
) -> list[list[int]]:
    """Ids of so many sources of random tokens, short ones first, without special tokens.

    Args:
        name: of the model, for messages.

    Raises:
        ValueError: the model has no positions for text.
    """
    frequencies, generator = token_frequencies(tokenizer, config), torch.Generator().manual_seed(seed)
    limit = position_limit(config) or MOST
    longest = min(LONGEST, limit - 2)
    if longest < 1:
        raise ValueError(f"max_position_embeddings is {limit} in {name}: no text fits, which needs 3 or more")
    lengths = torch.randint(min(SHORTEST, longest), longest + 1, (number,), generator=generator).sort().values
    return [torch.multinomial(frequencies, int(n), True, generator=generator).tolist() for n in lengths]


def random_texts(
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    languages: tuple[str | None, str | None],
    number: int,
    seed: int,
    *,
    name: str,
) -> list[str]:
    """The same as texts, behind the prefixes that the model is known for between `languages`, in turn."""
    sources = random_sources(tokenizer, config, number, seed, name=name)
    return _decoded(sources, tokenizer, find_prefixes(config, *languages))


def translated_batches(
    model: PreTrainedModel, teacher: Teacher, texts: list[str], *, progress: bool
) -> list[dict[str, Tensor]]:
    """This process's batches of the user's texts with the teacher's translations. Args: as `synthetic_batches`.

    Raises:
        ValueError: no text but empty ones.
    """
    tokenizer = teacher.tokenizer()
    positions = position_limit(model.config) or MOST
    limit = {"truncation": True, "max_length": min(positions, tokenizer.model_max_length)}
    sources = sorted(filter(str.strip, texts), key=len)
    shares = own_share([sources[start : start + BATCH] for start in range(0, len(sources), BATCH)])
    encoded = [tokenizer(some, padding=True, return_tensors="pt", **limit) for some in shares]
    most = [min(2 * one["input_ids"].shape[1] + 10, positions - 1) for one in encoded]
    padded = ((one["input_ids"], one["attention_mask"]) for one in encoded)
    return _with_targets("translating", model, teacher, padded, most, progress=progress)


def _with_targets(
    what: str,
    model: PreTrainedModel,
    teacher: Teacher,
    padded: Iterable[tuple[Tensor, Tensor]],
    most: Sequence[int],
    *,
    progress: bool,
) -> list[dict[str, Tensor]]:
    """Batches as `Calibration` takes them: sources, and what the model makes of them.

    Args:
        padded: ids and masks; read by one thread, as several can't share a tokenizer.
        most: of each batch, how many tokens the model makes at most.
    """

    def make(batch: tuple[tuple[Tensor, Tensor], int]) -> dict[str, Tensor]:
        (inputs, mask), longest = batch
        settings = {"attention_mask": mask.to(model.device), "generation_config": _greedy(teacher, longest)}
        with fast_products(model.device), torch.inference_mode():
            targets = model.generate(inputs.to(model.device), **settings)
        targets = targets.to("cpu", copy=True)  # out of inference mode: gradients are taken with them
        labels = targets[:, 1:].masked_fill(targets[:, 1:] == model.config.pad_token_id, -100)
        return {"input_ids": inputs, "attention_mask": mask, "labels": labels, "decoder_input_ids": targets[:, :-1]}

    with cast_weights(model), keep_large():
        made = map_in_order(make, zip(padded, most, strict=True), model.device)
        return list(Step(what, made, total=len(most), unit="batch", shown=progress))


def token_frequencies(tokenizer: PreTrainedTokenizerBase | None, config: PreTrainedConfig) -> Tensor:
    """How often each source token is expected, (V), not normalised; 0 for special ones.

    A unigram model (SentencePiece) knows its tokens' probabilities. Elsewhere ids are taken to be in order of falling
    frequency, as byte-pair merges are, and to follow Zipf's law. Without a tokenizer all tokens are alike.
    """
    special = {config.pad_token_id, config.bos_token_id, config.eos_token_id, config.decoder_start_token_id}
    if tokenizer is None:
        frequencies = torch.ones(config.vocab_size)
    else:
        special |= {*tokenizer.all_special_ids, tokenizer.unk_token_id}
        frequencies = torch.zeros(config.vocab_size)
        scores = _unigram_scores(tokenizer)
        for piece, score in (scores or {}).items():
            index = tokenizer.convert_tokens_to_ids(piece)
            if index is not None and index < len(frequencies):
                frequencies[index] = math.exp(score)
        if not scores:
            frequencies[: len(tokenizer)] = 1 / (torch.arange(min(len(tokenizer), len(frequencies))) + 10)
    frequencies[[index for index in special if isinstance(index, int) and index < len(frequencies)]] = 0
    return frequencies


def _unigram_scores(tokenizer: PreTrainedTokenizerBase) -> dict[str, float] | None:
    """{piece: log-probability} of a unigram tokenizer; `None` of another."""
    processor = getattr(tokenizer, "spm_source", None) or getattr(tokenizer, "sp_model", None)
    if isinstance(processor, sentencepiece.SentencePieceProcessor):
        pieces = range(processor.get_piece_size())
        normal = [i for i in pieces if not (processor.is_control(i) or processor.is_unknown(i))]
        scores = {processor.id_to_piece(i): processor.get_score(i) for i in normal}
        # The scores of a byte-pair model are ranks, and sum up to nothing like a probability.
        return scores if 0.5 < sum(map(math.exp, scores.values())) < 2 else None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = json.loads(backend.to_str())["model"] if backend is not None else {}
    return dict(model["vocab"]) if model.get("type") == "Unigram" else None


def _decoded(drawn: list[list[int]], tokenizer: PreTrainedTokenizerBase, prefixes: Sequence[str]) -> list[str]:
    """The texts of ids, with prefixes in turn."""
    return [prefix + text for prefix, text in zip(cycle(prefixes), tokenizer.batch_decode(drawn), strict=False)]


def _padded(
    drawn: list[list[int]],
    tokenizer: PreTrainedTokenizerBase | None,
    config: PreTrainedConfig,
    prefixes: Sequence[str],
) -> tuple[Tensor, Tensor]:
    """Ids and mask of the sources, with prefixes in turn and the special tokens that the model is used to."""
    if tokenizer is not None:
        limits = {"truncation": True, "max_length": position_limit(config) or MOST}
        batch = tokenizer(_decoded(drawn, tokenizer, prefixes), padding=True, return_tensors="pt", **limits)
        return batch["input_ids"], batch["attention_mask"]
    end = [config.eos_token_id] if isinstance(config.eos_token_id, int) else config.eos_token_id or []
    sources = [torch.tensor([*ids, *end]) for ids in drawn]
    inputs = pad_sequence(sources, batch_first=True, padding_value=config.pad_token_id)
    return inputs, pad_sequence([torch.ones_like(ids) for ids in sources], batch_first=True)


def _greedy(teacher: Teacher, max_new_tokens: int) -> GenerationConfig:
    """The likeliest token after the other, by the teacher's `TOKEN_RULES`."""
    own = teacher.generation_config()
    rules = {name: getattr(own, name) for name in TOKEN_RULES}
    # Trainer leaves `use_cache: false` in the configuration of what it trained.
    settings = {"num_beams": 1, "do_sample": False, "use_cache": True, "max_new_tokens": max_new_tokens}
    return GenerationConfig(**rules, **settings, max_length=None)
