"""The documentation's commands and snippets, run page by page as they stand there: only some numbers are smaller.

The README's are in test_readme.py. Everything runs in this process: to start Python takes longer than most commands.
"""

import contextlib
import dataclasses
import html
import io
import json
import pkgutil
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from conversion.vocabulary.checkpoints import make_checkpoint
from speech import make_whisper, texts, write_speech
from transformers import PreTrainedConfig

from lightformers_hf import (
    LightFormerConfig,
    LightFormerSpeechConfig,
    PartialFormerConfig,
    SubformerConfig,
    cli,
    convert,
)
from lightformers_hf.models.configuration_lightformer import FactorizedConfig

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_python")]
ROOT = Path(__file__).parents[1]
PAGES = sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))

# What is made smaller, so that a page takes seconds on a checkpoint of two layers and ten sentence pairs.
SMALLER = {
    r"reproduce\.py \w+": "reproduce.py --list",  # hours
    r"--minutes \d+": "--minutes 0.02",
    r"--max-steps \d+": "--max-steps 2 --logging-steps 1 --max-source-length 48 --max-target-length 48",
    r"--(warmup|eval|save)-steps \d+": r"--\1-steps 1",
    r"--max-tokens \d+": "--max-tokens 200",
    r"compare_starts.py": "compare_starts.py --steps 1 2",
    r"--output-dir tested": "--output-dir tested --max-source-length 48 --max-target-length 48",
    r"--ratios 2 4": "--ratios 2 --methods paper --trainings",
    r"fc1=64": "fc1=8",
    r"--vocab-size 8000": "--vocab-size 90",
    r"--encoder-groups 3": "--encoder-groups 1",
    r"--params \w+|--size \w+": "--params 20k",
    r"lightformers (plan|convert)": r"lightformers \1 --calibration-samples 4",
    r"--vocabulary-size 16000": "--vocabulary-size 250",
    r"--json results.json": "--no-speed --json results.json",
    r"--cores 1 --batch-size 1": "--cores 1 --batch-size 1 --num-beams 1 --runs 1 --sentences 1 --new-tokens 2 "
    "--engine transformers --engine ctranslate2",
    r"--shortlist train.jsonl --cores": "--max-samples 2 --shortlist train.jsonl --cores",
}
# Commands that need a network, several machines or minutes are only parsed.
PARSED_ONLY = re.compile("lightformers (push|compare|demo)|torchrun|accelerate launch")


