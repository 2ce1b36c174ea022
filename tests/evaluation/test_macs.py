"""Multiply-additions and memory beside closed formulas, and beside what the papers print."""

import pytest
import torch
from models.cases import make_config
from transformers import BartConfig, BartForConditionalGeneration, MarianConfig, MarianMTModel

from lightformers_hf.evaluation.analysis import generation_macs, memory_footprint, without_storage
from lightformers_hf.evaluation.parameters import find_row
from lightformers_hf.models import LightFormerConfig, SubformerConfig

S, T = 5, 7  # source and target tokens
STEPS, SQUARES = T * (T + 1) // 2, T * (T + 1) * (2 * T + 1) // 6  # sums of k and k²


def marian(width, layers, ffn_dim, vocab_size=34040):
    return MarianConfig(
        vocab_size=vocab_size,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=6,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=ffn_dim,
        decoder_ffn_dim=ffn_dim,
        pad_token_id=1,
        decoder_start_token_id=1,
    )


@pytest.mark.parametrize(
    ("config", "printed", "difference"),
    [
        (marian(512, 6, 2048), 9.9, 0.015),  # PartialFormer, Table 5, #1
        (marian(512, 6, 384), 7.7, 0.015),  # Table 10
        (find_row("PartialFormer T5 #3 without head scaling").model_config(), 5.2, 0.015),
        (find_row("PartialFormer T1 24-6 360/45 30-16").model_config(), 6.9, 0.05),  # Table 5, #4
    ],
    ids=["transformer", "light-ffn", "no-head-scaling", "head-scaling"],
)
def test_macs_as_printed(config, printed, difference):
    assert generation_macs(config).total / 1e9 == pytest.approx(printed, rel=difference)


def test_macs_of_a_transformer_in_a_formula():
    d, f, V = 16, 24, 40
    config = marian(d, 2, f, vocab_size=V)
    attention = 4 * d * d
    encoder = 2 * (S * (attention + 2 * d * f) + 2 * S * S * d)
    cross_keys = 6 * 2 * S * d * d
    a_token = 6 * (attention + 2 * d * d + 2 * d * f)

    macs = generation_macs(config, source_tokens=S, target_tokens=T)
    decoder = STEPS * a_token + T * cross_keys + 6 * 2 * d * (SQUARES + STEPS * S)
    assert (macs.encoder, macs.decoder, macs.output) == (encoder, decoder, STEPS * d * V)

    macs = generation_macs(config, source_tokens=S, target_tokens=T, use_cache=True)
    decoder = T * a_token + cross_keys + 6 * 2 * d * (STEPS + T * S)
    assert (macs.encoder, macs.decoder, macs.output) == (encoder, decoder, T * d * V)
    assert macs.total == encoder + decoder + T * d * V


def test_macs_of_low_rank_matrices_are_those_of_their_factors():
    d, f, V, r, q, e = 16, 24, 40, 3, 5, 7
    config = LightFormerConfig(
        vocab_size=V,
        d_model=d,
        encoder_layers=2,
        encoder_groups=1,  # stored once, computed twice
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=f,
        decoder_ffn_dim=f,
        attention_rank=r,
        ffn_rank=q,
        embedding_rank=e,
    )
    macs = generation_macs(config, source_tokens=S, target_tokens=T)
    layer = 4 * r * 2 * d + 2 * q * (d + f)
    assert macs.encoder == S * e * d + 2 * (S * layer + 2 * S * S * d)
    assert macs.output == STEPS * e * (d + V)


def test_macs_of_heads_with_networks_inside():
    config = make_config("partialformer", encoder_layers=1, decoder_layers=1)
    d, w, H, h = 16, 4, 5, 2
    macs = generation_macs(config, source_tokens=S, target_tokens=T)
    projections = d * w * (2 * h + 2 * H) + H * w * d  # q and k of h heads; values, gates and output of H
    networks = H * 2 * w * 4 * w
    maps = S * S * (h * w + h * H + H * H + H * w)  # logits, from h heads to H, and what they weigh
    once = S * d * 2 * H * w + S * S * H * w  # global attention
    assert macs.encoder == S * (projections + networks) + maps + once


@pytest.mark.parametrize("tokens", [(0, 1), (1, 0)])
def test_macs_of_nothing(tokens):
    with pytest.raises(ValueError, match="expected 1 or more"):
        generation_macs(marian(16, 1, 16), source_tokens=tokens[0], target_tokens=tokens[1])


def footprint(**fields):
    defaults = {"vocab_size": 300, "d_model": 64, "ffn_dim": 96, "encoder_layers": 6, "decoder_layers": 6}
    config = SubformerConfig(**{**defaults, "embedding_dim": 32, "embedding_attention_heads": 4, **fields})
    return memory_footprint(without_storage(config))


def test_footprint_is_table_9_of_subformer():
    V, d_m, f_m, d_s, f_s, d_e, L = 300, 64, 96, 80, 112, 32, 6
    full = {"embedding": "full", "embedding_dim": None}
    transformer = footprint(sharing="none", **full)
    assert transformer.embedding == d_m * V
    assert transformer.encoder == L * (4 * d_m**2 + 2 * f_m * d_m)

    naive = footprint(sandwich_dim=d_m, sandwich_ffn_dim=4 * d_m, ffn_dim=4 * d_m, sandwich_attention_heads=4, **full)
    assert naive.encoder == 3 * (4 * d_m**2 + 2 * (4 * d_m * d_m))

    subformer = footprint(sandwich_dim=d_s, sandwich_ffn_dim=f_s, sandwich_attention_heads=4)
    safe = 5 * d_e**2 + d_e * d_m
    assert subformer.embedding == d_e * V + 2 * safe  # the table has one stack
    printed = 2 * (4 * d_m**2 + 2 * f_m * d_m) + (4 * d_s**2 + 2 * (f_s * d_s + 2 * d_s * d_m))
    assert subformer.encoder == printed - 2 * d_s * d_m  # the table counts the ways up and down twice
    assert subformer.output == d_m * d_e


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (MarianMTModel, marian(16, 2, 24, vocab_size=40)),
        (
            BartForConditionalGeneration,
            BartConfig(
                vocab_size=40,
                d_model=16,
                encoder_layers=2,
                decoder_layers=6,
                encoder_attention_heads=8,
                decoder_attention_heads=8,
                encoder_ffn_dim=24,
                decoder_ffn_dim=24,
                max_position_embeddings=30,
            ),
        ),
    ],
    ids=["marian", "bart"],
)
def test_footprint_of_a_dense_checkpoint(model_class, config):
    found = memory_footprint(model_class(config))
    learned_positions = 2 * 32 * 16 if isinstance(config, BartConfig) else 0  # those of Marian are computed
    assert found.embedding == 40 * 16 + learned_positions
    assert found.encoder == 2 * (4 * 16**2 + 2 * 16 * 24)
    assert found.decoder == 6 * (8 * 16**2 + 2 * 16 * 24)
    assert found.output == 0
    assert found.total == found.embedding + found.encoder + found.decoder


def test_counting_takes_no_storage():
    model = without_storage(marian(512, 6, 2048))
    assert {parameter.device for parameter in model.parameters()} == {torch.device("meta")}
