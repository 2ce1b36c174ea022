"""Recovery by one call: its settings, what it leaves, that it goes on, and what it refuses."""

import io
import json
import os
import random
import shutil

import numpy
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from rich.console import Console
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer

from lightformers_hf import convert
from lightformers_hf.arguments import RecoverArguments
from lightformers_hf.files import lock, read_json
from lightformers_hf.recovery import runs
from lightformers_hf.recovery.runs import choose_settings, find_distance, list_checkpoints, plan_steps
from lightformers_hf.rounding import is_rounded
from lightformers_hf.text import fingerprint
from lightformers_hf.workflows.recover import Run, recover, start_run

pytestmark = pytest.mark.usefixtures("few_random_texts")
BASE = choose_settings(4, 256, same_width=True, bf16=False, on_cpu=True)


def test_settings_are_those_that_were_measured():
    rates = {ratio: choose_settings(ratio, 256, same_width=True, bf16=True, on_cpu=True) for ratio in (2, 4, 6, 8, 12)}
    found = {ratio: round(one.learning_rate, 4) for ratio, one in rates.items()}
    assert found == {2: 1e-3, 4: 1e-3, 6: 1e-3, 8: 1.2e-3, 12: 1.5e-3}
    assert [one.hidden_weight for one in rates.values()] == [5, 5, 5, 5, 5]
    assert {one.alpha for one in rates.values()} == {0.7}
    wide = choose_settings(6, 1024, same_width=False, bf16=True, on_cpu=False)
    assert (wide.learning_rate, wide.hidden_weight) == (2.5e-4, 0)
    random = choose_settings(4, 256, same_width=True, bf16=True, on_cpu=True, random_text=True)
    assert (random.learning_rate, random.alpha, random.hidden_weight) == (5e-4, 1.0, 5)


@pytest.mark.parametrize(
    ("seconds", "step", "evaluation", "epoch", "expected"),
    [
        (1000, 1.0, 10, 1000, (900, 90)),
        (1000, 1.0, 100, 1000, (900, 900)),
        (1000, 1.0, 10, 5, (200, 20)),  # forty epochs
        (1, 5.0, 10, 100, (1, 1)),
    ],
)
def test_steps_fill_the_time(seconds, step, evaluation, epoch, expected):
    settings = plan_steps(BASE, seconds, step, evaluation, epoch, ratio=4, width=256)
    assert (settings.steps, settings.eval_steps) == expected
    assert settings.steps % settings.eval_steps == 0
    assert 1 <= settings.warmup_steps <= 100


@pytest.mark.parametrize("seconds", [70, 300, 500, 3000])
def test_few_steps_of_a_model_near_its_teacher_are_small(seconds):
    near, wide, far = (
        plan_steps(BASE, seconds, 1.0, 10, 1000, ratio=ratio, width=width)
        for ratio, width in ((4, 256), (4, 512), (6, 512))
    )
    assert near.learning_rate == pytest.approx(BASE.learning_rate * min(1, near.steps / 600))
    assert wide.learning_rate == pytest.approx(BASE.learning_rate * min(1, near.steps / 1200))
    assert far.learning_rate == BASE.learning_rate


def test_what_lost_much_is_far_whatever_its_size():
    """As models are whose layers were left out."""
    assert [find_distance(ratio, 0.86, 0.85) for ratio in (1.2, 4, 8)] == [1.2, 4, 8]
    assert [find_distance(ratio, 0.83, 0.85) for ratio in (1.2, 4, 8)] == [5, 5, 8]


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_marian, parallel_sentences):
    """A folder with a compressed model, pairs, and text of one language."""
    folder = tmp_path_factory.mktemp("recover")
    convert(tiny_marian, folder / "light", rank=4, method="paper", progress=False)
    rows = [pair | {"de": f"{pair['de']} {n}"} for n in range(3) for pair in parallel_sentences]
    (folder / "pairs.jsonl").write_text("".join(json.dumps({"translation": row}) + "\n" for row in rows))
    (folder / "text.txt").write_text("\n".join(row["de"] for row in rows))
    return folder


def options(place, teacher, **changes):
    asked = {"teacher": teacher, "data": str(place / "pairs.jsonl"), "minutes": 0.02, "progress": False}
    return asked | changes


