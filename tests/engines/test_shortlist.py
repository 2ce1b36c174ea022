"""A part of the output layer: what comes is what the whole model says with every other token suppressed."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ENGLISH, GERMAN
from conversion.vocabulary.checkpoints import make_checkpoint
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from lightformers_hf import convert, translate
from lightformers_hf.engines import ENGINES, export, load_engine
from lightformers_hf.engines.shortlist import Shortlist, choose_shortlist, learn_lexicon, read_pairs

FILES = {"ctranslate2": "vmap.txt", "onnx": "shortlist.json"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Ten sentences several times: the part that is held out is known."""
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    pairs = [{"translation": {"de": german, "en": english}} for german, english in zip(GERMAN, ENGLISH, strict=True)]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in 4 * pairs))
    return str(file)


def small_shortlist(monkeypatch):
    """Shortlists of few tokens, which cannot hold everything."""
    monkeypatch.setattr("lightformers_hf.engines.shortlist.ALWAYS", (8,))
    monkeypatch.setattr("lightformers_hf.engines.shortlist.EACH", (4,))


def read_shortlist(folder, tokens):
    """(tokens that always can come, {source token: those that come with it}) of either file, as ids."""
    if (folder / "shortlist.json").is_file():
        content = json.loads((folder / "shortlist.json").read_text())
        return set(content["always"]), {int(token): set(ids) for token, ids in content["given"].items()}
    lines = [line.split("\t") for line in (folder / "vmap.txt").read_text(encoding="utf-8").splitlines()]
    ids = {source: {tokens[token] for token in targets.split(" ")} for source, targets in lines}
    return ids.pop(""), {tokens[source]: targets for source, targets in ids.items()}


def find_outputs(folder, tokenizer, model, sentences, **options):
    """(what the engine makes of each sentence, what the model makes of it with every other token suppressed)."""
    always, given = read_shortlist(folder, tokenizer.get_vocab())
    engine = load_engine(folder)
    for sentence in sentences:
        ids = tokenizer(sentence)["input_ids"]
        rest = sorted({*range(model.config.vocab_size)} - always.union(*(given.get(token, ()) for token in ids)))
        asked = options | {"max_length": None, "suppress_tokens": rest, "renormalize_logits": True}
        (found,) = engine.generate([ids], **options)
        yield found, model.generate(torch.tensor([ids]), **asked)[0, 1:].tolist()


@pytest.mark.parametrize("to", ENGINES)
@pytest.mark.parametrize("beams", [1, 3])
def test_outputs_are_those_with_every_other_token_suppressed(tiny_marian, text, tmp_path, monkeypatch, to, beams):
    small_shortlist(monkeypatch)
    light = tmp_path / "light"
    convert(tiny_marian, light, pattern={"embedding": 16}, method="paper", progress=False)
    model, tokenizer = (auto.from_pretrained(light) for auto in (AutoModelForSeq2SeqLM, AutoTokenizer))
    model.generation_config.update(early_stopping=True, forced_eos_token_id=None, bad_words_ids=None)
    model.save_pretrained(light)
    report = export(light, tmp_path / "out", to=to, shortlist=text, quantization="float32")
    assert report.shortlist.candidates < report.shortlist.vocabulary / 2
    options = {"num_beams": beams, "max_new_tokens": 12}
    for found, expected in find_outputs(tmp_path / "out", tokenizer, model, GERMAN[:4], **options):
        assert found == expected


@pytest.mark.parametrize("to", ENGINES)
def test_translations_begin_in_their_language(text, tmp_path, monkeypatch, to):
    small_shortlist(monkeypatch)
    make_checkpoint("nllb", tmp_path / "nllb")
    sides = {"source_lang": "de=deu_Latn", "target_lang": "en=fra_Latn"}
    options = {"vocabulary": text, "languages": "deu_Latn", "ratio": 1, "progress": False}
    convert(tmp_path / "nllb", tmp_path / "pair", **options, **sides)
    model, tokenizer = (auto.from_pretrained(tmp_path / "pair") for auto in (AutoModelForSeq2SeqLM, AutoTokenizer))
    model.generation_config.update(early_stopping=True, forced_eos_token_id=None)
    model.save_pretrained(tmp_path / "pair")
    export(tmp_path / "pair", tmp_path / "out", to=to, shortlist=text, **sides, quantization="float32")
    options = {"num_beams": 1, "max_new_tokens": 8}
    for found, expected in find_outputs(tmp_path / "out", tokenizer, model, GERMAN[:3], **options):
        assert found == expected[: len(found)]
        assert tokenizer.convert_ids_to_tokens(found[0]) == "fra_Latn"


