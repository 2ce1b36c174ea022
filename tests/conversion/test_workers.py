"""Devices, worker threads, processes and steps: the result of one process on one CPU."""

import json
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from statistics import fmean

import pytest
import torch
from conversion.pretended import ELSEWHERE, accelerator
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForSeq2SeqLM, MarianConfig, MarianMTModel

import lightformers_hf
from lightformers_hf import convert, processors
from lightformers_hf.conversion import workers
from lightformers_hf.conversion.workers import AT_ONCE, Step, map_in_order, map_in_threads
from lightformers_hf.processors import factor_rows, use_threads


def test_workers_give_every_result_in_order():
    threads = torch.get_num_threads()
    with use_threads(3):
        results = list(map_in_threads(lambda index: (index, torch.get_num_threads()), range(20)))
    assert results == [(index, 1) for index in range(20)]
    assert torch.get_num_threads() == threads


def test_an_error_in_a_worker_is_raised():
    def work(index):
        if index == 3:
            raise ValueError("matrix 3")
        return index

    with pytest.raises(ValueError, match="matrix 3"):
        list(map_in_threads(work, range(10)))


@pytest.mark.parametrize("threads", [1, 3, 9])
@pytest.mark.parametrize("recorded", [True, False])
def test_results_come_in_order_from_side_by_side_and_few_are_ahead(threads, recorded):
    begun, seen = [], []

    def work(index):
        begun.append(index)
        # The later, the sooner; only two at once get past this.
        meeting.wait(10) if threads > 1 and index < 2 else None
        return index, torch.get_num_threads(), torch.is_grad_enabled(), threading.get_ident()

    meeting = threading.Barrier(2)
    with use_threads(threads), torch.set_grad_enabled(recorded):
        for result in map_in_order(work, range(20), torch.device("cpu")):
            seen.append(result)
            assert len(begun) <= len(seen) + min(threads, AT_ONCE)
    assert [index for index, *_ in seen] == list(range(20))
    assert {used for _, used, *_ in seen} == {1}
    assert {enabled for *_, enabled, _ in seen} == {recorded}
    assert (threading.get_ident() in {who for *_, who in seen}) == (threads == 1)


def test_an_error_is_raised_in_its_turn():
    def work(index):
        if index == 3:
            raise ValueError("batch 3")
        return index

    results = map_in_order(work, range(10), torch.device("cpu"))
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
        {"ratio": 3.0, "calibration": "TEXT", "method": "narrow"},
        {"ratio": 2.0, "calibration": "TEXT", "encoder_groups": 1},
    ],
)
def test_everything_is_computed_on_the_device(tiny_marian, text, tmp_path, monkeypatch, options):
    """Bit for bit what the CPU gives, with no tensor of it among those of the device."""
    options = {name: text if value == "TEXT" else value for name, value in options.items()} | {"progress": False}
    if "calibration" in options:
        options["calibration_samples"] = 8
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a worker has
    with sdpa_kernel(SDPBackend.MATH):  # the one that the device has
        convert(tiny_marian, tmp_path / "cpu", **options)
        monkeypatch.setattr(sys.modules["lightformers_hf.conversion.convert"], "find_device", lambda name: ELSEWHERE)
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
    monkeypatch.setattr(sys.modules["lightformers_hf.conversion.convert"], "find_device", lambda name: ELSEWHERE)
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


PROGRAM = """\
import os, sys
from lightformers_hf import convert
from lightformers_hf.conversion import workers
from lightformers_hf.conversion.forms import low_rank
workers.has_fast_bf16 = lambda: False
tiny, text, output = sys.argv[1:]
convert(tiny, f"{output}/paper", ratio=2, method="paper", progress=False)
convert(tiny, f"{output}/calibrated", ratio=3, calibration=text, progress=False)
convert(tiny, f"{output}/single", ratio=2, calibration=text, calibration_samples=1, progress=False)  # one batch
decompose = low_rank.decompose
def broken(weight, *, name, rank=None, metric=None):
    if os.environ["RANK"] == "1" and rank is not None:
        raise RuntimeError(f"out of memory at {name}")
    return decompose(weight, name=name, rank=rank, metric=metric)
low_rank.decompose = broken
try:
    convert(tiny, f"{output}/broken", ratio=3, calibration=text, progress=False)
except Exception as error:
    # One write each, so that lines of two processes stay apart.
    print(f"process {os.environ['RANK']}: {error}\\n", end="", flush=True)
convert(tiny, f"{output}/paper", ratio=2, method="paper", progress=False)
"""


