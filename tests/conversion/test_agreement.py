"""How often a compressed model predicts its teacher's token, and what a teacher that is sure of its text keeps."""

import json
import random
import shutil
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conversion.reports import matrix, report_of
from tiny import sizes, word_tokenizer
from transformers import AutoModelForSeq2SeqLM, BartConfig, BartForConditionalGeneration

from lightformers_hf import StudyOptions, convert, plan
from lightformers_hf.checkpoints.teacher import read
from lightformers_hf.conversion import refit
from lightformers_hf.conversion import sensitivity as calibration
from lightformers_hf.conversion.calibration_text import greedy_outputs, hold_out
from lightformers_hf.conversion.card import model_card
from lightformers_hf.conversion.convert import nearest
from lightformers_hf.conversion.refit import compare
from lightformers_hf.conversion.report import OWN_TEXT, Agreement, ModelFacts, read_report, write_report

FACTS = ModelFacts(architecture="lightformer", auto_class="AutoModelForSeq2SeqLM", parameters=60, bytes=240)
PAD, END, FIRST, ALPHABET = 1, 2, 4, 24


@pytest.mark.parametrize("sizes", [[99], [100], [64, 37, 32], [1] * 250])
def test_every_tenth_sentence_is_held_out(sizes):
    rows = torch.arange(sum(sizes))
    names = ("input_ids", "attention_mask", "labels")
    batches = [dict.fromkeys(names, part[:, None] + 1) for part in rows.split(sizes)]
    kept, held = hold_out(batches)
    found = [torch.cat([batch["labels"] for batch in part]).flatten() if part else rows[:0] for part in (kept, held)]
    assert torch.equal(torch.cat(found).sort().values, rows + 1)
    assert len(found[1]) == (0 if len(rows) < 100 else pytest.approx(len(rows) / 10, abs=1))
    assert all(torch.equal(batch["input_ids"], batch["labels"]) for batch in kept + (held or []))


def test_a_source_with_several_targets_is_held_out_with_all_of_them():
    """Whatever padding its batches have."""
    rows = torch.randperm(150, generator=torch.Generator().manual_seed(0))
    batches = []
    for width, part in enumerate(rows.split(32)):
        ids, ones = (F.pad(column[:, None], (0, width)) for column in (part // 5, torch.ones_like(part)))
        batches.append({"input_ids": ids, "attention_mask": ones, "labels": part[:, None]})
    kept, held = hold_out(batches)
    found = [{int(ids[0]) for batch in part for ids in batch["input_ids"]} for part in (kept, held)]
    assert found[0] | found[1] == {*range(30)}
    assert len(found[1]) == 3
    assert not found[0] & found[1]


def letters(rows: list[list[int]]) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [PAD] * (width - len(row)) for row in rows])


def words() -> tuple[list[list[int]], list[list[int]]]:
    """Random words and what a teacher is to learn of them by heart; the last 30 words have two outputs each."""
    rng = random.Random(0)

    def draw(least: int, most: int) -> list[int]:
        return [rng.randrange(FIRST, FIRST + ALPHABET) for _ in range(rng.randint(least, most))]

    sources = [draw(3, 6) for _ in range(150)]
    targets = [draw(2, 4) for _ in sources]
    other = [[*target[:-1], draw(1, 1)[0]] for target in targets[-30:]]
    return sources + sources[-30:], targets + other


@pytest.fixture(scope="module")
def sure_teacher(tmp_path_factory):
    """A BART that knows words by heart, each output nearly certain but the last letters of 30 words, and the words."""
    folder = tmp_path_factory.mktemp("sure")
    sources, targets = words()
    names = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    alphabet = (chr(ord("a") + index) for index in range(ALPHABET))
    word_tokenizer([*names.values(), *alphabet], "</s>", **names).save_pretrained(folder)

    def text(ids: list[int]) -> str:
        return " ".join(chr(ord("a") + token - FIRST) for token in ids)

    pairs = [{"source": text(one), "target": text(other)} for one, other in zip(sources, targets, strict=True)]
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))

    torch.manual_seed(0)
    special = {"pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": END, "decoder_start_token_id": END}
    fields = sizes(32, layers=2, heads=4, vocab_size=FIRST + ALPHABET, max_position_embeddings=16, dropout=0.0)
    config = BartConfig(**fields, **special, forced_eos_token_id=None)
    model = BartForConditionalGeneration(config)
    inputs = letters([[*source, END] for source in sources])
    labels = letters([[*target, END] for target in targets])
    batch = {
        "input_ids": inputs,
        "attention_mask": (inputs != PAD).long(),
        "labels": labels.where(labels != PAD, -100),
    }
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=350)
    for _ in range(350):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():  # logits are multiplied: outputs stay as they are, and get sure
        norm = model.model.decoder.layers[-1].final_layer_norm
        norm.weight *= 6
        norm.bias *= 6
    model.eval().save_pretrained(folder)
    return folder, data, batch


