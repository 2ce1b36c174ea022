#!/usr/bin/env python
"""Average the weights of a run's checkpoints into one model, as PartialFormer's recipes do before the test.

    python training/average_checkpoints.py run --last 10 --output averaged
    python training/average_checkpoints.py run --best 5 --metric bleu --output averaged
    python training/average_checkpoints.py run/checkpoint-1000 run/checkpoint-2000 --output averaged

A run is the `--output-dir` of a training script, with its `checkpoint-<step>` folders (keep enough of them:
`--save-total-limit`). Those that a kill cut off do not count. Sums are taken in fp32 and stored in the checkpoints'
type. Configuration and tokenizer are those of the newest of the checkpoints, the best, or the first that is named.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from arguments import ScriptParser
from common import run_script
from huggingface_hub import save_torch_state_dict
from rich.console import Console
from rich.markup import escape

from lightformers_hf.conversion import CheckpointReader
from lightformers_hf.evaluation.quality import METRICS
from lightformers_hf.files import WEIGHT_FILES, atomic_output

TRAINING_STATE = ("optimizer*", "scheduler.pt", "scaler.pt", "rng_state*", "trainer_state.json", "training_args.bin")
WEIGHTS = (*WEIGHT_FILES, "model-*.safetensors", "pytorch_model-*.bin")
RISING = ("accuracy", *(name for name, metric in METRICS.items() if metric.higher_is_better))


def checkpoints_of(run: str | Path) -> dict[int, Path]:
    """{step: folder} of the checkpoints of `run` that were written to the end, the newest first.

    They need not be complete enough to resume: `--save-only-model` saves no optimizer.
    """
    found = {}
    for folder in Path(run).glob("checkpoint-*"):
        try:
            json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))  # Trainer writes it last
        except (OSError, ValueError):
            continue
        if re.fullmatch(r"checkpoint-\d+", folder.name) and any((folder / name).is_file() for name in WEIGHT_FILES):
            found[int(folder.name.split("-")[1])] = folder
    return dict(sorted(found.items(), reverse=True))


def scores(checkpoint: Path, metric: str) -> dict[int, float]:
    """{step: value} of every evaluation that `checkpoint`'s trainer remembers. Raises `ValueError` if none has it."""
    history = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    name = f"eval_{metric.removeprefix('eval_')}"
    found = {entry["step"]: entry[name] for entry in history if name in entry}
    if not found:
        names = {key.removeprefix("eval_") for entry in history for key in entry if key.startswith("eval_")}
        there = f"it was evaluated by {', '.join(sorted(names))}" if names else "it was never evaluated"
        raise ValueError(f"The run of {checkpoint} has no score {name}: {there}.")
    return found


def choose(run: str | Path, *, last: int | None = None, best: int | None = None, metric: str = "loss") -> list[Path]:
    """The `last` or the `best` checkpoints of the folder `run`, in the order of falling preference.

    Raises `ValueError` where there are fewer, `FileNotFoundError` where there is no run.
    """
    if not Path(run).is_dir():
        raise FileNotFoundError(f"No run {run}: give the output_dir of a training script.")
    found = checkpoints_of(run)
    wanted, steps = last or best, list(found)
    if best and found:
        values = scores(found[steps[0]], metric)
        sign = -1 if metric.removeprefix("eval_") in RISING else 1
        steps = sorted(found.keys() & values.keys(), key=lambda step: sign * values[step])
    if len(steps) < wanted:
        kind = "complete and evaluated" if best else "complete"
        found_ones = f"{len(steps)} {kind} checkpoint{'s' * (len(steps) != 1)}"
        raise ValueError(f"{run} has {found_ones}: cannot average {wanted} (--save-total-limit?).")
    return [found[step] for step in steps[:wanted]]


def mean_of(checkpoints: list[Path]) -> dict[str, torch.Tensor]:
    """The mean of every stored tensor, summed in fp32, in the stored type; integers must be the same in all.

    Raises `ValueError` for checkpoints of other tensors, shapes or types.
    """
    readers = [CheckpointReader(folder) for folder in checkpoints]
    first = readers[0]
    for reader in readers[1:]:
        if differing := sorted(set(first.keys()) ^ set(reader.keys())):
            raise ValueError(f"{differing[0]} is in one of {first.folder} and {reader.folder} alone: other models.")
    mean = {}
    for name in first.keys():  # noqa: SIM118, a reader is no dict
        tensors = [reader.read(name) for reader in readers]
        for reader, tensor in zip(readers, tensors, strict=True):
            if (tensor.shape, tensor.dtype) != (tensors[0].shape, tensors[0].dtype):
                raise ValueError(
                    f"{name} is {tuple(tensors[0].shape)} {tensors[0].dtype} in {first.folder}, but "
                    f"{tuple(tensor.shape)} {tensor.dtype} in {reader.folder}: other models."
                )
        if tensors[0].is_floating_point():
            total = tensors[0].to(torch.float32, copy=True)
            for tensor in tensors[1:]:
                total += tensor
            mean[name] = (total / len(tensors)).to(tensors[0].dtype)
        elif all(torch.equal(tensor, tensors[0]) for tensor in tensors[1:]):
            mean[name] = tensors[0].clone()
        else:
            raise ValueError(f"{name} holds integers that differ between the checkpoints: they have no mean.")
    return mean


def average(checkpoints: list[Path], output: str | Path, *, overwrite: bool = False) -> None:
    """Write the mean of `checkpoints` to the folder `output`, with the first one's configuration and tokenizer.

    Written whole or not at all; shared tensors are stored once, as they are in the checkpoints. Raises as `mean_of`
    and `atomic_output` do.
    """
    for checkpoint in checkpoints:
        if not checkpoint.is_dir():
            raise FileNotFoundError(f"No checkpoint {checkpoint}: give an existing folder.")
    with atomic_output(output, overwrite=overwrite, inputs=checkpoints) as folder:
        mean = mean_of(checkpoints)
        shutil.copytree(
            checkpoints[0], folder, ignore=shutil.ignore_patterns(*TRAINING_STATE, *WEIGHTS), dirs_exist_ok=True
        )
        save_torch_state_dict(mean, folder, metadata={"format": "pt"})


def main(argv: list[str] | None = None) -> None:
    """Choose, average, report."""
    parser = ScriptParser(__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a run, or checkpoints")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--last", type=int, help="average the last so many checkpoints of the run")
    how.add_argument("--best", type=int, help="average the best so many")
    parser.add_argument("--metric", default="loss", help="metric that chooses the best: loss, bleu, … (default: loss)")
    parser.add_argument("--output", required=True, help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the output folder, if a command wrote it")
    args = parser.parse_args(argv)
    checkpoints = args.folders
    for option in ("last", "best"):
        if (count := getattr(args, option)) is not None:
            if count < 1 or len(args.folders) > 1:
                raise ValueError(f"--{option} is {count}, of {len(args.folders)} folders: expected 1 or more, of one.")
            checkpoints = choose(args.folders[0], metric=args.metric, **{option: count})
    if len(checkpoints) == 1 and args.last is args.best is None and checkpoints[0].is_dir():
        raise ValueError(f"{checkpoints[0]} alone: give --last or --best with a run, or several checkpoints.")
    average(checkpoints, args.output, overwrite=args.overwrite)
    names = ", ".join(folder.name for folder in checkpoints)
    Console().print(escape(f"Mean of {len(checkpoints)} ({names}), saved in {args.output}"), soft_wrap=True)


if __name__ == "__main__":
    run_script(main)
