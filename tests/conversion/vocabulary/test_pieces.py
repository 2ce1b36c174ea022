"""SentencePiece models with fewer pieces, read by the library itself; and what byte-pair encoding is built from."""

import pytest
import sentencepiece
from conftest import ENGLISH, GERMAN
from conversion.vocabulary.checkpoints import scores, train_pieces
from hypothesis import given, settings
from hypothesis import strategies as st

from lightformers_hf.checkpoints.tokenizers import PieceModel, lone_characters, merges_of

pytestmark = pytest.mark.quick
MODELS = {kind: train_pieces(GERMAN + ENGLISH, 200, kind) for kind in ("unigram", "bpe")}


def read(kind, folder):
    file = folder / "x.model"
    file.write_bytes(MODELS[kind])
    return PieceModel.read(file)


@pytest.mark.parametrize("kind", MODELS)
def test_pieces_are_what_the_library_reads(tmp_path, kind):
    model = read(kind, tmp_path)
    library = sentencepiece.SentencePieceProcessor(model_proto=MODELS[kind])
    assert [(piece.text, piece.score) for piece in model.pieces] == scores(MODELS[kind])
    assert {piece.text for piece in model.pieces if piece.type == 3} == {
        library.id_to_piece(i) for i in range(library.get_piece_size()) if library.is_control(i)
    }
    assert model.is_bpe == (kind == "bpe")
    assert model.without(set()) == MODELS[kind]


def test_sentences_by_which_a_model_tests_itself_are_left_out(tmp_path):
    sample = b"\x0a\x03abc\x12\x03xyz"  # that abc is cut into xyz
    test = b"\x0a" + bytes([len(sample)]) + sample
    (tmp_path / "x.model").write_bytes(MODELS["bpe"] + b"\x22" + bytes([len(test)]) + test)
    assert PieceModel.read(tmp_path / "x.model").without(set()) == MODELS["bpe"]


@pytest.mark.parametrize("kind", MODELS)
@settings(max_examples=30)
@given(chosen=st.sets(st.sampled_from(GERMAN + ENGLISH), min_size=1))
def test_text_is_cut_as_before(tmp_path_factory, kind, chosen):
    model = read(kind, tmp_path_factory.getbasetemp())
    library = sentencepiece.SentencePieceProcessor(model_proto=MODELS[kind])
    texts = [piece.text for piece in model.pieces]
    rank = {piece.text: -piece.score for piece in model.pieces}
    kept = model.needed() | lone_characters(texts)
    for sentence in chosen:
        for piece in library.encode(sentence, out_type=str):
            kept |= merges_of(piece, lambda left, right: rank.get(left + right)) if model.is_bpe else {piece}
    small = sentencepiece.SentencePieceProcessor(model_proto=model.without({*texts} - kept))
    for sentence in (*chosen, "Ж und Я"):
        assert small.encode(sentence, out_type=str) == library.encode(sentence, out_type=str) or sentence[0] == "Ж"
    for sentence in GERMAN + ENGLISH:
        assert small.decode(small.encode(sentence)) == sentence


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no piece"),
        (b"\x0a\xff", "is no SentencePiece model"),
        (b"\x0a\x05\x0a\x03ab", "goes beyond the end"),
        (b"\x0f", "begins no field"),
        (b"\x08\x01", "a field holds the number 1"),
    ],
)
def test_a_file_that_is_none(tmp_path, content, message):
    (tmp_path / "x.model").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        PieceModel.read(tmp_path / "x.model")


def test_what_writes_any_text():
    assert lone_characters(["a", "▁", "▁a", "▁b", "ab", "▁ab"]) == {"a", "▁", "▁b"}
