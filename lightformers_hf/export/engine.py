"""One interface to a model under every engine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel

from ..deprecated import renamed_arguments
from ..files import EXPORT_FILE, read_json
from ..in_memory import AnyModel
from ..loading import load_network, load_pretrained, position_limit
from .engines import CHECKPOINTS, RunningModel, load_engine_file
from .engines.transformers import TransformersModel
from .search import Search
from .sentences import translate_texts
from .shortlist import check_shortlist


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

    def __init__(
        self,
        name: str,
        model: RunningModel,
        search: Search,
        longest_input: int | None,
        prefix: str = "",
        folder: str | os.PathLike | None = None,
    ):
        self.name, self.model, self.search = name, model, search
        self.longest_input, self.prefix, self.folder = longest_input, prefix, folder

    def translate(self, texts: Sequence[str], **options: Any) -> list[str]:
        """Translate texts, see `lightformers_hf.translate`, whose options are these.

        Raises:
            ValueError: the engine was made from a loaded model, and has no tokenizer.
        """
        if self.folder is None:
            raise ValueError("the engine has no tokenizer: call lightformers_hf.translate(texts, engine, tokenizer)")
        tokenizer = load_pretrained(AutoTokenizer, self.folder)
        return translate_texts(texts, self, tokenizer, **{"prefix": self.prefix, **options})

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
        search = self.search.with_options(num_beams, max_new_tokens, forced_length)
        if self.longest_input is not None and search.max_new_tokens > self.longest_input:
            if max_new_tokens is not None or forced_length is not None:
                raise ValueError(
                    f"{search.max_new_tokens} new tokens are more than the model's {self.longest_input} positions"
                )
            search = search.with_options(None, self.longest_input, None)  # the model's own limit may never be reached
        return self.model.generate(sentences, search)

    def score(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[list[float]]:
        """log p of every token of each target, and of the end token behind it, given its source."""
        return self.model.score(self._sentences(sources), [list(target) for target in targets])

    def _sentences(self, batch: Sequence[Sequence[int]] | Mapping[str, Tensor]) -> list[list[int]]:
        if isinstance(batch, Mapping):
            ids = batch["input_ids"]
            mask = batch.get("attention_mask")
            mask = torch.ones_like(ids) if mask is None else mask
            sentences = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
        else:
            sentences = [list(sentence) for sentence in batch]
        lengths = [len(sentence) for sentence in sentences]
        if not lengths or min(lengths) == 0:
            shortest = min(lengths, default=0)
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
    return Engine(CHECKPOINTS, TransformersModel(network, search, threads), search, limit, folder=folder)


@renamed_arguments(folder="model")
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
    folder = Path(model)
    description = read_json(folder / EXPORT_FILE)
    if not description:
        return wrap_network(load_network(model), threads, model)
    if missing := [name for name in ("engine", "max_position_embeddings") if name not in description]:
        raise ValueError(f"{folder / EXPORT_FILE} is damaged: it lacks {missing[0]!r}; export the model again")
    check_shortlist(folder, description.get("shortlist"))
    search = Search.of(GenerationConfig.from_pretrained(folder))
    running = load_engine_file(description["engine"]).load(folder, search, threads)
    limit, prefix = description["max_position_embeddings"], description.get("prefix") or ""
    return Engine(description["engine"], running, search, limit, prefix, folder)
