"""The comparison script: every run that was asked for, once, with the scores of its own test set."""

import json
from argparse import Namespace
from functools import partial

import compare_compressions as script
import pytest
from transformers import AutoConfig

from lightformers_hf import LightFormerConfig, convert
from lightformers_hf.loading import load_model, unique_parameters

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("warm_python")
def test_compares_continues_and_deploys(tmp_path, tiny_marian, parallel_sentences, capsys, monkeypatch):
    quick = partial(script.compare_engines, runs=1, sentences=1, new_tokens=2)
    monkeypatch.setattr(script, "compare_engines", quick)
    data, recipe = tmp_path / "data.jsonl", tmp_path / "small.yaml"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in parallel_sentences), encoding="utf-8")
    recipe.write_text(
        "model: {model_type: lightformer, d_model: 8, encoder_layers: 1, decoder_layers: 1}\nmax_steps: 3\n"
        "hidden_weight: 0"  # it is narrower
    )
    options = [tiny_marian, "--train-file", data, "--test-file", data, "--source-lang", "de", "--target-lang", "en"]
    options += ["--output-dir", tmp_path / "runs", "--ratios", 2, "--methods", "layers", f"small={recipe}"]
    options += ["half=ratio=null,decoder_layers=1,calibration=null"]
    options += ["paper=method=paper,training.learning_rate=3e-4,training.warmup_steps=0"]
    options += ["--starts", "converted", "--trainings", "distilled", "--max-steps", 1, "--engines", "transformers"]
    options += ["--learning-rate", 1e-3, "--logging-steps", 1, "--hidden-weight", 5, "--jobs", 2]
    options += ["--max-source-length", 40, "--max-target-length", 40, "--generation-max-length", 20]
    command = list(map(str, options))
    script.main(command)
    rows = json.loads((tmp_path / "runs" / "results.json").read_text())
    assert [(row["ratio"], row["method"], row["start"], row["trained"]) for row in rows] == [
        (None, "half", "converted", None),
        (None, "half", "converted", "distilled"),
        (2.0, "layers", "converted", None),
        (2.0, "layers", "converted", "distilled"),
        (2.0, "paper", "converted", None),
        (2.0, "paper", "converted", "distilled"),
        (None, "small", "random", "distilled"),
    ]
    half = AutoConfig.from_pretrained(tmp_path / "runs" / "half" / "model")
    assert (half.decoder_layers, half.attention_rank, half.ffn_rank) == (1, None, None)
    layers = tmp_path / "runs" / "ratio-2-layers"
    config, teacher = (AutoConfig.from_pretrained(place) for place in (layers / "model", tiny_marian))
    halves = [max(1, round(count / 2)) for count in (teacher.encoder_layers, teacher.decoder_layers)]
    assert [config.encoder_layers, config.decoder_layers] == halves
    assert (config.attention_rank, config.ffn_rank, config.d_model) == (None, None, teacher.d_model)
    models = [load_model(tmp_path / "runs" / "small" / "random-distilled")[0], load_model(layers / "model")[0]]
    assert [rows[6]["parameters"], rows[3]["parameters"]] == [unique_parameters(model) for model in models]
    trained = ("ratio-2-layers/converted", "ratio-2-paper/converted", "small/random")
    states = [json.loads((tmp_path / "runs" / f"{name}-distilled/trainer_state.json").read_text()) for name in trained]
    assert [state["max_steps"] for state in states] == [1, 1, 3]  # of the recipe alone
    assert [state["log_history"][0]["learning_rate"] for state in states[:2]] == [1e-3, 3e-4]
    for row in rows:
        assert (row["minutes"] or 0) > 0 if row["trained"] else row["minutes"] is None
        assert row["bleu_to_teacher"]["low"] <= row["bleu_to_teacher"]["value"] <= row["bleu_to_teacher"]["high"]

    engines = json.loads((tmp_path / "runs" / "engines.json").read_text())
    assert len(engines["deployed"]) == len(engines["timings"]) == 5  # the teacher, and what was trained
    assert "small/random-distilled" in engines["models"]
    assert all(place["scores"]["bleu"] >= 0 for place in engines["deployed"])
    for picture in ("engines.png", "engines-dark.png"):
        assert (tmp_path / "runs" / picture).stat().st_size > 10_000
    assert "tokens/s" in capsys.readouterr().out

    scores = layers / "converted-untrained" / "test_results.json"
    scores.write_text(json.dumps({"test_bleu": 12.5, "test_chrf": 3.0}))
    script.main(command[: command.index("--engines")] + command[command.index("--engines") + 2 :])
    assert json.loads((tmp_path / "runs" / "results.json").read_text())[2]["bleu"] == 12.5  # not run again
    script.draw([*rows, *(row | {"ratio": 1.5} for row in rows if row["ratio"])], tmp_path, script.test_names([data]))
    for picture in ("results.png", "results-dark.png"):
        assert (tmp_path / picture).stat().st_size > 10_000


