"""The comparison of architectures: every model once, its own scores, a table to read and one to compute with."""

import json
import shlex
import shutil
from pathlib import Path
from statistics import fmean, stdev

import build_tokenizer
import compare_architectures as script
import pytest
import torch
import yaml
from arguments import load_recipe
from tiny import sizes
from transformers import AutoConfig, AutoModelForSeq2SeqLM

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_python")]
SHAPES = sizes(16, model_type="lightformer", max_position_embeddings=64)


def run(*options):
    script.main([*map(str, options)])


def rows(folder):
    return json.loads((folder / "results.json").read_text())


def test_translation(tmp_path, tiny_marian, parallel_sentences, capsys):
    data, shapes, out = tmp_path / "data.jsonl", tmp_path / "shapes.json", tmp_path / "runs"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in parallel_sentences), encoding="utf-8")
    shapes.write_text(json.dumps(SHAPES))
    options = ["translation", "--models", f"first={shapes}", f"taught={tiny_marian}", "--tokenizer-name", tiny_marian]
    options += ["--train-file", data, "--test-file", data, "--source-lang", "de", "--target-lang", "en"]
    options += ["--output-dir", out, "--max-steps", 2, "--jobs", 2, "--speed-sentences", 2, "--speed-runs", 2]
    options += ["--max-source-length", 40, "--max-target-length", 40, "--learning-rate", 1e-5]
    run(*options)
    first, taught = rows(out)
    assert (first["name"], taught["name"]) == ("first", "taught")
    assert taught["bleu"] > 80 > first["bleu"]  # from its weights, which know the sentences by heart
    assert first["speed_ratio"] == 1
    assert taught["speed_ratio"] > 0
    assert first["step_speed_ratio"] == 1
    assert taught["step_speed_ratio"] > 0
    d, ffn, words = 16, 32, len(json.loads((tiny_marian / "vocab.json").read_text()))
    attention, block, norm = 4 * (d * d + d), 2 * d * ffn + d + ffn, 2 * d
    assert first["parameters"] == words * d + 3 * attention + 2 * block + 5 * norm
    assert "taught" in capsys.readouterr().out
    (interval,) = taught["bleu_to_first"]
    assert interval["value"] == pytest.approx(taught["bleu"] - first["bleu"])
    assert interval["low"] <= interval["value"] <= interval["high"]

    capsys.readouterr()
    quiet = [*options[: options.index("--speed-runs")], *options[options.index("--speed-runs") + 2 :]]
    run(*quiet, "--speed-runs", 0)
    assert rows(out) == [first, taught]  # with the speeds that were measured
    printed = capsys.readouterr()
    assert "Speeds were not measured (--speed-runs 0). Those of an earlier call are kept." in " ".join(
        printed.err.split()
    )
    assert f"{taught['speed_ratio']:.2f}x" in printed.out

    scores = out / "first" / "test_results.json"
    scores.write_text(json.dumps({"test_bleu": 12.5, "test_chrf": 3.0}))
    run(*options)
    assert rows(out)[0]["bleu"] == 12.5  # not run again
    run(*options, "--seeds", 42, 7)
    assert [row["bleu"] for row in rows(out) if row["seed"] == 42] == [12.5, taught["bleu"]]
    with pytest.raises(ValueError, match="results of other options"):
        run(*options, "--seed", 7)


