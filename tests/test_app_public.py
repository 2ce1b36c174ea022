"""The page of `lightformers compare` before strangers: limits, the queue, readers who leave, other sites' requests."""

import json
import threading
import time

import httpx
import pytest

from lightformers_hf import app

PATIENCE = 60
FREE = threading.Event()  # whether the models go on
FREE.set()


@pytest.fixture(scope="module")
def page(tiny_marian):
    """Address of the page, and the list of sentences that its models were given since."""
    asked = []
    blocks = app.build(str(tiny_marian), str(tiny_marian), max_new_tokens=4)
    (function,) = {event.fn for event in blocks.fns.values() if event.fn}
    models = next(cell.cell_contents for cell in function.__closure__ if isinstance(cell.cell_contents, list))
    for model in models:
        generate = model.engine.generate

        def listen(sentences, generate=generate, **options):
            asked.append(len(sentences[0]))
            time.sleep(0.1)
            FREE.wait(PATIENCE)
            return generate(sentences, **options)

        model.engine.generate = listen
    yield app.serve(blocks).rstrip("/"), asked
    blocks.close()


def ask(address, data, **options):
    """Status of the request, and the last event of its answer with what came with it."""
    answer = httpx.post(f"{address}/gradio_api/call/translate", json={"data": data}, **options)
    if answer.status_code != 200:
        return answer.status_code, answer.text
    event = answer.json()["event_id"]
    stream = httpx.get(f"{address}/gradio_api/call/translate/{event}", timeout=PATIENCE)
    name, content = stream.text.strip().split("\n\n")[-1].splitlines()
    return name.removeprefix("event: "), json.loads(content.removeprefix("data: "))


def test_text_is_translated(page):
    name, (teacher, figures, light, compared) = ask(page[0], ["Ein Hund\n\nZwei Hunde"])
    assert (name, teacher) == ("complete", light)
    assert len(teacher.splitlines()) == 3
    assert "tokens in" in figures
    assert "x the tokens/s" in compared


@pytest.mark.parametrize("data", [[None], [""], ["\n \n"]])
def test_nothing_is_translated_to_nothing(page, data):
    name, boxes = ask(page[0], data)
    assert name == "complete"
    assert not any(box.strip() for box in boxes)


@pytest.mark.parametrize("text", ["Hund " * 2000, "Hund\n" * 51, "\n" * 4000])
def test_too_much_text_reaches_no_model(page, text, capfd):
    address, asked = page
    before = len(asked)
    name, content = ask(address, [text])
    assert name == "error"
    assert "5,000" in json.dumps(content)
    assert len(asked) == before
    assert "Traceback" not in capfd.readouterr().err


def test_a_reader_who_leaves_is_not_worked_for(page):
    address, asked = page
    sent = {"data": ["Ein Hund\n" * 50], "fn_index": 0, "session_hash": "gone"}
    assert httpx.post(f"{address}/gradio_api/queue/join", json=sent).status_code == 200
    with httpx.stream("GET", f"{address}/gradio_api/queue/data?session_hash=gone", timeout=PATIENCE) as stream:
        next(line for line in stream.iter_lines() if "process_generating" in line)
    time.sleep(0.5)
    before = len(asked)
    start = time.monotonic()
    assert ask(address, ["Ein Hund"])[0] == "complete"
    assert time.monotonic() - start < 5
    assert len(asked) - before < 15  # of the hundred there would have been


def test_a_request_ends_in_time(page, monkeypatch):
    monkeypatch.setattr(app, "SECONDS", 0.3)
    name, content = ask(page[0], ["Ein Hund\n" * 50])
    assert name == "error"
    assert "Stopped after" in json.dumps(content)


def test_the_queue_is_limited(page):
    address, _ = page
    sent = {"data": ["Ein Hund"], "fn_index": 0}
    FREE.clear()  # on a busy machine requests would be answered as fast as they come
    codes = [
        httpx.post(f"{address}/gradio_api/queue/join", json=sent | {"session_hash": f"s{i}"}).status_code
        for i in range(app.WAITING + 5)
    ]
    FREE.set()
    assert set(codes) == {200, 503}
    deadline = time.monotonic() + PATIENCE
    while ask(address, ["Ein Hund"])[0] == 503:
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.parametrize("path", ["upload", "run/translate", "stream/x", "vibe-edit", "component_server"])
def test_nothing_but_text_is_taken(page, path):
    answer = httpx.post(f"{page[0]}/gradio_api/{path}", files={"files": b"content"})
    assert answer.status_code == 405


def test_a_long_request_is_not_read(page):
    assert ask(page[0], ["x" * app.REQUEST_BYTES])[0] == 413
    chunks = httpx.post(
        f"{page[0]}/gradio_api/call/translate", content=iter([b'{"data": ["', *[b"x" * 9999] * 7, b'"]}'])
    )
    assert chunks.status_code == 413


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"}, {"Host": "evil.example:7860"}, {"Origin": "https://evil.example"},
        {"Origin": "null"}, {"Origin": "http://localhost:1"},
    ],
    ids=str,
)  # fmt: skip
def test_other_sites_are_refused(page, headers):
    assert ask(page[0], ["Ein Hund"], headers=headers)[0] == 403
    assert httpx.get(page[0], headers=headers).status_code == 403


def test_the_page_itself_is_answered(page):
    address, _ = page
    port = address.rpartition(":")[2]
    for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
        headers = {"Host": host, "Origin": f"http://{host}"}
        assert httpx.get(address, headers=headers).status_code == 200
        assert ask(address, [""], headers=headers)[0] == "complete"


@pytest.mark.parametrize("data", [[], ["a", "b"], None, [["a"]], [3], [{"a": 1}], "text"])
def test_what_is_no_text_is_refused(page, data):
    assert ask(page[0], data)[0] == 422


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 60_000, b"\xff", b"[]"])
def test_what_is_no_json_is_refused(page, content, capfd):
    for name in ("call/translate", "queue/join", "cancel"):
        assert httpx.post(f"{page[0]}/gradio_api/{name}", content=content).status_code in (400, 422)
    assert "Traceback" not in capfd.readouterr().err


def test_what_is_unknown_leaves_no_traceback(page, capfd):
    for fields in ({"fn_index": 7}, {"fn_index": -1}, {"fn_index": "x"}, {"session_hash": 3}, {"trigger_id": []}):
        sent = {"data": ["a"], "fn_index": 0, "session_hash": "unknown"} | fields
        assert 400 <= httpx.post(f"{page[0]}/gradio_api/queue/join", json=sent).status_code < 600
    assert "Traceback" not in capfd.readouterr().err
