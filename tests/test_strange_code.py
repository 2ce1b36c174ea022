"""Code that lies beside a checkpoint is never run, whoever answers `y` on standard input."""

import ast
import json
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import run_translation
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from lightformers_hf import convert
from lightformers_hf.loading import load_model, load_pretrained

ROOT = Path(__file__).parents[1]
CODE = "from pathlib import Path\n\nPath({ran!r}).touch()\nraise SystemExit('strange code was run')\n"
AUTO = ("AutoConfig", "AutoModel", "AutoModelForSeq2SeqLM", "AutoModelForCausalLM")
COMMANDS = [
    "plan strange --ratio 2",
    "convert strange out --ratio 2 --method paper",
    "export strange out --to onnx",
    "translate strange test.txt",
    "evaluate strange --data test.jsonl --no-speed",
    "evaluate dense --teacher strange --data test.jsonl --no-speed",
    "push strange user/strange",
    "benchmark engines strange dense --engine transformers --runs 1",
]


@pytest.fixture
def place(tiny_marian, tmp_path, monkeypatch, parallel_sentences):
    """A working directory with a checkpoint `dense`, data, and a standard input that says yes to all."""
    shutil.copytree(tiny_marian, tmp_path / "dense")
    lines = [json.dumps({"translation": pair}) + "\n" for pair in parallel_sentences]
    (tmp_path / "test.jsonl").write_text("".join(lines), encoding="utf-8")
    (tmp_path / "test.txt").write_text("Ein Hund\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run strange code"))
    return tmp_path


def make_strange(place, where):
    """`strange`, a checkpoint whose code leaves a file `ran` behind."""
    folder = Path(shutil.copytree(place / "dense", place / "strange"))
    (folder / "strange.py").write_text(CODE.format(ran=str(place / "ran")))
    name = "tokenizer_config.json" if where == "tokenizer" else "config.json"
    content = json.loads((folder / name).read_text())
    if where == "tokenizer":
        content |= {"auto_map": {"AutoTokenizer": ["strange.Words", None]}, "tokenizer_class": "StrangeWords"}
    else:
        content["auto_map"] = {auto: f"strange.{auto}" for auto in AUTO}
    if where == "unknown":
        content["model_type"] = "strange"
    (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("words", COMMANDS)
def test_a_model_of_its_own_code_is_refused(place, lightformers, words):
    make_strange(place, "unknown")
    code, _, error = lightformers(*words.split(), "--quiet", stdin=b"y\ny\n")
    assert code == 1
    assert not (place / "ran").exists()
    assert "strange" in error
    assert "auto_map" in error
    assert "trust_remote_code" not in error
    assert "Traceback" not in error


@pytest.mark.parametrize("words", COMMANDS[1:4])
@pytest.mark.parametrize("where", ["tokenizer", "known"])
def test_other_code_is_not_run_either(place, lightformers, where, words):
    make_strange(place, where)
    code, _, error = lightformers(*words.split(), "--quiet", stdin=b"y\ny\n")
    assert not (place / "ran").exists()
    assert "Traceback" not in error
    assert where == "tokenizer" or code == 0  # code beside a model that transformers has is not needed


@pytest.mark.usefixtures("warm_python")
def test_a_process_with_a_yes_on_its_standard_input(place):
    make_strange(place, "unknown")
    run = subprocess.run(
        [sys.executable, "-m", "lightformers_hf", "convert", "strange", "out", "--ratio", "2"],
        input="y\n", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 1
    assert "never run" in run.stderr
    assert not (place / "ran").exists()


@pytest.mark.parametrize("option", ["model_name_or_path", "config_name", "teacher", "tokenizer_name"])
def test_scripts(place, option):
    make_strange(place, "tokenizer" if option == "tokenizer_name" else "unknown")
    options = {"model_name_or_path": "dense"} if option in ("teacher", "tokenizer_name") else {}
    options |= {"train_file": "test.jsonl", "output_dir": "out", "source_lang": "de", "target_lang": "en"}
    options |= {option: "strange", "max_steps": "1", "use_cpu": "True", "report_to": "none"}
    with suppress(ValueError):  # as far as it comes
        run_translation.main([word for name, value in options.items() for word in (f"--{name}", value)])
    assert not (place / "ran").exists()


def test_our_own_architectures_load_from_the_package(place):
    convert("dense", "light", ratio=2, method="paper", progress=False)
    for file in Path("light").glob("*.py"):
        file.write_text(CODE.format(ran=str(place / "ran")))
    model, tokenizer = load_model("light")
    assert type(model).__module__ == "lightformers_hf.models.modeling_lightformer"
    assert type(load_pretrained(AutoTokenizer, "light")) is type(tokenizer)
    assert type(load_pretrained(AutoModelForSeq2SeqLM, "light")) is type(model)
    assert not (place / "ran").exists()


def test_there_is_no_other_way_to_load():
    """Every `from_pretrained` is that of `loading.py`, of a class that reads no code, or a class's own."""
    harmless = {"GenerationConfig", "transformers.GenerationConfig", "super()"}
    for file in [*ROOT.glob("lightformers_hf/**/*.py"), *ROOT.glob("training/*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Attribute) or node.attr not in ("from_pretrained", "from_config"):
                continue
            # `models/pipelines.py` travels with checkpoints, and its tokenizers run no code unless the user asks.
            if file.name in ("loading.py", "pipelines.py") or ast.unparse(node.value) in harmless:
                continue
            pytest.fail(f"{file}, line {node.lineno}: {ast.unparse(node)}; call loading.load_pretrained")
