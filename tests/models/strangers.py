"""What tests of loading without this package share."""

import os
import subprocess
import sys
from pathlib import Path

import torch

# The beginning of a program that cannot import the package, however it is installed.
BLOCKER = """
import sys

class Blocker:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "lightformers_hf":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocker)
import torch, transformers
"""
AUTO = {
    "ConditionalGeneration": "AutoModelForSeq2SeqLM",
    "CausalLM": "AutoModelForCausalLM",
    "Model": "AutoModel",
    "SequenceClassification": "AutoModelForSequenceClassification",
}


def inputs_for(model) -> dict[str, torch.Tensor]:
    """A short batch for a forward pass."""
    inputs = {"input_ids": torch.tensor([[5, 9, 11, 30]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    return inputs | ({"decoder_input_ids": torch.tensor([[2, 8]])} if model.config.is_encoder_decoder else {})


def run_apart(program: str, *arguments, folder: Path, **variables: str) -> str:
    """All that a program prints in a process of its own, which has no settings of this machine, in a folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHONPATH"))}
    environment |= {"HF_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"} | variables
    run = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], env=environment, cwd=folder, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout + run.stderr
