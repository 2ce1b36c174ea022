"""What commands cost before they do anything."""

import pytest
from rich.console import Console

from lightformers_hf.evaluation.benchmarks import startup
from lightformers_hf.evaluation.benchmarks.startup import StartupRatio, processor_seconds, startup_table
from lightformers_hf.loading import load_model


def test_processor_time_is_that_of_the_process():
    """Half a second of work, and a sleep, which is none."""
    work = "import time\nwhile time.process_time() < 0.5: pass\ntime.sleep(1.5)"
    assert 0.49 <= processor_seconds(["-c", work], {}, 0) < 1.4


def test_processor_time_is_finer_than_the_system_s_clock_ticks():
    """Counted in hundredths of a second, half a second of work was 0.49 once in many times."""
    hundredths = [100 * processor_seconds(["-c", ""], {}, 0) for _ in range(5)]
    assert any(abs(count - round(count)) > 1e-3 for count in hundredths)


def test_files_where_the_user_is_are_no_modules(tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise ImportError('not that one')")
    monkeypatch.chdir(tmp_path)
    assert processor_seconds(["-c", "import random"], {}, 0) > 0


def test_a_process_that_fails_is_named():
    with pytest.raises(ValueError, match=r"ended with 3, expected 0: reason"):
        processor_seconds(["-c", "import sys; print('reason', file=sys.stderr); sys.exit(3)"], {}, 0)


def test_a_ratio_is_of_medians(monkeypatch):
    ratio = StartupRatio("help", "import", 0.3, [1.0, 2.0, 9.0], [4.0, 4.0, 1.0])
    assert ratio.to_dict()["ratio"] == 0.5
    console = Console(record=True, width=100)
    console.print(startup_table([ratio]))
    assert "0.50x" in console.export_text()


def test_every_case_runs_in_turn_with_its_plain_program(monkeypatch, tiny_marian):
    seen = []

    def spend(words, variables, code):
        seen.append((words, code))
        return 2.0 if "lightformers" in " ".join(words) else 4.0

    monkeypatch.setattr(startup, "processor_seconds", spend)
    ratios = startup.measure_startup(str(tiny_marian), runs=2)
    assert all(ratio.ratio == 0.5 and len(ratio.runs) == 2 for ratio in ratios)
    assert len(seen) == 2 * 2 * len(ratios)
    assert {code for _, code in seen} == {0, 2}


def test_the_tiny_model_translates(tmp_path):
    model, tokenizer = load_model(startup.make_tiny_marian(tmp_path))
    batch = tokenizer([startup.SENTENCE], return_tensors="pt")
    assert model.generate(**batch, max_new_tokens=3).shape[1] <= 4
