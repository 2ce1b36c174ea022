"""The exported folders in other programs: transformers.js in Node and in a browser, optimum, CTranslate2, a server."""

import functools
import http.server
import json
import os
import shutil
import subprocess
import threading

import pytest

from lightformers_hf import translate
from lightformers_hf.engines import export, tokenizer_file, web
from lightformers_hf.engines.web import TRANSFORMERS_JS, export_web, share_weights

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SCRIPT = """
import { env, pipeline } from "@huggingface/transformers";
env.allowRemoteModels = false;
env.localModelPath = process.argv[2];
const found = {};
for (const dtype of ["fp32", "q8", "fp16"]) {
  const translate = await pipeline("translation", "out", { dtype });
  found[dtype] = [];
  for (const text of JSON.parse(process.argv[3])) found[dtype].push((await translate(text))[0].translation_text);
}
console.log(JSON.stringify(found));
"""
needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """A folder with transformers.js of the npm registry."""
    folder = tmp_path_factory.mktemp("node")
    environment = os.environ | {"ONNXRUNTIME_NODE_INSTALL": "skip"}
    package = f"@huggingface/transformers@{TRANSFORMERS_JS}"
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", package]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"npm cannot install {package}: {done.stderr[-200:]}")
    return folder


@needs_npm
def test_node_translates_as_the_checkpoint_does(node, tiny_marian, parallel_sentences, tmp_path):
    export(tiny_marian, tmp_path / "out", to="onnx")
    (node / "run.mjs").write_text(SCRIPT, encoding="utf-8")
    german = [pair["de"] for pair in parallel_sentences]
    command = ["node", "run.mjs", str(tmp_path), json.dumps(german)]
    done = subprocess.run(command, cwd=node, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    expected = translate(german, tiny_marian, num_beams=1)
    assert found["fp32"] == expected
    assert found["fp16"] == expected
    assert sum(one == other for one, other in zip(found["q8"], expected, strict=True)) >= 8


@pytest.fixture
def serve():
    """A web server for a folder; a call that ends it."""
    servers = []

    def start(folder):
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/"

    def stop():
        while servers:
            server = servers.pop()
            server.shutdown()
            server.server_close()

    yield start, stop
    stop()


@needs_npm
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_page_translates_offline_with_its_spaces_and_lines(serve, tiny_marian, parallel_sentences, tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api")
    export_web(tiny_marian, tmp_path / "page", compare=tiny_marian)
    german, english = parallel_sentences[0].values()
    start, stop = serve
    address = start(tmp_path / "page")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        errors = []
        page.on("pageerror", lambda error: errors.append(error))
        for visit in range(2):
            page.goto(address)
            page.wait_for_selector("html[data-ready=true]", timeout=120_000)
            if visit:
                stop()  # the second visit has come from the service worker: no network is needed
            page.fill("#source", f"{german}\n\n  {german}")
            page.click("#translate")
            page.wait_for_selector("article:last-child[data-speed]", timeout=120_000)
            outputs = [element.text_content() for element in page.query_selector_all(".translation")]
            assert outputs == [f"{english}\n\n  {english}"] * 2
        assert not errors
        browser.close()


def test_the_decoder_of_a_page_reads_what_the_encoder_has(tiny_marian, tmp_path):
    import onnxruntime

    export(tiny_marian, tmp_path / "out", to="onnx", quantization="int8")
    decoder = tmp_path / "out" / "onnx" / "decoder_model_merged_quantized.onnx"
    before = decoder.stat().st_size
    share_weights(decoder.parent)
    assert decoder.stat().st_size < before
    assert onnxruntime.InferenceSession(str(decoder), providers=["CPUExecutionProvider"]).get_inputs()


def test_a_page_without_npm_or_tokenizer_is_refused(tiny_marian, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="npm is not installed: install Node"):
        export_web(tiny_marian, tmp_path / "page")
    assert not (tmp_path / "page").exists()
    monkeypatch.setattr(web, "vendor", lambda _: dict.fromkeys(web.VENDORED, "1.0"))
    monkeypatch.setattr(tokenizer_file, "KNOWN", ())  # as a tokenizer that tokenizer.json cannot hold
    with pytest.raises(ValueError, match=r"cannot run in a browser.* no tokenizer\.json: MarianTokenizer has none"):
        export_web(tiny_marian, tmp_path / "page")
    assert not (tmp_path / "page").exists()
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "mine").touch()
    with pytest.raises(FileExistsError, match="page"):
        export_web(tiny_marian, tmp_path / "page", overwrite=True)


def test_optimum_generates_the_same_tokens(tiny_marian, tmp_path):
    optimum = pytest.importorskip(
        "optimum.onnxruntime", reason="optimum-onnx supports no transformers 5", exc_type=ImportError
    )
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    export(tiny_marian, tmp_path / "out", to="onnx", quantization="float32")
    batch = AutoTokenizer.from_pretrained(tiny_marian)(["Ein Hund spielt."], return_tensors="pt")
    theirs = optimum.ORTModelForSeq2SeqLM.from_pretrained(tmp_path / "out", subfolder="onnx")
    ours = AutoModelForSeq2SeqLM.from_pretrained(tiny_marian)
    for beams in (1, 4):
        assert theirs.generate(**batch, num_beams=beams).tolist() == ours.generate(**batch, num_beams=beams).tolist()
