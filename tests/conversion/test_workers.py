"""Devices, worker threads and processes: the result of one process on one CPU."""

import threading

import pytest
import torch

from lightformers_hf.conversion.workers import in_workers


def test_workers_give_every_result_and_hold_few_items():
    threads = torch.get_num_threads()
    lock, live, most = threading.Lock(), 0, 0

    def items():
        nonlocal live, most
        for index in range(20):
            with lock:
                live += 1
                most = max(most, live)
            yield index

    def work(index):
        nonlocal live
        used = torch.get_num_threads()
        with lock:
            live -= 1
        return index, used

    results = list(in_workers(work, items(), workers=3))
    assert sorted(index for index, _ in results) == list(range(20))
    assert {used for _, used in results} == {1}
    assert most <= 3
    assert torch.get_num_threads() == threads


def test_an_error_in_a_worker_is_raised():
    def work(index):
        if index == 3:
            raise ValueError("matrix 3")
        return index

    with pytest.raises(ValueError, match="matrix 3"):
        list(in_workers(work, range(10), workers=2))
