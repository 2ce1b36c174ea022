"""The best of the tried values is that of `translate` and `score` alone, and the checkpoint generates with it."""

import json
import shutil

import pytest
import tune_generation as script
from transformers import AutoModelForSeq2SeqLM

from lightformers_hf import translate
from lightformers_hf.evaluation.quality import score


@pytest.fixture
def model(tmp_path, tiny_marian):
    folder = tmp_path / "model"
    shutil.copytree(tiny_marian, folder)
    config = folder / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_length": 30, "renormalize_logits": True}))
    return folder


@pytest.fixture
def data(tmp_path, parallel_sentences):
    file = tmp_path / "validation.jsonl"
    file.write_text("".join(json.dumps({"translation": pair}) + "\n" for pair in parallel_sentences[:4]))
    return file


def command(model, data, *options):
    return [str(model), str(data), "--source-lang", "de", "--target-lang", "en", *options]


@pytest.mark.parametrize("metric", ["chrf", "cer"])
def test_the_best_is_written(model, data, parallel_sentences, metric, capsys):
    sources, references = ([pair[side] for pair in parallel_sentences[:4]] for side in ("de", "en"))
    tried = [{"num_beams": 1, "max_new_tokens": n} for n in (2, 4)]
    tried += [{"num_beams": 2, "length_penalty": p, "max_new_tokens": n} for p in (0.0, 2.0) for n in (2, 4)]
    expected = [score(translate(sources, str(model), **c), references, [metric])[metric] for c in tried]
    best = (min if metric == "cer" else max)(expected)
    before = json.loads((model / "generation_config.json").read_text())
    values = ["--num-beams", "1", "2", "--length-penalties", "0", "2", "--max-new-tokens", "2", "4"]
    script.main(command(model, data, *values, "--metric", metric))
    written = json.loads((model / "generation_config.json").read_text())
    assert written == {n: v for n, v in before.items() if n != "max_length"} | tried[expected.index(best)]
    assert f"{best:.2f}" in capsys.readouterr().out
    AutoModelForSeq2SeqLM.from_pretrained(model)
    assert score(translate(sources, str(model)), references, [metric])[metric] == pytest.approx(best)


def test_the_papers_penalties_are_the_default():
    assert script.PENALTIES == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0]
    found = script.combinations({"num_beams": [1, 5], "length_penalty": script.PENALTIES})
    assert [c.get("length_penalty") for c in found] == [None, *script.PENALTIES]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--length-penalties", "nan"], "--length-penalties has nan: give finite numbers"),
        (["--min-new-tokens", "9", "--max-new-tokens", "3"], "--min-new-tokens is above each of --max-new-tokens"),
        (["--min-new-tokens", "9", "40"], "generates 29 tokens or fewer: give --max-new-tokens, too"),
        (["--metric", "bluu"], "no metric 'bluu'; did you mean bleu"),
    ],
)
def test_wrong_values_leave_the_configuration(model, data, options, message):
    before = (model / "generation_config.json").read_bytes()
    with pytest.raises(ValueError, match=message):
        script.main(command(model, data, *options))
    assert (model / "generation_config.json").read_bytes() == before


def test_a_folder_without_the_file_gets_that_of_its_model(model, data):
    before = AutoModelForSeq2SeqLM.from_pretrained(model).config
    (model / "generation_config.json").unlink()
    script.main(command(model, data, "--length-penalties", "1", "--max-new-tokens", "4"))
    written = json.loads((model / "generation_config.json").read_text())
    assert (written["max_new_tokens"], written["num_beams"]) == (4, 5)
    assert written["decoder_start_token_id"] == before.decoder_start_token_id
    assert translate(["Zwei Hunde."], str(model))


def test_a_name_of_the_hub_is_refused(data):
    with pytest.raises(ValueError, match="you/model is no folder: give the folder of a checkpoint"):
        script.main(command("you/model", data))
