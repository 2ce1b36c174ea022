"""Converting every family: exact where nothing is cut, optimal where something is, loadable by the Auto classes."""

import importlib
import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from conversion.metrics import distance
from conversion.teachers import TEACHERS, batch, make_teacher
from models.cases import like_trained
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, MarianMTModel

from lightformers_hf import StudyOptions, convert, plan
from lightformers_hf.checkpoints.teacher import read
from lightformers_hf.conversion.calibration_text import synthetic_batches
from lightformers_hf.conversion.convert import cast_tensors
from lightformers_hf.conversion.report import OWN_TEXT
from lightformers_hf.models import LightFormerForConditionalGeneration
from lightformers_hf.processors import use_threads

DENSE = {"pattern": {".*": None}}
module = importlib.import_module("lightformers_hf.conversion.convert")


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = (folder, make_teacher(name, folder))
        return made[name]

    return get


def convert_and_load(folder, output, **options):
    """The model that a conversion writes."""
    convert(folder, output, **options, progress=False)
    return AutoModelForSeq2SeqLM.from_pretrained(output).eval()


def tensors(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", TEACHERS)
def test_without_truncation_the_result_computes_what_the_teacher_computes(teachers, tmp_path, name):
    folder, teacher = teachers(name)
    convert(folder, tmp_path / "out", progress=False, **DENSE)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").eval()
    assert isinstance(model, LightFormerForConditionalGeneration)
    inputs = batch(teacher)
    for attention in ("eager", "sdpa"):
        for one in (teacher, model):
            one.set_attn_implementation(attention)
        with torch.no_grad():
            expected, actual = teacher(**inputs).logits, model(**inputs).logits
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
    # Sentences side by side in one row, each of which sees itself alone.
    blocks = torch.block_diag(torch.ones(4, 4), torch.ones(5, 5)).bool().expand(3, 1, -1, -1)
    lowest = torch.finfo(torch.float32).min
    ids = torch.randint(3, 48, (3, 9))
    for mask in (blocks, torch.zeros(blocks.shape).masked_fill(~blocks, lowest)):
        expected, states = (one.get_encoder()(ids, mask)[0] for one in (teacher, model))
        torch.testing.assert_close(states, expected, atol=1e-5, rtol=0)
    inputs.pop("decoder_input_ids")
    for beams in (1, 4):
        expected = teacher.generate(**inputs, num_beams=beams, max_length=20)
        for use_cache in (True, False):
            assert torch.equal(model.generate(**inputs, num_beams=beams, max_length=20, use_cache=use_cache), expected)
    assert model.generation_config.num_beams == 2


def dense_matrix(state, module):
    """W of a converted module, outputs×inputs as torch has it, or the whole token table."""
    if f"{module}.output.weight" in state:
        return state[f"{module}.output.weight"].double() @ state[f"{module}.basis"].double()
    if f"{module}.basis" in state:
        return state[f"{module}.weight"].double() @ state[f"{module}.basis"].double()
    if f"{module}.u.weight" in state:
        return state[f"{module}.v.weight"].double() @ state[f"{module}.u.weight"].double()
    return state[f"{module}.weight"].double()


@pytest.mark.parametrize("name", TEACHERS)
def test_every_factorized_matrix_is_the_best_of_its_rank(teachers, tmp_path, name):
    folder, teacher = teachers(name)
    report = convert(folder, tmp_path / "out", ratio=1.6, method="paper", progress=False)
    source, state = teacher.state_dict(), tensors(tmp_path / "out")
    factorized = [matrix for matrix in report.matrices if matrix.size is not None]
    assert len(factorized) == len(report.matrices)
    for matrix in factorized:
        module = matrix.name if matrix.name == "lm_head" else f"model.{matrix.name}"
        original = source[f"{module}.weight"].double()
        optimum = torch.linalg.svdvals(original)[matrix.size :].norm()
        error = (original - dense_matrix(state, module)).norm()
        assert error <= optimum * (1 + 1e-5)
        assert matrix.relative_error == pytest.approx((optimum / original.norm()).item(), rel=1e-4)
        assert matrix.energy == pytest.approx(1 - matrix.relative_error**2, rel=1e-4)
        assert matrix.size == max(1, int(matrix.m * matrix.n / (1.6 * (matrix.m + matrix.n))))


def test_the_first_factor_is_orthonormal_and_the_zero_padding_row_stays_zero(teachers, tmp_path):
    folder, teacher = teachers("marian")
    convert(folder, tmp_path / "out", rank=4, method="paper", progress=False)
    state = tensors(tmp_path / "out")
    u = state["model.encoder.layers.0.fc1.u.weight"]
    torch.testing.assert_close(u @ u.T, torch.eye(4), atol=1e-5, rtol=0)
    assert (state["model.shared.weight"][teacher.config.pad_token_id] == 0).all()


def test_by_the_papers_method_a_group_starts_as_the_mean_of_its_layers(teachers, tmp_path):
    folder, teacher = teachers("bart")
    convert(folder, tmp_path / "out", encoder_groups=2, decoder_groups=1, method="paper", progress=False)
    source, state = teacher.state_dict(), tensors(tmp_path / "out")
    assert not any(".layers.2." in name for name in state)
    for leaf in ("fc1.weight", "self_attn.q_proj.bias", "final_layer_norm.weight"):
        expected = (source[f"model.encoder.layers.2.{leaf}"] + source[f"model.encoder.layers.3.{leaf}"]) / 2
        torch.testing.assert_close(state[f"model.encoder.layers.1.{leaf}"], expected)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").eval()
    inputs = batch(teacher)
    assert torch.isfinite(model(**inputs).logits).all()


@pytest.mark.parametrize(
    ("name", "stack"), [("bart", "encoder"), ("pegasus", "encoder"), ("marian", "decoder"), ("m2m_100", "decoder")]
)
def test_layers_that_stay_do_the_work_of_the_others(teachers, tmp_path, name, stack):
    """On other text of its own making logits are nearer to the whole teacher's, whatever the family."""
    folder, teacher = teachers(name)
    fewer = {f"{stack}_layers": getattr(teacher.config, f"{stack}_layers") // 2}
    cut, bridged = (
        distance(
            convert_and_load(folder, tmp_path / f"{refit}", **fewer, study=StudyOptions(refit=refit)), teacher, folder
        )
        for refit in (False, None)
    )
    assert bridged < cut / 2


def test_a_lightformer_is_compressed_further(teachers, tmp_path):
    folder, _ = teachers("marian")
    convert(folder, tmp_path / "once", rank=6, method="paper", progress=False)
    convert(tmp_path / "once", tmp_path / "same", rank=7, method="paper", encoder_groups=None, progress=False)
    once, same = tensors(tmp_path / "once"), tensors(tmp_path / "same")
    assert once.keys() == same.keys()
    assert all(torch.equal(once[name], same[name]) for name in once)  # a larger rank changes nothing
    report = convert(tmp_path / "once", tmp_path / "twice", rank=3, method="paper", encoder_groups=2, progress=False)
    twice = tensors(tmp_path / "twice")
    layers = [dense_matrix(once, f"model.encoder.layers.{layer}.fc2") for layer in (0, 1)]
    truncated = [u[:, :3] * s[:3] @ v[:3] for u, s, v in map(torch.linalg.svd, layers)]  # SVD first, then sharing
    u, s, v = torch.linalg.svd((truncated[0] + truncated[1]) / 2)
    merged = dense_matrix(twice, "model.encoder.layers.0.fc2")
    torch.testing.assert_close(merged, u[:, :3] * s[:3] @ v[:3], atol=1e-5, rtol=1e-4)
    mean = (layers[0] + layers[1]) / 2
    error = {matrix.name: matrix.relative_error for matrix in report.matrices}["encoder.layers.0.fc2"]
    assert error == pytest.approx(((mean - merged).norm() / mean.norm()).item(), rel=1e-4)
    assert report.parameters_after == AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "twice").num_parameters()


def test_each_matrix_has_the_rank_that_was_asked_for(teachers, tmp_path):
    folder, _ = teachers("marian")
    report = convert(
        folder,
        tmp_path / "out",
        pattern={
            "attention": 5,
            "ffn": "70%",
            r"decoder\.layers\.1\.fc1": 3,
            "encoder.layers.0.self_attn.q_proj": "dense",
        },
        method="paper",
        progress=False,
    )
    ranks = {matrix.name: matrix.size for matrix in report.matrices}
    assert ranks["shared"] is None
    assert ranks["decoder.layers.1.fc1"] == 3
    assert ranks["encoder.layers.0.self_attn.q_proj"] is None
    assert ranks["decoder.layers.0.encoder_attn.v_proj"] == 5
    for matrix in report.matrices:
        if matrix.kind == "ffn" and matrix.name != "decoder.layers.1.fc1" and matrix.size is not None:
            assert matrix.energy >= 0.7
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    modules = dict(model.model.named_modules())
    for matrix in report.matrices:
        assert getattr(modules[matrix.name], "rank", None) == matrix.size


def test_plan_and_convert_say_the_same_and_json_agrees_with_the_model(tmp_path):
    """Of a teacher with dropout, whose text must not depend on chance, either."""
    model_class, config = TEACHERS["mbart"]
    torch.manual_seed(0)
    config = type(config)(**{**config.to_dict(), "dropout": 0.4})
    like_trained(model_class(config)).save_pretrained(tmp_path / "teacher")
    options = {"ratio": 2, "encoder_groups": 2, "calibration_samples": 16, "progress": False}
    planned, done = plan(tmp_path / "teacher", **options), convert(tmp_path / "teacher", tmp_path / "out", **options)
    measured = {"agreement": None, "candidates": planned.candidates}
    assert planned.to_dict() == replace(done, **measured).to_dict()  # a plan makes no model to compare
    saved = json.loads((tmp_path / "out" / "compression.json").read_text())
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert saved["parameters_after"] == model.num_parameters()
    assert saved["bytes_after"] == sum(tensor.nbytes for tensor in tensors(tmp_path / "out").values())
    assert saved["groups"] == {"encoder": [2, 4], "decoder": [2, 2]}
    assert "| `encoder.layers.0.fc1` |" in (tmp_path / "out" / "README.md").read_text()


def test_sources_in_shards_pickled_or_without_a_head_give_the_same_result(teachers, tmp_path):
    """Names of a checkpoint of the base class have no prefix, and it has no bias of logits."""
    folder, teacher = teachers("bart")
    teacher.model.save_pretrained(tmp_path / "base")
    teacher.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    teacher.config.save_pretrained(tmp_path / "pickle")
    torch.save(teacher.state_dict(), tmp_path / "pickle" / "pytorch_model.bin")
    convert(folder, tmp_path / "expected", rank=4, method="paper", progress=False)
    expected = tensors(tmp_path / "expected")
    for kind in ("shards", "pickle", "base"):
        convert(tmp_path / kind, tmp_path / f"out-{kind}", rank=4, method="paper", progress=False)
        actual = tensors(tmp_path / f"out-{kind}")
        compared = expected.keys() - ({"final_logits_bias"} if kind == "base" else set())
        assert all(torch.equal(actual[name], expected[name]) for name in compared)


# ---- bad input: one clear message, and nothing written ----


def broken(teachers, tmp_path, change):
    """A copy of the BART teacher whose tensors `change` has altered."""
    folder, teacher = teachers("bart")
    state = tensors(folder)
    change(state)
    teacher.config.save_pretrained(tmp_path / "broken")
    save_file(state, tmp_path / "broken" / "model.safetensors", {"format": "pt"})
    return tmp_path / "broken"


def set_value(name, value):
    def change(state):
        state[name] = state[name].clone()
        state[name].view(-1)[3] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.update({"model.extra": torch.zeros(2)}), "no place for: model.extra.*save_pretrained"),
        (lambda state: state.update({"model.shared.weight": torch.zeros(61, 16)}), r"shape \(61, 16\).*\(60, 16\)"),
        (set_value("model.decoder.layers.0.fc2.bias", float("inf")), "decoder.layers.0.fc2.bias .*NaN or inf"),
    ],
)
def test_broken_tensors_are_named(teachers, tmp_path, change, message):
    folder = broken(teachers, tmp_path, change)
    with pytest.raises(ValueError, match=message):
        convert(folder, tmp_path / "out", rank=4, method="paper", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_a_tie_that_the_tensors_contradict_is_an_error(teachers, tmp_path):
    folder = broken(teachers, tmp_path, lambda state: state.update({"lm_head.weight": torch.ones(60, 16)}))
    with pytest.raises(ValueError, match=r"lm_head.weight and model.shared.weight .* differ"):
        convert(folder, tmp_path / "out", rank=4, method="paper", progress=False)


def test_sources_that_cannot_be_converted(teachers, tmp_path):
    from transformers import BartForSequenceClassification, LEDConfig

    folder, teacher = teachers("bart")
    LEDConfig().save_pretrained(tmp_path / "led")
    with pytest.raises(ValueError, match="family 'led'"):
        convert(tmp_path / "led", tmp_path / "out", progress=False)
    BartForSequenceClassification(teacher.config).save_pretrained(tmp_path / "classifier")
    with pytest.raises(ValueError, match="BartForSequenceClassification, which is no sequence-to-sequence"):
        convert(tmp_path / "classifier", tmp_path / "out", progress=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        convert(tmp_path / "empty", tmp_path / "out", progress=False)
    with pytest.raises(ValueError, match="must be apart from"):
        convert(folder, folder / "inside", progress=False)
    assert not (tmp_path / "out").exists()
    assert not (folder / "inside").exists()


def test_inputs_are_never_overwritten(teachers, tmp_path):
    """A source that this package wrote, links to one, calibration data: before any work is done; nor an output."""
    made = tmp_path / "made"
    convert(teachers("bart")[0], made, rank=4, method="paper", progress=False)
    before = {path: path.stat().st_mtime_ns for path in made.iterdir()}
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in made.iterdir():
        (linked / file.name).symlink_to(file)
    data = {"calibration": str(made / "config.json"), "source_lang": "de", "target_lang": "en"}
    for source, options in ((made, {}), (linked, {}), ("a/teacher", data)):
        with pytest.raises(ValueError, match=r"must be apart from .*, which is read"):
            convert(source, made, overwrite=True, progress=False, **options)
    with pytest.raises(FileExistsError, match="overwrite"):
        convert(teachers("bart")[0], made, rank=4, method="paper", progress=False)
    assert {path: path.stat().st_mtime_ns for path in made.iterdir()} == before


def test_what_the_stored_type_does_not_hold_is_refused():
    tensors = {"fc1.weight": torch.tensor([1.0, 7e4]), "fc1.bias": torch.tensor([2.0])}
    assert cast_tensors(tensors, torch.bfloat16)["fc1.bias"].dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"fc1.weight of the result holds values beyond float16"):
        cast_tensors(tensors, torch.float16)
    with pytest.raises(ValueError, match=r"fc1.bias of the result holds NaN"):
        cast_tensors({"fc1.bias": torch.tensor([torch.nan])}, torch.float16)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (DENSE | {"calibration": "owner/pairs"}, "calibration"),
        ({"calibration": "owner/pairs", "encoder_layers": 2}, "calibration"),  # which are all
        (DENSE | {"study": StudyOptions(refit=True)}, "refit"),
    ],
)
def test_what_text_is_not_read_for_is_refused(tiny_marian, tmp_path, options, name):
    with pytest.raises(ValueError, match=f"{name} is given, but no matrix gets smaller"):
        convert(tiny_marian, tmp_path / "light", progress=False, **options)
    assert not list(tmp_path.iterdir())


