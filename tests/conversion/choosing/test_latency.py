"""Costs of products and of sentences, from a machine whose speed is known. No test here looks at a clock."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, BertConfig, BertModel, MarianConfig, MarianMTModel

import lightformers_hf
from lightformers_hf import StudyOptions, convert
from lightformers_hf.conversion.choosing import latency as module
from lightformers_hf.conversion.choosing import limits
from lightformers_hf.conversion.choosing import machine as products
from lightformers_hf.conversion.choosing.latency import layers_of, narrow_config, sentence_costs
from lightformers_hf.conversion.choosing.machine import (
    MachineCosts,
    Table,
    machine_costs,
    time_product,
)
from lightformers_hf.models import (
    LightFormerConfig,
    LightFormerForConditionalGeneration,
    modeling_lightformer,
)

SIZES = {"vocab_size": 50, "d_model": 32, "encoder_layers": 4, "decoder_layers": 2}
SIZES |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40}
RANKS = {"attention_rank": 8, "ffn_rank": 6, "embedding_rank": 10, "encoder_groups": 2, "decoder_groups": 1}
OVERHEADS = {f"{kind}, 50 tokens": [1000.0, 100.0, 10.0, 1.0] for kind in ("lightformer", "marian")}


def table(call: float, weight: float) -> Table:
    """call + weight·m·n microseconds: bilinear, so that nothing is lost between the grid's points."""
    grid = (8, 64, 512)
    return Table(grid, grid, [[call + weight * m * n for n in grid] for m in grid])


@pytest.fixture
def machine():
    """Half of what is read for 10 MB comes from the cache."""
    return MachineCosts(
        cached=table(1, 0.01),
        uncached=table(1, 0.05),
        sentence=table(3, 0.1),
        working_sets=(1e6, 10e6, 20e6),
        misses=(0.0, 0.5, 1.0),
        overheads=dict(OVERHEADS),
    )


def light(**fields):
    torch.manual_seed(0)
    return LightFormerForConditionalGeneration(LightFormerConfig(**SIZES | fields)).eval()


def marian():
    return MarianMTModel(MarianConfig(**SIZES, pad_token_id=1, eos_token_id=2, decoder_start_token_id=1))


@pytest.mark.parametrize(("working_set", "weight"), [(0, 0.01), (10e6, 0.03), (15e6, 0.04), (1e9, 0.05)])
def test_a_product_costs_what_is_read_from_where(machine, working_set, weight):
    for m, n in [(8, 8), (40, 100), (512, 512), (4, 1000)]:  # inside the grid and beyond it
        assert machine.row(m, n, working_set).item() == pytest.approx(1 + weight * m * n)
    costs = replace(sentence_costs(marian(), 12, 10, machine=machine), working_set=working_set)
    pair = costs("decoder.layers.0.fc1", (100, 30), (30, 200))
    assert pair.item() == pytest.approx(10 * (2 + weight * 30 * 300))


def test_many_sizes_at_once(machine):
    ranks = torch.arange(1, 100)
    costs = sentence_costs(marian(), machine=machine)
    together = costs("encoder.layers.0.fc1", (64, ranks), (ranks, 300))
    one_by_one = [costs("encoder.layers.0.fc1", (64, rank), (rank, 300)).item() for rank in ranks.tolist()]
    assert together.tolist() == pytest.approx(one_by_one)


def test_a_product_is_timed_over_the_whole_working_set(monkeypatch):
    seen = []

    def weights_of(run):
        weights = []
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "linear", lambda states, weight: weights.append(weight))
            run()
        seen.append(len({weight.data_ptr() for weight in weights}))
        assert {tuple(weight.shape) for weight in weights} == {(30, 20)}
        return 2e-3

    microseconds = time_product(20, 30, 24_000, timer=weights_of)
    assert seen == [10]
    assert microseconds == pytest.approx(200)


