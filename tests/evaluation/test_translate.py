"""`translate`: order, batches, empty lines, cuts, and the stream of lines."""

import copy
import io
import json
import math
import re
import shutil
from collections import UserDict
from types import SimpleNamespace

import pandas
import pytest
import torch
from conversion.test_convert_t5 import make_tokenizer
from datasets import Dataset
from tiny import word_tokenizer
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig, T5Config, T5ForConditionalGeneration

from lightformers_hf.decoding import describe_strategies
from lightformers_hf.engines import export, load_engine
from lightformers_hf.engines.engine import Engine, split_texts
from lightformers_hf.engines.search import Search
from lightformers_hf.evaluation.speed import tokens_per_second
from lightformers_hf.evaluation.translate import translate, translate_stream
from lightformers_hf.languages import ISO_639
from lightformers_hf.loading import load_model

OPTIONS = {"num_beams": 1, "max_new_tokens": 30}


@pytest.fixture(scope="module")
def loaded(tiny_marian):
    return load_model(tiny_marian)


@pytest.fixture(scope="module")
def german(parallel_sentences):
    """Sentences of different lengths, not in the order of their lengths."""
    sentences = [pair["de"] for pair in parallel_sentences]
    return [*sentences, "Der Hund.", " ".join(sentences[:2])]


@pytest.mark.parametrize("num_beams", [1, 3])
def test_batches_give_what_generate_gives_one_by_one(tiny_marian, loaded, german, num_beams):
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_marian)
    tokenizer = AutoTokenizer.from_pretrained(tiny_marian)
    expected = []
    for sentence in german:
        sequences = model.generate(**tokenizer(sentence, return_tensors="pt"), num_beams=num_beams, max_new_tokens=30)
        expected.append(tokenizer.decode(sequences[0], skip_special_tokens=True))
    assert len(set(expected)) == len(german)
    for batch_size in (1, 5, 32):
        assert (
            translate(german, *loaded, batch_size=batch_size, num_beams=num_beams, max_new_tokens=30, split=False)
            == expected
        )


@pytest.mark.parametrize("setting", [{"num_return_sequences": 2}, {"return_dict_in_generate": True}])
def test_a_text_has_one_output_whatever_the_checkpoint_asks_for(tiny_marian, loaded, german, setting):
    model, tokenizer = load_model(tiny_marian)
    model.generation_config.update(**setting)
    assert translate(german[:3], model, tokenizer) == translate(german[:3], *loaded)
    speeds = [tokens_per_second({"model": (one, tokenizer)}, german[:1], runs=1) for one in (model, loaded[0])]
    assert speeds[0]["model"].tokens == speeds[1]["model"].tokens
    if "return_dict_in_generate" in setting:  # several outputs are none of an engine's options
        sentence = tokenizer(german[:1])["input_ids"]
        assert load_engine(model).generate(sentence) == load_engine(loaded[0]).generate(sentence)


STRATEGIES = [
    ({"do_sample": True, "temperature": 1.5}, "sampling"),
    ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, "group beam search"),
    ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search"),
    ({"num_beams": 4, "force_words_ids": [[5]]}, "forced words"),
    ({"dola_layers": "low"}, "DoLa"),
]


