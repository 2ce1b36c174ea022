"""What the notebooks share: a small German-English teacher, trained once by whichever comes first, and their style.

Set `LIGHTFORMERS_QUICK=1` to run a notebook in seconds, with models too small to translate: a check that it runs.
"""

import os
import sys
import tempfile
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import transformers
from datasets import disable_progress_bars
from huggingface_hub import constants
from huggingface_hub.utils import disable_progress_bars as disable_hub_bars
from IPython.display import Image
from tqdm.auto import tqdm

from lightformers_hf.demo.run import DemoSettings, write_corpus, write_teacher
from lightformers_hf.evaluation.plots import style
from lightformers_hf.files import atomic_output

sys.path.append(str(Path(__file__).parents[1] / "training"))  # whose scripts are imported: `analyze`
QUICK = bool(os.environ.get("LIGHTFORMERS_QUICK"))
CACHE = Path(os.environ.get("LIGHTFORMERS_NOTEBOOKS", "cache")) / ("quick" if QUICK else "full")
TINY = {"d_model": 32, "ffn_dim": 64, "heads": 2, "vocabulary": 400, "teacher_steps": 4, "recovery_steps": 3}


@dataclass(frozen=True)
class NotebookSettings(DemoSettings):
    """The demo's sizes, and those of the trainings and timings in the notebooks."""

    recovery_steps: int = 200
    recovery_learning_rate: float = 2e-3
    speed_sentences: int = 10
    speed_runs: int = 6


SETTINGS = (
    NotebookSettings(train_pairs=400, held_out_pairs=8, batch_size=8, speed_sentences=1, speed_runs=1, **TINY)
    if QUICK
    else NotebookSettings()
)

# Bars that fill say nothing on a page.
tqdm.__init__ = partialmethod(tqdm.__init__, disable=True)
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()
disable_progress_bars()
disable_hub_bars()
plt.rcParams.update(style() | {"figure.figsize": (10, 3.8), "figure.dpi": 80, "figure.constrained_layout.use": True})


def corpus() -> Path:
    """Folder with train.jsonl, validation.jsonl and test.jsonl; written on the first call."""
    folder = CACHE / "corpus"
    if not folder.exists():
        with atomic_output(folder) as temporary:
            write_corpus(temporary, SETTINGS)
    return folder


def teacher() -> Path:
    """Folder with the teacher, a Marian model; trained on the first call, in two to four minutes."""
    folder = CACHE / "teacher"
    if not folder.exists():
        with atomic_output(folder) as temporary:
            write_teacher(temporary, corpus(), SETTINGS)
    return folder


def picture(file: Path) -> Image:
    """A picture that a command of the package wrote."""
    return Image(filename=str(file), width=800)


def local_hub() -> tuple[Any, dict[str, str]]:
    """A small Hub in this process (the tests'), to which the client is turned, logged in as alice.

    Gives the server, which `hub.__exit__()` ends, and what another process needs in its environment to speak to it.
    """
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from hub_server import Hub

    hub = Hub().__enter__()
    home = tempfile.mkdtemp()
    settings = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "hf_alice", "HF_HOME": home}
    settings |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    # The client has read its environment already.
    os.environ["HF_TOKEN"] = settings["HF_TOKEN"]
    constants.ENDPOINT = hub.endpoint
    constants.HUGGINGFACE_CO_URL_TEMPLATE = f"{hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    constants.HF_HUB_CACHE = home
    constants.HF_HUB_DISABLE_XET, constants.HF_HUB_OFFLINE = True, False
    return hub, settings
