"""The teacher's corpus: its texts, a kill in the middle, what may not be mixed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import distill_data as script
import pytest
import torch

from lightformers_hf import translate
from lightformers_hf.engines import export
from lightformers_hf.languages import set_languages
from lightformers_hf.loading import load_model
from lightformers_hf.text import load_parallel

SCRIPT = Path(script.__file__)


@pytest.fixture
def data(tmp_path, parallel_sentences):
    """Two hundred sentences, most of them unlike the others, one of them empty."""
    words = " ".join(pair["de"] for pair in parallel_sentences).split()
    texts = [" ".join(words[i % 60 : i % 60 + 2 + i % 7]) for i in range(200)]
    texts[5] = ""
    rows = [{"translation": {"de": text, "en": "by people"}} for text in texts]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "data.jsonl", texts


def command(teacher, data, **options):
    options = {"source_lang": "de", "target_lang": "en", "max_new_tokens": 12} | options
    return [str(teacher), str(data), *(t for name, value in options.items() for t in (f"--{name}", str(value)))]


def test_the_teachers_beam_output_in_the_pair_format(tiny_marian, data, tmp_path):
    output = tmp_path / "new" / "out.jsonl"
    script.main(command(tiny_marian, data[0], output=output, max_samples=20))
    pairs = load_parallel(str(output), source="de", target="en")
    assert pairs["source"][:] == data[1][:20]
    # independent of batches: every text alone, with the script's default beam
    alone = [translate([text], tiny_marian, num_beams=5, max_new_tokens=12, split=False)[0] for text in data[1][:20]]
    assert pairs["target"][:] == alone
    assert [path.name for path in output.parent.iterdir()] == ["out.jsonl"]


def test_a_multilingual_teacher_is_told_the_languages(tiny_mbart50, data, tmp_path):
    codes = {"source_lang": "de=de_DE", "target_lang": "en=fr_XX", "num_beams": 1, "max_samples": 4}
    script.main(command(tiny_mbart50, data[0], output=tmp_path / "out.jsonl", **codes))
    made = load_parallel(str(tmp_path / "out.jsonl"), source="de", target="en")["target"][:]
    teacher, tokenizer = load_model(tiny_mbart50)
    source, first = tokenizer.convert_tokens_to_ids(["de_DE", "fr_XX"])
    for text, output in zip(data[1], made, strict=False):
        ids = torch.tensor([[source, *tokenizer(text, add_special_tokens=False)["input_ids"], 2]])
        wanted = teacher.generate(ids, forced_bos_token_id=first, num_beams=1, max_new_tokens=12, max_length=None)
        assert wanted[0, 1] == first
        assert output == tokenizer.decode(wanted[0], skip_special_tokens=True)
    with pytest.raises(ValueError, match="target_lang is 'en', which"):
        script.main(command(tiny_mbart50, data[0], output=tmp_path / "no.jsonl", source_lang="de=de_DE"))


def test_an_exported_teacher_says_the_same(tiny_mbart50, data, tmp_path):
    """In float32 and greedily; and it translates into the language alone that it was exported for."""
    codes = {"source_lang": "de=de_DE", "target_lang": "en=fr_XX", "num_beams": 1, "max_samples": 8}
    teacher, tokenizer = load_model(tiny_mbart50)
    set_languages(teacher, tokenizer, "de_DE", "fr_XX")
    for part in (teacher, tokenizer):
        part.save_pretrained(tmp_path / "teacher")
    export(tmp_path / "teacher", tmp_path / "deployed", to="ctranslate2", quantization="float32")
    for name, place in {"out": tmp_path / "teacher", "fast": tmp_path / "deployed"}.items():
        script.main(command(place, data[0], output=tmp_path / f"{name}.jsonl", **codes))
    assert (tmp_path / "fast.jsonl").read_text() == (tmp_path / "out.jsonl").read_text()
    other = codes | {"target_lang": "en=en_XX", "output": tmp_path / "no.jsonl"}
    with pytest.raises(ValueError, match="exported for another target language"):
        script.main(command(tmp_path / "deployed", data[0], **other))


@pytest.mark.usefixtures("warm_python")
def test_a_killed_run_goes_on_without_loss_or_repetition(tiny_marian, data, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "CHUNK", 20)
    script.main(command(tiny_marian, data[0], output=tmp_path / "whole.jsonl", num_beams=2))
    options = command(tiny_marian, data[0], output=tmp_path / "cut.jsonl", num_beams=2)
    program = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import distill_data; distill_data.CHUNK = 20; "
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", f"{program}distill_data.main({options!r})"], env=environment, stderr=subprocess.DEVNULL
    )
    partial = tmp_path / "cut.jsonl.partial"
    while process.poll() is None and not (partial.is_file() and partial.stat().st_size):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL
    lines = partial.read_bytes().splitlines(keepends=True)
    assert 20 <= len(lines) < 200
    partial.write_bytes(b"".join([*lines[:27], b'{"translation": {"de": "to']))  # a kill in the middle of a write
    asked = []
    monkeypatch.setattr(script, "translate", lambda texts, *a, **k: asked.extend(texts) or translate(texts, *a, **k))
    script.main(options)
    assert asked == data[1][20:]
    assert (tmp_path / "cut.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not list(tmp_path.glob("cut.jsonl.*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source_lang": "fr"}, "no column 'fr'"),
        ({"source_lang": "en"}, "both 'en'"),
        ({"source_lang": "en=en_XX"}, "both 'en'"),
        ({"source_lang": "de=de_DE"}, "multilingual tokenizer only"),
        ({"num_beams": 0}, "num_beams is 0"),
        ({"output": "data.txt"}, "ends in .jsonl"),
        ({"output": "DATA"}, "there already"),
        ({"output": "begun.jsonl"}, "was begun with teacher 'other'"),
    ],
)
def test_bad_input(tiny_marian, data, tmp_path, changes, message):
    (tmp_path / "begun.jsonl.partial").write_text("")
    (tmp_path / "begun.jsonl.options.json").write_text('{"teacher": "other"}')
    options = {"output": "out.jsonl"} | changes
    options["output"] = data[0] if options["output"] == "DATA" else tmp_path / options["output"]
    before = sorted(tmp_path.iterdir())
    with pytest.raises((ValueError, OSError), match=message):
        script.main(command(tiny_marian, data[0], **options))
    assert sorted(tmp_path.iterdir()) == before


def test_lines_of_other_data_are_not_mixed_in(tiny_marian, data, tmp_path):
    output = tmp_path / "out.jsonl"
    record, partial = (output.with_name(f"out.jsonl.{end}") for end in ("options.json", "partial"))
    options = {"teacher": str(tiny_marian)}
    script.count_complete(partial, record, options, data[1], ("de", "en"))
    partial.write_text(json.dumps({"translation": {"de": "from elsewhere", "en": ""}}) + "\n")
    with pytest.raises(ValueError, match="line 1, is not of this data"):
        script.count_complete(partial, record, options, data[1], ("de", "en"))


@pytest.mark.usefixtures("warm_python")
def test_the_command_line_prints_one_message_and_fails(tmp_path):
    options = command(tmp_path / "none", tmp_path / "none.txt", output=tmp_path / "out.jsonl")
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])}
    done = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert done.stderr.count("error:") == 1
    assert "No data file" in done.stderr