@pytest.mark.parametrize(("settings", "name"), STRATEGIES)
@pytest.mark.parametrize("form", ["model", "engine", "export", "speed"])
def test_whatever_a_checkpoint_asks_for_the_search_is_greedy_or_has_beams(
    settings, name, form, tiny_marian, loaded, german, caplog, tmp_path
):
    folder = tmp_path / "model"
    shutil.copytree(tiny_marian, folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    own = load_model(folder)
    options = {"num_beams": settings.get("num_beams", 1), "max_new_tokens": 12}
    if form == "speed":
        speeds = [tokens_per_second({"it": one}, german[:2], runs=1, **options)["it"].tokens for one in (own, loaded)]
        assert speeds[0] == speeds[1]
        return
    before = own[0].generation_config.to_dict()
    if form == "export":
        export(folder, tmp_path / "out", to="onnx", quantization="float32")
        assert not describe_strategies(GenerationConfig.from_pretrained(tmp_path / "out"))
    models = {
        "model": own,
        "engine": (form == "engine" and load_engine(folder), own[1]),
        "export": (tmp_path / "out",),
    }
    for _ in range(2):
        assert translate(german, *models[form], **options) == translate(german, *loaded, **options)
    assert own[0].generation_config.to_dict() == before
    assert caplog.text.count(f"asks for {name}") == 1


def test_sampling_takes_a_seed(loaded, german):
    options = {"temperature": 3.0, "max_new_tokens": 12, "top_k": 0}
    first, second = (translate(german, *loaded, sample_seed=seed, **options) for seed in (0, 1))
    greedy = translate(german, *loaded, num_beams=1, max_new_tokens=12)
    assert first != second != greedy != first
    torch.manual_seed(7)
    drawn = torch.rand(1)
    torch.manual_seed(7)
    assert translate(german[::-1], *loaded, sample_seed=0, batch_size=2, **options)[::-1] == first
    assert torch.rand(1) == drawn
    for given, message in (({"do_sample": True}, "needs a seed"), ({"num_beam_groups": 2}, "no group beam search")):
        with pytest.raises(ValueError, match=message):
            translate(german, *loaded, **given)
    with pytest.raises(ValueError, match="exported models do not sample"):
        translate(german, load_engine(loaded[0]), loaded[1], sample_seed=0)


def test_outputs_of_a_model_without_a_length_end_by_what_their_sources_suggest(tiny_marian, german, caplog):
    """And not after 20 tokens; which depends on no other source of the batch, and is said."""
    model, tokenizer = load_model(tiny_marian)
    end = model.generation_config.eos_token_id
    model.generation_config.update(
        max_length=None, max_new_tokens=None, num_beams=1, suppress_tokens=[end], forced_eos_token_id=None
    )
    lengths = [len(ids) for ids in tokenizer(german)["input_ids"]]
    limits = [min(1 << math.ceil(math.log2(2 * length + 10)), 64) for length in lengths]
    assert len(set(limits)) > 1
    assert min(limits) > 20
    outputs = translate(german, model, tokenizer, split=False)
    alone = [
        model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=limit)[0]
        for text, limit in zip(german, limits, strict=True)
    ]
    assert outputs == tokenizer.batch_decode(alone, skip_special_tokens=True)
    assert f"{len(german)} outputs ended by their limit of tokens" in caplog.text
    caplog.clear()
    assert translate(german, load_engine(model), tokenizer, split=False) == outputs
    assert f"{len(german)} outputs ended by their limit of tokens" in caplog.text
    speed = tokens_per_second({"it": (model, tokenizer)}, german, runs=1)["it"]
    assert speed.tokens == sum(limits)


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ("Zwei Hunde.", {}, r"give a list, such as \[text\]"),
        ([None], {}, "contain a NoneType: expected strings"),
        (Dataset.from_dict({"de": ["Hallo"]}), {}, "contain a dict: expected strings, such as one column"),
        ({"de": "Hallo"}, {}, r"are a dict, whose names .* such as list\(texts\['de'\]\)"),
        (UserDict(de="Hallo"), {}, r"are a UserDict, whose names .* such as list\(texts\['de'\]\)"),
        (pandas.DataFrame({"de": ["Hallo"]}), {}, r"are a DataFrame, whose names .* such as list\(texts\['de'\]\)"),
        (["Hallo"], {"num_return_sequences": 2}, "num_return_sequences is 2, but a text has one output"),
        (["Hallo"], {"num_beams": 0}, "num_beams is 0: expected a whole number, 1 or more"),
        (["Hallo"], {"num_beams": "2"}, "num_beams is '2': expected a whole number"),
        (["Hallo"], {"return_dict_in_generate": True}, "return_dict_in_generate is True, but"),
    ],
)
def test_what_gives_no_list_of_translations_is_refused(loaded, texts, options, message):
    with pytest.raises(ValueError, match=message):
        translate(texts, *loaded, **options)


def test_a_name_stands_for_its_checkpoint(tiny_marian, loaded, german, monkeypatch):
    expected = translate(german, *loaded, **OPTIONS)
    assert translate(german, tiny_marian, **OPTIONS) == expected
    monkeypatch.setenv("HOME", str(tiny_marian.parent))
    name = f"~/{tiny_marian.name}"
    assert translate(german, name, **OPTIONS) == load_engine(name).translate(german, **OPTIONS) == expected


def test_empty_lines_stay_empty_and_do_not_reach_the_model(loaded, german, monkeypatch):
    model, tokenizer = loaded
    rows = []
    generate = model.generate
    monkeypatch.setattr(model, "generate", lambda **batch: rows.append(len(batch["input_ids"])) or generate(**batch))
    outputs = translate(["", german[0], "  \t", german[1], ""], model, tokenizer, **OPTIONS)
    assert [bool(output) for output in outputs] == [False, True, False, True, False]
    assert sum(rows) == 2
    assert translate(["", " "], model, tokenizer) == ["", ""]
    assert translate([], model, tokenizer) == []
    assert sum(rows) == 2