def test_costs_are_measured_once_and_kept(tmp_path, monkeypatch):
    timed = []

    def timer(run):
        timed.append(run)
        return 1e-3

    for name in ("CACHED_WIDTHS", "WIDTHS"):
        monkeypatch.setattr(products, name, (8, 16))
    monkeypatch.setattr(products, "UNCACHED", 4e6)
    monkeypatch.setattr(products, "BETWEEN", (3.5e6,))
    file = tmp_path / "there" / "costs.json"
    first = machine_costs(file, timer=timer)
    measured = len(timed)
    assert measured > 0
    assert machine_costs(file, timer=timer).row(8, 16).item() == first.row(8, 16).item()
    assert len(timed) == measured
    monkeypatch.setattr(products, "machine_name", lambda: "another")
    machine_costs(file, timer=timer)
    assert len(timed) == 2 * measured
    assert len(json.loads(file.read_text())["machines"]) == 2
    file.write_text("{")  # a file cut short
    machine_costs(file, timer=timer)
    assert len(timed) == 3 * measured
    assert machine_costs(Path(os.devnull, "costs.json"), timer=timer)  # they are kept only where they can be


@pytest.mark.parametrize("version", ["torch.__version__", "transformers.__version__", "__version__"])
def test_costs_of_other_versions_are_no_use(version, monkeypatch):
    products.machine_name.cache_clear()
    name = products.machine_name()
    with monkeypatch.context() as patch:
        products.machine_name.cache_clear()
        patch.setattr(f"lightformers_hf.conversion.choosing.machine.{version}", "0.0.1")
        assert products.machine_name() != name
        assert "0.0.1" in products.machine_name()
    products.machine_name.cache_clear()


@torch.no_grad()
def test_overheads_are_those_of_the_fast_path(machine, monkeypatch):
    ran_fast, real = [], modeling_lightformer.run_layers_fast

    def run_layers_fast(*arguments, **others):
        states = real(*arguments, **others)
        ran_fast.append(states is not None)
        return states

    monkeypatch.setattr(modeling_lightformer, "run_layers_fast", run_layers_fast)
    module.measure_overheads(light(**RANKS), machine, lambda run: run() or 1.0)
    assert set(ran_fast) == {True}


PROGRAM = """\
import os, sys
from lightformers_hf.conversion.choosing.latency import sentence_costs
from lightformers_hf.models import LightFormerConfig
rank, asked = int(os.environ["RANK"]), []
def timer(run):
    asked.append(run)
    return 1e-3 * (1 + rank)
config = LightFormerConfig(vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=1)
for _ in range(2):
    total = sentence_costs(config, timer=timer).total
print(f"process {total} {len(asked) > 0}\\n", end="", flush=True)
def broken(run):
    raise RuntimeError("no clock")
try:
    sentence_costs(LightFormerConfig(vocab_size=51), timer=broken)
except Exception as error:
    print(f"process {error}\\n", end="", flush=True)
"""


