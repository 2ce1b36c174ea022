"""Factorization in the metric of the loss: its moments, its optimality, one budget for all, what users see."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from conversion.metrics import assert_sums_close, loss
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import sizes
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from lightformers_hf import LightFormerConfig, LightFormerForConditionalGeneration, StudyOptions, convert, plan
from lightformers_hf.checkpoints.teacher import read
from lightformers_hf.conversion import refit
from lightformers_hf.conversion.calibration_text import parallel_batches, sample_pairs, translated_batches
from lightformers_hf.conversion.moments import damped_root
from lightformers_hf.conversion.options import CompressionOptions
from lightformers_hf.conversion.sensitivity import (
    PERIOD,
    SHRINKAGE,
    Calibration,
    Probes,
    cut_batches,
    find_temperature,
    logit_variance,
    token_keys,
)
from lightformers_hf.conversion.sharing import find_matrices

REFIT = StudyOptions(refit=True, joint=False)


@pytest.fixture(scope="module")
def text(tmp_path_factory, parallel_sentences):
    file = tmp_path_factory.mktemp("text") / "pairs.jsonl"
    file.write_text("".join(json.dumps({"translation": pair}) + "\n" for pair in parallel_sentences))
    return str(file)


@pytest.fixture(scope="module")
def calibrated(tiny_marian, text):
    """The tiny teacher as this package's model, and its moments over the ten pairs."""
    model = read(tiny_marian).model
    tokenizer = AutoTokenizer.from_pretrained(tiny_marian)
    options = CompressionOptions(calibration=text, source_lang="de", target_lang="en", calibration_samples=10)
    batches = parallel_batches(model, tokenizer, sample_pairs(model.config, tokenizer, options, StudyOptions()))
    linear = [name for name, kind in find_matrices(model) if kind != "embedding"]
    return model, Calibration(model, linear, batches)


def one_by_one(model, folder, parallel_sentences, watch, temperature=1.0):
    """Inputs and gradients at modules, from one sentence pair at a time: no padding, no masks."""
    probes = Probes(model.config.vocab_size, torch.device("cpu"), temperature)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    seen = {name: ([], []) for name in watch}
    table = model.model.encoder.embed_tokens.weight.requires_grad_()
    hooks = []
    for name in watch:

        def see(module, arguments, output, name=name):
            seen[name][0].append(arguments[0].detach().flatten(0, 1))
            output.register_hook(lambda gradient: seen[name][1].append(gradient.flatten(0, 1)))

        hooks.append(model.get_submodule(name).register_forward_hook(see))
    for pair in parallel_sentences:
        batch = tokenizer([pair["de"]], text_target=[pair["en"]], return_tensors="pt")
        decoder_input_ids = model.prepare_decoder_input_ids_from_labels(batch["labels"])
        logits = model(batch["input_ids"], decoder_input_ids=decoder_input_ids, use_cache=False).logits[0]
        drawn = probes.draw(logits.detach(), token_keys(batch)[0])
        torch.autograd.grad((logits * drawn).sum(), table)
    for hook in hooks:
        hook.remove()
    return {name: tuple(torch.cat(parts) for parts in lists) for name, lists in seen.items()}


