"""`evaluate` and the two commands, on a checkpoint that is there, and on all that is not."""

import io
import json

import pytest
import sacrebleu
from rich.console import Console

from lightformers_hf import StudyOptions, convert
from lightformers_hf.engines import ENGINES, Engine, export
from lightformers_hf.evaluation.evaluate import choose_columns, evaluate
from lightformers_hf.evaluation.quality import Difference
from lightformers_hf.evaluation.translate import translate
from lightformers_hf.loading import load_model, unique_parameters


@pytest.fixture(scope="module")
def data(tmp_path_factory, parallel_sentences):
    path = tmp_path_factory.mktemp("data") / "test.jsonl"
    path.write_text("".join(json.dumps({"translation": pair}) + "\n" for pair in parallel_sentences))
    return str(path)


def test_everything_beside_a_teacher(tiny_marian, data, parallel_sentences, warm_python):
    evaluation = evaluate(
        str(tiny_marian), data=data, teacher=str(tiny_marian), runs=1, num_beams=1, max_new_tokens=20, max_samples=8
    )
    model, tokenizer = load_model(tiny_marian)
    pairs = parallel_sentences[:8]
    outputs = translate([pair["de"] for pair in pairs], model, tokenizer, num_beams=1, max_new_tokens=20)
    bleu = sacrebleu.corpus_bleu(outputs, [[pair["en"] for pair in pairs]]).score
    assert evaluation.model.scores["bleu"] == evaluation.teacher.scores["bleu"] == pytest.approx(bleu)
    assert evaluation.model.parameters == unique_parameters(model)
    assert evaluation.model.disk_bytes == (tiny_marian / "model.safetensors").stat().st_size
    assert evaluation.model.memory_bytes > evaluation.model.libraries_bytes > 0
    assert evaluation.model.tokens == evaluation.teacher.tokens > 0
    assert evaluation.speed_ratio > 0
    assert (evaluation.source, evaluation.target, evaluation.sentences) == ("de", "en", 8)
    assert evaluation.generation == {"num_beams": 1, "max_new_tokens": 20}

    printed = io.StringIO()
    Console(file=printed, width=200).print(*evaluation.parts())
    assert evaluation.differences == dict.fromkeys(("bleu", "chrf"), Difference(0, 0, 0))
    assert evaluation.to_dict()["differences"]["chrf"] == {"value": 0, "low": 0, "high": 0}
    shown = ["BLEU", f"{bleu:.1f}", "0.0 (0.0 to 0.0)", "paired bootstrap", "tok:13a", "tokens/s", "x as fast"]
    assert all(expected in printed.getvalue() for expected in [*shown, "1.00x smaller"])


@pytest.mark.parametrize("to", ENGINES)
def test_an_export_beside_its_teacher(lightformers, caplog, tiny_marian, data, tmp_path, to):
    light, deployed = tmp_path / "light", tmp_path / "deployed"
    convert(tiny_marian, light, rank=4, method="paper", progress=False)
    report = export(light, deployed, to=to, quantization="float32")
    command = ("--data", data, "--teacher", tiny_marian, "--num-beams", 1, "--json", "-")
    code, printed, _ = lightformers("evaluate", deployed, *command)
    assert code == 0
    assert "benchmark engines measures its speed" in caplog.text
    found, expected = json.loads(printed), json.loads(lightformers("evaluate", light, *command, "--no-speed")[1])
    size = {"name": "deployed", "parameters": report.parameters, "disk_bytes": report.weight_bytes}
    assert found == expected | {"model": expected["model"] | size}
    assert found["model"]["scores"] != found["teacher"]["scores"]


def test_the_prefix_of_an_export_is_used_unless_another_is_given():
    engine = Engine("onnx", model=None, search=None, longest_input=None, prefix="say it: ")
    for source, expected in {"de": "de=say it: ", "de=write it: ": "de=write it: "}.items():
        assert choose_columns("t5", engine, None, source, "en") == (expected, "en")


def test_json_alone_on_stdout(lightformers, tiny_marian, data, tmp_path):
    command = ("evaluate", tiny_marian, "--data", data, "--no-speed", "--json")
    code, printed, _ = lightformers(*command, "-", "--source-lang", "en", "--target-lang", "de")
    numbers = json.loads(printed)
    assert code == 0
    assert (numbers["source"], numbers["target"], numbers["teacher"]) == ("en", "de", None)
    assert numbers["generation"] == {"num_beams": 2}  # the checkpoint's
    assert numbers["model"]["tokens_per_second"] is None

    code, printed, _ = lightformers(*command, tmp_path / "numbers.json", "--max-samples", 2)
    assert code == 0
    assert "BLEU" in printed
    assert "tokens/s" not in printed
    assert json.loads((tmp_path / "numbers.json").read_text())["sentences"] == 2


