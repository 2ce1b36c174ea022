"""Speed and memory of translation: tokens a second on one core, by the protocol of the LightFormer paper.

"LightFormer: Light-weight Transformer Using SVD-based Weight Transfer and Parameter Sharing" (Findings of ACL 2023),
section Speed Measures: batch size 1, 50 sentences of average output length, 10 runs, the fastest and the slowest tenth
dropped, the rest averaged. Here all models take turns within the same runs, so that a busy machine slows all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import torch
from tqdm.auto import tqdm

from ..decoding import output_limit, search_options, suggest_limit
from ..engines.engine import ONE_OUTPUT, longest_input
from ..loading import generate_tokens, position_limit
from ..processors import use_threads

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WARM_UP_SENTENCES = 3
# Variable of the environment: id of the process that a measuring process works for.
PARENT = "LIGHTFORMERS_PARENT"
T = TypeVar("T")


@dataclass
class Speed:
    """Generated tokens a second of one model (or seconds of sound): the mean without extremes, runs, tokens of one."""

    tokens_per_second: float
    runs: list[float]
    tokens: float


def run_ratios(speed: Speed, to: Speed) -> list[float]:
    """How many times faster `speed` is than `to` in each of the runs that both were measured in."""
    return [a / b for a, b in zip(speed.runs, to.runs, strict=True)]


def speed_ratio(speed: Speed, to: Speed) -> float:
    """How many times faster `speed` is than `to`: the median over the runs that both were measured in."""
    return median(run_ratios(speed, to))


def typical_sentences(
    sources: list[str], references: list[str], tokenizer: PreTrainedTokenizerBase, count: int = 50
) -> list[str]:
    """The `count` sources whose references are nearest the mean reference length in tokens, in their order."""
    lengths = [len(ids) for ids in tokenizer(text_target=references, verbose=False)["input_ids"]]
    mean = fmean(lengths)
    nearest = sorted(range(len(sources)), key=lambda i: abs(lengths[i] - mean))[:count]
    return [sources[i] for i in sorted(nearest)]


def tokens_per_second(
    models: dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]],
    sentences: list[str],
    *,
    runs: int = 10,
    forced_length: int | None = None,
    progress: bool = False,
    **generation: Any,
) -> dict[str, Speed]:
    """Generated tokens a second of each model on one core, one sentence at a time.

    In each run every model translates all sentences once, in turn, and the model that begins changes from run to run.
    Only `generate()` is timed, not the tokenizer. Outputs have the length that `generate()` gives them, so models may
    generate different numbers of tokens; tokens after the start token count, `</s>` included, padding not.

    Args:
        models: name → (model, tokenizer), on the CPU.
        runs: number of runs; the `runs // 10` fastest and slowest are excluded from the mean.
        forced_length: generate exactly so many tokens a sentence, past any end token.
        progress: show a bar on stderr.
        generation: arguments of `generate()`: `num_beams`, `max_new_tokens`, …
    """
    inputs = {}
    for name, (model, tokenizer) in models.items():
        options = {"truncation": True, "max_length": longest_input(model, tokenizer), "return_tensors": "pt"}
        inputs[name] = [tokenizer(text, **options) for text in sentences]
    networks = {name: model for name, (model, _) in models.items()}
    return generation_speed(networks, inputs, runs=runs, forced_length=forced_length, progress=progress, **generation)


def generation_speed(
    models: dict[str, PreTrainedModel],
    inputs: dict[str, list[Mapping[str, torch.Tensor]]],
    *,
    runs: int = 10,
    forced_length: int | None = None,
    progress: bool = False,
    **generation: Any,
) -> dict[str, Speed]:
    """As `tokens_per_second`, of inputs that are tokenized already.

    Args:
        inputs: name → batches with `input_ids` and `attention_mask`, equally many for every model.
    """
    if not all(inputs.values()) or runs < 1:
        fewest = min(map(len, inputs.values()))
        raise ValueError(f"speed of {fewest} sentences in {runs} runs: expected at least one of each.")
    if forced_length is not None:
        generation |= {"max_new_tokens": forced_length, "eos_token_id": None, "forced_eos_token_id": None}
    if generation.get("max_new_tokens") is not None:
        generation.setdefault("max_length", None)

    with ExitStack() as stack:
        stack.enter_context(use_threads(1))
        stack.enter_context(torch.inference_mode())
        for name, model in models.items():
            stack.callback(model.train, model.training)
            _time_translation(model.eval(), inputs[name][:WARM_UP_SENTENCES], generation)
        actions = {name: partial(_time_translation, model, inputs[name], generation) for name, model in models.items()}
        timed = take_turns(actions, runs=runs, progress=progress, what="decoding")
    return {name: speed_of(results) for name, results in timed.items()}


def take_turns(
    actions: Mapping[str, Callable[[], T]], *, runs: int, progress: bool = False, what: str = "measuring"
) -> dict[str, list[T]]:
    """Results of each action in each run.

    In a run each action is called once; the one that begins changes from run to run. The bar shows `what` they do.
    """
    names = list(actions)
    results: dict[str, list[T]] = {name: [] for name in names}
    with tqdm(total=runs * len(names), disable=not progress, unit="run") as bar:
        for run in range(runs):
            first = run % len(names)
            for name in names[first:] + names[:first]:
                bar.set_description(f"{what}, {name}", refresh=False)
                results[name].append(actions[name]())
                bar.update()
    return results


def speed_of(timed: Sequence[tuple[float, float]]) -> Speed:
    """The speed of runs, each so many tokens in so many seconds."""
    rates, dropped = [tokens / seconds for tokens, seconds in timed], len(timed) // 10
    return Speed(fmean(sorted(rates)[dropped : len(rates) - dropped]), rates, timed[-1][0])


def _time_translation(model: PreTrainedModel, inputs: list[Mapping], generation: dict) -> tuple[int, float]:
    """Tokens generated for all inputs, one at a time, and the seconds it took."""
    start = time.perf_counter()
    names = ("input_ids", "attention_mask")
    options = ONE_OUTPUT | search_options(model.generation_config) | generation
    limits: list[dict[str, int]] = [{} for _ in inputs]
    if output_limit(model.generation_config) is None and not options.get("max_new_tokens"):
        positions = position_limit(model.config)
        limits = [{"max_new_tokens": suggest_limit(batch["input_ids"].shape[1], positions)} for batch in inputs]
    outputs = [
        generate_tokens(model, **{name: batch[name] for name in names}, **(options | limit))
        for batch, limit in zip(inputs, limits, strict=True)
    ]
    seconds = time.perf_counter() - start
    end = generation.get("eos_token_id", model.generation_config.eos_token_id)
    return sum(count_tokens(sequences, end) for sequences in outputs), seconds


def count_tokens(sequences: torch.Tensor, eos_token_id: int | list[int] | None) -> int:
    """Tokens in the outputs (B, T) of `generate()`: after the start token, up to the first end token, included.

    Without an end token in a row all of it counts; a pad token can only follow an end token.
    """
    generated = sequences[:, 1:]
    if eos_token_id is None:
        return generated.numel()
    ends = torch.isin(generated, torch.tensor(eos_token_id, device=generated.device))
    after_end = ends.int().cumsum(dim=1) - ends.int() > 0
    return int((~after_end).sum())


# --- Memory, and separate processes for measurements


def peak_memory() -> int:
    """The largest resident memory this process ever had, in bytes, mapped files included.

    Linux: VmHWM, because `ru_maxrss` starts from the size of the process that started this one.
    """
    status = Path("/proc/self/status")
    if status.exists():
        kibibytes = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(kibibytes.split()[1]) * 1024
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def translation_memory(name: str | os.PathLike, sentences: list[str], **generation: Any) -> tuple[int, int]:
    """Peak memory in bytes of a fresh process that loads a checkpoint and translates, and the libraries' part of it.

    The process has one thread and translates `sentences` one at a time; the second number is its peak before the
    checkpoint is loaded (Python, PyTorch, Transformers).
    """
    program = "from lightformers_hf.evaluation.speed import _measure; _measure()"
    task = json.dumps({"name": os.fspath(name), "sentences": sentences, "generation": generation})
    streams: dict[str, Any] = {"input": task, "capture_output": True, "text": True}
    child = subprocess.run(child_command(program), env=child_environment(OMP_NUM_THREADS="1"), **streams)
    if child.returncode:
        raise ValueError(f"{name} could not be measured in a process of its own: {child.stderr.strip()[-500:]}")
    peak, libraries = json.loads(child.stdout)
    return peak, libraries


def _measure() -> None:
    """The process of `translation_memory`: a task on stdin, `[peak, libraries]` on stdout."""
    from ..loading import load_model
    from .translate import translate

    task = json.load(sys.stdin)
    libraries = peak_memory()
    translate(task["sentences"], *load_model(task["name"]), batch_size=1, split=False, **task["generation"])
    print(json.dumps([peak_memory(), libraries]))


def child_environment(**variables: str) -> dict[str, str]:
    """Environment of a Python process that finds the modules that this one does: no files of the user's folder are."""
    own = {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(sys.path), PARENT: str(os.getpid())}
    return {**os.environ, **own, **variables}


def child_command(code: str, *arguments: str) -> list[str]:
    """Return the command of a Python process that runs `code` in `child_environment` and ends with this process."""
    guard = "from lightformers_hf.evaluation.speed import end_with_parent\nend_with_parent()\n"
    return [sys.executable, "-c", guard + code, *arguments]


def end_with_parent() -> None:
    """End this process as soon as the one that `LIGHTFORMERS_PARENT` names, if any, has ended, also by SIGKILL."""
    if parent := os.environ.pop(PARENT, None):  # processes that this one starts have another parent

        def wait() -> None:
            with suppress(psutil.NoSuchProcess):
                psutil.Process(int(parent)).wait()
            psutil.Process().kill()

        threading.Thread(target=wait, daemon=True).start()
