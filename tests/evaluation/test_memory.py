"""Memory of a process of its own."""

import pytest
import torch

from lightformers_hf.evaluation.speed import peak_memory, translation_memory


def test_peak_memory_grows_with_what_is_allocated():
    before = peak_memory()
    block = torch.ones(before // 4 + 50_000_000)  # four bytes each: more than all memory in use so far
    grown = peak_memory() - before
    assert block.nbytes * 0.7 < grown < block.nbytes * 1.3


def test_memory_of_a_translation_does_not_depend_on_the_calling_process(tiny_marian):
    block = torch.ones(200_000_000)  # 800 MB
    peak, libraries = translation_memory(tiny_marian, ["Der Hund schläft."], num_beams=1, max_new_tokens=5)
    assert 20e6 < libraries < peak < peak_memory() - block.nbytes / 2


def test_files_where_the_user_is_are_no_modules(tiny_marian, tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise ImportError('not that one')")
    monkeypatch.chdir(tmp_path)
    peak, libraries = translation_memory(tiny_marian, ["Der Hund schläft."], num_beams=1, max_new_tokens=5)
    assert libraries < peak


def test_a_measurement_that_fails_says_so(tiny_marian, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(ValueError, match="could not be measured in a process of its own"):
        translation_memory(tiny_marian, ["Der Hund schläft."])