def test_metrics_fit_the_data_or_are_chosen(lightformers, tiny_marian, tmp_path, parallel_sentences):
    """BLEU of references of one word has no meaning."""
    file, words = tmp_path / "words.jsonl", [pair["en"].split()[1] for pair in parallel_sentences]
    rows = [{"de": pair["de"], "en": word} for pair, word in zip(parallel_sentences, words, strict=True)]
    file.write_text("".join(json.dumps({"translation": row}) + "\n" for row in rows))
    command = ("evaluate", tiny_marian, "--data", file, "--no-speed", "--num-beams", 1, "--json", tmp_path / "r.json")
    code, printed, _ = lightformers(*command)
    assert code == 0
    assert printed.index("exact match") < printed.index("CER") < printed.index("chrF")
    assert "BLEU" not in printed

    assert lightformers(*command, "--metric", "multi-bleu", "--metric", "CER")[0] == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["labels"] == {"multi-bleu": "multi-bleu", "cer": "CER"}
    assert found["signatures"]["multi-bleu"].startswith("Moses tokens (sacremoses")
    assert "lang:en" in found["signatures"]["multi-bleu"]

    code, printed, error = lightformers(*command, "--metric", "multibleu")
    assert (code, printed) == (1, "")
    assert "no metric 'multibleu'; did you mean multi-bleu" in error


def test_named_columns(lightformers, caplog, monkeypatch, tiny_marian, tmp_path, parallel_sentences):
    table = tmp_path / "test.tsv"
    table.write_text("german\tenglish\n" + "".join(f"{pair['de']}\t{pair['en']}\n" for pair in parallel_sentences))
    common = ("evaluate", tiny_marian, "--data", table, "--no-speed", "--json", "-")
    code, printed, _ = lightformers(*common, "--source-lang", "german", "--target-lang", "english")
    assert code == 0
    found = json.loads(printed)
    assert found["model"]["scores"]["bleu"] > 10  # it was trained on these sentences
    assert (found["source"], found["target"]) == ("german", "english")
    code, printed, error = lightformers(*common)  # the only two columns
    assert (code, json.loads(printed)) == (0, found)
    assert "its only columns, 'german' and 'english', are taken as source and target" in caplog.text
    table.write_text(table.read_text().replace("english", "fr"))
    monkeypatch.setattr("lightformers_hf.evaluation.evaluate.load_pair", None)  # no weights are read for wrong data
    code, printed, error = lightformers(*common)
    assert (code, printed) == (1, "")
    assert "no column 'de' nor 'en': it has 'german', 'fr'" in error
    assert "Give --source-lang and --target-lang: the two columns" in error


@pytest.mark.parametrize("seen", [True, False])
def test_warns_of_sentences_that_the_conversion_was_calibrated_on(
    lightformers, caplog, tiny_marian, data, tmp_path, parallel_sentences, seen
):
    pairs = [pair if seen else {"de": pair["de"][::-1], "en": pair["en"]} for pair in parallel_sentences]
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"translation": pair}) + "\n" for pair in pairs))
    convert(tiny_marian, tmp_path / "light", calibration=str(text), study=StudyOptions(refit=False), progress=False)
    options = ("--num-beams", "1", "--max-new-tokens", "5", "--no-speed")
    assert lightformers("evaluate", tmp_path / "light", "--data", data, *options)[0] == 0
    assert (f"{len(pairs)} of the {len(pairs)} sentences" in caplog.text) == seen
    assert (parallel_sentences[0]["de"] in caplog.text) == seen


def test_a_tokenizer_without_languages(lightformers, tiny_marian, tmp_path, data):
    import shutil

    folder = shutil.copytree(tiny_marian, tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"source_lang": None, "target_lang": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    code, _, error = lightformers("evaluate", folder, "--data", data, "--no-speed")
    assert code == 1
    assert "--source-lang" in error


def test_translate_a_file_and_a_pipe(lightformers, tiny_marian, tmp_path, parallel_sentences):
    german = [pair["de"] for pair in parallel_sentences]
    expected = translate(german, tiny_marian, num_beams=1, max_new_tokens=20)
    options = ("--num-beams", 1, "--max-new-tokens", 20, "--batch-size", 4)
    (tmp_path / "in.txt").write_text("\n".join(german), encoding="utf-8")

    code, printed, _ = lightformers("translate", tiny_marian, *options, stdin="\n".join(german).encode())
    assert (code, printed.splitlines()) == (0, expected)
    code, printed, _ = lightformers(
        "translate", tiny_marian, tmp_path / "in.txt", "--output", tmp_path / "out.txt", *options
    )
    assert (code, printed) == (0, "")
    assert (tmp_path / "out.txt").read_text(encoding="utf-8").splitlines() == expected

    code, printed, _ = lightformers("translate", tiny_marian, "-", "--output", "-", *options, stdin=german[0].encode())
    assert (code, printed.splitlines()) == (0, expected[:1])

    code, _, error = lightformers("translate", tiny_marian, tmp_path / "missing.txt", "--output", tmp_path / "new.txt")
    assert code == 1
    assert "missing.txt" in error
    assert {path.name for path in tmp_path.iterdir()} == {"in.txt", "out.txt"}
