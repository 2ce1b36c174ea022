"""The training script from its command line: a whole run, a killed one that goes on, two processes, bad input."""

import importlib.util
import json
import runpy
import shutil
import sys
from pathlib import Path

import build_tokenizer
import pytest
import torch
from safetensors.torch import load_file
from tiny import sizes
from training.scripts import command, killed, losses, run_on_two
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer

from lightformers_hf import convert, translate
from lightformers_hf.evaluation.quality import score
from lightformers_hf.loading import unique_parameters
from lightformers_hf.recovery import RecoveryTrainer

SCRIPT = Path(__file__).parents[2] / "training" / "run_translation.py"
spec = importlib.util.spec_from_file_location("run_translation", SCRIPT)
script = importlib.util.module_from_spec(spec)
sys.modules["run_translation"] = script  # dataclasses look their module up by name
spec.loader.exec_module(script)


@pytest.fixture
def base(tmp_path, tiny_marian, parallel_sentences):
    """Options of a short run: ten sentences to train on, three to validate and test on."""
    for name, rows in {"train": parallel_sentences, "few": parallel_sentences[:3]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"translation": row}) + "\n" for row in rows))
    return {
        "model_name_or_path": tiny_marian, "train_file": tmp_path / "train.jsonl", "source_lang": "de",
        "target_lang": "en", "output_dir": tmp_path / "out", "max_source_length": 60, "max_target_length": 60,
        "max_tokens": 100, "max_steps": 2, "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no",
        "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip


def test_a_whole_run(base, tmp_path, tiny_marian, capsys, parallel_sentences):
    few = tmp_path / "few.jsonl"
    script.main(
        command(
            base, validation_file=few, test_file=few, teacher=tiny_marian, label_smoothing_factor=0.1, bf16=True,
            distillation_alpha=0.7, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
            load_best_model_at_end=True, metric_for_best_model="bleu", lr_scheduler_type="inverse_sqrt", max_steps=3,
            learning_rate=1e-5,
        )
    )  # fmt: skip
    out = tmp_path / "out"
    AutoTokenizer.from_pretrained(out)
    model = AutoModelForSeq2SeqLM.from_pretrained(out)
    teacher = AutoModelForSeq2SeqLM.from_pretrained(tiny_marian)
    assert not torch.equal(model.model.shared.weight, teacher.model.shared.weight)
    best = json.loads((out / "trainer_state.json").read_text())["best_global_step"]
    assert torch.equal(
        load_file(out / f"checkpoint-{best}" / "model.safetensors")["model.shared.weight"], model.model.shared.weight
    )
    changed = {"transformers_version", "_from_model_config"}
    saved, original = (
        {k: v for k, v in m.generation_config.to_dict().items() if k not in changed} for m in (model, teacher)
    )
    assert saved == original
    # The tiny model knows these sentences by heart and is hardly moved.
    results = json.loads((out / "test_results.json").read_text())
    assert results["test_bleu"] > 80
    assert (out / "test_translations.txt").read_text().splitlines()[0] == parallel_sentences[0]["en"]
    printed = capsys.readouterr().out
    for word in ("Summary", "validation bleu", "test bleu", "unique parameters", "best"):
        assert word in printed
    assert f"{unique_parameters(model):,}" in printed  # positions are computed, not learned


def test_a_killed_run_goes_on_as_if_nothing_had_happened(base, tmp_path, tiny_marian):
    config = AutoConfig.from_pretrained(tiny_marian)
    config.dropout = 0.1  # the random state has to come back too
    config.save_pretrained(tmp_path / "config")
    options = base | {
        "model_name_or_path": None,
        "config_name": tmp_path / "config" / "config.json",
        "tokenizer_name": tiny_marian,
        "max_steps": 13,  # the third epoch
        "save_strategy": "steps",
        "save_steps": 4,
        "gradient_accumulation_steps": 2,
    }
    script.main(command(options))
    cut_off = options | {"output_dir": tmp_path / "cut"}
    with killed(RecoveryTrainer, lambda trainer: trainer.state.global_step == 10):
        script.main(command(cut_off))
    half = tmp_path / "cut" / "checkpoint-12"  # what a kill while saving leaves
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    with pytest.raises(FileExistsError, match="resume-from-checkpoint"):
        script.main(command(cut_off))
    script.main([*command(cut_off), "--resume-from-checkpoint"])

    assert len(losses(tmp_path / "out")) == 13
    assert losses(tmp_path / "cut") == losses(tmp_path / "out")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "cut"))
    for name in one:
        assert torch.equal(one[name], other[name])


