"""Exported models give the tokens of `generate()`, hold what they share once, and say what they cannot do."""

import json
import shutil
import sys

import numpy as np
import onnx
import pytest
import torch
from conversion.teachers import TEACHERS, make_teacher
from models.cases import VARIANTS, make_model
from tiny import word_tokenizer
from transformers import AutoTokenizer

from lightformers_hf import translate
from lightformers_hf.engines import ENGINES, export, load_engine

LIGHTFORMERS = sorted(
    name
    for name, (family, fields) in VARIANTS.items()
    if family == "lightformer" and fields.get("embedding") != "adaptive"
)
SENTENCES = [[9, 17, 5, 22, 30, 11, 2], [7, 2], [12, 29, 4, 2]]
LENGTH = 12


def save(model, folder, **generation):
    """Save a tiny model; `early_stopping`, because that is when CTranslate2 stops its beam search, too."""
    model.generation_config.update(**{"max_length": LENGTH, "num_beams": 4, "early_stopping": True, **generation})
    model.save_pretrained(folder)
    return folder


def expected(model, sentences=SENTENCES, **options):
    """What `generate()` makes of the sentences, padded to one batch: new tokens up to the end token."""
    pad, ends = model.config.pad_token_id, np.atleast_1d(model.generation_config.eos_token_id).tolist()
    width = max(map(len, sentences))
    ids = torch.tensor([sentence + [pad] * (width - len(sentence)) for sentence in sentences])
    mask = torch.tensor([[1] * len(sentence) + [0] * (width - len(sentence)) for sentence in sentences])
    rows = model.generate(input_ids=ids, attention_mask=mask, **options)[:, 1:].tolist()
    cut = [next((place + 1 for place, token in enumerate(row) if token in ends), len(row)) for row in rows]
    return [row[:length] for row, length in zip(rows, cut, strict=True)]


def assert_same_tokens(model, folder, beams=(1, 4), **options):
    engine = load_engine(folder)
    for count in beams:
        found = engine.generate(SENTENCES, num_beams=count, **options)
        assert found == expected(model, num_beams=count, **options)
        assert [engine.generate([sentence], num_beams=count, **options)[0] for sentence in SENTENCES] == found
    return engine


@pytest.mark.parametrize("to", ENGINES)
@pytest.mark.parametrize("variant", LIGHTFORMERS)
def test_tokens_of_every_variant(to, variant, tmp_path):
    model = make_model("ConditionalGeneration", variant)
    export(save(model, tmp_path / "model"), tmp_path / "out", to=to, quantization="float32")
    assert_same_tokens(model, tmp_path / "out")


@pytest.mark.parametrize("to", ENGINES)
@pytest.mark.parametrize("name", sorted(TEACHERS))
def test_tokens_of_dense_teachers(to, name, tmp_path):
    teacher = make_teacher(name, tmp_path / "teacher")
    teacher.generation_config.forced_eos_token_id = None  # beam search in CTranslate2 ends without it
    save(teacher, tmp_path / "teacher")
    export(tmp_path / "teacher", tmp_path / "out", to=to, quantization="float32")
    assert_same_tokens(teacher, tmp_path / "out")


@pytest.mark.parametrize("to", ENGINES)
@pytest.mark.parametrize(
    "fields",
    [{"activation_function": name} for name in ("relu", "gelu", "gelu_new", "silu", "quick_gelu", "tanh", "sigmoid")]
    + [{"normalize_before": True}, {"final_layer_norm": True}, {"tie_word_embeddings": False, "embedding_rank": 7}],
    ids=str,
)
def test_tokens_of_single_fields(to, fields, tmp_path):
    model = make_model("ConditionalGeneration", "lightformer", encoder_layers=1, **fields)
    export(save(model, tmp_path / "model"), tmp_path / "out", to=to, quantization="float32")
    assert_same_tokens(model, tmp_path / "out")


