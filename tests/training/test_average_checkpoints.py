"""Means of checkpoints against means of their tensors; the choice of checkpoints; what is copied, what is refused."""

import json
import shutil

import average_checkpoints as script
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import sizes
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import lightformers_hf
from lightformers_hf import LightFormerConfig, LightFormerForConditionalGeneration
from lightformers_hf.files import MANIFEST_FILE

BLEU = {10: 20.0, 20: 30.0, 30: 25.0, 40: 10.0}


@pytest.fixture
def run(tmp_path, tiny_marian):
    """A run of four checkpoints whose weights are the teacher's plus noise, and one that a kill cut off."""
    generator = torch.Generator().manual_seed(0)
    history = []
    for step, bleu in BLEU.items():
        folder = tmp_path / "run" / f"checkpoint-{step}"
        shutil.copytree(tiny_marian, folder)
        tensors = load_file(folder / "model.safetensors")
        noisy = {name: t + 0.1 * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}
        save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
        history.append({"step": step, "eval_bleu": bleu, "eval_loss": 1 / bleu})
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
        for name in ("optimizer.pt", "rng_state_0.pth", "training_args.bin"):
            (folder / name).write_bytes(b"state")
    torn = tmp_path / "run" / "checkpoint-50"
    shutil.copytree(folder, torn)
    (torn / "trainer_state.json").write_text('{"log_his')
    return tmp_path / "run"


def weights(run, *steps):
    return [load_file(run / f"checkpoint-{step}" / "model.safetensors") for step in steps]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (["--last", "3"], (20, 30, 40)),
        (["--best", "2", "--metric", "bleu"], (20, 30)),
        (["--best", "2", "--metric", "eval_loss"], (20, 30)),
    ],
)
def test_mean_of_a_run(run, tmp_path, options, steps):
    script.main([str(run), *options, "--output", str(tmp_path / "mean")])
    mean = load_file(tmp_path / "mean" / "model.safetensors")
    parts = weights(run, *steps)
    assert mean.keys() == parts[0].keys()
    for name, tensor in mean.items():
        expected = torch.stack([part[name].double() for part in parts]).mean(dim=0)
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-6)
    left_out = ("optimizer.pt", "rng_state_0.pth", "training_args.bin", "trainer_state.json")
    copied = {path.name for path in (tmp_path / "mean").iterdir() if path.name != MANIFEST_FILE}
    assert copied == {path.name for path in (run / "checkpoint-40").iterdir()} - set(left_out)
    AutoTokenizer.from_pretrained(tmp_path / "mean")
    _, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "mean", output_loading_info=True)
    assert not info["missing_keys"]


def test_half_precision_is_summed_in_fp32_and_stored_as_it_was(tmp_path):
    torch.manual_seed(0)
    values = torch.randn(8, 40, 3).to(torch.bfloat16)
    for i, value in enumerate(values):
        folder = tmp_path / f"{i}"
        folder.mkdir()
        save_file({"w": value, "count": torch.tensor([7])}, folder / "model.safetensors")
    mean = script.mean_of([tmp_path / f"{i}" for i in range(8)])
    assert torch.equal(mean["w"], values.double().mean(dim=0).to(torch.bfloat16))
    assert torch.equal(mean["count"], torch.tensor([7]))


def test_shared_tensors_stay_shared(tmp_path):
    config = LightFormerConfig(**sizes(16, layers=2, ffn=16), vocab_size=50, encoder_groups=1, embedding_rank=4)
    for seed in range(2):
        torch.manual_seed(seed)
        LightFormerForConditionalGeneration(config).save_pretrained(tmp_path / f"{seed}")
    script.main([str(tmp_path / "0"), str(tmp_path / "1"), "--output", str(tmp_path / "mean")])
    parts = [AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name).state_dict() for name in ("0", "1", "mean")]
    for name, tensor in parts[2].items():
        torch.testing.assert_close(tensor, (parts[0][name] + parts[1][name]) / 2)
    assert len({(tmp_path / name / "model.safetensors").stat().st_size for name in ("0", "mean")}) == 1
    assert lightformers_hf.LightFormerConfig.from_pretrained(tmp_path / "mean").encoder_groups == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["RUN", "--last", "5"], "has 4 complete checkpoints:"),
        (["RUN", "--best", "1", "--metric", "rouge"], "has no score eval_rouge: it was evaluated by bleu, loss"),
        (["RUN", "RUN", "--last", "1"], "of 2 folders"),
        (["RUN/none", "--last", "1"], "No run"),
        (["RUN/checkpoint-99"], "No checkpoint"),
        (["RUN"], "alone: give --last or --best"),
        (["RUN", "RUN/checkpoint-10"], "holds no weights"),
        (["RUN", "--last", "2", "--output", "RUN"], "which is read"),
        (["RUN/checkpoint-10", "RUN/checkpoint-20", "--output", "RUN/checkpoint-20", "--overwrite"], "which is read"),
    ],
)
def test_what_cannot_be_averaged(run, tmp_path, options, message):
    before = sorted(tmp_path.rglob("*"))
    options = [option.replace("RUN", str(run)) for option in options]
    with pytest.raises((ValueError, OSError), match=message):
        script.main([*(["--output", str(tmp_path / "mean")] if "--output" not in options else []), *options])
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("change", ["shape", "name", "dtype"])
def test_other_models_are_refused(run, tmp_path, change):
    path = run / "checkpoint-20" / "model.safetensors"
    tensors = load_file(path)
    tensor = tensors.pop("model.shared.weight")
    other = {"shape": tensor[:-1].clone(), "dtype": tensor.half()}.get(change, tensor)
    save_file(tensors | {"model.table" if change == "name" else "model.shared.weight": other}, path)
    with pytest.raises(ValueError, match="other models"):
        script.main([str(run), "--last", "3", "--output", str(tmp_path / "mean")])
    assert not (tmp_path / "mean").exists()
