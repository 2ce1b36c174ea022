"""Multilingual checkpoints: what is made of one translates between the two languages that were asked for."""

import json
import shutil

import pytest
import torch
from transformers import AutoTokenizer, M2M100Tokenizer, MBartForConditionalGeneration, pipeline

from lightformers_hf import convert, translate
from lightformers_hf.engines import Engine, export, load_engine
from lightformers_hf.evaluation.evaluate import evaluate
from lightformers_hf.evaluation.translate import load_translator
from lightformers_hf.languages import add_prefix, prefix_of, set_language_codes
from lightformers_hf.loading import load_model, load_pair, load_teacher
from lightformers_hf.recovery import load_trainable

pytestmark = pytest.mark.quick

CODES = {"source_lang": "de=de_DE", "target_lang": "en=fr_XX"}


@pytest.fixture
def data(tmp_path, parallel_sentences):
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"translation": pair}) + "\n" for pair in parallel_sentences))
    return str(file)


@pytest.mark.parametrize("how", ["paper", "own text", "text"])
def test_the_result_keeps_its_languages(tiny_mbart50, data, tmp_path, how):
    given = {"calibration": data} if how == "text" else {}
    convert(
        tiny_mbart50,
        tmp_path / "light",
        ratio=1.2,
        method="paper" if how == "paper" else "auto",
        progress=False,
        **given,
        **CODES,
    )
    model, tokenizer = load_model(tmp_path / "light")
    de, fr, eos = tokenizer.convert_tokens_to_ids(["de_DE", "fr_XX", "</s>"])
    tokens = tokenizer("Zwei Hunde", text_target="Two dogs")
    assert (tokens["input_ids"][0], tokens["labels"][0], tokens["labels"][-1]) == (de, fr, eos)
    assert model.generate(torch.tensor([tokens["input_ids"]]), max_new_tokens=4)[0, 1] == fr
    assert AutoTokenizer.from_pretrained(tiny_mbart50).tgt_lang is None  # the teacher is as it was


def test_its_teacher_is_asked_for_the_same_languages(tiny_mbart50, data, tmp_path):
    convert(tiny_mbart50, tmp_path / "light", ratio=1.2, progress=False, **CODES)
    _, light = load_model(tmp_path / "light")
    source = torch.tensor([light("Zwei Hunde spielen im Schnee.")["input_ids"]])
    reference = MBartForConditionalGeneration.from_pretrained(tiny_mbart50).eval()
    first = light.convert_tokens_to_ids("fr_XX")
    wanted = reference.generate(source, forced_bos_token_id=first, num_beams=1, max_new_tokens=6, max_length=None)
    teacher = load_teacher(tiny_mbart50, light)
    (said,) = translate(["Zwei Hunde spielen im Schnee."], *teacher, num_beams=1, max_new_tokens=6)
    assert said == light.decode(wanted[0], skip_special_tokens=True)
    found = evaluate(
        str(tmp_path / "light"),
        data=data,
        teacher=tiny_mbart50,
        source_lang="de",
        target_lang="en",
        speed=False,
        max_new_tokens=6,
    )
    assert found.teacher.scores["bleu"] >= 0


def test_a_text_of_two_languages_needs_their_codes(tiny_mbart50, data, tmp_path):
    with pytest.raises(ValueError, match="many languages: give source_lang and target_lang"):
        convert(tiny_mbart50, tmp_path / "light", ratio=1.2, progress=False, calibration=data)
    assert not (tmp_path / "light").exists()


def first_token(model):
    return model.generation_config.forced_bos_token_id


