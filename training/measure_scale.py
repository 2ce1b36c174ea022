#!/usr/bin/env python
r"""Measure seconds and memory until a recovery's first step, or of a calibrated conversion, or a teacher's speed.

    python training/measure_scale.py first-step teacher train.jsonl --light light
    python training/measure_scale.py conversion teacher train.jsonl
    python training/measure_scale.py distill teacher shards

`first-step` and `conversion` print an object of JSON: `seconds`; `cpu_seconds` of this process, which other work on
the machine changes less; and `megabytes`, the peak of its memory. `distill` prints a row for each way to run it:
sentences per second, and per second of all cores that it uses, between the first and the last shard of each process.
The ways alternate. `in_engine` is the share of its time that one process spends in CTranslate2's `translate_batch`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from common import run_script

from lightformers_hf import convert, distill, recover
from lightformers_hf.recovery import RecoveryTrainer

# Modules whose steps are watched: no public names.
distilling, recovering = (import_module(f"lightformers_hf.workflows.{name}") for name in ("distill", "run"))
WAYS: dict[str, dict[str, Any]] = {"one process": {"processes": 1}, "two processes": {"processes": 2}}
WAYS |= {"Ray": {"ray": "auto"}} if find_spec("ray") else {}
ROUNDS = 2
HELD_OUT = 100  # sentences of the validation, whose number otherwise follows from the speed of the machine


class FirstStep(BaseException):
    """Ends a recovery when its first step begins."""


def used() -> tuple[float, float]:
    """Seconds, and those of a core of this process and all that it started."""
    own, spent = psutil.Process(), 0.0
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            spent += sum(process.cpu_times()[:2])
    return time.perf_counter(), spent


def measure_distill(args: argparse.Namespace) -> list[dict[str, object]]:
    """Rows of `distill` in several ways, and of the engine alone."""
    import ctranslate2

    os.environ.setdefault("RAY_worker_niceness", "0")  # that of the other processes
    choose, moments, in_engine = distilling.choose_way, [], []
    found: dict[str, list[tuple[float, ...]]] = {way: [] for way in WAYS}

    class Timed(ctranslate2.Translator):
        def translate_batch(self, *args: Any, **options: Any) -> Any:
            began = time.process_time()
            outputs = super().translate_batch(*args, **options)
            in_engine.append(time.process_time() - began)
            return outputs

    def watch(*args: Any) -> Callable:
        run = choose(*args)

        def steps(step: str, numbers: Sequence[int]) -> Iterator[int]:
            moments.clear()
            for number in run(step, numbers):
                moments.append((*used(), sum(in_engine)))
                yield number

        return steps

    distilling.choose_way, ctranslate2.Translator = watch, Timed
    for _ in range(ROUNDS):
        for way, options in WAYS.items():
            with tempfile.TemporaryDirectory() as folder:
                rows = distill(args.teacher, args.data, Path(folder, "out"), **options, progress=False).rows
            if "ray" in options:  # its processes wait, and would be counted with the next round
                import_module("ray").shutdown()
            first = options.get("processes", 2)
            spent = [after - before for before, after in zip(moments[first - 1], moments[-1], strict=True)]
            found[way].append((rows * (1 - first / len(moments)), *spent))
    totals = {way: [sum(column) for column in zip(*rounds, strict=True)] for way, rounds in found.items()}
    return [
        {
            "way": way,
            "sentences_per_second": round(sentences / seconds),
            "sentences_per_cpu_second": round(sentences / cpu),
            "in_engine": round(engine / cpu, 3),
        }
        for way, (sentences, seconds, cpu, engine) in totals.items()
    ]


def measure_once(args: argparse.Namespace) -> dict[str, float]:
    """Measure a recovery until its first step, or a conversion."""

    def stop(*_: object, **__: object) -> None:
        raise FirstStep

    RecoveryTrainer.training_step = stop
    recovering.HELD_OUT = HELD_OUT
    began, before = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        if args.what == "conversion":
            convert(args.teacher, output, ratio=2, calibration=args.data, progress=False)
        else:
            with suppress(FirstStep):
                recover(args.light, output, teacher=args.teacher, data=args.data, minutes=10, progress=False)
    found = {"seconds": round(time.perf_counter() - began, 1), "cpu_seconds": round(time.process_time() - before, 1)}
    found["megabytes"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("first-step", "conversion", "distill"))
    parser.add_argument("teacher")
    parser.add_argument("data")
    parser.add_argument("--light", help="the model to train, for first-step")
    parser.add_argument("--json", type=Path, help="file for what is printed")
    args = parser.parse_args()
    measure = measure_distill if args.what == "distill" else measure_once
    found = json.dumps(measure(args))
    print(found)
    if args.json:
        args.json.write_text(found, encoding="utf-8")


if __name__ == "__main__":
    run_script(main)
