"""`tokenizer.json` from the SentencePiece models of Marian and M2M100, compared with the tokenizer it stands for.

Marian cuts sources with one SentencePiece model and targets with another, and `vocab.json` numbers the pieces of both.
The file cuts sources, and decodes the ids of both sides. A token that is no piece of the source's model must never
come out of a source: its entry begins with `MARK`, which the decoder removes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase

from ..checkpoints.tokenizers import BYTE, NORMAL, USER_DEFINED, PieceModel

FILE = "tokenizer.json"
MARK = "\ufdd0"  # no character, by the Unicode standard
SPACE = "▁"
NORMALIZER, CHARSMAP, ADD_PREFIX, REMOVE_SPACES = 3, 2, 3, 4  # fields of a model, and of its normalizer
SENTENCES = 2_000
# First and last characters of scripts, symbols and spaces that the comparison takes sentences from.
SCRIPTS = "az AZ 09 àÿ ąž αω ая اي کی अह กฮ ぁん ァン 一鿿 가힣 აჰ את ԱՖ ሀፐ 😀🙏 🌀🗿 ⁰₎ ℀ⅎ ①⒛ ﬀﬆ ！ｚ".split()
# Emoji of one and of several characters, rare characters, accents alone, markup, invisible characters.
DIFFICULT = (
    "😀 👍🏽",
    "🏳️\u200d🌈🇩🇪",
    "中𠮷𝔘",
    "e\u0301a\u030a",
    "<b>{0}</b> &amp; %s 3.5",
    "a\u00adb\u200bc\ufeffd\x07",
)
PUNCTUATION = ".,;:!?'\"()[]{}<>-–—…“”„‚‘’«»¿¡/\\&%$€£@#*+=|~^`´°·"
SPACES = [" "] * 12 + ["  ", "\t", "\u00a0", "\u2009", "\u3000", "\n", "\u200b", "\r\n", "\ufeff"]
KNOWN = ("MarianTokenizer", "M2M100Tokenizer")


@dataclass(frozen=True)
class TokenizerReport:
    """Facts about a written `tokenizer.json`."""

    sentences: int = 0  # compared with the tokenizer of the checkpoint; 0 where that has the file itself
    ids: int = 0  # sentences that get other ids
    texts: int = 0  # sentences whose ids are decoded to another text
    missing: str = ""  # why there is no such file

    def lines(self) -> list[str]:
        """The same as sentences."""
        if self.missing:
            return [f"The folder has no {FILE}: {self.missing}."]
        if not self.sentences:
            return []
        return [
            f"{FILE} was made from the SentencePiece models. Of {self.sentences:,} sentences {self.ids:,} get other "
            f"ids, and the ids of {self.texts:,} are decoded to another text."
        ]


def write_tokenizer_file(tokenizer: PreTrainedTokenizerBase, folder: Path) -> TokenizerReport:
    """Compare a `tokenizer.json` with the tokenizer that a folder was saved from, and write it, if it is missing."""
    if (folder / FILE).is_file():
        return TokenizerReport()
    kind = type(tokenizer).__name__
    if kind not in KNOWN:
        return TokenizerReport(missing=f"{kind} has none, and it can be made for {' and '.join(KNOWN)} alone")
    if getattr(tokenizer, "separate_vocabs", False):
        return TokenizerReport(missing="source and target have separate vocabularies, which one file cannot hold")
    made = convert_marian(tokenizer) if kind == "MarianTokenizer" else convert_m2m_100(tokenizer)
    report = compare(tokenizer, made)
    made.save(str(folder / FILE), pretty=False)
    return report


def convert_marian(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """The pipeline of a Marian tokenizer."""
    pieces = PieceModel.read(Path(tokenizer.spm_files[0]))
    special = [tokenizer.unk_token, tokenizer.eos_token, tokenizer.pad_token]
    codes = list(tokenizer.supported_language_codes)
    made = convert(pieces, tokenizer.encoder, special[0], special + codes)
    made.add_special_tokens([AddedToken(token, normalized=False) for token in dict.fromkeys(special)])
    made.add_tokens([AddedToken(code, rstrip=True, normalized=False) for code in codes])
    end = tokenizer.eos_token
    made.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A $B {end}", special_tokens=[(end, tokenizer.encoder[end])]
    )
    return made


def convert_m2m_100(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """The pipeline of an M2M100 tokenizer, which puts the source language first."""
    pieces = PieceModel.read(Path(tokenizer.spm_file))
    languages = tokenizer.lang_token_to_id
    names = (tokenizer.bos_token, tokenizer.pad_token, tokenizer.eos_token, tokenizer.unk_token)
    special = {token: tokenizer.convert_tokens_to_ids(token) for token in names if token is not None}
    ids = dict(tokenizer.encoder) | languages
    fillers = {f"<id_{number}>": number for number in set(range(max(ids.values()) + 1)) - set(ids.values())}
    made = convert(pieces, ids | fillers, tokenizer.unk_token, [*special, *languages, *fillers])
    made.add_special_tokens([AddedToken(token, normalized=False) for token in (*special, *languages)])
    first = f"__{tokenizer.src_lang}__" if tokenizer.src_lang else next(iter(languages))
    tokens = {first: languages[first], tokenizer.eos_token: special[tokenizer.eos_token]}
    made.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {tokenizer.eos_token}",
        pair=f"{first} $A $B {tokenizer.eos_token}",
        special_tokens=list(tokens.items()),
    )
    return made


def convert(pieces: PieceModel, ids: dict[str, int], unknown: str, special: list[str]) -> Tokenizer:
    """Normalizer, model and decoder of a SentencePiece model whose pieces have other ids, from 0 without a gap.

    Tokens `special` are matched as a whole, before the text is cut.
    """
    cutting = {piece.text: piece.score for piece in pieces.pieces if piece.type in (NORMAL, USER_DEFINED, BYTE)}
    has_bytes = any(piece.type == BYTE for piece in pieces.pieces)
    order = sorted(ids, key=ids.__getitem__)
    names = [token if token in cutting or token in special else MARK + token for token in order]
    if pieces.is_bpe:
        vocabulary = {name: number for number, name in enumerate(names)}
        merges = list_merges(cutting, vocabulary)
        made = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes))
    else:
        scored = [(name, cutting.get(name, 0.0)) for name in names]
        made = Tokenizer(models.Unigram(scored, unk_id=ids[unknown], byte_fallback=has_bytes))
    options = pieces.settings(NORMALIZER)
    steps: list[normalizers.Normalizer] = []
    if charsmap := options.get(CHARSMAP):
        steps.append(normalizers.Precompiled(charsmap))
    if options.get(REMOVE_SPACES, 1):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    made.normalizer = normalizers.Sequence(steps)
    scheme = "always" if options.get(ADD_PREFIX, 1) else "never"
    made.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
    parts = [decoders.Replace(MARK, ""), *([decoders.ByteFallback()] if has_bytes else [])]
    made.decoder = decoders.Sequence([*parts, decoders.Metaspace(SPACE, prepend_scheme=scheme)])
    return made


def list_merges(scores: dict[str, float], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """The merges of byte-pair encoding, first those of the pieces with the highest score."""
    merges = []
    for piece in sorted((piece for piece in scores if piece in vocabulary), key=lambda piece: -scores[piece]):
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        merges += [pair for pair in pairs if all(part in vocabulary and part in scores for part in pair)]
    return merges


def compare(tokenizer: PreTrainedTokenizerBase, made: Tokenizer, sentences: int = SENTENCES) -> TokenizerReport:
    """Count the sentences that both cut or decode differently."""
    texts = list(sample_sentences(tokenizer, sentences))
    expected = tokenizer(texts, verbose=False)["input_ids"]
    found = [encoding.ids for encoding in made.encode_batch(texts)]
    languages = set(getattr(tokenizer, "lang_token_to_id", {}).values())  # special tokens only for some tokenizers
    outputs = [[number for number in ids if number not in languages] for ids in expected]
    decoded = zip(
        tokenizer.batch_decode(outputs, skip_special_tokens=True),
        made.decode_batch(outputs, skip_special_tokens=True),
        strict=True,
    )
    return TokenizerReport(
        sentences=sentences,
        ids=sum(text != other for text, other in zip(expected, found, strict=True)),
        texts=sum(text.strip() != other.strip() for text, other in decoded),
    )


def sample_sentences(tokenizer: PreTrainedTokenizerBase, count: int) -> Iterator[str]:
    """Sentences of the tokenizer's own words, other scripts, emoji, punctuation and odd spaces, always the same."""
    yield from DIFFICULT[:count]
    source = random.Random(0)
    words = [token.replace(SPACE, "") for token in tokenizer.get_vocab() if SPACE in token] or ["a"]
    for _ in range(count - len(DIFFICULT)):
        parts = []
        for _ in range(source.randint(1, 16)):
            kind = source.random()
            if kind < 0.6:
                parts.append(source.choice(words))
            elif kind < 0.9:
                first, last = map(ord, source.choice(SCRIPTS))
                parts.append("".join(chr(source.randint(first, last)) for _ in range(source.randint(1, 6))))
            parts.append(source.choice(PUNCTUATION) if source.random() < 0.2 else source.choice(SPACES))
        yield "".join(parts)
