"""Speed and memory: tokens are counted right, models take turns, threads come back. No test here looks at a clock."""

from unittest.mock import Mock

import pytest
import torch

from lightformers_hf.evaluation import speed
from lightformers_hf.evaluation.speed import (
    Speed,
    count_tokens,
    peak_memory,
    speed_ratio,
    tokens_per_second,
    translation_memory,
    typical_sentences,
)
from lightformers_hf.loading import load_model


@pytest.fixture(scope="module")
def loaded(tiny_marian):
    return load_model(tiny_marian)


@pytest.fixture(scope="module")
def german(parallel_sentences):
    return [pair["de"] for pair in parallel_sentences][:4]


def test_tokens_count_up_to_the_end_token():
    # Start token 9, end token 0, padding 9; then BART's: it starts with its end token 2 and pads with 1.
    assert count_tokens(torch.tensor([[9, 5, 6, 0, 9, 9], [9, 4, 4, 4, 4, 0]]), 0) == 3 + 5
    assert count_tokens(torch.tensor([[2, 0, 7, 2, 1, 1]]), 2) == 3
    assert count_tokens(torch.tensor([[9, 5, 6, 7]]), 0) == 3
    assert count_tokens(torch.tensor([[9, 5, 3, 7]]), [0, 3]) == 2
    assert count_tokens(torch.tensor([[9, 5, 0, 7]]), None) == 3


@pytest.mark.parametrize("num_beams", [1, 2])
def test_tokens_are_those_that_generate_gives(loaded, german, num_beams):
    model, tokenizer = loaded
    expected = 0
    for sentence in german:
        row = model.generate(**tokenizer(sentence, return_tensors="pt"), num_beams=num_beams, max_new_tokens=40)[0]
        expected += row.tolist()[1:].index(tokenizer.eos_token_id) + 1
    measured = tokens_per_second({"model": loaded}, german, runs=2, num_beams=num_beams, max_new_tokens=40)["model"]
    assert measured.tokens == expected
    assert len(measured.runs) == 2


def test_a_forced_length_is_reached_exactly(loaded, german):
    measured = tokens_per_second({"model": loaded}, german, runs=1, num_beams=1, forced_length=35)["model"]
    assert measured.tokens == 35 * len(german)


def test_one_thread_inside_and_all_of_them_back(loaded, german, monkeypatch):
    model, _ = loaded
    threads = []
    generate = model.generate
    monkeypatch.setattr(
        model, "generate", lambda **given: threads.append(torch.get_num_threads()) or generate(**given)
    )
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        tokens_per_second({"model": loaded}, german, runs=1, num_beams=1)
        assert set(threads) == {1}
        assert torch.get_num_threads() == 3
        monkeypatch.setattr(model, "generate", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tokens_per_second({"model": loaded}, german, runs=1, num_beams=1)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_models_take_turns_and_extremes_are_dropped(loaded, german, monkeypatch):
    other = (object.__new__(type(loaded[0])), loaded[1])
    other[0].__dict__ = dict(loaded[0].__dict__)
    names = {id(loaded[0]): "teacher", id(other[0]): "student"}
    turns = []
    # Seconds by run: the first run of a name is its warm-up; a run of the teacher takes 1 s but for two.
    seconds = {"teacher": iter([9, 1, 1, 1, 1, 100, 1, 1, 1, 1, 0.01]), "student": iter([9] + [0.5] * 10)}

    def timed(model, inputs, generation):
        turns.append(names[id(model)])
        return 100, next(seconds[turns[-1]])

    monkeypatch.setattr(speed, "_time_translation", timed)
    measured = tokens_per_second({"teacher": loaded, "student": other}, german, runs=10)
    assert turns[:2] == ["teacher", "student"]  # warm-up
    pairs = [tuple(turns[i : i + 2]) for i in range(2, len(turns), 2)]
    assert pairs == [("teacher", "student"), ("student", "teacher")] * 5
    assert measured["teacher"].tokens_per_second == pytest.approx(100)
    assert measured["student"].tokens_per_second == pytest.approx(200)
    assert speed_ratio(measured["student"], measured["teacher"]) == pytest.approx(2)


def test_the_ratio_pairs_runs():
    busy = Speed(0, [10, 5, 1], 0)  # the machine slows down, for both alike
    assert speed_ratio(Speed(0, [30, 15, 3], 0), busy) == 3


def test_typical_sentences_have_references_of_average_length(loaded):
    references = ["a dog"] * 3 + ["a dog " * 5] * 4 + ["a dog " * 9] * 3
    sources = [f"sentence {i}" for i in range(10)]
    assert typical_sentences(sources, references, loaded[1], count=4) == sources[3:7]
    assert typical_sentences(sources, references, loaded[1]) == sources


def test_nothing_to_measure(loaded):
    with pytest.raises(ValueError, match="speed of 0 sentences"):
        tokens_per_second({"model": loaded}, [])


def test_peak_memory_grows_with_what_is_allocated():
    before = peak_memory()
    block = torch.ones(before // 4 + 50_000_000)  # four bytes each: more than all memory in use so far
    grown = peak_memory() - before
    assert block.nbytes * 0.7 < grown < block.nbytes * 1.3


def test_memory_of_a_translation_does_not_depend_on_the_calling_process(tiny_marian):
    block = torch.ones(200_000_000)  # 800 MB
    peak, libraries = translation_memory(tiny_marian, ["Der Hund schläft."], num_beams=1, max_new_tokens=5)
    assert 20e6 < libraries < peak < peak_memory() - block.nbytes / 2


def test_a_measurement_that_fails_says_so(tiny_marian, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(ValueError, match="could not be measured in a process of its own"):
        translation_memory(tiny_marian, ["Der Hund schläft."])
