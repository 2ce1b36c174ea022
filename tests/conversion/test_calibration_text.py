"""Which calibration text is drawn, and which the teacher makes."""

import json
import threading
from dataclasses import replace
from itertools import chain
from statistics import fmean

import pytest
import torch
from conversion.vocabulary.checkpoints import make_checkpoint
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer

from lightformers_hf.checkpoints.teacher import read
from lightformers_hf.conversion import calibration_text as module
from lightformers_hf.conversion.calibration_text import (
    copied,
    draw_pairs,
    further_text,
    mean_tokens,
    parallel_batches,
    random_sources,
    random_texts,
    sample_pairs,
    synthetic_batches,
    translated_batches,
    uncertainty,
)
from lightformers_hf.conversion.options import CompressionOptions, StudyOptions
from lightformers_hf.processors import use_threads

SIDES = {"source_lang": "de", "target_lang": "en"}


@pytest.fixture(scope="module")
def text(tmp_path_factory, parallel_sentences):
    """Forty pairs."""
    file = tmp_path_factory.mktemp("text") / "pairs.jsonl"
    file.write_text("".join(json.dumps({"translation": pair}) + "\n" for pair in 4 * parallel_sentences))
    return str(file)


@pytest.fixture(scope="module")
def teacher(tiny_marian):
    return read(tiny_marian)


def drawn(teacher, text, **options):
    return draw_pairs(teacher, CompressionOptions(calibration=text, **SIDES, **options), StudyOptions())


@pytest.mark.parametrize("family", ["marian", "bart", "mbart", "pegasus", "m2m_100", "t5", "mt5", "umt5"])
def test_random_sources_of_every_family_have_no_special_tokens(family):
    config = AutoConfig.for_model(family, vocab_size=9, pad_token_id=1, eos_token_id=2)
    found = {token for source in random_sources(None, config, 8, 0, name="teacher") for token in source}
    assert {3, 4, 5, 6, 7, 8} <= found <= set(range(9)) - {1, 2}


def test_random_texts_of_a_source_vocabulary_of_its_own_hold_its_tokens(tmp_path):
    make_checkpoint("marian_apart", tmp_path / "apart")
    own = read(tmp_path / "apart")
    sources = random_sources(own.tokenizer, own.config, 40, 0, name="apart")
    texts = random_texts(own.tokenizer, own.config, (None, None), 40, 0, name="apart")
    drawn, read_again = (set(chain(*ids)) for ids in (sources, own.tokenizer(texts).input_ids))
    assert own.tokenizer.unk_token_id not in read_again
    assert len(read_again & drawn) > len(drawn) / 2  # two pieces may be one for the tokenizer


