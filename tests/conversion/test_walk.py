"""What is kept of sample text on its way through a stack."""

import json

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from lightformers_hf import StudyOptions, convert
from lightformers_hf.conversion import refit, walk
from lightformers_hf.conversion.walk import ENCODED, Walk


@pytest.mark.parametrize("room", [0, 2000, 10**6])
def test_what_layers_are_called_with_is_kept_while_there_is_room(
    tiny_marian, parallel_sentences, tmp_path, monkeypatch, room
):
    """Masks of no batch, of some, and of all, for the same model; the encoder's states are never among them."""
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in parallel_sentences))
    monkeypatch.setattr(refit, "TOKENS", 80)
    walks, start = [], Walk.__init__

    def see(self, *args):
        start(self, *args)
        walks.append(self)

    monkeypatch.setattr(Walk, "__init__", see)
    states, options = [], {"calibration": str(tmp_path / "pairs.jsonl"), "source_lang": "de", "target_lang": "en"}
    for folder, size in (("some", room), ("none", 0)):
        monkeypatch.setattr(walk, "ROOM", size)
        study = StudyOptions(refit=True)
        convert(tiny_marian, tmp_path / folder, pattern={".*": 6}, study=study, progress=False, **options)
        states.append(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / folder).state_dict())
    torch.testing.assert_close(*states, rtol=0, atol=0)
    assert [one.name for one in walks[:4]] == ["encoder", "encoder", "decoder", "decoder"]
    for one in walks[:4]:
        assert len(one.batches) > 1
        tensors = [part for args, _ in one._kept.values() for part in args if isinstance(part, torch.Tensor)]
        assert sum(part.nbytes for part in tensors) <= room
        assert all(part.dim() == 4 for part in tensors)  # masks
        assert all(args[1] is ENCODED for args, _ in one._kept.values() if one.name == "decoder")
        assert len(one._kept) == len(one.batches) or room < 10**6
    assert any(len(one._kept) < len(one.batches) for one in walks[:4]) == (room < 10**6)