@pytest.mark.parametrize("to", ENGINES)
@pytest.mark.parametrize("family", ["nllb", "m2m_100", "t5"])
def test_models_with_rows_that_are_no_tokens(text, tmp_path, to, family):
    """As they come from the Hub: more rows than tokens, of many languages, none chosen."""
    make_checkpoint(family, tmp_path / "model")
    sides = {"source_lang": "de", "target_lang": "en"}
    if family != "t5":
        file = tmp_path / "model" / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"tgt_lang": None}))
        with pytest.raises(ValueError, match="has many languages: give source_lang and target_lang"):
            export(tmp_path / "model", tmp_path / "out", to=to, shortlist=text, quantization="float32")
    if family == "nllb":
        sides = {"source_lang": "de=deu_Latn", "target_lang": "en=fra_Latn"}
    report = export(tmp_path / "model", tmp_path / "out", to=to, shortlist=text, **sides, quantization="float32")
    assert report.shortlist.pairs == 36
    first = json.loads((tmp_path / "out" / "generation_config.json").read_text()).get("forced_bos_token_id")
    if family != "t5":
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
        assert tokenizer.tgt_lang == sides["target_lang"].split("=")[-1]
        (found,) = load_engine(tmp_path / "out").generate([tokenizer(GERMAN[0])["input_ids"]], num_beams=1)
        assert found[0] == first


def test_the_languages_of_m2m100_are_in_the_vocabulary_of_ctranslate2(tmp_path):
    make_checkpoint("m2m_100", tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out", to="ctranslate2", quantization="float32")
    assert {"__de__", "__en__"} <= set(json.loads((tmp_path / "out" / "shared_vocabulary.json").read_text()))


@pytest.mark.parametrize("to", ENGINES)
@pytest.mark.parametrize("quantization", ["float32", "int8"])
def test_translations_stay_where_all_is_covered(tiny_marian, text, tmp_path, to, quantization):
    for name, listed in (("plain", None), ("short", text)):
        report = export(tiny_marian, tmp_path / name, to=to, quantization=quantization, shortlist=listed)
    listed = report.shortlist
    assert listed.coverage == 1.0
    assert listed.same == 1.0
    assert listed.chrf == pytest.approx(listed.chrf_without)
    assert (listed.pairs, listed.sentences, listed.own_translations) == (36, 2, False)
    assert any("Shortlist from 36 pairs of text.jsonl" in line for line in report.lines("out"))
    assert translate(GERMAN, tmp_path / "short") == translate(GERMAN, tmp_path / "plain")
    described = json.loads((tmp_path / "short" / "export.json").read_text())["shortlist"]
    assert described["text"] == "text.jsonl"


def test_text_of_the_source_alone_is_translated(tiny_marian, tmp_path):
    lines = tmp_path / "lines.de"
    lines.write_text("\n".join(GERMAN * 4) + "\n\n", encoding="utf-8")
    report = export(tiny_marian, tmp_path / "out", to="ctranslate2", shortlist=str(lines), quantization="float32")
    assert report.shortlist.own_translations
    assert report.shortlist.chrf is None
    assert report.shortlist.coverage == 1.0


@pytest.mark.parametrize("to", ENGINES)
def test_a_shortlist_of_another_model_is_refused(tiny_marian, text, tmp_path, to):
    export(tiny_marian, tmp_path / "out", to=to, shortlist=text, quantization="float32")
    export(tiny_marian, tmp_path / "plain", to=to, quantization="float32")
    shutil.copy(tmp_path / "out" / FILES[to], tmp_path / "plain")
    with pytest.raises(ValueError, match="was not made for this model, whose vocabulary may be another"):
        load_engine(tmp_path / "plain")
    (tmp_path / "out" / FILES[to]).unlink()
    with pytest.raises(ValueError, match="lacks its shortlist"):
        load_engine(tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"fr": "Bonjour"}\n', "has no column 'de': it has 'fr'; give source_lang"),
        ('{"de": "Hund", "en": "dog"}\n' * 3, "holds 3 sentences: give thousands"),
        ('{"de": "", "en": "dog"}\n' * 9, "'de' is empty in every row"),
        ("", "holds no rows"),
    ],
)
def test_text_that_cannot_be(tiny_marian, tmp_path, content, message):
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        export(
            tiny_marian,
            tmp_path / "out",
            to="ctranslate2",
            shortlist=str(tmp_path / "bad.jsonl"),
            quantization="float32",
        )
    assert not (tmp_path / "out").exists()