def test_long_inputs_are_cut_and_counted(loaded, german, caplog):
    model, tokenizer = loaded
    long = " ".join(german)
    ids = tokenizer(long, verbose=False)["input_ids"]
    assert len(ids) > tokenizer.model_max_length == 64
    cut = torch.tensor([[*ids[:63], tokenizer.eos_token_id]])
    expected = tokenizer.decode(model.generate(input_ids=cut, **OPTIONS)[0], skip_special_tokens=True)
    assert translate([long, german[0], long], model, tokenizer, split=False, **OPTIONS)[::2] == [expected, expected]
    assert "2 inputs longer than 64 tokens: cut" in caplog.text
    caplog.clear()
    translate([german[0]], model, tokenizer, **OPTIONS)
    assert not caplog.text


def test_a_paragraph_is_translated_by_sentences_and_keeps_its_spaces(tiny_marian, loaded, german):
    first, second = german[:2]
    one, two = translate([first, second], *loaded, split=False, **OPTIONS)
    text = f"{first}  {second}\n\n\t{second} {first}\r\n"
    expected = f"{one}  {two}\n\n\t{two} {one}\r\n"
    assert translate([text, first, f" {first}"], *loaded, **OPTIONS) == [expected, one, one]
    assert translate([text], *loaded, split=False, **OPTIONS) != [expected]
    engine = load_engine(tiny_marian)
    assert engine.tokenizer is engine.tokenizer
    assert engine.translate([text], **OPTIONS) == [expected]
    with pytest.raises(ValueError, match="the engine has no tokenizer"):
        load_engine(loaded[0]).translate([text])


def test_a_sentence_that_is_too_long_is_split_at_punctuation(loaded, german, caplog):
    model, tokenizer = loaded
    part = german[0].rstrip(".")
    long = ", ".join([part] * 16)
    (split,) = split_texts([f"{long}. {german[1]}"], tokenizer, 64)
    assert "".join(split.pieces) == f"{long}. {german[1]}"
    assert (split.cut, split.pieces[-1]) == (1, german[1])
    assert all(piece.endswith((", ", ". ")) for piece in split.pieces[:-1])
    assert all(len(ids) <= 64 for ids in split.ids.values())
    assert translate([long], model, tokenizer, **OPTIONS)[0]
    assert "1 sentences longer than 64 tokens: split at punctuation" in caplog.text
    for text in ("Hund" * 200, "犬" * 200):  # without any mark or space
        (split,) = split_texts([text], tokenizer, 64)
        assert "".join(split.pieces) == text
        assert all(len(ids) <= 64 for ids in split.ids.values())


