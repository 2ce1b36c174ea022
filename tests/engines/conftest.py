"""What several tests of engines share."""

import functools
import http.server
import os
import shutil
import subprocess
import threading

import pytest

from lightformers_hf.engines.web import TRANSFORMERS_JS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = ["--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]


@pytest.fixture(scope="session")
def node(tmp_path_factory):
    """A folder with transformers.js of the npm registry."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("node")
    environment = os.environ | {"ONNXRUNTIME_NODE_INSTALL": "skip"}
    package = f"@huggingface/transformers@{TRANSFORMERS_JS}"
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", package]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"npm cannot install {package}: {done.stderr[-200:]}")
    return folder


@pytest.fixture
def serve():
    """A web server for a folder, with headers of its own; a call that ends all."""
    servers = []

    def start(folder, **headers):
        class Handler(http.server.SimpleHTTPRequestHandler):
            def end_headers(self):
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                super().end_headers()

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder))
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


@pytest.fixture(scope="module")  # no longer: while it runs, nobody else can start an event loop
def chromium():
    """A browser, whose microphone beeps."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()
