"""`lightformers compare`, and the same page as a Space: served as a user serves it, driven in a real browser."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from lightformers_hf import app, convert, translate
from lightformers_hf.engines import export
from lightformers_hf.loading import load_model

SENTENCES = "Zwei Hunde spielen im Schnee.\n\nDer Hund schläft unter dem Tisch."
PATIENCE = 300  # seconds: a loaded machine takes long to import all there is


@pytest.fixture(scope="module")
def light(tmp_path_factory, tiny_marian):
    """The tiny teacher at rank 16, in a folder whose name is no text for a page."""
    folder = tmp_path_factory.mktemp("app") / "<b>light<img src=x>"
    convert(tiny_marian, folder, rank=16, method="paper")
    return folder


def expected(folder, **generation):
    """What `generate()` makes of every line, and its tokens."""
    model, tokenizer = load_model(folder)
    lines = SENTENCES.splitlines()
    tokens = 0
    for line in filter(None, lines):
        rows = model.generate(**tokenizer(line, return_tensors="pt"), **generation)
        tokens += len(rows[0]) - 1  # the start token was not generated
    return "\n".join(translate(lines, model, tokenizer, batch_size=1, **generation)), tokens


def test_a_translator_counts_what_was_generated(tiny_marian):
    translator = app.Translator.load("teacher", str(tiny_marian))
    text, tokens, seconds = translator(SENTENCES, num_beams=2)
    assert (text, tokens) == expected(tiny_marian, num_beams=2)
    assert 0 < seconds < PATIENCE
    assert translator.label.startswith(f"teacher: {tiny_marian.name}, 0.")
    assert translator("\n")[:2] == ("", 0)


def test_beside_an_export_both_run_in_its_engine(tiny_marian, light, tmp_path):
    pytest.importorskip("onnxruntime")
    export(light, tmp_path / "deployed", to="onnx", quantization="int8")
    places = app.deploy_alike(str(tiny_marian), str(tmp_path / "deployed"), tmp_path / "x")
    labels = [app.Translator.load(role, place).label for role, place in zip(("teacher", "light"), places, strict=True)]
    assert labels == [f"teacher: {tiny_marian.name}, onnx int8", "light: deployed, onnx int8"]
    assert app.deploy_alike(str(tiny_marian), str(light), tmp_path / "y") == (str(tiny_marian), str(light))


def test_a_sentence_too_long_is_split_and_said_so(tiny_marian, monkeypatch):
    said = []
    monkeypatch.setattr(app.gr, "Warning", said.append)
    translator = app.Translator.load("teacher", str(tiny_marian))
    assert translator("Hund " * 100)[1] > 0
    assert len(said) == 1
    assert "a sentence of more than 64 tokens, which the teacher model gets in parts" in said[0]


def test_both_models_are_told_their_languages(tiny_mbart50, tmp_path):
    languages = {"source_lang": "de_DE", "target_lang": "fr_XX"}
    convert(tiny_mbart50, tmp_path / "light", method="paper", rank=4, progress=False, **languages)
    first = load_model(tmp_path / "light")[0].generation_config.forced_bos_token_id
    for light in ("light", "deployed"):
        if light == "deployed":
            export(tmp_path / "light", tmp_path / "deployed", to="onnx", quantization="float32")
        page = app.build(str(tiny_mbart50), str(tmp_path / light), max_new_tokens=4)
        models = next(
            cell.cell_contents for cell in page.fns[0].fn.__closure__ if isinstance(cell.cell_contents, list)
        )
        assert [model.engine.search.forced_start for model in models] == [first, first]
        assert {model.tokenizer.src_lang for model in models} == {"de_DE"}
    with pytest.raises(ValueError, match="exported for another target language than en_XX"):
        app.build(str(tiny_mbart50), str(tmp_path / "deployed"), source="de_DE", target="en_XX")


def test_missing_models_are_one_message(tiny_marian):
    with pytest.raises(FileNotFoundError, match=r"\./none"):
        app.build(str(tiny_marian), "./none")


def test_an_address_that_cannot_be_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"at host 127\.0\.0\.1 and port {port} here"):
            app.check_address("127.0.0.1", port)
    app.check_address("127.0.0.1", None)
    with pytest.raises(ValueError, match=r"at host 192\.0\.2\.1 here"):
        app.check_address("192.0.2.1", None)


@pytest.fixture
def serve(tmp_path, light, tiny_marian):
    """A function that starts the command line or a Space, and returns address and process; both end with the test.

    Whatever would leave the machine goes to a proxy here, which is only there to be called.
    """
    proxy = socket.create_server(("127.0.0.1", 0))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {name: f"http://127.0.0.1:{proxy.getsockname()[1]}" for name in ("HTTP_PROXY", "HTTPS_PROXY")}
    variables |= {name.lower(): value for name, value in variables.items()}
    variables["ALL_PROXY"] = "socks5://127.0.0.1:9"
    root = str(Path(app.__file__).parents[1])
    environment = {**os.environ, **variables, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    started = []

    def start(how):
        command = [sys.executable, "-m", "lightformers_hf", "compare", tiny_marian, light, "--port", str(port)]
        if how == "space":
            (tmp_path / "app.py").write_text(Path(app.__file__).read_text(encoding="utf-8"), encoding="utf-8")
            command = [sys.executable, "app.py"]
            del environment["ALL_PROXY"]
            environment.update(NO_PROXY="127.0.0.1,localhost", no_proxy="127.0.0.1,localhost")
            environment.update(TEACHER=str(tiny_marian), LIGHT=str(light), GRADIO_SERVER_PORT=str(port))
        with (tmp_path / "log").open("wb") as log:
            # What a shell runs in the background ignores Ctrl-C, and so does all that it starts.
            heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
            output = {"stdout": log, "stderr": log}
            process = subprocess.Popen(command, cwd=tmp_path, env=environment, preexec_fn=heed, **output)
        started.append(process)
        deadline = time.monotonic() + PATIENCE
        while process.poll() is None and time.monotonic() < deadline:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    return f"http://127.0.0.1:{port}", process
            time.sleep(0.2)
        raise AssertionError((tmp_path / "log").read_text())

    yield start
    for process in started:
        process.kill()
        process.wait()
    proxy.setblocking(False)
    with proxy, pytest.raises(BlockingIOError):
        proxy.accept()


@pytest.mark.parametrize("how", ["command", "space"])
def test_both_translations_in_a_browser(how, serve, browser, light, tiny_marian):
    address, process = serve(how)
    page = browser.new_page(viewport={"width": 1000, "height": 800})
    page.set_default_timeout(PATIENCE * 1000)
    elsewhere, complaints = [], []
    page.on("request", lambda request: elsewhere.append(request.url))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(address)
    page.fill("#text textarea", SENTENCES)
    if how == "command":
        page.click("#translate")
    else:
        page.press("#text textarea", "Shift+Enter")
    page.wait_for_function("document.querySelector('#light-figures textarea')?.value")
    beams = load_model(light)[0].generation_config.num_beams or 1
    for role, folder in (("teacher", tiny_marian), ("light", light)):
        output, tokens = expected(folder, num_beams=beams)
        assert page.input_value(f"#{role} textarea") == output
        figures = page.input_value(f"#{role}-figures textarea")
        assert re.fullmatch(
            rf"{tokens} tokens in \d+\.\d{{3}} s" + (r", \d+\.\dx the tokens/s" if role == "light" else ""), figures
        )
        assert page.get_by_text(f"{role}: {folder.name}, ").count() == 1
    assert complaints == []
    assert [url for url in elsewhere if not url.startswith((address, "data:", "blob:"))] == []
    listening = {
        connection.laddr.ip
        for connection in psutil.Process(process.pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}
    page.close()


def test_ctrl_c_ends_it(serve):
    _, process = serve("command")
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 130
