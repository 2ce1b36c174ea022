"""Devices, worker threads and steps: the result of one thread on a CPU."""

import json
import logging
import re
import sys
import threading
from statistics import fmean

import pytest
import torch
from conversion.pretended import ELSEWHERE, accelerator
from tiny import marian_tokens, sizes
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForSeq2SeqLM, MarianConfig, MarianMTModel

from lightformers_hf import convert, processors
from lightformers_hf.conversion import workers
from lightformers_hf.conversion.workers import Step, map_in_threads
from lightformers_hf.processors import use_threads


@pytest.mark.parametrize("threads", [1, 3, 9])
@pytest.mark.parametrize("most", [None, 4])
def test_results_come_in_order_from_side_by_side_and_few_are_ahead(threads, most):
    begun, seen = [], []

    def work(index):
        begun.append(index)
        # The later, the sooner; only two at once get past this.
        meeting.wait(10) if threads > 1 and index < 2 else None
        return index, torch.get_num_threads(), torch.is_grad_enabled(), threading.get_ident()

    meeting, recorded = threading.Barrier(2), most is None
    with use_threads(threads), torch.set_grad_enabled(recorded):
        for result in map_in_threads(work, range(20), most=most):
            seen.append(result)
            assert most is None or len(begun) <= len(seen) + min(threads, most)
        assert torch.get_num_threads() == threads
    assert [index for index, *_ in seen] == list(range(20))
    assert {used for _, used, *_ in seen} == {1}
    assert {enabled for *_, enabled, _ in seen} == {recorded}
    assert (threading.get_ident() in {who for *_, who in seen}) == (threads == 1)


def test_an_error_is_raised_in_its_turn():
    def work(index):
        if index == 3:
            raise ValueError("batch 3")
        return index

    results = map_in_threads(work, range(10))
    with use_threads(2):
        assert [next(results) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="batch 3"):
            next(results)


@pytest.fixture(scope="module")
def text(tmp_path_factory, parallel_sentences):
    """The ten sentence pairs, ten times: several batches."""
    file = tmp_path_factory.mktemp("text") / "pairs.jsonl"
    file.write_text("".join(json.dumps({"translation": pair}) + "\n" for pair in parallel_sentences * 10))
    return str(file)


# What takes long, and must run on the device.
HEAVY = ("_linalg_eigh", "linalg_cholesky_ex", "_linalg_svd", "linalg_solve_triangular", "_linalg_solve_ex", "addmm")


@pytest.mark.parametrize(
    "options",
    [
        {"ratio": 2.0, "method": "paper"},
        {"ratio": 3.0, "calibration": "TEXT"},
        {"ratio": 2.0, "calibration": "TEXT", "encoder_groups": 1},
    ],
)
def test_everything_is_computed_on_the_device(tiny_marian, text, tmp_path, monkeypatch, options):
    """Bit for bit what the CPU gives, with no tensor of it among those of the device."""
    options = {name: text if value == "TEXT" else value for name, value in options.items()} | {"progress": False}
    module = sys.modules["lightformers_hf.conversion.convert"]
    find_outputs, outputs = module.greedy_outputs, []

    def outputs_of_the_cpu(*args, **kwargs):  # generate() asks the device for single numbers
        outputs[:] = outputs or find_outputs(*args, **kwargs)
        return outputs

    monkeypatch.setattr(module, "greedy_outputs", outputs_of_the_cpu)
    if "calibration" in options:
        options["calibration_samples"] = 8
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a worker has
    with sdpa_kernel(SDPBackend.MATH):  # the one that the device has
        convert(tiny_marian, tmp_path / "cpu", **options)
        monkeypatch.setattr(module, "check_device", lambda name: ELSEWHERE)
        # The teacher is compared with its own class on the CPU.
        monkeypatch.setattr(module, "check_outputs", lambda teacher: None)
        with accelerator() as device:
            convert(tiny_marian, tmp_path / "device", **options)
    torch.set_num_threads(threads)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "cpu" / name).read_bytes() == (tmp_path / "device" / name).read_bytes()
    reports = [json.loads((tmp_path / name / "compression.json").read_text()) for name in ("cpu", "device")]
    assert [report.pop("processor")["bf16"] for report in reports] == [False, False]
    assert reports[0] == reports[1]
    assert not [name for name in device.here if any(heavy in name for heavy in HEAVY)]
    assert any("_linalg_eigh" in name for name in device.there)


