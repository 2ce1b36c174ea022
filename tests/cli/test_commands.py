"""The command line: help that teaches, one message and a non-zero exit code for what cannot be done.

What holds for every command is tested of every command there is: a new one without its line below fails.
"""

import dataclasses
import errno
import importlib.metadata
import inspect
import json
import logging
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import click
import pytest
from huggingface_hub import constants
from test_api import measure_nothing
from test_hub import hub  # noqa: F401, a fixture

import lightformers_hf
from lightformers_hf import CompressionOptions, cli, convert
from lightformers_hf.cli import framework
from lightformers_hf.evaluation import comparison
from lightformers_hf.hub import Push


def every_command(group, *names):
    """(words, command) of every command, those of sub-groups too."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from every_command(command, *names, name)
        else:
            yield " ".join((*names, name)), command


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2])}
GROUP = cli.app
COMMANDS = dict(every_command(GROUP))
# A filter and a server. All others answer.
WITHOUT_ANSWER = {"translate", "compare"}
# Words behind a command's name with which it works in seconds, in the folder that `workplace` makes.
GOOD = {
    "plan": "dense --rank 8 --method paper",
    "convert": "dense converted --rank 8 --method paper",
    "compress": "dense small --data many.jsonl --ratio 2 --minutes 0.01",
    "recover": "light recovered --teacher dense --data test.jsonl --minutes 0.01",
    "distill": "dense test.jsonl distilled --num-beams 1 --max-new-tokens 5 --processes 1",
    "export": "light exported --to onnx",
    "web": "light page --compare dense",
    "evaluate": "light --teacher dense --data test.jsonl --no-speed",
    "push": "light light",
    "report": "light --output page.html",
    "demo": "demo",
    "benchmark engines": "dense light --engine transformers --cores 1 --batch-size 1 --num-beams 1 --runs 1 "
    "--sentences 1 --new-tokens 2",
}
# Words of the right form that ask for what is not there, and of what the message speaks.
BAD = {
    "plan": ("nowhere", "nowhere"), "convert": ("dense out --encoder-groups 4", "--encoder-groups is 4"),
    "compress": ("dense out --data nowhere.jsonl", "nowhere.jsonl"),
    "recover": ("light out --teacher dense --data nowhere.jsonl", "nowhere.jsonl"),
    "distill": ("dense nowhere.jsonl out", "nowhere.jsonl"),
    "export": ("light out --to tensorrt", "tensorrt"), "web": ("nowhere page", "nowhere"),
    "translate": ("light nowhere.de", "nowhere.de"),
    "evaluate": ("light --data nowhere.jsonl", "nowhere.jsonl"), "push": ("nowhere light", "nowhere"),
    "report": ("nowhere", "nowhere"),
    "compare": ("nowhere light", "nowhere"), "demo": ("test.jsonl", "test.jsonl is a file"),
    "benchmark engines": ("nowhere --engine transformers", "nowhere"),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory, tiny_marian, parallel_sentences):
    """A folder with a checkpoint `dense`, a smaller one `light`, and `test.jsonl`."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(tiny_marian, folder / "dense")
    convert(folder / "dense", folder / "light", rank=8, method="paper", progress=False)
    lines = [json.dumps({"translation": pair}) + "\n" for pair in parallel_sentences]
    (folder / "test.jsonl").write_text("".join(lines), encoding="utf-8")
    rows = [
        {"translation": pair | {"de": f"{number} {pair['de']}"}} for number in (1, 2) for pair in parallel_sentences
    ]
    (folder / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


@pytest.fixture
def workplace(models, tmp_path, monkeypatch):
    """A copy of it, which is the working directory."""
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def parse(words):
    """Check that a command and its options exist, and that no argument is missing."""
    command, context = GROUP, None
    while hasattr(command, "commands"):
        context = command.make_context(command.name or "lightformers", words, parent=context)
        _, command, words = command.resolve_command(context, words)
    command.make_context(command.name, words, parent=context)


@pytest.mark.parametrize("words", ["", "benchmark", *COMMANDS])
def test_help_has_examples_that_work(lightformers, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = lightformers(*words.split(), "--help")
    assert (code, err) == (0, "")
    examples = re.findall(r"lightformers [a-z]+ .+?(?= *$)", out.partition("Example")[2], re.MULTILINE)
    assert examples
    for example in examples:
        assert example.startswith(f"lightformers {words}".strip())
        parse(shlex.split(example)[1:])


@pytest.mark.parametrize("words", COMMANDS)
def test_all_commands_have_the_same_options(words):
    names = {name for parameter in COMMANDS[words].params for name in parameter.opts}
    assert {"--quiet", "-q", "--verbose", "-v"} <= names
    assert ("--json" in names) == (words not in WITHOUT_ANSWER)


@pytest.mark.parametrize("words", COMMANDS)
def test_unknown_words_end_with_2(lightformers, words):
    code, out, err = lightformers(*words.split(), "--no-such-option")
    assert (code, out) == (2, "")
    assert "--no-such-option" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("words", COMMANDS)
def test_what_the_user_can_mend_is_one_message_and_ends_with_1(lightformers, workplace, monkeypatch, words):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    arguments, message = BAD[words]
    before = sorted(workplace.rglob("*"))
    code, out, err = lightformers(*words.split(), *shlex.split(arguments), "--quiet")
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert message in err
    assert len(err.splitlines()) == 1
    assert sorted(workplace.rglob("*")) == before


@pytest.mark.parametrize("words", sorted(COMMANDS.keys() - WITHOUT_ANSWER))
def test_json_is_all_there_is_on_stdout(lightformers, workplace, hub, monkeypatch, words):  # noqa: F811

    def quick_demo(output, settings, **options):
        print("1/7 Write a corpus")
        return {"models": {}}

    monkeypatch.setattr("lightformers_hf.demo.run.run_demo", quick_demo)
    made = Push("small", "url", "0")  # any result: `tests/workflows` makes that of a compression
    monkeypatch.setattr("lightformers_hf.workflows.compress.compress", lambda *_, **__: made)
    names = ("@huggingface/transformers", "onnxruntime-web")
    monkeypatch.setattr("lightformers_hf.engines.web.vendor", lambda _: dict.fromkeys(names, "1.0"))
    monkeypatch.setattr(comparison, "_measure_speed", measure_nothing)  # which takes a process of its own
    command = [*words.split(), *shlex.split(GOOD[words])]
    code, out, err = lightformers(*command, "--json", "-")
    assert code == 0, err
    found = json.loads(out)
    assert found

    overwrite = ["--overwrite"] if words in ("compress", "convert", "distill", "recover", "export", "web") else []
    code, out, err = lightformers(*command, *overwrite, "--json", "found.json", "--quiet")
    assert (code, out, err) == (0, "", "")
    again = json.loads((workplace / "found.json").read_text(encoding="utf-8"))
    assert type(again) is type(found)
    assert isinstance(found, list) or again.keys() == found.keys()


@pytest.mark.parametrize(
    "command",
    [
        "plan dense --rank 8 --json dense/config.json",
        "report dense --output dense/generation_config.json",
        "report dense --data test.jsonl --output test.jsonl",
        "translate dense test.jsonl --output test.jsonl",
    ],
)
def test_no_answer_is_written_over_what_is_read(lightformers, workplace, command):
    before = {path: path.read_bytes() for path in workplace.rglob("*") if path.is_file()}
    code, _, err = lightformers(*command.split())
    assert code == 1
    assert "which is read: give another file" in err
    assert all(path.read_bytes() == content for path, content in before.items())


def loggers():
    """How loud the libraries are."""
    found = [logging.getLogger(name) for name in (None, "transformers", "datasets", "huggingface_hub")]
    return logging.root.manager.disable, [(log.level, log.propagate, list(log.handlers)) for log in found]


def test_verbose_says_more_and_quiet_less(lightformers, workplace):
    before = loggers()
    command = ("convert", "dense", "out", "--rank", "8", "--overwrite", "--method", "paper")
    printed = {option: lightformers(*command, *option.split()) for option in ("", "--quiet", "--verbose")}
    assert {code for code, _, _ in printed.values()} == {0}
    assert printed["--quiet"][1:] == ("", "")
    assert "unique parameters" in printed[""][1]
    assert printed["--verbose"][1] == printed[""][1]
    assert "config.json" in printed["--verbose"][2]
    assert "config.json" not in printed[""][2]
    assert lightformers("translate", "light", "test.jsonl", "--quiet")[2] == ""
    assert loggers() == before  # what follows in the same process is as loud as before

    with pytest.raises(FileNotFoundError, match="nowhere"):  # with its traceback
        lightformers("plan", "nowhere", "--verbose")
    assert loggers() == before


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("convert dense out --json none/plan.json", "none/plan.json cannot be written: there is no folder none\n"),
        ("report light --output none/page.html", "there is no folder none"),
        ("report light --output dense", "is a folder"),
    ],
)
def test_a_place_that_cannot_be_is_said_before_anything_is_done(lightformers, workplace, words, reason):
    before = sorted(workplace.rglob("*"))
    code, out, err = lightformers(*words.split())
    assert (code, out, reason in err, err.count("\n")) == (1, "", True, 1)
    assert sorted(workplace.rglob("*")) == before


