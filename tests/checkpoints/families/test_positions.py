"""Stored tables of positions are used, equal to what is computed in their place, or refused."""

import pytest
import torch
from conversion.teachers import batch, make_teacher
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from lightformers_hf import convert
from lightformers_hf.checkpoints.families.marian import Marian

DENSE = {"pattern": {".*": "dense"}, "progress": False}
TRAINED, COMPUTED = "trained", "computed"


def store(folder, model, tables, leaf="weight"):
    """Save with tables of positions: `trained` is random, `computed` the one that the class computes."""
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if "embed_positions" not in name}
    for stack, kind in tables.items():
        positions = getattr(model.model, stack).embed_positions
        table = positions.weights if hasattr(positions, "weights") else positions.weight
        table = torch.randn_like(table) if kind == TRAINED else table.detach().clone()
        tensors[f"model.{stack}.embed_positions.{leaf}"] = table.to(model.dtype)
    save_file(tensors, file, {"format": "pt"})


def logits(model):
    with torch.no_grad():
        return model(**batch(model)).logits


@pytest.mark.parametrize("family", ["marian", "pegasus"])
@pytest.mark.parametrize("tables", [{"encoder": TRAINED, "decoder": TRAINED}, {"encoder": TRAINED}])
def test_trained_positions_are_kept(family, tables, tmp_path):
    store(tmp_path / "teacher", make_teacher(family, tmp_path / "teacher"), tables)
    teacher = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "teacher").eval()
    convert(tmp_path / "teacher", tmp_path / "light", **DENSE)
    light = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "light").eval()
    torch.testing.assert_close(logits(light), logits(teacher), atol=1e-4, rtol=0)


def test_trained_positions_of_a_loaded_model_are_kept(tiny_marian):
    """Although transformers does not save them."""
    teacher = AutoModelForSeq2SeqLM.from_pretrained(tiny_marian).eval()
    torch.nn.init.normal_(teacher.model.encoder.embed_positions.weight)
    light = convert(teacher, tokenizer=AutoTokenizer.from_pretrained(tiny_marian), **DENSE).eval()
    torch.testing.assert_close(logits(light), logits(teacher), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("family", "leaf"), [("marian", "weight"), ("pegasus", "weight"), ("m2m_100", "weights")])
def test_stored_sinusoids_are_left_out(family, leaf, dtype, tmp_path):
    model = make_teacher(family, tmp_path / "teacher").to(dtype)
    store(tmp_path / "teacher", model, dict.fromkeys(("encoder", "decoder"), COMPUTED), leaf)
    convert(tmp_path / "teacher", tmp_path / "light", **DENSE)
    assert not any("positions" in name for name in load_file(tmp_path / "light" / "model.safetensors"))


def test_a_table_that_the_source_does_not_read_either_is_refused(tmp_path):
    model = make_teacher("m2m_100", tmp_path / "teacher")
    store(tmp_path / "teacher", model, {"encoder": COMPUTED, "decoder": TRAINED}, leaf="weights")
    with pytest.raises(ValueError, match=r"model.decoder.embed_positions.weights of .* are not the sinusoids"):
        convert(tmp_path / "teacher", tmp_path / "light", **DENSE)
    assert not (tmp_path / "light").exists()


@pytest.mark.parametrize("options", [DENSE, {"ratio": 2, "method": "paper", "progress": False}])
def test_a_checkpoint_that_is_read_wrongly_is_refused(options, tmp_path, monkeypatch):
    """As one that a later version of transformers computes in another way."""
    make_teacher("marian", tmp_path / "teacher")
    monkeypatch.setattr(Marian, "fields", {"norm_epsilon": 0.1})
    with pytest.raises(ValueError, match="MarianMTModel of transformers gives other logits"):
        convert(tmp_path / "teacher", tmp_path / "light", **options)
    assert not (tmp_path / "light").exists()
