#!/usr/bin/env python
r"""Measure seconds and memory until the first step of a recovery, or the time of a calibrated conversion.

    python training/measure_scale.py first-step teacher light train.jsonl
    python training/measure_scale.py conversion teacher light train.jsonl

Prints an object of JSON: `seconds`; `cpu_seconds` of this process, which other work on the machine changes less; and
`megabytes`, the peak of its memory.
`light` is the model that is trained; for `conversion` its name has no effect.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from common import run_script

from lightformers_hf import convert, recover
from lightformers_hf.recovery import RecoveryTrainer


class FirstStep(BaseException):
    """Ends a recovery when its first step begins."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("first-step", "conversion"))
    for name in ("teacher", "light", "data"):
        parser.add_argument(name)
    args = parser.parse_args()

    def stop(*_: object, **__: object) -> None:
        raise FirstStep

    RecoveryTrainer.training_step = stop
    began, used = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        if args.what == "conversion":
            convert(args.teacher, output, ratio=2, calibration=args.data, progress=False)
        else:
            with suppress(FirstStep):
                recover(args.light, output, teacher=args.teacher, data=args.data, minutes=10, progress=False)
    found = {"seconds": round(time.perf_counter() - began, 1), "cpu_seconds": round(time.process_time() - used, 1)}
    found["megabytes"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)
    print(json.dumps(found))


if __name__ == "__main__":
    run_script(main)
