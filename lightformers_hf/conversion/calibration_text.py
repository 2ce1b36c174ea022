"""Calibration text: the user's sentence pairs, the user's sentences, or random tokens, translated by the teacher.

Random sources are tokens drawn one by one with the frequencies of the tokenizer; targets are the teacher's
translations. That is no language, yet layers get inputs, and losses gradients, much like those of sentences. Teachers
with task prefixes (T5) get all their prefixes in turn.

A teacher that writes the language that it reads, such as a summarizer, can do better: its outputs for random tokens
are nearer to sentences, and become the sources.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from itertools import cycle
from statistics import fmean
from typing import TYPE_CHECKING, cast

import sentencepiece
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    DataCollatorForSeq2Seq,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..checkpoints.teacher import Teacher
from ..corpus import Corpus
from ..decoding import repeated_start
from ..languages import add_prefix, find_prefixes
from ..loading import generate_tokens, position_limit
from ..models.pipelines import is_translator
from ..options import OptionError
from ..text import tokenize_pairs
from ..vocabularies import read_vocabularies
from .options import CompressionOptions, StudyOptions
from .sensitivity import Batch, cut_batches, join_batches, predicted_mask, target_states
from .workers import AT_ONCE, Step, cast_weights, fast_passes, fast_products, map_in_threads

if TYPE_CHECKING:  # self-generated text needs none of it
    from datasets import Dataset

# Default number of sentence pairs. Short pairs are more, until each side has so many tokens per feature of d_model, or
# so many in total: wide moments need more tokens, and wide models more time for each.
SAMPLES, TOKENS_PER_FEATURE, MOST_TOKENS = 1000, 64, 2**15
BATCH = 32  # pairs of a batch at most
# Tokens a side that the joint fit has with more pairs, where there are such; a recovery validates on the others.
MOST_FITTED = 2**16
# Every tenth sentence is held out of the calibration, of so many at least.
HELD_OUT, FEWEST_SENTENCES = 10, 100
COMPARED = 100  # texts whose whole outputs are compared, at most
# Tokens of a text, of models that take any number.
LONGEST = 512
# Default number of random sources for a large model, and the range of their lengths in tokens.
SOURCES, SHORTEST_SOURCE, LONGEST_SOURCE = 256, 5, 30
SMALL, MOST_TIMES = 20_000_000, 4  # parameters of models that take more, and how many times as many
FURTHER = 4  # so many times as many further sources are generated for the joint fit
# A teacher writes the language that it reads if at least this share of the tokens of its outputs are tokens of their
# sources, and if it is at most so many times as uncertain where it reads its outputs as where it reads random tokens.
COPIED, NATIVE = 0.4, 0.5
# Outputs that it reads to show this, about, and the share of all outputs that must be distinct.
PROBED, DISTINCT = 128, 0.5
FITTED = 0.25  # the work for a token in a pass of the joint fit, beside that for one of the calibration
# Settings of the teacher's generation: tokens that begin and end a text, and tokens that may not follow.
TOKEN_RULES = (
    "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_bos_token_id",
    "forced_eos_token_id", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "repetition_penalty",
    "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
)  # fmt: skip


def draw_pairs(teacher: Teacher, options: CompressionOptions, study: StudyOptions) -> Dataset | None:
    """The user's text that is to be read, as of `sample_pairs`; `None` where there is none."""
    if options.calibration is None:
        return None
    tokenizer = teacher.need_tokenizer()
    if getattr(tokenizer, "tgt_lang", "") is None:
        raise OptionError(
            "",
            f"{teacher.name} translates between many languages: give ",
            "source_lang",
            " and ",
            "target_lang",
            ", columns of the calibration text with the tokenizer's codes: de=de_DE and en=en_XX",
        )
    return sample_pairs(teacher.config, tokenizer, options, study)