def test_moments_are_those_of_sentences_alone(calibrated, tiny_marian, parallel_sentences):
    model, calibration = calibrated
    names = ["encoder.layers.0.fc1", "encoder.layers.1.self_attn.v_proj", "decoder.layers.0.fc2"]
    names += ["decoder.layers.1.encoder_attn.k_proj", "decoder.layers.1.encoder_attn.q_proj"]
    names = [f"model.{name}" for name in names]
    watch, temperature = [*names, "lm_head", "model.decoder.embed_tokens"], calibration.temperature
    expected = one_by_one(model, tiny_marian, parallel_sentences, watch, temperature)
    for name in names:
        inputs, gradients = expected[name]
        moments, weights = calibration.moments[name], gradients.square().sum(1)
        assert moments.count == pytest.approx(weights.sum().item(), rel=1e-4)
        weighed = weights[:, None] * inputs
        assert_sums_close(moments.inputs, inputs, weighed)
        assert_sums_close(moments.vectors["mean"][None], weights[:, None], inputs)
        assert_sums_close(moments.gradients, gradients, gradients)
    inputs, gradients = expected["lm_head"]
    assert calibration.target_tokens == len(inputs)
    weighed = gradients.square().sum(1, keepdim=True) * inputs
    assert_sums_close(calibration.moments["lm_head"].inputs, inputs, weighed)
    squares = calibration.moments["lm_head"].vectors["squares"]
    assert_sums_close(squares[None], torch.ones(len(gradients), 1), gradients.square())
    ids, gradients = expected["model.decoder.embed_tokens"]
    table = calibration.moments["model.decoder.embed_tokens"]
    assert torch.equal(table.vectors["tokens"], torch.bincount(ids, minlength=model.config.vocab_size))
    assert_sums_close(table.gradients, gradients, gradients)


def test_a_tables_two_jobs_are_one_metric(calibrated):
    """An error of one token costs what both jobs say, in the direction where they agree on average."""
    model, calibration = calibrated
    metric = calibration.metric(["model.shared"], "embedding", has_bias=False)
    jobs = [
        (
            calibration.moments["lm_head"].vectors["squares"] / calibration.target_tokens,
            calibration.moments["lm_head"].inputs / calibration.moments["lm_head"].count,
        )
    ]
    for stack in ("encoder", "decoder"):
        part = calibration.moments[f"model.{stack}.embed_tokens"]
        jobs.append((part.vectors["tokens"] / part.count, part.gradients / calibration.target_tokens))
    total = sum((weights.sum() * matrix.trace()).item() for weights, matrix in jobs)
    vocabulary, width = model.model.shared.weight.shape
    cost = (metric.left.square().sum() * metric.right.square().sum()).item()
    added = 1.01 * (1 + SHRINKAGE)  # 1 % goes to tokens that were not seen, as much to directions
    assert cost == pytest.approx(total * added, rel=1e-4)
    assert metric.left.shape == (vocabulary,)
    assert metric.right.shape == (width, width)
    assert metric.left.min() > 0


def test_calibration_keeps_more(tiny_marian, text, parallel_sentences, tmp_path):
    """At equal parameters, one budget in the metric of the loss loses least, plain SVD of everything alike most."""
    convert(tiny_marian, tmp_path / "plain", ratio=2, method="paper", progress=False)
    convert(tiny_marian, tmp_path / "textless", ratio=2, study=StudyOptions(refit=False), progress=False)
    known = {"calibration": text, "ratio": 2, "progress": False}
    uniform = StudyOptions(allocation="uniform", refit=False)
    convert(tiny_marian, tmp_path / "uniform", **known, study=uniform)
    report = convert(tiny_marian, tmp_path / "budget", **known, study=StudyOptions(refit=False))
    names = ("plain", "textless", "uniform", "budget")
    losses = {name: loss(tmp_path / name, tiny_marian, parallel_sentences) for name in names}
    assert losses["plain"] > losses["uniform"] + 0.1
    assert losses["uniform"] > losses["budget"]
    assert losses["plain"] > losses["textless"] + 0.1
    card = (tmp_path / "budget" / "README.md").read_text()
    assert "pairs.jsonl" in card
    assert text not in card  # no path of this machine
    assert sum(matrix.parameters_after for matrix in report.matrices) <= (
        sum(matrix.parameters_before for matrix in report.matrices) / 2
    )
    table = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "budget").model.shared
    assert torch.count_nonzero(table.weight[-1]) == torch.count_nonzero(
        AutoModelForSeq2SeqLM.from_pretrained(tiny_marian).model.shared.weight[-1]
    )