@pytest.mark.parametrize("best", [False, True])
def test_a_run_that_had_all_its_steps_is_not_trained_on(base, tmp_path, best):
    """Killed in its last evaluation: `Trainer` goes on with one step more."""
    options = base | {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    if best:
        options |= {"validation_file": tmp_path / "few.jsonl", "eval_strategy": "steps", "eval_steps": 2}
        options |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    script.main(command(options))
    before = load_file(tmp_path / "out" / "model.safetensors")
    (tmp_path / "out" / "model.safetensors").unlink()
    script.main([*command(options), "--resume-from-checkpoint"])
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert state["global_step"] == 4
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    last = load_file(tmp_path / "out" / "checkpoint-4" / "model.safetensors")
    name = "model.encoder.layers.0.fc1.weight"
    assert torch.equal(after[name], last[name]) == (not best or state["best_global_step"] == 4)


@pytest.mark.parametrize("resumes", [False, True])
def test_a_run_ends_when_validation_finds_nothing_better(base, tmp_path, monkeypatch, resumes):
    found = {1: 3.0, 2: 2.0, 3: 2.5, 4: 2.2, 5: 1.0}  # {step: validation loss}, whatever is trained

    def evaluate(trainer, *args, **kwargs):
        metrics = {"eval_loss": found[trainer.state.global_step]}
        trainer.log(metrics)
        trainer.control = trainer.callback_handler.on_evaluate(trainer.args, trainer.state, trainer.control, metrics)
        return metrics

    monkeypatch.setattr(RecoveryTrainer, "evaluate", evaluate)
    options = base | {"validation_file": tmp_path / "few.jsonl", "save_strategy": None, "max_steps": 9}
    run = command(options | {"early_stopping_patience": 2, "eval_steps": 1})
    if resumes:  # after one of the two evaluations that find nothing better
        with killed(RecoveryTrainer, lambda trainer: trainer.state.global_step == 3):
            script.main(run)
        run.append("--resume-from-checkpoint")
    script.main(run)
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert state["global_step"] == 4
    assert state["best_global_step"] == 2
    kept = [load_file(tmp_path / "out" / name / "model.safetensors") for name in (".", "checkpoint-2")]
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])


def test_from_scratch_keeps_the_shapes_and_nothing_else(base, tmp_path, tiny_marian):
    options = base | {"from_scratch": True, "max_steps": 1, "learning_rate": 0.0}
    script.main(command(options))
    script.main(command(options, seed=7, output_dir=tmp_path / "other"))
    trained, one, other = (
        load_file(f / "model.safetensors") for f in (tiny_marian, tmp_path / "out", tmp_path / "other")
    )
    assert {name: t.shape for name, t in trained.items()} == {name: t.shape for name, t in one.items()}
    name = "model.encoder.layers.0.fc1.weight"
    assert not torch.equal(trained[name], one[name])
    assert not torch.equal(one[name], other[name])
    assert (tmp_path / "out" / "generation_config.json").read_text() == (
        tiny_marian / "generation_config.json"
    ).read_text()


def test_shapes_alone_take_the_rest_from_the_tokenizer(base, tmp_path, tiny_marian):
    shapes = sizes(16, ffn=16, model_type="lightformer")
    (tmp_path / "shapes.json").write_text(json.dumps(shapes))
    options = {"model_name_or_path": None, "config_name": tmp_path / "shapes.json", "tokenizer_name": tiny_marian}
    script.main(command(base | options, test_file=tmp_path / "few.jsonl"))
    saved, marian = (AutoConfig.from_pretrained(folder) for folder in (tmp_path / "out", tiny_marian))
    for field in ("vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id"):
        assert getattr(saved, field) == getattr(marian, field), field
    assert saved.bos_token_id is None
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["max_length"] == base["max_target_length"]  # not transformers' 20 tokens
    assert (tmp_path / "out" / "test_results.json").is_file()

    (tmp_path / "shapes.json").write_text(json.dumps(shapes | {"vocab_size": 50}))
    with pytest.raises(ValueError, match="belong together"):
        script.main(command(base | options, output_dir=tmp_path / "other"))


