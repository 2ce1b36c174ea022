"""Recipes: how they are read and overridden; each in its true shape beside its paper's count, and for two steps."""

import json
import re
import shlex
import string
from importlib import import_module
from pathlib import Path

import arguments
import build_tokenizer
import pytest
import torch
import yaml
from click.testing import CliRunner
from training.scripts import command
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from lightformers_hf import cli
from lightformers_hf.loading import unique_parameters

TRAINING = Path(arguments.__file__).parent
RECIPES = [path for path in sorted((TRAINING / "recipes").rglob("*.yaml")) if path.name != "training.yaml"]
AUTO = {"run_clm": AutoModelForCausalLM, "run_classification": AutoModelForSequenceClassification}
# For two steps: few and narrow layers of the same kind. A sandwich that is wider than the rest stays so.
TINY = {
    "d_model": 40, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_groups": 2,
    "attention_rank": 4, "ffn_rank": 4, "embedding_rank": 4, "decoder_attention_rank": 3, "decoder_ffn_rank": 3,
    "ffn_dim": 32, "sandwich_dim": 80, "sandwich_ffn_dim": 32, "embedding_dim": 40, "adaptive_cutoffs": [10, 20],
    "head_dim": 10, "base_attention_heads": 4,
}  # fmt: skip
SHORT = {
    "max_steps": 2, "eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False, "logging_steps": 1,
    "report_to": "none", "disable_tqdm": True, "use_cpu": True,
}  # fmt: skip


def script_of(path):
    """The script and the recipe's path, as the command in its head names them."""
    script, name = re.search(r"python training/(run_\w+)\.py --config training/(\S+)", path.read_text()).groups()
    assert TRAINING / name == path
    return script


def id_of(path):
    return f"{path.parent.name}-{path.stem}"


@pytest.mark.parametrize("path", RECIPES, ids=id_of)
def test_the_true_shape_has_the_parameters_of_its_head(path):
    script, text = script_of(path), path.read_text()
    paper, ours = (re.search(p, text) for p in (r"([\d.]+)M parameters", r"\(([\d.]+)M (?:parameters )?here\)"))
    vocabulary = re.search(r"\(vocabulary (\d+)\)", text)
    fields = arguments.load_recipe(path)["model"] | {"vocab_size": int(vocabulary[1]) if vocabulary else 2}
    with torch.device("meta"):
        model = AUTO.get(script, AutoModelForSeq2SeqLM).from_config(AutoConfig.for_model(**fields))
    printed = (ours or paper)[1]
    rounding = 0.5 * 10.0 ** -len(printed.partition(".")[2])
    tolerance = rounding if ours else max(rounding, 0.025 * float(printed))
    assert unique_parameters(model) / 1e6 == pytest.approx(float(printed), abs=tolerance)


def table():
    """The list of all recipes: what the heads of the files say before their commands."""
    rows = ["| recipe | model | parameters and figures |", "|---|---|---|"]
    for path in RECIPES:
        head = re.match(r"((# .*\n)+?)#   python", path.read_text(encoding="utf-8"))[1]
        head = re.sub(r"(?<=\w-) (?=\w)", "", " ".join(head.replace("# ", "").split()))
        title, figures = re.split(r" (?=Paper: |[\d.]+M parameters \()", head, maxsplit=1)
        name = path.relative_to(TRAINING / "recipes").as_posix()
        rows.append(f"| [{name}]({name}) | {title} | {figures} |")
    vocabulary = (
        '"Vocabulary" is the number of tokens with which this package counts the parameters. Only the paper of '
        "PartialFormer prints exact\nnumbers (Table 11).\n\n"
    )
    return "# Recipes\n\n" + vocabulary + "\n".join(rows) + "\n"


def test_the_list_of_recipes_is_that_of_the_files():
    """`python tests/training/test_recipes.py`, with `training` in PYTHONPATH, writes it."""
    assert (TRAINING / "recipes" / "README.md").read_text(encoding="utf-8") == table()


