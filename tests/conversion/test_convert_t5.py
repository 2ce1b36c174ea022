"""What is special in a T5 through all of conversion: no biases, gates, scores that nothing divides, positions."""

import json

import pytest
import torch
from checkpoints.families.test_t5 import make_teacher
from conversion.metrics import assert_sums_close, distance
from models.cases import padded, sentences
from tiny import word_tokenizer
from transformers import AutoModelForSeq2SeqLM

from lightformers_hf import StudyOptions, convert
from lightformers_hf.checkpoints.teacher import read
from lightformers_hf.conversion import calibration_text, sensitivity
from lightformers_hf.conversion.calibration_text import default_sources, random_texts, synthetic_batches
from lightformers_hf.conversion.sensitivity import Calibration, Probes, token_keys
from lightformers_hf.languages import add_prefix, choose_prefix, find_prefixes, set_language_codes

QUICK = {"progress": False, "calibration_samples": 32}


@torch.no_grad()
def answers(model) -> torch.Tensor:
    """Logits of a fixed padded batch."""
    ids, mask = padded(sentences((19, 5, 11)))
    return model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids).logits[mask.bool()]


def error(light, teacher) -> float:
    """How far a model's answers are from another's, relative to how much those differ."""
    return ((answers(light) - answers(teacher)).std() / answers(teacher).std()).item()


def converted(teacher, folder, **options):
    """The model that a conversion writes, and its report."""
    teacher.save_pretrained(folder / "teacher")
    report = convert(folder / "teacher", folder / "light", **QUICK, **options)
    return AutoModelForSeq2SeqLM.from_pretrained(folder / "light").eval(), report


def attentions(teacher):
    """All attentions of a T5."""
    return [module for name, module in teacher.named_modules() if name.endswith(("SelfAttention", "EncDecAttention"))]


@pytest.mark.parametrize(("case", "stack"), [("v1.0", "encoder"), ("v1.1", "decoder"), ("umt5", "encoder")])
def test_layers_that_stay_do_the_work_of_the_others(case, stack, tmp_path):
    """Without biases, and with gates."""
    teacher, errors = make_teacher(case), []
    for refit in (False, None):
        (tmp_path / f"{refit}").mkdir()
        options = {f"{stack}_layers": 1, "study": StudyOptions(refit=refit)}
        light, _ = converted(teacher, tmp_path / f"{refit}", **options)
        errors.append(distance(light, teacher, tmp_path / f"{refit}" / "teacher"))
    assert errors[1] < 0.8 * errors[0]


@torch.no_grad()
def lower_heads(teacher, width: int) -> None:
    """Make W_Q·W_Kᵀ and W_V·W_O of every head a product of that inner width."""
    for module in attentions(teacher):
        heads, full = teacher.config.num_heads, teacher.config.d_kv
        for weight in (module.q.weight, module.k.weight, module.v.weight, module.o.weight.T):
            basis = torch.randn(heads, width, full) / width**0.5
            keep = torch.linalg.pinv(basis) @ basis
            weight.copy_((keep @ weight.view(heads, full, -1)).view_as(weight))


@pytest.mark.parametrize("case", ["v1.0", "v1.1", "umt5"])
def test_narrower_heads_lose_nothing_where_there_is_nothing_to_lose(case, tmp_path):
    """Whose width scores are not divided by; the biases are added to them."""
    teacher = make_teacher(case)
    lower_heads(teacher, 2)
    light, report = converted(teacher, tmp_path, pattern={"attention": "2.5x"}, method="narrow")
    assert {matrix.size for matrix in report.matrices if matrix.kind == "attention"} == {2}
    assert light.config.head_dim == 2
    assert error(light, teacher) < 0.01


@pytest.mark.parametrize("refit", [True, False])
@pytest.mark.parametrize("case", ["v1.0", "v1.1"])
@torch.no_grad()
def test_neurons_go_that_do_nothing(case, refit, tmp_path, monkeypatch):
    """In a gated network from both matrices in front: those whose gate, or whose value, is always zero."""
    monkeypatch.setattr(sensitivity, "SELF_GENERATED_SHRINKAGE", 0.0)  # otherwise all inputs count as seen
    teacher = make_teacher(case)
    for name, weight in teacher.named_parameters():
        if name.endswith(("wi.weight", "wi_0.weight")):
            weight[3:9] = 0
        if name.endswith(("wi.weight", "wi_1.weight")):
            weight[15:21] = 0
    options = {"pattern": {"ffn": "2x"}, "method": "narrow", "study": StudyOptions(refit=refit)}
    light, report = converted(teacher, tmp_path, **options)
    assert {matrix.size for matrix in report.matrices if matrix.kind == "ffn"} == {12}
    layer = light.model.encoder.layers[1]
    assert {layer.fc1.out_features, layer.fc2.in_features} == {12}
    assert error(light, teacher) < (0.02 if refit else 1e-4)


