"""What an installation without extras must do, in a process of its own: import, convert, load, translate.

`python minimal.py` needs only the package; it makes its checkpoint itself, in a folder that it removes.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForSeq2SeqLM, MarianConfig, MarianMTModel

import lightformers_hf


def make_teacher(folder: Path) -> MarianMTModel:
    """Write a Marian model of random weights (d_model 32, 2+2 layers), without tokenizer."""
    torch.manual_seed(0)
    sizes = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    tokens = {"vocab_size": 60, "pad_token_id": 59, "eos_token_id": 0, "decoder_start_token_id": 59}
    config = MarianConfig(
        d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=16, **sizes, **tokens
    )
    model = MarianMTModel(config).eval()
    model.save_pretrained(folder)
    return model


def main() -> None:
    """Raise where something that an installation without extras promises does not hold."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        teacher = make_teacher(folder / "teacher")
        command = [sys.executable, "-m", "lightformers_hf", "convert", "teacher", "light", "--ratio", "2"]
        command += ["--calibration-samples", "8"]
        subprocess.run(command, cwd=folder, check=True)
        light = AutoModelForSeq2SeqLM.from_pretrained(folder / "light")
        if not light.num_parameters() < teacher.num_parameters():
            raise AssertionError(f"{light.num_parameters()} parameters, no fewer than {teacher.num_parameters()}")
        light.generate(torch.tensor([[3, 4, 5, 0]]), max_new_tokens=5)
    where = Path(lightformers_hf.__file__).parent
    print(f"lightformers_hf {lightformers_hf.__version__} in {where}: imports, converts, loads")


if __name__ == "__main__":
    main()
