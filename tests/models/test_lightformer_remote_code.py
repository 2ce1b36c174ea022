"""A stranger without this package loads a checkpoint from the code that lies beside its weights."""

import os
import subprocess
import sys

import pytest
import torch
from lightformer_cases import make_model

from lightformers_hf.models import (
    LightFormerForCausalLM,
    LightFormerForConditionalGeneration,
    LightFormerForSequenceClassification,
    LightFormerModel,
)

STRANGER = """
import sys

class Blocker:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "lightformers_hf":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocker)
import torch, transformers

for folder, auto_name in zip(sys.argv[1::2], sys.argv[2::2]):
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = getattr(transformers, auto_name).from_pretrained(folder, trust_remote_code=True).eval()
    assert "lightformers_hf" not in sys.modules
    assert type(model).__module__.startswith("transformers_modules")
    inputs = torch.load(f"{folder}/inputs.pt", weights_only=True)
    result = {"outputs": model(**inputs)[0].detach()}
    if model.can_generate():
        inputs.pop("decoder_input_ids", None)
        result["tokens"] = model.generate(**inputs, max_new_tokens=8, num_beams=2, no_repeat_ngram_size=1)
    torch.save(result, f"{folder}/result.pt")
    model.save_pretrained(f"{folder}/again")
"""
CLASSES = {
    LightFormerForConditionalGeneration: "AutoModelForSeq2SeqLM",
    LightFormerForCausalLM: "AutoModelForCausalLM",
    LightFormerForSequenceClassification: "AutoModelForSequenceClassification",
    LightFormerModel: "AutoModel",
}


def inputs_for(model) -> dict[str, torch.Tensor]:
    inputs = {"input_ids": torch.tensor([[5, 9, 11, 30]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    return inputs | ({"decoder_input_ids": torch.tensor([[2, 8]])} if model.config.is_encoder_decoder else {})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint of every head; a stranger has been to all of them."""
    root, arguments, folders = tmp_path_factory.mktemp("checkpoints"), [], {}
    for model_class, auto_name in CLASSES.items():
        model = make_model(model_class, "groups_private_norms")
        folders[model_class] = root / auto_name
        model.save_pretrained(folders[model_class])
        torch.save(inputs_for(model), folders[model_class] / "inputs.pt")
        arguments += [str(folders[model_class]), auto_name]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "HF_HOME": str(root / "home"),
        "HF_MODULES_CACHE": str(root / "modules"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", STRANGER, *arguments]
    run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return folders


@pytest.mark.parametrize("model_class", CLASSES, ids=lambda model_class: model_class.__name__)
@torch.no_grad()
def test_loading_without_the_package(model_class, folders):
    folder, model = folders[model_class], make_model(model_class, "groups_private_norms")
    inputs, result = inputs_for(model), torch.load(folders[model_class] / "result.pt", weights_only=True)
    torch.testing.assert_close(result["outputs"], model(**inputs)[0])
    if model.can_generate():
        inputs.pop("decoder_input_ids", None)
        tokens = model.generate(**inputs, max_new_tokens=8, num_beams=2, no_repeat_ngram_size=1)
        assert torch.equal(result["tokens"], tokens)
    code = {path.name for path in (folder / "again").glob("*.py")}
    assert code == {path.name for path in folder.glob("*.py")}
    assert {"modeling_lightformer.py", "configuration_lightformer.py", "low_rank.py"} < code