def count_tokens(teacher: Teacher, options: CompressionOptions, pairs: Dataset | None, *, joint: bool) -> float:
    """Tokens a side of the calibration text, about, and of the joint fit so many as take the same time."""
    if pairs is not None:
        tokens = len(pairs) * mean_tokens(teacher.config, teacher.need_tokenizer(), pairs)
        further = max(0.0, MOST_FITTED - tokens)
    else:
        sources = options.calibration_samples or default_sources(teacher.model)[0]
        tokens = sources * (SHORTEST_SOURCE + LONGEST_SOURCE) / 2
        further = 2 * FURTHER * tokens
    return tokens + (FITTED * further if joint and options.calibration_samples is None else 0)


def sample_text(
    model: PreTrainedModel, teacher: Teacher, options: CompressionOptions, study: StudyOptions, pairs: Dataset | None
) -> Sequence[Batch]:
    """Batches for a `Calibration`, of the `pairs` of `draw_pairs`.

    The `model`, the teacher with all its layers, makes the text where the user gave none, and translates it where they
    gave one language alone.
    """
    if pairs is None:
        return synthetic_batches(model, teacher, options.calibration_samples, study.calibration_seed)
    if "target" in pairs.column_names:
        return parallel_batches(model, teacher.need_tokenizer(), pairs)
    return translated_batches(model, teacher, pairs["source"][:])


def hold_out(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch] | None]:
    """Split batches into those for calibration and those with every tenth source; of short texts, `None`.

    A source that comes again, with another target, is on one side alone.
    """
    if sum(len(batch["labels"]) for batch in batches) < FEWEST_SENTENCES:
        return list(batches), None
    kept, held = [], []
    numbers: dict[object, int] = {}
    for batch in batches:
        aside = (
            torch.tensor([numbers.setdefault(source, len(numbers)) for source in _sources(batch)]) % HELD_OUT
            == HELD_OUT // 2
        )
        for rows, part in ((~aside, kept), (aside, held)):
            if rows.any():
                part.append({name: tensor[rows] for name, tensor in batch.items()})
    return kept, cut_batches(held) or None


def _sources(batch: Batch) -> list[object]:
    """A key of each source of a batch: its tokens; sounds are all different."""
    if "input_ids" not in batch:
        return [object() for _ in batch["labels"]]
    pairs = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
    return [tuple(ids[mask].tolist()) for ids, mask in pairs]


