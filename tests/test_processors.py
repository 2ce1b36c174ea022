"""Threads on cores that other programs leave."""

import time

import pytest
import torch

from lightformers_hf import convert, processors
from lightformers_hf.processors import IdleThreads

pytestmark = pytest.mark.quick


@pytest.fixture
def machine(monkeypatch):
    """Four cores of which `busy` are at work for others, and a PyTorch that may use three."""
    before, state = torch.get_num_threads(), {"busy": 0.0, "now": 0.0}

    def clocks():
        state["now"] += 1.0
        return state["now"], state["now"] * state["busy"], 0.0

    monkeypatch.setattr(processors, "_clocks", clocks)
    monkeypatch.setattr(processors.psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    torch.set_num_threads(3)
    yield state
    torch.set_num_threads(before)


@pytest.mark.parametrize(("busy", "left"), [(0, 3), (1, 3), (2.1, 2), (3, 1), (4, 1)])
def test_as_many_as_others_leave_and_as_are_allowed(machine, busy, left):
    machine["busy"] = busy
    with IdleThreads() as threads:
        assert torch.get_num_threads() == left
        machine["busy"], machine["now"] = 0, 0
        threads.seen = (0.0, 0.0, 0.0)
        threads.adapt()
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == 3


def test_one_thread_needs_no_look(machine, monkeypatch):
    monkeypatch.setattr(processors, "_clocks", None)
    torch.set_num_threads(1)
    with IdleThreads() as threads:
        threads.adapt()
        assert torch.get_num_threads() == 1


def test_conversions_leave_busy_cores_alone(machine, tiny_marian, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "lightformers_hf.conversion.convert.compress", lambda *_, **__: seen.append(torch.get_num_threads()) or 1 / 0
    )
    machine["busy"] = 4
    with pytest.raises(ZeroDivisionError):
        convert(tiny_marian, tmp_path / "out", rank=2)
    assert seen == [1]
    assert torch.get_num_threads() == 3
