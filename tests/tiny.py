"""Checkpoints with a tokenizer, made from nothing in a second, and other small helpers."""

import json
from collections.abc import Iterable
from pathlib import Path


def sizes(width: int, layers: int = 1, heads: int = 2, ffn: int | None = None, **changes) -> dict:
    """Fields of small encoder-decoders, with the names that Marian, BART, their relatives and a LightFormer have."""
    shapes = {"d_model": width}
    for side in ("encoder", "decoder"):
        shapes |= {f"{side}_layers": layers, f"{side}_attention_heads": heads, f"{side}_ffn_dim": ffn or 2 * width}
    return shapes | changes


def marian_tokens(number: int) -> dict:
    """Fields by which a Marian has so many tokens, with the conventions of opus-mt."""
    special = {"eos_token_id": 0, "forced_eos_token_id": 0}
    return special | {"vocab_size": number, "pad_token_id": number - 1, "decoder_start_token_id": number - 1}


# Of a LightFormer that fits the small Marian of `conftest.py`.
SIZES = sizes(32, layers=2, heads=4, ffn=48, decoder_layers=1, dropout=0.0)


def make_tokenizer(folder: Path, sentences: Iterable[str], vocab_size: int = 120, longest: int = 64, **options):
    """A `MarianTokenizer` (de→en) in `folder`, with the conventions of opus-mt: `</s>` is 0, `<pad>` comes last.

    `options` are SentencePiece's.
    """
    import sentencepiece
    from transformers import MarianTokenizer

    parts = folder.with_name(f"{folder.name}-parts")
    parts.mkdir(parents=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_prefix=str(parts / "spm"),
        vocab_size=vocab_size,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    spm = str(parts / "spm.model")
    pieces = sentencepiece.SentencePieceProcessor(model_file=spm)
    words = [pieces.id_to_piece(i) for i in range(pieces.get_piece_size())]
    words = ["</s>", "<unk>", *(word for word in words if word not in ("<s>", "</s>", "<unk>")), "<pad>"]
    (parts / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    tokenizer = MarianTokenizer(
        source_spm=spm, target_spm=spm, vocab=str(parts / "vocab.json"), source_lang="de", target_lang="en",
        model_max_length=longest,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    return tokenizer


def word_tokenizer(words: Iterable[str], end: str | None = None, **special: str):
    """A fast tokenizer of whole words, whose ids are their places; `end` stands behind each text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if end is not None:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, ids[end])])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def restore_rows(rounded):
    """The values (n×k), fp32, that `rounding.RoundedRows` stand for."""
    import numpy as np
    import torch

    codes = np.stack([rounded.packed & 15, rounded.packed >> 4], axis=-1).reshape(len(rounded.packed), -1)
    values = (codes.astype(np.float32) - 8) * rounded.scales.astype(np.float32).repeat(32, axis=1)
    return torch.from_numpy(values[:, : rounded.width])