def test_the_best_rate_two_tests_and_going_on(tmp_path, tiny_marian, parallel_sentences, capsys):
    data, other, out = tmp_path / "data.jsonl", tmp_path / "other.jsonl", tmp_path / "runs"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in parallel_sentences), encoding="utf-8")
    other.write_text("".join(json.dumps(pair) + "\n" for pair in parallel_sentences[:3]), encoding="utf-8")
    options = ["translation", "--models", f"taught={tiny_marian}", "--tokenizer-name", tiny_marian, "--seeds", 1, 2]
    options += ["--learning-rates", 0.5, 1e-6, "--train-file", data, "--validation-file", data, "--test-file", data]
    options += [other, "--source-lang", "de", "--target-lang", "en", "--output-dir", out, "--max-steps", 4]
    options += ["--speed-runs", 0, "--max-source-length", 40, "--max-target-length", 40]
    options += ["--save-strategy", "steps", "--save-steps", 2, "--eval-strategy", "steps", "--eval-steps", 2]
    (tmp_path / "study.txt").write_text(f"# a comment\n{shlex.join(map(str, options))}\n")
    run(f"@{tmp_path / 'study.txt'}")
    results = rows(out)
    assert [(row["seed"], row["rate"]) for row in results] == [(1, 1e-6), (2, 1e-6)]  # the other one destroys it
    losses = [json.loads((out / f"taught-rate-1e-06-seed-{seed}/eval_results.json").read_text()) for seed in (1, 2)]
    assert [row["validation_loss"] for row in results] == [loss["eval_loss"] for loss in losses]
    assert (out / "taught-rate-0.5-seed-1").is_dir()
    assert not (out / "taught-rate-0.5-seed-2").exists()
    assert min(row["other_bleu"] for row in results) > 80
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines()]
    assert [cell.strip() for line in lines for cell in line if cell.strip() in ("data", "other")] == ["data", "other"]
    for picture in ("curves.png", "curves-dark.png"):
        assert (out / picture).stat().st_size > 10_000

    folder = out / "taught-rate-1e-06-seed-2"
    shutil.rmtree(folder / "checkpoint-4")
    (folder / "test_results.json").unlink()
    run(*options)
    assert "loading optimizer" not in (folder.parent / f"{folder.name}.log").read_text()
    state = json.loads((folder / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "eval_loss" in entry] == [2, 4]
    kept = json.loads((folder / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    assert kept == state["log_history"][: len(kept)]  # its first half was not done again
    with pytest.raises(ValueError, match="two parts are called 'data'"):
        run(*options[: options.index("--test-file") + 1], data, data, *options[options.index("--test-file") + 2 :])

    sooner = tmp_path / "sooner"
    run(*options, "--rate-steps", 2, "--output-dir", sooner)
    assert [row["rate"] for row in rows(sooner)] == [1e-6, 1e-6]
    assert not (sooner / "taught-rate-0.5-seed-1").exists()
    state = json.loads((sooner / "rates-2-steps" / "taught-rate-0.5-seed-1" / "trainer_state.json").read_text())
    assert state["max_steps"] == 2
    at = options.index("--validation-file")
    with pytest.raises(ValueError, match="give --validation-file"):
        run(*options[:at], *options[at + 2 :])


STUDIES = sorted(Path(script.__file__).parent.glob("studies/*_*.txt"))


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.stem)
def test_the_models_of_a_study_build(study, monkeypatch):
    monkeypatch.chdir(Path(script.__file__).parent.parent)
    data = ["--tokenizer-name", "bpe", "--train-file", "t", "--validation-file", "v", "--test-file", "u"]
    args, _ = script.parse([f"@{study}", *data])
    assert (args.output_dir, args.speed_runs) == (f"runs/{study.stem}", 0)
    recipes = [text for text in args.models if ".yaml" in text]
    converted = [text.partition("=")[2] for text in args.models if text not in recipes]
    assert all(path.startswith(("runs/lightformer_svd/", "runs/lightformer_teachers/")) for path in converted)
    matrices = {}
    for name, model in script.parse_models(recipes, args.seeds).items():
        fields = dict(field.split("=") for field in model.fields)
        recipe = load_recipe(model.path)["model"] | {key: yaml.safe_load(value) for key, value in fields.items()}
        with torch.device("meta"):
            built = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(**recipe, vocab_size=4000))
        matrices[name] = sum(parameter.numel() for parameter in built.parameters() if parameter.dim() > 1)
    if study.stem == "lightformer_equal_parameters":
        assert matrices["rank-20"] == matrices["groups-3-rank-60"]


def test_recipes_their_variants_and_several_seeds(tmp_path, tiny_marian, parallel_sentences, capsys):
    data, recipe, out = tmp_path / "data.jsonl", tmp_path / "recipe.yaml", tmp_path / "runs"
    rows_of = [{"document": pair["de"], "summary": pair["en"]} for pair in parallel_sentences]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows_of), encoding="utf-8")
    recipe.write_text(
        yaml.safe_dump({"model": SHAPES, "max_steps": 1, "max_source_length": 40, "learning_rate": 0.25})
    )
    shutil.copytree(tiny_marian, tmp_path / "weights-2")
    shutil.copytree(tiny_marian, tmp_path / "weights-3")
    wide = f"wide={recipe},encoder_ffn_dim=64,rank_pattern={{fc1: 3, fc2: 4}}"
    run(
        "summarization", "--models", f"plain={recipe}", wide, f"taught={tmp_path}/weights-{{seed}}", "--seeds", 2, 3,
        "--tokenizer-name", tiny_marian, "--train-file", data, "--test-file", data, "--output-dir", out,
        "--max-steps", 2, "--max-source-length", 40, "--max-target-length", 40, "--generation-max-length", 12,
    )  # fmt: skip
    results = rows(out)
    assert [(row["name"], row["seed"]) for row in results] == [
        (n, s) for n in ("plain", "wide", "taught") for s in (2, 3)
    ]
    config = json.loads((out / "wide-seed-3" / "config.json").read_text())
    assert (config["encoder_ffn_dim"], config["rank_pattern"]) == (64, {"fc1": 3, "fc2": 4})
    state = json.loads((out / "plain-seed-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2  # the command line wins
    assert state["log_history"][0].get("learning_rate", 0.25) <= 0.25
    assert results[4]["model"].endswith("weights-2")
    scores = [row["rouge1"] for row in results[4:]]
    assert f"{fmean(scores):.1f} ± {stdev(scores):.1f}" in capsys.readouterr().out


def test_language_models(tmp_path, parallel_sentences):
    text, shapes, out = tmp_path / "text.txt", tmp_path / "shapes", tmp_path / "runs"
    text.write_text("".join(f"{pair['en']}\n" for pair in parallel_sentences))
    shapes.mkdir()  # a folder without weights is shapes
    (shapes / "config.json").write_text(json.dumps(SHAPES))
    build_tokenizer.main([str(text), "--kind", "words", "--output", str(tmp_path / "words")])
    run(
        "clm", "--models", f"only={shapes}", "--tokenizer-name", tmp_path / "words", "--train-file", text,
        "--test-file", text, "--output-dir", out, "--max-steps", 1, "--block-size", 16,
    )  # fmt: skip
    (row,) = rows(out)
    assert row["perplexity"] == json.loads((out / "only" / "test_results.json").read_text())["test_perplexity"]
    assert "speed_ratio" not in row


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (["shapes.json"], "expected name=path"),
        (["../up=."], "expected name=path"),
        (["a=.", "a=."], "'a' twice"),
        (["a=/no/model"], "No model /no/model"),
        (["a=/no/{seed},d_model=3"], "No model /no/1"),
    ],
)
def test_bad_models(models, message):
    with pytest.raises((ValueError, OSError), match=message):
        script.parse_models(models, [1])


def test_a_failed_run_says_where_to_look(tmp_path):
    (tmp_path / "bad.json").write_text("{}")
    options = ["--tokenizer-name", "words", "--train-file", "none.txt", "--test-file", "none.txt"]
    with pytest.raises(ChildProcessError, match=r"bad\.log"):
        run("clm", "--models", f"bad={tmp_path / 'bad.json'}", *options, "--output-dir", tmp_path / "runs")
    assert "No data file none.txt" in (tmp_path / "runs" / "bad.log").read_text()