@pytest.mark.parametrize("strategy", ["sequential", "group_by_length", "batch_rebalance"])
def test_predictions_keep_the_order_of_the_file(base, tmp_path, parallel_sentences, strategy):
    base |= {"max_tokens": None, "max_steps": 1, "learning_rate": 0, "train_sampling_strategy": strategy}
    train = tmp_path / "train.jsonl"
    script.main(command(base, validation_file=train, test_file=train, per_device_eval_batch_size=2))
    sources, references = ([pair[name] for pair in parallel_sentences] for name in ("de", "en"))
    expected = translate(sources, tmp_path / "out", num_beams=1)
    assert (tmp_path / "out" / "test_translations.txt").read_text().splitlines() == expected
    bleu = score(expected, references, ["bleu"])["bleu"]
    for part in ("test", "eval"):
        assert json.loads((tmp_path / "out" / f"{part}_results.json").read_text())[f"{part}_bleu"] == bleu > 10
    with pytest.raises(ValueError, match=f"{strategy}, which has no effect with --max-tokens"):
        script.main(command(base, max_tokens=100, overwrite_output=True))


@pytest.mark.usefixtures("warm_python")
def test_two_processes_compute_what_one_does_with_accumulation(base, tiny_marian, tmp_path):
    options = base | {"max_steps": 5, "label_smoothing_factor": 0.1, "validation_file": tmp_path / "few.jsonl"}
    options |= {"teacher": tiny_marian, "hidden_weight": 0.5}
    one = command(options, gradient_accumulation_steps=2)
    two = command(options, output_dir=tmp_path / "two")
    script.main(one)
    printed = run_on_two(SCRIPT, two)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "out"), rel=1e-4)
    scores = [json.loads((tmp_path / name / "eval_results.json").read_text()) for name in ("out", "two")]
    assert scores[0]["eval_bleu"] == pytest.approx(scores[1]["eval_bleu"])
    assert printed.count("Summary") == 1


@pytest.fixture
def other_words(tiny_marian, tmp_path):
    """The tiny model with as many words, one of them another."""
    other = tmp_path / "teacher"
    AutoModelForSeq2SeqLM.from_pretrained(tiny_marian).save_pretrained(other)
    AutoTokenizer.from_pretrained(tiny_marian).save_pretrained(other)
    words = json.loads((other / "vocab.json").read_text())
    words["▁unheard"] = words.pop(next(word for word, i in words.items() if i == 50))
    (other / "vocab.json").write_text(json.dumps(words))
    return other


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_file": "none.jsonl"}, "No data file none.jsonl"),
        ({"target_lang": "fr"}, "no column 'fr'"),
        ({"train_file": None}, "No data"),
        ({"eval_strategy": "epoch"}, "--validation-file"),
        ({"early_stopping_patience": 3}, "--validation-file"),
        ({"early_stopping_patience": 0}, "early_stopping_patience is 0"),
        ({"model_name_or_path": None}, "--config-name"),
        ({"model_name_or_path": "/no/model"}, "No model /no/model"),
        ({"max_tokens": 5}, "max_tokens is 5"),
        ({"max_source_length": 65}, "64 positions"),
        ({"resume_from_checkpoint": "nowhere"}, "nowhere is not a complete checkpoint"),
        ({"distillation_alpha": 1.5, "teacher": "TINY"}, "distillation_alpha is 1.5"),
        ({"output_dir": "TINY", "overwrite_output": True}, "which this run reads"),
        ({"source_lang": "de=de_DE", "target_lang": "en=en_XX"}, "multilingual"),
        ({"num_beams": 0}, "num_beams is 0"),
        ({"min_length": 50}, "min_length is 50, max_length 48"),
        ({"length_penalty": 0.6, "num_beams": 1}, "num-beams above 1"),
        ({"metric": "multi_blue"}, "no metric 'multi_blue'; did you mean multi-bleu"),
        ({"metric_for_best_model": "blue"}, "metric_for_best_model is 'blue': expected .* loss, bleu, chrf"),
        ({"source_lang": "de=translate: ", "source_prefix": "translate:"}, "remove --source-prefix"),
        ({"deepspeed": "none.json"}, "deepspeed is none.json: there is no such file"),
        ({"report_to": "tensorboad"}, "report_to is 'tensorboad'"),
        (
            {"group_by_length": True},
            "--group-by-length is an option of transformers 4: give --train-sam",
        ),
        ({"save_safetensors": True}, "--save-safetensors is an option of transformers 4: remove it"),
        ({"teacher": "OTHER"}, "another vocabulary"),
        ({"tokenizer_name": "OTHER"}, "has other entries than that of"),
    ],
)
def test_bad_input_ends_before_the_first_step(base, tiny_marian, other_words, tmp_path, changes, message):
    places = {"TINY": tiny_marian, "OTHER": other_words}
    changes = {name: places.get(str(value), value) for name, value in changes.items()}
    before = sorted(tiny_marian.iterdir())
    with pytest.raises((ValueError, OSError), match=message):
        script.main(command(base, **changes))
    assert not list(tmp_path.glob("out/*"))
    assert sorted(tiny_marian.iterdir()) == before