GENERATION = [
    {"length_penalty": 0.3},
    {"min_length": 8},
    {"min_length": 40},  # more than the longest output
    {"no_repeat_ngram_size": 2},
    {"forced_bos_token_id": 5},
    {"forced_eos_token_id": 2},
    {"bad_words_ids": [[1], [7]]},
    {"eos_token_id": [2, 8]},
    {"early_stopping": False},
    {"early_stopping": "never", "length_penalty": 2.0},
    {"renormalize_logits": True, "suppress_tokens": [4, 9, 11, 13, 20, 22, 25, 30]},
]


@pytest.mark.parametrize(
    ("to", "generation"),
    [("onnx", each) for each in GENERATION] + [("ctranslate2", each) for each in GENERATION[1:8]],
    ids=str,
)
def test_searches_as_generate_does(to, generation, tmp_path):
    """CTranslate2 knows fewer options, and these for greedy search."""
    model = make_model("ConditionalGeneration", "lightformer-low-rank", seed=1, spread=0.4)
    folder = save(model, tmp_path / "model")
    model.generation_config.update(**generation)
    model.generation_config.save_pretrained(folder)
    export(folder, tmp_path / "out", to=to, quantization="float32")
    assert_same_tokens(model, tmp_path / "out", beams=(1, 2, 4) if to == "onnx" else (1,))


@pytest.mark.parametrize("to", ENGINES)
@pytest.mark.parametrize("longest", [None, 500])
def test_as_many_tokens_as_generate_without_a_limit_and_as_fit_within_one_that_is_too_long(to, longest, tmp_path):
    model = make_model("ConditionalGeneration", "lightformer", max_position_embeddings=30)
    folder = save(model, tmp_path / "model")
    least = 15 if longest is None else 29
    model.generation_config.update(max_length=longest, min_new_tokens=least, forced_eos_token_id=None)
    model.generation_config.save_pretrained(folder)
    export(folder, tmp_path / "out", to=to, quantization="float32")
    engine, (sentence, *_) = load_engine(tmp_path / "out"), SENTENCES
    (found,) = engine.generate([sentence], num_beams=1)
    limit = 1 << (2 * len(sentence) + 9).bit_length() if longest is None else 30
    wanted = model.generate(torch.tensor([sentence]), num_beams=1, max_new_tokens=min(limit, 30))[0, 1:].tolist()
    assert found == wanted
    assert longest is None or len(found) == 30
    with pytest.raises(ValueError, match="31 new tokens are more than the model's 30 positions"):
        engine.generate([sentence], max_new_tokens=31)


@pytest.mark.parametrize("to", ENGINES)
def test_forced_length_and_options_of_a_call(to, tmp_path):
    model = make_model("ConditionalGeneration", "lightformer")
    export(save(model, tmp_path / "model", num_beams=3), tmp_path / "out", to=to, quantization="float32")
    engine, checkpoint = load_engine(tmp_path / "out"), load_engine(tmp_path / "model")
    assert checkpoint.name == "transformers"
    for options in ({"forced_length": 9}, {"forced_length": 9, "num_beams": 1}, {"max_new_tokens": 3}, {}):
        assert engine.generate(SENTENCES, **options) == checkpoint.generate(SENTENCES, **options)
    assert {len(ids) for ids in engine.generate(SENTENCES, forced_length=9)} == {9}
    padded = torch.tensor([[7, 2, 1, 1], [12, 29, 4, 2]])
    batch = {"input_ids": padded, "attention_mask": (padded != 1).long()}
    assert engine.generate(batch) == engine.generate(SENTENCES[1:])
    targets = [[5, 6], [4], []]
    pairs = zip(engine.score(SENTENCES, targets), checkpoint.score(SENTENCES, targets), strict=True)
    assert all(found == pytest.approx(right, abs=1e-4) for found, right in pairs)


FEWER_BITS = [*((to, "int8") for to in ENGINES), ("onnx", "int4")]


