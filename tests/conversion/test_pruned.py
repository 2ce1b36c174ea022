"""Teachers with dead rows, columns, heads, neurons or layers: they convert like any other, without a NaN."""

import json

import pytest
import torch
from conversion.metrics import weigh
from models.cases import like_trained
from safetensors.torch import load_file
from tiny import marian_tokens, sizes
from transformers import AutoModelForSeq2SeqLM, MarianConfig, MarianMTModel, T5Config, T5ForConditionalGeneration

from lightformers_hf import convert
from lightformers_hf.conversion.forms.heads import Bottlenecks
from lightformers_hf.conversion.forms.neurons import Elimination
from lightformers_hf.conversion.forms.svd import decompose
from lightformers_hf.conversion.moments import Damped, Metric, damped_weights

FIELDS = sizes(32, heads=4, ffn=32, max_position_embeddings=16) | marian_tokens(60)
CONFIG = MarianConfig(**FIELDS, activation_function="relu", dropout=0.0)
EVERYTHING = slice(None)
ATTENTION, NETWORK = ("q_proj", "k_proj", "v_proj", "out_proj"), ("fc1", "fc2")


def pruned(ends, rows=EVERYTHING, columns=EVERYTHING, factor=0.0):
    """A Marian whose parameters with these ends of names are multiplied in some rows and columns."""
    torch.manual_seed(0)
    model = like_trained(MarianMTModel(CONFIG)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(ends):
                parameter[(rows, columns)[: parameter.ndim]] *= factor
    return model


def whole(modules):
    return tuple(f"{module}.{leaf}" for module in modules for leaf in ("weight", "bias"))


def pruned_t5(ends):
    """A T5, which has no biases, some of whose matrices are zero in its first layers."""
    torch.manual_seed(0)
    config = T5Config(vocab_size=60, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0)
    config.decoder_start_token_id = 0
    model = like_trained(T5ForConditionalGeneration(config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".block.0." in name and name.endswith(ends):
                parameter.zero_()
    return model


CASES = {
    "inputs of values": lambda: pruned("v_proj.weight", columns=slice(7, None)),
    "neurons": lambda: pruned("fc1.weight", slice(7, None)),
    "tokens": lambda: pruned("shared.weight", slice(20, None)),
    "heads": lambda: pruned(whole(ATTENTION[:3]), slice(8, None)),
    "attention": lambda: pruned(whole(ATTENTION)),
    "networks": lambda: pruned(whole(NETWORK)),
    "second matrices": lambda: pruned("fc2.weight"),
    "everything": lambda: pruned((*whole(ATTENTION), *whole(NETWORK), "shared.weight")),
    "denormal values": lambda: pruned(("v_proj.weight", "fc1.weight"), factor=1e-40),
    "hardly a gradient": lambda: pruned("shared.weight", factor=100.0),
    "networks of a T5": lambda: pruned_t5("wi.weight"),
    "values of a T5": lambda: pruned_t5("v.weight"),
}
METHODS = {
    "default": {"ratio": 3, "calibration_samples": 4},
    "paper": {"ratio": 3, "method": "paper"},
    "groups": {"ratio": 2, "calibration_samples": 4, "encoder_groups": 1, "decoder_groups": 1},
}


def refuse(constant):
    raise AssertionError(f"{constant} in JSON")


@pytest.mark.parametrize(
    ("case", "method"),
    [(case, method) for case in CASES for method in ("default", "paper")]
    + [(case, "groups") for case in ("heads", "networks", "everything", "values of a T5")],
)
def test_pruned_teachers_convert(case, method, tmp_path):
    teacher = CASES[case]()
    teacher.save_pretrained(tmp_path / "teacher")
    convert(tmp_path / "teacher", tmp_path / "light", progress=False, **METHODS[method])
    report = json.loads((tmp_path / "light" / "compression.json").read_text(), parse_constant=refuse)
    for matrix in report["matrices"]:
        assert 0 <= matrix["energy"] <= 1
        assert 0 <= matrix["relative_error"] <= 1
    assert "nan" not in (tmp_path / "light" / "README.md").read_text().lower().split()
    light = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "light")
    for name, parameter in light.named_parameters():
        assert parameter.isfinite().all(), name
    pad = light.config.pad_token_id
    ids = torch.tensor([[5, 6, 7, 0], [30, 0, pad, pad]])
    assert light(input_ids=ids, decoder_input_ids=ids).logits.isfinite().all()
    light.generate(ids, max_new_tokens=5, num_beams=2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_factors_of_what_is_zero_fit_half_precision(dtype, tmp_path):
    """Where no sample shows anything, the metric is all but zero; what restores from it must not be infinite."""
    pruned(whole(ATTENTION)).to(dtype).save_pretrained(tmp_path / "teacher")
    convert(tmp_path / "teacher", tmp_path / "light", progress=False, **METHODS["default"])
    light = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "light")
    assert light.dtype == dtype
    assert {tensor.dtype for tensor in load_file(tmp_path / "light" / "model.safetensors").values()} == {dtype}
    assert all(parameter.isfinite().all() for parameter in light.parameters())


def test_a_matrix_of_lower_rank_than_asked_for_is_kept_whole(tmp_path):
    """Every other matrix stays dense: the result computes what the teacher does."""
    teacher = pruned("v_proj.weight", columns=slice(5, None))
    teacher.save_pretrained(tmp_path / "teacher")
    options = {"pattern": {"v_proj": 8}, "method": "paper"}
    report = convert(tmp_path / "teacher", tmp_path / "light", progress=False, **options)
    found = [matrix for matrix in report.matrices if matrix.name.endswith("v_proj")]
    assert len(found) == 3
    for matrix in found:
        assert matrix.relative_error < 1e-6
    light = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "light")
    ids = torch.tensor([[5, 6, 7, 0]])
    with torch.no_grad():
        torch.testing.assert_close(
            light(input_ids=ids, decoder_input_ids=ids).logits,
            teacher(input_ids=ids, decoder_input_ids=ids).logits,
            rtol=1e-3, atol=1e-3,
        )  # fmt: skip


def test_a_metric_without_samples_gives_a_matrix_back():
    weight = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    zero, rows = torch.zeros(12, 12).double(), torch.zeros(12).double()
    for left in (Damped(zero, 1e-6), damped_weights(rows, 1e-2)):
        metric = Metric(left, Damped(zero[:8, :8], 1e-2))
        assert (weigh(metric, weight) != 0).any()
        factors = decompose(weight.double(), name="w", metric=metric).truncate(8)
        torch.testing.assert_close(factors.left @ factors.right, weight.double())


@pytest.mark.parametrize("what", ["zero", "one direction", "duplicates"])
def test_narrowing_what_lacks_rank(what):
    generator = torch.Generator().manual_seed(0)
    signals = torch.randn(50, 12, generator=generator).double()
    signals = {
        "zero": torch.zeros_like(signals),
        "one direction": signals[:, :1] * signals[:1],
        "duplicates": signals[:, torch.arange(12) // 3],
    }[what]
    moment = signals.T @ signals / 50
    full = Bottlenecks.of(moment[None], moment[None])
    assert full.costs().isfinite().all()
    for width in range(1, 13):
        assert all(part.isfinite().all() for part in full.at(width))
    weight = torch.randn(12, 5, generator=generator).double()
    for matrix in (weight, torch.zeros_like(weight)):
        elimination = Elimination.of(moment, matrix, torch.eye(5))
        assert sorted(elimination.order.tolist()) == list(range(12))
        assert (elimination.costs >= -1e-12).all()
        for width in range(1, 13):
            kept, new = elimination.at(width, matrix, moment)
            assert new.isfinite().all()
            if matrix is weight and what == "duplicates" and width >= 4:  # one of each kind does the work of all
                assert sorted(set((kept // 3).tolist())) == [0, 1, 2, 3]
                torch.testing.assert_close(signals[:, kept] @ new, signals @ matrix, rtol=0, atol=1e-3)