@pytest.fixture(scope="module")
def data(tmp_path_factory, parallel_sentences, tiny_marian):
    """Options of each script: data that its recipes' columns fit, and a tokenizer."""
    folder = tmp_path_factory.mktemp("recipes")
    german, english = ([pair[language] for pair in parallel_sentences] for language in ("de", "en"))
    rows = [
        {"translation": dict.fromkeys(("fi", "fr", "lv", "ro"), g) | {"de": g, "en": e}, "document": e, "summary": g}
        for g, e in zip(german, english, strict=True)
    ]
    reviews = [{"text": text, "label": i % 2} for i, text in enumerate(english * 2)]
    for name, content in {"pairs": rows, "reviews": reviews}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    (folder / "text.txt").write_text("".join(f"{line}\n" for line in english * 40))
    build_tokenizer.main([str(folder / "text.txt"), "--kind", "words", "--output", str(folder / "words")])
    (folder / "corpus.txt").write_text("".join(f"{line} {string.ascii_letters}.\n" for line in english * 3))
    unigram = ["--kind", "unigram", "--vocab-size", "90", "--output", str(folder / "unigram")]
    build_tokenizer.main([str(folder / "corpus.txt"), *unigram])
    pairs = {"tokenizer_name": tiny_marian, "train_file": folder / "pairs.jsonl"}
    small = {"block_size": 16, "per_device_train_batch_size": 2}
    return {
        "run_translation": pairs,
        "run_summarization": pairs,
        "run_clm": small | {"tokenizer_name": folder / "words", "train_file": folder / "text.txt", "context_size": 4},
        "run_classification": {
            "tokenizer_name": folder / "words", "train_file": folder / "reviews.jsonl", "num_folds": 2,
        },
        "run_denoising": small | {"tokenizer_name": folder / "unigram", "train_files": folder / "corpus.txt"},
    }  # fmt: skip


def tiny(fields):
    """The fields of a recipe's model, those that TINY has replaced."""
    small = {name: TINY.get(name, value) if value is not None else None for name, value in fields.items()}
    if fields.get("sandwich_dim") == fields["d_model"]:
        small["sandwich_dim"] = TINY["d_model"]
    return small


def options_of(path):
    """What a recipe trains otherwise than its base: the base and the names of options; `None` if only the model.

    Where these stand in a file without a model, one of the models below it is taken.
    """
    recipe = yaml.safe_load(path.read_text())
    base, others = recipe.get("base"), recipe.keys() - {"base", "model"}
    if not others and (base, path.stem) != ("training.yaml", "transformer"):
        return None
    return path.parent, base, frozenset(others)


# One recipe for each set of options takes the script, the others build their model.
SCRIPTED = list({options_of(path): path for path in reversed(RECIPES) if options_of(path)}.values())


@pytest.mark.parametrize("path", SCRIPTED, ids=id_of)
def test_two_steps_of_the_script(path, data, tmp_path):
    name, recipe = script_of(path), arguments.load_recipe(path)
    fields = tiny(recipe["model"])
    options = data[name] | SHORT | {"output_dir": tmp_path / "out"}
    options["gradient_accumulation_steps"] = min(2, recipe.get("gradient_accumulation_steps", 1))
    options |= {f"model.{field}": json.dumps(value) for field, value in fields.items()}
    import_module(name).main(["--config", str(path), *command(options)])
    (state, *_) = tmp_path.rglob("trainer_state.json")
    history = [entry for entry in json.loads(state.read_text())["log_history"] if "loss" in entry]
    assert len(history) == 2
    assert all(entry["loss"] > 0 and 0 < entry["grad_norm"] < 1e4 for entry in history)
    saved = json.loads((state.parent / "config.json").read_text())
    assert {field: saved[field] for field in fields} == fields


