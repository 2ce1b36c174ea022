"""The benchmark of conversions, on shapes small enough for a test."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import benchmark_conversion as script
import psutil
import pytest
import torch
from benchmark_conversion import TEACHERS, random_teacher, time_conversion
from tiny import marian_tokens, sizes
from transformers import AutoModelForSeq2SeqLM

from lightformers_hf.loading import unique_parameters

SMALL = sizes(16, max_position_embeddings=16) | marian_tokens(100)


@pytest.mark.parametrize(
    ("shapes", "parameters"),
    [("opus-mt", 73_886_208), ("bart-large", 406_291_456), ("nllb-600m", 615_073_792), ("flan-t5-base", 247_577_856)],
)
def test_shapes_are_those_of_the_checkpoints(shapes, parameters):
    with torch.device("meta"):
        assert unique_parameters(random_teacher(shapes)) == parameters


def test_times_every_step_of_a_conversion(monkeypatch, warm_python):
    monkeypatch.setitem(TEACHERS, "opus-mt", ("MarianMTModel", SMALL))
    result = time_conversion("opus-mt")
    assert list(result.steps) == ["making text", "calibrating", "weighting", "factorizing", "refitting", "balancing"]
    assert 0 < sum(wall for wall, _ in result.steps.values()) < result.total[0]
    assert 4 * 5_000 < result.checkpoint_bytes < 100_000
    assert result.peak_bytes > result.libraries_bytes > result.checkpoint_bytes
    table, memory = result.parts()
    assert (table.title, table.row_count) == ("opus-mt: convert with default options", 7)
    assert f"peak memory {result.peak_bytes / 1e6:,.0f} MB" in memory
    assert result.to_dict()["total"] == dict(zip(("wall", "cpu"), result.total, strict=True))
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(ValueError, match="the conversion of opus-mt failed"):
        time_conversion("opus-mt")


def test_unknown_shapes_are_refused():
    with pytest.raises(ValueError, match="expected one of opus-mt"):
        random_teacher("other")


@pytest.mark.usefixtures("warm_python")
def test_the_conversion_ends_with_the_benchmark(tiny_marian, tmp_path):
    """As by a container's end: its process does not work on."""
    program = f"""
import benchmark_conversion as script
from transformers import AutoModelForSeq2SeqLM
script.random_teacher = lambda _: AutoModelForSeq2SeqLM.from_pretrained({str(tiny_marian)!r})
script._CONVERT = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
script.subprocess.PIPE = None  # the output of its process is this one's
script.time_conversion("opus-mt")
"""
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        at_work = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    end = time.monotonic() + 20
    while psutil.pid_exists(at_work) and time.monotonic() < end:
        time.sleep(0.1)
    assert not psutil.pid_exists(at_work)


def test_the_script_prints_the_figures(run_script, monkeypatch, tiny_marian):
    monkeypatch.setattr(script, "random_teacher", lambda _: AutoModelForSeq2SeqLM.from_pretrained(tiny_marian))
    taken = "import sys; print('a bar', file=sys.stderr); print('[[[\"weighting\", 1, 1]], [2, 2], 3, 2]')"
    monkeypatch.setattr(script, "_CONVERT", taken)
    code, out, _ = run_script(script, "--json", "-")
    assert (code, json.loads(out)["steps"]) == (0, {"weighting": {"wall": 1, "cpu": 1}})
