"""Translation of texts with `generate()` or an engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..engines import check_cpu
from ..engines.engine import Engine, check_first_token, load_engine, translate_texts
from ..languages import choose_prefix, code_prefix, set_language_codes, split_prefix
from ..loading import is_export, load_model, load_pretrained
from ..text import RETURN

if TYPE_CHECKING:
    from io import BufferedReader

    from tqdm.auto import tqdm
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)
READ_BYTES = 1 << 16  # read at once by translate_stream: some five hundred sentences, enough to sort by length


def load_translator(
    name: str | os.PathLike,
    *,
    device: str | torch.device = "cpu",
    source: str | None = None,
    target: str | None = None,
    columns: bool = False,
) -> tuple[PreTrainedModel | Engine, PreTrainedTokenizerBase, str]:
    """Load a checkpoint as `load_model`, or an exported model, which uses as many CPU cores as PyTorch.

    Returns: the model, its tokenizer, and the prefix of every source, which is empty for most models.

    Args:
        source, target, columns: languages, as of `set_language_codes`. A T5 has the prefix of the two
            (`choose_prefix`), or the one that stands behind `source`, as in `en=translate English to German: `.

    Raises:
        ValueError: the engine is not installed, or the device is not the CPU; languages that the model does not
            support, or for which it was not exported.
    """
    name = os.path.expanduser(name)
    if not is_export(name):
        model, tokenizer = load_model(name, device=device, source=source, target=target, columns=columns)
        options: dict[str, Any] = {"name": str(name), "columns": columns, "tokenizer": tokenizer}
        return model, tokenizer, choose_prefix(model.config, source, target, **options)
    check_cpu(name, device)
    engine, tokenizer = load_engine(name, threads=torch.get_num_threads()), load_pretrained(AutoTokenizer, name)
    check_first_token(engine, set_language_codes(tokenizer, source, target, columns=columns), target)
    return engine, tokenizer, split_prefix(source or "")[1] or code_prefix(tokenizer, target) or engine.prefix


def translate(
    texts: Iterable[str],
    model: PreTrainedModel | Engine | str | os.PathLike,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    source_lang: str | None = None,
    target_lang: str | None = None,
    device: str = "cpu",
    batch_size: int = 32,
    prefix: str | None = None,
    split: bool | None = None,
    progress: bool | tqdm = False,
    check: bool = True,
    sample_seed: int | None = None,
    **generation: Any,
) -> list[str]:
    """Translate (or summarize) `texts` with `generate()`, and return one output a text, in the order of `texts`.

    Translation models get sentences. Spaces and line breaks between sentences are kept, and a sentence with more
    tokens than the model has positions is split at punctuation, which a logged warning states. Sentences are batched
    by length. Empty texts come back empty without reaching the model.

    Args:
        model: a sequence-to-sequence model or an exported one (`load_engine`), or the folder or Hub name of either
            (its tokenizer then comes with it).
        tokenizer: the model's tokenizer; needed with a model object.
        source_lang, target_lang: languages of a multilingual checkpoint, `None`: its own. Those of a model object and
            its tokenizer stay as they are.
        device: device for a checkpoint that is given by its name.
        prefix: stands before every text that does not begin with it; "": none. `None`: that of `load_translator`
            where the model is a name, and that of an engine.
        split: split texts into sentences; `None`: where the model translates, by its tokenizer or prefix. A text that
            is not split is cut where it is too long.
        progress: show a bar on stderr; or a bar to move on by one for each text.
        check: raise an error where most of the text becomes unknown tokens.
        sample_seed: sample with this seed, by the checkpoint's temperature, top-k and top-p, one sentence at a time.
            `None`: greedy or beam search, whatever the checkpoint asks for, which a logged warning states.
        generation: arguments of `generate()`: `num_beams`, `max_new_tokens`, … Other arguments have the values of the
            checkpoint. Where it names no length, outputs have at most about two to four times the tokens of their
            sources. A logged warning counts outputs that their limit ended.

    Raises:
        ValueError: a model object without its tokenizer, texts that are no strings, a batch size below 1, arguments
            that make several outputs of a text, or as of `check`.

    Example:
        >>> translate(["Zwei Hunde spielen im Schnee."], "deployed", num_beams=4)
    """
    if not hasattr(model, "generate"):
        if not isinstance(model, str | os.PathLike):
            raise ValueError(
                f"model is a {type(model).__name__}: expected a sequence-to-sequence model, an engine, or the folder "
                "or Hub name of either"
            )
        model, default_tokenizer, default_prefix = load_translator(
            model, device=device, source=source_lang, target=target_lang
        )
        tokenizer, prefix = tokenizer or default_tokenizer, default_prefix if prefix is None else prefix
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError("translate() got a model object without its tokenizer: pass both, or the checkpoint's name.")
        source_lang = target_lang = None  # they are set
    options: dict[str, Any] = {"batch_size": batch_size, "prefix": prefix, "split": split, "check": check}
    options |= {"source_lang": source_lang, "target_lang": target_lang, "sample_seed": sample_seed}
    return translate_texts(texts, model, tokenizer, progress=progress, **options, **generation)


def translate_stream(
    source: BufferedReader,
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
    done, rest, checked, warned = 0, b"", False, False
    while True:
        read = source.read1(READ_BYTES)
        *lines, rest = (rest + read).split(b"\n")
        if not read and rest:
            lines, rest = [rest], b""
        texts = []
        for number, line in enumerate(lines, start=done + 1):
            try:
                texts.append(line.decode("utf-8-sig").rstrip("\r"))
            except UnicodeDecodeError as error:
                raise ValueError(f"line {number} of the input is not UTF-8 text: {error}") from error
            if "\r" in texts[-1] and not warned:
                logger.warning(f"line {number} of the input {RETURN}. It is translated as one line")
                warned = True
        for text in translate(texts, model, tokenizer, check=not checked, **options):
            output.write(" ".join(text.splitlines()).encode("utf-8") + b"\n")
        output.flush()
        checked = checked or any(map(str.strip, texts))  # a line in another script ends no stream
        done += len(lines)
        if not read:
            return done
