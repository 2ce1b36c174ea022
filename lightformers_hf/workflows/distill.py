"""The teacher's translations of a corpus, shard by shard, on all cores of a machine or on a Ray cluster.

A student learns more from the translations of its teacher than from references (Kim and Rush 2016, arXiv 1606.07947).
From top to bottom: the call, its steps, the work of one process, and the three ways to run it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..arguments import DistillArguments
from ..corpus import Corpus, Shard
from ..data_files import check_split
from ..engines import export
from ..engines.engine import Engine, longest_input, wrap_network
from ..evaluation.evaluate import choose_columns
from ..evaluation.speed import PARENT, end_with_parent
from ..evaluation.translate import load_translator
from ..files import (
    DISTILL_FILE,
    check_place,
    find_foreign,
    find_full_disk,
    lock,
    parents,
    read_json,
    refuse_foreign,
    write_json,
    write_whole,
)
from ..in_memory import identify, on_disk
from ..languages import put_prefix, split_language, split_prefix
from ..loading import is_export
from ..options import OptionError, takes, values_of
from ..results import Result
from ..text import check_known, data_name
from .recover import claim, find_changed
from .run import ENGINE, QUANTIZATION

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
WORK = ".work"  # folder of what is not complete
FORMATS = ("jsonl", "parquet")
NOT_ASKED = ("output", "tokenizer", "processes", "ray", "skip_bad_lines", "overwrite", "progress")
ANSWER = 10  # seconds within which a Ray cluster answers
SEVERAL = 32  # shards from which on several processes read them first
GROUP = 2048  # texts that are sorted by length together
REASONS = ("damaged", "empty", "repeated", "too long", "copied", "improbable")
SCORE = "log_probability"  # the column of the teacher's mean log-probability of a token


@dataclass(frozen=True)
class Distillation(Result):
    """Result of `distill`.

    Attributes:
        output: the folder of shards, which is data for `recover`.
        rows: number of pairs written.
        read: number of rows read.
        dropped: {reason: number of rows that were dropped}; the reasons are those of `REASONS`.
        shards: number of files written.
        engine: engine of the teacher.
        log_probability: the teacher's mean log-probability of a token, the mean of all pairs written; in nats.
    """

    output: str
    rows: int
    read: int
    dropped: dict[str, int]
    shards: int
    engine: str
    log_probability: float

    def parts(self) -> list[Table]:
        """Return the table."""
        from rich.table import Table

        table = Table(title="Distillation", show_header=False)
        table.add_row("pairs written", f"{self.rows:,} of {self.read:,} rows, in {self.shards:,} shards")
        for reason, number in self.dropped.items():
            table.add_row(f"dropped: {reason}", f"{number:,}")
        table.add_row("engine of the teacher", self.engine)
        table.add_row("mean log-probability of a token", f"{self.log_probability:.3f}")
        return [table]


@takes(DistillArguments)
def distill(call: DistillArguments) -> Distillation:
    """Let the teacher translate (or summarize) the sources of a corpus, and write the pairs as shards.

    `output` gets files `part-00000.jsonl`, … of rows `{"de": source, "en": translation, "log_probability": …}`, in
    the order of the data, and the record `distill.json`. The engine is CTranslate2 with int8 where it runs the
    teacher, else transformers. Dropped and counted are lines that are empty, repeated or copied by the teacher, and
    those that are too long or whose translation reached the limit of tokens. The same call resumes after a kill with
    the shards that are not complete, and gives the same files as without the kill.

    Args:

    Raises:
        ValueError: an option is out of its range, the data is unsuitable, or Ray does not answer.
        FileNotFoundError: a model or a file does not exist, or is gone since the work began.
        FileExistsError: `output` contains anything else than this distillation, interrupted.
        OSError: the disk is full. The complete shards stay.

    Example:
        >>> distill("opus-mt-de-en", "train-*.jsonl.gz", "distilled", keep="90%")
    """
    data, share = str(data_name(call.data)), read_share(call.keep)
    check_split(call)
    if call.format not in FORMATS:
        raise ValueError(f"format is {call.format!r}, expected {' or '.join(FORMATS)}")
    output = Path(os.path.expanduser(call.output))
    asked = {"teacher": identify(call.teacher), "data": data, "keep": share}
    asked |= {name: value for name, value in values_of(call).items() if name not in (*asked, *NOT_ASKED)}
    with on_disk(call.tokenizer, call.teacher) as (model,), parents(check_place(output, [model, data])), lock(output):
        record = claim_folder(output, asked, [model, data], call.overwrite)
        job = Job.of(model, output, asked, skip_bad=call.skip_bad_lines)
        now = job.corpus.describe_files()
        if changed := find_changed(record.get("data", {}), now):
            raise ValueError(
                f"{changed} has changed since this distillation began: put it back as it was to resume, or start "
                "again with overwrite=True (--overwrite)"
            )
        run = choose_way(job, call.processes, call.ray)
        try:
            return run_steps(job, run, record | {"data": now}, share, progress=call.progress)
        except (OSError, SafetensorError) as error:
            if what := find_full_disk(error.__cause__ or error):  # a folder that is written whole wraps it
                raise OSError(
                    f"{what}: complete shards of {output} stay; free space, then give the same command"
                ) from error
            raise


def run_steps(job: Job, run: Run, record: dict[str, Any], share: float | None, *, progress: bool) -> Distillation:
    """Do what is not complete, and write the record at the beginning and the end."""
    output = job.output
    output.mkdir(parents=True, exist_ok=True)
    write_json(record, output / DISTILL_FILE)
    job.prepare()
    with tqdm(total=len(job.shards), desc="translating", unit="shard", disable=not progress) as bar:
        survey = run if len(job.shards) > SEVERAL else partial(run_here, job)
        for _ in survey("survey", job.unsurveyed()):
            pass
        job.find_repeats()
        done = [shard for shard in job.shards if job.file(shard, ".json").is_file()]
        bar.update(len(done))
        for _ in run("translate", [shard.number for shard in job.shards if shard not in done]):
            bar.update(1)
    found = job.publish(share)
    if not found.rows:
        logger.warning(f"{output} has no pairs: every row of {record['asked']['data']} was dropped")
    files = [path.name for path in sorted(output.glob("part-*"))]
    write_json(record | {"result": asdict(found), "files": files}, output / DISTILL_FILE)
    shutil.rmtree(output / WORK)
    return found


def read_share(keep: str | float | None) -> float | None:
    """The share that `keep` means. Raises `ValueError` unless it is above 0 and at most 1."""
    if keep is None:
        return None
    try:
        share = float(keep[:-1]) / 100 if isinstance(keep, str) and keep.endswith("%") else float(keep)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(f"keep is {keep!r}, expected a share such as 90% or 0.9")
    return share


def claim_folder(output: Path, asked: dict[str, Any], inputs: Sequence[str], overwrite: bool) -> dict[str, Any]:
    """The record of the interrupted distillation in `output`, or a new one; `overwrite` removes an earlier one."""
    before = read_json(output / DISTILL_FILE)
    record = claim(output, asked, overwrite=overwrite, inputs=inputs, file=DISTILL_FILE)
    if before and overwrite:
        names = find_foreign(output, DISTILL_FILE)
        refuse_foreign(output, [name for name in names if not name.startswith((WORK, "part-"))])
        for path in output.glob("part-*"):
            path.unlink()
        shutil.rmtree(output / WORK, ignore_errors=True)
    return record


# --- The work: what a process needs to know, and the steps on a shard


@dataclass
class Job:
    """One distillation, which is sent to each process.

    Attributes:
        model: a folder: the teacher, or its export.
        output: the folder to write.
        corpus: the text.
        shards: its parts, each of which becomes a file.
        columns: names of source and target in the files.
        prefix: prefix of every source.
        asked: arguments of `distill`.
        teacher: the teacher and its tokenizer, in the first process alone.
    """

    model: str
    output: Path
    corpus: Corpus
    shards: list[Shard]
    columns: tuple[str, str]
    prefix: str
    asked: dict[str, Any]
    teacher: Any = None
    engine: tuple | None = None

    @classmethod
    def of(cls, model_path: str, output: Path, asked: dict[str, Any], *, skip_bad: bool) -> Job:
        """Read the teacher and the first rows of the text, and export the teacher if an engine runs it."""
        languages = asked["source_lang"], asked["target_lang"]
        model, tokenizer, prefix = load_teacher(model_path, languages)
        source, target = choose_columns(model_path, model, tokenizer, *languages)
        column = split_prefix(source)[0]
        names = column, split_language(target)[0] or ""
        if names[0] == names[1]:
            raise ValueError(f"source_lang and target_lang are both {names[0]!r}: give the translations another name")
        corpus = Corpus(
            asked["data"],
            source=column if asked["source_lang"] else None,
            target=None,
            default=(column, "" if asked["source_lang"] else names[1]),
            split=asked["split"],
            skip_bad=skip_bad,
        )
        corpus.target, corpus.prefix = None, ""
        return cls(model_path, output, corpus, corpus.shards(), names, prefix, asked, (model, tokenizer))

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"teacher": None, "engine": None}

    # Files

    def file(self, shard: Shard, end: str = "", folder: str = WORK) -> Path:
        """A file of a shard: its pairs, or what another ending says.

        `.npy` are hashes of the sources, `.first` which of them are the first with theirs, `.bad.json` the number of
        damaged lines, and `.json` the counts, by which the shard is complete.
        """
        return self.output / folder / f"part-{shard.number:05}{end or '.' + self.asked['format']}"

    # Steps

    def prepare(self) -> None:
        """Export the teacher, where an engine runs it; all processes load that."""
        folder = self.output / WORK / "teacher"
        folder.parent.mkdir(exist_ok=True)
        model, tokenizer = self.teacher
        if isinstance(model, PreTrainedModel) and model.device.type == "cpu" and find_spec(ENGINE):
            try:
                if not is_export(folder):
                    export(model, folder, tokenizer=tokenizer, to=ENGINE, quantization=QUANTIZATION)
                self.model = str(folder)
            except ValueError as error:
                logger.warning(f"the teacher translates by generate(), which takes five times as long: {error}")
        self.teacher = None

    def load(self) -> tuple[Engine, PreTrainedTokenizerBase]:
        """The teacher of this process and its tokenizer, which are loaded once."""
        if self.engine is None:
            model, tokenizer, _ = load_teacher(self.model, (self.asked["source_lang"], self.asked["target_lang"]))
            threads = torch.get_num_threads()
            self.engine = model if isinstance(model, Engine) else wrap_network(model, threads), tokenizer
        return self.engine

    def sources(self, shard: Shard) -> Iterator[str]:
        return (source for source, _ in self.corpus.parse(self.corpus.read_shard(shard)))

    def unsurveyed(self) -> list[int]:
        return [shard.number for shard in self.shards if not self.file(shard, ".bad.json").is_file()]

    def survey(self, number: int) -> None:
        """Read a shard to its end, which finds damaged lines, and write a hash of every source."""
        shard, before = self.shards[number], len(self.corpus.bad or ())
        digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in self.sources(shard)]
        with write_whole(self.file(shard, ".npy")) as file:
            np.save(file, np.frombuffer(b"".join(digests), np.uint64))
        write_json({"damaged": len(self.corpus.bad or ()) - before}, self.file(shard, ".bad.json"))

    def find_repeats(self) -> None:
        """Write, for each shard, which of its rows are the first with their source."""
        hashes = [np.load(self.file(shard, ".npy")) for shard in self.shards]
        if not sum(map(len, hashes)):
            raise ValueError(f"{self.corpus.name} holds no rows: expected at least one")
        first = np.zeros(sum(map(len, hashes)), bool)
        first[np.unique(np.concatenate(hashes), return_index=True)[1]] = True
        for shard, rows in zip(self.shards, np.split(first, np.cumsum([*map(len, hashes)])[:-1]), strict=True):
            with write_whole(self.file(shard, ".first")) as file:
                np.save(file, rows)

    def translate(self, number: int) -> None:
        """Write the pairs of a shard, then their counts, by which the shard is complete."""
        shard = self.shards[number]
        engine, tokenizer = self.load()
        dropped: Counter[str] = Counter()
        dropped["damaged"] = read_json(self.file(shard, ".bad.json"))["damaged"]
        texts, is_first_of = [], np.load(self.file(shard, ".first"))
        for text, is_first in zip(self.sources(shard), is_first_of, strict=True):
            if text.strip() and is_first:
                texts.append(text)
            else:
                dropped["repeated" if text.strip() else "empty"] += 1
        read = len(texts) + dropped.total()
        rows = []
        for start in range(0, len(texts), GROUP):
            group = texts[start : start + GROUP]
            prefixed = [put_prefix(self.prefix, text) for text in group]
            if start == number == 0:
                check_known(tokenizer(prefixed, verbose=False)["input_ids"], tokenizer)
            options = {name: self.asked[name] for name in ("batch_size", "num_beams", "max_new_tokens")}
            found = translate_scored(prefixed, engine, tokenizer, **options)
            for text, output in zip(group, found, strict=True):
                reason = find_fault(text, output)
                if reason:
                    dropped[reason] += 1
                else:
                    rows.append((text, output[0], round(output[1], 4)))
        write_rows(rows, self.columns, self.file(shard), self.asked["format"])
        write_json(
            {"read": read, "dropped": dict(dropped), "scores": [row[2] for row in rows]}, self.file(shard, ".json")
        )

    def publish(self, share: float | None) -> Distillation:
        """Move the shards into the folder, with the best share of all pairs, and return the result."""
        counts = [read_json(self.file(shard, ".json")) for shard in self.shards]
        scores = [np.asarray(count["scores"], np.float32) for count in counts]
        every = np.concatenate(scores)
        kept = np.ones(len(every), bool)
        if share is not None:
            kept[np.argsort(-every, kind="stable")[int(np.ceil(share * len(every))) :]] = False
        parts = np.split(kept, np.cumsum([*map(len, scores)])[:-1])
        for shard, part in zip(self.shards, parts, strict=True):
            target = self.file(shard, folder="")
            if part.any() and not target.is_file():
                rows = read_rows(self.file(shard), self.columns, self.asked["format"])
                write_rows([*compress(rows, part)], self.columns, target, self.asked["format"])
        dropped = sum((Counter(count["dropped"]) for count in counts), Counter())
        dropped["improbable"] = int((~kept).sum())
        return Distillation(
            str(self.output),
            rows=int(kept.sum()),
            read=sum(count["read"] for count in counts),
            dropped={reason: dropped[reason] for reason in REASONS if dropped[reason]},
            shards=sum(bool(part.any()) for part in parts),
            engine=ENGINE if is_export(self.model) else "transformers",
            log_probability=float(every[kept].mean()) if kept.any() else 0.0,
        )


def load_teacher(path: str, languages: tuple[str | None, str | None]) -> tuple[Any, PreTrainedTokenizerBase, str]:
    """As `load_translator`, on an accelerator if there is one."""
    return load_translator(path, device=_device(path), source=languages[0], target=languages[1], columns=True)


def _device(path: str | Path) -> str:
    """Where a teacher translates: an accelerator, if there is one; an export on the CPU."""
    if is_export(path) or not torch.accelerator.is_available():
        return "cpu"
    return str(torch.accelerator.current_accelerator())


Scored = tuple[str, float, bool]  # output, mean log p of a token, whether it is complete


def translate_scored(
    texts: Sequence[str], engine: Engine, tokenizer: PreTrainedTokenizerBase, batch_size: int, **generation: int | None
) -> list[Scored]:
    """The outputs for texts, in batches of similar length; those of too long texts are empty."""
    ids, limit = tokenizer(list(texts), verbose=False)["input_ids"], longest_input(engine, tokenizer)
    found: list[Scored] = [("", 0.0, False)] * len(ids)
    fitting = [index for index in range(len(ids)) if len(ids[index]) <= limit]
    order = sorted(fitting, key=lambda index: -len(ids[index]))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        scored = engine.generate_scored([ids[index] for index in chosen], **generation)
        outputs = tokenizer.batch_decode([tokens for tokens, _, _ in scored], skip_special_tokens=True)
        for index, text, (_, score, is_complete) in zip(chosen, outputs, scored, strict=True):
            found[index] = text, score, is_complete
    return found


def find_fault(text: str, output: Scored) -> str | None:
    """Why a pair is dropped; `None` where it is not."""
    translation, _, is_complete = output
    if not is_complete:
        return "too long"
    if not translation.strip():
        return "empty"
    return "copied" if " ".join(translation.split()) == " ".join(text.split()) else None


def write_rows(rows: Sequence[tuple[str, str, float]], columns: tuple[str, str], path: Path, kind: str) -> None:
    """Write pairs and scores as a shard that is complete or absent."""
    names = (*columns, SCORE)
    with write_whole(path) as file:
        if kind == "jsonl":
            for row in rows:
                file.write((json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) + "\n").encode())
        else:
            import pyarrow
            from pyarrow import parquet

            schema = pyarrow.schema(zip(names, (pyarrow.string(), pyarrow.string(), pyarrow.float32()), strict=True))
            content = [dict(zip(names, row, strict=True)) for row in rows]
            parquet.write_table(pyarrow.Table.from_pylist(content, schema), file)


def read_rows(path: Path, columns: tuple[str, str], kind: str) -> list[tuple[str, str, float]]:
    """The rows of `write_rows`."""
    names = (*columns, SCORE)
    if kind == "jsonl":
        rows = (json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line)
        return [tuple(row[name] for name in names) for row in rows]
    from pyarrow import parquet

    return [tuple(row[name] for name in names) for row in parquet.read_table(path).to_pylist()]


# --- Three ways to run the steps: in this process, in several, and on a Ray cluster

Run = Callable[[str, Sequence[int]], Iterator[int]]
_job: Job | None = None  # that of a process of a pool


def choose_way(job: Job, processes: int | None, address: str | None) -> Run:
    """How the steps are run. Raises `ValueError` where Ray is not installed or does not answer."""
    if address is not None:
        if processes is not None:
            raise OptionError(
                "processes", " is for this machine, but Ray divides the work: remove ", "processes", " or ", "ray"
            )
        connect(address)
        return partial(run_on_ray, job)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = min(processes or (cores if _device(job.model) == "cpu" else 1), max(1, len(job.shards)))
    return partial(run_here, job) if processes == 1 else partial(run_in_pool, job, processes)


def run_here(job: Job, step: str, numbers: Sequence[int]) -> Iterator[int]:
    """One shard after another."""
    for number in numbers:
        getattr(job, step)(number)
        yield number


def _begin(job: Job) -> None:
    global _job
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: the first one ends the others
    torch.set_num_threads(1)
    _job = job


def _work(step: str, number: int) -> int:
    getattr(_job, step)(number)
    return number


def run_in_pool(job: Job, processes: int, step: str, numbers: Sequence[int]) -> Iterator[int]:
    """As many shards at once as there are processes, which end with this one."""
    os.environ[PARENT] = str(os.getpid())  # for `end_with_parent`
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin, (job,))
    try:
        yield from (done.result() for done in as_completed(pool.submit(_work, step, number) for number in numbers))
    except BrokenProcessPool:
        raise OSError(
            "a process of the work was killed, probably because memory is full: the same command with fewer "
            "processes (--processes) resumes; complete shards stay"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
        os.environ.pop(PARENT, None)


def connect(address: str) -> None:
    """Connect to a Ray cluster, or start one on this machine for `auto`, where none runs."""
    if find_spec("ray") is None:
        raise ValueError("ray needs ray: pip install 'lightformers_hf[ray]'")
    if host := re.fullmatch(r"(?:ray://)?(.+):(\d+)", address):  # Ray itself tries for minutes
        try:
            socket.create_connection((host[1], int(host[2])), timeout=ANSWER).close()
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"no Ray cluster answers at {address}: start one by `ray start --head`, or give auto ({error})"
            ) from error
    import ray

    if ray.is_initialized():
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        ray.init(address, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        if address != "auto":
            raise ValueError(f"the Ray cluster at {address} cannot be used: {error}") from error
        ray.init(**options, include_dashboard=False)


class RayWorker:
    """An actor of Ray Data: the work of one process."""

    def __init__(self, job: Job, step: str):
        torch.set_num_threads(1)
        self.job, self.step = job, step

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Do the step for the shards of a batch."""
        for number in batch["shard"]:
            getattr(self.job, self.step)(int(number))
        return batch


def run_on_ray(job: Job, step: str, numbers: Sequence[int]) -> Iterator[int]:
    """Actors of Ray Data, one for each core of the cluster; a shard of an actor that dies is given to another."""
    if not numbers:
        return
    import ray

    cores = min(len(numbers), max(1, int(ray.cluster_resources().get("CPU", 1))))
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # it logs every step
    rows = ray.data.from_items([{"shard": number} for number in numbers], override_num_blocks=len(numbers))
    actors = {"compute": ray.data.ActorPoolStrategy(size=cores), "num_cpus": 1, "fn_constructor_args": (job, step)}
    for row in rows.map_batches(RayWorker, batch_size=1, **actors).iter_rows():
        yield int(row["shard"])