def test_every_command_sets_the_languages_alike(tiny_mbart50, data, tmp_path, lightformers, monkeypatch):
    """`convert`, `export`, `evaluate`, `analyze` and `translate` with codes write what `generate()` does with them."""
    given = ["--source-lang", "de=de_DE", "--target-lang", "en=fr_XX"]
    reference = MBartForConditionalGeneration.from_pretrained(tiny_mbart50).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_mbart50, src_lang="de_DE")
    first = tokenizer.convert_tokens_to_ids("fr_XX")
    text, options = "Zwei Hunde spielen im Schnee.", {"num_beams": 1, "max_new_tokens": 6}
    source = tokenizer(text, return_tensors="pt")
    ids = reference.generate(**source, forced_bos_token_id=first, max_length=None, **options)
    wanted = tokenizer.decode(ids[0], skip_special_tokens=True)
    (tmp_path / "in.txt").write_text(text)
    limits = ["--num-beams", "1", "--max-new-tokens", "6"]
    code, said, _ = lightformers("translate", tiny_mbart50, tmp_path / "in.txt", *given, *limits)
    assert (code, said) == (0, wanted + "\n")
    export(
        tiny_mbart50,
        tmp_path / "onnx",
        to="onnx",
        source_lang="de=de_DE",
        target_lang="en=fr_XX",
        quantization="float32",
    )
    assert translate([text], tmp_path / "onnx", **options) == [wanted]
    model, _, _ = load_translator(tmp_path / "onnx", source="de_DE", target="fr_XX")
    assert model.search.forced_start == first
    with pytest.raises(ValueError, match="exported for another target language than en_XX"):
        load_translator(tmp_path / "onnx", source="de_DE", target="en_XX")

    asked = []
    monkeypatch.setattr(
        "lightformers_hf.evaluation.evaluate.translate",
        lambda texts, model, tokenizer, **_: asked.append((tokenizer.src_lang, first_token(model))) or texts,
    )
    languages = {"source_lang": "de=de_DE", "target_lang": "en=fr_XX"}
    found = evaluate(tiny_mbart50, data=data, teacher=tiny_mbart50, speed=False, **languages)
    assert asked == [("de_DE", first)] * 2
    assert (found.source, found.target) == ("de", "en")
    for command in (["evaluate", tiny_mbart50, "--data", data, "--no-speed"], ["translate", tiny_mbart50, data]):
        code, _, error = lightformers(*command, "--source-lang", "de=de_De", "--target-lang", "en=en_XX")
        assert (code, "--source-lang is 'de_De', which" in error, "there is de_DE" in error) == (1, True, True)
    code, _, error = lightformers("translate", tiny_mbart50, data, "--source-lang", "de_DE", "--target-lang", "</s>")
    assert (code, "--target-lang is '</s>', which" in error) == (1, True)


def test_a_teacher_alone_may_be_multilingual(tiny_mbart50, tiny_marian):
    pair = load_pair(tiny_marian, tiny_mbart50, source="de=de_DE", target="en=fr_XX")
    assert first_token(pair["teacher"][0]) == pair["teacher"][1].convert_tokens_to_ids("fr_XX")
    with pytest.raises(ValueError, match="with a multilingual tokenizer only"):
        load_pair(tiny_marian, tiny_marian, source="de=de_DE", target="en=fr_XX")
    with pytest.raises(ValueError, match="translates from de to en: remove both"):
        load_translator(tiny_marian, source="de", target="fr")
    load_translator(tiny_marian, source="de", target="en")


@pytest.mark.parametrize("said", [{}, {"forced_bos_token_id": 7}, {"forced_bos_token_id": None}])
def test_the_first_token_of_a_configuration_is_every_commands(tiny_marian, tmp_path, said):
    """Older checkpoints have it in config.json, which transformers no longer reads where there are two files."""
    shutil.copytree(tiny_marian, tmp_path / "model")
    for file, fields in {"config": {"forced_bos_token_id": 5}, "generation_config": said}.items():
        path = tmp_path / "model" / f"{file}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    wanted = said.get("forced_bos_token_id", 5)
    loaded = [load_model(tmp_path / "model")[0], load_trainable(str(tmp_path / "model"))]
    convert(tmp_path / "model", tmp_path / "light", ratio=1.2, method="paper", progress=False)
    assert [first_token(model) for model in (*loaded, load_model(tmp_path / "light")[0])] == [wanted] * 3
    assert load_engine(tmp_path / "model").search.forced_start == wanted


