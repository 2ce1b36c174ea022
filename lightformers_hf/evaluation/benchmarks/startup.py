"""Start-up costs of commands: processor time of a whole process, beside that of the plain program.

The processes run in turn. User and system time hardly depend on what else the machine does.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import sentencepiece
from rich.table import Table
from tqdm.auto import tqdm
from transformers import MarianConfig, MarianMTModel, MarianTokenizer

from ...loading import hide_bars, resolve_source
from ..speed import child_environment

SENTENCE = "Ein Hund läuft durch den Schnee."
COMMAND = "import sys; sys.argv[0] = 'lightformers'; from lightformers_hf.cli import main; main()"
# Program that translates a line with transformers alone.
TRANSLATE = """\
import sys
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=False)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=False)
batch = tokenizer([line.strip() for line in sys.stdin], return_tensors="pt", padding=True)
print(*tokenizer.batch_decode(model.generate(**batch, max_new_tokens=8), skip_special_tokens=True), sep="\\n")
"""
IMPORT, MARIAN = "import transformers", "from transformers import MarianMTModel"
TAB = {"_LIGHTFORMERS_COMPLETE": "bash_complete", "COMP_WORDS": "lightformers convert --enc", "COMP_CWORD": "2"}


class StartupCase(NamedTuple):
    """One command beside a plain program: arguments of Python for both, their names, and the ratio aimed at."""

    name: str
    command: Sequence[str]
    plain: Sequence[str]
    plain_name: str
    most: float
    variables: Mapping[str, str] = {}  # of the command's environment
    code: int = 0  # the exit status that the command has to end with


@dataclass(frozen=True)
class StartupRatio:
    """Measurements of a case: processor seconds (user and system) of every run of both programs."""

    name: str
    plain_name: str
    most: float
    runs: list[float]
    plain_runs: list[float]

    @property
    def ratio(self) -> float:
        """Median of the command / median of the plain program."""
        return statistics.median(self.runs) / statistics.median(self.plain_runs)

    def to_dict(self) -> dict:
        """Everything as JSON holds it."""
        return asdict(self) | {"ratio": self.ratio}


def startup_cases(model: str) -> list[StartupCase]:
    """All commands that answer at once, the import of the package, and the translation of one sentence by `model`."""
    words = {"lightformers --help": "--help", "lightformers convert --help": "convert --help"}
    words |= {"lightformers --version": "--version", "a wrong option": "convert a b --no-such-option"}
    plain, marian = (["-c", IMPORT], IMPORT, 0.3), (["-c", MARIAN], "import MarianMTModel", 1.05)
    imports = {"import lightformers_hf": "import lightformers_hf"}
    imports["the same, and an Auto class"] = "import lightformers_hf; from transformers import AutoModelForSeq2SeqLM"
    translate = ["-c", COMMAND, "translate", model, "--max-new-tokens", "8"]
    return [
        *(
            StartupCase(name, ["-c", COMMAND, *typed.split()], *plain, code=2 * ("wrong" in name))
            for name, typed in words.items()
        ),
        StartupCase("TAB", ["-c", COMMAND], *plain, variables=TAB),
        *(StartupCase(name, ["-c", code], *marian) for name, code in imports.items()),
        StartupCase("lightformers translate", translate, ["-c", TRANSLATE, model], "the same by transformers", 1.2),
    ]


def measure_startup(model: str | None = None, *, runs: int = 5, progress: bool = False) -> list[StartupRatio]:
    """Run every case and its plain program in turn.

    Args:
        model: folder of a checkpoint to translate with; `None` makes a tiny one up.

    Raises:
        ValueError: a process ended otherwise than it should.
        FileNotFoundError: there is no such model.
    """
    with tempfile.TemporaryDirectory() as folder:
        cases = startup_cases(str(resolve_source(model or make_tiny_marian(Path(folder)))))
        ratios = [StartupRatio(case.name, case.plain_name, case.most, [], []) for case in cases]
        with tqdm(total=runs * len(cases), unit="pair", disable=not progress) as bar:
            for _ in range(runs):
                for case, ratio in zip(cases, ratios, strict=True):
                    ratio.runs.append(processor_seconds(case.command, case.variables, case.code))
                    ratio.plain_runs.append(processor_seconds(case.plain, {}, 0))
                    bar.update()
    return ratios


def processor_seconds(words: Sequence[str], variables: Mapping[str, str], code: int) -> float:
    """User and system time of a Python process that gets one sentence on stdin.

    Raises:
        ValueError: it did not end with the exit status `code`.
    """
    before = _children_seconds()
    done = subprocess.run(
        [sys.executable, *words],
        env=child_environment(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", **variables),
        input=f"{SENTENCE}\n".encode(),
        capture_output=True,
        check=False,
    )
    seconds = _children_seconds() - before
    if done.returncode != code:
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ValueError(f"{' '.join(words[2:]) or words[-1]} ended with {done.returncode}, expected {code}: {said}")
    return seconds


def _children_seconds() -> float:
    """User and system time of the processes that have ended, in microseconds' steps (`os.times` counts hundredths)."""
    import resource  # not on Windows

    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def make_tiny_marian(folder: Path) -> Path:
    """A Marian checkpoint of random weights, small enough that loading it costs nothing beside the imports."""
    spm, vocab = str(folder / "pieces.model"), folder / "vocab.json"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([SENTENCE, SENTENCE.swapcase()]),
        model_prefix=spm.removesuffix(".model"),
        vocab_size=60,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    model = sentencepiece.SentencePieceProcessor(model_file=spm)
    words = [model.id_to_piece(i) for i in range(model.get_piece_size())]
    words = ["</s>", "<unk>", *(word for word in words if word not in ("<s>", "</s>", "<unk>")), "<pad>"]
    vocab.write_text(json.dumps({word: i for i, word in enumerate(words)}), encoding="utf-8")
    tokenizer = MarianTokenizer(source_spm=spm, target_spm=spm, vocab=str(vocab), source_lang="de", target_lang="en")
    sizes = {"layers": 1, "attention_heads": 2, "ffn_dim": 16}
    ids = {"pad_token_id": len(words) - 1, "decoder_start_token_id": len(words) - 1}
    config = MarianConfig(
        **{f"{stack}_{name}": size for name, size in sizes.items() for stack in ("encoder", "decoder")},
        **ids,
        vocab_size=len(words),
        d_model=16,
        max_position_embeddings=64,
        eos_token_id=0,
        forced_eos_token_id=0,
    )
    network = MarianMTModel(config)
    network.generation_config.update(bad_words_ids=None, num_beams=1)
    with hide_bars():
        for part in (network, tokenizer):
            part.save_pretrained(folder / "model")
    return folder / "model"


def startup_table(ratios: list[StartupRatio]) -> Table:
    """The ratios as a table."""
    table = Table(title="processor time of a whole process", title_justify="left")
    for heading in ("command", "beside", "ratio", "aim"):
        table.add_column(heading, justify="right" if heading in ("ratio", "aim") else "left")
    for ratio in ratios:
        table.add_row(ratio.name, ratio.plain_name, f"{ratio.ratio:.2f}x", f"{ratio.most:g}x")
    return table