def test_a_rounded_recovery_is_scored_and_written_rounded(place, tiny_marian, tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "measure", lambda self, model: (dict.fromkeys(self.measured, 0.0), 0.1))
    for quantization in (None, "int4"):
        output = tmp_path / str(quantization)
        found = recover(place / "light", output, **options(place, tiny_marian, quantization=quantization))
        assert found.quantization == quantization
        assert is_rounded(AutoModelForSeq2SeqLM.from_pretrained(output)) == bool(quantization)


@pytest.mark.parametrize(
    ("model", "value", "message"),
    [
        ("light", "int3", "quantization is 'int3': expected int8 or int4"),
        ("light", "float16", "quantization is 'float16': expected int8 or int4"),
        ("dense", "int4", r"quantization is given, but .* is a MarianMTModel, .*: remove quantization"),
    ],
)
def test_quantizations_that_no_training_rounds_to(place, tiny_marian, tmp_path, model, value, message):
    light = place / "light"
    if model == "dense":
        light = tmp_path / "dense"
        shutil.copytree(tiny_marian, light)
    with pytest.raises(ValueError, match=message):
        recover(light, tmp_path / "out", **options(place, tiny_marian, quantization=value))
    assert not (tmp_path / "out").exists()


def test_a_recovery_goes_on_where_it_was_interrupted(place, tiny_marian, tmp_path, monkeypatch):
    def interrupt(self, args, state, control, **_):
        control.should_evaluate = control.should_save = True
        if list_checkpoints(args.output_dir):
            raise KeyboardInterrupt

    monkeypatch.setattr(runs.Pace, "on_step_end", interrupt)
    monkeypatch.setattr("lightformers_hf.workflows.run.FOR_VALIDATION", 0.1)
    output = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        recover(place / "light", output, **options(place, tiny_marian, minutes=0.1))
    chosen = read_json(output / "recovery.json")["settings"]
    with pytest.raises(FileExistsError, match="another minutes"):
        recover(place / "light", output, **options(place, tiny_marian, minutes=1))
    monkeypatch.undo()
    found = recover(place / "light", output, **options(place, tiny_marian, minutes=0.1))
    assert found.settings == chosen
    assert 0 < found.steps <= chosen["most_steps"]
    assert found.sentences == 3
    assert not list(output.glob("checkpoint-*"))
    assert read_json(output / "recovery.json")["result"]["after"] == found.after
    assert AutoTokenizer.from_pretrained(output)
    assert (
        AutoModelForSeq2SeqLM.from_pretrained(output).config.dropout
        == AutoConfig.from_pretrained(place / "light").dropout
    )
    assert (output / "compression.json").is_file()
    with pytest.raises(FileExistsError, match="complete"):
        recover(place / "light", output, **options(place, tiny_marian, minutes=0.1))
    again = recover(place / "light", output, overwrite=True, **options(place, tiny_marian, minutes=0.01))
    assert again.steps >= 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": 0.3}, "`temperature` is set to `0.3`"),
        ({"num_return_sequences": 2}, "num_return_sequences is 2, set it to 1"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate is True, set it to False"),
    ],
)
def test_generation_settings_that_end_a_training_are_refused_before_it(place, tiny_marian, tmp_path, wrong, message):
    shutil.copytree(place / "light", tmp_path / "light")
    file = tmp_path / "light" / "generation_config.json"
    file.write_text(json.dumps(read_json(file) | wrong))
    with pytest.raises(ValueError, match=f"light/generation_config.json does not allow a training: .*{message}"):
        recover(tmp_path / "light", tmp_path / "out", **options(place, tiny_marian))
    assert not (tmp_path / "out").exists()


def test_the_ratio_is_to_the_whole_teacher(place, tiny_marian, tmp_path):
    """Not to the tokens that the model kept."""
    text = place / "pairs.jsonl"
    convert(tiny_marian, tmp_path / "light", vocabulary=[str(text)], vocabulary_size=60, ratio=1, progress=False)
    found = recover(tmp_path / "light", tmp_path / "out", **options(place, tiny_marian))
    report = read_json(tmp_path / "light" / "compression.json")
    assert found.parameters == report["parameters_after"] < 0.97 * report["parameters_before"]
    assert found.ratio == report["parameters_before"] / report["parameters_after"]


