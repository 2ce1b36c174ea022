"""Two models side by side on a local web page: type a sentence, see both translations, their tokens and their time.

`lightformers compare TEACHER LIGHT` serves it. This file is also, as it is, the `app.py` of a Space on the Hub (SDK:
gradio) whose `requirements.txt` names this package with its extra `app`, and whose variables `TEACHER` and `LIGHT` are
names of models on the Hub.

It may be public. A request is limited in characters, lines and seconds, and requests wait in a queue of limited
length. A request whose reader is gone ends after its line. The server takes nothing but text to translate.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import gradio as gr
import torch
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lightformers_hf.engines import CHECKPOINTS, Engine, export
from lightformers_hf.engines.engine import longest_input, split_texts, wrap_network
from lightformers_hf.evaluation.translate import load_translator
from lightformers_hf.files import EXPORT_FILE, read_json
from lightformers_hf.loading import is_export, load_pretrained, printable_name, resolve_source, unique_parameters

# Nothing leaves the machine: no analytics, no tunnel, and fonts that the reader has.
FONTS = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
QUIET = {"share": False, "ssr_mode": False, "quiet": True, "show_error": True, "footer_links": []}
# Limits of one request: its length, and the time that both models may take. Then, how many may wait.
CHARACTERS, LINES, SECONDS, WAITING = 5000, 50, 60, 20
WARM_UPS = 3  # sentences before the first that is timed
REQUEST_BYTES = 1 << 16  # CHARACTERS of any script, as JSON
# The only places to which a page, or gradio_client, sends anything: to translate, and to stop it.
ASKING, STOPPING = ("/queue/join", "/call/translate"), ("/cancel", "/reset")
LOCAL = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class Translator:
    """A loaded model, of this package, of transformers or exported, and its name on the page."""

    role: str  # `teacher` or `light`
    label: str  # role, name, form and size
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    prefix: str = ""  # prefix of every line

    @classmethod
    def load(
        cls, role: str, name: str, source: str | None = None, target: str | None = None, *, columns: bool = False
    ) -> Translator:
        """Load a folder or Hub name, for two languages as of `load_translator`."""
        model, tokenizer, prefix = load_translator(name, source=source, target=target, columns=columns)
        engine = model if isinstance(model, Engine) else wrap_network(model, torch.get_num_threads())
        form = " ".join(filter(None, [engine.name, read_form(name)[1]]))
        if not isinstance(model, Engine):
            form = f"{unique_parameters(model) / 1e6:,.1f}M parameters, {form}"
        return cls(role, f"{role}: {printable_name(name)}, {form}", engine, tokenizer, prefix)

    def __call__(self, text: str, **generation: int) -> tuple[str, int, float]:
        """Every line translated by itself; the tokens generated, end tokens included; and the seconds it took."""
        *_, last = self.translate_lines(text, **generation)
        return last

    def translate_lines(self, text: str, **generation: int) -> Iterator[tuple[str, int, float]]:
        """Yield the result of a call without text, then that of all finished lines after each line."""
        lines, outputs, tokens, seconds = text.splitlines(), list[str](), 0, 0.0
        limit = longest_input(self.engine, self.tokenizer)
        yield "", tokens, seconds
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                outputs.append("")
                continue
            start = time.perf_counter()
            (split,) = split_texts([line], self.tokenizer, limit, prefix=self.prefix)
            if split.cut:
                gr.Warning(
                    f"Line {number} has a sentence of more than {limit} tokens, which the {self.role} model gets in "
                    "parts: split it."
                )
            generated = self.engine.generate(list(split.ids.values()), **generation)
            decoded = self.tokenizer.batch_decode(generated, skip_special_tokens=True)
            outputs.append(split.join(dict(zip(split.ids, decoded, strict=True))))
            tokens, seconds = tokens + sum(map(len, generated)), seconds + time.perf_counter() - start
            yield "\n".join(outputs), tokens, seconds
        yield "\n".join(outputs), tokens, seconds


def check_text(text: str | None) -> str:
    """The text of a request, or `gr.Error`, which the page shows, where it has too much of it."""
    text = text or ""
    lines = len(text.splitlines())
    if len(text) > CHARACTERS or lines > LINES:
        raise gr.Error(
            f"{len(text):,} characters in {lines:,} lines: at most {CHARACTERS:,} in {LINES} are translated here. "
            "`lightformers translate` takes whole files.",
            print_exception=False,
        )
    return text


class Guard:
    """Refuse requests that the page does not need: from other sites, long ones, files, and content that is not text.

    A site that the reader visits could send requests to this machine, whose answers the browser hides from it, or give
    itself the address of this machine, and read them. Its name then stands in `Host`, or in `Origin`. `local`: only
    this machine is served, under a name of `LOCAL`.
    """

    def __init__(self, app: ASGIApp, local: bool):
        self.app, self.local = app, local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with 4xx, or let the application do it."""
        messages, is_http = [], scope["type"] == "http"
        refused = self.refuse(scope) if is_http else None
        if is_http and scope["method"] == "POST" and not refused:
            content, more = b"", True
            while more and len(content) <= REQUEST_BYTES:
                messages.append(await receive())
                content += messages[-1].get("body", b"")
                more = messages[-1].get("more_body", False)
            refused = refuse_content(content, asks=scope["path"].rstrip("/").endswith(ASKING))

        async def read() -> Message:
            return messages.pop(0) if messages else await receive()

        await (PlainTextResponse(refused[1], refused[0]) if refused else self.app)(scope, read, send)

    def refuse(self, scope: Scope) -> tuple[int, str] | None:
        """Status and reason, from whom it comes and where it goes; or nothing."""
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.local and host.rpartition(":")[0] not in LOCAL and host not in LOCAL:
            return 403, f"this page is served to {LOCAL[0]} alone, not to {host!r}"
        if self.local and origin and origin.partition("://")[2] != host:
            return 403, "another site's request"
        taken = scope["method"] == "POST" and scope["path"].rstrip("/").endswith((*ASKING, *STOPPING))
        if not taken and scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            return 405, "only text to translate is taken here"
        return None


