"""What tests share: a small Marian checkpoint, made from nothing in a few seconds."""

import gc
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
import torch
import warm
from tiny import make_tokenizer, marian_tokens, sizes

# On a busy machine anything takes long.
hypothesis.settings.register_profile("any machine", deadline=None, max_examples=50)
hypothesis.settings.load_profile("any machine")

GERMAN = """\
Ein Mann läuft über die Straße.
Zwei Hunde spielen im Schnee.
Die Frau liest ein Buch im Garten.
Ein kleines Mädchen isst einen roten Apfel.
Der Zug fährt um neun Uhr nach Berlin.
Viele Leute warten vor dem alten Haus.
Ein Junge springt in das kalte Wasser.
Morgen kaufen wir frisches Brot und Milch.
Der Hund schläft unter dem Tisch.
Drei Männer sitzen auf einer Bank und reden.""".splitlines()
ENGLISH = """\
A man is walking across the street.
Two dogs are playing in the snow.
The woman is reading a book in the garden.
A little girl is eating a red apple.
The train leaves for Berlin at nine o'clock.
Many people are waiting in front of the old house.
A boy is jumping into the cold water.
Tomorrow we will buy fresh bread and milk.
The dog is sleeping under the table.
Three men are sitting on a bench and talking.""".splitlines()


# transformers compiles patterns with every model it loads, more of them than Python keeps.
re._MAXCACHE = 10_000


def pytest_collection_finish() -> None:
    """What was imported stays: no collection of garbage, and each training run asks for some, looks at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def exact_products():
    """Passes of conversion in fp32 on every processor, because tests compare numbers; and less self-generated text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightformers_hf.conversion.calibration_text.SOURCES", 64)
        patch.setattr("lightformers_hf.conversion.workers.has_fast_bf16", lambda: False)
        yield


@pytest.fixture
def lightformers(monkeypatch, capfd):
    """Run the command as a shell does; gives exit code, stdout and stderr."""

    from lightformers_hf.cli import main

    def run(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "argv", ["lightformers", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main()
        return exit_.value.code or 0, *capfd.readouterr()

    return run


@pytest.fixture(scope="session")
def parallel_sentences() -> list[dict[str, str]]:
    """Ten sentences in German (`de`) and English (`en`)."""
    return [{"de": german, "en": english} for german, english in zip(GERMAN, ENGLISH, strict=True)]


@pytest.fixture(scope="session")
def tiny_marian(tmp_path_factory, parallel_sentences) -> Path:
    """A folder with a `MarianMTModel` (d_model 32, 2+2 layers, 4 heads) and its `MarianTokenizer`, de→en.

    Files and conventions are those of an opus-mt checkpoint: `</s>` is 0, `<pad>` comes last and starts the decoder.
    It is trained for seconds on the ten sentences, so that outputs depend on the input and end by themselves.
    """
    from transformers import GenerationConfig, MarianConfig, MarianMTModel

    folder = tmp_path_factory.mktemp("tiny-marian")
    sentences = [sentence for pair in parallel_sentences for sentence in pair.values()]
    tokenizer = make_tokenizer(folder, sentences)
    pad = tokenizer.pad_token_id
    torch.manual_seed(0)
    fields = sizes(32, layers=2, heads=4, max_position_embeddings=64) | marian_tokens(pad + 1)
    model = MarianMTModel(MarianConfig(**fields, activation_function="swish", scale_embedding=True, dropout=0.0))
    model.generation_config = GenerationConfig(
        bad_words_ids=[[pad]], decoder_start_token_id=pad, eos_token_id=0, forced_eos_token_id=0, pad_token_id=pad,
        max_length=48, num_beams=2,
    )  # fmt: skip
    batch = tokenizer(GERMAN, text_target=ENGLISH, padding=True, return_tensors="pt")
    batch["labels"][batch["labels"] == pad] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(150):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    return folder


def make_mbart(folder: Path, parallel_sentences, **languages) -> Path:
    """An mBART of random weights with a tokenizer of whole words, mBART-25's where languages are given."""
    from transformers import MBart50Tokenizer, MBartConfig, MBartForConditionalGeneration, MBartTokenizer, set_seed

    words = sorted({f"▁{word}" for pair in parallel_sentences for text in pair.values() for word in text.split()})
    vocab = [(token, -1.0 - i) for i, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *words])]
    tokenizer = MBartTokenizer(vocab=vocab, **languages) if languages else MBart50Tokenizer(vocab=vocab)
    fields = sizes(16, ffn=16, max_position_embeddings=64, vocab_size=len(tokenizer))
    first = tokenizer.convert_tokens_to_ids(languages.get("tgt_lang", "</s>"))
    config = MBartConfig(**fields, init_std=0.5, decoder_start_token_id=first)
    set_seed(0)
    MBartForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_mbart50(tmp_path_factory, parallel_sentences) -> Path:
    """A folder with a tiny mBART-50."""
    return make_mbart(tmp_path_factory.mktemp("tiny-mbart50"), parallel_sentences)


@pytest.fixture(scope="session")
def tiny_mbart25(tmp_path_factory, parallel_sentences) -> Path:
    """A folder with a tiny mBART-25, whose codes stand behind the text."""
    return make_mbart(tmp_path_factory.mktemp("tiny-mbart25"), parallel_sentences, src_lang="en_XX", tgt_lang="ro_RO")


@pytest.fixture(scope="session")
def warm_server(tmp_path_factory):
    """The program that stands in Python's place, with a server behind it: see `warm`."""
    folder = tmp_path_factory.mktemp("warm")
    address, program = folder / "server", folder / "python"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, warm.__file__, str(address)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, env=environment, **pipes) as server:
        assert server.stdout.readline() == "ready\n"
        warm.write_client(program, address)
        yield program


@pytest.fixture
def warm_python(warm_server, monkeypatch):
    """Programs that are started with `sys.executable` have their imports behind them: see `warm`."""
    monkeypatch.setattr(sys, "executable", str(warm_server))
    monkeypatch.setenv("PYTHON_EXEC", str(warm_server))  # torch's launcher


@pytest.fixture
def browser():
    """A headless Chromium: one that is installed, or that `playwright install chromium` brought. Else a skip."""
    from playwright.sync_api import sync_playwright

    # One a test, and no longer: while it runs, the thread has an event loop, and nobody else can start one.
    with sync_playwright() as playwright:
        names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
        found = next(filter(None, map(shutil.which, names)), playwright.chromium.executable_path)
        if not Path(found).exists():
            pytest.skip("no browser: apt-get install chromium, or playwright install chromium")
        with playwright.chromium.launch(executable_path=found) as running:
            yield running
