"""Packages of Argos Translate: its steps, done with the libraries that it uses, give what `translate` gives."""

import json
import shutil
import zipfile

import ctranslate2
import pytest
import sentencepiece
from conversion.vocabulary.checkpoints import make_checkpoint
from transformers import GenerationConfig, MarianTokenizer

from lightformers_hf import export, translate
from lightformers_hf.options import OptionError


@pytest.fixture(scope="module")
def marian(tmp_path_factory, tiny_marian):
    """The model with the search of Argos: four beams, and a length penalty of 0.2."""
    folder = tmp_path_factory.mktemp("argos") / "marian"
    shutil.copytree(tiny_marian, folder)
    search = GenerationConfig.from_pretrained(folder)
    search.update(num_beams=4, length_penalty=0.2)
    search.save_pretrained(folder)
    return folder


def translate_as_argos(folder, sentences):
    """The steps of `apply_packaged_translation` in `argostranslate/translate.py` 1.11, of one sentence each."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sentencepiece.model"))
    translator = ctranslate2.Translator(str(folder / "model"), device="cpu")
    results = translator.translate_batch(
        [pieces.encode(sentence, out_type=str) for sentence in sentences],
        replace_unknowns=True, batch_type="tokens", beam_size=4, num_hypotheses=1, length_penalty=0.2,
    )  # fmt: skip
    outputs = [pieces.decode_pieces(result.hypotheses[0]).replace("▁", " ") for result in results]
    return [output.removeprefix(" ") for output in outputs]


def test_a_package_translates_as_its_folder(marian, lightformers, parallel_sentences, tmp_path):
    out = tmp_path / "out"
    code, printed, _ = lightformers("export", marian, out, "--to", "argos", "--quantization", "float32")
    assert code == 0
    file = out / "translate-de_en-1_0.argosmodel"
    assert f"Argos Translate and LibreTranslate install {out}/{file.name}." in " ".join(printed.split())
    with zipfile.ZipFile(file) as archive:
        archive.extractall(tmp_path)
    package = tmp_path / "translate-de_en-1_0"
    metadata = json.loads((package / "metadata.json").read_text())
    assert {key: metadata[key] for key in ("from_code", "from_name", "to_code", "to_name", "type")} == {
        "from_code": "de", "from_name": "German", "to_code": "en", "to_name": "English", "type": "translate",
    }  # fmt: skip
    german = [pair["de"] for pair in parallel_sentences]
    assert translate_as_argos(package, german) == translate(german, out) == translate(german, marian)
    again = export(marian, tmp_path / "again" / "out", to="argos", quantization="float32").package
    assert (tmp_path / "again" / "out" / again).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("marian_apart", "the model has two vocabularies"),
        ("t5", "a T5 needs a prefix before every sentence"),
        ("nllb", "a NllbTokenizer puts codes of two languages around every sentence"),
        ("bart", "a RobertaTokenizer is not one SentencePiece model"),
    ],
)
def test_refusals(name, reason, tmp_path):
    make_checkpoint(name, tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} cannot be an Argos package, because {reason}"):
        export(tmp_path / name, tmp_path / "out", to="argos")
    assert not (tmp_path / "out").exists()


def test_languages_that_nothing_names(tmp_path):
    make_checkpoint("marian", tmp_path / "marian")
    tokenizer = MarianTokenizer.from_pretrained(tmp_path / "marian", source_lang=None, target_lang=None)
    tokenizer.save_pretrained(tmp_path / "marian")
    with pytest.raises(ValueError, match=r"does not name its languages: give source_lang \(--source-lang de\)"):
        export(tmp_path / "marian", tmp_path / "out", to="argos")
    named = export(tmp_path / "marian", tmp_path / "out", to="argos", source_lang="de", target_lang="en")
    assert named.package == "translate-de_en-1_0.argosmodel"


def test_what_argos_does_not_have_is_refused_or_named(marian, tmp_path, caplog):
    search = GenerationConfig.from_pretrained(marian)
    search.update(no_repeat_ngram_size=2, min_length=5)
    search.save_pretrained(shutil.copytree(marian, tmp_path / "model"))
    export(tmp_path / "model", tmp_path / "out", to="argos")
    assert "model asks for no_repeat_ngram_size=2, min_length=5, which Argos Translate does not have" in caplog.text
    (tmp_path / "text.txt").write_text("Ein Mann.")
    with pytest.raises(OptionError, match="shortlist is given, but Argos Translate computes all tokens of the output"):
        export(marian, tmp_path / "short", to="argos", shortlist=tmp_path / "text.txt")