def test_as_many_layers_as_there_are_change_nothing(tiny_marian, tmp_path):
    """Nor is text made for them."""
    report = convert(tiny_marian, tmp_path / "light", encoder_layers=2, decoder_layers=2, progress=False)
    assert report.calibration is None
    teacher = MarianMTModel.from_pretrained(tiny_marian).state_dict()
    light = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "light").state_dict()
    for name, tensor in light.items():
        assert torch.equal(tensor, teacher[name]), name


def test_groups_alone_are_merged_by_their_inputs(tiny_marian, tmp_path):
    """So that the result is nearer the teacher than without weights, on other text."""
    report = convert(tiny_marian, tmp_path / "light", encoder_groups=1, decoder_groups=1, progress=False)
    assert report.calibration == OWN_TEXT
    teacher, light = AutoModelForSeq2SeqLM.from_pretrained(tiny_marian), tmp_path / "light"
    plain = convert_and_load(tiny_marian, tmp_path / "plain", encoder_groups=1, decoder_groups=1, method="paper")
    lost = [distance(model, teacher, tiny_marian) for model in (AutoModelForSeq2SeqLM.from_pretrained(light), plain)]
    assert lost[0] < lost[1]


def test_the_type_is_that_of_the_file_where_the_configuration_says_none(teachers, tmp_path):
    folder, _ = teachers("marian")
    shutil.copytree(folder, tmp_path / "teacher")
    file = tmp_path / "teacher" / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    config = json.loads((tmp_path / "teacher" / "config.json").read_text())
    (tmp_path / "teacher" / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "dtype"}))
    report = convert(tmp_path / "teacher", tmp_path / "light", method="paper", ratio=2, progress=False)
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "light").dtype == torch.float16
    whole = convert(folder, tmp_path / "whole", method="paper", ratio=2, progress=False)
    assert (report.bytes_before, report.bytes_after) == (whole.bytes_before // 2, whole.bytes_after // 2)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_return_sequences": 2, "num_beams": 4},
        {"return_dict_in_generate": True, "output_scores": True},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"do_sample": True, "temperature": 0.7, "num_beams": 2, "length_penalty": 2.0},
    ],
)
def test_the_teacher_makes_text_whatever_its_own_way_is(tiny_marian, tmp_path, settings):
    shutil.copytree(tiny_marian, tmp_path / "teacher")
    file = tmp_path / "teacher" / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    made = [
        synthetic_batches(reader.model, reader, 4, 0)[0]["labels"]
        for reader in (read(tiny_marian), read(tmp_path / "teacher"))
    ]
    assert torch.equal(*made)


