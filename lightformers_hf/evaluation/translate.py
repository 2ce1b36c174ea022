"""Text in, translation out: the loop around `generate()` that the removed translation pipeline used to be."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

from ..training.data import set_languages

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..export import Engine

logger = logging.getLogger(__name__)
READ_BYTES = 1 << 16  # what translate_stream takes at once: some five hundred sentences, enough to sort by length


def load_model(
    name: str | os.PathLike, *, device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a sequence-to-sequence checkpoint and its tokenizer from a folder or from the Hub: see `load_network`."""
    return load_network(name, device=device), AutoTokenizer.from_pretrained(name)


def load_network(name: str | os.PathLike, *, device: str | torch.device = "cpu") -> PreTrainedModel:
    """Load a sequence-to-sequence checkpoint from a folder or from the Hub, in evaluation mode.

    It computes in float32, whatever it is stored in, so that speeds of different checkpoints compare.

    Raises:
        FileNotFoundError: no such folder, and no such model on the Hub.
        ValueError: the checkpoint is not a sequence-to-sequence model, or lacks weights that would come out random.
    """
    name = os.fspath(name)
    if not Path(name).is_dir() and (name.startswith(("/", ".", "~")) or name.count("/") > 1):
        raise FileNotFoundError(
            f"No model folder {name}: give a folder that holds a checkpoint, or a name on the Hub."
        )
    if is_export(name):
        raise ValueError(f"{name} was exported for another engine: give the checkpoint that it was exported from.")
    try:
        config = AutoConfig.from_pretrained(name)
    except OSError as error:
        raise FileNotFoundError(
            f"{name} is neither a checkpoint folder nor a reachable model on the Hub: {error}"
        ) from error
    if type(config) not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{name} is a {config.model_type!r} model: expected a sequence-to-sequence model such as Marian, BART or "
            "LightFormer."
        )
    model, loading = AutoModelForSeq2SeqLM.from_pretrained(
        name, config=config, dtype=torch.float32, output_loading_info=True
    )
    if loading["missing_keys"]:
        raise ValueError(
            f"{name} lacks the weights {', '.join(sorted(loading['missing_keys']))}: get the whole checkpoint."
        )
    return model.to(device).eval()


def load_teacher(
    name: str | os.PathLike, light: PreTrainedTokenizerBase, *, device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """As `load_model`; a multilingual teacher translates between the languages of `light`, its student's tokenizer."""
    model, tokenizer = load_model(name, device=device)
    source, target = (getattr(light, side, None) for side in ("src_lang", "tgt_lang"))
    if source and target and hasattr(tokenizer, "src_lang"):
        set_languages(model, tokenizer, source, target)
    return model, tokenizer


def is_export(name: str | os.PathLike) -> bool:
    """Whether a folder was written by `lightformers export`."""
    return Path(name, "export.json").is_file()


def load_translator(
    name: str | os.PathLike, *, device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel | Engine, PreTrainedTokenizerBase]:
    """As `load_model`, but also what `lightformers export` wrote, which runs on as many CPU cores as PyTorch would.

    Raises:
        ValueError: the engine is not installed, or it should run elsewhere than on the CPU.
    """
    if not is_export(name):
        return load_model(name, device=device)
    from ..export import load_engine  # which loads checkpoints by this module

    if str(device) != "cpu":
        raise ValueError(f"{name} was exported to run on the CPU, not on {device}")
    return load_engine(name, threads=torch.get_num_threads()), AutoTokenizer.from_pretrained(name)


def longest_input(model: PreTrainedModel | Engine, tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of source tokens that model and tokenizer both take."""
    if hasattr(model, "longest_input"):
        return min(model.longest_input, tokenizer.model_max_length)
    limit = getattr(model.config, "max_position_embeddings", None) or tokenizer.model_max_length
    return min(limit, tokenizer.model_max_length)


def translate(
    texts: list[str],
    model: PreTrainedModel | Engine | str | os.PathLike,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    batch_size: int = 32,
    progress: bool | tqdm = False,
    **generation,
) -> list[str]:
    """Translate (or summarize) `texts` with `generate()`, and return one output a text, in the order of `texts`.

    Texts are batched by length, so that little is computed on padding; empty ones come back empty without reaching
    the model. Texts longer than the model takes are cut, and one logged warning says how many.

    Args:
        model: a sequence-to-sequence model or an exported one (`load_engine`), or the folder or Hub name of either
            (its tokenizer then comes with it).
        tokenizer: the model's tokenizer; needed with a model object.
        progress: show a bar on stderr; or a bar to move on by one for each text.
        generation: arguments of `generate()`: `num_beams`, `max_new_tokens`, … What is not given is the checkpoint's.
    """
    if not hasattr(model, "generate"):
        model, default_tokenizer = load_translator(model)
        tokenizer = tokenizer or default_tokenizer
    if tokenizer is None:
        raise ValueError("translate() got a model object without its tokenizer: pass both, or the checkpoint's name.")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: expected 1 or more.")
    is_network = isinstance(model, torch.nn.Module)
    if is_network and generation.get("max_new_tokens") is not None:
        generation.setdefault("max_length", None)  # the checkpoint's own limit would only cause a warning

    outputs = [""] * len(texts)
    filled = [i for i, text in enumerate(texts) if text.strip()]
    limit = longest_input(model, tokenizer)
    token_ids = dict(zip(filled, _tokenize([texts[i] for i in filled], tokenizer, limit), strict=True))
    longest_first = sorted(filled, key=lambda i: -len(token_ids[i]))

    bar = tqdm(total=len(texts), disable=not progress, unit="text") if isinstance(progress, bool) else progress
    bar.update(len(texts) - len(filled))
    was_training = is_network and model.training
    if was_training:
        model.eval()
    try:
        with torch.inference_mode():
            for start in range(0, len(longest_first), batch_size):
                chosen = longest_first[start : start + batch_size]
                batch = {"input_ids": [token_ids[i] for i in chosen]}
                if is_network:
                    batch = tokenizer.pad(batch, return_tensors="pt", verbose=False).to(model.device)
                    sequences = model.generate(**batch, **generation)
                else:
                    sequences = model.generate(batch["input_ids"], **generation)
                decoded = tokenizer.batch_decode(sequences, skip_special_tokens=True)
                for i, output in zip(chosen, decoded, strict=True):
                    outputs[i] = output
                bar.update(len(chosen))
    finally:
        if was_training:
            model.train()
        if isinstance(progress, bool):
            bar.close()
    return outputs


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
    source: BinaryIO, output: BinaryIO, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **options
) -> int:
    """Translate UTF-8 lines from `source` to as many lines in `output`, and return their number.

    Lines are translated as soon as they can be read (at once from a terminal or a slow pipe, some hundreds together
    from a file), so that memory does not grow with the input. A newline inside an output becomes a space.

    Args:
        options: as for `translate`.
    """
    done, rest = 0, b""
    while True:
        read = source.read1(READ_BYTES)
        *lines, rest = (rest + read).split(b"\n")
        if not read and rest:
            lines, rest = [rest], b""
        texts = []
        for number, line in enumerate(lines, start=done + 1):
            try:
                texts.append(line.decode("utf-8").removesuffix("\r"))
            except UnicodeDecodeError as error:
                raise ValueError(f"line {number} of the input is not UTF-8 text: {error}") from error
        for text in translate(texts, model, tokenizer, **options):
            output.write(" ".join(text.splitlines()).encode("utf-8") + b"\n")
        output.flush()
        done += len(lines)
        if not read:
            return done


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A binary file that takes the place of `path` when all is written; an error leaves `path` as it was."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