def test_a_file_in_the_home_folder(lightformers, workplace, monkeypatch):
    monkeypatch.setenv("HOME", str(workplace))
    assert lightformers("plan", "dense", "--rank", "8", "--method", "paper", "--json=~/plan.json")[0] == 0
    assert json.loads((workplace / "plan.json").read_text())["matrices"]


@pytest.mark.parametrize("of_system", [False, True])
def test_a_full_disk_is_said_in_one_line(lightformers, monkeypatch, of_system):
    class SafetensorError(Exception):
        """As the library raises, which is no `OSError`."""

    def full(*arguments, **options):
        if of_system:
            raise OSError(errno.ENOSPC, "No space left on device", "light/config.json")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("lightformers_hf.workflows.convert.plan", full)
    code, _, err = lightformers("plan", "dense", "--ratio", "2")
    assert code == 1
    assert err == "error: the disk is full: free space, then run the same command again\n"


@pytest.mark.usefixtures("warm_python")
def test_bars_fill_no_log(workplace):
    command = [sys.executable, "-m", "lightformers_hf", "plan", "dense", "--rank", "2", "--method", "paper"]
    start = time.monotonic()
    done = subprocess.run(command, cwd=workplace, capture_output=True, text=True, check=True)
    more = (time.monotonic() - start) / 30  # one for every 30 seconds of a bar
    assert "100%" in done.stderr
    updates = [part for part in re.split(r"[\r\n]", done.stderr) if "%|" in part]
    bars = {part.partition(":")[0] for part in updates}
    assert len(updates) <= 2 * len(bars) + more  # of each its beginning and its end