def test_text_is_made_a_token_at_a_time_whatever_training_left(tiny_marian, tmp_path):
    """Trainer leaves `use_cache: false` in a configuration, with which every step would read the whole text again."""
    shutil.copytree(tiny_marian, tmp_path / "teacher")
    (tmp_path / "teacher" / "generation_config.json").unlink()
    file = tmp_path / "teacher" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_cache": False}))
    reader, lengths = read(tmp_path / "teacher"), []
    model = reader.model
    see = lambda module, args, output: lengths.append(output.shape[1])  # noqa: E731
    model.model.decoder.layers[0].register_forward_hook(see)
    made = synthetic_batches(model, reader, 4, 0)[0]["labels"]
    assert made.shape[1] > 1
    assert set(lengths) == {1}


@pytest.mark.parametrize("text", ["nothere.jsonl", "nothere.txt", "folder/pairs.csv.gz", "-", "some/folder/pairs.de"])
@pytest.mark.parametrize("option", ["calibration", "vocabulary"])
def test_text_that_is_not_there_is_noticed_first(tiny_marian, tmp_path, monkeypatch, option, text):
    monkeypatch.setattr("lightformers_hf.workflows.convert.compress", lambda *_, **__: pytest.fail("too late"))
    for function in (partial(convert, output=tmp_path / "light"), plan):
        with pytest.raises(FileNotFoundError, match=f"No data file {text}"):
            function(tiny_marian, progress=False, **{option: text})