@pytest.mark.usefixtures("warm_python")
def test_of_two_processes_one_measures_for_both(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    places = {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(Path(lightformers_hf.__file__).parents[1])}
    done = subprocess.run(
        [*launcher, str(tmp_path / "program.py")],
        env=os.environ | places | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = sorted(line.split() for line in done.stdout.splitlines() if line.startswith("process "))
    (_, total, measured), (_, same, measured_too), *failed = said
    assert total == same
    assert {measured, measured_too} == {"True", "False"}
    assert failed == [["process", "no", "clock"]] * 2
    machines = json.loads((tmp_path / "lightformers_hf" / "costs.json").read_text())["machines"]
    assert [list(machine["overheads"]) for machine in machines.values()] == [["lightformer, 50 tokens"]]


def test_the_file_is_in_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert products.costs_file() == tmp_path / "lightformers_hf" / "costs.json"


def counted(model, source_tokens: int, target_tokens: int) -> dict[str, int]:
    """Rows that go through each linear layer while one sentence is translated."""
    rows = {}
    names = {module: name.removeprefix("model.") for name, module in model.named_modules()}

    def count(module, inputs, output):
        rows[names[module]] = rows.get(names[module], 0) + inputs[0].numel() // inputs[0].shape[-1]

    for layer in names:
        if hasattr(layer, "in_features"):
            layer.register_forward_hook(count)
    ids = torch.randint(3, 50, (1, source_tokens))
    settings = {"max_new_tokens": target_tokens, "eos_token_id": None, "forced_eos_token_id": None}
    model.generate(ids, attention_mask=torch.ones_like(ids), num_beams=1, do_sample=False, max_length=None, **settings)
    return rows


@pytest.mark.parametrize("fields", [{}, RANKS, RANKS | {"group_residual_rank": 2}, None], ids=str)
def test_products_are_counted_as_they_run(fields):
    model = marian() if fields is None else light(**fields)
    layers = layers_of(model)
    rows = counted(model, 7, 5)
    for name, layer in layers.items():
        if layer.kind == "linear":
            assert rows[name] == 7 * layer.sentence + 5 * layer.token, name
            module = model.get_submodule(f"model.{name}")
            assert (layer.shapes[0][0], layer.shapes[-1][1]) == (module.in_features, module.out_features)
    linear = {name for name, layer in layers.items() if layer.kind == "linear"}
    rest = {name for name in rows if name not in linear and not name.endswith((".u", ".v"))}
    assert rest <= {"lm_head", "lm_head.output"}


def test_a_sentence_costs_the_sum_of_its_products(machine):
    costs = sentence_costs(marian(), 12, 10, machine=machine)
    assert costs.overhead == pytest.approx(1000 + 4 * 100 + 10 * (10 + 2 * 1))
    square, ffn = 32 * 32, 32 * 48
    encoder = 4 * (4 * (3 + 0.1 * square) + 2 * (3 + 0.1 * ffn)) / 2  # 12 of 24 rows
    cross = 2 * 2 * (3 + 0.1 * square) / 2
    decoder = 10 * 2 * (6 * (1 + 0.01 * square) + 2 * (1 + 0.01 * 32 * 40))
    output = 10 * (1 + 0.01 * 32 * 50)
    assert costs.products == pytest.approx(encoder + cross + decoder + output)
    assert costs.total == pytest.approx(costs.products + costs.overhead)
    assert costs.working_set == 4 * (2 * (6 * square + 2 * 32 * 40) + 32 * 50)


def test_the_embedding_is_read_and_written(machine):
    costs = sentence_costs(light(**RANKS), 12, 10, machine=machine)
    looked_up = (3 + 0.1 * 10 * 32) / 2 + 10 * (1 + 0.01 * 10 * 32)
    written = 10 * (1 + 0.01 * 32 * 10 + 1 + 0.01 * 10 * 50)
    assert costs("shared", (50, 10), (10, 32)).item() == pytest.approx(looked_up + written)
    assert costs("model.shared", (50, 32)).item() == pytest.approx(10 * (1 + 0.01 * 32 * 50))
    apart = sentence_costs(light(**RANKS, tie_word_embeddings=False), 12, 10, machine=machine)
    assert apart("shared", (50, 10), (10, 32)).item() == pytest.approx(looked_up)
    assert apart("lm_head", (50, 10), (10, 32)).item() == pytest.approx(written)
    assert apart.layers["lm_head"].shapes == ((50, 10), (10, 32))  # V×d as of a table: forms weigh it so


def test_a_configuration_is_enough(machine):
    config = LightFormerConfig(**SIZES | RANKS)
    estimate = sentence_costs(config, machine=machine).total
    assert estimate == pytest.approx(sentence_costs(light(**RANKS), machine=machine).total)


def test_overheads_are_what_products_leave(machine):
    """Timers that know what each narrow model takes: 7 + 5·encoder layers + tokens·(3 + 2·decoder layers) more."""
    model, made = light(**RANKS), []
    real = module.narrow_config

    def noted(config, encoder_layers, decoder_layers):
        made.append(real(config, encoder_layers, decoder_layers))
        return made[-1]

    def timer(run):
        tokens = run.__closure__[[*run.__code__.co_freevars].index("tokens")].cell_contents
        costs = module._costs(LightFormerForConditionalGeneration(made[-1]), layers_of(
            LightFormerForConditionalGeneration(made[-1])), machine, 25, tokens, 0.0)  # fmt: skip
        layers = made[-1].encoder_layers, made[-1].decoder_layers
        return (costs.products + 7 + 5 * layers[0] + tokens * (3 + 2 * layers[1])) / 1e6

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "narrow_config", noted)
        found = module.measure_overheads(model, machine, timer)
    assert (found.sentence, found.encoder_layer) == pytest.approx((7, 5), abs=1e-6)
    assert (found.token, found.decoder_layer) == pytest.approx((3, 2), abs=1e-6)
    assert all(config.rank_pattern == {} and config.attention_rank is None for config in made)


def test_overheads_of_narrow_models_can_be_measured(machine):
    machine.overheads.clear()
    runs = []

    def timer(run):
        run()
        runs.append(run)
        return 1.0

    for model in (marian(), light(**RANKS, head_dim=8, joint_qkv=True)):
        assert sentence_costs(model, machine=machine, timer=timer).total > 0
    assert len(machine.overheads) == 2
    assert len(runs) == 8


@pytest.mark.parametrize("heads", [(12, 12), (6, 4), (5, 7), (16, 8)])
@pytest.mark.parametrize("kind", [MarianConfig, LightFormerConfig])
def test_any_number_of_heads_has_a_narrow_model(kind, heads):
    fields = {"encoder_attention_heads": heads[0], "decoder_attention_heads": heads[1]}
    config = kind(**SIZES | fields | {"d_model": 16 * heads[0] * heads[1], "pad_token_id": 1})
    narrow = narrow_config(config, 1, 1)
    assert 64 <= narrow.d_model <= 128
    assert not narrow.d_model % max(heads)
    ids = torch.randint(3, 50, (1, 4))
    assert AutoModelForSeq2SeqLM.from_config(narrow)(ids, decoder_input_ids=ids).logits.shape == (1, 4, 50)


def test_other_models_are_refused(machine):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    with pytest.raises(ValueError, match="encoder-decoder"):
        layers_of(BertModel(BertConfig(vocab_size=20, **sizes)))
    with pytest.raises(ValueError, match="fc3"):
        sentence_costs(marian(), machine=machine)("decoder.layers.0.fc3", (4, 4))


def test_a_speedup_is_a_budget_of_time(machine, tiny_marian, tmp_path, monkeypatch):
    """The result's estimate is what was asked for, and what cannot be reached is said."""
    config = AutoConfig.from_pretrained(tiny_marian)
    for kind in ("lightformer", "marian"):
        machine.overheads[f"{kind}, {config.vocab_size} tokens"] = [100.0, 10.0, 1.0, 1.0]
    monkeypatch.setattr(limits, "sentence_costs", partial(sentence_costs, machine=machine))
    report = convert(tiny_marian, tmp_path / "light", speedup=1.5, study=StudyOptions(refit=False), progress=False)
    assert report.estimated_speedup == pytest.approx(1.5, rel=0.1)
    light = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "light")
    teacher, student = (sentence_costs(model, machine=machine).total for model in (config, light))
    assert report.estimated_speedup == pytest.approx(teacher / student)
    with pytest.raises(ValueError, match=r"speedup is 1000, which cannot be met.*estimated [\d.]+ times as fast"):
        convert(tiny_marian, tmp_path / "none", speedup=1000, progress=False)
    with pytest.raises(ValueError, match=r"speedup is 0.5, expected a number above 1"):
        convert(tiny_marian, tmp_path / "none", speedup=0.5, progress=False)
