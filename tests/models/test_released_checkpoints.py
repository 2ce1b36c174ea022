"""Checkpoints that version 0.1.0 wrote (commit b0f2a09) load, and give the logits that version 0.1.0 gave.

The checkpoint with the layers of T5 is of a later commit (f7ad191), because version 0.1.0 had no such layers.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers
from models.strangers import AUTO
from safetensors.torch import load_file

FOLDERS = sorted((Path(__file__).parent / "checkpoints_0.1").iterdir())
UNSTORED = {"transformers_version", "group_residual_rank"}  # the latter is null, and has been removed


@pytest.mark.quick
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
@torch.no_grad()
def test_checkpoints_of_version_0_1_compute_the_same(folder, tmp_path):
    model_class = getattr(transformers, AUTO[folder.name.rpartition("-")[2]])
    model, loading = model_class.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    inputs = load_file(folder / "expected.safetensors")
    expected = inputs.pop("logits")
    torch.testing.assert_close(model(**inputs).logits, expected, atol=1e-5, rtol=0)

    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    before, after = (json.loads((where / "config.json").read_text()) for where in (folder, tmp_path))
    assert before.keys() - UNSTORED <= after.keys()
    del after["transformers_version"]
    assert {
        name: value for name, value in before.items() if after.get(name, value) != value and value is not None
    } == {}