@pytest.mark.parametrize("path", [path for path in RECIPES if path not in SCRIPTED], ids=id_of)
def test_two_steps_of_another_model(path):
    """Its options are those of its base, which the script has taken."""
    auto = AUTO.get(script_of(path), AutoModelForSeq2SeqLM)
    tokens = {"vocab_size": 50, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    torch.manual_seed(0)
    model = auto.from_config(AutoConfig.for_model(**tiny(arguments.load_recipe(path)["model"]) | tokens))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = {"input_ids": torch.randint(3, 50, (2, 6))}
    batch["labels"] = batch["input_ids"] if auto is not AutoModelForSequenceClassification else torch.tensor([0, 1])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss > 0
    for old, new in zip(before, model.parameters(), strict=True):
        assert new.isfinite().all()
        assert not torch.equal(old, new)


@pytest.mark.parametrize(
    "path",
    [path for path in RECIPES if "lightformers convert" in path.read_text() and path.parent.name == "lightformer"],
    ids=id_of,
)
def test_the_conversion_of_a_head_gives_the_shapes_of_the_recipe(path, tmp_path):
    head = path.read_text().replace("\\\n#", "")
    (words,) = re.findall(r"#   lightformers (convert .*)", head)
    words = shlex.split(re.sub(r"/fold-0", "", words))
    (teacher,) = path.parent.glob(f"{Path(words[1]).name}.yaml")
    auto = AUTO.get(script_of(path), AutoModelForSeq2SeqLM)
    tokens = {"vocab_size": 50, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}

    def build(recipe):
        return auto.from_config(AutoConfig.for_model(**tiny(arguments.load_recipe(recipe)["model"]) | tokens))

    build(teacher).save_pretrained(tmp_path / "teacher")
    words[1:3] = map(str, (tmp_path / "teacher", tmp_path / "light"))
    small = {"--rank": 4, "--encoder-groups": TINY["encoder_groups"], "embedding": 4, "decoder.layers.*": 3}
    for number, word in enumerate(words):
        name, equals, _ = word.partition("=")
        if equals:
            words[number] = f"{name}={small[name]}"
        elif word in small:
            words[number + 1] = str(small[word])
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    light = auto.from_pretrained(tmp_path / "light")
    assert {n: p.shape for n, p in light.named_parameters()} == {n: p.shape for n, p in build(path).named_parameters()}


def commands_of(path):
    """The commands in a recipe's comments, as lists of words."""
    text = re.sub(r"\\\n# +", "", path.read_text(encoding="utf-8"))
    return [
        shlex.split(line) for line in re.findall(r"^# +((?:python training/|lightformers ).*)", text, re.MULTILINE)
    ]


FOLLOWED = [path for path in RECIPES if any("convert" not in words for words in commands_of(path)[1:])]


@pytest.mark.parametrize("path", FOLLOWED, ids=id_of)
def test_the_commands_after_a_training(path, data, tmp_path, monkeypatch):
    """Averages, tuning and tests, with the words of the file; the training saves as many checkpoints as they need."""
    first, *others = commands_of(path)
    monkeypatch.chdir(tmp_path)
    rows = (data["run_translation"]["train_file"]).read_text(encoding="utf-8")
    for name in ("train", "valid", "test"):
        Path(f"{name}.jsonl").write_text(rows, encoding="utf-8")
    fields = {f"model.{name}": json.dumps(value) for name, value in tiny(arguments.load_recipe(path)["model"]).items()}
    options = SHORT | {"max_steps": 10, "save_strategy": "steps", "save_steps": 1, "max_target_length": 8}
    options |= {"tokenizer_name": data["run_translation"]["tokenizer_name"], "gradient_accumulation_steps": 1}
    options |= {"max_length": 64} if "cnn_dm" in path.stem else {}  # outputs have 40 to 60 tokens at least
    import_module(script_of(path)).main(["--config", str(path), *first[4:], *command(fields | options)])
    for words in others:
        if words[0] == "python":
            import_module(Path(words[1]).stem).main(words[2:])
        else:
            assert CliRunner().invoke(cli.app, words[1:]).exit_code == 0


@pytest.fixture
def parse(tmp_path):
    from seq2seq import DataArguments, TrainingArguments

    def parse(recipe, *argv, **others):
        for name, text in {"recipe": recipe, **others}.items():
            (tmp_path / f"{name}.yaml").write_text(text)
        given = ["--config", str(tmp_path / "recipe.yaml"), *argv]
        return arguments.parse_arguments((arguments.ModelArguments, DataArguments, TrainingArguments), given)

    return parse


def test_the_command_line_wins_over_the_recipe_and_that_over_its_base(parse, monkeypatch):
    monkeypatch.setattr(arguments, "has_fast_bf16", lambda: True)
    base = "model: {model_type: lightformer, d_model: 64, ffn_rank: 8}\nlearning_rate: 1e-3\nmax_tokens: 7\nbf16: true"
    recipe = (
        "base: base.yaml\nmodel: {d_model: 32, ffn_rank: null}\nmax_tokens: 8\nseed: 5\nlogging_nan_inf_filter: false"
    )
    model, data, args = parse(
        recipe, "--max-tokens", "9", "--model.dropout", "0.25", "--model.rank_pattern={fc1: 3}", base=base
    )
    assert model.model == {
        "model_type": "lightformer", "d_model": 32, "ffn_rank": None, "dropout": 0.25, "rank_pattern": {"fc1": 3}
    }  # fmt: skip
    assert (data.max_tokens, args.learning_rate, args.seed, args.bf16) == (9, 1e-3, 5, True)
    assert not args.logging_nan_inf_filter


@pytest.mark.parametrize("able", [True, False])
def test_bfloat16_only_where_the_processor_multiplies_it(parse, monkeypatch, capsys, able):
    monkeypatch.setattr(arguments, "has_fast_bf16", lambda: able)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    *_, args = parse("bf16: true")
    assert (args.bf16, "bf16 has no effect" in capsys.readouterr().err) == (able, not able)
    *_, args = parse("seed: 1")  # nothing is said where nobody asked
    assert (args.bf16, capsys.readouterr().err) == (False, "")


@pytest.mark.parametrize("join", ["-", "_"])
def test_underscores_and_dashes_mean_the_same(parse, join):
    words = ["--max_tokens", "9", "--train_file=a_b.txt", "--no_logging_nan_inf_filter", "--model.encoder_layers", "2"]
    words += ["--model.model_type=lightformer"]
    given = [word.replace("_", join) if word.startswith("--") and "=" not in word else word for word in words]
    model, data, args = parse("seed: 1", *given)
    assert model.model == {"model_type": "lightformer", "encoder_layers": 2}
    assert (data.max_tokens, data.train_file, args.logging_nan_inf_filter) == (9, "a_b.txt", False)


@pytest.mark.parametrize("script", ["run_translation", "compare_architectures"])
def test_help_spells_options_with_dashes(script, capsys):
    with pytest.raises(SystemExit, match="0"):
        import_module(script).main(["--help"])
    options = re.findall(r"(?<![\w-])--[\w.-]+", capsys.readouterr().out)
    assert "--output-dir" in options or "--output" in options
    assert not [option for option in options if "_" in option and not option.startswith("--model.")]


@pytest.mark.parametrize(
    ("recipe", "argv", "message"),
    [
        ("lerning_rate: 1", [], r"recipe\.yaml: no option 'lerning_rate'; did you mean learning_rate"),
        ("model: {model_type: lightformer, d_modle: 3}", [], r"recipe\.yaml: .* 'd_modle'; did you mean d_model"),
        (
            "model: {model_type: lightfromer}",
            [],
            r"recipe\.yaml: no model_type 'lightfromer'; did you mean lightformer",
        ),
        ("model: {model_type: transformer}", [], "a lightformer without ranks is a plain Transformer"),
        (
            "base: other.yaml\nmodel: {model_type: lightformer}",
            [],
            "lightformer, but its base .* has a subformer",
        ),
        ("model: {model_type: bart, attention_rank: 3}", [], "of a bart's configuration is named 'attention_rank'"),
        ("model: 3", [], r"recipe\.yaml: expected a mapping"),
        ("a: [", [], r"recipe\.yaml is not YAML"),
        ("model: {model_type: lightformer}", ["--model.rank_pattern", "[4"], "--model.rank_pattern: while parsing"),
        ("base: nowhere.yaml", [], r"No recipe .*nowhere\.yaml"),
        ("max_tokens: many", [], "--max-tokens.*invalid int value: 'many'"),
        ("model: {model_type: lightformer}", ["--model.d_modle", "3"], "command line: .*did you mean d_model"),
        ("seed: 1", ["--max-token", "3"], "no option '--max-token'; did you mean --max-tokens"),
    ],
)
def test_what_is_unknown_is_named_with_its_file_and_what_is_like_it(parse, recipe, argv, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        parse(recipe, *argv, other="model: {model_type: subformer}")


if __name__ == "__main__":
    (TRAINING / "recipes" / "README.md").write_text(table(), encoding="utf-8")