def test_the_prefix_of_a_task_is_every_commands(tiny_marian, tmp_path, caplog):
    convert(tiny_marian, tmp_path / "model", pattern={".*": "dense"}, progress=False)

    def tell(tasks):
        path = tmp_path / "model" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"task_specific_params": tasks}))
        return tmp_path / "model"

    options = {"num_beams": 1, "max_new_tokens": 12}
    text, prefix = "Zwei Hunde spielen im Schnee.", "Ein Mann liest: "
    (wanted,) = translate([prefix + text], *load_model(tiny_marian), **options)
    tasks = {"translation_de_to_en": {"prefix": prefix}, "odd": 3, "summarization": {"num_beams": 2}}
    assert translate([text, prefix + text, " "], tell(tasks), **options) == [wanted, wanted, ""]
    export(tmp_path / "model", tmp_path / "onnx", to="onnx", quantization="float32")
    assert translate([text], tmp_path / "onnx", **options) == [wanted]
    tell(tasks | {"translation_en_to_de": {"prefix": "Zwei: "}})
    assert load_translator(tmp_path / "model", source="de", target="en")[2] == prefix
    assert load_translator(tmp_path / "model")[2] == ""
    assert "translation_de_to_en, translation_en_to_de" in caplog.text
    assert load_translator(tmp_path / "model", source="de=say it: ")[2] == "say it: "
    path = tmp_path / "model" / "tokenizer_config.json"  # a T5's names no languages
    said = json.loads(path.read_text())
    path.write_text(json.dumps({name: said[name] for name in said.keys() - {"source_lang", "target_lang"}}))
    with pytest.raises(ValueError, match="has no prefix; it has those of translation_de_to_en, translation_en_to_de"):
        load_translator(tmp_path / "model", source="de", target="fr")


def test_the_only_code_of_a_model_is_every_commands(tiny_marian, tmp_path):
    """As where a multilingual opus-mt is trimmed to one target language."""
    folder = shutil.copytree(tiny_marian, tmp_path / "model")
    text, options = "Zwei Hunde spielen im Schnee.", {"num_beams": 1, "max_new_tokens": 12}
    vocabulary = json.loads((folder / "vocab.json").read_text())
    other = next(word for word in vocabulary if word[0] == "▁" and word[1:] and word[1:] not in text)
    named = {">>eng<<" if word == other else word: number for word, number in vocabulary.items()}
    (folder / "vocab.json").write_text(json.dumps(named))
    model, tokenizer = load_model(folder)
    model.get_input_embeddings().weight.data[vocabulary[other]] *= 20
    model.save_pretrained(folder)
    wanted = translate([f">>eng<< {text}"], model, tokenizer, **options)
    assert translate([text], model, tokenizer, prefix="", **options) != wanted
    export(folder, tmp_path / "onnx", to="onnx", quantization="float32")
    for one in (folder, tmp_path / "onnx", load_engine(folder)):
        found = translate([text], one, tokenizer if isinstance(one, Engine) else None, **options)
        assert found == wanted
    (said,) = pipeline("translation", model=str(folder))(text, **options)
    assert [said["translation_text"]] == wanted
    assert prefix_of(model.config, "de", "en", tokenizer) == ">>eng<< "
    assert add_prefix(model.config, "de=>>eng<< ", "en", tokenizer) == "de=>>eng<< "


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ({"source_lang": "de_DE"}, "go together"),
        ({"source_lang": "de", "target_lang": "en_XX"}, "source_lang is 'de', which .* does not support.*COLUMN=CODE"),
        ({"source_lang": "de=de_DE", "target_lang": "en=en_X"}, "target_lang is 'en_X'.* en_XX"),
    ],
)
def test_codes_that_cannot_be(tiny_mbart50, tmp_path, codes, message):
    with pytest.raises(ValueError, match=message):
        convert(tiny_mbart50, tmp_path / "light", method="paper", ratio=1.2, progress=False, **codes)
    assert not (tmp_path / "light").exists()