@pytest.mark.parametrize(("width", "weight"), [(64, "5"), (32, "0")])
def test_hidden_states_are_compared_where_a_conversion_keeps_all_features(width, weight, tmp_path):
    run = script.Run(ratio=4, method="all", seed=0, groups=None, trained="distilled")
    LightFormerConfig(d_model=width).save_pretrained(tmp_path / run.conversion_folder / "model")
    given = {"output_dir": tmp_path, "width": 64, "hidden_weight": 5, "train_file": "train", "validation_file": None}
    given |= {"max_steps": 1, "teacher": "t", "distillation_alpha": 0.7, "test_file": ["test"]}
    words = script.options(run, {}, Namespace(**given, source_lang="de", target_lang="en"), [])
    assert words[words.index("--hidden-weight") + 1] == weight


def test_every_ratio_method_start_and_training_is_a_run():
    args = ScriptArguments()
    args.ratios, args.starts, args.trainings = [1.5, 1.2], ["random"], ["distilled"]
    methods = {name: script.METHODS[name] for name in ("paper", "own-text")}
    assert [(run.ratio, run.method, run.start, run.trained) for run in script.list_runs(args, methods)] == [
        (ratio, method, *how)
        for ratio in (1.5, 1.2)
        for method in ("paper", "own-text")
        for how in (("converted", None), ("random", "distilled"))
    ]


def test_a_method_of_ones_own():
    parsed = script.parse_methods(["all", "each=method=narrow,pattern={ffn: 4x, fc1: 8},study.allocation=uniform"])
    pattern = {"ffn": "4x", "fc1": 8}
    assert parsed["each"] == {"method": "narrow", "pattern": pattern, "study.allocation": "uniform"}
    args = ScriptArguments()
    (run, *_) = script.list_runs(args, parsed | {"paper": {"method": "paper"}})
    assert (run.method, run.seed) == ("all", 3)
    settings, study = script.conversion_of(run, {"study.refit": False}, args)
    assert (study.refit, study.calibration_seed, settings["calibration"], settings["ratio"]) == (False, 3, "text", 2.0)
    settings, study = script.conversion_of(run, {"method": "paper"}, args)
    assert (study, "calibration" in settings) == (script.StudyOptions(), False)


def test_layers_as_they_are_need_no_text(tiny_marian, tmp_path):
    """What `--help` shows of a method that keeps one layer without regressing it can be converted."""
    parsed = script.parse_methods(["6-1=ratio=null,decoder_layers=1,study.refit=false"])
    args = ScriptArguments()
    (run,) = script.list_runs(args, parsed)
    settings, study = script.conversion_of(run, parsed["6-1"], args)
    convert(tiny_marian, tmp_path / "light", study=study, progress=False, **settings)
    assert AutoConfig.from_pretrained(tmp_path / "light").decoder_layers == 1


def test_a_recipe_brings_neither_data_nor_tokenizer(tmp_path):
    recipe = tmp_path / "small.yaml"
    fields = {"tokenizer_name": "bpe", "train_file": "other.jsonl", "test_file": "other.jsonl", "target_lang": "fr"}
    fields |= {"model": {"model_type": "subformer"}, "learning_rate": 0.5, "max_tokens": 99, "max_source_length": 7}
    recipe.write_text(json.dumps(fields))
    kept = {"learning_rate": 0.5, "max_tokens": 99, "max_source_length": 7}
    assert script.own_training(recipe) == kept


@pytest.mark.parametrize("name", script.METHODS)
def test_every_method_can_be_asked_for(name):
    (run,) = {
        run.conversion_folder: run for run in script.list_runs(ScriptArguments(), {name: script.METHODS[name]})
    }.values()
    script.conversion_of(run, script.METHODS[name], ScriptArguments())


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("papr", "no method 'papr'; did you mean paper"),
        ("mine=weighting=rows", "--methods mine: no option 'weighting'; did you mean study.weighting"),
        ("mine=training.lr=1", "--methods mine: no option 'training.lr'"),
        ("../mine=ratio=2", "expected a name"),
        ("paper=ratio=2", "names 'paper' twice"),
        ("mine=none.yaml", "No recipe none.yaml"),
    ],
)
def test_methods_that_are_none(method, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        script.parse_methods(["paper", method])


class ScriptArguments:
    """As the command line gives them."""

    ratios, encoder_groups, calibration_seeds, starts, trainings = [2.0], [], [3], ["converted"], []
    train_file, source_lang, target_lang = "text", "de", "en"
    layers = {"encoder": 6, "decoder": 6}  # noqa: RUF012
