"""A teacher of the larger vocabulary wherever one is named: training, evaluation, report, and the page of compare."""

import json
import math
import runpy
import sys
from pathlib import Path

import pytest
import torch
from conftest import ENGLISH, GERMAN
from training.scripts import command, losses

from lightformers_hf import convert
from lightformers_hf.evaluation.evaluate import evaluate
from lightformers_hf.evaluation.page import report_page
from lightformers_hf.loading import load_model
from lightformers_hf.recovery import training_loss
from lightformers_hf.vocabularies import keep_tokens, match_tokens

SCRIPT = Path(__file__).parents[1] / "training" / "run_translation.py"


@pytest.fixture(scope="module")
def trimmed(tiny_marian, tmp_path_factory):
    """(folder of a trimmed and compressed model, text)."""
    folder = tmp_path_factory.mktemp("trimmed")
    data = folder / "text.jsonl"
    pairs = [{"source": german, "target": english} for german, english in zip(GERMAN, ENGLISH, strict=True)]
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs[:5]))
    convert(tiny_marian, folder / "light", vocabulary=str(data), ratio=1.5, method="paper", progress=False)
    return folder / "light", data


def test_the_loss_is_that_of_the_kept_tokens_renormalized(trimmed, tiny_marian):
    light, tokenizer = load_model(trimmed[0])
    teacher, theirs = load_model(tiny_marian)
    matched = match_tokens(tokenizer, theirs)
    order = torch.tensor(matched["target"])
    inputs = tokenizer(GERMAN[0], return_tensors="pt")
    labels = torch.tensor([tokenizer(text_target=ENGLISH[0])["input_ids"]])
    student = light(**inputs, decoder_input_ids=labels).logits[0]
    old = {"input_ids": order[inputs["input_ids"]], "decoder_input_ids": order[labels]}
    p = torch.softmax(teacher(**old).logits[0][:, order].double(), dim=-1)
    q = torch.softmax(student.double(), dim=-1)
    expected = float((p * (p / q).log()).sum())
    keep_tokens(teacher, **matched)
    theirs_now = teacher(**inputs, decoder_input_ids=labels).logits[0]
    loss = training_loss(student, torch.zeros(len(student), dtype=torch.long), theirs_now, alpha=1.0)
    assert math.isclose(float(loss), expected, rel_tol=1e-4)


def test_training_evaluation_and_report_know_it(trimmed, tiny_marian, tmp_path, monkeypatch):
    light, data = trimmed
    options = {
        "model_name_or_path": light, "teacher": tiny_marian, "train_file": data, "source_lang": "source",
        "target_lang": "target", "output_dir": tmp_path / "out", "max_source_length": 60, "max_target_length": 60,
        "max_tokens": 200, "max_steps": 12, "learning_rate": 3e-3, "logging_steps": 1, "use_cpu": True,
        "disable_tqdm": True, "distillation_alpha": 1.0, "hidden_weight": 1.0, "lr_scheduler_type": "constant",
    }  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["run_translation.py", *command(options)])
    monkeypatch.syspath_prepend(SCRIPT.parent)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    found = losses(tmp_path / "out")
    assert found[-1] < found[0]
    names = {"source": "source", "target": "target"}
    result = evaluate(
        tmp_path / "out", data=data, teacher=tiny_marian, speed=False, source_lang="source", target_lang="target"
    )
    assert result.teacher.scores["bleu"] > 50  # it has all its tokens
    page = report_page(str(light), teacher=str(tiny_marian), data=str(data), samples=2, **names)
    assert "Sample translations" in page
