"""A teacher with fewer layers against transformers' own model with layers taken out."""

import json
import shutil

import pytest
import torch
from conversion.teachers import COMMON, batch
from conversion.vocabulary.checkpoints import make_checkpoint
from models.cases import TINY, like_trained
from safetensors.torch import load_file, save_file
from tiny import sizes
from torch import nn
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
)

from lightformers_hf import StudyOptions, SubformerConfig, SubformerForConditionalGeneration, convert, plan
from lightformers_hf.checkpoints.families import FAMILIES
from lightformers_hf.checkpoints.families.marian import Marian
from lightformers_hf.checkpoints.teacher import read, shorten


def without(model, stack: str, kept: list[int]) -> None:
    layers = getattr(model.model, stack).layers
    getattr(model.model, stack).layers = nn.ModuleList(layers[i] for i in kept)


@pytest.mark.parametrize(
    ("stack", "count", "kept"), [("decoder", 1, [1]), ("encoder", 1, [1]), ("encoder", 2, [0, 1])]
)
def test_logits_are_those_of_the_model_without_the_layers(tiny_marian, stack, count, kept):
    reference = MarianMTModel.from_pretrained(tiny_marian).eval()
    without(reference, stack, kept)
    model = shorten(read(tiny_marian), {stack: count}).model
    assert getattr(model.config, f"{stack}_layers") == count
    batch = AutoTokenizer.from_pretrained(tiny_marian)(["Zwei Hunde spielen."], return_tensors="pt")
    start = torch.tensor([[reference.config.decoder_start_token_id]])
    expected = reference(**batch, decoder_input_ids=start).logits
    torch.testing.assert_close(model(**batch, decoder_input_ids=start).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("before", "count", "kept"), [(6, 3, [1, 3, 5]), (6, 1, [5]), (5, 3, [0, 2, 4]), (3, 2, [0, 2]), (3, 3, [0, 1, 2])]
)
def test_layers_that_stay_end_equal_parts(tiny_marian, tmp_path, before, count, kept):
    config = MarianMTModel.from_pretrained(tiny_marian).config
    config.decoder_layers = before
    torch.manual_seed(0)
    deep = MarianMTModel(config)
    deep.save_pretrained(tmp_path)
    teacher = shorten(read(tmp_path), {"decoder": count})
    assert list(teacher.layers["decoder"]) == kept
    assert list(teacher.layers["encoder"]) == list(range(config.encoder_layers))
    model = teacher.model
    for layer, index in zip(model.model.decoder.layers, kept, strict=True):
        assert torch.equal(layer.fc1.weight, deep.model.decoder.layers[index].fc1.weight)


def test_convert_keeps_layers_and_counts_from_the_whole_teacher(tiny_marian, tmp_path):
    report = convert(tiny_marian, tmp_path / "light", decoder_layers=1, ratio=2, progress=False)
    weights = MarianMTModel.from_pretrained(tiny_marian).named_parameters()
    whole = sum(weight.numel() for name, weight in weights if "embed_positions" not in name)  # constants, there
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "light")
    assert (model.config.encoder_layers, model.config.decoder_layers) == (2, 1)
    assert report.parameters_before == whole
    assert report.layers == {"encoder": [2, 2], "decoder": [1, 2]}
    assert report.parameters_after == model.num_parameters()
    saved = json.loads((tmp_path / "light" / "compression.json").read_text())
    assert saved["layers"]["decoder"] == [1, 2]


def test_layers_alone_leave_the_matrices_dense(tiny_marian, tmp_path):
    left = {"encoder_layers": 1, "study": StudyOptions(refit=False)}
    report = convert(tiny_marian, tmp_path / "light", **left, progress=False)
    assert report.calibration is None
    assert {matrix.form for matrix in report.matrices} == {"dense"}
    reference = MarianMTModel.from_pretrained(tiny_marian).eval()
    without(reference, "encoder", [1])
    batch = AutoTokenizer.from_pretrained(tiny_marian)(["Der Hund schläft."], return_tensors="pt")
    options = {"num_beams": 1, "max_new_tokens": 12}
    light = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "light")
    assert torch.equal(light.generate(**batch, **options), reference.generate(**batch, **options))


@pytest.mark.parametrize("count", [0, 3])
def test_a_count_that_is_not_there_is_refused(tiny_marian, tmp_path, count):
    with pytest.raises(ValueError, match=f"decoder_layers is {count}.*2 layers: give 1 to 2"):
        convert(tiny_marian, tmp_path / "light", decoder_layers=count, progress=False)
    assert not (tmp_path / "light").exists()


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn, torch.int64])
@pytest.mark.parametrize("name", ["model.encoder.layers.0.fc1.weight", "final_logits_bias"])
def test_weights_that_are_no_floats_are_refused_by_name(tiny_marian, tmp_path, dtype, name):
    shutil.copytree(tiny_marian, tmp_path / "teacher")
    tensors = load_file(tmp_path / "teacher" / "model.safetensors")
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, tmp_path / "teacher" / "model.safetensors")
    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=f"{name} of .*teacher holds {kind}; weights are expected in float32"):
        convert(tmp_path / "teacher", tmp_path / "light", progress=False)
    assert not (tmp_path / "light").exists()


