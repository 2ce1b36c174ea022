"""One interface to a model under every engine: text in, text out, by sentences and in batches of one length."""

from __future__ import annotations

import copy
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..decoding import (
    check_strategies,
    describe_strategies,
    ended_by_limit,
    output_limit,
    search_options,
    seeded,
    suggest_limit,
)
from ..files import EXPORT_FILE, read_json
from ..in_memory import AnyModel
from ..languages import choose_prefix, code_prefix, language_code, set_language_codes, split_prefix
from ..loading import generate_tokens, load_network, load_pretrained, position_limit
from ..models import pipelines
from ..models.pipelines import SplitText, is_translator
from ..options import OptionError
from ..processors import use_threads
from ..text import check_known
from . import CHECKPOINTS, RunningModel, load_engine_file
from .search import Search
from .shortlist import check_shortlist

logger = logging.getLogger(__name__)
UNLIMITED = sys.maxsize
ONE_OUTPUT = {"num_return_sequences": 1, "return_dict_in_generate": False}  # whatever a checkpoint contains
LONGEST = 1 << 16  # tokens of an output if the model has no limit; memory is allocated at the start


@dataclass(eq=False)
class Engine:
    """A loaded model: token ids in, token ids out.

    Attributes:
        name: `transformers`, or that of a file in `engines/`.
        model: the model that this file loaded.
        search: options of the generation, unless a call gives others.
        longest_input: most tokens of a source, and of an output; `None` where nothing limits them.
        prefix: prefix of every source, as T5 requires.
        folder: folder of the model and its tokenizer, or its name on the Hub; `None` for a loaded model.
    """

    name: str
    model: RunningModel
    search: Search
    longest_input: int | None
    prefix: str = ""
    folder: str | os.PathLike | None = None
    device: ClassVar[torch.device] = torch.device("cpu")  # of inputs and outputs, as a pipeline asks

    def translate(self, texts: Sequence[str], **options: Any) -> list[str]:
        """Translate texts, see `lightformers_hf.translate`, whose options are these.

        Raises:
            ValueError: the engine was made from a loaded model, and has no tokenizer.
        """
        return translate_texts(texts, self, self.tokenizer, **options)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the folder, which is read once."""
        if self.folder is None:
            raise ValueError("the engine has no tokenizer: call lightformers_hf.translate(texts, engine, tokenizer)")
        return load_pretrained(AutoTokenizer, self.folder)

    def generate(
        self,
        batch: Sequence[Sequence[int]] | Mapping[str, Tensor],
        *,
        num_beams: int | None = None,
        max_new_tokens: int | None = None,
        forced_length: int | None = None,
    ) -> list[list[int]]:
        """The new tokens of each sentence, up to the end token, included.

        In fp32 they are those of `generate()`, but for beam search in CTranslate2, which always ends when as many
        outputs as beams are complete (`early_stopping=True`) and renormalizes over the tokens that are not forbidden.

        Args:
            batch: sentences as lists of token ids; or a tokenizer's result, `input_ids` and `attention_mask` (B, S).
            num_beams, max_new_tokens: by default those of the model's generation configuration.
            forced_length: generate exactly so many tokens a sentence, past any end token (to measure speed).

        Raises:
            ValueError: no sentence or an empty one, one longer than the model takes, or an option out of its range.
        """
        sentences = self._sentences(batch)
        return self.model.generate(sentences, self._options(sentences, num_beams, max_new_tokens, forced_length))

    def generate_scored(
        self,
        batch: Sequence[Sequence[int]] | Mapping[str, Tensor],
        *,
        num_beams: int | None = None,
        max_new_tokens: int | None = None,
    ) -> list[tuple[list[int], float, bool]]:
        """Tokens as of `generate`, the mean log p of a token, the end's too, and whether the output ends by itself."""
        sentences = self._sentences(batch)
        search = self._options(sentences, num_beams, max_new_tokens, None)
        # A search that forbids or forces tokens at some steps has log p over the others, or none.
        steered = search.no_repeat_ngram_size or search.min_new_tokens or search.forced_start is not None
        if not steered and hasattr(self.model, "generate_scored"):
            found = self.model.generate_scored(sentences, search)
        else:
            outputs = self.model.generate(sentences, search)
            bare = [ids[:-1] if ids and ids[-1] in search.ends else ids for ids in outputs]
            scores = self.model.score(sentences, bare)
            found = [(ids, sum(row) / max(1, len(row))) for ids, row in zip(outputs, scores, strict=True)]
        limit, forced = search.limit, search.forced_end is not None
        return [(ids, mean, not ended_by_limit(ids, limit, search.ends, forced=forced)) for ids, mean in found]

    def _options(
        self, sentences: list[list[int]], num_beams: int | None, max_new_tokens: int | None, forced_length: int | None
    ) -> Search:
        search = self.search.with_options(num_beams, max_new_tokens, forced_length)
        search = search.limited(sentences, self.longest_input)
        if self.longest_input is not None and search.limit > self.longest_input:
            if max_new_tokens is not None or forced_length is not None:
                raise ValueError(f"{search.limit} new tokens are more than the model's {self.longest_input} positions")
            search = search.with_options(None, self.longest_input, None)  # the model's own limit may never be reached
        return search

    def score(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[list[float]]:
        """log p of every token of each target, and of the end token behind it, given its source."""
        return self.model.score(self._sentences(sources), [list(target) for target in targets])

    def _sentences(self, batch: Sequence[Sequence[int]] | Mapping[str, Tensor]) -> list[list[int]]:
        if isinstance(batch, Mapping):
            ids, mask = batch["input_ids"], batch.get("attention_mask")
            mask = torch.ones_like(ids) if mask is None else mask
            sentences = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
        else:
            sentences = [list(sentence) for sentence in batch]
        lengths = [len(sentence) for sentence in sentences]
        if (shortest := min(lengths, default=0)) == 0:
            raise ValueError(
                f"{len(lengths)} sentences, the shortest of {shortest} tokens: expected at least one of each"
            )
        if self.longest_input is not None and max(lengths) > self.longest_input:
            raise ValueError(
                f"a sentence has {max(lengths)} tokens, more than the model's {self.longest_input} positions: cut it"
            )
        return sentences


def wrap_network(network: PreTrainedModel, threads: int = 1, folder: str | os.PathLike | None = None) -> Engine:
    """A model of transformers as an engine that computes with so many cores."""
    search, limit = Search.of(network.generation_config), position_limit(network.config)
    say_strategies(network)
    prefix = choose_prefix(network.config, None, None, name=str(folder)) if folder else ""
    return Engine(CHECKPOINTS, TransformersModel(network, search, threads), search, limit, prefix, folder)


def load_engine(model: AnyModel, threads: int = 1) -> Engine:
    """Load an exported model, or any sequence-to-sequence checkpoint under transformers, on the CPU.

    Args:
        model: an exported folder; a checkpoint's folder or name on the Hub; or a loaded model.
        threads: cores to compute with.

    Raises:
        ValueError: the engine that the folder was exported for is not installed, or a shortlist there that was made
            for another model.
        FileNotFoundError: no such folder.

    Example:
        >>> engine = load_engine("deployed")
        >>> engine.translate(["Zwei Hunde spielen im Schnee."], num_beams=4)
    """
    if isinstance(model, PreTrainedModel):
        return wrap_network(model, threads)
    folder = Path(os.path.expanduser(model))
    description = read_json(folder / EXPORT_FILE)
    if not description:
        return wrap_network(load_network(model), threads, model)
    if missing := [name for name in ("engine", "max_position_embeddings") if name not in description]:
        raise ValueError(f"{folder / EXPORT_FILE} is damaged: it lacks {missing[0]!r}; export the model again")
    if description.get("reads_sound"):
        raise ValueError(f"{folder} transcribes sound: measure it by evaluate, or run it as its README.md shows")
    check_shortlist(folder, description.get("shortlist"))
    search = Search.of(GenerationConfig.from_pretrained(folder))
    if description.get("limit_by_input"):
        search = replace(search, max_new_tokens=None)
    running = load_engine_file(description["engine"]).load(folder, search, threads)
    limit, prefix = description["max_position_embeddings"], description.get("prefix") or ""
    return Engine(description["engine"], running, search, limit, prefix, folder)


class TransformersModel:
    """A model of transformers behind the methods of `RunningModel`."""

    def __init__(self, model: PreTrainedModel, search: Search, threads: int):
        self.network, self.search, self.threads = model, search, threads

    @torch.inference_mode()
    def generate(self, batch: list[list[int]], search: Search) -> list[list[int]]:
        """As `Engine.generate`."""
        options: dict[str, Any] = {"num_beams": search.num_beams, "max_new_tokens": search.max_new_tokens}
        options |= {"max_length": None, **ONE_OUTPUT, **search_options(self.network.generation_config)}
        if not search.ends:
            options |= {"eos_token_id": None, "forced_eos_token_id": None}
        with use_threads(self.threads):
            rows = generate_tokens(self.network, **self._pad(batch), **options)[:, 1:].tolist()
        lengths = [next((i for i, token in enumerate(row, 1) if token in search.ends), len(row)) for row in rows]
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    @torch.inference_mode()
    def score(self, sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
        """As `Engine.score`."""
        end = self.search.ends[0] if self.search.ends else self.search.pad
        labels = [[*target, end] for target in targets]
        inputs = self._pad([[self.search.start, *target] for target in targets])["input_ids"]
        with use_threads(self.threads):
            logits = self.network(**self._pad(sources), decoder_input_ids=inputs).logits
        logits[..., list(self.search.suppressed)] = -torch.inf
        log_p = torch.log_softmax(logits, dim=-1)
        return [log_p[row, range(len(ids)), ids].tolist() for row, ids in enumerate(labels)]

    def _pad(self, batch: list[list[int]]) -> dict[str, Tensor]:
        return pad_right(batch, self.search.pad, self.network.device)


def pad_right(batch: Sequence[Sequence[int]], pad: int, device: torch.device) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask` (B, S) of sentences, filled up on the right, where encoders expect padding."""
    width = max(map(len, batch))
    ids = [[*sentence, *[pad] * (width - len(sentence))] for sentence in batch]
    mask = [[1] * len(sentence) + [0] * (width - len(sentence)) for sentence in batch]
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}


# --- Texts, split to the positions of a model


def longest_input(model: PreTrainedModel | PreTrainedConfig | Engine, tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of source tokens that model, or that of a configuration, and tokenizer both take."""
    limit = model.longest_input if isinstance(model, Engine) else position_limit(getattr(model, "config", model))
    return min(limit or UNLIMITED, tokenizer.model_max_length)


def split_texts(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, limit: int, **options: Any
) -> list[SplitText]:
    """As `models.pipelines.split_texts`, by the rules of the source language of a tokenizer."""
    return pipelines.split_texts(texts, tokenizer, limit, language=source_language(tokenizer), **options)


def source_language(tokenizer: PreTrainedTokenizerBase) -> str:
    """The two-letter language of a tokenizer's sources; `en` if it names none."""
    named = (getattr(tokenizer, name, None) for name in pipelines.SOURCE_LANGUAGES)
    return next(filter(None, map(language_code, filter(None, named))), "en")


def translate_texts(
    texts: Iterable[str],
    model: PreTrainedModel | Engine,
    tokenizer: PreTrainedTokenizerBase,
    *,
    batch_size: int = 32,
    prefix: str | None = None,
    split: bool | None = None,
    progress: bool | tqdm = False,
    check: bool = True,
    source_lang: str | None = None,
    target_lang: str | None = None,
    sample_seed: int | None = None,
    **generation: Any,
) -> list[str]:
    """As `lightformers_hf.translate`, with a model and its tokenizer."""
    texts = check_texts(texts)
    check_strategies(generation, sample_seed)
    if sample_seed is not None and not isinstance(model, torch.nn.Module):
        raise ValueError("sample_seed is given, but exported models do not sample: give the checkpoint")
    own = (model.prefix or pipelines.only_code(tokenizer)) if isinstance(model, Engine) else ""
    if source_lang or target_lang:
        tokenizer, own, first = tell_languages(model, tokenizer, source_lang, target_lang, own)
        generation = first | generation
    prefix = own if prefix is None else prefix
    if batch_size < 1:
        raise OptionError("batch_size", f" is {batch_size}: expected 1 or more.")
    limit, split = longest_input(model, tokenizer), is_translator(tokenizer, prefix) if split is None else split
    found = split_texts(texts, tokenizer, limit, prefix=prefix, split=split)
    jobs = [(number, index, ids) for number, text in enumerate(found) for index, ids in text.ids.items()]
    if isinstance(model, torch.nn.Module):  # engines check their inputs themselves
        check_generation(model, generation)
        if sample_seed is None:
            say_strategies(model)
        largest = max((max(ids) for _, _, ids in jobs if ids), default=0)
        if largest >= (rows := getattr(model.config, "vocab_size", largest + 1)):
            raise ValueError(
                f"the tokenizer gives a token the number {largest}, but the model has {rows} tokens: give the model's "
                "own tokenizer, or a row for every token (resize_token_embeddings)"
            )
    if check:
        check_known((ids for _, _, ids in jobs), tokenizer)
    if cut := sum(text.cut for text in found):
        remedy = "split at punctuation" if split else "cut: split them to have all of their text translated"
        logger.warning("%d %s longer than %d tokens: %s.", cut, "sentences" if split else "inputs", limit, remedy)
    outputs: list[dict[int, str]] = [{} for _ in found]
    with ExitStack() as stack:
        bar = progress
        if isinstance(bar, bool):
            bar = stack.enter_context(tqdm(total=len(texts), desc="translating", disable=not bar, unit="text"))
        bar.update(sum(not text.ids for text in found))
        if isinstance(model, torch.nn.Module) and model.training:
            stack.callback(model.train)
            model.eval()
        stack.enter_context(torch.inference_mode())
        jobs.sort(key=lambda job: -len(job[2]))
        unfinished, size = 0, batch_size if sample_seed is None else 1
        for limit, batch in _batches(jobs, size, model, generation):
            ids = [ids for _, _, ids in batch]
            device = torch.device("cpu") if isinstance(model, Engine) else model.device
            chance = nullcontext() if sample_seed is None else seeded(sample_seed, ids[0], device)
            with chance:
                sequences = _generate(ids, model, tokenizer, generation, limit, samples=sample_seed is not None)
            unfinished += _count_unfinished(sequences, model, limit)
            decoded = tokenizer.batch_decode(sequences, skip_special_tokens=True)
            for (number, index, _), output in zip(batch, decoded, strict=True):
                outputs[number][index] = output
                bar.update(len(outputs[number]) == len(found[number].ids))
    if unfinished:
        logger.warning(
            "%d outputs ended by their limit of tokens, and may be incomplete: give a larger max_new_tokens "
            "(--max-new-tokens).",
            unfinished,
        )
    return [text.join(output) for text, output in zip(found, outputs, strict=True)]


_SAID: WeakSet[PreTrainedModel] = WeakSet()


def say_strategies(model: PreTrainedModel) -> None:
    """Log, once for a model, that it asks for other strategies than greedy or beam search."""
    if model not in _SAID and (unusual := describe_strategies(model.generation_config)):
        _SAID.add(model)
        logger.warning(
            f"the generation configuration of {model.name_or_path or 'the model'} asks for {unusual}: it decodes by "
            "greedy or beam search. For sampling give sample_seed (translate --sample-seed)"
        )


def _batches(
    jobs: list[tuple[int, int, list[int]]], size: int, model: PreTrainedModel | Engine, generation: dict[str, Any]
) -> Iterator[tuple[int, list[tuple[int, int, list[int]]]]]:
    """Batches of sources, and the limit of their outputs, which never depends on the other sources of a batch."""
    if isinstance(model, Engine):
        own, positions = model.search.max_new_tokens, model.longest_input
    else:
        own = output_limit(generation.get("generation_config") or model.generation_config)
        positions = position_limit(model.config)
    fixed = generation.get("max_new_tokens") or (generation.get("max_length") or 0) - 1
    fixed = fixed if fixed > 0 else own

    def limit_of(job: tuple[int, int, list[int]]) -> int:
        return fixed or suggest_limit(len(job[2]), positions)

    for limit, group in groupby(jobs, limit_of):
        same = list(group)
        for start in range(0, len(same), size):
            yield limit, same[start : start + size]


def _count_unfinished(sequences: Tensor | list[list[int]], model: PreTrainedModel | Engine, limit: int) -> int:
    if isinstance(model, Engine):
        limit = min(limit, model.longest_input or limit)
        ends, forced, rows = model.search.ends, model.search.forced_end is not None, sequences
    else:
        own = model.generation_config
        ends = (own.eos_token_id,) if isinstance(own.eos_token_id, int) else tuple(own.eos_token_id or ())
        forced, rows = own.forced_eos_token_id is not None, [row[1:] for row in torch.as_tensor(sequences).tolist()]
    return sum(ended_by_limit(row, limit, ends, forced=forced) for row in rows)


_COPIES: WeakKeyDictionary[PreTrainedTokenizerBase, dict] = WeakKeyDictionary()
_COPYING = threading.Lock()


def tell_languages(
    model: PreTrainedModel | Engine,
    tokenizer: PreTrainedTokenizerBase,
    source: str | None,
    target: str | None,
    prefix: str,
) -> tuple[PreTrainedTokenizerBase, str, dict[str, Any]]:
    """A copy of a tokenizer for two languages, the prefix of every source, and options of `generate()`.

    Nothing that is given is changed, because other threads may use it. Of a tokenizer there is one copy for two
    languages.
    """
    key = (source, target, len(tokenizer))
    with _COPYING:
        copies = _COPIES.setdefault(tokenizer, {})
        if key not in copies:
            told = copy.deepcopy(tokenizer)
            copies[key] = told, set_language_codes(told, source, target, columns=False)
    told, first = copies[key]
    if isinstance(model, Engine):
        check_first_token(model, first, target)
        return told, split_prefix(source or "")[1] or code_prefix(told, target) or prefix, {}
    options: dict[str, Any] = {"name": tokenizer.name_or_path, "columns": False, "tokenizer": told}
    return told, choose_prefix(model.config, source, target, **options) or prefix, first or {}


def check_first_token(engine: Engine, first: Mapping[str, int | None] | None, target: str | None) -> None:
    """Raise `ValueError` where an engine's translations do not begin as of `pipelines.first_token`."""
    own = {"forced_bos_token_id": engine.search.forced_start, "decoder_start_token_id": engine.search.start}
    if first and any(own[name] != number for name, number in first.items()):
        name = engine.folder or "the model"
        raise ValueError(f"{name} was exported for another target language than {target}: give its checkpoint")


def check_texts(texts: Iterable[str]) -> list[str]:
    """The texts as a list. Raises `ValueError` for what is no list of strings."""
    if isinstance(texts, str):
        raise ValueError("the texts are one string, whose letters would be translated: give a list, such as [text]")
    if isinstance(texts, Mapping) or hasattr(texts, "columns"):  # a data frame
        name = next(iter(texts.keys() if isinstance(texts, Mapping) else texts.columns), "text")
        raise ValueError(
            f"the texts are a {type(texts).__name__}, whose names would be translated: give one column as a list of "
            f"strings, such as list(texts[{name!r}])"
        )
    texts = list(texts)
    if others := [type(text).__name__ for text in texts if not isinstance(text, str)]:
        raise ValueError(f"the texts contain a {others[0]}: expected strings, such as one column of a data set")
    return texts


def check_generation(model: PreTrainedModel, generation: Mapping[str, Any]) -> None:
    """Raise `ValueError` if arguments exceed a network's positions or tokens, or make several outputs of a text."""
    own = model.generation_config
    for name, only in ONE_OUTPUT.items():
        if (generation.get(name) or only) != only:
            raise ValueError(f"{name} is {generation[name]}, but a text has one output: call generate() of the model")
    length = generation.get("max_new_tokens") or own.max_new_tokens or own.max_length or 0
    is_own = generation.get("max_new_tokens") is None  # a limit that may never be reached
    most = LONGEST if is_own else position_limit(model.config) or LONGEST
    if not isinstance(length, int):
        raise ValueError(f"the length of an output is {length!r} in generation_config.json: expected a whole number")
    if length > most:
        where = ", or write fewer into its generation_config.json" if is_own else ""
        raise OptionError("max_new_tokens", f" is {length}; the model writes at most {most} tokens: give fewer{where}")
    asked = generation.get("num_beams")
    if asked is not None and (not isinstance(asked, Integral) or asked < 1):
        raise OptionError("num_beams", f" is {asked!r}: expected a whole number, 1 or more")
    beams, tokens = generation.get("num_beams") or own.num_beams or 1, model.get_output_embeddings().out_features
    if isinstance(beams, int) and beams > tokens:
        raise OptionError("num_beams", f" is {beams}, more than the {tokens} tokens there are: give fewer")


def _generate(
    batch: list[list[int]],
    model: PreTrainedModel | Engine,
    tokenizer: PreTrainedTokenizerBase,
    generation: dict[str, Any],
    limit: int,
    *,
    samples: bool,
) -> torch.Tensor | list[list[int]]:
    """Outputs of a model or engine for sentences of token ids, of at most `limit` tokens where no length is named."""
    if not isinstance(model, torch.nn.Module):
        if model.search.max_new_tokens is None:
            generation = {"max_new_tokens": limit} | generation
        return model.generate(batch, **generation)
    if output_limit(model.generation_config) is None and not generation.keys() & {"max_length", "generation_config"}:
        generation = {"max_new_tokens": limit} | generation
    generation = search_options(model.generation_config) | {"do_sample": samples} | generation
    if generation.get("max_new_tokens") is not None:  # the checkpoint's own limit would only cause a warning
        generation = {"max_length": None} | generation
    pads = (tokenizer.pad_token_id, model.generation_config.pad_token_id)
    pad = next((token for token in pads if token is not None), 0)
    padded = pad_right(batch, pad, model.device)
    return generate_tokens(model, **padded, **ONE_OUTPUT | generation)
