"""Joint fit: nearer to the teacher on other text, equal bytes whatever the threads, kept only where it is better."""

import json
import sys
from itertools import product

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForSeq2SeqLM, MarianMTModel, MarianTokenizer

from lightformers_hf import StudyOptions, convert
from lightformers_hf.checkpoints.teacher import read
from lightformers_hf.conversion import calibration_text
from lightformers_hf.conversion import joint as module
from lightformers_hf.conversion.joint import fit_jointly
from lightformers_hf.processors import use_threads

WITHOUT = StudyOptions(joint=False)


@pytest.fixture(scope="module")
def without(tiny_marian, tmp_path_factory):
    """A folder with a conversion whose layers were fitted one after another only, and its report."""
    folder = tmp_path_factory.mktemp("joint") / "without"
    return folder, convert(tiny_marian, folder, ratio=4, study=WITHOUT, progress=False)


@pytest.fixture
def batch(tiny_marian, parallel_sentences):
    """The sentences that the teacher has seen, of different lengths."""
    tokenizer = MarianTokenizer.from_pretrained(tiny_marian)
    german, english = ([pair[side] for pair in parallel_sentences] for side in ("de", "en"))
    batch = dict(tokenizer(german, text_target=english, padding=True, return_tensors="pt"))
    start = torch.full((len(german), 1), tokenizer.pad_token_id)
    batch["decoder_input_ids"] = torch.cat([start, batch["labels"][:, :-1]], 1)
    batch["labels"] = batch["labels"].masked_fill(batch["labels"] == tokenizer.pad_token_id, -100)
    return batch


@torch.no_grad()
def divergence(student, teacher, batch):
    """By transformers' own teacher and PyTorch's own loss."""
    logits = [model(**batch).logits[batch["labels"] != -100].log_softmax(-1) for model in (student, teacher)]
    return F.kl_div(*logits, log_target=True, reduction="batchmean").item()


@pytest.mark.parametrize("many", [module.LARGE_VOCABULARY, 50])
def test_the_divergence_from_the_teacher_falls(tiny_marian, without, batch, many, monkeypatch):
    monkeypatch.setattr(module, "LARGE_VOCABULARY", many)  # 50: of a third of the positions
    monkeypatch.setattr(module, "TOKENS", 64)
    own, student = read(tiny_marian).model, AutoModelForSeq2SeqLM.from_pretrained(without[0])
    teacher = MarianMTModel.from_pretrained(tiny_marian).eval()
    norm = own.model.encoder.layers[0].final_layer_norm
    shared = torch.nn.Parameter(norm.weight.data)  # as of a conversion
    student.model.encoder.layers[0].final_layer_norm.weight = shared
    kept = {name: tensor.clone() for name, tensor in own.state_dict().items()}
    first = divergence(student, teacher, batch)
    before = fit_jointly(student, own, [batch], first, 0, passes=40)
    assert divergence(student, teacher, batch) < 0.9 * first
    assert all(torch.equal(tensor, kept[name]) for name, tensor in own.state_dict().items())
    for parameter, value in zip(module.layer_parameters(student), before, strict=True):
        parameter.data = value
    assert divergence(student, teacher, batch) == pytest.approx(first, abs=1e-6)


def test_weights_move_in_proportion_to_the_errors_of_a_model(tiny_marian, batch):
    teacher, moved = MarianMTModel.from_pretrained(tiny_marian).eval(), []
    for noise in (0.01, 0.1):
        student, generator = read(tiny_marian).model, torch.Generator().manual_seed(0)
        for parameter in module.layer_parameters(student):
            parameter.data += noise * parameter.data.std() * torch.randn(parameter.shape, generator=generator)
        nats = divergence(student, teacher, batch)
        before = fit_jointly(student, read(tiny_marian).model, [batch], nats, 0, passes=4)
        pairs = zip(module.layer_parameters(student), before, strict=True)
        moved.append(sum((parameter.data - value).square().sum().item() for parameter, value in pairs) ** 0.5)
    assert moved[1] / moved[0] == pytest.approx(10, rel=0.3)


def test_a_conversion_ends_with_it_and_its_bytes_do_not_depend_on_threads(tiny_marian, without, tmp_path):
    folder, report = without
    weights = []
    for threads in (1, 2):
        with use_threads(threads):
            fitted = convert(tiny_marian, tmp_path / str(threads), ratio=4, progress=False)
        weights.append((tmp_path / str(threads) / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert fitted.agreement.held_out
    assert fitted.agreement.divergence < report.agreement.divergence
    old, new = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "1"))
    changed = {name for name, tensor in old.items() if not torch.equal(tensor, new[name])}
    assert changed
    assert all(".layers." in name for name in changed)


@pytest.mark.parametrize("value", [99.0, float("nan")])
def test_values_that_come_no_nearer_are_not_kept(tiny_marian, without, tmp_path, monkeypatch, value):
    def spoil(student, *given):
        before = fit_jointly(student, *given)
        for parameter in module.layer_parameters(student):
            parameter.data.fill_(value)
        return before

    monkeypatch.setattr(sys.modules["lightformers_hf.conversion.convert"], "fit_jointly", spoil)
    folder, report = without
    assert convert(tiny_marian, tmp_path / "out", ratio=4, progress=False).agreement == report.agreement
    assert (tmp_path / "out/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("most", "passes", "expected"), [(1, 2, 18), (30, 2, 18 + 10), (10**6, 1, 18 + 70)])
def test_further_pairs_are_fitted_once_where_they_are_more(
    tiny_marian, tmp_path, parallel_sentences, monkeypatch, most, passes, expected
):
    ends = map("".join, product("ae", repeat=4))  # in tokens that the tokenizer has
    rows = [{"de": f"{pair['de']} {end}", "en": pair["en"]} for end in ends for pair in parallel_sentences]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, value in {"SAMPLES": 18, "MOST_TOKENS": 1, "FEWEST_SENTENCES": 10}.items():
        monkeypatch.setattr(calibration_text, name, value)
    monkeypatch.setattr(calibration_text, "mean_tokens", lambda *_: 1)
    monkeypatch.setattr(calibration_text, "MOST_FITTED", most)
    found = []

    def spy(student, teacher, batches, divergence, seed, passes):
        found.append((sum(len(batch["labels"]) for batch in batches), passes))
        return fit_jointly(student, teacher, batches, divergence, seed, passes)

    monkeypatch.setattr(sys.modules["lightformers_hf.conversion.convert"], "fit_jointly", spy)
    text = {"calibration": str(tmp_path / "pairs.jsonl"), "source_lang": "de", "target_lang": "en"}
    report = convert(tiny_marian, tmp_path / "out", ratio=4, progress=False, **text)
    assert found == [(expected, passes)]
    assert len(report.calibrated_on) == expected + 2  # held out
