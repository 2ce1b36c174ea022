"""Damaged files and wild options end in a message; `fuzz.py` tries more of them, and others."""

import os

import pytest

pytest.importorskip("fcntl", reason="processes are forked")
from fuzz import Fuzzer
from fuzz_inputs import OPTIONS_OF, Case

from lightformers_hf.cli import app

NUMBER = int(os.environ.get("LIGHTFORMERS_FUZZ", "42"))
KINDS = ("configuration", "generation", "other files", "index", "header", "data", "options")


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory):
    """It, with a folder and processes of its own."""
    before = dict(os.environ)
    made = Fuzzer(tmp_path_factory.mktemp("fuzz"))
    yield made
    made.worker.end()
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_escapes(fuzzer, kind):
    fuzzer.found.clear()
    fuzzer.run(kind, max(NUMBER // len(KINDS), 1), start=0)
    assert not fuzzer.found
    assert fuzzer.counts[kind] > 0


def test_all_kinds_are_tried(fuzzer):
    assert fuzzer.kinds.keys() == set(KINDS)
    assert OPTIONS_OF.keys() <= app.commands.keys()


def test_what_is_wrong_is_found(fuzzer, monkeypatch):
    """Of commands that work, end in a message, raise, crash and do not end."""
    import fuzz

    assert fuzzer.worker.run(Case({}, ["plan", "dense", "--rank", "2", "--method", "paper"])) is None
    assert fuzzer.worker.run(Case({"dense/config.json": b"["}, ["plan", "dense"])) is None
    fuzzer.worker.end()
    monkeypatch.setattr(fuzz, "LIMIT", 1)
    monkeypatch.setattr(fuzz, "LONGEST_WAIT", 2)
    ends = {
        "raise": lambda: {}["x"],
        "crash": lambda: os.kill(os.getpid(), 9),
        "wait": lambda: __import__("time").sleep(9),
    }
    monkeypatch.setattr(fuzz, "run_command", lambda words: (ends[words[0]](), ""))
    for word, said in (("crash", "crash: "), ("wait", "no end"), ("raise", "crash: ")):
        assert said in fuzzer.worker.run(Case({}, [word]))
    fuzzer.worker.end()
