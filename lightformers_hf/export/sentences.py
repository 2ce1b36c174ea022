"""Text in, text out around a model: sentences of every text, batches of one length, and the text of their outputs."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sentencex import segment
from tqdm.auto import tqdm

from ..languages import language_code
from ..loading import DAMAGED, is_out_of_memory, position_limit
from ..text import check_known

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .engine import Engine

logger = logging.getLogger(__name__)
UNLIMITED = sys.maxsize
LONGEST = 1 << 16  # tokens of an output if the model has no limit; memory is allocated at the start
# Places where a sentence that is too long is split: behind a mark, else behind a space.
PLACES = (r"[,;:–—)]\s+|[、，；：）]", r"\s+")
SOURCE_LANGUAGES = ("source_lang", "src_lang")  # attributes of tokenizers of translation models


def longest_input(model: PreTrainedModel | Engine, tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of source tokens that model and tokenizer both take."""
    limit = position_limit(model.config) if isinstance(model, torch.nn.Module) else model.longest_input
    return min(limit or UNLIMITED, tokenizer.model_max_length)


@dataclass
class SplitText:
    """A text as pieces that a model translates one by one.

    Attributes:
        pieces: together they are the text.
        ids: {place of a piece: its token ids}, less pieces of spaces.
        cut: sentences that were too long for the model.
    """

    pieces: list[str]
    ids: dict[int, list[int]]
    cut: int = 0

    def join(self, outputs: Mapping[int, str]) -> str:
        """The outputs of the pieces, with the spaces and line breaks around the pieces; those of one as it is."""
        if len(self.pieces) == 1:
            return outputs.get(0, "")
        parts = []
        for place, piece in enumerate(self.pieces):
            before, after = piece[: len(piece) - len(piece.lstrip())], piece[len(piece.rstrip()) :]
            parts.append(before + outputs[place].strip() + after if place in outputs else piece)
        return "".join(parts)


def is_translator(tokenizer: PreTrainedTokenizerBase, prefix: str = "") -> bool:
    """Whether a tokenizer, or the prefix of every source, is of a translation model."""
    return prefix.startswith("translate") or any(hasattr(tokenizer, name) for name in SOURCE_LANGUAGES)


def split_texts(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    *,
    prefix: str = "",
    split: bool | None = None,
) -> list[SplitText]:
    """Split texts into sentences, and sentences of more than `limit` tokens at the mark or space nearest their middle.

    Args:
        prefix: stands before every sentence that does not begin with it.
        split: `False`: no text is split, and what is beyond `limit` tokens is cut. `None`: as of `is_translator`.
    """
    split = is_translator(tokenizer, prefix) if split is None else split
    named = (getattr(tokenizer, name, None) for name in SOURCE_LANGUAGES)
    language = next(filter(None, map(language_code, filter(None, named))), "en")
    texts = [text.removeprefix(prefix) for text in texts]
    found = [SplitText(_sentences(text, language) if split and text.strip() else [text], {}) for text in texts]
    places = [(text, place) for text in found for place, piece in enumerate(text.pieces) if piece.strip()]

    def tokenize(pieces: list[str]) -> list[list[int]]:
        return tokenizer([prefix + piece for piece in pieces], verbose=False)["input_ids"] if pieces else []

    for (text, place), ids in zip(places, tokenize([text.pieces[place] for text, place in places]), strict=True):
        text.ids[place] = ids

    def fit(piece: str, ids: list[int]) -> Iterator[tuple[str, list[int]]]:
        halves = _halve(piece) if split and len(ids) > limit else []
        if len(ids) > limit and not halves:
            ids = tokenizer(prefix + piece, truncation=True, max_length=limit)["input_ids"]
        if not halves:
            yield piece, ids
        for half, its in zip(halves, tokenize(halves), strict=True):
            yield from fit(half, its)

    for text in found:
        text.cut = sum(len(ids) > limit for ids in text.ids.values())
        if text.cut:
            parts = [part for place, piece in enumerate(text.pieces) for part in fit(piece, text.ids.get(place, []))]
            text.pieces = [piece for piece, _ in parts]
            text.ids = {place: ids for place, (piece, ids) in enumerate(parts) if piece.strip()}
    return found


def _sentences(text: str, language: str) -> list[str]:
    """The sentences of every line with the spaces behind them; line breaks stand alone."""
    lines = re.split(r"([\r\n]+)", text)
    return [piece for line in lines if line for piece in (segment(language, line) if line.strip() else [line])]


