"""The public functions: the examples of the reference, loaded models, and the names of earlier versions."""

import copy
import inspect
import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from test_hub import hub  # noqa: F401, a fixture
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import lightformers_hf as lf
from lightformers_hf.evaluation import comparison
from lightformers_hf.evaluation.speed import speed_of
from lightformers_hf.options import options_of
from lightformers_hf.results import Result

FUNCTIONS = (
    "compress",
    "convert",
    "distill",
    "evaluate",
    "export",
    "load_engine",
    "plan",
    "push_to_hub",
    "recover",
    "translate",
)
PAGE = (Path(__file__).parents[1] / "docs/reference/api.md").read_text(encoding="utf-8")
FAST = {"rank": 8, "method": "paper", "progress": False}


@pytest.fixture
def workplace(tmp_path, monkeypatch, tiny_marian, parallel_sentences):
    """A folder with what the reference assumes, which is the working directory."""
    for name in ("opus-mt-de-en", "bart"):
        shutil.copytree(tiny_marian, tmp_path / name)
    more = [pair | {"de": f"{number} {pair['de']}"} for number in range(3) for pair in parallel_sentences]
    for part, pairs in {"train": more, "test": parallel_sentences}.items():
        lines = [json.dumps({"translation": pair}) + "\n" for pair in pairs]
        (tmp_path / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def loaded(tiny_marian):
    """A model and its tokenizer, as a user has them in memory."""
    return AutoModelForSeq2SeqLM.from_pretrained(tiny_marian), AutoTokenizer.from_pretrained(tiny_marian)


def measure_nothing(places, *_, **__):
    """Timings as of `comparison._measure_speed`: all models are as fast."""
    return [comparison.Timing(place.model, place.form, 1, 1, 1, speed_of([(2, 0.1)])) for place in places]


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_the_examples_of_the_reference_work(workplace, hub, monkeypatch):  # noqa: F811
    examples = re.findall(r"^```py\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    changes = {"minutes=30": "minutes=0.02", '"me/': '"alice/'}
    calls = {"compress": "small", "recover": "recovery", "export": "exported", "push_to_hub": "push"}
    changes |= {f"\nlf.{function}(": f"\n{name} = lf.{function}(" for function, name in calls.items()}
    monkeypatch.setattr(comparison, "_measure_speed", measure_nothing)  # minutes, in a process of its own
    names = {}
    for example in (one for one in examples if not re.search('"narrow[-"],|narrow-recovered|small =', one)):
        code = example
        for long, short in changes.items():
            code = code.replace(long, short)
        exec(compile(code, "docs/reference/api.md", "exec"), names)
    results = [value for value in names.values() if isinstance(value, Result)]
    assert {type(one).__name__ for one in results} >= {"Recovery", "Evaluation", "Compression", "Push", "ExportReport"}
    for one in results:
        assert json.loads(json.dumps(one.to_dict()))
        assert str(one).strip()
        assert "<" in one._repr_html_()
    assert re.fullmatch(
        r"[\d.]+x fewer parameters, [\d.]+ MB → [\d.]+ MB, [\d.]+x as fast as the teacher in CTranslate2; \w+ "
        r"[\d.]+ instead of [\d.]+ on 3 held-out pairs of your data\.",
        names["small"].summary,
    )
    assert "looks better than it is" in str(names["small"])
    assert {*hub.repositories["alice/opus-mt-de-en-light"].files} >= {"config.json", "compression.json", "README.md"}


def test_every_function_is_documented_and_has_options_in_its_signature():
    for name in FUNCTIONS:
        function = getattr(lf, name)
        assert f"## {name}\n" in PAGE
        assert "Example:" in function.__doc__
        kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
        assert (inspect.Parameter.VAR_KEYWORD in kinds) == (name == "translate")  # arguments of `generate()`
    expected = inspect.signature(lf.CompressionOptions).parameters
    types = {option.name: option.type_name for option in options_of(lf.CompressionOptions)}
    for name, own in {"plan": (), "convert": (), "compress": ("method", "device")}.items():
        found = inspect.signature(getattr(lf, name)).parameters
        for field in fields(lf.CompressionOptions):
            assert found[field.name].default == expected[field.name].default or field.name in own
            assert found[field.name].annotation == types[field.name] or field.name in own


def test_a_loaded_model_becomes_a_compressed_one(loaded, tiny_marian, tmp_path):
    model, tokenizer = loaded
    light = lf.convert(model, tokenizer=tokenizer, **FAST)
    lf.convert(tiny_marian, tmp_path / "light", **FAST)
    expected = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "light")
    alone = lf.convert(model, **FAST)  # without text no tokenizer is needed
    assert all(torch.equal(alone.state_dict()[name], tensor) for name, tensor in light.state_dict().items())
    assert light.compression_report.parameters_after == light.num_parameters() == expected.num_parameters()
    batch = tokenizer(["Ein Hund."], text_target=["A dog."], return_tensors="pt")
    torch.testing.assert_close(light(**batch).logits, expected(**batch).logits)
    light.train()(**batch).loss.backward()
    report = lf.export(light, tmp_path / "deployed", tokenizer=tokenizer, to="onnx")
    assert lf.translate(["Ein Hund."], tmp_path / "deployed", num_beams=1)
    assert str(tmp_path) not in json.dumps(report.to_dict())


def test_what_is_wrong_with_loaded_models_is_said(workplace, loaded, tiny_marian, tmp_path):
    model, tokenizer = loaded
    adapted, offloaded = copy.copy(model), type(model)(model.config).to("meta")
    adapted.peft_config = {}  # as of `add_adapter`
    options = {"tokenizer": tokenizer, "data": "test.jsonl", "speed": False}
    for message, call in {
        "has an adapter beside its weights: merge it": lambda: lf.convert(adapted, tokenizer=tokenizer, **FAST),
        "has an adapter": lambda: lf.evaluate(adapted, **options),
        "has weights that are not in memory .* give its folder": lambda: lf.convert(
            offloaded, tokenizer=tokenizer, **FAST
        ),
        "not in memory": lambda: lf.evaluate(model, teacher=offloaded, **options),
        "tokenizer is missing: give tokenizer": lambda: lf.convert(model, calibration="train.jsonl"),
        "model is loaded, but tokenizer is missing": lambda: lf.export(model, tmp_path / "new", to="onnx"),
        "tokenizer is a PosixPath: give": lambda: lf.plan(model, tokenizer=tiny_marian, **FAST),
        "model is a list": lambda: lf.recover([model], tmp_path / "new", tokenizer=tokenizer, teacher=tiny_marian),
        "remove tokenizer": lambda: lf.plan(tiny_marian, tokenizer=tokenizer, **FAST),
        "expected a folder, a name on the Hub or a PreTrainedModel": lambda: lf.plan(
            torch.nn.Linear(1, 1), tokenizer=tokenizer
        ),
        "vocabulary changes the tokenizer": lambda: lf.convert(model, tokenizer=tokenizer, vocabulary="x.txt"),
        "push_to_hub needs output": lambda: lf.convert(model, tokenizer=tokenizer, push_to_hub="me/light"),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_text_may_be_a_path_and_no_bar_is_shown(workplace, loaded, capfd):
    """Loaded rows are refused, because their text would be a name on the Hub."""
    model, tokenizer = loaded
    train = Path("train.jsonl")
    capfd.readouterr()
    report = lf.convert(
        model, "light", tokenizer=tokenizer, ratio=2, calibration=train, calibration_samples=10, progress=False
    )
    assert report.calibration == "train.jsonl"
    evaluation = lf.evaluate(Path("light"), data=Path("test.jsonl"), speed=False, progress=False)
    assert evaluation.to_dict()["data"] == "test.jsonl"
    assert "Writing" not in (shown := capfd.readouterr().err)
    assert "Loading" not in shown
    rows = Dataset.from_list([{"de": "Hallo", "en": "Hello"}])
    for call in (
        lambda: lf.plan("light", calibration=rows),
        lambda: lf.plan("light", vocabulary=[rows]),
        lambda: lf.recover("light", "new", teacher="bart", data=rows),
        lambda: lf.recover("light", "new", teacher="bart", validation=[{"de": "Hallo", "en": "Hello"}]),
        lambda: lf.evaluate("light", data=rows),
        lambda: lf.export("light", "new", to="ctranslate2", shortlist=rows),
        lambda: lf.compress("bart", "new", data=rows),
        lambda: lf.compress("bart", "new", calibration=rows),
    ):
        with pytest.raises(
            ValueError, match=r"the data is a (Dataset|list): expected a file, or the name of a data set"
        ):
            call()


def test_settings_of_the_caller_change_nothing(workplace, loaded):
    model, tokenizer = loaded
    options = {"ratio": 2, "calibration": "train.jsonl", "calibration_samples": 10, "progress": False}
    expected = lf.convert(model, tokenizer=tokenizer, **options)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.inference_mode():
            inside = lf.convert(model, tokenizer=tokenizer, **options)
            settings = [(torch.get_default_dtype(), torch.get_default_device().type)]
        torch.set_default_device("meta")
        outside = lf.convert(model, tokenizer=tokenizer, **options)
        settings.append((torch.get_default_dtype(), torch.get_default_device().type))
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert settings == [(torch.float64, "meta")] * 2
    assert torch.get_default_device().type == "cpu"
    for found in (inside, outside):
        for name, tensor in found.state_dict().items():
            torch.testing.assert_close(tensor, expected.state_dict()[name], rtol=0, atol=0)
        found(**tokenizer(["Ein Hund."], text_target=["A dog."], return_tensors="pt")).loss.backward()


def test_threads_load_one_after_another(tiny_marian):
    """Transformers leaves tensors without values where several load at once."""
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda _: lf.translate(["Ein Hund."], tiny_marian), range(8)))
    assert outputs == [lf.translate(["Ein Hund."], tiny_marian)] * 8
