"""The teacher in the engine that translates fastest."""

from __future__ import annotations

import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..evaluation.translate import translate
from ..export import Engine, export, load_engine

ENGINE, QUANTIZATION = "ctranslate2", "int8"


def fastest_translator(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel | Engine:
    """`network` in CTranslate2 and int8, on as many cores as PyTorch has now, where that can be; else itself.

    It takes a fifth of the time of `generate()` (RESULTS.md, "In half an hour"). It cannot be beside a GPU, without
    CTranslate2, and for a network or a way to generate that the engine does not express. Nothing of it stays on disk.
    """
    if network.device.type != "cpu" or find_spec(ENGINE) is None:
        return network
    try:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint, exported = Path(folder, "checkpoint"), Path(folder, "exported")
            network.save_pretrained(checkpoint)
            tokenizer.save_pretrained(checkpoint)
            export(checkpoint, exported, to=ENGINE, quantization=QUANTIZATION)
            engine = load_engine(exported, threads=torch.get_num_threads())
    except (ValueError, OSError):  # it cannot be expressed, or the disk is full: slower is no reason to end
        return network
    fits = engine.longest_input is None or engine.search.max_new_tokens <= engine.longest_input
    return engine if fits else network


def time_translations(
    sources: list[str], translator: PreTrainedModel | Engine, tokenizer: PreTrainedTokenizerBase, beams: int
) -> tuple[list[str], float]:
    """Translations, and the seconds that each took."""
    start = time.monotonic()
    texts = translate(sources, translator, tokenizer, num_beams=beams)
    return texts, max(time.monotonic() - start, 1e-9) / len(texts)