def test_refit_wins_some_of_it_back(tiny_marian, text, parallel_sentences, tmp_path):
    known = {"calibration": text, "ratio": 4, "progress": False}
    before = convert(tiny_marian, tmp_path / "light", **known, study=StudyOptions(refit=False))
    after = convert(tiny_marian, tmp_path / "refitted", **known)
    # Chosen alike; what threads add up in another order may differ in the errors' last digits.
    chosen = [[(matrix.name, matrix.setting) for matrix in report.matrices] for report in (before, after)]
    assert chosen[0] == chosen[1]
    losses = [loss(tmp_path / name, tiny_marian, parallel_sentences) for name in ("light", "refitted")]
    assert losses[1] < losses[0] - 0.1


def test_refit_leaves_alone_what_lost_nothing(tiny_marian, text, tmp_path):
    """Layers that get the teacher's inputs and are dense give the teacher's outputs already; the last FFN does not."""
    pattern = {"decoder.layers.1.fc2": 4, ".*": None}
    convert(tiny_marian, tmp_path / "light", calibration=text, pattern=pattern, study=REFIT, progress=False)
    teacher, light = read(tiny_marian).model, AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "light")
    state = light.state_dict()
    for name, tensor in teacher.state_dict().items():
        if "decoder.layers.1.fc2" not in name and name != "final_logits_bias":
            torch.testing.assert_close(state[name], tensor, atol=2e-4, rtol=1e-3)


def test_a_refitted_layer_is_the_regression_of_the_teachers(
    tiny_marian, text, calibrated, parallel_sentences, tmp_path
):
    """The first layer's queries, whose inputs the compressed token table makes: against a direct solution, in which
    tokens have the root of what the loss feels of them at queries, keys and values, relative to the mean of each.
    """
    convert(tiny_marian, tmp_path / "light", calibration=text, pattern={"embedding": 6}, study=REFIT, progress=False)
    teacher, light = read(tiny_marian).model, AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "light")
    name = "model.encoder.layers.0.self_attn.q_proj"
    names = [name.replace("q_proj", leaf) for leaf in ("q_proj", "k_proj", "v_proj")]
    rows = {}
    for key, model in (("teacher", teacher), ("light", light)):
        model.model.encoder.embed_tokens.weight.requires_grad_(True)
        rows[key] = one_by_one(model.eval(), tiny_marian, parallel_sentences, names, calibrated[1].temperature)
    felt = [rows["teacher"][each][1].double().square().sum(1) for each in names]
    w = sum(weights / weights.sum() for weights in felt).sqrt()[:, None]
    w = w / w.sum()
    own = teacher.get_submodule(name)
    x, y = rows["light"][name][0].double(), rows["teacher"][name][0].double() @ own.weight.T.double() + own.bias
    x_mean, y_mean = (w * x).sum(0), (w * y).sum(0)
    covariance = (x - x_mean).T @ (w * (x - x_mean))
    ridge = 0.01 * covariance.diagonal().mean()
    right = (x - x_mean).T @ (w * (y - y_mean)) + ridge * own.weight.T.double()
    expected = torch.linalg.inv(covariance + ridge * torch.eye(len(covariance)).double()) @ right
    found = light.get_submodule(name)
    torch.testing.assert_close(found.weight.T.double(), expected, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(found.bias.double(), y_mean - x_mean @ expected, atol=1e-4, rtol=1e-3)


def test_the_bias_takes_the_mean_error(tiny_marian, text, calibrated, tmp_path):
    """The mean output over the samples stays what it was, whatever the factors lose."""
    _, calibration = calibrated
    name = "model.encoder.layers.0.self_attn.q_proj"
    mean = calibration.moments[name].vectors["mean"] / calibration.moments[name].count
    settings = {"calibration": text, "calibration_samples": 10, "pattern": {"attention": 3}, "progress": False}
    convert(tiny_marian, tmp_path / "light", **settings, study=StudyOptions(refit=False))
    before = read(tiny_marian).model.get_submodule(name)
    after = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "light").get_submodule(name)
    assert after.rank == 3
    torch.testing.assert_close(after(mean), before(mean), atol=1e-4, rtol=1e-4)