def blocks(page):
    """(language, title, content) of every fenced block."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"^```(\w+)(?: title=\"(.+?)\")?\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def commands(block):
    """The commands of a block, one a line."""
    return [line for line in re.sub(r"\\\n\s*", "", block).splitlines() if line.strip()]


@pytest.fixture(scope="session")
def tiny_recovered(tmp_path_factory, tiny_marian):
    """What the tutorial ends with, and other pages begin with."""
    folder = tmp_path_factory.mktemp("tiny-recovered") / "recovered"
    convert(tiny_marian, folder, rank=8, progress=False)
    return folder


@pytest.fixture(scope="session")
def others(tmp_path_factory):
    """A folder with checkpoints of other families: random weights, and tokenizers that were trained."""
    folder = tmp_path_factory.mktemp("others")
    for family in ("nllb", "bart", "t5"):
        make_checkpoint(family, folder / family, positions=64)
    return folder


@pytest.fixture
def workplace(tmp_path, monkeypatch, tiny_marian, others, tiny_recovered, parallel_sentences):
    """A folder with what the pages assume, which is the working directory."""
    shutil.copytree(others, tmp_path, dirs_exist_ok=True)
    shutil.copytree(tiny_marian, tmp_path / "opus-mt-de-en")
    for name in ("light", "recovered"):
        shutil.copytree(tiny_recovered, tmp_path / name)
    shutil.copytree(tiny_marian, tmp_path / "demo-output" / "teacher")
    (tmp_path / "demo-output" / "corpus").mkdir()
    (tmp_path / "training").symlink_to(ROOT / "training")
    more = [*parallel_sentences, *(pair | {"de": f"{pair['de']} {pair['de']}"} for pair in parallel_sentences)]
    for part, pairs in {"train": more, "validation": parallel_sentences, "test": parallel_sentences}.items():
        lines = [json.dumps({"translation": pair}) + "\n" for pair in pairs]
        for folder in (tmp_path, tmp_path / "demo-output" / "corpus"):
            (folder / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")
    lines = [json.dumps({"document": pair["de"], "summary": pair["en"]}) + "\n" for pair in parallel_sentences]
    (tmp_path / "articles.jsonl").write_text("".join(lines), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "training"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def run(command, monkeypatch, smaller=SMALLER, parsed_only=PARSED_ONLY):
    """Run one command of a page; an unknown one fails, and so does one that ends with an error."""
    for long, short in smaller.items():
        command = re.sub(long, short, command)
    spoken, _, piped = command.partition(" | ")
    if piped:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{shlex.split(spoken)[1]}\n".encode())))
    words = shlex.split(piped or command, comments=True)
    monkeypatch.setattr(sys, "argv", words[1:] if words[0] == "python" else words)
    said, code = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), None
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            if parsed_only and parsed_only.match(command):
                parse(words, monkeypatch)
            elif words[0] == "lightformers":
                cli.main()
            elif words[0] == "python":
                runpy.run_path(words[1], run_name="__main__")
            else:
                pytest.fail(f"no test knows how to run: {command}")
        except SystemExit as end:
            code = end.code
    said.seek(0)
    assert not code, f"{command}\n{said.read()}"


def parse(words, monkeypatch):
    """Check that the options of a command exist, of its launcher, too."""
    if words[0] == "lightformers":
        group = cli.app
        with group.make_context("lightformers", words[1:]) as context:
            name, command, arguments = group.resolve_command(context, words[1:])
            command.make_context(name, arguments, parent=context)
        return
    if words[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        launched = get_args_parser().parse_args(words[1:])
    else:
        from accelerate.commands.launch import launch_command_parser

        launched = launch_command_parser().parse_args(words[2:])
    import seq2seq

    ran = []
    monkeypatch.setattr(seq2seq, "run", lambda *arguments: ran.append(arguments))
    monkeypatch.setattr(sys, "argv", [launched.training_script, *launched.training_script_args])
    runpy.run_path(launched.training_script, run_name="__main__")
    assert ran, "the script did not reach its run"


def runs_something(page):
    """Examples of extending/ are run by test_contributing.py."""
    return not page.startswith("extending/") and any(language in ("bash", "python") for language, _, _ in blocks(page))


@pytest.mark.parametrize("page", filter(runs_something, PAGES))
def test_a_page_can_be_followed(page, workplace, monkeypatch):
    if page == "how-to/lora.md":
        pytest.importorskip("peft", reason="needs peft")
    if page == "tutorial.md":  # which makes them itself
        shutil.rmtree("light")
        shutil.rmtree("recovered")
    if page == "how-to/compress-whisper.md":
        make_whisper(Path("whisper-base"))
        for folder in ("speech", "validation"):
            write_speech(Path(folder), texts(20))
    names = {}
    for language, title, content in blocks(page):
        if title:
            Path(title).write_text(content, encoding="utf-8")
        elif language == "bash":
            for command in commands(content):
                run(command, monkeypatch)
        elif language == "python":
            exec(compile(content, page, "exec"), names)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("lightformers plan opus-mt-de-en --ratoi 2", "ratoi"),
        ("lightformers plan nowhere --ratio 2", "nowhere"),
        ("lightformers push recovered you/light --privat", "privat"),
        ("torchrun --nnodes 2 training/run_translation.py --learning-rat 1", "learning-rat"),
        ("torchrun --nods 2 training/run_translation.py", "nods"),
        ("rm -r light", "no test knows"),
    ],
)
def test_a_wrong_command_is_noticed(workplace, monkeypatch, wrong, message):
    with pytest.raises((Exception, pytest.fail.Exception), match=message):
        run(wrong, monkeypatch)


REFERENCE = re.compile(r"^::: (\S+)(?:\n    options: \{members: \[([^\]]*)\])?", re.MULTILINE)


def test_the_table_of_claims_is_complete():
    """Each claim has a verdict, recipes and, if it was measured, a figure."""
    rows = json.loads((ROOT / "docs/results/data/claims.json").read_text(encoding="utf-8"))["rows"]
    assert {row["paper"] for row in rows} == {"LightFormer", "Subformer", "PartialFormer"}
    for row in rows:
        assert row["agrees"] in ("yes", "in part", "no", "undecided", "not measured"), row
        assert row["recipes"], row
        assert all((ROOT / f"training/recipes/{recipe}.yaml").is_file() for recipe in row["recipes"]), row
        assert (row["agrees"] == "not measured") == (row["here"] is None), row


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("reference/")])
def test_what_the_reference_names_exists(page):
    """A member that is gone would only be missing from the page."""
    for name, members in REFERENCE.findall((ROOT / "docs" / page).read_text(encoding="utf-8")):
        documented = pkgutil.resolve_name(name)
        missing = [member for member in re.findall(r"\w+", members) if not hasattr(documented, member)]
        assert not missing, f"{page}: {name} has no {', '.join(missing)}"


LINKING = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "RESULTS.md", "CHANGELOG.md")]
LINKING += [ROOT / "docs" / page for page in PAGES if "templates" not in page]


def anchors(path):
    """The anchors that GitHub gives the headings of a page."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    names = [re.sub(r"\]\([^)]*\)", "", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", name).replace(" ", "-") for name in names}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_work_on_github(page):
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(([^)\s]+)\)|(?:href|src|srcset)=\"([^\"]+)\"", text)
    for link in filter(lambda link: "://" not in link, map("".join, links)):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{link}: no such file"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The pages, as `make docs` builds them."""
    mkdocs = pytest.importorskip("mkdocs.commands.build")
    pytest.importorskip("mkdocstrings")
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("docs") / "site"
    mkdocs.build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder)))
    return folder


