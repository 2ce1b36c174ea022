"""Small checkpoints of every family with tokenizers trained on ten sentences, as their users have them."""

import io
import json
from pathlib import Path

import sentencepiece
import torch
from conftest import ENGLISH, GERMAN
from conversion.teachers import COMMON, MARIAN
from models.cases import like_trained
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BartTokenizer,
    M2M100Config,
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    MarianConfig,
    MarianMTModel,
    MarianTokenizer,
    MBart50Tokenizer,
    MBartConfig,
    MBartForConditionalGeneration,
    NllbTokenizer,
    PegasusConfig,
    PegasusForConditionalGeneration,
    PegasusTokenizer,
    PreTrainedTokenizerBase,
    T5Config,
    T5ForConditionalGeneration,
    T5Tokenizer,
)

DIGITS = "0 1 2 3 4 5 6 7 8 9 , ! ?"  # characters that no sentence has


def train_pieces(sentences: list[str], size: int, kind: str = "unigram", **options) -> bytes:
    """A SentencePiece model."""
    model = io.BytesIO()
    settings = {"vocab_size": size, "model_type": kind, "num_threads": 1, "minloglevel": 2}
    settings |= {"hard_vocab_limit": False} if kind == "unigram" else {}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*sentences, DIGITS]), model_writer=model, **settings, **options
    )
    return model.getvalue()


def scores(model: bytes) -> list[tuple[str, float]]:
    """(piece, score) of a model's pieces."""
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [(pieces.id_to_piece(i), pieces.get_score(i)) for i in range(pieces.get_piece_size())]


def _marian(folder: Path, *, apart: bool) -> PreTrainedTokenizerBase:
    models = [train_pieces(sentences, 110) for sentences in (GERMAN, ENGLISH)]
    words = [[piece for piece, _ in scores(model) if piece not in ("<s>", "</s>", "<unk>")] for model in models]
    if not apart:
        words = [[*dict.fromkeys(words[0] + words[1])]]
    for name, model in zip(("source.spm", "target.spm"), models, strict=True):
        (folder / name).write_bytes(model)
    for name, side in zip(("vocab.json", "target_vocab.json"), words, strict=False):
        vocabulary = ["</s>", "<unk>", "<pad>", *side] if apart else ["</s>", "<unk>", *side, "<pad>"]
        (folder / name).write_text(json.dumps({word: number for number, word in enumerate(vocabulary)}))
    target = str(folder / "target_vocab.json") if apart else None
    files = {name: str(folder / f"{name}.spm") for name in ("source", "target")}
    return MarianTokenizer(
        files["source"], files["target"], str(folder / "vocab.json"), target, separate_vocabs=apart,
        source_lang="de", target_lang="en",
    )  # fmt: skip


def _m2m_100(folder: Path) -> PreTrainedTokenizerBase:
    model = train_pieces(GERMAN + ENGLISH, 220, "bpe")
    (folder / "spm.model").write_bytes(model)
    words = ["<s>", "<pad>", "</s>", "<unk>", *(piece for piece, _ in scores(model)[3:])]
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    return M2M100Tokenizer(str(folder / "vocab.json"), str(folder / "spm.model"), src_lang="de", tgt_lang="en")


def _nllb(folder: Path) -> PreTrainedTokenizerBase:
    (folder / "sentencepiece.bpe.model").write_bytes(train_pieces(GERMAN + ENGLISH, 220, "bpe"))
    model = json.loads(NllbTokenizer.from_pretrained(folder).backend_tokenizer.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    return NllbTokenizer(vocab=model["vocab"], merges=merges, src_lang="deu_Latn", tgt_lang="eng_Latn")


def _bart(folder: Path) -> PreTrainedTokenizerBase:
    backend = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    backend.train_from_iterator(GERMAN + ENGLISH, vocab_size=400, special_tokens=special, show_progress=False)
    backend.save_model(str(folder))
    return BartTokenizer.from_pretrained(folder)


def _pegasus(folder: Path) -> PreTrainedTokenizerBase:
    unknown = [f"<unk_{number}>" for number in range(2, 103)]
    special = [(token, 0.0) for token in ("<pad>", "</s>", "<mask_1>", "<mask_2>", *unknown, "<unk>")]
    return PegasusTokenizer(vocab=[*special, *scores(train_pieces(GERMAN + ENGLISH, 140))[3:]])


def _mbart50(folder: Path) -> PreTrainedTokenizerBase:
    vocabulary = scores(train_pieces(GERMAN + ENGLISH, 140))
    return MBart50Tokenizer(vocab=vocabulary, src_lang="de_DE", tgt_lang="en_XX")


def _t5(folder: Path) -> PreTrainedTokenizerBase:
    special = [(token, 0.0) for token in ("<pad>", "</s>", "<unk>")]
    extra = [(f"<extra_id_{number}>", 0.0) for number in range(99, -1, -1)]
    return T5Tokenizer(vocab=[*special, *scores(train_pieces(GERMAN + ENGLISH, 140))[3:], *extra])


NAMES = ("marian", "marian_apart", "m2m_100", "nllb", "bart", "pegasus", "mbart50", "t5")


def make_checkpoint(name: str, folder: Path, positions: int = 40) -> torch.nn.Module:
    """Save model and tokenizer of a family to `folder`, and return the model ready for inference."""
    folder.mkdir(parents=True)
    makers = {
        "marian": lambda path: _marian(path, apart=False),
        "marian_apart": lambda path: _marian(path, apart=True),
    }
    makers |= {"m2m_100": _m2m_100, "nllb": _nllb, "bart": _bart, "pegasus": _pegasus, "mbart50": _mbart50, "t5": _t5}
    parts = folder.with_name(f"{folder.name}-parts")
    parts.mkdir()
    tokenizer = makers[name](parts)
    tokenizer.model_max_length = positions
    tokenizer.save_pretrained(folder)
    size = 1 + max({**tokenizer.get_vocab(), **getattr(tokenizer, "lang_token_to_id", {})}.values())
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    fields = {**COMMON, "vocab_size": size, "pad_token_id": pad, "eos_token_id": end, "forced_eos_token_id": end}
    fields |= {"decoder_start_token_id": end, "max_position_embeddings": positions}
    if name.startswith("marian"):
        fields = {**MARIAN, **fields, "decoder_start_token_id": pad}
        if name == "marian_apart":
            fields |= {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": len(tokenizer.target_encoder)}
        model_class, config = MarianMTModel, MarianConfig(**fields)
    elif name in ("m2m_100", "nllb"):
        # Rows without a token, as the real ones have.
        model_class, config = M2M100ForConditionalGeneration, M2M100Config(**{**fields, "vocab_size": size + 8})
    elif name == "bart":
        model_class, config = BartForConditionalGeneration, BartConfig(**fields)
    elif name == "t5":
        shapes = {"d_model": 16, "d_kv": 4, "num_heads": 4, "d_ff": 40, "num_layers": 2}
        special = {"pad_token_id": pad, "eos_token_id": end, "decoder_start_token_id": pad}
        model_class, config = T5ForConditionalGeneration, T5Config(vocab_size=size + 8, **shapes, **special)
    elif name == "pegasus":
        model_class, config = PegasusForConditionalGeneration, PegasusConfig(**fields)
    else:
        model_class, config = MBartForConditionalGeneration, MBartConfig(**fields, scale_embedding=True)
    torch.manual_seed(0)
    model = like_trained(model_class(config))
    model.generation_config.update(num_beams=2, max_length=20)
    model.save_pretrained(folder)
    return model.eval()