@pytest.mark.parametrize(("free", "fast"), [(3e8, True), (1e12, False)])
def test_time_and_memory_are_printed_before_the_work(tiny_marian, monkeypatch, free, fast):
    monkeypatch.setattr(module, "free_memory", lambda: free)
    monkeypatch.setattr(module, "has_fast_bf16", lambda: fast)
    model = read(tiny_marian).model
    table, names = model.get_input_embeddings().weight.numel(), ("_proj.weight", "fc1.weight", "fc2.weight")
    shapes = [tensor.shape for name, tensor in model.named_parameters() if name.endswith(names)]
    tokens = 30e9 / (table + sum(m * n for m, n in shapes))  # 10 s of one core, and 8 s to load
    with use_threads(1):
        line = module.forecast(model, tokens, tokens, given=False)
        given = module.forecast(model, tokens * 20, tokens * 20, given=True)
    # Of one core: 18 or 28 s, and 128 or just below 248 s; times 0.3 and 3
    times, longer = (
        ("5 and 54 seconds", "38 seconds and 7 minutes") if fast else ("8 and 84 seconds", "73 seconds and 13 minutes")
    )
    assert line.startswith(f"This takes between {times} on idle cores, and up to 1.4 GB of memory.")
    assert ("Only 0.3 GB are free" in line) == (free < 1e9)
    assert f"between {longer} on" in given
