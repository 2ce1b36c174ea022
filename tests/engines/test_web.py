"""The exported folders in other programs: transformers.js in Node and in a browser, optimum, CTranslate2, a server."""

import json
import os
import re
import shutil
import subprocess
import time

import pytest
from conftest import ENGLISH, GERMAN
from tiny import make_tokenizer, marian_tokens, sizes
from transformers import MarianConfig, MarianMTModel

from lightformers_hf import translate
from lightformers_hf.engines import export, tokenizer_file, web
from lightformers_hf.engines.web import export_web, share_weights

SCRIPT = """
import { env, pipeline } from "@huggingface/transformers";
env.allowRemoteModels = false;
env.localModelPath = process.argv[2];
const found = {};
for (const dtype of ["fp32", "q8", "fp16", "q4"]) {
  const translate = await pipeline("translation", "out", { dtype });
  found[dtype] = [];
  for (const text of JSON.parse(process.argv[3])) found[dtype].push((await translate(text))[0].translation_text);
}
console.log(JSON.stringify(found));
"""


def test_node_translates_as_the_checkpoint_does(node, tiny_marian, parallel_sentences, tmp_path):
    export(tiny_marian, tmp_path / "out", to="onnx")
    export(tiny_marian, tmp_path / "q4", to="onnx", quantization="int4")
    shutil.copytree(tmp_path / "q4" / "onnx", tmp_path / "out" / "onnx", dirs_exist_ok=True)
    (node / "run.mjs").write_text(SCRIPT, encoding="utf-8")
    german = [pair["de"] for pair in parallel_sentences]
    command = ["node", "run.mjs", str(tmp_path), json.dumps(german)]
    done = subprocess.run(command, cwd=node, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    expected = translate(german, tiny_marian, num_beams=1)
    assert found["fp32"] == expected
    assert found["fp16"] == expected
    for dtype in ("q8", "q4"):
        assert sum(one == other for one, other in zip(found[dtype], expected, strict=True)) >= 8, dtype


@pytest.fixture(scope="module")
def written(tiny_marian, tmp_path_factory):
    """A page of two models."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("web") / "page"
    export_web(tiny_marian, folder, compare=tiny_marian)
    return folder


def read(frame, text):
    """What a page answers, of every model."""
    frame.wait_for_selector("html[data-ready=true]", timeout=30_000)
    frame.fill("#source", text)
    frame.click("#translate")
    frame.wait_for_selector("article:last-child[data-speed]", timeout=30_000)
    return [element.text_content() for element in frame.query_selector_all(".translation")]


def test_the_page_translates_offline_with_its_spaces_and_lines(serve, chromium, written, parallel_sentences):
    german, english = parallel_sentences[0].values()
    start, stop = serve
    address, page, errors = start(written), chromium.new_page(), []
    page.on("pageerror", lambda error: errors.append(error))
    for visit in range(2):
        page.goto(address)
        page.wait_for_selector("html[data-ready=true]", timeout=30_000)
        if visit:
            stop()  # no network is needed from now on
            page.reload()
        assert read(page, f"{german}\n\n  {german}") == [f"{english}\n\n  {english}"] * 2
        assert page.title() == page.text_content("h1") == "German to English, on this device"
        call = "import('./worker.js').then((worker) => worker.segments('P: A. B.\\nP: C', 'P: '))"
        assert page.evaluate(call) == ["A. ", "B.", "\n", "C"]
    assert not errors


def test_a_page_in_4_bits(serve, chromium, tiny_marian, parallel_sentences, tmp_path):
    german, english = parallel_sentences[0].values()
    export_web(tiny_marian, tmp_path / "page", quantization="int4")
    page = chromium.new_page()
    page.goto(serve[0](tmp_path / "page"))
    assert read(page, german) == [english]
    assert [file.name for file in (tmp_path / "page" / "model" / "onnx").glob("encoder*")] == ["encoder_model_q4.onnx"]
    with pytest.raises(ValueError, match="a page has int8 or int4"):
        export_web(tiny_marian, tmp_path / "other", quantization="float32")


@pytest.mark.parametrize("trouble", ["hard reload", "no service worker", "little storage"])
def test_the_page_works_without_its_service_worker(serve, chromium, written, parallel_sentences, trouble):
    german, english = parallel_sentences[0].values()
    address = serve[0](written)
    blocks = {"service_workers": "block"} if trouble == "no service worker" else {}
    page = chromium.new_context(**blocks).new_page()
    session = page.context.new_cdp_session(page)
    if trouble == "little storage":
        session.send("Storage.overrideQuotaForOrigin", {"origin": address.rstrip("/"), "quotaSize": 10_000})
    page.goto(address)
    if trouble == "hard reload":
        page.wait_for_selector("html[data-ready=true]", timeout=30_000)
        session.send("Page.reload", {"ignoreCache": True})
        page.wait_for_selector("html:not([data-ready])", state="attached")
    assert read(page, german) == [english] * 2


@pytest.mark.parametrize(("sandbox", "works"), [("allow-scripts allow-same-origin", True), ("allow-scripts", False)])
def test_a_page_in_a_frame_works_or_says_why_not(serve, chromium, written, parallel_sentences, sandbox, works):
    german, english = parallel_sentences[0].values()
    page = chromium.new_page()
    page.set_content(f'<iframe sandbox="{sandbox}" src="{serve[0](written)}"></iframe>')
    frame = page.wait_for_selector("iframe").content_frame()
    if works:
        assert read(frame, german) == [english] * 2
    else:
        frame.wait_for_selector("#message:has-text('open the page in its own window')", timeout=20_000)


@pytest.mark.parametrize("caching", [{"Cache_Control": "max-age=600"}, {}])
def test_the_next_visit_after_an_update_has_the_new_version(serve, chromium, written, tmp_path, caching):
    folder = shutil.copytree(written, tmp_path / "page")
    address, page = serve[0](folder, **caching), chromium.new_context().new_page()

    def mark(version):
        for name, place in {"page.json": folder, "config.json": folder / "model"}.items():
            content = json.loads((place / name).read_text()) | {"language": None, "title": version, "mark": version}
            (place / name).write_text(json.dumps(content))
        worker = (folder / "sw.js").read_text()
        (folder / "sw.js").write_text(re.sub(r"lightformers-\w+\"", f'lightformers-{version}"', worker))
        for file in folder.rglob("*"):  # without a header, a browser keeps old files longer
            os.utime(file, (time.time() - 30 * 86_400 * (version == "first"),) * 2)

    for version in ("first", "second"):
        mark(version)
        page.goto(address)
        page.wait_for_selector("html[data-ready=true]", timeout=30_000)
        assert page.title() == version
        assert page.evaluate("fetch('model/config.json').then((file) => file.json())")["mark"] == version
        assert page.evaluate("caches.keys()") == [f"lightformers-{version}"]


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_characters_that_are_no_piece_are_bytes_in_the_page(serve, chromium, tmp_path, kind):
    tokenizer = make_tokenizer(
        tmp_path / "model", GERMAN + ENGLISH, 330, byte_fallback=True, model_type=kind, hard_vocab_limit=False
    )
    MarianMTModel(MarianConfig(**sizes(16), **marian_tokens(len(tokenizer)))).save_pretrained(tmp_path / "model")
    export_web(tmp_path / "model", tmp_path / "page")
    texts = ["Ein 😀 Hund", "🏳️\u200d🌈", "中 𝔘 und é", "<b> {0} &amp; 42%", "  zwei  ", "ﬁn ½ ｱﾊﾟｰﾄ e\u0301"]
    texts += ["a\u00adb\u200bc\ufeffd\x07"]
    page = chromium.new_page()
    page.goto(serve[0](tmp_path / "page"))
    found = page.evaluate(
        """async (texts) => {
          const { openTokenizer } = await import("./worker.js");
          const tokenizer = await openTokenizer("model");
          const ids = texts.map((text) => Array.from(tokenizer.encode(text)));
          return ids.map((row) => [row, tokenizer.decode(row, { skip_special_tokens: true })]);
        }""",
        texts,
    )
    ids = tokenizer(texts)["input_ids"]
    assert [row for row, _ in found] == ids
    assert [text.strip() for _, text in found] == tokenizer.batch_decode(ids, skip_special_tokens=True)


def test_the_decoder_of_a_page_reads_what_the_encoder_has(tiny_marian, tmp_path):
    import onnxruntime

    export(tiny_marian, tmp_path / "out", to="onnx", quantization="int8")
    decoder = tmp_path / "out" / "onnx" / "decoder_model_merged_quantized.onnx"
    before = decoder.stat().st_size
    share_weights(decoder.parent, "_quantized")
    assert decoder.stat().st_size < before
    assert onnxruntime.InferenceSession(str(decoder), providers=["CPUExecutionProvider"]).get_inputs()


def test_a_cache_of_npm_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    (tmp_path / "file").touch()
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "file" / "cache"))
    with pytest.raises(ValueError, match=r"failed: code \w+; .*file/cache.* npm's cache writable"):
        web.vendor(tmp_path / "vendor")


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
