"""Checkpoints with a tokenizer, made from nothing in a second."""

import json
from collections.abc import Iterable
from pathlib import Path

# Of a LightFormer that fits the small Marian of `conftest.py`.
SIZES = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4, "dropout": 0.0}
SIZES |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}


def make_tokenizer(folder: Path, sentences: Iterable[str], vocab_size: int = 120, longest: int = 64):
    """A `MarianTokenizer` (de→en) in `folder`, with the conventions of opus-mt: `</s>` is 0, `<pad>` comes last."""
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