@pytest.mark.usefixtures("warm_python")
def test_two_processes_give_what_one_gives(tiny_marian, text, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    places = [str(place) for place in (tiny_marian, text, tmp_path / "two")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(lightformers_hf.__file__).parents[1])}
    done = subprocess.run(
        [*command, str(tmp_path / "program.py"), *places],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    # In the end the folder that is there already is refused, by the process that writes, and both end.
    assert done.returncode == 1
    assert done.stderr.count("is not empty: give another folder") == 2
    # What fails in one, fails in both, and leaves nothing.
    messages = {line for line in done.stdout.splitlines() if line.startswith("process ")}
    assert len(messages) == 2
    assert all("out of memory at " in message for message in messages)
    assert {path.name for path in (tmp_path / "two").iterdir()} == {"paper", "calibrated", "single"}

    convert(tiny_marian, tmp_path / "one" / "paper", ratio=2, method="paper", progress=False)
    convert(tiny_marian, tmp_path / "one" / "calibrated", ratio=3, calibration=text, progress=False)
    single = {"ratio": 2, "calibration": text, "calibration_samples": 1, "progress": False}
    convert(tiny_marian, tmp_path / "one" / "single", **single)
    one, two = ((tmp_path / name / "paper" / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
    reports = [
        json.loads((tmp_path / name / "calibrated" / "compression.json").read_text()) for name in ("one", "two")
    ]
    for one, two in zip(*(report["matrices"] for report in reports), strict=True):
        assert one["setting"] == two["setting"]
        # Each process estimates the spread of the logits on tokens of its own, so the temperature differs a little.
        assert one["relative_error"] == pytest.approx(two["relative_error"], abs=1e-3)
    batch = {"input_ids": torch.arange(3, 23)[None], "decoder_input_ids": torch.arange(30, 50)[None]}
    for folder in ("calibrated", "single"):
        models = [AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name / folder).eval() for name in ("one", "two")]
        with torch.no_grad():
            logits = [model(**batch).logits for model in models]
        torch.testing.assert_close(*logits, atol=1e-2, rtol=1e-2)


@pytest.fixture(scope="module")
def wide_marian(tmp_path_factory):
    """Random weights, d_model 192: two threads together give other eigenvectors of such matrices than one."""
    folder = tmp_path_factory.mktemp("wide-marian")
    sizes = {
        "vocab_size": 100,
        "d_model": 192,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "max_position_embeddings": 64,
    }
    sizes |= {
        f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("attention_heads", 4), ("ffn_dim", 32))
    }
    torch.manual_seed(0)
    MarianMTModel(MarianConfig(**sizes, pad_token_id=99, decoder_start_token_id=99, init_std=0.2)).save_pretrained(
        folder
    )
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


def test_products_in_bfloat16_only_where_the_processor_multiplies_it(monkeypatch):
    states, weight = torch.ones(2, 4), torch.ones(3, 4)
    for able, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(workers, "has_fast_bf16", lambda able=able: able)
        with workers.fast_products(torch.device("cpu")):
            assert torch.nn.functional.linear(states, weight).dtype == dtype


@pytest.mark.parametrize("faster", [True, False])
def test_sums_of_rounded_rows_only_where_those_are_faster(faster, monkeypatch):
    monkeypatch.setattr(workers, "has_fast_rounding", lambda: faster)
    rows = torch.full((3, 4), 1 + 2**-12)
    with workers.fast_sums(torch.device("cpu")):
        rounds = not torch.equal(factor_rows(rows), rows)
    assert rounds == (faster and hasattr(torch.backends.mkldnn, "matmul"))


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


def test_weights_cast_once_give_the_products_of_weights_cast_each_time(monkeypatch):
    monkeypatch.setattr(workers, "has_fast_bf16", lambda: True)
    layer, states = torch.nn.Linear(40, 30), torch.randn(7, 40)
    with workers.fast_products(states.device):
        each = layer(states)
        with workers.cast_weights(layer):
            once = layer(states)
    assert once.dtype == torch.bfloat16
    assert torch.equal(each, once)


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


def over_items(shown):
    return sum(Step("adding", [1, 2, 3], unit="number", shown=shown))


def as_context(shown):
    with Step("adding", unit="number", total=3, shown=shown) as bar:
        for _ in range(3):
            bar.update()
    return 6


@pytest.mark.parametrize("work", [over_items, as_context])
@pytest.mark.parametrize("shown", [True, False])
def test_a_step_counts_and_says_what_it_took(work, shown, caplog, capsys):
    with caplog.at_level(logging.INFO):
        assert work(shown) == 6
    assert re.fullmatch(r"adding took \d+\.\d s, \d+\.\d s of processor time", caplog.messages[-1])
    bar = capsys.readouterr().err
    assert ("adding" in bar and "3/3" in bar) == shown


def test_parameters_are_counted_in_thousands_and_millions(capsys):
    with Step("weighing", unit="parameter", total=36_741_120, shown=True) as bar:
        bar.update(12_345_678)
    assert "12.3M/36.7M" in capsys.readouterr().err
