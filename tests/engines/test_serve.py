"""The server of docs/how-to/serve.md, as it stands there, answers without this package."""

import re
import sys
from pathlib import Path

import pytest

from lightformers_hf import translate
from lightformers_hf.engines import export
from lightformers_hf.loading import load_model

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "serve.md"


def test_the_programs_of_the_guide(tiny_marian, parallel_sentences, tmp_path, monkeypatch, capsys):
    testclient = pytest.importorskip("fastapi.testclient", exc_type=ImportError)
    export(tiny_marian, tmp_path / "served", to="ctranslate2", quantization="int8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    program, server = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    example = re.search(r"```python\n(.*?)```", (tmp_path / "served" / "README.md").read_text(), re.DOTALL)[1]
    assert example.replace("Your text.", "Zwei Hunde spielen im Schnee.") == program
    exec(compile(program, "program", "exec"), {})
    assert capsys.readouterr().out == "Two dogs are playing in the snow.\n"
    (tmp_path / "server.py").write_text(server, encoding="utf-8")
    import server as made

    try:
        german = [pair["de"] for pair in parallel_sentences]
        answer = testclient.TestClient(made.app).post("/translate", json={"texts": german})
        expected = translate(german, tmp_path / "served", num_beams=1)
        assert answer.json() == expected
        texts = [f"{german[0]}  {german[1]}\n\n{german[2]}", ""]
        answer = testclient.TestClient(made.app).post("/translate", json={"texts": texts})
        assert answer.json() == [f"{expected[0]}  {expected[1]}\n\n{expected[2]}", ""]
    finally:
        del sys.modules["server"]


def test_the_program_of_a_multilingual_export(tiny_mbart50, tmp_path, monkeypatch, capsys):
    """It translates into the language of the export, and its text has no code of a language."""
    model, tokenizer = load_model(tiny_mbart50)
    kept = tokenizer.convert_tokens_to_ids([tokenizer.eos_token, "fr_XX"])
    others = [token for token in tokenizer.all_special_ids if token not in kept]
    model.generation_config.update(suppress_tokens=others)
    languages = {"source_lang": "de_DE", "target_lang": "fr_XX"}
    export(model, tmp_path / "served", tokenizer=tokenizer, to="ctranslate2", quantization="float32", **languages)
    monkeypatch.chdir(tmp_path)
    example = re.search(r"```python\n(.*?)```", (tmp_path / "served" / "README.md").read_text(), re.DOTALL)[1]
    text = "Zwei Hunde spielen im Schnee."
    exec(compile(example.replace("Your text.", text), "program", "exec"), {})
    expected = translate([text], "served", num_beams=1, max_new_tokens=64)
    (said, wanted) = capsys.readouterr().out.strip().split(), expected[0].split()
    assert min(len(said), len(wanted)) > 50  # up to the limits of both, the last token may differ
    assert said[:50] == wanted[:50]