def kept_words(folder, batch) -> float:
    """Share of the words with one output whose output is right."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    sources = {name: batch[name][:120] for name in ("input_ids", "attention_mask")}
    made = model.generate(**sources, num_beams=1, do_sample=False, max_new_tokens=6)[:, 1:]
    wanted = [[token for token in row if token != -100] for row in batch["labels"][:120].tolist()]
    return sum(row[: len(right)] == right for row, right in zip(made.tolist(), wanted, strict=True)) / len(wanted)


def test_a_teacher_that_is_sure_keeps_its_outputs(sure_teacher, tmp_path, monkeypatch):
    """The weighting by exact probabilities loses most words at the same size."""
    folder, data, batch = sure_teacher
    options = {"ratio": 2, "calibration": str(data), "source_lang": "source", "target_lang": "target"}
    options["study"] = StudyOptions(joint=False)
    report = convert(folder, tmp_path / "new", progress=False, **options)
    monkeypatch.setattr(calibration, "find_temperature", lambda variance, removed: 1.0)
    exact = convert(folder, tmp_path / "exact", progress=False, **options)
    teacher, new, old = (kept_words(path, batch) for path in (folder, tmp_path / "new", tmp_path / "exact"))
    print(teacher, new, old, report.agreement, exact.agreement)
    assert teacher > 0.9
    assert new > teacher - 0.1
    assert old < new - 0.2
    assert report.agreement.share > exact.agreement.share
    assert report.agreement.held_out


@pytest.mark.parametrize("batch", [1024, 64])
def test_the_default_method_is_the_candidate_that_is_nearest_to_the_teacher(
    sure_teacher, tmp_path, monkeypatch, batch
):
    """Candidates are refitted with all of few batches, or with a part of many."""
    folder, data, _ = sure_teacher
    monkeypatch.setattr(refit, "TOKENS", batch)
    options = {"ratio": 3, "calibration": str(data), "source_lang": "source", "target_lang": "target"}
    options["study"] = StudyOptions(joint=False, calibration_seed=1)  # the fit is after the choice
    reports = {
        method: convert(folder, tmp_path / method, method=method, progress=False, **options)
        for method in ("auto", "low-rank", "narrow")
    }
    found = {method: report.agreement.divergence for method, report in reports.items()}
    assert found["auto"] <= min(found.values()) * (1.1 if batch == 1024 else 1.6)  # 512 tokens show little
    assert found["low-rank"] != found["narrow"]
    candidates = reports["auto"].candidates
    assert (candidates["low-rank"]["divergence"] == pytest.approx(found["low-rank"])) == (batch == 1024)
    planned = plan(folder, progress=False, **options)
    assert planned.candidates == {name: {"cost": one["cost"]} for name, one in candidates.items()}
    assert "Predicted costs of the candidates: auto " in " ".join(str(planned).split())
    assert not reports["low-rank"].candidates


def test_an_earlier_candidate_may_be_the_nearest_again(sure_teacher, tmp_path, monkeypatch):
    """The second is as near as the first until the third is nearer than both."""
    folder, data, _ = sure_teacher
    module, made = sys.modules["lightformers_hf.conversion.convert"], []
    measures, make = [(0.1, 0.6), (0.105, 0.7), (0.094, 0.5)], module.make

    def make_and_tell(chosen, *arguments, **more):
        found = make(chosen, *arguments, **more)
        made.append(chosen)
        if len(made) > len(measures):
            return found
        divergence, exact = measures[len(made) - 1]
        return replace(found, agreement=replace(found.agreement, divergence=divergence, exact=exact))

    monkeypatch.setattr(module, "make", make_and_tell)
    options = {"ratio": 3, "calibration": str(data), "source_lang": "source", "target_lang": "target"}
    convert(folder, tmp_path / "light", progress=False, **options)
    assert len(made) == 4
    assert made[3] is made[0]


def test_agreement_is_that_of_the_likeliest_tokens(sure_teacher, tmp_path):
    """As transformers' models find it from whole batches, whatever batches the text is cut into."""
    folder, _, batch = sure_teacher
    convert(folder, tmp_path / "light", method="paper", rank=8, progress=False)
    labels, start = batch["labels"], torch.full((len(batch["labels"]), 1), END)
    batch = batch | {"decoder_input_ids": torch.cat([start, labels[:, :-1].where(labels[:, :-1] >= 0, PAD)], dim=1)}
    loaded = [AutoModelForSeq2SeqLM.from_pretrained(path).eval() for path in (folder, tmp_path / "light")]
    with torch.no_grad():
        logits = [model(**batch).logits[labels >= 0] for model in loaded]
    likeliest = [each.argmax(-1) for each in logits]
    log_p, log_q = (each.double().log_softmax(-1) for each in logits)
    parts = [{name: tensor[rows] for name, tensor in batch.items()} for rows in (slice(50), slice(50, None))]
    models = [read(path).model for path in (folder, tmp_path / "light")]
    found = compare(models[1], models[0], parts)
    share, tokens = found.share, found.tokens
    assert tokens == len(likeliest[0])
    assert found.divergence == pytest.approx((log_p.exp() * (log_p - log_q)).sum().item() / tokens, rel=0.02)
    assert share == pytest.approx((likeliest[0] == likeliest[1]).double().mean().item(), abs=2 / tokens)
    assert 0.05 < share < 0.95


