"""The server of docs/how-to/serve.md, as it stands there, answers without this package."""

import re
import sys
from pathlib import Path

import pytest

from lightformers_hf import translate
from lightformers_hf.engines import export

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