@pytest.mark.parametrize(("to", "quantization"), FEWER_BITS)
@pytest.mark.parametrize("variant", ["lightformer-low-rank", "lightformer-narrow", "lightformer-two-vocabularies"])
def test_fewer_bits_are_close_and_small(to, quantization, variant, tmp_path):
    model = make_model(
        "ConditionalGeneration", variant, d_model=64, vocab_size=300, decoder_vocab_size=300, spread=0.3
    )
    folder = save(model, tmp_path / "model")
    before = {name: tensor.clone() for name, tensor in load_engine(folder).model.network.state_dict().items()}
    full = export(folder, tmp_path / "full", to=to, quantization="float32")
    small = export(folder, tmp_path / "small", to=to, quantization=quantization)
    assert weight_bytes(tmp_path / "small") < 0.6 * weight_bytes(tmp_path / "full")
    assert full.difference < 1e-3 < small.difference
    engines = [load_engine(tmp_path / name) for name in ("model", "small")]
    scores = [np.concatenate(engine.score(SENTENCES, SENTENCES)) for engine in engines]
    assert np.corrcoef(*scores)[0, 1] > (
        0.7 if quantization == "int4" else 0.9
    )  # heads of width 2 with random weights are the worst
    assert all(torch.equal(tensor, before[name]) for name, tensor in engines[0].model.network.state_dict().items())


def weight_bytes(folder):
    """Bytes of the tensors that an exported model stores, without the descriptions of its graphs."""
    if (folder / "model.bin").is_file():
        return (folder / "model.bin").stat().st_size
    graphs = [onnx.load(file).graph for file in (folder / "onnx").iterdir()]
    return sum(len(tensor.raw_data) for graph in graphs for tensor in graph.initializer)


@pytest.mark.parametrize(("to", "quantization"), [*((to, "float32") for to in ENGINES), *FEWER_BITS])
def test_shared_layers_and_tied_tables_are_stored_once(to, quantization, tmp_path):
    fields = {"d_model": 64, "vocab_size": 200, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "decoder_layers": 1}
    fields["spread"] = 0.3  # log p of weights that differ more is changed beyond what is kept by any rounding to int8
    sizes = []
    for layers in (2, 8):
        model = make_model("ConditionalGeneration", "lightformer", encoder_layers=layers, encoder_groups=2, **fields)
        report = export(save(model, tmp_path / "m"), tmp_path / "o", to=to, quantization=quantization, overwrite=True)
        sizes.append(weight_bytes(tmp_path / "o"))
    stored = sum(parameter.numel() for parameter in model.parameters())
    if to == "onnx":  # transformers.js opens no file for two graphs: each holds the tied table and positions
        stored += 200 * 64 + 48 * 64
    bytes_each = {"float32": 4, "int8": 1, "int4": 0.6}[quantization]
    positions = 48 * 64 * 4
    assert sizes[1] < sizes[0] * 1.1
    assert sizes[1] < stored * bytes_each * 1.35 + positions
    assert report.multiplied_out == 0


def test_ctranslate2_narrows_heads_to_the_rank_of_their_products(tmp_path):
    fields = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "decoder_groups": 1}
    model = make_model("ConditionalGeneration", "lightformer", attention_rank=3, **fields)
    report = export(save(model, tmp_path / "model"), tmp_path / "out", to="ctranslate2", quantization="float32")
    assert (report.multiplied_out, report.narrowed_attentions) == (12, 3)
    assert report.factor_parameters == 12 * 2 * 32 * 3
    # Heads of rank 3: of 4 heads in the encoder, of 2 in the decoder; queries may need one more for their bias.
    widths = 4 * 4 + 2 * 2 * 4
    assert report.product_parameters <= 4 * 32 * widths
    assert_same_tokens(model, tmp_path / "out")
    assert export(tmp_path / "model", tmp_path / "onnx", to="onnx", quantization="float32").multiplied_out == 0


