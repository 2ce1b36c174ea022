"""An engine is one file of `engines/` and its name in `ENGINES`; nothing is imported to list them."""

import json
import os
import subprocess
import sys

import pytest
import torch
from models.cases import make_model

from lightformers_hf import engines, export, load_engine
from lightformers_hf.engines import deployment_names, load_engine_file, split_deployment
from lightformers_hf.engines.layers import Expansion
from lightformers_hf.matrices import Weight

# What a newcomer writes: a model saved by torch, and run by transformers.
ECHO = """
from ..loading import load_network
from .engine import TransformersModel
from .layers import Expansion

QUANTIZATIONS = ("float32",)


def write(source, folder, quantization):
    source.model.save_pretrained(folder / "inner")
    return Expansion()


def load(folder, search, threads):
    return TransformersModel(load_network(folder / "inner"), search, threads)


def describe_loading(folder):
    return f"torch, from {folder}"
"""


@pytest.fixture
def add_engine(tmp_path, monkeypatch):
    """Puts a file among the engines for a test."""
    folder = tmp_path / "engines"
    folder.mkdir()
    monkeypatch.setattr(engines, "__path__", [*engines.__path__, str(folder)])

    def add(name: str, text: str) -> None:
        monkeypatch.setattr(engines, "ENGINES", ("ctranslate2", name, "onnx"))
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
        monkeypatch.delitem(sys.modules, f"{engines.__name__}.{name}", raising=False)

    return add


def test_onnx_runtime_reports_nothing_about_its_user(tmp_path):
    """It would send events, and keep the number of a device in the home folder."""
    pytest.importorskip("onnxruntime")
    variables = {name: value for name, value in os.environ.items() if name not in ("CI", "XDG_CACHE_HOME")}
    program = "from lightformers_hf.engines import load_engine_file; load_engine_file('onnx')"
    subprocess.run([sys.executable, "-c", program], env=variables | {"HOME": str(tmp_path)}, check=True)
    assert not [*tmp_path.rglob("*onnxruntime*")]


def test_a_new_engine_is_its_file_and_its_name(add_engine, tmp_path):
    add_engine("echo", ECHO)
    assert {"echo", "echo-int8"} < set(deployment_names())
    model = make_model("ConditionalGeneration", "lightformer-low-rank")
    model.save_pretrained(tmp_path / "model")
    report = export(tmp_path / "model", tmp_path / "out", to="echo", quantization="float32")
    assert (report.difference, report.multiplied_out) == (0.0, 0)
    lines = report.lines(tmp_path / "out")
    assert lines[-1] == f"Without this package: torch, from {tmp_path / 'out'}."
    assert lines[-2].startswith("Try it: lightformers translate")
    assert json.loads((tmp_path / "out" / "export.json").read_text())["engine"] == "echo"
    engine = load_engine(tmp_path / "out")
    (found,) = engine.generate([[9, 17, 5, 2]], num_beams=1, max_new_tokens=6)
    rows = model.generate(input_ids=torch.tensor([[9, 17, 5, 2]]), num_beams=1, max_new_tokens=6, max_length=None)
    assert (engine.name, found) == ("echo", rows[0, 1 : len(found) + 1].tolist())
    with pytest.raises(ValueError, match="quantization is 'int8'; echo has float32"):
        export(tmp_path / "model", tmp_path / "small", to="echo", quantization="int8")


def test_an_engine_that_is_not_whole_or_not_installed_is_named(add_engine):
    add_engine("half", "QUANTIZATIONS = ('float32',)\n")
    with pytest.raises(ValueError, match=r"half\.py is no engine: it lacks write"):
        load_engine_file("half")
    add_engine("absent", "import a_library_that_nobody_has.part\n")
    message = (
        r"absent needs a_library_that_nobody_has, which is not installed: pip install 'lightformers_hf\[absent\]'"
    )
    with pytest.raises(ValueError, match=message):
        load_engine_file("absent")
    add_engine("broken", "from lightformers_hf import a_room_that_is_gone\n")
    with pytest.raises(ImportError, match="a_room_that_is_gone"):
        load_engine_file("broken")


def test_names_of_deployments():
    assert deployment_names() == ["transformers", "ctranslate2", "ctranslate2-int8", "onnx", "onnx-int8"]
    assert split_deployment("onnx-int8") == ("onnx", "int8")
    assert split_deployment("transformers") == ("transformers", None)
    with pytest.raises(ValueError, match="unknown engine 'transformers-int8', expected one of transformers"):
        split_deployment("transformers-int8")


@pytest.mark.parametrize("method", ["write", "multiply"])
def test_what_is_stored_as_less_than_its_factors_is_counted_once(method):
    diagonal, plain = torch.ones(4), torch.ones(4, 6)
    expansion = Expansion()
    for _ in range(2):  # a shared layer, whose matrix is made anew at every depth
        getattr(expansion, method)(Weight(torch.diag(diagonal), stored=(diagonal,)))
        getattr(expansion, method)(Weight(plain))
    assert (expansion.matrices, expansion.parameters_before, expansion.parameters_after) == (1, 4, 16)