@pytest.mark.parametrize(
    ("chrf", "data", "is_far"),
    [
        *((10.0, "pairs.jsonl", True), (45.0, "pairs.jsonl", True), (59.0, "pairs.jsonl", False)),
        *((10.0, "text.txt", True), (45.0, "text.txt", False), (10.0, None, False)),
    ],
)
def test_settings_are_those_of_what_was_lost(place, tiny_marian, tmp_path, monkeypatch, chrf, data, is_far):
    """By references, or by the teacher's own translations, with which others are near; without text by the ratio."""
    scores = iter([{"bleu": 0.0, "chrf": chrf}, {"bleu": 0.0, "chrf": 60.0}])
    monkeypatch.setattr(Run, "measure", lambda *_: (next(scores), 0.01))
    found = recover(place / "light", tmp_path / "out", **options(place, tiny_marian, data=data and str(place / data)))
    rate = found.settings["learning_rate"]
    assert (rate == pytest.approx(1e-3)) == is_far
    assert found.settings["steps"] < 600
    mode = (tmp_path / "out" / "recovery.json").stat().st_mode
    assert {file.stat().st_mode for file in (tmp_path / "out").iterdir()} == {mode}


@pytest.mark.parametrize(
    ("metrics", "best"),
    [
        ([], {"bleu": 0.0, "chrf": 101.0}),  # better than any by chrF, which counts
        (["CER", "bleu"], {"cer": -1.0, "bleu": 0.0, "chrf": 0.0}),  # and here by the lowest error rate
    ],
)
def test_a_training_that_does_harm_is_not_kept(place, tiny_marian, tmp_path, monkeypatch, metrics, best):
    monkeypatch.setattr(Run, "measure", lambda *_: (best, 0.01))
    found = recover(place / "light", tmp_path / "out", metrics=metrics, **options(place, tiny_marian))
    assert found.best_by == ("cer" if metrics else "chrf")
    assert (found.after, found.best_step) == (best, 0)
    written, before = (AutoModelForSeq2SeqLM.from_pretrained(path) for path in (tmp_path / "out", place / "light"))
    torch.testing.assert_close(written.state_dict(), before.state_dict())
    console = Console(record=True, file=io.StringIO(), width=160)
    console.print(*found.parts())
    printed = console.export_text()
    assert "none better than it was" in printed
    assert "CER -1.0, BLEU 0.0" in printed or not metrics


