"""What several tests of engines share."""

import os
import shutil
import subprocess

import pytest

from lightformers_hf.engines.web import TRANSFORMERS_JS


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