def refuse_content(content: bytes, *, asks: bool) -> tuple[int, str] | None:
    """Status and reason where a request is not short JSON, or `asks` for other things than a text; or nothing."""
    if len(content) > REQUEST_BYTES:
        return 413, f"a request has at most {REQUEST_BYTES} bytes"
    try:
        request = json.loads(content)
    except (ValueError, RecursionError):
        return 400, "not JSON"
    data = request.get("data") if isinstance(request, dict) else None
    if asks and not (isinstance(data, list) and len(data) == 1 and isinstance(data[0], str | None)):
        return 422, 'expected {"data": ["text"]}'
    return None


def read_form(name: str) -> tuple[str, str | None]:
    """Return engine and quantization of the model in a folder or under a Hub name."""
    if not is_export(name):
        return CHECKPOINTS, None
    written = read_json(Path(name) / EXPORT_FILE)
    return written["engine"], written["quantization"] or "float32"


def deploy_alike(
    teacher: str, light: str, folder: Path, source: str | None = None, target: str | None = None
) -> tuple[str, str]:
    """Both in one engine, so that their times compare: beside an export, a checkpoint is exported, too, into `folder`.

    If they cannot be equal, both keep their form; the page prints the form of each.
    """
    (first, rounding), (second, other) = read_form(teacher), read_form(light)
    if (first == CHECKPOINTS) == (second == CHECKPOINTS):
        return teacher, light
    checkpoint, engine, quantization = (teacher, second, other) if first == CHECKPOINTS else (light, first, rounding)
    exported = folder / Path(checkpoint).name
    try:
        export(checkpoint, exported, to=engine, quantization=quantization, source_lang=source, target_lang=target)
    except ValueError as error:
        gr.Warning(f"{checkpoint} stays as it is: {error}")
        return teacher, light
    return (str(exported), light) if first == CHECKPOINTS else (teacher, str(exported))


