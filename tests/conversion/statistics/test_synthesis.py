"""What a teacher makes of texts, several batches at once."""

import threading

import pytest
import torch

from lightformers_hf.conversion.statistics import synthesis
from lightformers_hf.conversion.statistics.synthesis import synthetic_batches, translated_batches
from lightformers_hf.conversion.teacher import Teacher
from lightformers_hf.processors import use_threads


@pytest.mark.parametrize("own", [True, False])
def test_batches_at_once_are_those_of_one_after_another(tiny_marian, parallel_sentences, own, monkeypatch):
    """And no two threads use one tokenizer, which fast ones refuse."""
    teacher, readers, makers = Teacher(tiny_marian, "tiny"), set(), set()
    model, tokenizer = teacher.load(), teacher.tokenizer()
    generate = model.generate

    class Watched(type(tokenizer)):
        def __call__(self, *args, **options):
            readers.add(threading.get_ident())
            return super().__call__(*args, **options)

    def make(*args, **options):
        makers.add(threading.get_ident())
        return generate(*args, **options)

    tokenizer.__class__ = Watched
    monkeypatch.setattr(synthesis, "BATCH", 4)
    monkeypatch.setattr(teacher, "tokenizer", lambda: tokenizer)
    monkeypatch.setattr(model, "generate", make)
    texts = [pair["de"] for pair in parallel_sentences] * 2
    found = []
    for threads in (1, 2):
        with use_threads(1):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            if own:
                found.append(synthetic_batches(model, teacher, 20, 0, progress=False))
            else:
                found.append(translated_batches(model, teacher, texts, progress=False))
    alone, beside = found
    assert len(alone) == 5
    for one, other in zip(alone, beside, strict=True):
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert readers == {threading.get_ident()}
    assert len(makers) > 1
