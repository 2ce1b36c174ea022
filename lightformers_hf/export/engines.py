"""One interface to a model under every engine: transformers, CTranslate2, ONNX Runtime."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from ..loading import load_network
from .search import Search

DESCRIPTION = "export.json"
ENGINES = ("ctranslate2", "onnx")
EXTRA = "pip install 'lightformers_hf[export]'"


class Engine:
    """A loaded model: token ids in, token ids out.

    Attributes:
        name: `transformers`, `ctranslate2` or `onnx`.
        search: how it generates where a call says nothing else.
        longest_input: most tokens of a source, and of an output.
    """

    def __init__(self, name: str, model, search: Search, longest_input: int):
        self.name, self.model, self.search, self.longest_input = name, model, search, longest_input

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
            batch: sentences as lists of token ids; or what tokenizers give, `input_ids` and `attention_mask` (B, S).
            num_beams, max_new_tokens: by default those of the model's generation configuration.
            forced_length: generate exactly so many tokens a sentence, past any end token (to measure speed).

        Raises:
            ValueError: no sentence or an empty one, one longer than the model takes, or an option out of its range.
        """
        sentences = self._sentences(batch)
        search = self.search.with_options(num_beams, max_new_tokens, forced_length)
        if search.max_new_tokens > self.longest_input:
            raise ValueError(
                f"{search.max_new_tokens} new tokens are more than the model's {self.longest_input} positions"
            )
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
        if max(lengths) > self.longest_input:
            raise ValueError(
                f"a sentence has {max(lengths)} tokens, more than the model's {self.longest_input} positions: cut it"
            )
        return sentences


class TransformersModel:
    """A model of transformers behind the same two methods as the exported ones."""

    def __init__(self, model: PreTrainedModel, search: Search, threads: int):
        self.network, self.search, self.threads = model, search, threads

    @torch.inference_mode()
    def generate(self, batch: list[list[int]], search: Search) -> list[list[int]]:
        """As `Engine.generate`."""
        options = {"num_beams": search.num_beams, "max_new_tokens": search.max_new_tokens, "max_length": None}
        if not search.ends:
            options |= {"eos_token_id": None, "forced_eos_token_id": None}
        with threads(self.threads):
            rows = self.network.generate(**self._padded(batch), **options)[:, 1:].tolist()
        return [_until_end(row, search.ends) for row in rows]

    @torch.inference_mode()
    def score(self, sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
        """As `Engine.score`."""
        end = self.search.ends[0] if self.search.ends else self.search.pad
        labels = [[*target, end] for target in targets]
        inputs = self._padded([[self.search.start, *target] for target in targets])["input_ids"]
        with threads(self.threads):
            logits = self.network(**self._padded(sources), decoder_input_ids=inputs).logits
        logits[..., list(self.search.suppressed)] = -torch.inf
        log_p = torch.log_softmax(logits, dim=-1)
        return [log_p[row, range(len(ids)), ids].tolist() for row, ids in enumerate(labels)]

    def _padded(self, batch: list[list[int]]) -> dict[str, Tensor]:
        width = max(map(len, batch))
        ids = [sentence + [self.search.pad] * (width - len(sentence)) for sentence in batch]
        mask = [[1] * len(sentence) + [0] * (width - len(sentence)) for sentence in batch]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


class threads:  # noqa: N801, a context manager as torch's own are named
    """PyTorch computes with so many threads inside."""

    def __init__(self, count: int):
        self.count = count

    def __enter__(self) -> None:
        self.before = torch.get_num_threads()
        torch.set_num_threads(self.count)

    def __exit__(self, *exception: object) -> None:
        torch.set_num_threads(self.before)


def load_engine(folder: str | Path, threads: int = 1) -> Engine:
    """Load what `export` wrote, or any sequence-to-sequence checkpoint under transformers, on the CPU.

    Args:
        folder: an exported folder; or a checkpoint's folder or name on the Hub.
        threads: cores to compute with.

    Raises:
        ValueError: the engine that the folder was exported for is not installed.
        FileNotFoundError: no such folder.
    """
    file = Path(folder) / DESCRIPTION
    if not file.is_file():
        network = load_network(folder)
        search = Search.of(network.generation_config)
        longest = network.config.max_position_embeddings
        return Engine("transformers", TransformersModel(network, search, threads), search, longest)
    description = json.loads(file.read_text(encoding="utf-8"))
    search = Search.of(GenerationConfig.from_pretrained(folder))
    model = engine_module(description["engine"]).load(Path(folder), search, threads)
    return Engine(description["engine"], model, search, description["max_position_embeddings"])


def engine_module(name: str) -> ModuleType:
    """The module of this package that writes and runs models for an engine.

    Raises:
        ValueError: an unknown engine, or one that is not installed.
    """
    if name not in ENGINES:
        raise ValueError(f"unknown engine {name!r}: models are exported to {' or '.join(ENGINES)}")
    try:
        return importlib.import_module(f".{name}", __package__)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("ctranslate2", "onnx", "onnxruntime"):
            raise
        raise ValueError(f"{name} needs {error.name}, which is not installed: {EXTRA}") from error


def _until_end(row: list[int], ends: tuple[int, ...]) -> list[int]:
    first = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
    return row[: first + 1]