def test_ranks_given_by_name_come_before_the_budget(tiny_marian, text):
    report = plan(
        tiny_marian,
        calibration=text,
        calibration_samples=10,
        ratio=3,
        pattern={"fc1": 5, "shared": None},
        progress=False,
    )
    ranks = {matrix.name: matrix.size for matrix in report.matrices}
    assert ranks["shared"] is None
    assert {rank for name, rank in ranks.items() if name.endswith("fc1")} == {5}


def test_the_weighting_by_inputs_is_optimal_by_its_own_measure(
    tiny_marian, text, calibrated, parallel_sentences, tmp_path
):
    model, _ = calibrated
    name = "model.decoder.layers.0.fc1"
    settings = {"calibration": text, "calibration_samples": 10, "pattern": {"ffn": 4}, "progress": False}
    study = StudyOptions(allocation="uniform", refit=False, weighting="inputs")
    convert(tiny_marian, tmp_path / "light", **settings, study=study)
    light = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "light").get_submodule(name)
    matrix = model.get_submodule(name).weight.detach().T.double()
    inputs = one_by_one(model, tiny_marian, parallel_sentences, [name])[name][0].double()
    second = inputs.T @ inputs / len(inputs)
    values, vectors = torch.linalg.eigh(second)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    optimum = torch.linalg.svdvals(root @ matrix)[4:].norm()
    error = (root @ (matrix - light.u.weight.T.double() @ light.v.weight.T.double())).norm()
    assert error.item() == pytest.approx(optimum.item(), rel=2e-2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calibration": "TEXT", "calibration_samples": 11}, "holds 10 pairs, calibration_samples is 11"),
        ({"calibration": "TEXT", "source_lang": "fr"}, "no column 'fr'"),
        ({"calibration": "TEXT", "study": REFIT, "ratio": 2.0, "encoder_groups": 1}, "have several places"),
    ],
)
def test_what_cannot_be_done(tiny_marian, text, tmp_path, options, message):
    options = {name: text if value == "TEXT" else value for name, value in options.items()}
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        convert(tiny_marian, tmp_path / "light", progress=False, **options)
    assert not (tmp_path / "light").exists()


def test_of_sources_alone_the_teacher_makes_pairs(tiny_marian, parallel_sentences, tmp_path):
    german = [pair["de"] for pair in parallel_sentences]
    (tmp_path / "x.txt").write_text("\n".join(german), encoding="utf-8")
    report = convert(tiny_marian, tmp_path / "light", ratio=2, calibration=str(tmp_path / "x.txt"), progress=False)
    assert (len(report.calibrated_on), report.calibration) == (len(german), "x.txt")
    teacher = read(tiny_marian)
    tokenizer, marian = (auto.from_pretrained(tiny_marian) for auto in (AutoTokenizer, AutoModelForSeq2SeqLM))
    (batch,) = translated_batches(teacher.model, teacher, [*german, " "])
    sources = tokenizer(sorted(german, key=len), padding=True, return_tensors="pt")
    assert torch.equal(batch["input_ids"], sources["input_ids"])
    made = marian.generate(**sources, num_beams=1, max_new_tokens=batch["labels"].shape[1], max_length=None)
    assert torch.equal(batch["decoder_input_ids"], made[:, :-1])
    assert torch.equal(batch["labels"], made[:, 1:].masked_fill(made[:, 1:] == tokenizer.pad_token_id, -100))


def test_states_that_are_not_finite_are_named(calibrated, tiny_marian):
    model = read(tiny_marian).model
    with torch.no_grad():
        model.model.encoder.layers[1].fc1.bias[0] = 1e38
        model.model.encoder.layers[1].fc2.weight[0, 0] = 1e38
    with pytest.raises(ValueError, match=r"at model\.decoder\.\S+ hold NaN or infinite values"):
        Calibration(model, ["model.decoder.layers.0.encoder_attn.k_proj"], calibrated[1].batches)
    linear = [name for name, kind in find_matrices(model) if kind != "embedding"]
    with pytest.raises(ValueError, match=r"the inputs at model\.encoder\.layers\.1\.fc2 hold NaN or infinite values"):
        Calibration(model, linear, calibrated[1].batches)