@pytest.mark.parametrize("checkpoint", ["tiny_marian", "tiny_mbart50"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_no_call_changes_the_tokenizer(checkpoint, side, german, request):
    """Padding and truncation are states of a fast tokenizer, which other threads would see."""
    model, tokenizer = load_model(request.getfixturevalue(checkpoint))
    tokenizer.padding_side = tokenizer.truncation_side = side
    long = " ".join(german * 3)
    expected = tokenizer(long, truncation=True, max_length=64)["input_ids"]
    tokenizer("Hund")  # as transformers leaves it
    backend = getattr(tokenizer, "backend_tokenizer", None)
    before = backend and backend.to_str()
    (split,) = split_texts([long], tokenizer, 64, split=False)
    assert split.ids[0] == expected
    together = translate([long, *german], model, tokenizer, split=False, **OPTIONS)
    assert [translate([text], model, tokenizer, split=False, **OPTIONS)[0] for text in (long, *german)] == together
    assert (backend and backend.to_str()) == before


@pytest.mark.parametrize(
    ("code", "expected"),
    [("de", 2), ("de_DE", 2), ("deu_Latn", 2), ("deu", 2), ("eng_Latn", 3), ("kmb_Latn", 3), (None, 3)],
)
def test_sentences_end_by_the_rules_of_the_source_language(loaded, code, expected):
    tokenizer = copy.copy(loaded[1])
    tokenizer.source_lang = code
    (split,) = split_texts(["Am 3. Mai kommt Dr. Berg. Ein Hund läuft."], tokenizer, 64)
    assert len(split.pieces) == expected


def test_language_codes_of_three_letters():
    aliases = pytest.importorskip("babel.core").get_global("language_aliases")
    known = {code: alias for code, alias in aliases.items() if code in ISO_639 and re.fullmatch("[a-z]{2}", alias)}
    assert known == {code: ISO_639[code] for code in known}
    assert len(known) > 200


def test_a_code_of_the_target_language_stands_before_every_sentence_of_its_line(loaded, caplog):
    model, tokenizer = loaded[0], copy.copy(loaded[1])
    tokenizer.encoder = tokenizer.current_encoder = loaded[1].encoder | {">>spa<<": 7, ">>fra<<": 8}
    texts = [
        ">>spa<< Ein Hund. Ein Mann.",
        " >>fra<< Ein Hund.\n>>spa<< Ein Mann. Zwei.",
        ">>x<< Ein Hund.",
        "Zwei.",
    ]
    for split, wanted in ((True, [[7, 7], [8, 7, 7], [], []]), (False, [[7], [8], [], []])):
        found = split_texts(texts, tokenizer, 64, split=split)
        firsts = [[ids[0] for ids in text.ids.values() if ids[0] in (7, 8)] for text in found]
        assert firsts == wanted
        own = split_texts(texts, tokenizer, 64, split=split, prefix=">>fra<< ")
        assert [ids[0] for text in own[2:] for ids in text.ids.values()] == [8, 8]
    options = {"split": False, **OPTIONS}
    one, two = translate([">>spa<< Ein Hund.", ">>spa<< Ein Mann."], model, tokenizer, **options)
    assert translate(texts[:1], model, tokenizer, **OPTIONS) == [f"{one} {two}"]
    assert ">>x<< is no target language" in caplog.text
    assert "there is >>spa<<" in caplog.text
    (split,) = split_texts([">>spa<< " + ", ".join(["Ein Hund"] * 60)], tokenizer, 64)
    assert [ids[0] for ids in split.ids.values()] == [7] * len(split.pieces)
    assert len(split.pieces) > 1


def test_a_prefix_that_lines_begin_with_stands_there_once(loaded):
    ids = [[[*text.ids.values()] for text in split_texts([text], loaded[1], 64, prefix="Ein Hund: ", split=True)]
           for text in ("Ein Mann.\nZwei.", "Ein Hund: Ein Mann.\nEin Hund: Zwei.")]  # fmt: skip
    assert ids[0] == ids[1]


def test_a_model_without_languages_gets_whole_texts():
    (split,) = split_texts(["A first sentence. A second one."], word_tokenizer(["<unk>"], unk_token="<unk>"), 64)
    assert len(split.pieces) == 1


def test_a_model_in_training_translates_without_dropout_and_goes_on_training(tiny_marian, german):
    model, tokenizer = load_model(tiny_marian)
    expected = translate(german, model, tokenizer, **OPTIONS)
    for module in model.modules():
        if hasattr(module, "dropout"):
            module.dropout = 0.9
    model.train()
    assert translate(german, model, tokenizer, **OPTIONS) == expected
    assert model.training


class Trickle(io.BytesIO):
    """A pipe that gives a few bytes at a time."""

    def read1(self, size=-1):
        return self.read(7)


@pytest.mark.parametrize("source", [io.BytesIO, Trickle])
@pytest.mark.parametrize("ending", ["", "\n"])
def test_a_stream_gives_one_line_for_each_line(loaded, german, source, ending):
    lines = [german[0], "", german[3], german[1]]
    sink = io.BytesIO()
    written = translate_stream(source(("\n".join(lines) + ending).encode()), sink, *loaded, **OPTIONS)
    assert sink.getvalue().decode().split("\n") == [*translate(lines, *loaded, **OPTIONS), ""]
    assert written == 4


def test_a_stream_writes_what_it_has_before_the_input_ends(loaded, german):
    sink = io.BytesIO()
    seen = []

    class Pipe(io.BytesIO):
        parts = [german[0].encode() + b"\r\n", b"\n", german[1].encode(), b""]  # noqa: RUF012

        def read1(self, size=-1):
            seen.append(sink.getvalue().count(b"\n"))
            return self.parts.pop(0)

    translate_stream(Pipe(), sink, *loaded, **OPTIONS)
    assert seen == [0, 1, 2, 2]
    assert sink.getvalue().decode().splitlines()[0] == translate([german[0]], *loaded, **OPTIONS)[0]


def test_a_byte_order_mark_is_no_text(loaded, german):
    outputs = []
    for mark in (b"", "\ufeff".encode()):
        sink = io.BytesIO()
        translate_stream(io.BytesIO(mark + german[0].encode()), sink, *loaded, **OPTIONS)
        outputs.append(sink.getvalue())
    assert outputs[0] == outputs[1]


def test_newlines_in_outputs_become_spaces(loaded, monkeypatch):
    monkeypatch.setattr(
        "lightformers_hf.evaluation.translate.translate", lambda texts, *_, **__: ["a\nb\r\nc"] * len(texts)
    )
    sink = io.BytesIO()
    translate_stream(io.BytesIO(b"x\ny"), sink, *loaded)
    assert sink.getvalue() == b"a b c\na b c\n"


@pytest.mark.parametrize(("text", "number"), [(b"Hallo\r\r\nDu\r\n", 0), (b"Hallo\nDu\rIhr\rSie\n", 2)])
def test_a_carriage_return_within_a_line_is_said_once(loaded, caplog, text, number):
    sink = io.BytesIO()
    assert translate_stream(io.BytesIO(text), sink, *loaded, **OPTIONS) == 2 == sink.getvalue().count(b"\n")
    assert ("line 2 of the input holds a carriage return" in caplog.text) == bool(number)
    assert "line 1" not in caplog.text


def test_bytes_that_are_not_text_name_their_line(loaded):
    with pytest.raises(ValueError, match="line 2 of the input is not UTF-8"):
        translate_stream(io.BytesIO(b"Hallo\n\xff\xfe\n"), io.BytesIO(), *loaded, **OPTIONS)


def test_a_model_needs_its_tokenizer(loaded):
    for tokenizer in (None, "opus-mt-de-en"):
        with pytest.raises(ValueError, match="without its tokenizer"):
            translate(["Hallo"], loaded[0], tokenizer)
    larger = copy.deepcopy(loaded[1])
    larger.add_tokens(["<x>"])
    with pytest.raises(ValueError, match="the number 120, but the model has 120 tokens: give the model's own"):
        translate(["Hallo <x>"], loaded[0], larger)
    with pytest.raises(ValueError, match=r"model is a list: expected .* or the folder"):
        translate(loaded[0], ["Hallo"])


def test_a_model_that_names_no_number_of_positions(tiny_marian, german, tmp_path, caplog):
    """It reads texts of any length, under the name of a folder, as a model, and as an engine."""
    folder = tmp_path / "t5"
    limitless = AutoTokenizer.from_pretrained(tiny_marian, model_max_length=int(1e30))
    special = {"decoder_start_token_id": limitless.pad_token_id, "pad_token_id": limitless.pad_token_id}
    shapes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "eos_token_id": 0}
    torch.manual_seed(0)
    T5ForConditionalGeneration(T5Config(vocab_size=len(limitless), **shapes, **special)).save_pretrained(folder)
    limitless.save_pretrained(folder)
    texts = [german[0], " ".join(german * 5)]
    model, tokenizer = load_model(folder)
    alone = [model.generate(**tokenizer(text, return_tensors="pt"), **OPTIONS)[0] for text in texts]
    expected = tokenizer.batch_decode(alone, skip_special_tokens=True)
    engine = load_engine(folder)
    assert len(tokenizer(texts[1])["input_ids"]) > 64
    options = OPTIONS | {"split": False}
    assert translate(texts, model, tokenizer, **options) == expected
    assert translate(texts, folder, **options) == expected
    assert translate(texts, engine, tokenizer, **options) == expected
    assert engine.longest_input is None
    speed = tokens_per_second({"t5": (model, tokenizer)}, texts, runs=1, forced_length=3)["t5"]
    assert speed.tokens == 6
    assert "longer than" not in caplog.text


@pytest.mark.parametrize(("prefix", "source"), [(None, "say it: w1"), ("", "w1"), ("w2 ", "w2 w1")])
def test_the_prefix_of_an_engine_stands_before_texts_unless_another_is_given(prefix, source):
    """Also none: of texts whose prefix another task requires."""
    read = []
    running = SimpleNamespace(generate=lambda batch, search: read.extend(batch) or [[2]])
    search = Search(start=1, pad=1, ends=(2,), max_new_tokens=5)
    engine = Engine("onnx", model=running, search=search, longest_input=None, prefix="say it: ")
    translate(["w1"], engine, make_tokenizer(), prefix=prefix)
    assert make_tokenizer().batch_decode(read, skip_special_tokens=True) == [source]
