"""Kill processes that write an output, at random moments, and count what that harms.

`python tests/kills.py --number 1000` kills a process that writes five files with pauses; with `--what convert` one
that compresses a tiny model, with `--what export` one that writes it for CTranslate2, with `push` one that sends it to
a Hub on this machine, with `training` one that trains it and, after the kill, goes on. Half of the moments are random
in time; half are random among the calls to the file system, where one rename or removed file makes the difference.
Before some kills there is an output, which must survive or be replaced whole; beside some, another process writes to
the same place. Exits with 1 where anything was harmed.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lightformers_hf.files import atomic_output, check_output

# What Python tells of its calls to the file system, by the names it has for them.
CALLS = {"socket.connect", "open", *(f"os.{name}" for name in ("mkdir", "rename", "remove", "rmdir", "scandir"))}
CALLS |= {"shutil.rmtree", "fcntl.flock"}
BLOCKED = 3  # how a process ends that was told that another writes
VERSIONS = ("old", "new")


def write_files(target: Path, version: str) -> None:
    """Five files of `version`, with pauses."""
    with atomic_output(target, overwrite=True) as folder:
        (folder / "sub").mkdir()
        for name in ("a", "b", "c", "sub/d", "sub/e"):
            (folder / name).write_text(version * 1000)
            time.sleep(0.0005)


def compress_model(target: Path, version: str) -> None:
    """A compressed model, at another rank in each version."""
    from lightformers_hf import convert

    rank = 2 + VERSIONS.index(version)
    convert(target.parent.parent / "teacher", target, rank=rank, method="paper", overwrite=True, progress=False)


def export_model(target: Path, version: str) -> None:
    """A model for another engine, in float32 or in int8."""
    from lightformers_hf.engines import export

    quantization = {"old": "float32", "new": "int8"}[version]
    export(target.parent.parent / "teacher", target, to="ctranslate2", quantization=quantization, overwrite=True)


def prepare_model(place: Path) -> None:
    """What `compress_model` reads."""
    from minimal import make_teacher
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    make_teacher(place / "teacher")


WRITERS = {
    "files": (write_files, lambda place: None),
    "convert": (compress_model, prepare_model),
    "export": (export_model, prepare_model),
}


def digest(folder: Path) -> str | None:
    """Of all that a folder holds; `None` where there is no folder."""
    if not folder.exists():
        return None
    lines = [f"{path.relative_to(folder)} {path.is_file() and path.read_bytes()}" for path in folder.rglob("*")]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def count_calls(found: Callable[[], object]) -> None:
    """Call `found` before each call to the file system from now on, until the process ends."""

    def see(event: str, _: tuple) -> None:
        if event in CALLS:
            found()

    sys.addaudithook(see)


def start(work: Callable[[], object], kill_at: int | None = None) -> int:
    """The number of a new process that does `work`, and kills itself before its call `kill_at` to the file system."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        if kill_at is not None:
            calls = iter(range(kill_at))
            count_calls(lambda: next(calls, None) is None and os.kill(os.getpid(), signal.SIGKILL))
        work()
        status = 0
    except BlockingIOError:
        status = BLOCKED
    finally:
        os._exit(status)


def measure(work: Callable[[], object]) -> tuple[float, int]:
    """Seconds that `work` takes, and calls to the file system that it makes."""
    begin = time.perf_counter()
    if os.waitpid(start(work), 0)[1]:
        raise RuntimeError("the work fails by itself")
    seconds = time.perf_counter() - begin
    read, write = os.pipe()
    calls = Counter()

    def count() -> None:
        count_calls(lambda: calls.update(["call"]))
        work()
        os.write(write, str(calls["call"]).encode())

    os.waitpid(start(count), 0)
    return seconds, int(os.read(read, 20))


class Killer:
    """Kills and counts, of writers of folders or, in sub-classes, of others. `counts` says what came of it."""

    def __init__(self, what: str, place: Path, seed: int):
        self.what, self.random, self.counts = what, random.Random(seed), Counter()
        self.prepare(place)
        self.seconds, self.calls = measure(self.work)
        self.next_calls: list[int] = []

    def prepare(self, place: Path) -> None:
        """What is read, and both versions of what is written."""
        self.write, prepare = WRITERS[self.what]
        prepare(place)
        self.target = place / "work" / "out"
        self.target.parent.mkdir()
        self.digests = {}
        for version in VERSIONS:
            self.write(self.target, version)
            self.digests[version] = digest(self.target)

    def choose_call(self) -> int:
        """A random one; none comes again before all others came."""
        if not self.next_calls:
            self.next_calls = self.random.sample(range(self.calls), self.calls)
        return self.next_calls.pop()

    def work(self) -> None:
        """What is killed."""
        self.write(self.target, "new")

    def begin(self) -> str | None:
        """Make, or have, an output of before, or none; its digest."""
        if digest(self.target) not in self.digests.values() or self.random.random() < 1 / 3:
            shutil.rmtree(self.target, ignore_errors=True)
        if digest(self.target) is None and self.random.random() < 1 / 3:
            return None
        if digest(self.target) != self.digests["old"]:
            self.write(self.target, "old")
        return digest(self.target)

    def kill(self) -> None:
        """Kill once, look, and let the next run clean up."""
        before = self.begin()
        in_time, contended = self.random.random() < 0.5, self.what in WRITERS and self.random.random() < 0.25
        process = start(self.work, None if in_time else self.choose_call())
        other = start(self.work) if contended else None
        if in_time:
            time.sleep(self.random.uniform(0, self.seconds * 1.1))
            os.kill(process, signal.SIGKILL)
        status = os.waitpid(process, 0)[1]
        self.counts["killed" if os.WIFSIGNALED(status) else "ended before"] += 1
        if other:
            status = os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])
            name = {0: "beside one that wrote", BLOCKED: "beside one that was refused"}.get(status, "others failed")
            self.counts[name] += 1
        self.judge(before)

    def judge(self, before: str | None) -> None:
        """Count what is there now, and after what the next run does first."""
        allowed, found = {before, self.digests["new"]}, digest(self.target)
        if found is None and before is not None:
            self.counts["set aside until the next run"] += 1
        elif found not in allowed:
            self.counts["partial"] += 1
        left = [path for path in self.target.parent.iterdir() if path != self.target]
        self.counts["left something over"] += bool(left)
        with suppress(FileExistsError):
            check_output(self.target, overwrite=True)
        if digest(self.target) not in allowed:
            self.counts["harmed"] += 1
        self.counts["left over after the next run"] += len(list(self.target.parent.iterdir())) - self.target.exists()


def main() -> None:
    """Kill until so many were killed, others than those that ended before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=[*WRITERS, "push", "training"], default="files")
    parser.add_argument("--number", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args()
    seed = random.randrange(2**32) if args.seed is None else args.seed
    with tempfile.TemporaryDirectory() as place:
        from kill_targets import PushKiller, TrainingKiller

        kind = {"push": PushKiller, "training": TrainingKiller}.get(args.what, Killer)
        killer = kind(args.what, Path(place).resolve(), seed)
        with suppress(KeyboardInterrupt):  # Ctrl-C: what was counted until then
            while killer.counts["killed"] < args.number:
                killer.kill()
    bad = ("partial", "harmed", "others failed", "left over after the next run")
    counts = {"what": args.what, "seed": seed, "calls": killer.calls, **dict.fromkeys(bad, 0), **killer.counts}
    print(json.dumps(counts))
    sys.exit(any(counts[name] for name in bad))


if __name__ == "__main__":
    main()