@pytest.mark.parametrize(
    "variables",
    [
        {"LOCAL_RANK": "0"},
        {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571"},
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
        {"ACCELERATE_USE_DEEPSPEED": "true"},
    ],
)
def test_variables_of_launchers_do_not_matter(place, tiny_marian, tmp_path, monkeypatch, caplog, capfd, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before, drawn = dict(os.environ), [torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()]
    recover(place / "light", tmp_path / "out", **options(place, tiny_marian, minutes=0.005, seed=3))
    assert f"one process, which ignores {min(variables)}" in caplog.text
    assert dict(os.environ) == before
    assert "Tokenizing" not in capfd.readouterr().err  # progress is False
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert [random.getstate(), numpy.random.get_state()[1].tolist()] == drawn[1:]


@pytest.mark.parametrize("share", [0.5, 1])
def test_the_validation_is_of_text_that_the_conversion_has_not_read(place, tiny_marian, tmp_path, caplog, share):
    light, data = shutil.copytree(place / "light", tmp_path / "light"), tmp_path / "many.jsonl"
    rows = [{"de": f"Zwei Hunde spielen {number}.", "en": f"Two dogs play {number}."} for number in range(40)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    known = {fingerprint(row["de"]) for row in rows[: int(40 * share)]}
    report = read_json(light / "compression.json")
    (light / "compression.json").write_text(json.dumps(report | {"calibrated_on": sorted(known)}))
    recover(light, tmp_path / "out", **options(place, tiny_marian, data=str(data), source_lang="de", target_lang="en"))
    drawn = read_json(tmp_path / "out" / "validation.json")["source"]
    assert len(drawn) == 4
    assert known.isdisjoint(map(fingerprint, drawn)) == (share < 1)
    assert ("was calibrated on" in caplog.text) == (share == 1)


def test_of_text_of_one_language_the_teacher_makes_pairs(place, tiny_marian, tmp_path):
    asked = options(place, tiny_marian, data=str(place / "text.txt"))
    light = place / "light"
    with pytest.raises(ValueError, match="holds only the text of the validation"):
        recover(light, tmp_path / "all", validation=str(place / "pairs.jsonl"), **asked)
    (tmp_path / "val.jsonl").write_text(json.dumps({"translation": {"de": "Ein Hund.", "en": "A dog."}}) + "\n")
    found = recover(light, tmp_path / "out", validation=str(tmp_path / "val.jsonl"), **asked)
    made = read_json(tmp_path / "out" / "translations.json")["target"]
    assert found.translations == len(made) > 0
    assert not found.with_teacher


@pytest.mark.parametrize("name", ["text.txt", None])
def test_without_pairs_the_teacher_is_the_reference(place, tiny_marian, tmp_path, name):
    asked = options(place, tiny_marian, data=name and str(place / name))
    found = recover(place / "light", tmp_path / "out", **asked)
    assert found.with_teacher
    # What it says itself; random weights repeat themselves until they are cut.
    assert found.teacher["chrf"] > found.before["chrf"]
    assert found.after["chrf"] >= found.before["chrf"]
    assert found.steps >= 1
    made = read_json(tmp_path / "out" / "translations.json")["target"]
    assert found.translations == len(made) > 0
    console = Console(record=True, file=io.StringIO(), width=160)
    console.print(*found.parts())
    assert "the teacher as reference" in console.export_text()
    with pytest.raises(ValueError, match="remove translations"):
        recover(place / "light", tmp_path / "none", translations=False, **asked)


def test_random_texts_recover_a_teacher_without_names_of_languages(place, tiny_marian, tmp_path, caplog):
    """And without texts that are longer than what the model reads: nobody could split them."""
    for name in ("teacher", "light"):
        shutil.copytree(tiny_marian if name == "teacher" else place / "light", tmp_path / name)
        file = tmp_path / name / "tokenizer_config.json"
        told = json.loads(file.read_text())
        told = {key: value for key, value in told.items() if not key.endswith("_lang")}
        file.write_text(json.dumps(told | {"model_max_length": 20}))
    found = recover(tmp_path / "light", tmp_path / "out", **options(tmp_path, tmp_path / "teacher", data=None))
    assert found.with_teacher
    assert "split them" not in caplog.text


def test_what_is_refused(place, tiny_marian, tmp_path):
    with pytest.raises(ValueError, match="minutes is 0"):
        recover(place / "light", tmp_path / "a", **options(place, tiny_marian, minutes=0))
    with lock(tmp_path / "a"), pytest.raises(BlockingIOError, match="being written by another process"):
        recover(place / "light", tmp_path / "a", **options(place, tiny_marian))
    with pytest.raises(ValueError, match=r"times its teacher's parameters: give the smaller one first"):
        recover(tiny_marian, tmp_path / "a", **options(place, place / "light"))
    with pytest.raises(ValueError, match="as the model and as its teacher"):
        recover(place / "light", tmp_path / "a", **options(place, place / "light" / ""))
    assert not (tmp_path / "a").exists()
    with pytest.raises(ValueError, match=r"must be apart from .* which is read"):
        recover(place / "light", place / "light" / "sub", **options(place, tiny_marian))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(FileExistsError):
        recover(place / "light", tmp_path / "mine", overwrite=True, **options(place, tiny_marian))
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "x"


def test_a_multilingual_teacher_recovers_without_text(tiny_mbart50, tmp_path):
    convert(tiny_mbart50, tmp_path / "light", rank=4, method="paper", progress=False)
    asked = {"teacher": tiny_mbart50, "minutes": 0.02, "progress": False}
    found = recover(tmp_path / "light", tmp_path / "out", source_lang="de=de_DE", target_lang="en=en_XX", **asked)
    assert found.with_teacher
    assert found.steps >= 1


def test_a_multilingual_teacher_translates_into_the_light_models_language(tiny_mbart50, tmp_path):
    """Which its tokenizer and generation configuration know from the conversion."""
    languages = {"source_lang": "de=de_DE", "target_lang": "en=en_XX"}
    convert(tiny_mbart50, tmp_path / "light", rank=4, method="paper", progress=False, **languages)
    teacher = AutoModelForSeq2SeqLM.from_pretrained(tiny_mbart50)
    teacher.generation_config.forced_bos_token_id = None
    teacher.save_pretrained(tmp_path / "teacher")
    AutoTokenizer.from_pretrained(tiny_mbart50).save_pretrained(tmp_path / "teacher")
    light = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "light")
    places = [tmp_path / name for name in ("light", "out", "teacher")]
    names = {"model": str(places[0]), "teacher": str(places[2])}
    call = RecoverArguments(**names, output=places[1], progress=False)
    run = start_run(call, places[1], names["model"], names["teacher"], None, None)
    assert light.generation_config.forced_bos_token_id is not None
    assert run.distiller.generation_config.forced_bos_token_id == light.generation_config.forced_bos_token_id


def test_the_result_has_the_type_the_size_and_the_dropout_of_what_it_is_made_of(place, tiny_marian, tmp_path):
    light = AutoModelForSeq2SeqLM.from_pretrained(place / "light").bfloat16()
    light.config.update({"dropout": 0.25, "activation_dropout": 0.125})
    light.save_pretrained(tmp_path / "light")
    AutoTokenizer.from_pretrained(place / "light").save_pretrained(tmp_path / "light")
    recover(tmp_path / "light", tmp_path / "out", **options(place, tiny_marian))
    size, before = ((tmp_path / name / "model.safetensors").stat().st_size for name in ("out", "light"))
    assert size == pytest.approx(before, rel=0.05)
    after = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").config
    assert after.dtype == torch.bfloat16
    assert (after.dropout, after.activation_dropout, after.use_cache) == (0.25, 0.125, light.config.use_cache)


def test_pairs_in_long_strings_have_translations_too(place, tiny_marian, tmp_path):
    """As parquet files of some libraries hold them."""
    rows = [json.loads(line)["translation"] for line in (place / "pairs.jsonl").read_text().splitlines()]
    table = pa.table({name: pa.array([row[name] for row in rows], pa.large_string()) for name in ("de", "en")})
    parquet.write_table(table, tmp_path / "pairs.parquet")
    asked = options(place, tiny_marian, data=str(tmp_path / "pairs.parquet"), source_lang="de", target_lang="en")
    assert recover(place / "light", tmp_path / "out", translations=True, **asked).translations > 0


def test_translations_of_a_teacher_are_not_made_again(place, tiny_marian, tmp_path):
    light, out, data = str(place / "light"), tmp_path / "out", tmp_path / "distilled"
    data.mkdir()
    shutil.copy(place / "pairs.jsonl", data / "part-00000.jsonl")
    call = RecoverArguments(light, out, teacher=tiny_marian, source_lang="de", target_lang="en", progress=False)
    for made in (False, True):
        if made:
            (data / "distill.json").write_text("{}")
        out.mkdir(exist_ok=True)
        run = start_run(call, out, light, str(tiny_marian), str(data), None)
        assert bool(run.ask_for_texts(600, None, lost=True)) != made


def test_what_is_cut_is_said_and_no_engine_is_loaded_to_translate_nothing(
    place, tiny_marian, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("lightformers_hf.workflows.run.fastest_translator", lambda *_: pytest.fail("loaded"))
    text = " ".join(["Hund"] * 200)
    rows = [{"de": f"{number} {text}", "en": "A dog."} for number in range(12)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps({"translation": row}) + "\n" for row in rows))
    asked = options(place, tiny_marian, data=str(tmp_path / "long.jsonl"), validation=str(place / "pairs.jsonl"))
    found = recover(place / "light", tmp_path / "out", translations=False, **asked | {"progress": True})
    assert found.translations == 0
    assert "12 of 12 sources are cut after 64 tokens" in "".join(capsys.readouterr())


def test_a_prefix_that_is_given_stands_before_the_sources(place, tiny_marian, tmp_path):
    languages = ("de=translate: ", "en")
    data = str(place / "pairs.jsonl")
    light, out, teacher = str(place / "light"), tmp_path / "out", str(tiny_marian)
    sides = dict(zip(("source_lang", "target_lang"), languages, strict=True))
    run = start_run(
        RecoverArguments(light, out, teacher=teacher, progress=False, **sides), out, light, teacher, data, None
    )
    assert all(text.startswith("translate: ") for text in [*run.corpus.table["source"], *run.held_out["source"]])


def test_it_is_alone_in_its_folder_also_where_that_is_new(place, tiny_marian, tmp_path, monkeypatch):
    """In the home folder, of which a path may be: no other process gets the lock, or finds something complete."""
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(place / "light", tmp_path / "light")
    train, output = Run.train, tmp_path / "new" / "out"

    def meanwhile(self, record):
        with pytest.raises(BlockingIOError), lock(output):
            pass
        return train(self, record)

    monkeypatch.setattr(Run, "train", meanwhile)
    found = recover("~/light", "~/new/out", **options(place, tiny_marian))
    assert (found.output, sorted(path.name for path in tmp_path.iterdir())) == (str(output), ["light", "new"])
    assert (output / "compression.json").is_file()
    with pytest.raises(ValueError, match="which is read"):
        recover("~/light", "~/light", **options(place, tiny_marian))
    with pytest.raises(FileNotFoundError):
        recover(place / "light", tmp_path / "other" / "out", **options(place, tmp_path / "no teacher"))
    assert not (tmp_path / "other").exists()


def test_translations_keep_their_sources_where_the_data_changes(place, tiny_marian, tmp_path, monkeypatch):
    shutil.copy(place / "pairs.jsonl", tmp_path / "pairs.jsonl")
    asked = options(place, tiny_marian, data=str(tmp_path / "pairs.jsonl"), translations=True)
    seen = []

    def keep(self, record):
        seen.append(self.training_text(record["translations"]).table)
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "train", keep)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            recover(place / "light", tmp_path / "out", **asked)
        with (tmp_path / "pairs.jsonl").open("a") as file:
            file.write(json.dumps({"translation": {"de": "Ein neuer Satz.", "en": "A new sentence."}}) + "\n")
    assert seen[0] == seen[1]
    assert len(seen[0]["source"]) > 10


def test_shards_with_a_damaged_line_resume_only_while_all_are_there(place, tiny_marian, tmp_path, monkeypatch, caplog):
    lines = (place / "pairs.jsonl").read_text().splitlines(keepends=True)
    for shard in range(3):
        (tmp_path / f"train-{shard}.jsonl").write_text("".join(lines[shard::3]))
    with (tmp_path / "train-2.jsonl").open("a") as file:
        file.write('{"translation": {"de": "halb')
    asked = options(place, tiny_marian, data=str(tmp_path / "train-*.jsonl"), translations=False)
    with pytest.raises(ValueError, match=rf"train-2\.jsonl cannot be read .* line {len(lines[2::3]) + 1} is no JSON"):
        recover(place / "light", tmp_path / "out", **asked)
    assert not (tmp_path / "out").exists()
    asked["skip_bad_lines"] = True
    seen = []

    def keep(self, record):
        seen.append((self.held_out.sort("source")[:], [pairs for _, pairs in self.corpus.pools(0, 0)]))
        if len(seen) == 1:
            raise KeyboardInterrupt
        return train(self, record)

    train = Run.train
    monkeypatch.setattr(Run, "train", keep)
    with pytest.raises(KeyboardInterrupt):
        recover(place / "light", tmp_path / "out", **asked)
    (tmp_path / "train-1.jsonl").rename(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=r"train-1\.jsonl was a part of the data .* put it back"):
        recover(place / "light", tmp_path / "out", **asked)
    (tmp_path / "gone").rename(tmp_path / "train-1.jsonl")
    with (tmp_path / "train-0.jsonl").open("a") as file:
        file.write(json.dumps({"translation": {"de": "Ein neuer Satz.", "en": "A new sentence."}}) + "\n")
    found = recover(place / "light", tmp_path / "out", **asked)
    assert "train-0.jsonl has changed since this work began" in caplog.text
    assert (found.bad_lines, found.sentences) == (1, len(seen[0][0]["source"]))
    (held, (before,)), (still_held, (after,)) = seen
    assert held == still_held  # though all text is another
    assert {*after["source"]} == {*before["source"], "Ein neuer Satz."}
    assert {*before["source"]} | {*held["source"]} == {json.loads(line)["translation"]["de"] for line in lines}
    assert not {*before["source"]} & {*held["source"]}