def test_ctrl_c_ends_with_130(lightformers, workplace, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("lightformers_hf.workflows.convert.plan", interrupted)
    assert lightformers("plan", "dense") == (130, "", "stopped\n")
    monkeypatch.setattr("lightformers_hf.workflows.distill.distill", interrupted)
    assert lightformers("distill", "dense", "text", "out") == (130, "", "stopped; the same command resumes\n")


def test_a_page_can_be_pushed(lightformers, tmp_path):
    for name, content in (("page.json", "{}"), (".lightformers.json", '{"files": ["page.json"]}')):
        (tmp_path / name).write_text(content)
    status, out, _ = lightformers("push", tmp_path, "you/x", "--dry-run")
    assert (status, out.split()) == (0, ["2", "page.json", "2", "bytes", "to", "you/x."])


def test_the_module_is_the_command(lightformers, monkeypatch, capfd):
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="lightformers")
    assert script.value == "lightformers_hf.cli:main"
    for words in (["--version"], ["plan", "--help"], ["plan"], []):
        expected = lightformers(*words)
        monkeypatch.setattr("sys.argv", ["__main__.py", *words])
        with pytest.raises(SystemExit) as exit_:
            runpy.run_module("lightformers_hf", run_name="__main__")
        captured = capfd.readouterr()
        assert (exit_.value.code or 0, captured.out, captured.err) == expected
    assert lightformers("--version")[1] == f"lightformers_hf {importlib.metadata.version('lightformers_hf')}\n"


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("ex", {"export"}),
        ("benchmark ", {"engines"}),
        ("plan dense --encoder-", {"--encoder-groups", "--encoder-layers"}),
        ("plan dense --method ", {"auto", "low-rank", "narrow", "paper"}),
        ("export light out --to ", {"argos", "ctranslate2", "onnx"}),
        ("benchmark engines dense --engine ctr", {"ctranslate2", "ctranslate2-int8"}),
        *((f"{name} --verb", {"--verbose"}) for name in COMMANDS),
        *((f"{name} ./mo", {"./mo"}) for name in ("convert", "translate", "report", "push", "compare")),
        ("convert dense ou", {"ou"}),
        ("plan dense --calibration tra", {"tra"}),
        ("evaluate light --data te", {"te"}),
    ],
)
def test_the_shell_completes(lightformers, monkeypatch, words, completions):
    """As the script of `bash_source` asks; what it is given back as it was, it takes for a file."""
    typed = f"lightformers {words}".split(" ")
    variables = {
        "_LIGHTFORMERS_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(typed),
        "COMP_CWORD": len(typed) - 1,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    assert {line.partition(",")[2] for line in lightformers()[1].splitlines()} == completions


def test_what_is_not_there_is_refused_before_torch_is_imported(tiny_marian, tmp_path):
    for name in ("full", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    (tmp_path / "x.jsonl").write_text("{}\n")
    commands = f"""
        convert ./none out
        convert {tiny_marian} {tmp_path}/full
        convert {tiny_marian} {tiny_marian}
        plan {tmp_path}/x.jsonl
        plan {tiny_marian} --calibration none.txt
        export {tiny_marian} out --to tensorrt
        translate a/b/c
        evaluate {tiny_marian} --data none.jsonl
        report {tmp_path}/empty
        compare ./none ./none
        push ./none a/b
        recover ./none out --teacher ./none
        recover {tiny_marian} out --teacher {tiny_marian} --data none.csv
        compress {tiny_marian} out --ratio 0.5
        benchmark engines {tiny_marian} --engine tensorrt"""
    words = [command.split() for command in commands.strip().splitlines()]
    script = (
        f"import sys\nfrom lightformers_hf.cli import app\nfor words in {words}:\n"
        "    try: app(words)\n    except SystemExit as end: assert end.code == 1, words\n"
        "assert not {'torch', 'transformers', 'datasets'} & {*sys.modules}"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stderr.count("error:")) == (0, len(words)), done.stderr


@pytest.mark.parametrize(
    ("words", "closed", "code", "message"),
    [
        ("--help", 2, 0, ""),
        ("translate MODEL", 0, 1, "standard input is closed: name a file to translate"),
        ("translate MODEL in.txt", 1, 1, "standard output is closed: give --output a file"),
        ("plan MODEL --json -", 1, 1, "standard output is closed: give --json a file"),
        ("translate MODEL in.txt --output out.txt --max-new-tokens 2", 0, 0, ""),
    ],
)
def test_closed_streams_end_only_what_needs_them(words, closed, code, message, tiny_marian, tmp_path):
    (tmp_path / "in.txt").write_text("Ein Hund.\n")
    command = [sys.executable, "-m", "lightformers_hf", *words.replace("MODEL", str(tiny_marian)).split()]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    close = partial(os.close, closed)
    done = subprocess.run(command, preexec_fn=close, cwd=tmp_path, env=ENVIRONMENT, **pipes)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert ("Usage:" in done.stdout) == (words == "--help")
    if "--output" in words:
        assert (tmp_path / "out.txt").read_text().strip()


def test_a_socks_proxy_without_its_library_is_one_message(lightformers, monkeypatch, tiny_marian):
    def fail(*_args, **_options):
        raise ImportError("Using SOCKS proxy, but the 'socksio' package is not installed.")

    monkeypatch.setattr("lightformers_hf.loading.snapshot_download", fail)
    code, _, error = lightformers("plan", "some/model")
    assert (code, "pip install 'httpx[socks]'" in error) == (1, True)


def test_names_from_a_checkpoint_cannot_style_the_terminal(lightformers, tiny_marian, tmp_path):
    shutil.copytree(tiny_marian, tmp_path / "[red]model")
    code, out, _ = lightformers("plan", tmp_path / "[red]model", "--rank", "3", "--method", "paper")
    assert code == 0
    assert "[red]model" in out


def test_the_help_of_convert_fits_two_screens(lightformers, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    rules = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    most = re.search(r"at most (\d+) for `convert`, whose help fits (\d+) lines", rules)
    lines = lightformers("convert", "--help")[1].splitlines()
    assert len(lines) <= int(most[2])
    assert max(map(len, lines)) <= 80
    own = {parameter.name for parameter in COMMANDS["convert"].params if isinstance(parameter, click.Option)}
    assert len(own - {one.name for one in framework.SHARED} - {"push_to_hub", "private"}) <= int(most[1])


@pytest.mark.parametrize("name", ["plan", "convert", "distill", "recover", "compress", "export", "evaluate", "push"])
def test_a_command_has_the_names_and_defaults_of_its_function(name):
    function = inspect.signature(getattr(lightformers_hf, {"push": "push_to_hub"}.get(name, name)))
    expected = function.parameters.keys() - {"tokenizer", "progress", "study", "runs"}
    options = {one.name: one for one in COMMANDS[name].params}
    assert options.keys() - {one.name for one in framework.SHARED} - {"dry_run"} == expected
    fields = {field.name for field in dataclasses.fields(CompressionOptions)}
    assert name not in ("plan", "convert", "compress") or fields <= expected
    parsed = COMMANDS[name].make_context(name, [], resilient_parsing=True).params
    for one in expected - {"method", "device", "progress"}:  # where these are not given, the function chooses
        default = function.parameters[one].default
        assert default is inspect.Parameter.empty or parsed[one] == default or not parsed[one], one


def test_a_library_that_never_returns_ends_at_sigterm():
    script = """
import ctypes
from lightformers_hf.cli import commands, streams

def wait(**_):
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    print(flush=True)
    lock(mutex)

streams.GRACE = 0.2
commands.app.commands["demo"].function = wait
commands.main()
"""
    command = [sys.executable, "-c", script, "demo", "x"]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.terminate()
        try:
            assert process.wait(10) == 143
        finally:
            process.kill()


@pytest.mark.usefixtures("warm_python")
def test_told_to_end_leaves_nothing_behind(tiny_marian, tmp_path):
    """As by `kill`, a scheduler or a container's end: no hidden folder."""
    script = """
import importlib, time
from lightformers_hf.cli import main
waiting = lambda *_: (print("writing", flush=True), time.sleep(60))
importlib.import_module("lightformers_hf.conversion.convert").write_report = waiting
main()
"""
    command = [sys.executable, "-c", script, "convert", str(tiny_marian), *"light --rank 4 --method paper".split()]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT | {"TMPDIR": str(tmp_path)}, **streams) as process:
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words", ["analyze a b", "parameters --help", "benchmark conversion", "benchmark architectures"]
)
def test_a_command_that_became_a_script_names_it(lightformers, words):
    code, _, err = lightformers(*words.split())
    script = re.search(r"python (training/\w+\.py) --help", err)[1]
    assert code == 2
    assert (Path(cli.__file__).parents[2] / script).is_file()
