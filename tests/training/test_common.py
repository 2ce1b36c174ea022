"""What the scripts share and no script's own test looks at."""

import json
from contextlib import nullcontext
from pathlib import Path

import arguments
import common
import compare_starts
import pytest
import run_clm


@pytest.mark.parametrize("name", ["texts.txt", "texts.jsonl", "texts.csv", "texts.tsv"])
def test_texts_are_the_same_from_every_kind_of_file(tmp_path, name):
    texts = ["Ein Hund.", "null", "1984"]
    lines = {".jsonl": [json.dumps({"text": text}) for text in texts], ".txt": texts}
    (tmp_path / name).write_text("\n".join(lines.get((tmp_path / name).suffix, ["text", *texts])) + "\n")
    assert common.load_texts(str(tmp_path / name), ["text"])["text"][:] == texts


@pytest.mark.parametrize("name", ["seed", "data_seed"])
@pytest.mark.parametrize("value", ["12345678901234567890", "-1"])
def test_a_seed_that_numpy_does_not_take_is_named(tmp_path, name, value):
    given = ["--output-dir", str(tmp_path / "out"), f"--{name}", value]
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is {value}: give a whole number from 0 to"):
        arguments.parse_arguments((arguments.ModelArguments, run_clm.TrainingArguments), given)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("linear", '{"num_decay_steps": 10}', "num_decay_steps"),
        ("warmup_stable_decay", None, "num_decay_steps"),
        ("cosine", '{"num_cycles": 0.5}', None),
        ("warmup_stable_decay", '{"num_decay_steps": 10}', None),
    ],
)
def test_schedules_that_lack_or_do_not_know_what_is_given_are_named(tmp_path, kind, given, message):
    options = ["--output-dir", str(tmp_path / "out"), "--lr-scheduler-type", kind]
    options += ["--lr-scheduler-kwargs", given] if given else []
    fits = nullcontext() if message is None else pytest.raises(ValueError, match=f"type is {kind}.*{message}")
    with fits:
        arguments.parse_arguments((arguments.ModelArguments, run_clm.TrainingArguments), options)


def test_a_seed_of_a_comparison_that_numpy_does_not_take_is_named(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["compare_starts.py", "--seeds", "0", "12345678901234567890"])
    with pytest.raises(SystemExit):
        compare_starts.parse_arguments()
    assert "argument --seeds: 12345678901234567890: give a whole number from 0 to" in capsys.readouterr().err


def test_an_interrupted_script_ends_with_one_line(capsys):
    def main():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ending:
        common.run_script(main)
    assert (ending.value.code, *capsys.readouterr()) == (130, "", "stopped\n")
    scripts = [path.read_text(encoding="utf-8") for path in Path(common.__file__).parent.glob("*.py")]
    scripts = [text for text in scripts if "# /// script" not in text]  # which is one file that runs alone
    assert all(text.count("__main__") == text.count("\n    run_script(main)\n") for text in scripts)


def test_a_checkpoint_elsewhere_writes_over_no_folder(tmp_path):
    for name in ("first/checkpoint-2", "second"):
        (tmp_path / name).mkdir(parents=True)
    checkpoint = tmp_path / "first" / "checkpoint-2"
    (checkpoint / "trainer_state.json").write_text("{}")

    def resume(output):
        args = run_clm.TrainingArguments(output_dir=str(output), resume_from_checkpoint=str(checkpoint))
        return common.check_output(args, [])

    assert resume(tmp_path / "first") == resume(tmp_path / "second") == resume(tmp_path / "third") == str(checkpoint)
    (tmp_path / "second" / "model.safetensors").write_text("precious")
    with pytest.raises(FileExistsError, match=r"second is not empty \(model.safetensors\)"):
        resume(tmp_path / "second")
