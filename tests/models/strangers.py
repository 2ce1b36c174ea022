"""What tests of loading without this package share."""

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
