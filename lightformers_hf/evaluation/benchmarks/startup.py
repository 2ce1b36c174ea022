"""What a command costs before it does anything: processor time of a whole process, beside the plain program's.

Both are processes of their own, run in turn, and what is compared is their user and system time: what else the machine
does hardly matters to it. The medians of one machine compare with each other, not with those of another.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import sentencepiece
from tqdm.auto import tqdm
from transformers import MarianConfig, MarianMTModel, MarianTokenizer

from ...loading import hide_bars, resolve_source
from ..speed import child_environment

if TYPE_CHECKING:
    from rich.table import Table

SENTENCE = "Ein Hund läuft durch den Schnee."
COMMAND = "import sys; sys.argv[0] = 'lightformers'; from lightformers_hf.cli import main; main()"
# What a user of transformers alone would write to translate a line.
TRANSLATE = """\
import sys
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=False)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=False)
batch = tokenizer([line.strip() for line in sys.stdin], return_tensors="pt", padding=True)
print(*tokenizer.batch_decode(model.generate(**batch, max_new_tokens=8), skip_special_tokens=True), sep="\\n")
"""
IMPORT = "import transformers"
MARIAN = "from transformers import MarianMTModel"


@dataclass(frozen=True)
class StartupCase:
    """One command beside a plain program.

    Attributes:
        name: what a table calls it.
        command: words behind Python's own, code with `-c` or the command line's.
        plain: the same of the program that it is compared with.
        plain_name: what a table calls that.
        most: the ratio aimed at.
        variables: of the command's environment.
        code: the exit status that the command has to end with.
    """

    name: str
    command: Sequence[str]
    plain: Sequence[str]
    plain_name: str
    most: float
    variables: tuple[tuple[str, str], ...] = ()
    code: int = 0


@dataclass(frozen=True)
class StartupRatio:
    """What was measured of a case: processor seconds of every run.

    Attributes:
        name, plain_name, most: of the case.
        runs, plain_runs: seconds (user and system) of the command and of the plain program.
    """

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
    cases = [
        StartupCase(name, ["-c", COMMAND, *typed.split()], ["-c", IMPORT], IMPORT, 0.3, code=2 * ("wrong" in name))
        for name, typed in words.items()
    ]
    tab = (
        ("_LIGHTFORMERS_COMPLETE", "bash_complete"),
        ("COMP_WORDS", "lightformers convert --enc"),
        ("COMP_CWORD", "2"),
    )
    import_both = "import lightformers_hf; from transformers import AutoModelForSeq2SeqLM"
    return [
        *cases,
        StartupCase("TAB", ["-c", COMMAND], ["-c", IMPORT], IMPORT, 0.3, variables=tab),
        StartupCase(
            "import lightformers_hf", ["-c", "import lightformers_hf"], ["-c", MARIAN], "import MarianMTModel", 1.05
        ),
        StartupCase("the same, and an Auto class", ["-c", import_both], ["-c", MARIAN], "import MarianMTModel", 1.05),
        StartupCase(
            "lightformers translate",
            ["-c", COMMAND, "translate", model, "--max-new-tokens", "8"],
            ["-c", TRANSLATE, model],
            "the same by transformers",
            1.2,
        ),
    ]


def measure_startup(model: str | None = None, *, runs: int = 5, progress: bool = False) -> list[StartupRatio]:
    """Run every case and its plain program in turn.

    Args:
        model: folder of a checkpoint to translate with; `None` makes a tiny one up.
        runs: of each.

    Raises:
        ValueError: a process ended otherwise than it should.
        FileNotFoundError: there is no such model.
    """
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            model = str(make_tiny_marian(Path(folder)))
        cases = startup_cases(str(resolve_source(model)))
        seconds: dict[tuple[str, bool], list[float]] = {}
        with tqdm(total=runs * len(cases), unit="pair", disable=not progress) as bar:
            for _ in range(runs):
                for case in cases:
                    for plain, words in ((False, case.command), (True, case.plain)):
                        variables = {} if plain else dict(case.variables)
                        used = processor_seconds(words, variables, 0 if plain else case.code)
                        seconds.setdefault((case.name, plain), []).append(used)
                    bar.update()
    return [
        StartupRatio(case.name, case.plain_name, case.most, seconds[case.name, False], seconds[case.name, True])
        for case in cases
    ]


def processor_seconds(words: Sequence[str], variables: dict[str, str], code: int) -> float:
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
    pieces = str(folder / "pieces")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([SENTENCE, SENTENCE.swapcase()]),
        model_prefix=pieces,
        vocab_size=60,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    model = sentencepiece.SentencePieceProcessor(model_file=f"{pieces}.model")
    words = [model.id_to_piece(i) for i in range(model.get_piece_size())]
    words = ["</s>", "<unk>", *(word for word in words if word not in ("<s>", "</s>", "<unk>")), "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}), encoding="utf-8")
    spm, vocab = f"{pieces}.model", str(folder / "vocab.json")
    tokenizer = MarianTokenizer(source_spm=spm, target_spm=spm, vocab=vocab, source_lang="de", target_lang="en")
    pad = len(words) - 1
    config = MarianConfig(
        vocab_size=len(words),
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_position_embeddings=64,
        pad_token_id=pad,
        decoder_start_token_id=pad,
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
    from rich.table import Table

    table = Table(title="processor time of a whole process", title_justify="left")
    table.add_column("command")
    table.add_column("beside")
    for heading in ("ratio", "aim"):
        table.add_column(heading, justify="right")
    for ratio in ratios:
        table.add_row(ratio.name, ratio.plain_name, f"{ratio.ratio:.2f}x", f"{ratio.most:g}x")
    return table