def test_a_device_without_float64_runs_the_models_alone(tiny_marian, text, tmp_path, monkeypatch):
    """As Apple's: sums and decompositions are the CPU's, and nothing on the device is a float64."""
    monkeypatch.setattr(sys.modules["lightformers_hf.conversion.convert"], "check_device", lambda name: ELSEWHERE)
    monkeypatch.setattr(sys.modules["lightformers_hf.conversion.convert"], "greedy_outputs", lambda *_, **__: [])
    for module in ("convert", "refit", "sensitivity"):
        name = f"lightformers_hf.conversion.{module}"
        monkeypatch.setattr(sys.modules[name], "algebra_device", lambda device: torch.device("cpu"))
    options = {"calibration": text, "calibration_samples": 8, "progress": False}
    with sdpa_kernel(SDPBackend.MATH), accelerator(torch.float64) as device:
        for number, asked in enumerate([{"ratio": 3.0}, {"decoder_layers": 1}]):
            convert(tiny_marian, tmp_path / str(number), **asked, **options)
    assert any("mm" in name for name in device.there)
    light = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "1")
    assert all(parameter.isfinite().all() for parameter in light.parameters())


@pytest.fixture(scope="module")
def wide_marian(tmp_path_factory):
    """Random weights, d_model 192: two threads together give other eigenvectors of such matrices than one."""
    folder = tmp_path_factory.mktemp("wide-marian")
    fields = sizes(192, heads=4, ffn=32, max_position_embeddings=64) | marian_tokens(100)
    torch.manual_seed(0)
    MarianMTModel(MarianConfig(**fields, init_std=0.2)).save_pretrained(folder)
    return folder


def test_threads_do_not_change_a_byte(wide_marian, tmp_path, monkeypatch):
    """One thread and two, in the processor's fastest arithmetic."""
    monkeypatch.setattr(workers, "has_fast_bf16", processors.has_fast_bf16)
    written = []
    for threads in (1, 2):
        with use_threads(threads):
            convert(wide_marian, tmp_path / "light", ratio=3, calibration_samples=16, progress=False, overwrite=True)
        written.append({path.name: path.read_bytes() for path in (tmp_path / "light").iterdir()})
    assert written[0] == written[1]
    bf16, reason = processors.bf16_support()
    assert json.loads(written[0]["compression.json"])["processor"] == {"bf16": bf16, "reason": reason}


class Tied(torch.nn.Module):
    """A table, a layer, and an output layer that has the table's weights."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = torch.nn.Embedding(6, 4), torch.nn.LayerNorm(4)
        self.layer, self.output = torch.nn.Linear(4, 4), torch.nn.Linear(4, 6, bias=False)
        self.output.weight = self.table.weight


@pytest.mark.parametrize("able", [True, False])
def test_weights_are_cast_for_a_while(able, monkeypatch):
    monkeypatch.setattr(workers, "has_fast_bf16", lambda: able)
    model = Tied()
    before = {name: (parameter.data_ptr(), parameter.clone()) for name, parameter in model.named_parameters()}

    def types():
        return {name for name, parameter in model.named_parameters() if parameter.dtype == torch.bfloat16}

    with workers.cast_weights(model):
        assert types() == ({"output.weight", "layer.weight"} if able else set())
    assert model.output.weight is model.table.weight
    with pytest.raises(ZeroDivisionError), workers.cast_weights(model):
        1 / 0  # noqa: B018, whatever fails inside
    assert not types()
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == before[name][0]
        assert torch.equal(parameter, before[name][1])
    with workers.cast_weights(torch.nn.ModuleList([model.table, model.layer])):
        assert types() == ({"layer.weight"} if able else set())


def test_a_conversion_in_bfloat16_is_nearly_that_in_fp32(tiny_marian, text, tmp_path, monkeypatch):
    errors = []
    for able in (False, True):
        monkeypatch.setattr(workers, "has_fast_bf16", lambda able=able: able)
        report = convert(tiny_marian, tmp_path / str(able), ratio=3, calibration=text, progress=False)
        errors.append([matrix.relative_error for matrix in report.matrices])
    assert errors[0] != errors[1]
    assert fmean(errors[1]) == pytest.approx(fmean(errors[0]), rel=0.15)


@pytest.mark.parametrize("name", ["cuda:7", "gpu", "meta"])
def test_a_device_that_is_not_there(tiny_marian, tmp_path, name):
    with pytest.raises(ValueError, match=rf"device is '{name}', which can't be used here"):
        convert(tiny_marian, tmp_path / "light", device=name, progress=False)
    assert not (tmp_path / "light").exists()


def over_items():
    return sum(Step("adding", [1, 2, 3], unit="number"))


def as_context():
    with Step("adding", unit="number", total=3) as bar:
        for _ in range(3):
            bar.update()
    return 6


@pytest.mark.parametrize("work", [over_items, as_context])
@pytest.mark.parametrize("shown", [True, False])
def test_a_step_counts_and_says_what_it_took(work, shown, caplog, capsys):
    with caplog.at_level(logging.INFO), workers.share_cores(progress=shown):
        assert work() == 6
    assert re.fullmatch(r"adding took \d+\.\d s, \d+\.\d s of processor time", caplog.messages[-1])
    bar = capsys.readouterr().err
    assert ("adding" in bar and "3/3" in bar) == shown