def test_states_without_a_last_norm_are_calibrated_in_bfloat16(calibrated, monkeypatch):
    """Low-rank layers in bfloat16 give such states to an output layer in fp32."""
    monkeypatch.setattr("lightformers_hf.conversion.workers.has_fast_bf16", lambda: True)
    fields = {name: getattr(calibrated[0].config, name) for name in ("vocab_size", "pad_token_id")}
    model = LightFormerForConditionalGeneration(
        LightFormerConfig(**fields, **sizes(16, ffn=16), normalize_before=True, embedding_rank=4, attention_rank=4)
    )
    name = "model.decoder.layers.0.fc1"
    found = Calibration(model, [name], calibrated[1].batches)
    assert found.temperature >= 1
    assert found.moments[name].finite("inputs")


@pytest.mark.parametrize("side", ["de", "en"])
def test_empty_sentences_alone_are_refused(tiny_marian, tmp_path, side):
    pair = {"de": "Ein Hund.", "en": "A dog."}
    pairs = [pair | {side: empty} for empty in 100 * ("", " ", "\t")] + [pair]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    what = {"de": "source", "en": "target"}[side]
    with pytest.raises(ValueError, match=rf"pairs\.jsonl: every {what} of the 3 pairs drawn is empty"):
        convert(tiny_marian, tmp_path / "light", calibration=str(file), calibration_samples=3, progress=False)
    assert not (tmp_path / "light").exists()


def test_text_without_a_token_to_predict_is_refused(calibrated):
    model, calibration = calibrated
    batches = [batch | {"labels": torch.full_like(batch["labels"], -100)} for batch in calibration.batches]
    linear = [name for name, kind in find_matrices(model) if kind != "embedding"]
    with pytest.raises(ValueError, match="no token to predict"):
        Calibration(model, linear, batches)


def test_samples_that_are_all_alike_have_a_root():
    """Around their mean only rounding is left, of either sign."""
    noise = torch.randn(50, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moment = (noise + noise.T) * 1e-7
    moment.diagonal().fill_(1e-9)
    root = damped_root(moment, 1e-6)
    assert torch.isfinite(root).all()
    assert torch.equal(root, root.tril())
    assert root.diagonal().min() > 0
    values, vectors = torch.linalg.eigh(moment)
    torch.testing.assert_close(root @ root.T, vectors * values.clamp(min=0) @ vectors.T, atol=1e-10, rtol=0)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(1, 9)), max_size=5), st.integers(1, 60))
def test_batches_of_any_size_hold_the_same_pairs(shapes, tokens):
    """Rows, source and target lengths: each pair comes once, in order, in as few batches as have room."""
    names, batches, number = ("input_ids", "attention_mask", "labels", "decoder_input_ids"), [], iter(range(1, 10**4))
    for rows, source, target in shapes:
        widths = dict(zip(names, (source, source, target, target), strict=True))
        batches.append({name: torch.tensor([[next(number)] * widths[name]] * rows) for name in names})
    cut = cut_batches(batches, tokens)

    def pairs(some):
        rows = [dict(zip(batch, parts, strict=True)) for batch in some for parts in zip(*batch.values(), strict=True)]
        return [{name: [i for i in row[name].tolist() if i not in (0, -100)] for name in names} for row in rows]

    assert pairs(cut) == pairs(batches)
    sizes = [sum(batch[name].numel() for name in ("input_ids", "labels")) for batch in cut]
    for batch, size in zip(cut, sizes, strict=True):
        assert size <= tokens or len(batch["labels"]) == 1
        assert bool(((batch["labels"] == -100) == (batch["decoder_input_ids"] == 0)).all())
    # No two neighbours would both fit whole into one.
    for two in pairwise(cut):
        widest = sum(max(each[side].shape[1] for each in two) for side in ("input_ids", "labels"))
        assert widest * sum(len(each["labels"]) for each in two) > tokens