def test_a_shortlist_needs_a_tokenizer(tiny_marian, text, tmp_path):
    bare = shutil.copytree(tiny_marian, tmp_path / "bare", ignore=shutil.ignore_patterns("*.spm", "vocab*", "tok*"))
    with pytest.raises(ValueError, match="has no tokenizer to read the text by"):
        export(bare, tmp_path / "out", to="onnx", shortlist=text, quantization="float32")


def test_model_1_against_its_equations():
    generator = np.random.default_rng(0)
    sources, targets = ([generator.integers(5, size=3).tolist() for _ in range(6)] for _ in range(2))
    t = {(f, e): 1.0 for f in (*range(5), None) for e in range(5)}
    for _ in range(5):  # the empty word None explains, too
        counts = dict.fromkeys(t, 0.0)
        for source, target in zip(sources, targets, strict=True):
            for e in target:
                total = sum(t[f, e] for f in (*source, None))
                for f in (*source, None):
                    counts[f, e] += t[f, e] / total
        totals = {f: sum(counts[f, e] for e in range(5)) for f, _ in t}
        t = {(f, e): counts[f, e] / totals[f] if totals[f] else 0.0 for f, e in t}
    lexicon = learn_lexicon(sources, targets)
    for f, e, p in zip(lexicon.source, lexicon.target, lexicon.probability, strict=True):
        assert p == pytest.approx(t[f, e], abs=1e-9)
    best = lexicon.targets(2)
    assert best[0] == sorted(range(5), key=lambda e: -t[0, e])[:2]
    counts = np.bincount(np.concatenate(targets))
    assert counts[lexicon.frequent[0]] == counts.max()


def test_the_smallest_that_covers_enough_is_taken():
    sources = [[number] for number in range(300)] * 2
    targets = [[number + 300] for number in range(300)] * 2
    lexicon = learn_lexicon(sources, targets)
    shortlist = choose_shortlist(lexicon, 600, [599], sources, targets)
    coverage, size = shortlist.coverage(sources, targets)
    assert coverage == 1.0
    assert size < 110  # a hundred frequent ones, and the one that goes with the source
    assert 599 in shortlist.candidates([[0]])
    assert Shortlist(600, (1,), {2: [5, 3]}).candidates([[2], [9]]).tolist() == [1, 3, 5]


@pytest.mark.parametrize("given", [True, False])
def test_sources_have_the_prefix_that_the_model_is_told_what_to_do_by(text, given):
    """That of the command line, or that which the configuration has for the two languages."""
    tasks = {} if given else {"translation_de_to_en": {"prefix": "translate: "}}
    model = SimpleNamespace(config=SimpleNamespace(task_specific_params=tasks))
    tokenizer = SimpleNamespace(convert_tokens_to_ids=lambda token: None, unk_token_id=None)
    source = SimpleNamespace(model=model, tokenizer=tokenizer)
    sources, references = read_pairs(source, text, ("de=translate: " if given else "de", "en"))
    assert sources == ["translate: " + german for german in 4 * GERMAN]
    assert references == 4 * ENGLISH


def test_a_damaged_description_is_named(tiny_marian, tmp_path):
    export(tiny_marian, tmp_path / "out", to="ctranslate2", quantization="float32")
    file = tmp_path / "out" / "export.json"
    description = json.loads(file.read_text())
    for name in ("engine", "max_position_embeddings"):
        file.write_text(json.dumps({key: value for key, value in description.items() if key != name}))
        with pytest.raises(ValueError, match=rf"export\.json is damaged: it lacks '{name}'"):
            load_engine(tmp_path / "out")