def _halve(piece: str) -> list[str]:
    """A piece as two, split near its middle; an empty list where it is one character."""
    begin, end = len(piece) - len(piece.lstrip()), len(piece.rstrip())
    middle = (begin + end) // 2
    for pattern in PLACES:
        found = [match.end() for match in re.finditer(pattern, piece) if begin < match.start() and match.end() < end]
        if found:
            middle = min(found, key=lambda place: abs(place - middle))
            break
    return [piece[:middle], piece[middle:]] if begin < middle < end else []


def translate_texts(
    texts: Sequence[str],
    model: PreTrainedModel | Engine,
    tokenizer: PreTrainedTokenizerBase,
    *,
    batch_size: int = 32,
    prefix: str = "",
    split: bool | None = None,
    progress: bool | tqdm = False,
    check: bool = True,
    **generation: Any,
) -> list[str]:
    """As `lightformers_hf.translate`, with a model and its tokenizer."""
    if isinstance(texts, str):
        raise ValueError("the texts are one string, whose letters would be translated: give a list, such as [text]")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: expected 1 or more.")
    check_generation(model, generation)
    limit, split = longest_input(model, tokenizer), is_translator(tokenizer, prefix) if split is None else split
    found = split_texts(texts, tokenizer, limit, prefix=prefix, split=split)
    jobs = [(number, place, ids) for number, text in enumerate(found) for place, ids in text.ids.items()]
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
        stack.enter_context(_evaluate_mode(model))
        jobs.sort(key=lambda job: -len(job[2]))
        for start in range(0, len(jobs), batch_size):
            batch = jobs[start : start + batch_size]
            sequences = _generate([ids for _, _, ids in batch], model, tokenizer, generation)
            decoded = tokenizer.batch_decode(sequences, skip_special_tokens=True)
            for (number, place, _), output in zip(batch, decoded, strict=True):
                outputs[number][place] = output
                bar.update(len(outputs[number]) == len(found[number].ids))
    return [text.join(output) for text, output in zip(found, outputs, strict=True)]


def check_generation(model: PreTrainedModel | Engine, generation: Mapping[str, Any]) -> None:
    """Raise `ValueError` if the arguments exceed the positions, tokens or memory of a network.

    Engines check their inputs themselves.
    """
    if not isinstance(model, torch.nn.Module):
        return
    own = model.generation_config
    length = generation.get("max_new_tokens") or own.max_new_tokens or own.max_length or 0
    is_own = generation.get("max_new_tokens") is None  # a limit that may never be reached
    most = LONGEST if is_own else position_limit(model.config) or LONGEST
    if isinstance(length, int) and length > most:
        where = ", or write fewer into its generation_config.json" if is_own else ""
        raise ValueError(f"max_new_tokens is {length}; the model writes at most {most} tokens: give fewer{where}")
    beams, tokens = generation.get("num_beams") or own.num_beams or 1, model.get_output_embeddings().out_features
    if isinstance(beams, int) and beams > tokens:
        raise ValueError(f"num_beams is {beams}, more than the {tokens} tokens there are: give fewer")


def _generate(
    batch: list[list[int]],
    model: PreTrainedModel | Engine,
    tokenizer: PreTrainedTokenizerBase,
    generation: dict[str, Any],
) -> torch.Tensor | list[list[int]]:
    """Outputs of a model or engine for sentences of token ids."""
    if not isinstance(model, torch.nn.Module):
        return model.generate(batch, **generation)
    if generation.get("max_new_tokens") is not None:  # the checkpoint's own limit would only cause a warning
        generation = {"max_length": None} | generation
    padded = tokenizer.pad({"input_ids": batch}, return_tensors="pt", verbose=False).to(model.device)
    try:
        return model.generate(**padded, **generation)
    except DAMAGED as error:
        if is_out_of_memory(error):
            raise
        raise ValueError(
            f"the model cannot generate, its config.json or generation_config.json has a field of a wrong type or "
            f"value: {type(error).__name__}: {error}"
        ) from error


@contextmanager
def _evaluate_mode(model: PreTrainedModel | Engine) -> Iterator[None]:
    """Switch a network to evaluation mode without gradients, and restore its mode afterwards."""
    training = model if isinstance(model, torch.nn.Module) and model.training else None
    if training is not None:
        training.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        if training is not None:
            training.train()
