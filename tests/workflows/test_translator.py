"""The teacher in a fast engine: the same translations, nothing left behind, and itself where the engine cannot be."""

import tempfile
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from lightformers_hf import SubformerConfig, SubformerForConditionalGeneration
from lightformers_hf.engines import Engine
from lightformers_hf.evaluation.translate import translate
from lightformers_hf.workflows import run
from lightformers_hf.workflows.run import fastest_translator, time_translations


@pytest.fixture
def teacher(tiny_marian):
    return AutoModelForSeq2SeqLM.from_pretrained(tiny_marian).eval(), AutoTokenizer.from_pretrained(tiny_marian)


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Where temporary folders are made; empty in the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert not list(folder.iterdir())


def test_it_says_what_the_network_says(teacher, parallel_sentences, monkeypatch):
    network, tokenizer = teacher
    sources = [pair["de"] for pair in parallel_sentences]
    expected = translate(sources, network, tokenizer, num_beams=1)
    with monkeypatch.context() as patched:
        patched.setattr(run, "QUANTIZATION", "float32")
        exact = fastest_translator(network, tokenizer)
    assert isinstance(exact, Engine)
    texts, seconds = time_translations(sources, exact, tokenizer, 1)
    assert texts == expected
    assert seconds > 0
    assert isinstance(fastest_translator(network, tokenizer), Engine)


def be_no_lightformer(network, tokenizer, monkeypatch):
    heads = {f"{name}_attention_heads": 2 for name in ("encoder", "decoder", "sandwich", "embedding")}
    fields = {"d_model": 16, "sandwich_dim": 24, "sandwich_ffn_dim": 32, "embedding_dim": 8, **heads}
    return SubformerForConditionalGeneration(SubformerConfig(vocab_size=len(tokenizer), **fields))


def search_otherwise(network, tokenizer, monkeypatch):
    network.generation_config.repetition_penalty = 1.2


def ask_for_more_tokens_than_positions(network, tokenizer, monkeypatch):
    network.generation_config.max_length = 10 * network.config.max_position_embeddings


def fill_the_disk(network, tokenizer, monkeypatch):
    monkeypatch.setattr(run, "export", Mock(side_effect=OSError("No space left on device")))


def be_without_the_engine(network, tokenizer, monkeypatch):
    monkeypatch.setattr(run, "find_spec", lambda _: None)


def be_on_an_accelerator(network, tokenizer, monkeypatch):
    return network.to(torch.device("meta"))


@pytest.mark.parametrize(
    "change",
    [
        be_no_lightformer, search_otherwise, ask_for_more_tokens_than_positions, fill_the_disk, be_without_the_engine,
        be_on_an_accelerator,
    ],
)  # fmt: skip
def test_where_the_engine_cannot_be_the_network_is_its_own(teacher, monkeypatch, change):
    network, tokenizer = teacher
    network = change(network, tokenizer, monkeypatch) or network
    assert fastest_translator(network, tokenizer) is network