def test_what_the_refit_finds_does_not_depend_on_its_batches(tiny_marian, text, tmp_path, monkeypatch):
    """Sentences of several lengths, in batches of one, of a few, and of all."""
    ids, logits = torch.arange(3, 11)[None], []
    for tokens in (1, 100, 10_000):
        monkeypatch.setattr(refit, "TOKENS", tokens)
        folder = tmp_path / str(tokens)
        convert(tiny_marian, folder, calibration=text, pattern={".*": 6}, study=REFIT, progress=False)
        model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
        with torch.no_grad():
            logits.append(model(input_ids=ids, decoder_input_ids=ids).logits)
    torch.testing.assert_close(logits[1], logits[0], atol=5e-3, rtol=1e-3)
    torch.testing.assert_close(logits[2], logits[0], atol=5e-3, rtol=1e-3)


@settings(max_examples=20)
@given(st.integers(2, 12), st.integers(0, 10_000), st.sampled_from([0.5, 3.0]), st.sampled_from([1.0, 2.5]))
def test_their_covariance_is_the_fisher_matrix_of_the_logits(size, seed, spread, temperature):
    """That of p − y, y a label drawn from p, summed over all labels; p the probabilities at a temperature."""
    logits = spread * torch.randn(size, generator=torch.Generator().manual_seed(seed))
    likely = (logits / temperature).softmax(-1)
    errors = likely - torch.eye(size)  # of every label
    expected = (errors * likely[:, None]).T @ errors
    keys = torch.arange(1.0, PERIOD)
    drawn = Probes(size, torch.device("cpu"), temperature).draw(logits.expand(len(keys), -1), keys)
    assert (drawn.T @ drawn / len(keys) - expected).abs().max() < 0.05
    # As of every gradient of a loss of probabilities: what is added to all logits changes none.
    torch.testing.assert_close(drawn.sum(-1), torch.zeros(len(keys)), atol=1e-5, rtol=0)


def test_the_variance_of_logits_is_that_of_what_probabilities_depend_on():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(40, 6)) * [1, 2, 3, 1, 1, 0] + rng.normal(size=(40, 1)) * 50  # the last term moves none
    exponents = np.exp(logits - logits.max(1, keepdims=True))
    likely = (exponents / exponents.sum(1, keepdims=True)).mean(0)
    expected = (likely * (logits - logits @ likely[:, None]).var(0)).sum()
    parts = torch.tensor(logits).split(16)
    assert logit_variance(lambda states: states, parts, 6) == pytest.approx(expected, rel=1e-9)
    assert logit_variance(lambda states: states.float(), [torch.ones(5, 6)], 6) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("gap", [0.5, 4.0, 10.0])
def test_a_temperature_stands_for_noise_of_the_logits(gap):
    """The curvature p(1 − p) of two tokens, expected under Gaussian noise, is near the curvature at the temperature.

    By the exact logits, a confident model has no curvature left."""
    variance, removed = 9.0, 0.5
    noise = torch.randn(400_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noisy = torch.sigmoid(gap + math.sqrt(2 * removed * variance) * noise)
    exact = torch.sigmoid(torch.tensor(gap))
    warm = torch.sigmoid(torch.tensor(gap / find_temperature(variance, removed)))
    # The expected curvature is the derivative of the expected probability, which the approximation is of.
    slope = warm * (1 - warm) / find_temperature(variance, removed)
    expected = (noisy * (1 - noisy)).mean()
    error, without = (abs(math.log(curvature / expected)) for curvature in (slope, exact * (1 - exact)))
    assert error < math.log(2.2)
    assert error < 0.25 * without
    assert find_temperature(variance, 0.0) == 1.0