def build(
    teacher: str,
    light: str,
    *,
    source: str | None = None,
    target: str | None = None,
    num_beams: int | None = None,
    max_new_tokens: int | None = None,
) -> gr.Blocks:
    """The page, to be served with `serve`, or with `launch()` of its own.

    Args:
        teacher, light: folders or Hub names of sequence-to-sequence checkpoints, or exported folders.
            Both compute on the CPU; beside an export the other is exported for the same engine first.
        source, target: languages, as of `load_translator`. A multilingual teacher takes those of the light model, if
            the pair is set there.
        num_beams, max_new_tokens: for both; by default the smaller model's beams, and each model's longest output.

    Raises:
        FileNotFoundError, ValueError: a model that is not there or does not translate.
    """
    teacher, light = map(os.path.expanduser, (teacher, light))
    own = load_pretrained(AutoTokenizer, resolve_source(light))
    pair = [getattr(own, side, None) for side in ("src_lang", "tgt_lang")]
    pair = pair if all(pair) and not (source or target) else [source, target]
    with tempfile.TemporaryDirectory() as folder:
        paths = deploy_alike(teacher, light, Path(folder), *pair)
        first = Translator.load("teacher", paths[0], *pair, columns=True)
        models = [first, Translator.load("light", paths[1], source, target)]
    generation = {"num_beams": num_beams or models[1].engine.search.num_beams}
    generation |= {"max_new_tokens": max_new_tokens} if max_new_tokens else {}
    for model in WARM_UPS * models:  # the first sentences are slower than all others
        model("1 2 3 4 5 6 7 8 9 10 11 12", **generation)

    def both(text: str | None) -> Iterator[list[str]]:
        """Output and figures of the teacher, then also of the light model, anew with every line that is done."""
        text, deadline = check_text(text), time.monotonic() + SECONDS
        shown, speeds = [""] * 4, []
        for index, model in enumerate(models):
            tokens, seconds = 0, 0.0
            for done in model.translate_lines(text, **generation):
                if time.monotonic() > deadline:
                    raise gr.Error(f"Stopped after {SECONDS} seconds: give fewer lines.", print_exception=False)
                shown[2 * index], tokens, seconds = done
                yield shown
            speeds.append(tokens / seconds if tokens else 0)
            shown[2 * index + 1] = f"{tokens} tokens in {seconds:.3f} s" if tokens else ""
            if index and all(speeds):
                shown[-1] += f", {speeds[1] / speeds[0]:.1f}x the tokens/s"
            yield shown

    with gr.Blocks(title="Teacher and light model", analytics_enabled=False) as page:
        gr.Markdown("# Teacher and light model, side by side")
        text = gr.Textbox(
            label="Text",
            lines=3,
            autofocus=True,
            elem_id="text",
            info=f"Shift+Enter translates. Both search with {generation['num_beams']} beams, one line at a time.",
        )
        button = gr.Button("Translate", variant="primary", elem_id="translate")
        boxes = []
        with gr.Row():
            for role, model in zip(("teacher", "light"), models, strict=True):
                with gr.Column():
                    boxes.append(gr.Textbox(label=model.label, lines=3, interactive=False, elem_id=role))
                    boxes.append(gr.Textbox(label="tokens and time", interactive=False, elem_id=f"{role}-figures"))
        # One at a time, so that each time belongs to one sentence.
        gr.on([button.click, text.submit], both, text, boxes, concurrency_limit=1, api_name="translate")
    return page.queue(max_size=WAITING)


def check_address(host: str, port: int | None) -> None:
    """Raise `ValueError` unless a page can be served there; `None` is any port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port or 0))
        except OSError as error:
            where = f"host {host}" if port is None else f"host {host} and port {port}"
            raise ValueError(f"nothing can be served at {where} here ({error.strerror}): give others") from error


def serve(page: gr.Blocks, *, host: str | None = None, port: int | None = None, browser: bool = False) -> str:
    """Serve the page in threads of this process, and return its address. Raises `OSError` where the port is taken.

    By default, Gradio chooses: this machine alone, at the first free port from 7860.
    """
    options = {**QUIET, "theme": gr.themes.Default(**FONTS), "inbrowser": browser, "prevent_thread_lock": True}
    listens = host or os.environ.get("GRADIO_SERVER_NAME") or LOCAL[0]  # as Gradio itself chooses
    options["app_kwargs"] = {"middleware": [Middleware(Guard, local=listens in (*LOCAL, "::1"))]}
    return page.launch(server_name=host, server_port=port, **options)[1]


def wait(page: gr.Blocks) -> None:
    """Serve until this process is interrupted, and then end the server. Gradio's own wait returns at Ctrl-C."""
    try:
        threading.Event().wait()
    finally:
        page.close()


if __name__ == "__main__":
    space = build(os.environ["TEACHER"], os.environ["LIGHT"])
    serve(space)
    with suppress(KeyboardInterrupt):
        wait(space)
