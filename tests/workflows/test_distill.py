"""The teacher's corpus: its texts and scores, what is dropped, kills, and several processes."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from lightformers_hf import corpus as corpus_module
from lightformers_hf import distill, export, load_engine, translate
from lightformers_hf.text import load_parallel

ROOT = Path(__file__).parents[2]


@pytest.fixture
def data(tmp_path, parallel_sentences, monkeypatch):
    """Two files of 120 sentences each, whose blocks are so small that they are several shards."""
    monkeypatch.setattr(corpus_module, "BLOCK", 64)
    words = " ".join(pair["de"] for pair in parallel_sentences).split()
    texts = [f"{' '.join(words[i % 60 : i % 60 + 2 + i % 7])} {i}" for i in range(240)]
    for shard in range(2):
        rows = [{"translation": {"de": text, "en": "by people"}} for text in texts[shard * 120 : shard * 120 + 120]]
        (tmp_path / f"data-{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "data-*.jsonl"), texts


@pytest.fixture
def teacher(tmp_path_factory, tiny_marian):
    """One that ends its outputs: random weights never do."""
    folder = tmp_path_factory.mktemp("teacher") / "ends"
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_marian)
    model.final_logits_bias[0, model.config.eos_token_id] = 2.5
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_marian).save_pretrained(folder)
    return folder


def options(**changes):
    return {"num_beams": 2, "max_new_tokens": 45, "processes": 1, "progress": False} | changes


def read(output, name=None):
    rows = [json.loads(line) for path in sorted(output.glob("part-*")) for line in path.read_text().splitlines()]
    return rows if name is None else [row[name] for row in rows]


@pytest.fixture
def without_engine(monkeypatch):
    monkeypatch.setattr("lightformers_hf.workflows.distill.ENGINE", "none_such")


@pytest.mark.usefixtures("without_engine")
def test_the_teachers_outputs_and_their_log_probabilities(teacher, data, tmp_path):
    found = distill(teacher, data[0], tmp_path / "out", **options())
    rows = read(tmp_path / "out")
    assert found.read == 240
    assert found.rows == len(rows) == 240 - sum(found.dropped.values()) > 150
    assert [row["de"] for row in rows] == [text for text in data[1] if text in {row["de"] for row in rows}]
    expected = translate([row["de"] for row in rows], teacher, num_beams=2, max_new_tokens=45, split=False)
    assert [row["en"] for row in rows] == expected
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(teacher).eval(), AutoTokenizer.from_pretrained(teacher)
    for row in rows[:20]:
        inputs = tokenizer(row["de"], return_tensors="pt")
        ids = model.generate(**inputs, num_beams=2, max_new_tokens=45, max_length=None)[:, 1:]
        with torch.inference_mode():
            loss = model(**inputs, labels=ids).loss  # the mean over the tokens, that of the end included
        assert row["log_probability"] == pytest.approx(-float(loss), abs=2e-3)
    assert sorted(path.name for path in (tmp_path / "out").iterdir())[0] == "distill.json"
    pairs = load_parallel(str(tmp_path / "out"), source="de", target="en")
    assert pairs["target"][:] == expected


@pytest.mark.skipif(find_spec("ctranslate2") is None, reason="needs ctranslate2")
@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_several_processes_write_what_one_writes(teacher, data, tmp_path, format):
    one, two = (
        distill(teacher, data[0], tmp_path / f"{n}", **options(processes=n, format=format, batch_size=8))
        for n in (1, 2)
    )
    assert (one.engine, one.rows, one.dropped) == ("ctranslate2", two.rows, two.dropped)
    names = sorted(path.name for path in (tmp_path / "1").glob("part-*"))
    assert len(names) == one.shards > 2
    for name in names:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
    assert load_parallel(str(tmp_path / "1"), source="de", target="en").num_rows == one.rows


@pytest.mark.skipif(find_spec("ctranslate2") is None, reason="needs ctranslate2")
@pytest.mark.parametrize(
    ("beams", "changes"),
    [
        (1, {}),
        (2, {"length_penalty": 0.0}),
        (3, {"length_penalty": 0.6}),
        (1, {"no_repeat_ngram_size": 1}),
        (2, {"min_new_tokens": 12}),
        (2, {"forced_bos_token_id": 7}),
    ],
)
def test_the_engines_log_probabilities_are_those_of_its_tokens(teacher, parallel_sentences, tmp_path, beams, changes):
    """Whatever the search divides them by, and whatever tokens it forbids at some steps."""
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(teacher), AutoTokenizer.from_pretrained(teacher)
    model.generation_config.update(**changes)
    export(model, tmp_path / "deployed", tokenizer=tokenizer, to="ctranslate2", quantization="float32")
    engine = load_engine(tmp_path / "deployed")
    ids = tokenizer([pair["de"] for pair in parallel_sentences])["input_ids"]
    found = engine.generate_scored(ids, num_beams=beams, max_new_tokens=30)
    complete = [row for row, (_, _, is_complete) in enumerate(found) if is_complete]  # others end with a forced token
    assert complete
    scores = engine.score([ids[row] for row in complete], [found[row][0][:-1] for row in complete])
    assert [found[row][1] for row in complete] == pytest.approx([np.mean(row) for row in scores], abs=1e-4)


@pytest.mark.usefixtures("without_engine")
def test_lines_of_no_use_are_dropped_and_counted_and_the_best_are_kept(teacher, data, tmp_path, monkeypatch):
    (tmp_path / "data-2.jsonl").write_text(
        "".join(
            json.dumps({"translation": {"de": text, "en": "x"}}) + "\n"
            for text in [" ", data[1][3], "Hund " * 99, "X Y"]
        )
        + '{"translation": {"de": 3}}\n'
    )
    decode = "lightformers_hf.workflows.distill.find_fault"
    from lightformers_hf.workflows import distill as module

    with pytest.raises(ValueError, match=r"data-2\.jsonl, line 5 has a 'de' that is no text: 3"):
        distill(teacher, data[0], tmp_path / "whole", **options())
    fault = module.find_fault
    monkeypatch.setattr(decode, lambda text, found: fault(text, ("X  Y", 0.0, True) if text == "X Y" else found))
    whole = distill(teacher, data[0], tmp_path / "whole", skip_bad_lines=True, **options())
    assert {name: whole.dropped[name] for name in ("damaged", "empty", "repeated", "copied")} == {
        "damaged": 1, "empty": 1, "repeated": 1, "copied": 1
    }  # fmt: skip
    assert whole.read == 245 == whole.rows + sum(whole.dropped.values())
    best = distill(teacher, data[0], tmp_path / "best", skip_bad_lines=True, keep="70%", **options())
    scores, kept = read(tmp_path / "whole", "log_probability"), read(tmp_path / "best")
    assert len(kept) == best.rows == int(np.ceil(0.7 * whole.rows))
    assert sorted((row["log_probability"] for row in kept), reverse=True) == sorted(scores, reverse=True)[: len(kept)]
    assert best.dropped["improbable"] == whole.rows - best.rows


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_killed_at_random_moments_no_row_is_lost_or_doubled(teacher, data, tmp_path):
    asked = options(processes=2, keep="80%")
    distill(teacher, data[0], tmp_path / "whole", **asked)
    program = (
        "from lightformers_hf import corpus, distill\n"
        "if __name__ == '__main__':\n"
        "    corpus.BLOCK = 64\n"
        f"    distill({str(teacher)!r}, {data[0]!r}, {str(tmp_path / 'cut')!r}, **{asked!r})\n"
    )
    (tmp_path / "program.py").write_text(program)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    draw, kills, record = random.Random(0), 0, tmp_path / "cut" / "distill.json"
    for _ in range(int(os.environ.get("LIGHTFORMERS_KILLS", "3"))):
        process = subprocess.Popen(
            [sys.executable, str(tmp_path / "program.py")], env=environment, stderr=subprocess.DEVNULL
        )
        begun = record.stat().st_mtime_ns if record.exists() else None
        while process.poll() is None and (not record.exists() or record.stat().st_mtime_ns == begun):
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 6))
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
    assert kills
    if "result" not in json.loads(record.read_text()):
        distill(teacher, data[0], tmp_path / "cut", **asked)
    assert read(tmp_path / "cut") == read(tmp_path / "whole")


@pytest.mark.usefixtures("without_engine")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source_lang": "fr"}, "no column 'fr'"),
        ({"source_lang": "en", "target_lang": "en"}, "both 'en'"),
        ({"num_beams": 0}, "num_beams is 0"),
        ({"keep": "120%"}, "keep is '120%', expected a share"),
        ({"format": "csv"}, "format is 'csv', expected jsonl or parquet"),
        ({"ray": "127.0.0.1:1"}, "processes is for this machine, but Ray divides the work"),
        (
            {"ray": "127.0.0.1:1", "processes": None},
            "no Ray cluster answers at 127.0.0.1:1|ray needs ray: pip install",
        ),
        ({"data": "none-*.jsonl"}, "no file matches the pattern"),
    ],
)
def test_what_is_refused(teacher, data, tmp_path, changes, message):
    changes = {"data": data[0]} | changes
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        distill(teacher, changes.pop("data"), tmp_path / "out", **options(**changes))
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("without_engine")
def test_an_empty_folder_is_used_and_another_is_named(teacher, data, tmp_path):
    (tmp_path / "out").mkdir()
    assert distill(teacher, data[0], tmp_path / "out", **options()).rows
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "notes").write_text("mine")
    with pytest.raises(FileExistsError, match="own is not empty: give another folder"):
        distill(teacher, data[0], tmp_path / "own", **options())
    with pytest.raises(FileExistsError, match=r"own is not empty and holds no distill.json"):
        distill(teacher, data[0], tmp_path / "own", overwrite=True, **options())


def wrapped(error):
    """As `atomic_output` raises it."""
    whole = OSError("the disk is full: out could not be written, and nothing was changed")
    whole.__cause__ = error
    return whole


@pytest.mark.skipif(find_spec("ctranslate2") is None, reason="needs ctranslate2")
@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("write_rows", OSError(errno.ENOSPC, "No space left on device")),
        ("export", SafetensorError("I/O error: No space left on device (os error 28)")),
        ("export", wrapped(OSError(errno.ENOSPC, "No space left on device"))),
    ],
)
def test_a_full_disk_ends_it_with_one_message_and_the_same_call_goes_on(
    teacher, data, tmp_path, monkeypatch, where, error
):
    module, seen = sys.modules[distill.__module__], []

    def fill(*arguments, **more):
        seen.append(arguments)
        if len(seen) == 2 or where == "export":
            raise error
        return write(*arguments, **more)

    write = getattr(module, where)
    monkeypatch.setattr(module, where, fill)
    with pytest.raises(OSError, match=r"the disk is full: complete shards of .*out stay; free space, then give the"):
        distill(teacher, data[0], tmp_path / "out", **options())
    monkeypatch.setattr(module, where, write)
    assert distill(teacher, data[0], tmp_path / "out", **options()).read == 240


@pytest.mark.slow
def test_a_process_that_is_killed_ends_it_with_one_message_and_the_same_call_goes_on(teacher, data, tmp_path):
    def kill():
        while not any((tmp_path / "out" / ".work").glob("part-*.jsonl")):
            time.sleep(0.01)
        workers = [one for one in psutil.Process().children() if "spawn_main" in " ".join(one.cmdline())]
        workers[0].kill()

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(OSError, match=r"a process of the work was killed, .* fewer processes \(--processes\) resumes"):
        distill(teacher, data[0], tmp_path / "out", **options(processes=2))
    thread.join()
    assert distill(teacher, data[0], tmp_path / "out", **options()).read == 240


@pytest.mark.usefixtures("without_engine")
def test_an_interrupted_distillation_resumes_with_its_data_only(teacher, data, tmp_path, monkeypatch, caplog):
    from lightformers_hf.workflows import distill as module

    write, seen = module.write_rows, []

    def interrupt(*arguments):
        write(*arguments)
        seen.append(arguments[2].name)
        if len(seen) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_rows", interrupt)
    with pytest.raises(KeyboardInterrupt):
        distill(teacher, data[0], tmp_path / "out", **options())
    with pytest.raises(FileExistsError, match="another num_beams"):
        distill(teacher, data[0], tmp_path / "out", **options(num_beams=1))
    (tmp_path / "data-1.jsonl").rename(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=r"data-1\.jsonl was a part of the data"):
        distill(teacher, data[0], tmp_path / "out", **options())
    (tmp_path / "gone").rename(tmp_path / "data-1.jsonl")
    shard, record = tmp_path / "data-1.jsonl", tmp_path / "out" / "distill.json"
    text, before = shard.read_text(), json.loads(record.read_text())
    sizes = {str(file): file.stat().st_size for file in tmp_path.glob("data-*")}  # as earlier records have them
    for changed, known in ((text.replace("people", "nobody"), before["data"]), (text + " ", sizes)):
        shard.write_text(changed)
        record.write_text(json.dumps(before | {"data": known}))
        with pytest.raises(ValueError, match=r"data-1\.jsonl has changed since this distillation began"):
            distill(teacher, data[0], tmp_path / "out", **options())
    shard.write_text(text)
    found = distill(teacher, data[0], tmp_path / "out", **options())
    assert seen[2] == seen[3]  # its counts were not written
    assert found.read == 240
    with pytest.raises(FileExistsError, match="complete"):
        distill(teacher, data[0], tmp_path / "out", **options())


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
def test_two_ray_nodes_write_what_one_process_writes(teacher, data, tmp_path):
    from ray.cluster_utils import Cluster

    distill(teacher, data[0], tmp_path / "one", **options())
    os.environ["PYTHONPATH"] = str(ROOT)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        found = distill(teacher, data[0], tmp_path / "ray", ray=cluster.address, **options(processes=None))
    finally:
        import ray

        ray.shutdown()
        cluster.shutdown()
    assert read(tmp_path / "ray") == read(tmp_path / "one")
    assert found.rows == len(read(tmp_path / "ray"))
