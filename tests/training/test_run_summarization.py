"""Summaries from the command line: options of generation, the teacher, bad input."""

import json

import pytest
import run_summarization as script
from training.scripts import command
from transformers import AutoTokenizer

from lightformers_hf import translate
from lightformers_hf.evaluation.quality import score


@pytest.fixture
def base(tmp_path, tiny_marian, parallel_sentences):
    """Options of a short run on ten documents; three to validate and test on."""
    rows = [{"document": pair["de"], "summary": pair["en"]} for pair in parallel_sentences]
    for name, chosen in {"train": rows, "few": rows[:3]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    return {
        "model_name_or_path": tiny_marian, "train_file": tmp_path / "train.jsonl", "output_dir": tmp_path / "out",
        "max_source_length": 60, "max_target_length": 60, "max_tokens": 100, "max_steps": 2, "learning_rate": 1e-5,
        "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip


def test_a_whole_run_with_a_teacher(base, tmp_path, tiny_marian, parallel_sentences, capsys):
    few = tmp_path / "few.jsonl"
    generation = {"num_beams": 2, "length_penalty": 2.0, "no_repeat_ngram_size": 3, "min_length": 3, "max_length": 40}
    evaluation = {"validation_file": few, "test_file": few, "eval_strategy": "steps", "eval_steps": 1}
    script.main(command(base, teacher=tiny_marian, distillation_alpha=0.7, **evaluation, **generation))
    out = tmp_path / "out"
    saved = json.loads((out / "generation_config.json").read_text())
    assert saved | generation == saved
    # The tiny model knows these by heart; the file has what the saved model generates, options and all.
    summaries = (out / "test_summaries.txt").read_text().splitlines()
    assert summaries == translate([pair["de"] for pair in parallel_sentences[:3]], out)
    results = json.loads((out / "test_results.json").read_text())
    expected = score(summaries, [pair["en"] for pair in parallel_sentences[:3]], ["rouge"])
    found = {name: value for name, value in results.items() if not name.endswith("_signature")}
    assert found == {f"test_{name}": pytest.approx(value) for name, value in expected.items()}
    assert results["test_rougeL"] > 80
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    assert all("eval_rouge2" in entry for entry in history if "eval_loss" in entry)
    printed = capsys.readouterr().out
    for words in ("validation rouge1", "test rougeLsum", "validation loss", "scored by"):
        assert words in printed


def test_options_change_what_is_generated(base, tmp_path, parallel_sentences):
    """Without training, on its own validation: no n-gram twice, at least so long, at most so long."""
    few, tokenizer = tmp_path / "few.jsonl", AutoTokenizer.from_pretrained(base["model_name_or_path"])

    def summaries(name, **options):
        changes = {"train_file": None, "test_file": few, "output_dir": tmp_path / name, "max_tokens": None}
        script.main(command(base, **changes, **options))
        texts = (tmp_path / name / "test_summaries.txt").read_text().splitlines()
        return [tokenizer(text_target=text)["input_ids"] for text in texts]

    assert max(map(len, summaries("short", max_length=6))) <= 6
    # 1 for the start token; spaces of pieces may be lost in decoding
    plain, long = summaries("plain"), summaries("long", min_length=30, no_repeat_ngram_size=1)
    assert max(map(len, plain)) < 25 < min(map(len, long))
    for ids in long:
        assert len(set(ids)) >= len(ids) - 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_column": "article"}, "no column 'article'"),
        ({"summary_column": "document"}, "both 'document'"),
        ({"train_file": "EMPTY"}, "holds no rows"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size is -1"),
        ({"length_penalty": 2.0, "num_beams": 1}, "num-beams above 1"),
        ({"max_source_length": 512}, "64 positions"),
    ],
)
def test_bad_input_ends_before_the_first_step(base, tmp_path, changes, message):
    (tmp_path / "empty.jsonl").write_text("")
    changes = {name: tmp_path / "empty.jsonl" if value == "EMPTY" else value for name, value in changes.items()}
    with pytest.raises(ValueError, match=message):
        script.main(command(base, **changes))
    assert not list(tmp_path.glob("out/*"))