@pytest.mark.parametrize("case", ["v1.0", "v1.1", "umt5"])
@torch.no_grad()
def test_alike_layers_share_one_whatever_the_order_of_neurons_and_the_basis_of_heads(case, tmp_path):
    """Heads stay where they are: a bias of relative positions belongs to each."""
    teacher = make_teacher(case)
    first, *others = teacher.encoder.block
    biases = first.layer[0].SelfAttention.relative_attention_bias.weight
    for block in others:
        for (name, own), weight in zip(block.named_parameters(), block.parameters(), strict=True):
            weight.copy_(dict(first.named_parameters())[name])
            assert own is weight
        attention = block.layer[0].SelfAttention
        for pair in ((attention.q.weight, attention.k.weight), (attention.v.weight, attention.o.weight.T)):
            turn = torch.block_diag(*(torch.linalg.qr(torch.randn(5, 5))[0] for _ in range(4)))
            for weight in pair:
                weight.copy_(turn @ weight)
        network, order = block.layer[1].DenseReluDense, torch.randperm(24)
        for name, weight in network.named_parameters():
            weight.copy_(weight[:, order] if name == "wo.weight" else weight[order])
    light, _ = converted(teacher, tmp_path, encoder_groups=1)
    assert error(light, teacher) < 1e-3
    stack = light.model.encoder
    kept = stack.layers[0].relative_positions if case == "umt5" else stack.relative_positions
    torch.testing.assert_close(kept.weight, biases)


@pytest.mark.parametrize("case", ["v1.0", "umt5"])
def test_fewer_layers_keep_their_positions(case, tmp_path):
    """Those of the whole stack, which the first layer holds, or each layer's own."""
    teacher = make_teacher(case)
    light, _ = converted(teacher, tmp_path, encoder_layers=2)
    blocks = [teacher.encoder.block[index].layer[0].SelfAttention for index in (0, 2)]
    if case == "umt5":
        for block, layer in zip(blocks, light.model.encoder.layers, strict=True):
            assert torch.equal(layer.relative_positions.weight, block.relative_attention_bias.weight)
    else:
        ours = light.model.encoder.relative_positions.weight
        assert torch.equal(ours, blocks[0].relative_attention_bias.weight)


@pytest.mark.parametrize("case", ["v1.0", "v1.1", "umt5"])
def test_all_of_conversion_together(case, tmp_path):
    """Every form under one budget; the answers are nearer than those of the paper's procedure at the same size."""
    teacher = make_teacher(case)
    light, report = converted(teacher, tmp_path, ratio=1.5)
    assert report.parameters_after < report.parameters_before / 1.3
    convert(tmp_path / "teacher", tmp_path / "plain", ratio=1.5, method="paper", progress=False)
    plain = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "plain").eval()
    assert error(light, teacher) < error(plain, teacher)
    light.generate(torch.tensor([[5, 6, 2]]), num_beams=2, max_new_tokens=5)


def test_a_start_whose_vector_is_zero_weighs_nothing(tmp_path):
    """No error reaches it, though RMSNorm magnifies the gradients that come through it a thousand times."""
    teacher = make_teacher("v1.1")
    with torch.no_grad():
        teacher.shared.weight[1] = 0
    teacher.save_pretrained(tmp_path)
    model = read(tmp_path).model
    ids = torch.tensor([[1, *range(5, 20)]])
    batch = {"input_ids": ids[:, 1:], "attention_mask": torch.ones_like(ids[:, 1:]), "labels": ids[:, 1:]}
    batch["decoder_input_ids"] = ids[:, :-1]
    names = ["model.decoder.layers.0.self_attn.v_proj", "model.decoder.layers.0.encoder_attn.q_proj"]
    calibration = Calibration(model, names, [batch])
    found, gradients = calibration.moments, {}
    table = "model.decoder.embed_tokens"
    for name in [table, *names]:

        def see(module, arguments, output, name=name):
            output.requires_grad_()
            output.register_hook(lambda gradient: gradients.update({name: gradient[0]}))

        model.get_submodule(name).register_forward_hook(see)
    logits = model(**batch).logits[0]
    drawn = Probes(logits.shape[-1], logits.device, calibration.temperature).draw(
        logits.detach(), token_keys(batch)[0]
    )
    (logits * drawn).sum().backward()
    for name, gradient in gradients.items():
        assert gradient[0].norm() > 10 * gradient[1:].norm() or name == names[1]
        assert_sums_close(found[name].gradients, gradient[1:], gradient[1:])
    assert found[table].vectors["tokens"][1] == 0


