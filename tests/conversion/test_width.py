"""Fewer features of the hidden states: exact before the cut, the best directions, and models that engines run."""

import pytest
import torch
from models.cases import T5
from tiny import sizes
from transformers import AutoModelForSeq2SeqLM

from lightformers_hf import LightFormerConfig, LightFormerForConditionalGeneration, convert, export, plan
from lightformers_hf.checkpoints.teacher import read
from lightformers_hf.conversion import width as module
from lightformers_hf.conversion.sensitivity import Calibration
from lightformers_hf.conversion.sharing import find_matrices
from lightformers_hf.conversion.width import (
    find_streams,
    fold_norms,
    likely_widths,
    narrow,
    narrow_calibration,
    principal_directions,
)
from lightformers_hf.options import OptionError

PRE_NORM = {"normalize_before": True, "final_layer_norm": True}
MODELS = {
    "t5": {**T5, "head_dim": 16, "relative_buckets": 32, "relative_furthest": 128, "tie_word_embeddings": False},
    "marian": {},
    "bart": {"position_embedding_type": "learned", "position_offset": 2, "layernorm_embedding": True},
    "pegasus": PRE_NORM,
    "untied": {**PRE_NORM, "tie_word_embeddings": False, "share_encoder_decoder_embeddings": False},
}
QUICK = {"progress": False, "calibration_samples": 32}


@torch.no_grad()
def make_model(name="marian", **fields):
    """Whose gains and biases differ from feature to feature where the matrices behind a norm may get them."""
    torch.manual_seed(0)
    shapes = sizes(64, layers=2, heads=4, ffn=96, vocab_size=60, max_position_embeddings=40, dropout=0.0)
    config = LightFormerConfig(**{**shapes, **MODELS[name], **fields})
    model = LightFormerForConditionalGeneration(config).eval().requires_grad_(False)
    folded = {module.norm_before(one) for one, kind in find_matrices(model) if kind != "embedding"}
    folded = folded if config.normalize_before else set()
    if not config.tie_word_embeddings:
        folded.add("model.decoder.layer_norm")
    for one, weight in model.named_parameters():
        norm, _, leaf = one.rpartition(".")
        if "q_proj" in one:
            weight.mul_(4)
        elif leaf == "bias":
            weight.normal_(std=0.1)
        elif norm in folded:
            weight.uniform_(0.5, 1.5)
    return model


def make_batches(config, count=4):
    torch.manual_seed(1)
    batches = []
    for _ in range(count):
        ids = torch.randint(4, config.vocab_size, (2, 8, 9))
        mask = torch.ones(8, 9, dtype=torch.long)
        mask[1, 5:] = 0
        inputs = ids[1].masked_fill(mask == 0, 1)
        labels = ids[0].masked_fill(mask == 0, -100)
        batches.append(
            {"input_ids": inputs, "attention_mask": mask, "labels": labels, "decoder_input_ids": ids[0].roll(1, 1)}
        )
    return batches


def logits(model):
    inputs = {name: part for name, part in make_batches(model.config, 1)[0].items() if name != "labels"}
    with torch.no_grad():
        return model(**inputs).logits[inputs["attention_mask"].bool()]


def calibrate(model):
    linear = [name for name, kind in find_matrices(model) if kind != "embedding"]
    return Calibration(model, linear, make_batches(model.config))


