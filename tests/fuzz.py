"""Give commands damaged files and wild options, and look for what no user should see.

`python tests/fuzz.py --number 10000` runs so many inputs, `--hours 8` as many as fit in; `--kind header` those of one
kind. An input has failed when the command shows a traceback, crashes, does not end within a minute of processor time
(or ten minutes), or leaves something behind after an error. Each failure is printed once, when it is found, with the
files and words that make it. Ctrl-C ends it early, with what was counted until then. Exits with 1 where something
failed.
"""

import argparse
import contextlib
import importlib
import io
import json
import math
import os
import pickle
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import fuzz_inputs
import huggingface_hub.constants
from fuzz_inputs import Case
from hypothesis import HealthCheck, Phase, given, seed, settings

LIMIT = 60  # seconds for one input, of processor time
LONGEST_WAIT = 10 * LIMIT  # on a machine that does other things, too
MEMORY = 3 << 30  # bytes for one input, beyond what the libraries take
SENTENCES = [("Ein Hund läuft.", "A dog runs."), ("Zwei Hunde im Schnee.", "Two dogs in the snow.")] * 3
WARM = (
    *(
        "ctranslate2",
        "pandas",
        "sacrebleu",
        "lightformers_hf.evaluation.evaluate",
        "lightformers_hf.evaluation.page",
    ),
    *("lightformers_hf.hub", "lightformers_hf.engines.ctranslate2"),
)
SHARES = {"configuration": 5, "header": 4, "options": 4, "index": 3, "data": 2}  # of the others, 1 each
LAST = 500  # inputs of one process, before a new one is forked


def make_base(base: Path) -> None:
    """The whole files: a dense model with tokenizer, a converted one, weights in two files, data."""
    import torch
    from datasets import Dataset
    from safetensors.torch import load_file, save_file
    from tiny import make_tokenizer, marian_tokens, sizes
    from transformers import MarianConfig, MarianMTModel

    from lightformers_hf import convert

    tokenizer = make_tokenizer(
        base / "dense", [text for pair in SENTENCES for text in pair], vocab_size=30, longest=16
    )
    pad = tokenizer.pad_token_id
    torch.manual_seed(0)
    fields = sizes(8, heads=1, max_position_embeddings=16) | marian_tokens(pad + 1)
    model = MarianMTModel(MarianConfig(**fields, activation_function="swish"))
    model.generation_config.max_length = 6
    model.generation_config.num_beams = 2
    model.save_pretrained(base / "dense")
    convert(base / "dense", base / "light", rank=2, method="paper", progress=False)
    log = [{"step": 1, "loss": 2.0, "epoch": 0.5}, {"step": 2, "eval_loss": 1.0, "eval_bleu": 3.0, "epoch": 1.0}]
    state = {"log_history": log, "global_step": 2, "best_metric": 1.0, "epoch": 1.0, "max_steps": 2}
    (base / "light" / "trainer_state.json").write_text(json.dumps(state))
    weights = load_file(base / "dense" / "model.safetensors")
    torch.save(weights, base / "pytorch_model.bin")
    names, weight_map = sorted(weights), {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, base / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    rows = [{"de": german, "en": english} for german, english in SENTENCES]
    (base / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (base / "data.json").write_text(json.dumps(rows))
    for name, mark in (("data.csv", ","), ("data.tsv", "\t")):
        (base / name).write_text("".join(mark.join(row) + "\n" for row in [("de", "en"), *SENTENCES]))
    Dataset.from_list(rows).to_parquet(base / "data.parquet")
    (base / "text").write_text("Ein Hund\n")


def run_command(words: list[str]) -> tuple[int | None, str]:
    """Exit code and all that a command says; `None` and the traceback where it raises something."""
    from lightformers_hf.cli import app

    said, complaints = (
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=errors, write_through=True)
        for errors in ("strict", "backslashreplace")
    )
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complaints):
        try:
            app.main(args=words, prog_name="lightformers")
            code: int | None = 0
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 1
        except BaseException:
            return None, traceback.format_exc()
    return code, b"".join(file.buffer.getvalue() for file in (said, complaints)).decode("utf-8", "replace")