def test_equal_outputs_are_those_of_generate(sure_teacher, tmp_path):
    """In the report of a conversion, too, whose text is held out."""
    folder, data, batch = sure_teacher
    options = {"source_lang": "source", "target_lang": "target", "calibration": str(data)}
    report = convert(folder, tmp_path / "light", ratio=3, progress=False, **options)
    assert report.agreement.texts == 20  # of 15 sources
    teacher, light = read(folder), read(tmp_path / "light").model
    mask = batch["input_ids"] != PAD
    outputs = greedy_outputs(teacher.model, teacher, [batch | {"attention_mask": mask.long()}], translated=False)
    found = compare(light, teacher.model, outputs, outputs)
    made = [
        [model.generate(**{name: part[name] for name in ("input_ids", "attention_mask")}, max_new_tokens=20).tolist()
         for part in outputs]
        for model in (light, teacher.model)
    ]  # fmt: skip
    strip = [[[token for token in row if token != PAD] for rows in side for row in rows] for side in made]
    equal = sum(a == b for a, b in zip(*strip, strict=True))
    assert found.texts == len(strip[0]) == 100  # of 180
    assert 0 < equal < found.texts
    assert found.exact == pytest.approx(equal / found.texts, abs=1.5 / found.texts)


def test_the_summary_and_the_card_say_how_often_tokens_agree(tmp_path):
    def summary(share: float, **changed) -> str:
        agreement = Agreement(share=share, tokens=1234, held_out=True, divergence=0.0841, exact=0.625, texts=100)
        report = report_of(matrix(form="low-rank", size=1, setting="rank 1"), agreement=agreement, **changed)
        write_report(report, tmp_path)
        assert read_report(tmp_path / "compression.json") == report
        assert f"As converted, it {agreement}." in " ".join(model_card(FACTS, report).split())
        return " ".join(str(report).split())

    sure = summary(0.941, calibration="train.jsonl")
    assert (
        "Agrees with its teacher on 94.1% of 1,234 held-out tokens, and gives 62% of 100 whole outputs exactly, at a "
        "KL divergence of 0.084 nats." in sure
    )
    assert "lightformers recover" not in sure
    lost = summary(0.79, calibration="train.jsonl")
    assert "Below 80%" in lost
    assert "lightformers recover" in lost
    assert "smaller ratio" in lost
    assert "--calibration" not in lost
    assert "--calibration" in summary(0.79, calibration=OWN_TEXT)


@pytest.mark.parametrize("change", ["probabilities of 0 and 1", "outputs without end"])
def test_unusual_teachers_are_converted(sure_teacher, tmp_path, change):
    folder, data, _ = sure_teacher
    shutil.copytree(folder, tmp_path / "teacher")
    model = BartForConditionalGeneration.from_pretrained(folder)
    with torch.no_grad():
        if change == "outputs without end":
            model.final_logits_bias[0, END] = -1e4
        else:
            norm = model.model.decoder.layers[-1].final_layer_norm
            norm.weight *= 1000
            norm.bias *= 1000
    model.save_pretrained(tmp_path / "teacher")
    for name, text in (("pairs", str(data)), ("self-generated", None)):
        columns = {"calibration": text, "source_lang": "source", "target_lang": "target"} if text else {}
        report = convert(tmp_path / "teacher", tmp_path / name, ratio=2, progress=False, **columns)
        assert report.agreement.share > 0.5


def test_equal_outputs_decide_between_candidates_that_are_as_near():
    def agreement(divergence: float, exact: float | None) -> Agreement:
        return Agreement(share=0.9, tokens=9, held_out=True, divergence=divergence, exact=exact, texts=100)

    assert nearest({"a": agreement(0.105, 0.7), "b": agreement(0.1, 0.6), "c": agreement(0.2, 0.9)}) == "a"
    assert nearest({"a": agreement(0.105, 0.6), "b": agreement(0.1, 0.6)}) == "b"
    assert nearest({"a": agreement(0.105, None), "b": agreement(0.1, None)}) == "b"
    assert nearest({"a": agreement(float("nan"), 0.9), "b": agreement(0.1, 0.6)}) == "b"