def test_layers_that_share_weights_are_refused(tiny_marian, tmp_path):
    convert(tiny_marian, tmp_path / "shared", encoder_groups=1, progress=False)
    with pytest.raises(ValueError, match=r"encoder_layers can't be changed: .*encoder_groups"):
        convert(tmp_path / "shared", tmp_path / "light", encoder_layers=1, progress=False)


def test_positions_of_m2m100_begin_behind_its_padding(tmp_path):
    config = M2M100Config(**{**COMMON, "pad_token_id": 5})
    torch.manual_seed(0)
    model = M2M100ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    inputs = batch(model)
    inputs = {name: ids + (ids == 5) if name != "attention_mask" else ids for name, ids in inputs.items()}
    inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, 5)
    expected = model(**inputs).logits
    torch.testing.assert_close(read(tmp_path).model(**inputs).logits, expected, atol=1e-5, rtol=1e-5)


def test_biases_that_a_family_lacks_are_zero(monkeypatch):
    class PlainConfig(MarianConfig):
        model_type = "plain"

    class Plain(Marian):
        zeros = r".*_attn\.\w+_proj\.bias"

    monkeypatch.setitem(FAMILIES, "plain", Plain)
    torch.manual_seed(0)
    model = like_trained(MarianMTModel(PlainConfig(**COMMON))).eval()
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.bias = None
    inputs = batch(model)
    own = read(model).model
    assert not own.model.decoder.layers[1].encoder_attn.q_proj.bias.any()
    torch.testing.assert_close(own(**inputs).logits, model(**inputs).logits, atol=1e-5, rtol=1e-5)
    monkeypatch.setattr(Plain, "zeros", "")
    with pytest.raises(ValueError, match=r"lacks tensors its configuration asks for: model\.encoder.*k_proj\.bias"):
        read(model)


def test_own_classes_are_found_without_their_name(tmp_path):
    SubformerForConditionalGeneration(SubformerConfig(**TINY["subformer"])).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": None}))
    assert type(read(tmp_path).model) is SubformerForConditionalGeneration


@pytest.mark.parametrize(
    ("wrong", "message"),
    [("{", "cannot be read"), ({"eos_token_id": 99999}, "eos_token_id 99999"), ({"top_p": 0.5}, "contradicts itself")],
)
def test_generation_settings_are_looked_at_before_anything_takes_long(tiny_marian, tmp_path, wrong, message):
    folder = tmp_path / "teacher"
    shutil.copytree(tiny_marian, folder)
    file, data = folder / "generation_config.json", tmp_path / "text.txt"
    file.write_text(wrong if isinstance(wrong, str) else json.dumps({**json.loads(file.read_text()), **wrong}))
    data.write_text("Zwei Hunde spielen.\n")
    with pytest.raises(ValueError, match=message):
        plan(folder, vocabulary=str(data) if "top_p" in wrong else None, ratio=2, method="paper", progress=False)


def test_generation_settings_that_only_config_json_has_stay(tmp_path):
    """As older checkpoints have them; transformers takes them from there, too, but not into the configuration."""
    config = BartConfig(**sizes(16, heads=4, ffn=4), vocab_size=40, max_position_embeddings=32)
    BartForConditionalGeneration(config).save_pretrained(tmp_path / "own")
    (tmp_path / "own" / "generation_config.json").unlink()
    said = {"num_beams": 4, "max_length": 30, "min_length": 12, "length_penalty": 2.0, "no_repeat_ngram_size": 3}
    said |= {"forced_bos_token_id": 0, "early_stopping": True, "bad_words_ids": [[7]]}
    content = json.loads((tmp_path / "own" / "config.json").read_text())
    (tmp_path / "own" / "config.json").write_text(json.dumps(content | said))
    convert(tmp_path / "own", tmp_path / "light", ratio=1.2, method="paper", progress=False)
    models = [AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name) for name in ("own", "light")]
    for name in [*said, "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id"]:
        own, light = (getattr(model.generation_config, name) for model in models)
        assert light == own, name


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_what_pipelines_put_before_a_text_stays(family, tmp_path):
    """A BART for summaries has a space there, fine-tuned T5 the name of their task."""
    make_checkpoint(family, tmp_path / "teacher")
    file = tmp_path / "teacher" / "config.json"
    fields = {"prefix": "say it: ", "task_specific_params": {"summarization": {"num_beams": 3}}}
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    convert(tmp_path / "teacher", tmp_path / "light", pattern={".*": "dense"}, progress=False)
    kept = json.loads((tmp_path / "light" / "config.json").read_text())
    assert {name: kept[name] for name in fields} == fields