@pytest.fixture(scope="module")
def exported(tiny_marian, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    for to in ENGINES:
        export(tiny_marian, folder / to, to=to, quantization="float32")
    return folder


@pytest.mark.parametrize(("to", "quantization"), FEWER_BITS)
def test_fewer_bits_of_a_trained_model(to, quantization, tiny_marian, parallel_sentences, tmp_path):
    export(tiny_marian, tmp_path / "out", to=to, quantization=quantization)
    pairs = [(pair["de"], pair["en"]) for pair in parallel_sentences]
    outputs = translate([german for german, _ in pairs], tmp_path / "out", num_beams=1)
    assert sum(output == english for output, (_, english) in zip(outputs, pairs, strict=True)) >= 8


@pytest.mark.parametrize("to", ENGINES)
def test_a_marian_with_its_tokenizer(to, exported, tiny_marian, parallel_sentences):
    german = [pair["de"] for pair in parallel_sentences]
    assert translate(german, exported / to, num_beams=1) == translate(german, tiny_marian, num_beams=1)
    tokenizer = AutoTokenizer.from_pretrained(exported / to)
    assert tokenizer(german)["input_ids"] == AutoTokenizer.from_pretrained(tiny_marian)(german)["input_ids"]


def test_ctranslate2_alone_needs_nothing_of_ours(exported, tiny_marian, parallel_sentences):
    import ctranslate2

    german = [pair["de"] for pair in parallel_sentences]
    tokenizer = AutoTokenizer.from_pretrained(exported / "ctranslate2")
    translator = ctranslate2.Translator(str(exported / "ctranslate2"))
    tokens = [tokenizer.convert_ids_to_tokens(ids) for ids in tokenizer(german)["input_ids"]]
    results = translator.translate_batch(tokens, beam_size=1)
    ids = [tokenizer.convert_tokens_to_ids(result.hypotheses[0]) for result in results]
    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == translate(german, tiny_marian, num_beams=1)


def test_a_tokenizer_with_fewer_tokens_than_ids(tmp_path):
    words = [f"w{token}" for token in range(35)]
    model = make_model("ConditionalGeneration", "lightformer")
    folder = save(model, tmp_path / "model")
    word_tokenizer(words, unk_token="w3", eos_token="w2", pad_token="w1").save_pretrained(folder)
    export(folder, tmp_path / "out", to="ctranslate2", quantization="float32")
    assert_same_tokens(model, tmp_path / "out")
    vocabulary = json.loads((tmp_path / "out" / "shared_vocabulary.json").read_text())
    assert vocabulary[33:37] == ["w33", "w34", "<id_35>", "<id_36>"]


def test_command_line(exported, tiny_marian, tmp_path, lightformers, caplog):
    command = ("export", tiny_marian, tmp_path / "out", *"--to onnx --quantization int8 --source-lang de".split())
    code, out, _ = lightformers(*command)
    assert code == 0
    assert "source_lang and target_lang change nothing in the exported model" in caplog.text
    assert "load_engine" in out
    assert "(onnx, int8)" in out
    code, _, err = lightformers("export", tiny_marian, tmp_path / "out", "--to", "onnx")
    assert (code, "--overwrite" in err) == (1, True)
    assert json.loads((tmp_path / "out" / "export.json").read_text())["quantization"] == "int8"
    (tmp_path / "text").write_text("Zwei Hunde spielen im Schnee.\n", encoding="utf-8")
    code, out, _ = lightformers("translate", exported / "onnx", tmp_path / "text")
    assert (code, out) == (0, "Two dogs are playing in the snow.\n")


def test_what_cannot_be_exported(tiny_marian, tmp_path, monkeypatch):
    def fails(message, model=tiny_marian, to="onnx", **options):
        with pytest.raises(ValueError, match=message):
            export(model, tmp_path / "out", to=to, **options)
        assert not (tmp_path / "out").exists()

    fails("unknown engine 'tflite'.*ctranslate2 or onnx", to="tflite")
    fails(
        "quantization is 'int4'; ctranslate2 has float32, int8.*int4 is for --to onnx",
        to="ctranslate2",
        quantization="int4",
    )
    fails("quantization is 'int16'; onnx has float32, int8, float16", quantization="int16")
    fails("calibration is given, which only int4 uses", quantization="int8", calibration="train.jsonl")
    fails("int4 computes all tokens.*quantization int8", quantization="int4", shortlist="train.jsonl")
    for variant in ("subformer-sandwich", "partialformer"):
        folder = save(make_model("ConditionalGeneration", variant), tmp_path / variant)
        for to in ENGINES:
            fails(f"{to} does not support.*transformers", model=folder, to=to)
    causal = make_model("CausalLM", "lightformer")
    causal.save_pretrained(tmp_path / "causal")
    fails("LightFormerForCausalLM", model=tmp_path / "causal")
    odd = save(make_model("ConditionalGeneration", "lightformer", activation_function="mish"), tmp_path / "odd")
    for to in ENGINES:
        fails("activation_function is 'mish'", model=odd, to=to)
    for field in ({"repetition_penalty": 1.3}, {"bad_words_ids": [[4, 5]]}, {"stop_strings": ["a"]}):
        sampling = save(make_model("ConditionalGeneration", "lightformer"), tmp_path / "generation", **field)
        fails(next(iter(field)), model=sampling)
    broken = make_model("ConditionalGeneration", "lightformer")
    broken.model.encoder.layers[0].fc1.weight.data[0, 0] = torch.nan
    fails("encoder.layers.0.fc1.weight.*NaN", model=save(broken, tmp_path / "broken"))
    for to, library in (("ctranslate2", "ctranslate2"), ("onnx", "onnxruntime")):
        monkeypatch.setitem(sys.modules, library, None)
        for module in (to, f"{to}_model"):
            monkeypatch.delitem(sys.modules, f"lightformers_hf.engines.{module}", raising=False)
        fails(rf"{library}, which is not installed: pip install 'lightformers_hf\[{to}\]'", to=to)


def test_a_model_that_computes_something_else_is_not_kept(tiny_marian, tmp_path, monkeypatch):
    from lightformers_hf.engines import onnx

    monkeypatch.setattr(onnx.Graph, "norm", lambda graph, states, norm: states)
    with pytest.raises(ValueError, match="differ from the checkpoint's by"):
        export(tiny_marian, tmp_path / "out", to="onnx", quantization="float32")
    right = onnx.quantize_rows
    monkeypatch.undo()
    monkeypatch.setattr(onnx, "quantize_rows", lambda table: (right(table)[0].flip(0), right(table)[1]))
    with pytest.raises(ValueError, match="Export it with quantization float32"):
        export(tiny_marian, tmp_path / "out", to="onnx", quantization="int8")
    assert not (tmp_path / "out").exists()


def test_what_no_onnx_file_holds(tiny_marian, exported, tmp_path, monkeypatch):
    (tmp_path / "old").mkdir()
    for name in ("export.json", "generation_config.json"):
        shutil.copyfile(exported / "onnx" / name, tmp_path / "old" / name)
    with pytest.raises(ValueError, match=r"an older version of this package wrote it.*export the checkpoint again"):
        load_engine(tmp_path / "old")
    with pytest.raises(FileExistsError, match="old"):
        export(tiny_marian, tmp_path / "old", to="onnx")
    from lightformers_hf.engines import onnx as engine

    monkeypatch.setattr(engine, "LARGEST_FILE", 1000)
    with pytest.raises(ValueError, match="GB, and an ONNX file holds 2: give quantization int8"):
        export(tiny_marian, tmp_path / "out", to="onnx")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ENGINES)
def test_bad_calls(to, exported, tmp_path):
    engine = load_engine(exported / to)
    for batch, options, message in (
        ([], {}, "0 sentences"),
        ([[5], []], {}, "shortest of 0 tokens"),
        ([[5] * 65], {}, "65 tokens, more than the model's 64 positions"),
        ([[5]], {"num_beams": 0}, "num_beams is 0"),
        ([[5]], {"forced_length": 65}, "65 new tokens are more than the model's 64"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.generate(batch, **options)
    with pytest.raises(FileNotFoundError):
        load_engine(tmp_path / "nothing")