def test_the_site_builds(site):
    commands = (site / "reference/cli.html").read_text(encoding="utf-8")
    assert "lightformers convert" in commands
    assert "narrow: fewer neurons, narrower heads" in html.unescape(commands)
    assert "<math" in (site / "explanation/weighting.html").read_text(encoding="utf-8")
    python = (site / "reference/api.html").read_text(encoding="utf-8")
    assert "FileExistsError" in python
    assert (site / "search/search_index.js").is_file()  # what searches without a server
    assert 'src="pictures/compression.png"' in (site / "results.html").read_text(encoding="utf-8")
    fields = (site / "reference/configurations.html").read_text(encoding="utf-8")
    for config in (LightFormerConfig, LightFormerSpeechConfig, SubformerConfig, PartialFormerConfig):
        own = {field.name for field in dataclasses.fields(config)}
        own -= {field.name for field in dataclasses.fields(PreTrainedConfig)} - {*vars(FactorizedConfig)}
        assert not {name for name in own if f"<code>{name}</code>" not in fields}
    index = (site / "index.html").read_text(encoding="utf-8")
    assert not re.findall(r"(?:src|rel=.stylesheet. href)=.https?:[^>]*", index)  # nothing is loaded from elsewhere


@pytest.mark.parametrize("width", [390, 1280])
def test_no_copy_sign_lies_on_a_command(site, browser, width):
    page = browser.new_page(viewport={"width": width, "height": 844})
    page.goto((site / "tutorial.html").as_uri())
    page.wait_for_selector(".md-code__button")
    blocks = page.evaluate("""[...document.querySelectorAll("pre:has(button)")].map(block => ({
        text: block.querySelector("code").getBoundingClientRect().right,
        sign: block.querySelector("button").getBoundingClientRect().left,
        command: block.parentElement.matches(".language-bash"),
        hidden: block.querySelector("code").scrollWidth - block.querySelector("code").clientWidth}))""")
    assert len(blocks) > 5
    assert all(block["text"] <= block["sign"] for block in blocks)
    assert not [block for block in blocks if block["command"] and block["hidden"]]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
