"""The teacher in a fast engine: the same translations, nothing left behind, and itself where the engine cannot be."""

import tempfile

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from lightformers_hf import SubformerConfig, SubformerForConditionalGeneration
from lightformers_hf.evaluation.translate import translate
from lightformers_hf.export import Engine
from lightformers_hf.workflows import recover
from lightformers_hf.workflows.recover import fastest_translator, time_translations


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
        patched.setattr(recover, "QUANTIZATION", "float32")
        exact = fastest_translator(network, tokenizer)
    assert isinstance(exact, Engine)
    texts, seconds = time_translations(sources, exact, tokenizer, 1)
    assert texts == expected
    assert seconds > 0
    assert isinstance(fastest_translator(network, tokenizer), Engine)


def test_what_the_engine_cannot_express_stays_itself(teacher):
    tokenizer = teacher[1]
    heads = {f"{name}_attention_heads": 2 for name in ("encoder", "decoder", "sandwich", "embedding")}
    sizes = {
        "d_model": 16,
        "sandwich_dim": 24,
        "sandwich_ffn_dim": 32,
        "embedding_dim": 8,
        "vocab_size": len(tokenizer),
    }
    network = SubformerForConditionalGeneration(SubformerConfig(**sizes, **heads))
    assert fastest_translator(network, tokenizer) is network


def test_a_search_that_the_engine_does_not_know(teacher):
    network, tokenizer = teacher
    network.generation_config.repetition_penalty = 1.2
    assert fastest_translator(network, tokenizer) is network


def test_more_tokens_than_positions(teacher):
    network, tokenizer = teacher
    network.generation_config.max_length = 10 * network.config.max_position_embeddings
    assert fastest_translator(network, tokenizer) is network


def test_a_full_disk_is_no_reason_to_end(teacher, monkeypatch):
    def fail(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(recover, "export", fail)
    assert fastest_translator(*teacher) is teacher[0]


def test_without_the_engine(teacher, monkeypatch):
    monkeypatch.setattr(recover, "find_spec", lambda _: None)
    assert fastest_translator(*teacher) is teacher[0]


def test_beside_a_gpu(teacher):
    network, tokenizer = teacher
    elsewhere = network.to(torch.device("meta"))
    assert fastest_translator(elsewhere, tokenizer) is elsewhere