def test_short_sentences_are_more_pairs_and_long_ones_are_not_fewer(tiny_marian, teacher, text, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(tiny_marian)
    pairs = drawn(teacher, text, calibration_samples=40)
    lengths = [len(tokenizer(row["source"]).input_ids) for row in pairs]
    lengths += [len(tokenizer(text_target=row["target"]).input_ids) for row in pairs]
    config = AutoConfig.from_pretrained(tiny_marian)
    assert mean_tokens(config, tokenizer, pairs) == pytest.approx(fmean(lengths))
    monkeypatch.setattr(module, "SAMPLES", 40)  # the mean is of these
    for each, most in ((0, 10**6), (10**6, 1), (40 * fmean(lengths) / config.d_model, 10**6)):
        monkeypatch.setattr(module, "TOKENS_PER_FEATURE", each)
        monkeypatch.setattr(module, "MOST_TOKENS", most)
        assert len(drawn(teacher, text)) == 40
    monkeypatch.setattr(module, "SAMPLES", 10)
    mean = mean_tokens(config, tokenizer, pairs.select(range(10)))
    for each, most in ((25 * mean / config.d_model, 10**6), (10**6, 25 * mean)):
        monkeypatch.setattr(module, "TOKENS_PER_FEATURE", each)
        monkeypatch.setattr(module, "MOST_TOKENS", most)
        assert 25 <= len(drawn(teacher, text)) <= 26
    monkeypatch.setattr(module, "MOST_TOKENS", 10**6)  # all that there is
    assert len(drawn(teacher, text)) == 40
    assert len(drawn(teacher, text, calibration_samples=7)) == 7
    monkeypatch.setattr(module, "FEWEST_SENTENCES", 30)  # a tenth of more is held out, beside the number asked for
    assert len(drawn(teacher, text, calibration_samples=27)) == 30
    assert len(drawn(teacher, text, calibration_samples=40)) == 40


def test_further_text_has_other_sources_and_leaves_half_of_the_rest(
    teacher, tmp_path, parallel_sentences, monkeypatch
):
    rows = [{"de": f"{pair['de']} {count}", "en": pair["en"]} for count in range(8) for pair in parallel_sentences]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(module, "SAMPLES", 20)
    monkeypatch.setattr(module, "MOST_TOKENS", 1)
    options, study = CompressionOptions(calibration=str(file), **SIDES), StudyOptions()
    pairs = draw_pairs(teacher, options, study)
    alone = pairs.remove_columns("target")
    for drawn in (pairs, alone):
        mean = mean_tokens(teacher.config, teacher.tokenizer, drawn)
        for most, expected in ((1, 0), (20 * mean, 0), (35 * mean, 15), (10**6, (len(rows) - 20) // 2)):
            monkeypatch.setattr(module, "MOST_FITTED", most)
            batches, sources = further_text(teacher.model, teacher, options, study, drawn)
            assert sum(len(batch["labels"]) for batch in batches) == len(sources) == expected
            assert not set(sources) & set(pairs["source"])
    given = replace(options, calibration_samples=20)
    for drawn in (pairs, alone, None):
        assert further_text(teacher.model, teacher, given, study, drawn) == ([], ())


def test_further_text_of_a_teacher_is_another_sample(teacher, monkeypatch):
    monkeypatch.setattr(module, "SOURCES", 2)
    monkeypatch.setattr(module, "LONGEST_SOURCE", 8)
    own, study = CompressionOptions(), StudyOptions()
    drawn = module.sample_text(teacher.model, teacher, own, study, None)
    batches, sources = further_text(teacher.model, teacher, own, study, None)
    assert sources == ()
    rows = [{tuple(row.tolist()) for batch in some for row in batch["input_ids"]} for some in (drawn, batches)]
    assert len(rows[1]) == 4 * sum(len(batch["labels"]) for batch in drawn)
    assert not rows[0] & rows[1]


def test_of_one_language_its_tokens_count_alone(tiny_marian, teacher, tmp_path, parallel_sentences):
    tokenizer = AutoTokenizer.from_pretrained(tiny_marian)
    (tmp_path / "de.txt").write_text("".join(pair["de"] + "\n" for pair in parallel_sentences))
    pairs = sample_pairs(
        teacher.config, tokenizer, CompressionOptions(calibration=str(tmp_path / "de.txt")), StudyOptions()
    )
    assert pairs.column_names == ["source"]
    assert mean_tokens(teacher.config, tokenizer, pairs) == pytest.approx(
        fmean(len(tokenizer(pair["de"]).input_ids) for pair in parallel_sentences)
    )


def test_longer_texts_than_the_model_takes_count_as_they_are_cut(teacher, text, monkeypatch):
    monkeypatch.setattr(module, "longest_text", lambda config, tokenizer: 4)
    assert mean_tokens(teacher.config, teacher.tokenizer, drawn(teacher, text, calibration_samples=20)) == 4


def test_targets_begin_with_the_start_token_on_whichever_side_a_loaded_tokenizer_pads(tiny_marian, teacher, text):
    tokenizer = AutoTokenizer.from_pretrained(tiny_marian, padding_side="left")
    own = read(AutoModelForSeq2SeqLM.from_pretrained(tiny_marian), tokenizer)
    found, expected = (parallel_batches(one.model, one.tokenizer, drawn(one, text)) for one in (own, teacher))
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)
    assert tokenizer.padding_side == "left"


def test_repeated_text_is_refused(teacher, tmp_path):
    (tmp_path / "x.txt").write_text("Zwei Hunde.\n" * 20)
    with pytest.raises(ValueError, match=r"x\.txt: only 1 of the 20 sources drawn are distinct"):
        drawn(teacher, str(tmp_path / "x.txt"))
    assert len(drawn(teacher, str(tmp_path / "x.txt"), calibration_samples=5)) == 5


@pytest.mark.parametrize("own", [True, False])
def test_batches_at_once_are_those_of_one_after_another(tiny_marian, parallel_sentences, own, monkeypatch):
    """And no two threads use one tokenizer, which fast ones refuse."""
    teacher, readers, makers = read(tiny_marian), set(), set()
    model, tokenizer = teacher.model, teacher.tokenizer
    generate = model.generate

    class Watched(type(tokenizer)):
        def __call__(self, *args, **options):
            readers.add(threading.get_ident())
            return super().__call__(*args, **options)

    def make(*args, **options):
        makers.add(threading.get_ident())
        return generate(*args, **options)

    tokenizer.__class__ = Watched
    monkeypatch.setattr(module, "BATCH", 4)
    monkeypatch.setattr(model, "generate", make)
    texts = [pair["de"] for pair in parallel_sentences] * 2
    found = []
    for threads in (1, 2):
        with use_threads(1):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            if own:
                found.append(synthetic_batches(model, teacher, 20, 0))
            else:
                found.append(translated_batches(model, teacher, texts))
    alone, beside = found
    assert len(alone) == 5
    for one, other in zip(alone, beside, strict=True):
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert readers == {threading.get_ident()}
    assert len(makers) > 1


@pytest.mark.parametrize("pads", [True, False])
def test_the_end_of_an_output_is_learned_also_where_it_is_the_padding(tiny_marian, pads):
    teacher = read(tiny_marian)
    end = teacher.config.eos_token_id
    teacher.generation_config.forced_eos_token_id = end  # every output has one
    if pads:
        teacher.config.pad_token_id = teacher.generation_config.pad_token_id = end
    (batch,) = synthetic_batches(teacher.model, teacher, 4, 0)
    for row in batch["labels"].tolist():
        text = [token for token in row if token != -100]
        assert text.index(end) == len(text) - 1
        assert row == text + [-100] * (len(row) - len(text))


def saved(family, folder):
    make_checkpoint(family, folder)
    return str(folder)


@pytest.mark.parametrize(("family", "share"), [("bart", 1e9), ("bart", 0.0), ("marian", 1e9)])
def test_a_teacher_that_writes_what_it_reads_makes_its_sources(family, share, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "NATIVE", 0.0)
    monkeypatch.setattr(module, "DISTINCT", 0.0)
    monkeypatch.setattr(module, "COPIED", 0.0)
    teacher = read(saved(family, tmp_path / "teacher"))
    tokenizer = teacher.tokenizer
    before = synthetic_batches(teacher.model, teacher, 40, 0)
    monkeypatch.setattr(module, "NATIVE", share)
    found = synthetic_batches(teacher.model, teacher, 40, 0)
    sides = [
        [tokenizer.decode(row[row >= 0], skip_special_tokens=True) for batch in batches for row in batch[name]]
        for name, batches in (("labels", before), ("input_ids", found), ("input_ids", before))
    ]
    written, read_again, drawn = (sorted(text.strip() for text in side if text.strip()) for side in sides)
    assert read_again == (written if family == "bart" and share else drawn)
    assert written != drawn


def test_copied_tokens_are_those_of_the_same_source():
    batch = {"input_ids": torch.tensor([[5, 6, 2], [7, 8, 2]]), "labels": torch.tensor([[6, 7, 2], [9, 2, -100]])}
    assert copied([batch]) == 3 / 5
    assert copied([]) == 0


def test_uncertainty_is_the_mean_loss_of_the_targets(teacher):
    (batch,) = synthetic_batches(teacher.model, teacher, 8, 0)
    with torch.no_grad():
        loss = teacher.model(**batch).loss.item()
    assert uncertainty(teacher.model, [batch, batch]) == pytest.approx(loss, rel=1e-4)