def greedy_outputs(
    model: PreTrainedModel, teacher: Teacher, batches: Sequence[Batch], *, translated: bool
) -> list[Batch]:
    """Return batches of 100 texts at most, whose targets are the teacher's greedy outputs.

    `translated`: their targets are these already.
    """
    rows = [(batch, row) for batch in batches for row in range(len(batch["labels"]))]
    count = min(COMPARED, len(rows))
    spread = [rows[index * len(rows) // count] for index in range(count)]
    picked = [{name: tensor[row : row + 1] for name, tensor in batch.items()} for batch, row in spread]
    parts = [join_batches(*picked[start : start + BATCH]) for start in range(0, len(picked), BATCH)]
    if translated:
        return parts
    limit = positions_of(model.config) - 1
    most = [min(2 * batch["labels"].shape[1], limit) for batch in parts]
    inputs = ((batch["input_ids"], batch["attention_mask"]) for batch in parts)
    return _with_targets("comparing outputs", model, teacher, inputs, most)


def parallel_batches(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: Dataset) -> list[Batch]:
    """Padded batches of similar lengths, of the columns `source` and `target`."""
    longest = longest_text(model.config, tokenizer)
    limits, start = {"max_source_length": longest, "max_target_length": longest}, repeated_start(model, tokenizer)
    tokens = tokenize_pairs(pairs, tokenizer, **limits, start=start)
    lengths = [sum(pair) for pair in zip(tokens["source_length"], tokens["target_length"], strict=True)]
    order = sorted(range(len(tokens)), key=lengths.__getitem__)
    tokens = tokens.remove_columns(["source_length", "target_length"])
    collate = DataCollatorForSeq2Seq(tokenizer, model=model)
    shares = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    batches = (collate([tokens[index] for index in share]) for share in shares)
    names = ("input_ids", "attention_mask", "labels", "decoder_input_ids")
    return [{name: batch[name] for name in names} for batch in batches]


def positions_of(config: PreTrainedConfig) -> int:
    """The positions of a model, or `LONGEST`."""
    return position_limit(config) or LONGEST


def longest_text(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens after which texts are cut."""
    return min(positions_of(config), tokenizer.model_max_length)


def mean_tokens(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, pairs: Dataset) -> float:
    """Tokens of a text, whether source or target, on the average of the first `SAMPLES` pairs."""
    first = pairs.select(range(min(SAMPLES, len(pairs))))
    limits = {"truncation": True, "max_length": longest_text(config, tokenizer)}
    texts = tokenizer(first["source"][:], **limits)["input_ids"]
    if "target" in first.column_names:
        texts += tokenizer(text_target=first["target"][:], **limits)["input_ids"]
    return fmean(map(len, texts))


def sample_pairs(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, options: CompressionOptions, study: StudyOptions
) -> Dataset:
    """Random pairs of the text that `options` name, or texts of the source language alone: see `Corpus`.

    By default `SAMPLES`, and more where these have few tokens.
    """
    data, samples, seed = cast(str, options.calibration), options.calibration_samples, study.calibration_seed
    corpus = _open(config, tokenizer, options)
    if samples is None:
        tokens = min(TOKENS_PER_FEATURE * config.hidden_size, MOST_TOKENS)
        mean = max(1, mean_tokens(config, tokenizer, corpus.sample(SAMPLES, seed)))
        samples = max(SAMPLES, math.ceil(tokens / mean))
    if (with_held_out := samples + math.ceil(samples / (HELD_OUT - 1))) < FEWEST_SENTENCES:
        with_held_out = samples
    pairs = corpus.sample(with_held_out, seed)
    if options.calibration_samples is not None and len(pairs) < samples:
        raise ValueError(
            f"{data} holds {len(pairs)} pairs, calibration_samples is {samples}: give more text, or ask for fewer"
        )
    for side in pairs.column_names:
        if not any(text.strip() for text in pairs[side]):
            raise ValueError(f"{data}: every {side} of the {len(pairs)} pairs drawn is empty: give text")
    if (distinct := len(set(pairs["source"]))) < len(pairs) / 10:
        raise ValueError(
            f"{data}: only {distinct} of the {len(pairs)} sources drawn are distinct, which shows few of the model's "
            "inputs. Remove repeated lines, or omit --calibration: the model then generates the text"
        )
    return pairs


def further_text(
    model: PreTrainedModel,
    teacher: Teacher,
    options: CompressionOptions,
    study: StudyOptions,
    pairs: Dataset | None,
) -> tuple[Sequence[Batch], Sequence[str]]:
    """More text for a joint fit, and its sources where the user gave them: other ones than those of `draw_pairs`.

    It is at most half of the rest of the user's text, or `FURTHER` times as many generated texts. There is none if
    `calibration_samples` are given, or if the text has no more.
    """
    if options.calibration_samples is not None:
        return [], ()
    if pairs is None:
        samples = FURTHER * default_sources(model)[0]
        return synthetic_batches(model, teacher, samples, study.calibration_seed + 1), ()
    tokenizer = teacher.need_tokenizer()
    number = math.ceil(MOST_FITTED / max(1, mean_tokens(teacher.config, tokenizer, pairs))) - len(pairs)
    if number <= 0:
        return [], ()
    corpus, known = _open(teacher.config, tokenizer, options), set(pairs["source"])
    more = corpus.sample(number, study.calibration_seed, without=known)
    more = more.select(range(min(len(more), max(0, corpus.rows - len(pairs)) // 2)))
    return (sample_text(model, teacher, options, study, more), more["source"][:]) if len(more) else ([], ())


def _open(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, options: CompressionOptions) -> Corpus:
    """The text that `options` name."""
    source, target = options.columns
    first, second = (getattr(tokenizer, f"{side}_lang", None) or side for side in ("source", "target"))
    first = add_prefix(config, options.source_lang or first, options.target_lang or second, tokenizer)
    name = cast(str, options.calibration)
    return Corpus(name, source=first if source else None, target=target, default=(first, second))


def synthetic_batches(model: PreTrainedModel, teacher: Teacher, samples: int | None, seed: int) -> list[Batch]:
    """Batches as `Calibration` takes them, from the teacher alone.

    Their sources are random tokens, or the teacher's outputs for them if it writes the language that it reads.
    """
    tokenizer, limit = teacher.tokenizer, positions_of(model.config)
    number, size = (samples, BATCH) if samples else default_sources(model)
    sources = random_sources(tokenizer, model.config, number, seed, name=teacher.name)
    prefixes = find_prefixes(model.config, *teacher.languages, tokenizer)
    shares = [sources[start : start + size] for start in range(0, number, size)]
    # Random tokens may have translations without end.
    most = [min(2 * max(map(len, some)), limit - 1) for some in shares]

    def pad(drawn: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Ids and mask of sources, with prefixes in turn and the special tokens that the model is used to."""
        if tokenizer is not None:
            texts = _decoded(drawn, tokenizer, prefixes)
            batch = tokenizer(texts, padding=True, return_tensors="pt", truncation=True, max_length=limit)
            return batch["input_ids"], batch["attention_mask"]
        end = model.config.eos_token_id
        end = [end] if isinstance(end, int) else end or []
        ids = [torch.tensor([*some, *end]) for some in drawn]
        inputs = pad_sequence(ids, batch_first=True, padding_value=model.config.pad_token_id)
        return inputs, pad_sequence([torch.ones_like(some) for some in ids], batch_first=True)

    made = _with_targets("making text", model, teacher, map(pad, shares), most)
    return _outputs_as_sources(model, teacher, made, prefixes) or made


def _outputs_as_sources(
    model: PreTrainedModel, teacher: Teacher, made: list[Batch], prefixes: Sequence[str]
) -> list[Batch]:
    """The outputs that were `made` for random tokens, as sources; empty if the teacher writes another language."""
    tokenizer = teacher.tokenizer
    if tokenizer is None or any(is_translator(tokenizer, prefix) for prefix in prefixes) or copied(made) < COPIED:
        return []
    ids = [row[row >= 0].tolist() for batch in made for row in batch["labels"]]
    written = [text for text in tokenizer.batch_decode(ids, skip_special_tokens=True) if text.strip()]
    if not written or len(set(written)) < DISTINCT * len(ids):
        return []
    texts = [prefix + text for prefix, text in zip(cycle(prefixes), written, strict=False)]
    probes = translated_batches(model, teacher, texts[:: max(1, len(texts) // PROBED)])
    if uncertainty(model, probes) > NATIVE * uncertainty(model, made):
        return []
    return translated_batches(model, teacher, texts)


def copied(batches: Sequence[Batch]) -> float:
    """The share of target tokens that their source has, too."""
    found = [
        token in source
        for batch in batches
        for source, row in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
        for token in row
        if token >= 0
    ]
    return fmean(found) if found else 0.0


@torch.no_grad()
def uncertainty(model: PreTrainedModel, batches: Sequence[Batch]) -> float:
    """The mean of -log p of target tokens in nats, by the model."""
    total, count = 0.0, 0
    with fast_passes(model.device):
        for batch in batches:
            labels = batch["labels"][predicted_mask(batch)].to(model.device)
            total += F.cross_entropy(model.logits_of(target_states(model, batch)), labels, reduction="sum").item()
            count += len(labels)
    return total / max(1, count)


def default_sources(model: PreTrainedModel) -> tuple[int, int]:
    """Return the default number of sources that a model generates, and their batch size.

    Models of at most 10M parameters have ⌊20M / parameters⌋ times 256 sources, at most four times; others have 256.
    """
    times = max(1, min(MOST_TIMES, SMALL // model.num_parameters()))
    return times * SOURCES, times * BATCH


def random_sources(
    tokenizer: PreTrainedTokenizerBase | None, config: PreTrainedConfig, number: int, seed: int, *, name: str
) -> list[list[int]]:
    """Ids of so many sources of random tokens, short ones first, without special tokens."""
    frequencies, generator = token_frequencies(tokenizer, config), torch.Generator().manual_seed(seed)
    limit = positions_of(config)
    longest = min(LONGEST_SOURCE, limit - 2)
    if longest < 1:
        raise ValueError(f"max_position_embeddings is {limit} in {name}: no text fits, which needs 3 or more")
    lengths = torch.randint(min(SHORTEST_SOURCE, longest), longest + 1, (number,), generator=generator).sort().values
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
    """Random sources as texts, after the prefixes of the model for `languages`, in turn."""
    sources = random_sources(tokenizer, config, number, seed, name=name)
    return _decoded(sources, tokenizer, find_prefixes(config, *languages, tokenizer))


def translated_batches(model: PreTrainedModel, teacher: Teacher, texts: list[str]) -> list[Batch]:
    """Batches of the user's texts with the teacher's translations."""
    tokenizer, positions = teacher.need_tokenizer(), positions_of(model.config)
    limit = {"truncation": True, "max_length": longest_text(model.config, tokenizer)}
    sources = sorted(filter(str.strip, texts), key=len)
    shares = [sources[start : start + BATCH] for start in range(0, len(sources), BATCH)]
    encoded = [tokenizer(some, padding=True, return_tensors="pt", **limit) for some in shares]
    most = [min(2 * text["input_ids"].shape[1] + 10, positions - 1) for text in encoded]
    padded = ((text["input_ids"], text["attention_mask"]) for text in encoded)
    return _with_targets("translating", model, teacher, padded, most)


def _with_targets(
    what: str, model: PreTrainedModel, teacher: Teacher, padded: Iterable[tuple[Tensor, Tensor]], most: Sequence[int]
) -> list[Batch]:
    """Batches of sources and of the model's outputs for them, for each batch `most` tokens at most.

    One thread reads the `padded` ids and masks, as several can't share a tokenizer.
    """

    # The likeliest token each, by the teacher's rules. Trainer leaves `use_cache: false` in trained models.
    own = teacher.generation_config
    rules = {name: getattr(own, name) for name in TOKEN_RULES} | {"do_sample": False, "use_cache": True}
    ends = torch.tensor([] if own.eos_token_id is None else own.eos_token_id)

    def make(batch: tuple[tuple[Tensor, Tensor], int]) -> Batch:
        (inputs, mask), longest = batch
        greedy = GenerationConfig(**rules, num_beams=1, max_new_tokens=longest, max_length=None)
        settings = {"attention_mask": mask.to(model.device), "generation_config": greedy}
        with fast_products(model.device), torch.inference_mode():
            targets = generate_tokens(model, inputs=inputs.to(model.device), **settings)
        targets = targets.to("cpu", copy=True)  # out of inference mode: gradients are taken with them
        written = targets[:, 1:]
        is_end = torch.isin(written, ends)
        is_padding = (is_end.cumsum(dim=1) > is_end) | ((written == model.config.pad_token_id) & ~is_end)
        labels = written.masked_fill(is_padding, -100)  # the end stays where it also pads
        return {"input_ids": inputs, "attention_mask": mask, "labels": labels, "decoder_input_ids": targets[:, :-1]}

    with cast_weights(model):
        made = map_in_threads(make, zip(padded, most, strict=True), model.device, AT_ONCE)
        return list(Step(what, made, total=len(most), unit="batch"))


def token_frequencies(tokenizer: PreTrainedTokenizerBase | None, config: PreTrainedConfig) -> Tensor:
    """Return the expected frequency of each source token, (V), not normalised; 0 for special tokens.

    A unigram model (SentencePiece) contains the probabilities of its tokens. Elsewhere ids are taken to be in order of
    falling frequency, as byte-pair merges are, and to follow Zipf's law. Without a tokenizer all tokens are equal.
    """
    named = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")  # not all families have all
    special = {getattr(config, name, None) for name in named}
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
    """The texts of a source's ids, with prefixes in turn."""
    sides = read_vocabularies(tokenizer)
    if "target" in sides:  # by which a tokenizer of two vocabularies decodes
        names = {number: token for token, number in sides["source"].items()}
        texts = [tokenizer.spm_source.decode_pieces([names[token] for token in some]) for some in drawn]
    else:
        texts = tokenizer.batch_decode(drawn)
    return [prefix + text for prefix, text in zip(cycle(prefixes), texts, strict=False)]
