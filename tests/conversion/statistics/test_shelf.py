"""Tensors put aside come back as they were."""

import os

import pytest
import torch

from lightformers_hf.conversion.statistics.moments import Moments
from lightformers_hf.conversion.statistics.shelf import Shelf
from lightformers_hf.conversion.workers import map_in_order
from lightformers_hf.processors import use_threads


def test_a_shelf_gives_back_what_it_got():
    """Whether it is in memory or in the file, after changes of values and of sizes."""
    shelf = Shelf(room=100)
    tensors = {key: torch.randn(key + 1, 3) for key in range(8)}
    tensors["mask"] = torch.ones(300, dtype=torch.bool)
    for key, tensor in tensors.items():
        shelf[key] = tensor
    for key in (0, 3, 5):
        tensors[key] = torch.randn(tensors[key].shape).T
        shelf[key] = tensors[key]
    tensors[4] = torch.arange(1000)
    shelf[4] = tensors[4]
    for key, tensor in tensors.items():
        assert key in shelf
        assert torch.equal(shelf[key], tensor)
        assert shelf[key].dtype == tensor.dtype
    assert "other" not in shelf
    assert shelf.room < 100
    for key in tensors:
        del shelf[key]
        assert key not in shelf
    assert shelf.room == 100


@pytest.mark.parametrize("room", [0, 100, 10**9])
def test_tensors_that_are_changed_in_turn_are_kept_apart(room):
    """In memory or in the file, with sizes and types of their own; what was read before stays as it was."""
    shelf, expected = Shelf(room=room), {}
    for turn in range(3):
        for key, dtype in ((3, torch.float32), (40, torch.float64), (7, torch.int64)):
            with shelf.changing(key, lambda key=key, dtype=dtype: torch.zeros(key, dtype=dtype)) as tensor:
                tensor += turn * key + 1
            expected[key] = expected.get(key, torch.zeros(key, dtype=dtype)) + turn * key + 1
        if turn == 1:
            shelf.settle()
            seen = shelf[40].clone() if room > 100 else shelf[40]
            before = seen.clone()
    for key, tensor in expected.items():
        assert torch.equal(shelf[key], tensor)
        assert shelf[key].dtype == tensor.dtype
    assert torch.equal(seen, before)
    with pytest.raises(ZeroDivisionError), shelf.changing(3, lambda: torch.zeros(3)):
        1 / 0  # noqa: B018, whatever fails inside
    assert torch.equal(shelf[3], expected[3])


def test_sums_do_not_depend_on_where_they_are_kept():
    rows = [torch.randn(20, 700) for _ in range(3)]
    for room in (0, 10**9):
        moments = Moments("fc1", Shelf(room=room))
        for some in rows:
            moments.add_inputs(some, torch.ones(len(some)))
        together = torch.cat(rows)
        torch.testing.assert_close(moments.inputs.float(), together.T @ together, atol=1e-4, rtol=1e-4)
        moments.inputs = torch.diag(torch.arange(700.0))
        assert torch.equal(moments.inputs.float(), torch.diag(torch.arange(700.0)))
        moments.forget("inputs")
        assert moments.finite("inputs")
        moments.add_inputs(torch.ones(1, 700), torch.ones(1))
        assert torch.equal(moments.inputs.float(), torch.ones(700, 700))


@pytest.mark.parametrize("system", ["at once", "in turn"])
def test_threads_at_once_find_what_they_put_aside(system, monkeypatch):
    """In a file, where each also changes what it has there, whether the system can or not (Windows)."""
    if system == "in turn":
        monkeypatch.delattr(os, "pwrite")
        monkeypatch.delattr(os, "preadv")
    shelf = Shelf(room=0)

    def work(number):
        for again in range(3):
            shelf[number] = torch.full((50_000,), float(number + again))
            with shelf.changing(number, lambda: None) as tensor:
                tensor += 100
            assert shelf[number].unique().tolist() == [number + again + 100]
        return number

    with use_threads(4):
        assert list(map_in_order(work, range(40), torch.device("cpu"))) == list(range(40))
    assert [shelf[number][0].item() for number in range(40)] == [number + 102 for number in range(40)]