def try_case(case: Case, base: Path, place: Path) -> str | None:
    """Run an input in a folder of its own; what is wrong with how it ended."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(base, place)
    os.chdir(place)
    for name, content in case.files.items():
        (place / name).unlink(missing_ok=True)
        if content is not None:
            (place / name).write_bytes(content)
    before = set(os.listdir(place))
    code, said = run_command(case.words)
    if code is None or "Traceback (most recent call last)" in said:
        return said
    if code not in (0, 1, 2):
        return f"exit code {code}: {said}"
    if code and (left := set(os.listdir(place)) - before):
        return f"left behind after exit code {code}: {sorted(left)}: {said}"
    return None


class Worker:
    """A forked process that runs inputs, with limits; a new one when it died or ran `LAST` of them."""

    def __init__(self, base: Path, place: Path):
        self.base, self.place, self.process, self.done = base, place, 0, 0

    def start(self) -> None:
        """Fork it."""
        read_case, self.to = os.pipe()
        self.back, write_answer = os.pipe()
        self.done = 0
        self.process = os.fork()
        if self.process:
            os.close(read_case), os.close(write_answer)
            return
        try:
            self.serve(read_case, write_answer)
        finally:
            os._exit(1)

    def serve(self, read_case: int, write_answer: int) -> None:
        """In the process: run what comes in, without end."""
        os.close(self.to), os.close(self.back)
        with open(f"/proc/{os.getpid()}/statm", encoding="ascii") as sizes:
            used = int(sizes.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        quiet = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(quiet, number)
        huggingface_hub.constants.HF_HUB_OFFLINE = True  # the environment is read by imports, which are done
        with os.fdopen(read_case, "rb") as cases, os.fdopen(write_answer, "wb") as answers:
            while True:
                try:
                    case = pickle.load(cases)
                except EOFError:
                    return
                pickle.dump(try_case(case, self.base, self.place), answers)
                answers.flush()

    def stop(self, *, kill: bool = False) -> int:
        """End it, and return how it ended."""
        os.close(self.to), os.close(self.back)
        if kill:
            os.kill(self.process, signal.SIGKILL)
        status, self.process = os.waitpid(self.process, 0)[1], 0
        return os.waitstatus_to_exitcode(status)

    def end(self) -> None:
        """End it, if it runs."""
        if self.process:
            self.stop()

    def seconds_used(self) -> float:
        """Processor time of the process so far."""
        fields = Path(f"/proc/{self.process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def run(self, case: Case) -> str | None:
        """What is wrong with how an input ended."""
        if self.done >= LAST:
            self.end()
        if not self.process:
            self.start()
        self.done += 1
        begin, used = time.monotonic(), self.seconds_used()
        os.write(self.to, pickle.dumps(case))
        while not select.select([self.back], [], [], 1)[0]:
            took = time.monotonic() - begin
            if took > LONGEST_WAIT or (took > LIMIT and self.seconds_used() - used > LIMIT):
                self.stop(kill=True)
                return f"no end within {LIMIT} seconds"
        answer = b""
        while chunk := os.read(self.back, 1 << 16):
            answer += chunk
            with contextlib.suppress(EOFError, pickle.UnpicklingError):
                return pickle.loads(answer)
        return f"crash: the process ended by {self.stop()}"


def summarize(problem: str) -> str:
    """What tells one problem from another: the last of its lines, and where in this package it was."""
    places = re.findall(r"lightformers_hf/(\S+\.py)\", line \d+, in (\w+)", problem)
    last = problem.strip().splitlines()[-1]
    return f"{re.sub(r'[0-9]+', 'N', last)[:100]} {places[-1] if places else ''}"


class Fuzzer:
    """Runs inputs of every kind in turn, and remembers what failed."""

    def __init__(self, folder: Path):
        os.environ |= {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "LIGHTFORMERS_CACHE": str(folder)}
        self.base = folder / "base"
        self.base.mkdir()
        make_base(self.base)
        for module in WARM:  # else every process imports them anew
            importlib.import_module(module)
        self.worker = Worker(self.base, folder / "work")
        self.kinds = fuzz_inputs.cases(self.base)
        self.counts: Counter[str] = Counter()
        self.found: dict[str, tuple[Case, str]] = {}

    def run(self, kind: str, number: int, start: int, deadline: float = math.inf) -> None:
        """Try `number` inputs of a kind, fewer where time is up."""

        @seed(start)
        @settings(
            max_examples=number, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(self.kinds[kind])
        def attempt(case: Case) -> None:
            if time.monotonic() > deadline:
                return
            self.counts[kind] += 1
            if problem := self.worker.run(case):
                self.counts[f"{kind} failed"] += 1
                if (name := summarize(problem)) not in self.found:
                    self.found[name] = (case, problem)
                    show_failure(name, case, problem)

        attempt()


def show_failure(name: str, case: Case, problem: str) -> None:
    """Print what failed, and the input that makes it fail."""
    print(f"\n=== {name}\n{' '.join(case.words)}")
    print("\n".join(f"{file}: {str(content)[:300]}" for file, content in case.files.items()))
    print(problem[-3000:], flush=True)


def main() -> None:
    """Run so many inputs, or for so long."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=1000)
    parser.add_argument("--hours", type=float, default=None, help="go on so long, whatever --number says")
    parser.add_argument("--kind", action="append", help="only these")
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args()
    start = int.from_bytes(os.urandom(4)) if args.seed is None else args.seed
    begin, deadline = time.monotonic(), time.monotonic() + (args.hours * 3600 if args.hours else math.inf)
    with tempfile.TemporaryDirectory() as place:
        fuzzer = Fuzzer(Path(place).resolve())
        kinds = args.kind or list(fuzzer.kinds)
        share, again = args.number / sum(SHARES.get(kind, 1) for kind in kinds), 0
        with contextlib.suppress(KeyboardInterrupt):
            while again == 0 or (args.hours and time.monotonic() < deadline):
                for kind in kinds:
                    fuzzer.run(kind, math.ceil(share * SHARES.get(kind, 1)), start + again, deadline)
                again += 1
        fuzzer.worker.end()
    counts = {"seed": start, "inputs": sum(fuzzer.counts[kind] for kind in kinds), "failed": len(fuzzer.found)}
    print(json.dumps(counts | {"seconds": round(time.monotonic() - begin)} | dict(fuzzer.counts)))
    sys.exit(bool(fuzzer.found))


if __name__ == "__main__":
    main()