@pytest.mark.parametrize("name", MODELS)
def test_all_directions_are_the_teacher_itself(name):
    """Rotated by any matrix, that of LayerNorm with the mean unchanged, with R = Aᵀ and with the estimated R."""
    teacher = read(make_model(name))
    rotated = fold_norms(teacher)
    torch.testing.assert_close(logits(rotated.model), logits(teacher.model))
    calibration = calibrate(rotated.model)
    streams = find_streams(rotated.model, calibration, 64)[0]
    assert all((one - torch.eye(64)).abs().max() > 0.1 for one in streams.values())
    for known in (None, calibration):
        found = narrow(rotated, streams, known).model
        torch.testing.assert_close(logits(found), logits(teacher.model), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("fields", [{"use_bias": False}, {"key_bias": False}])
def test_a_bias_of_norms_is_not_lost_where_matrices_have_none(fields):
    teacher = read(make_model("untied", **fields))
    torch.testing.assert_close(logits(fold_norms(teacher).model), logits(teacher.model), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["t5", "untied"])
def test_outputs_keep_their_scale(name):
    """Models that divide the last hidden states by √d have the logits of those whose output layer is so much less."""
    found = []
    for scaled in (False, True):
        model = make_model(name, scale_output=scaled)
        model.lm_head.weight.mul_(8 if scaled else 1)
        teacher = fold_norms(read(model))
        calibration = calibrate(teacher.model)
        streams = find_streams(teacher.model, calibration, 32)[0]
        narrower = narrow(teacher, streams, calibration).model
        moments = narrow_calibration(calibration, streams, narrower).moments["lm_head"]
        found.append((logits(model), logits(narrower), moments.inputs * (64 if scaled else 1)))
    torch.testing.assert_close(found[0], found[1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["t5", "untied"])
def test_moments_are_those_of_the_narrower_model(name):
    """Measured again, where nothing is lost."""
    teacher = fold_norms(read(make_model(name)))
    calibration = calibrate(teacher.model)
    streams = find_streams(teacher.model, calibration, 64)[0]
    rotated = narrow(teacher, streams).model
    calibration = narrow_calibration(calibration, streams, rotated)
    expected = calibrate(rotated)
    for one, moments in expected.moments.items():
        for what in moments.sizes:
            found, wanted = (getattr(each.moments[one], what) for each in (calibration, expected))
            torch.testing.assert_close(found, wanted, atol=1e-4 * wanted.abs().max().item(), rtol=1e-2, msg=one)


@pytest.mark.parametrize("keep_mean", [False, True])
def test_directions_hold_most(keep_mean):
    torch.manual_seed(0)
    factor = torch.randn(12, 12, dtype=torch.float64)
    moment = factor @ factor.T
    basis = principal_directions(moment, 5, keep_mean=keep_mean)
    torch.testing.assert_close(basis.T @ basis, torch.eye(5, dtype=torch.float64))
    rows = torch.randn(7, 12, dtype=torch.float64)
    fixed = torch.full((12, 1), 12**-0.5, dtype=torch.float64) if keep_mean else torch.empty(12, 0).double()
    if keep_mean:
        torch.testing.assert_close((rows @ basis).mean(1) / rows.mean(1), rows.new_full((7,), (12 / 5) ** 0.5))
    held = (basis.T @ moment @ basis).trace()
    for _ in range(200):
        other = torch.linalg.qr(torch.cat([fixed, torch.randn(12, 5 - keep_mean, dtype=torch.float64)], 1))[0]
        assert (other.T @ moment @ other).trace() < held


def divergence(teacher, **options):
    light = convert(teacher, **QUICK, **options)
    return light.compression_report.agreement.divergence, light


@torch.no_grad()
def keep_few_directions(teacher):
    """Leave most of the hidden states within 24 directions."""
    low = torch.linalg.qr(torch.randn(64, 64))[0][:, :24]
    for one, weight in teacher.named_parameters():
        if one.endswith(("shared.weight", "lm_head.weight")):
            weight.copy_(weight @ low @ low.T + 0.1 * weight)
        elif one.endswith(("out_proj.weight", "fc2.weight")):
            weight.copy_(low @ low.T @ weight + 0.1 * weight)
    return teacher


@pytest.mark.parametrize("name", ["marian", "t5"])
def test_measured_directions_are_nearer_than_any(name, monkeypatch):
    teacher = keep_few_directions(make_model(name, init_std=None))
    found, light = divergence(teacher, d_model="50%")
    assert (light.config.d_model, light.config.head_dim) == (32, 16)
    assert {light.model.encoder.layers[0].fc1.in_features, light.lm_head.in_features} == {32}

    measured = module.find_streams

    def find_random(*arguments):
        streams = measured(*arguments)[0]
        torch.manual_seed(2)
        moment = torch.diag(torch.rand(64, dtype=torch.float64))
        return [dict.fromkeys(streams, principal_directions(moment, 32, keep_mean=name == "marian"))]

    monkeypatch.setattr(module, "find_streams", find_random)
    assert found < 0.6 * divergence(teacher, d_model=32)[0]


def test_a_width_holds_the_share_that_stays():
    teacher = read(make_model())
    assert [likely_widths(teacher, removed) for removed in (0.4, 0.5, 0.9)] == [[], [32], [32]]
    odd = read(make_model(d_model=100))  # not every fourth number
    assert likely_widths(odd, 0.7) == [68, 60, 52, 44, 36]


def test_width_is_chosen_with_the_method():
    """A model of the same size with fewer features is kept where it is as near to its teacher as another one."""
    few, whole = keep_few_directions(make_model(init_std=None)), make_model(init_std=None)
    options = {"ratio": 4, "progress": False, "calibration_samples": 160}
    for method in ("auto", "narrow"):
        report = convert(few, method=method, **options).compression_report
        own = convert(few, method=method, d_model="100%", **options).compression_report
        assert (report.features, own.features) == ([32, 64], [64, 64])
        assert report.agreement.divergence < own.agreement.divergence
        assert report.parameters_after == pytest.approx(own.parameters_after, rel=0.02)
        assert next(iter(report.candidates)) == method
        assert "with d_model 32 (" in str(report)
        assert not any("d_model" in name for name in own.candidates)
    tables = [matrix.form for matrix in report.matrices if matrix.kind == "embedding"]
    assert tables == ["dense"]  # of the method narrow
    # With 32 features it would have fewer parameters than that before anything gets smaller.
    assert convert(few, **{**options, "ratio": None, "params": int(0.7 * few.num_parameters())}).config.d_model == 64
    # The last pattern asks for a rank that fewer features do not have.
    for kept in ({}, {"method": "low-rank"}, {"pattern": {"fc1": 40}}):
        assert convert(few if kept else whole, **options, **kept).config.d_model == 64


@pytest.mark.parametrize("differ", [False, True])
def test_features_stay_where_gains_differ(differ, monkeypatch):
    """Rotated hidden states would have other gains; features alone lose more where they all have the same."""
    teacher, gains = make_model(), torch.tensor([1.0, 0.02] * 32)
    for one, weight in teacher.named_parameters():
        if differ and one.endswith("norm.weight"):
            weight.copy_(gains)
    chosen = []

    def see(calibration, streams, narrower):
        chosen.append(streams)
        return narrow_calibration(calibration, streams, narrower)

    monkeypatch.setattr(module, "narrow_calibration", see)
    plan(teacher, d_model=32, progress=False)
    assert (chosen[0]["encoder"].unique().numel() == 2) == differ


@pytest.mark.parametrize("name", ["marian", "t5"])
def test_engine_translates_as_transformers(name, tmp_path):
    import ctranslate2

    make_model(name).save_pretrained(tmp_path / "teacher")
    report = convert(tmp_path / "teacher", tmp_path / "light", d_model=32, ratio=3, **QUICK)
    assert report.features == [32, 64]
    light = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "light").eval()
    export(tmp_path / "light", tmp_path / "engine", to="ctranslate2", quantization="float32")
    translator = ctranslate2.Translator(str(tmp_path / "engine"))
    ids = make_batches(light.config, 1)[0]["input_ids"][[0, 2, 3]]
    found = translator.translate_batch(
        [[str(number) for number in row] for row in ids.tolist()], beam_size=1, max_decoding_length=12
    )
    expected = light.generate(ids, num_beams=1, max_new_tokens=12)
    for one, wanted in zip(found, expected.tolist(), strict=True):
        tokens = [int(token) for token in one.hypotheses[0]]
        assert len(tokens) > 2
        assert tokens == [number for number in wanted[1:] if number not in (1, 2)][: len(tokens)]


def kept(report):
    return sum(matrix.parameters_after for matrix in report.matrices)


def test_budget_counts_from_the_teacher():
    teacher = make_model()
    whole = kept(plan(teacher, pattern={".*": None}, progress=False))
    alone = plan(teacher, d_model=32, progress=False)
    assert (kept(alone), alone.smaller, alone.ratio) == (whole / 2, [], 2)
    assert "keep 32 of 64 features" in str(alone)
    assert kept(plan(teacher, d_model=32, ratio=1.5, progress=False)) == whole / 2  # smaller than asked for already
    for method in ("auto", "low-rank", "narrow"):
        assert 0.95 * whole / 3 < kept(plan(teacher, d_model=32, ratio=3, method=method, progress=False)) <= whole / 3


@pytest.mark.parametrize(
    "options",
    [
        {"decoder_layers": 1},
        {"encoder_groups": 1},
        {"decoder_groups": 1, "ratio": 3},
        {"ratio": 3, "method": "narrow"},
    ],
)
def test_other_ways_go_together(options):
    """The result still follows its teacher: its predictions are nearer than those for tokens of equal probability."""
    teacher = make_model(decoder_attention_heads=2)
    found, light = divergence(teacher, d_model=32, **options)
    uniform = logits(teacher).log_softmax(-1)
    entropy = -(uniform.exp() * uniform).sum(-1).mean().item()
    assert light.config.d_model == 32
    assert light.config.head_dim_pattern.keys() <= {name.removeprefix("model.") for name, _ in light.named_modules()}
    assert found < torch.tensor(60.0).log().item() - entropy


def test_all_features_change_nothing(caplog):
    teacher = make_model()
    for asked in (64, "100%"):
        light = convert(teacher, d_model=asked, progress=False)
        assert torch.equal(logits(light), logits(teacher))
    assert not caplog.text
    convert(make_model(d_model=32), d_model="50%", progress=False)
    assert "d_model is 50%, but all 32 features" in caplog.text


@pytest.mark.parametrize(
    ("options", "fields", "message"),
    [
        ({"d_model": 96}, {}, "d_model is 96, but .* has 64 features: give 64 at most"),
        ({"d_model": 40}, {}, "d_model is 40, expected a multiple of 32 for .* give 32 or 64"),
        ({"d_model": 0}, {}, "d_model is 0, expected"),
        ({"d_model": "0.0%"}, {}, "d_model is '0.0%', expected a whole number.*75%"),
        ({"d_model": "half"}, {}, "d_model is 'half', expected a whole number.*75%"),
        ({"d_model": 32}, {"encoder_groups": 1}, "d_model is 32, but layers of .* are shared .*encoder_groups"),
        ({"d_model": 32}, {"ffn_rank": 4}, "d_model is 32, but layers of .* factorized .*ffn_rank.*its own teacher"),
        ({"d_model": 32, "method": "paper"}, {}, "method is 'paper'.*no d_model"),
    ],
)
def test_what_cannot_be(options, fields, message, tmp_path):
    make_model(**fields).save_pretrained(tmp_path / "teacher")
    with pytest.raises(OptionError, match=message):
        convert(tmp_path / "teacher", tmp_path / "light", **options, **QUICK)
    assert not (tmp_path / "light").exists()