def test_prefixes_are_given_or_found(tmp_path, caplog):
    tasks = {
        "translation_en_to_de": {"prefix": "translate English to German: "},
        "summarization": {"prefix": "summarize: ", "num_beams": 4},
        "other": {},
    }
    config = type("Config", (), {"task_specific_params": tasks})()
    assert add_prefix(config, "en", "de") == "en=translate English to German: "
    assert add_prefix(config, "en=say it: ", "de") == "en=say it: "
    assert add_prefix(config, "de", "en") == "de"
    assert [add_prefix(config, "article", "highlights") for _ in range(2)] == ["article"] * 2
    assert caplog.text.count("give it, with a space at its end: --source-lang 'article=summarize: '") == 1
    assert find_prefixes(config, "en", "de") == ["translate English to German: "]
    assert find_prefixes(config, None, None) == ["translate English to German: ", "summarize: "]
    assert find_prefixes(None, None, None) == [""]
    config.task_specific_params = {"summarization": {"prefix": "summarize: "}}  # the only one is that of any columns
    assert add_prefix(config, "document", "summary") == "document=summarize: "
    assert choose_prefix(config, "de", "en", name="t5", columns=False) == "summarize: "
    assert find_prefixes(config, None, None) == ["summarize: "]
    config.task_specific_params = {"translation_en_to_de": {"prefix": "translate English to German: "}}
    assert add_prefix(config, "text", "label") == "text=translate English to German: "
    assert add_prefix(config, "de", "en") == "de"
    assert find_prefixes(config, "de", "en") == [""]
    unknown = {"convert_tokens_to_ids": lambda *_: 3, "unk_token_id": 3}
    plain = type("Tokenizer", (), {"name_or_path": "plain", **unknown})()
    assert set_language_codes(plain, "en=say it: ", "de") is None
    with pytest.raises(ValueError, match="prefix that ends with a space"):
        set_language_codes(plain, "en=say it:", "de")


def test_own_text_begins_with_the_prefix_that_the_result_keeps(tiny_marian, tmp_path):
    folder = tmp_path / "teacher"
    teacher = make_teacher("v1.1")
    teacher.resize_token_embeddings(len(words()) + 3)
    teacher.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    reader = read(folder, languages=("de=say it: ", "en"))
    batches = synthetic_batches(reader.model, reader, 8, 0)
    first = make_tokenizer()("say it:", add_special_tokens=False)["input_ids"]
    for batch in batches:
        assert (batch["input_ids"][:, : len(first)] == torch.tensor(first)).all()
    texts = random_texts(make_tokenizer(), reader.config, ("de=say it: ", "en"), 8, 0, name="")
    assert all(text.startswith("say it: ") for text in texts)
    assert make_tokenizer()(texts)["input_ids"] == [
        ids[mask].tolist()
        for batch in batches
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
    ]
    light = tmp_path / "light"
    convert(folder, light, source_lang="de=say it: ", target_lang="en", **QUICK)
    kept = json.loads((light / "config.json").read_text())["task_specific_params"]
    assert kept == {"translation_de_to_en": {"prefix": "say it: "}}


@pytest.mark.parametrize(("parameters", "number"), [(75e6, 256), (20e6, 256), (10e6, 512), (7e6, 512), (1e6, 1024)])
def test_small_models_make_more_text(tiny_marian, parameters, number, monkeypatch):
    reader = read(tiny_marian)
    model = reader.model
    monkeypatch.setattr(model, "num_parameters", lambda: int(parameters))
    monkeypatch.setattr(calibration_text, "SOURCES", 256)
    assert default_sources(model) == (number, number // 8)
    if number == 512:
        monkeypatch.setattr(calibration_text, "SOURCES", 8)
        batches = synthetic_batches(model, reader, None, 0)
        assert [len(batch["input_ids"]) for batch in batches] == [16]
        batches = synthetic_batches(model, reader, 40, 0)
        assert [len(batch["input_ids"]) for batch in batches] == [32, 8]  # what was asked for


def words() -> list[str]:
    """A vocabulary of words."""
    return ["<s>", "<pad>", "</s>", "<unk>", "say", "it:", *(f"w{number}" for number in range(40))]


def make_tokenizer():
    """A tokenizer of words, with an end behind each text."""
    return word_tokenizer(words(), "</s>", unk_token="<unk>", pad_token="<pad>", eos_token="</s>")