def test_a_shared_model_translates_between_the_languages_of_a_call(tiny_mbart50):
    """By name, as an object and as an engine; tokenizer and generation configuration stay as they are."""
    texts, languages = ["Zwei Hunde spielen im Schnee."], {"source_lang": "de_DE", "target_lang": "fr_XX"}
    options = {"num_beams": 1, "max_new_tokens": 6}
    wanted = translate(texts, tiny_mbart50, **languages, **options)
    model, tokenizer = load_model(tiny_mbart50, source="en_XX", target="ro_RO")
    before = tokenizer.backend_tokenizer.to_str(), vars(tokenizer).copy(), model.generation_config.to_dict()
    assert translate(texts, model, tokenizer, **languages, **options) == wanted
    assert translate(texts, model, tokenizer, **options) != wanted
    assert (tokenizer.backend_tokenizer.to_str(), vars(tokenizer), model.generation_config.to_dict()) == before
    engine = load_engine(load_model(tiny_mbart50, source="de_DE", target="fr_XX")[0])
    assert translate(texts, engine, tokenizer, **languages, **options) == wanted
    with pytest.raises(ValueError, match="for another target language than en_XX"):
        translate(texts, engine, tokenizer, source_lang="de_DE", target_lang="en_XX")


@pytest.mark.parametrize("made", ["model", "light", "ctranslate2", "onnx"])
def test_decoding_starts_from_a_code_that_stands_behind_the_targets(tiny_mbart25, made, tmp_path):
    """mBART-25, by the documentation of transformers: `decoder_start_token_id` is the language."""
    text, options = "Zwei Hunde spielen im Schnee.", {"num_beams": 1, "max_new_tokens": 6}
    reference = MBartForConditionalGeneration.from_pretrained(tiny_mbart25).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_mbart25, src_lang="de_DE")
    first = tokenizer.convert_tokens_to_ids("fr_XX")
    ids = reference.generate(
        **tokenizer(text, return_tensors="pt"), decoder_start_token_id=first, max_length=None, **options
    )
    wanted = [tokenizer.decode(ids[0], skip_special_tokens=True)]
    folder = tmp_path / made
    if made == "model":
        folder = tiny_mbart25
        assert translate([text], folder, source_lang="de_DE", target_lang="fr_XX", **options) == wanted
        assert translate([text], folder, source_lang="de_DE", target_lang="en_XX", **options) != wanted
    elif made == "light":
        convert(tiny_mbart25, tmp_path / made, pattern={".*": "dense"}, progress=False, **CODES)
        model, _ = load_model(tmp_path / made)
        assert (model.config.decoder_start_token_id, first_token(model)) == (first, None)
    else:
        export(tiny_mbart25, tmp_path / made, to=made, quantization="float32", **CODES)
    if made != "model":
        assert translate([text], folder, **options) == wanted
    pipe = pipeline("translation", model=str(folder), src_lang="de_DE", tgt_lang="fr_XX")
    assert pipe(text, **options) == [{"translation_text": wanted[0]}]


def test_codes_that_are_no_tokens(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "▁a": 4}))
    import sentencepiece

    text = iter(["a b c d e f g"] * 5)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=text, model_prefix=str(tmp_path / "spm"), vocab_size=12, minloglevel=2
    )
    tokenizer = M2M100Tokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "spm.model"))
    assert set_language_codes(tokenizer, "de", "fr") == {"forced_bos_token_id": tokenizer.get_lang_id("fr")}
    assert tokenizer("a")["input_ids"][0] == tokenizer.get_lang_id("de")
