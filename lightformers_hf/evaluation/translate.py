"""Text in, translation out: the loop around `generate()` that the removed translation pipeline used to be."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import torch
from tqdm.auto import tqdm
from transformers import AutoTokenizer

from ..export import Engine, load_engine
from ..languages import choose_prefix, set_language_codes, split_prefix
from ..loading import DAMAGED, is_export, is_out_of_memory, load_model, load_pretrained, position_limit
from ..text import check_known

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
READ_BYTES = 1 << 16  # what translate_stream takes at once: some five hundred sentences, enough to sort by length
UNLIMITED = sys.maxsize
LONGEST = 1 << 16  # tokens of an output where the model does not limit them; memory is asked for at the start


class ByteSource(Protocol):
    """A binary file that gives what there is before it has all that is asked for: what `open(…, "rb")` returns."""

    def read1(self, size: int, /) -> bytes:
        """At most `size` bytes, from one read of what lies below; none at the end."""


def load_translator(
    name: str | os.PathLike,
    *,
    device: str | torch.device = "cpu",
    source: str | None = None,
    target: str | None = None,
    columns: bool = False,
) -> tuple[PreTrainedModel | Engine, PreTrainedTokenizerBase, str]:
    """As `load_model`, but also what `lightformers export` wrote, which runs on as many CPU cores as PyTorch would.

    Returns: the model, its tokenizer, and the prefix that every source is to begin with, which is empty for most.

    Args:
        source, target, columns: languages, as of `set_language_codes`. A T5 has the prefix of the two
            (`choose_prefix`), or the one that stands behind `source`, as in `en=translate English to German: `.

    Raises:
        ValueError: the engine is not installed, or it should run elsewhere than on the CPU; languages that the model
            does not know, or that it was not exported for.
    """
    if not is_export(name):
        model, tokenizer = load_model(name, device=device, source=source, target=target, columns=columns)
        return model, tokenizer, choose_prefix(model.config, source, target, name=str(name), columns=columns)
    if str(device) != "cpu":
        raise ValueError(f"{name} was exported to run on the CPU, not on {device}")
    engine, tokenizer = load_engine(name, threads=torch.get_num_threads()), load_pretrained(AutoTokenizer, name)
    if set_language_codes(tokenizer, source, target, columns=columns) not in (None, engine.search.forced_start):
        raise ValueError(f"{name} was exported for another target language than {target}: give its checkpoint")
    return engine, tokenizer, split_prefix(source or "")[1] or engine.prefix


def longest_input(model: PreTrainedModel | Engine, tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of source tokens that model and tokenizer both take."""
    limit = model.longest_input if isinstance(model, Engine) else position_limit(model.config)
    return min(limit or UNLIMITED, tokenizer.model_max_length)