def test_metrics_are_chosen_by_the_data_or_by_the_user(base, tmp_path, parallel_sentences):
    """Of references of one word without being asked; the best checkpoint has the lowest error rate."""
    rows = [{"de": pair["de"], "en": pair["en"].split()[1]} for pair in parallel_sentences[:3]]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps({"translation": row}) + "\n" for row in rows))
    changes = {
        "validation_file": tmp_path / "few.jsonl",
        "test_file": tmp_path / "few.jsonl",
        "eval_strategy": "steps",
    }
    changes |= {"eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "metric_for_best_model": "cer"}
    script.main(command(base, **changes, load_best_model_at_end=True, learning_rate=0.1, max_steps=3))
    history = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    rates = {entry["step"]: entry["eval_cer"] for entry in history["log_history"] if "eval_cer" in entry}
    assert history["best_metric"] == min(rates.values()) < max(rates.values())
    names = ["test_exact-match", "test_cer", "test_chrf"]
    results = json.loads((tmp_path / "out" / "test_results.json").read_text())
    assert {name for name in results if not name.endswith("_signature")} == {*names}

    changes = {"train_file": None, "test_file": tmp_path / "few.jsonl", "output_dir": tmp_path / "asked"}
    script.main([*command(base, **changes), "--metric", "rouge1", "multi-bleu"])
    results = json.loads((tmp_path / "asked" / "test_results.json").read_text())
    assert [*results] == ["test_multi-bleu", "test_multi-bleu_signature", "test_rouge1", "test_rouge1_signature"]


def test_from_scratch_with_another_tokenizer_has_its_tokens(base, tmp_path, tiny_marian):
    words = ["--kind", "bpe", "--vocab-size", "60", "--columns", "de", "en", "--output", str(tmp_path / "words")]
    build_tokenizer.main([str(tmp_path / "train.jsonl"), *words])
    tokenizer, known = AutoTokenizer.from_pretrained(tmp_path / "words"), AutoTokenizer.from_pretrained(tiny_marian)
    assert tokenizer.eos_token_id != known.eos_token_id
    script.main(command(base, tokenizer_name=tmp_path / "words", from_scratch=True, max_steps=1))
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert model.config.decoder_vocab_size == model.config.vocab_size == len(tokenizer)
    assert model.config.d_model == AutoConfig.from_pretrained(tiny_marian).d_model
    for told in (model.config, model.generation_config):
        assert told.eos_token_id == tokenizer.eos_token_id
        assert told.pad_token_id == tokenizer.pad_token_id
        assert getattr(told, "forced_eos_token_id", None) is None
        assert getattr(told, "bad_words_ids", None) is None
    own = json.loads((tiny_marian / "generation_config.json").read_text())
    assert model.generation_config.max_length == own["max_length"]


def test_from_scratch_without_a_generation_configuration(base, tmp_path, tiny_marian):
    shutil.copytree(tiny_marian, tmp_path / "bare")
    (tmp_path / "bare" / "generation_config.json").unlink()
    script.main(command(base, model_name_or_path=tmp_path / "bare", from_scratch=True, max_steps=1))
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config_name": "wider"}, "was trained with encoder_ffn_dim 16, this run has 32"),
        ({"tokenizer_name": "WORDS"}, "another tokenizer"),
    ],
)
def test_a_resume_from_another_configuration_is_refused(base, tmp_path, tiny_marian, other_words, changes, message):
    for name, change in {"shapes": {}, "wider": {"encoder_ffn_dim": 32}}.items():
        (tmp_path / name).write_text(json.dumps(sizes(16, ffn=16, model_type="lightformer") | change))
    options = base | {"model_name_or_path": None, "tokenizer_name": tiny_marian, "config_name": tmp_path / "shapes"}
    options |= {"save_strategy": "steps", "save_steps": 1}
    script.main(command(options, max_steps=1))
    changes = {name: other_words if value == "WORDS" else tmp_path / value for name, value in changes.items()}
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    with pytest.raises(ValueError, match=message):
        script.main([*command(options | changes), "--resume-from-checkpoint"])
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before
    script.main([*command(options), "--resume-from-checkpoint"])
    assert json.loads((tmp_path / "out" / "trainer_state.json").read_text())["global_step"] == 2


