#!/usr/bin/env python
r"""Convert a checkpoint with random weights: time of every step, and memory.

    python training/benchmark_conversion.py --shapes opus-mt
    python training/benchmark_conversion.py --shapes flan-t5-base --method paper --ratio 4

The conversion runs in a process of its own, and what it writes is removed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from arguments import ScriptParser
from common import print_answer, run_script
from rich.table import Table
from torch import nn
from transformers import PreTrainedModel

from lightformers_hf.evaluation.speed import child_command, child_environment
from lightformers_hf.results import Result

# {name: (transformers' class, the fields of its configuration that are not the usual)}
_OPUS = {"d_model": 512, "max_position_embeddings": 512, "encoder_layers": 6, "decoder_layers": 6}
_OPUS |= {"encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "encoder_attention_heads": 8, "decoder_attention_heads": 8}
T5 = "T5ForConditionalGeneration"
_FLAN = {"feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0}
TEACHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "opus-mt": ("MarianMTModel", _OPUS),
    "bart-large": ("BartForConditionalGeneration", {}),
    "nllb-600m": ("M2M100ForConditionalGeneration", {"vocab_size": 256206}),
    "flan-t5-base": (T5, {"d_model": 768, "d_ff": 2048, "num_layers": 12, "num_heads": 12, **_FLAN}),
    "flan-t5-large": (T5, {"d_model": 1024, "d_ff": 2816, "num_layers": 24, "num_heads": 16, **_FLAN}),
}
# Run in a process of its own, so that nothing but the conversion is in its memory.
_CONVERT = """
import json, logging, sys, time
from lightformers_hf import convert
from lightformers_hf.conversion import workers
from lightformers_hf.evaluation.speed import peak_memory
clocks = lambda: (time.perf_counter(), time.process_time())  # the second is more reliable on a shared machine
source, output, options = sys.argv[1:]
found, taken = [], logging.Handler()
taken.emit = lambda record: found.append(record.args)
workers.logger.addHandler(taken)
workers.logger.setLevel(logging.INFO)
libraries, start = peak_memory(), clocks()
convert(source, output, **json.loads(options))
print(json.dumps([found, [end - begin for end, begin in zip(clocks(), start)], peak_memory(), libraries]))
"""


@dataclass(frozen=True)
class WholeConversion(Result):
    """Time and memory of a conversion."""

    shapes: str  # name of the checkpoint whose shapes were used
    options: dict[str, object]  # options of `convert`
    threads: int  # PyTorch's
    checkpoint_bytes: int
    peak_bytes: int  # resident memory of the process at most
    libraries_bytes: int  # memory of Python, PyTorch and Transformers before the conversion
    steps: dict[str, tuple[float, float]]  # {step: (seconds, processor seconds)}, without what is between them
    total: tuple[float, float]  # from the call to its return

    def to_dict(self) -> dict:
        """Return the same for JSON."""
        rows = {name: {"wall": wall, "cpu": cpu} for name, (wall, cpu) in (self.steps | {"": self.total}).items()}
        return asdict(self) | {"total": rows.pop(""), "steps": rows}

    def parts(self) -> list[Table | str]:
        """Return the table, and a line about memory."""
        options = ", ".join(f"{name} {value}" for name, value in self.options.items()) or "default options"
        table = Table(title=f"{self.shapes}: convert with {options}", caption=f"{self.threads} threads")
        for heading in ("step", "seconds", "CPU seconds"):
            table.add_column(heading, justify="left" if heading == "step" else "right")
        for name, seconds in {**self.steps, "all, with other work": self.total}.items():
            table.add_row(name, *(f"{number:,.1f}" for number in seconds))
        sizes = [f"{size / 1e6:,.0f} MB" for size in (self.checkpoint_bytes, self.peak_bytes, self.libraries_bytes)]
        return [table, "checkpoint {}, peak memory {}, of which the libraries took {}".format(*sizes)]


def random_teacher(shapes: str) -> PreTrainedModel:
    """Return a checkpoint of these shapes with random weights. Raises `ValueError` for unknown shapes."""
    if shapes not in TEACHERS:
        raise ValueError(f"unknown shapes {shapes!r}, expected one of {', '.join(TEACHERS)}")
    name, fields = TEACHERS[shapes]
    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(**fields))
    if shapes.startswith("flan-t5"):  # its output layer is no copy of the table, which a new T5's always is
        model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
        model.all_tied_weights_keys.pop("lm_head.weight")
    if getattr(model.config, "forced_eos_token_id", None) is None:
        # M2M100 begins with the token that ends, which its table, as output layer, would find the likeliest at once.
        model.generation_config.suppress_tokens = [model.config.eos_token_id]
    return model


def time_conversion(shapes: str, **options: object) -> WholeConversion:
    """Convert a checkpoint of these shapes with random weights in a process of its own; its bars go to stderr.

    Translations of random weights are as long as they may be, so that calibration takes longer than that of a trained
    checkpoint. Writes about three times the checkpoint's size into the folder for temporary files, and removes it.
    Raises `ValueError` for unknown shapes, or if the conversion failed. `options` are those of `convert`.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")
        random_teacher(shapes).save_pretrained(source)
        size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
        command = child_command(_CONVERT, str(source), str(Path(folder, "output")), json.dumps(options))
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": sys.stderr, "text": True}
        done = subprocess.run(command, env=child_environment(), check=False, **streams)
    if done.returncode:
        raise ValueError(f"the conversion of {shapes} failed: see above")
    found, total, peak, libraries = json.loads(done.stdout.splitlines()[-1])
    steps = {name: (wall, cpu) for name, wall, cpu in found}
    return WholeConversion(shapes, options, torch.get_num_threads(), size, peak, libraries, steps, tuple(total))


def main() -> None:
    """Print times and memory of one conversion."""
    parser = ScriptParser(__doc__)
    parser.add_argument("--shapes", default="opus-mt", help=f"shapes of a checkpoint: {', '.join(TEACHERS)} (opus-mt)")
    parser.add_argument("--method", help="method of the conversion")
    parser.add_argument("--ratio", type=float, help="ratio of the conversion")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON; -: to stdout, and nothing else")
    args = parser.parse_args()
    options = {"method": args.method, "ratio": args.ratio}
    found = time_conversion(args.shapes, **{name: value for name, value in options.items() if value is not None})
    print_answer(found.parts(), found.to_dict(), args.json)


if __name__ == "__main__":
    run_script(main)