def translate(
    texts: list[str],
    model: PreTrainedModel | Engine | str | os.PathLike,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    source_lang: str | None = None,
    target_lang: str | None = None,
    device: str = "cpu",
    batch_size: int = 32,
    prefix: str = "",
    progress: bool | tqdm = False,
    check: bool = True,
    **generation: Any,
) -> list[str]:
    """Translate (or summarize) `texts` with `generate()`, and return one output a text, in the order of `texts`.

    Texts are batched by length, so that little is computed on padding; empty ones come back empty without reaching
    the model. Texts longer than the model takes are cut, and one logged warning says how many.

    Args:
        model: a sequence-to-sequence model or an exported one (`load_engine`), or the folder or Hub name of either
            (its tokenizer then comes with it).
        tokenizer: the model's tokenizer; needed with a model object.
        source_lang, target_lang: of a multilingual checkpoint, the codes of the languages; `None`: its own.
        device: where a checkpoint runs that is given by its name.
        prefix: stands before every text that does not begin with it, as of `load_translator`, which is asked for it
            where the model is a name.
        progress: show a bar on stderr; or a bar to move on by one for each text.
        check: raise an error where the tokenizer does not know most of the text.
        generation: arguments of `generate()`: `num_beams`, `max_new_tokens`, … What is not given is the checkpoint's.

    Raises:
        ValueError: a model object without its tokenizer, a batch size below 1, or as of `check`.

    Example:
        >>> translate(["Zwei Hunde spielen im Schnee."], "deployed", num_beams=4)
    """
    if not hasattr(model, "generate"):
        model, default_tokenizer, default_prefix = load_translator(
            model, device=device, source=source_lang, target=target_lang
        )
        tokenizer, prefix = tokenizer or default_tokenizer, prefix or default_prefix
    if tokenizer is None:
        raise ValueError("translate() got a model object without its tokenizer: pass both, or the checkpoint's name.")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: expected 1 or more.")
    outputs = [""] * len(texts)
    filled = [i for i, text in enumerate(texts) if text.strip()]
    texts = [text if not text.strip() or text.startswith(prefix) else prefix + text for text in texts]
    check_generation(model, generation)
    limit = longest_input(model, tokenizer)
    token_ids = dict(zip(filled, _tokenize([texts[i] for i in filled], tokenizer, limit), strict=True))
    if check:
        check_known(token_ids.values(), tokenizer)
    longest_first = sorted(filled, key=lambda i: -len(token_ids[i]))
    with ExitStack() as stack:
        bar = progress
        if isinstance(bar, bool):
            bar = stack.enter_context(tqdm(total=len(texts), desc="translating", disable=not bar, unit="text"))
        bar.update(len(texts) - len(filled))
        stack.enter_context(_evaluate_mode(model))
        for start in range(0, len(longest_first), batch_size):
            chosen = longest_first[start : start + batch_size]
            sequences = _generate([token_ids[i] for i in chosen], model, tokenizer, generation)
            decoded = tokenizer.batch_decode(sequences, skip_special_tokens=True)
            for i, output in zip(chosen, decoded, strict=True):
                outputs[i] = output
            bar.update(len(chosen))
    return outputs


def check_generation(model: PreTrainedModel | Engine, generation: Mapping[str, Any]) -> None:
    """Raise `ValueError` where more is asked for than a network has positions, tokens or memory for.

    Engines look at what they are given themselves.
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
    """What model or engine make of sentences of token ids."""
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
    """Inside, a network neither drops out nor records gradients; afterwards it trains again if it did."""
    training = model if isinstance(model, torch.nn.Module) and model.training else None
    if training is not None:
        training.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        if training is not None:
            training.train()


def _tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase, limit: int) -> list[list[int]]:
    """Token ids of each text, at most `limit` of them."""
    if not texts:
        return []
    token_ids = tokenizer(texts, verbose=False)["input_ids"]
    cut = [i for i, ids in enumerate(token_ids) if len(ids) > limit]
    for i in cut:
        token_ids[i] = tokenizer(texts[i], truncation=True, max_length=limit)["input_ids"]
    if cut:
        logger.warning(
            "%d of %d inputs are longer than %d tokens and were cut: split them to have all of their text translated.",
            len(cut),
            len(texts),
            limit,
        )
    return token_ids


def translate_stream(
    source: ByteSource,
    output: BinaryIO,
    model: PreTrainedModel | Engine,
    tokenizer: PreTrainedTokenizerBase,
    **options: Any,
) -> int:
    """Translate UTF-8 lines from `source` to as many lines in `output`, and return their number.

    Lines are translated as soon as they can be read (at once from a terminal or a slow pipe, some hundreds together
    from a file), so that memory does not grow with the input. A newline inside an output becomes a space.

    Args:
        options: as for `translate`.
    """
    done, rest, checked = 0, b"", False
    while True:
        read = source.read1(READ_BYTES)
        *lines, rest = (rest + read).split(b"\n")
        if not read and rest:
            lines, rest = [rest], b""
        texts = []
        for number, line in enumerate(lines, start=done + 1):
            try:
                texts.append(line.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\r"))
            except UnicodeDecodeError as error:
                raise ValueError(f"line {number} of the input is not UTF-8 text: {error}") from error
        for text in translate(texts, model, tokenizer, check=not checked, **options):
            output.write(" ".join(text.splitlines()).encode("utf-8") + b"\n")
        output.flush()
        checked = checked or any(map(str.strip, texts))  # a line in another script ends no stream
        done += len(lines)
        if not read:
            return done
