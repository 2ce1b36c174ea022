"""Parameters, bytes and memory against counts made by hand."""

import json

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForSeq2SeqLM, MarianConfig, MarianMTModel

from lightformers_hf.evaluation.memory import peak_memory, translation_memory
from lightformers_hf.loading import unique_parameters, weight_bytes


def test_shared_and_tied_tensors_count_once_and_buffers_not():
    layer = nn.Linear(3, 5)  # 20
    head = nn.Linear(5, 3, bias=False)
    head.weight = nn.Parameter(torch.zeros(3, 5))  # 15
    tied = nn.Linear(5, 3, bias=False)
    tied.weight = head.weight
    model = nn.ModuleList([layer, layer, head, tied])
    model.register_buffer("table", torch.zeros(100))
    assert unique_parameters(model) == 35


def test_marian_counts_what_it_learned():
    d, ffn, vocabulary = 8, 16, 11
    model = MarianMTModel(
        MarianConfig(
            vocab_size=vocabulary,
            d_model=d,
            encoder_layers=2,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=ffn,
            decoder_ffn_dim=ffn,
            max_position_embeddings=512,
            pad_token_id=10,
            decoder_start_token_id=10,
        )
    )
    attention, norm, feed_forward = 4 * (d * d + d), 2 * d, 2 * d * ffn + ffn + d
    encoder_layer, decoder_layer = attention + feed_forward + 2 * norm, 2 * attention + feed_forward + 3 * norm
    # Embedding and output layer are one matrix; the sinusoids, 512×d in encoder and decoder, are not learned.
    assert unique_parameters(model) == vocabulary * d + 2 * encoder_layer + decoder_layer


def test_bytes_are_those_of_the_files_that_load(tiny_marian, tmp_path):
    size = (tiny_marian / "model.safetensors").stat().st_size
    assert weight_bytes(tiny_marian) == size
    with safe_open(tiny_marian / "model.safetensors", "pt") as tensors:
        assert size > sum(4 * tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118

    AutoModelForSeq2SeqLM.from_pretrained(tiny_marian).save_pretrained(tmp_path, max_shard_size="60KB")
    shards = list(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    (tmp_path / "model-of-another-run.safetensors").write_bytes(bytes(1000))
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(1000))
    assert weight_bytes(tmp_path) == sum(shard.stat().st_size for shard in shards)


def test_a_folder_without_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "marian"}))
    with pytest.raises(FileNotFoundError, match=r"no weight file: expected model\.safetensors"):
        weight_bytes(tmp_path)


def test_peak_memory_grows_with_what_is_allocated():
    before = peak_memory()
    block = torch.ones(before // 4 + 50_000_000)  # four bytes each: more than all memory in use so far
    grown = peak_memory() - before
    assert block.nbytes * 0.7 < grown < block.nbytes * 1.3


def test_memory_of_a_translation_does_not_depend_on_the_calling_process(tiny_marian):
    block = torch.ones(200_000_000)  # 800 MB
    peak, libraries = translation_memory(tiny_marian, ["Der Hund schläft."], num_beams=1, max_new_tokens=5)
    assert 20e6 < libraries < peak < peak_memory() - block.nbytes / 2


def test_a_measurement_that_fails_says_so(tiny_marian, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(ValueError, match="could not be measured in a process of its own"):
        translation_memory(tiny_marian, ["Der Hund schläft."])