def test_generation_options_are_obeyed_and_saved(base, tmp_path, tiny_marian):
    options = {"num_beams": 3, "length_penalty": 0.6, "min_length": 5, "max_length": 30, "no_repeat_ngram_size": 3}
    script.main(command(base, max_steps=1, **options))
    saved, own = (json.loads((f / "generation_config.json").read_text()) for f in (tmp_path / "out", tiny_marian))
    assert saved == own | options


def test_files_are_written_over_only_when_asked(base, tmp_path):
    out = tmp_path / "out"
    (out / "checkpoint-7").mkdir(parents=True)
    (out / "notes.txt").write_text("mine")
    (out / "all_results.json").write_text('{"eval_loss": 1.0}')
    (out / "flickr_translations.txt").write_text("of the run before")
    for options in ([], ["--resume-from-checkpoint"]):
        with pytest.raises(FileExistsError, match=r"is not empty \(.*\).*--overwrite-output"):
            script.main([*command(base), *options])
    script.main([*command(base), "--overwrite-output"])
    assert (out / "notes.txt").read_text() == "mine"
    assert not (out / "checkpoint-7").exists()
    assert not (out / "flickr_translations.txt").exists()
    assert "eval_loss" not in json.loads((out / "all_results.json").read_text())
    assert (out / "model.safetensors").is_file()


def test_what_a_run_does_otherwise_than_asked_is_noted(base, tmp_path, capsys):
    resume = ["--resume-from-checkpoint"]

    def run(*words, **options):
        capsys.readouterr()
        script.main([*command(base, **options), *words])
        printed = capsys.readouterr()
        return " ".join(printed.err.split()), " ".join(printed.out.split())

    steps = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 500}
    said, shown = run(*resume, **steps)
    assert f"note: {tmp_path / 'out'} holds no complete checkpoint: the training begins at its first step" in said
    assert "training loss, mean of all steps" in shown
    assert "last training loss" not in shown
    said, _ = run(*resume, **steps, learning_rate=1e-4)
    assert "checkpoint-2 has all 2 steps: nothing was trained, and options that were changed had no effect" in said
    said, shown = run(max_steps=3, warmup_steps=3, output_dir=tmp_path / "warm")
    assert "The warm-up of 3 steps is no shorter than the training of 3" in said
    assert "last training loss" in shown
    said, _ = run(max_steps=3, warmup_steps=2, output_dir=tmp_path / "short")
    assert "note:" not in said
    said, _ = run(max_steps=1, fp16=True, output_dir=tmp_path / "half")
    assert "note: fp16 has no effect on a CPU, training is in float32" in said


def test_samples_a_second_are_those_that_were_trained_on(base, tmp_path):
    script.main(command(base, max_steps=4, max_tokens=60))
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    figures = json.loads((tmp_path / "out" / "all_results.json").read_text())
    samples = 10 * state["epoch"]  # of ten sentences
    assert samples == pytest.approx(figures["train_samples_per_second"] * figures["train_runtime"], rel=0.02)


def test_a_prefix_behind_the_source_is_told_and_kept(base, tmp_path):
    heard = {}
    for name, options in {
        "short": {"source_lang": "de=to English: "},
        "long": {"source_prefix": "to English:"},
        "none": {},
    }.items():
        out = tmp_path / name
        script.main(command(base, output_dir=out, test_file=tmp_path / "few.jsonl", **options))
        heard[name] = losses(out), json.loads((out / "config.json").read_text()).get("task_specific_params")
    assert heard["short"] == heard["long"] != heard["none"]
    assert heard["short"][1] == {"translation_de_to_en": {"prefix": "to English: "}}


def test_the_command_line_prints_one_message_and_fails(base, tmp_path, monkeypatch, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *command(base, train_file=tmp_path / "empty.jsonl")])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert end.value.code == 1
    errors = capsys.readouterr().err
    assert errors.count("error:") == 1
    assert "empty.jsonl holds no rows" in errors


def test_a_report_of_compression_stays_with_what_was_compressed(base, tmp_path, tiny_marian):
    convert(tiny_marian, tmp_path / "light", rank=5, method="paper", progress=False)
    options = base | {"model_name_or_path": tmp_path / "light", "max_steps": 1}
    script.main(command(options))
    script.main(command(options, from_scratch=True, output_dir=tmp_path / "scratch"))
    report = (tmp_path / "light" / "compression.json").read_text()
    assert (tmp_path / "out" / "compression.json").read_text() == report
    assert not (tmp_path / "scratch" / "compression.json").exists()
