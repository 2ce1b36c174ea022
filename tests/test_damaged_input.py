"""Whatever comes in damaged ends in one message that names it: no traceback, no crash, no work without end."""

import json
import random
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from lightformers_hf import convert
from lightformers_hf.loading import load_pretrained

DEEP = "[" * 200_000


@pytest.fixture(scope="module")
def models(tmp_path_factory, tiny_marian, parallel_sentences):
    folder = tmp_path_factory.mktemp("damaged")
    shutil.copytree(tiny_marian, folder / "dense")
    convert(folder / "dense", folder / "light", ratio=2, method="paper", progress=False)
    (folder / "test.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in parallel_sentences))
    return folder


@pytest.fixture
def run(models, tmp_path, monkeypatch, lightformers):
    """Run a command in a folder with `dense`, `light` and `test.jsonl`; gives its message, which must be one line."""
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def command(words, codes=(1,)):
        code, _, error = lightformers(*shlex.split(words), "--quiet")
        assert code in codes, error
        assert "Traceback" not in error
        return error

    return command


def change(file, **fields):
    file = Path(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_a_conversion_without_a_tokenizer_says_so(run, lightformers):
    for has_tokenizer in (True, False):
        code, told, _ = lightformers(*"convert dense out --ratio 2 --method paper --overwrite".split())
        assert code == 0
        assert ("dense has no tokenizer, so out has none either" in told) == (not has_tokenizer)
        for name in ("vocab.json", "source.spm", "target.spm", "tokenizer_config.json"):
            Path("dense", name).unlink(missing_ok=True)
    assert "no tokenizer" in run("convert dense none --ratio 2 --calibration test.jsonl")


@pytest.mark.parametrize(
    ("changes", "command", "message"),
    [
        (("light/config.json", {"auto_map": "code"}), "convert light out --rank 2 --method paper", "auto_map in"),
        (("light/config.json", {"auto_map": {"AutoConfig": {}}}), "push light you/light --dry-run", "auto_map in"),
        (("light/trainer_state.json", {"global_step": [1]}), "push light you/light --dry-run", "number of steps in"),
        (("dense/config.json", {"dtype": "int8"}), "convert dense out --rank 2 --method paper", "dtype in"),
        (("dense/config.json", {"dtype": "bool"}), "plan dense --rank 2", "dtype in"),
        (("light/config.json", {"forced_eos_token_id": 600}), "export light out --to ctranslate2",
         "index 600 is out of bounds"),
        (("dense/tokenizer_config.json", {"source_lang": ["de"]}), "evaluate dense --data test.jsonl --no-speed",
         "names ['de'] as a language"),
        (("dense/config.json", {}), "evaluate dense --no-speed --data ''", "the data has no name"),
        (("dense/config.json", {}), "evaluate dense --no-speed --data /", ""),
    ],
)  # fmt: skip
def test_what_fuzzing_found(run, changes, command, message):
    Path("light/trainer_state.json").write_text("{}")
    change(changes[0], **changes[1])
    error = run(command)
    assert message in error
    assert len(error.splitlines()) == 1
    assert not Path("out").exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"d_model": "wide"}, {"d_model": None}, {"d_model": 0}, {"encoder_layers": "2"}, {"vocab_size": "many"},
        {"architectures": "MarianMTModel"}, {"architectures": 3}, {"model_type": None}, {"dtype": "float7"},
        {"encoder_attention_heads": 0}, {"activation_function": 3},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_wrong_types_in_a_configuration(run, fields):
    change("dense/config.json", **fields)
    error = run("convert dense out --rank 8 --method paper", codes=(0, 1))
    assert not error or "dense" in error or next(iter(fields)) in error


@pytest.mark.parametrize("content", ["[]", "3", "{", DEEP])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_json_of_another_kind(run, name, content):
    Path("dense", name).write_text(content)
    error = run("convert dense out --ratio 2 --method paper", codes=(0, 1))
    assert not error or "dense" in error


def test_damaged_pickles_are_named(run):
    weights = load_file("dense/model.safetensors")
    Path("dense", "model.safetensors").unlink()
    file = Path("dense", "pytorch_model.bin")
    torch.save(weights, file)
    whole, generator = file.read_bytes(), random.Random(0)
    for _ in range(12):
        content = bytearray(whole)
        for _ in range(generator.choice([1, 4, 64])):
            place = generator.choice([generator.randrange(2000), generator.randrange(len(content))])
            content[place] = generator.randrange(256)
        file.write_bytes(content[: generator.choice([len(content), generator.randrange(len(content))])])
        error = run("convert dense out --rank 8 --method paper --overwrite", codes=(0, 1))
        assert not error or "dense" in error


@pytest.mark.parametrize("content", ["[]", "{", DEEP, '{"log_history": 3}', '{"log_history": [3]}'])
def test_a_report_of_a_malformed_log(run, content):
    Path("light", "trainer_state.json").write_text(content)
    assert "trainer_state.json" in run("report light --output page.html")


@pytest.mark.parametrize(
    "fields",
    [
        {"encoder_layers": 10_000_000}, {"vocab_size": 10**15}, {"d_model": 10**9}, {"decoder_ffn_dim": 10**12},
        {"max_position_embeddings": 10**9},
    ],
    ids=json.dumps,
)  # fmt: skip
@pytest.mark.parametrize("command", ["convert dense out --rank 8", "translate dense text"])
def test_gigantic_sizes_are_compared_with_the_tensors(run, fields, command):
    Path("text").write_text("Ein Hund\n")
    change("dense/config.json", **fields)
    error = run(command)
    assert next(iter(fields)) in error
    assert "do not belong together" in error


@pytest.mark.parametrize(
    ("command", "architectures"),
    [
        ("push light user/model --dry-run", "MarianMTModel"),
        ("report light --teacher dense --data test.jsonl --output page.html", []),
        ("translate light text", [None]),
        ("translate light text", "MarianMTModel"),
        ("evaluate light --data test.jsonl --num-beams 1", [None]),
        ("export light out --to ctranslate2", []),
    ],
)
def test_architectures_that_are_no_names(run, architectures, command):
    Path("text").write_text("Ein Hund\n")
    change("light/config.json", architectures=architectures)
    assert "architectures in config.json of" in run(command)
    assert not Path("out").exists()


@pytest.mark.parametrize("command", ["recover light out --teacher dense", "compress dense out"])
@pytest.mark.parametrize("seed", ["12345678901234567890", "-1"])
def test_seeds_that_numpy_does_not_take(run, command, seed):
    assert "--seed" in run(f"{command} --data test.jsonl --seed {seed}", codes=(2,))
    assert not Path("out").exists()


@pytest.mark.parametrize("name", ["tokenizer_config.json", "vocab.json"])
@pytest.mark.parametrize("content", ["[]", "3", "{", DEEP, '{"x": "y"}', '{"x": []}'])
def test_damaged_files_of_a_tokenizer(run, name, content):
    Path("text").write_text("Ein Hund\n")
    Path("dense", name).write_text(content)
    error = run("translate dense text", codes=(0, 1))
    assert not error or "dense" in error


@pytest.mark.parametrize("longest", [[3], "x", 0, -3, 0.5, 5.5, True, float("nan"), float("inf")], ids=str)
def test_a_tokenizer_that_takes_no_number_of_tokens(run, longest):
    Path("text").write_text("Ein Hund\n")
    change("dense/tokenizer_config.json", model_max_length=longest)
    assert "model_max_length in tokenizer_config.json of" in run("translate dense text --num-beams 1")


def test_a_number_of_tokens_with_a_point_is_a_whole_one(tiny_marian, tmp_path):
    shutil.copytree(tiny_marian, tmp_path, dirs_exist_ok=True)
    for longest in (5.0, 1e30):
        change(tmp_path / "tokenizer_config.json", model_max_length=longest)
        found = load_pretrained(AutoTokenizer, tmp_path).model_max_length
        assert isinstance(found, int)
        assert found == longest


def test_a_report_of_other_fields(run, monkeypatch):
    monkeypatch.setattr("lightformers_hf.evaluation.page.save_picture", lambda *_, **__: None)
    whole = json.loads(Path("light", "compression.json").read_text())
    for field in whole.keys() - {"ratio", "options", "inherited"}:
        for value in ("x", None, [3], float("nan")):
            Path("light", "compression.json").write_text(json.dumps(whole | {field: value}))
            error = run("report light --output page.html", codes=(0, 1))
            assert not error or "compression.json" in error


def test_numbers_beyond_all_bounds(run):
    Path("text").write_text("Ein Hund\n")
    assert "--max-new-tokens is 1000000000; the model" in run("translate dense text --max-new-tokens 1000000000")
    assert "--num-beams is 1000000" in run("translate dense text --num-beams 1000000")
    assert "device is '1e-300'" in run("translate dense text --device 1e-300")
    change("dense/generation_config.json", max_length=10**9)
    assert "generation_config.json" in run("translate dense text")
    change("dense/generation_config.json", max_length=20, num_beams="many")
    assert "generation_config.json" in run("translate dense text")
    run(f"demo --seed {10**19}", codes=(2,))


@pytest.mark.parametrize("field", ["decoder_start_token_id", "pad_token_id", "forced_eos_token_id"])
@pytest.mark.parametrize("number", [-1, 10**18])
def test_a_token_that_is_not_there(run, field, number):
    change("dense/generation_config.json", **{field: number})
    assert f"{field} {number}" in run("export dense out --to ctranslate2")
    assert f"{field} {number}" in run("convert dense out --ratio 2")
    assert not Path("out").exists()


def test_a_configuration_may_name_no_padding(run):
    change("dense/config.json", pad_token_id=None)
    run("convert dense out --rank 2 --method paper", codes=(0,))


def test_one_table_of_two_stacks_that_have_separate_ones(run):
    change("dense/config.json", share_encoder_decoder_embeddings=False)
    run("convert dense out --ratio 1.1 --pattern .*embed_tokens=dense --method paper", codes=(0,))


def test_no_position_for_text(run):
    change("dense/config.json", max_position_embeddings=1)
    assert "max_position_embeddings is 1 in dense" in run("convert dense out --ratio 2")


def test_a_folder_whose_name_steers_terminals_is_no_model_of_the_hub(run):
    shutil.copytree("dense", "a\x1b[31mb")
    Path("a\x1b[31mb", "README.md").write_text("---\nlicense: other\nlicense_link: javascript:alert(1)\n---\n")
    run("convert a\x1b[31mb out --rank 8 --method paper", codes=(0,))
    card = Path("out", "README.md").read_text()
    assert not [word for word in ("\x1b", "base_model", "javascript") if word in card]
