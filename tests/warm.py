"""A Python that has its imports behind it, for tests that start programs.

To import torch, datasets and what transformers needs for a model takes a process six seconds, longer than most of
these programs run. `serve` does it once, and forks itself for every program: each is still a process with its own
arguments, folder, environment, streams and end. Only other projects are imported beforehand, so that a program which
forgets to import something of this one fails as ever. What is read while importing is the server's: HF_HUB_OFFLINE=1.

`write_client` writes the program that stands in Python's place: it hands over what it was called with, passes signals
on, and ends as the program does.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
import types
from contextlib import suppress
from pathlib import Path

IMPORTS = """
    accelerate.commands.launch datasets evaluate ipykernel.kernelapp jinja2 pandas rich.console sacrebleu
    scipy.optimize sentencepiece torch torch.distributed.run yaml
    transformers.trainer_seq2seq transformers.models.auto.modeling_auto transformers.models.auto.tokenization_auto
    transformers.models.bart.modeling_bart transformers.models.marian.modeling_marian
    transformers.models.marian.tokenization_marian
""".split()
CLIENT = """\
#!{python} -IS
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
server.sendall(request)
answers = server.makefile()
process = int(answers.readline())
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(process, number))
ended = int(answers.readline() or 1)
if ended < 0:
    if ended != -signal.SIGKILL:
        signal.signal(-ended, signal.SIG_DFL)
    os.kill(os.getpid(), -ended)
os._exit(ended)
"""


def write_client(path: Path, address: Path) -> None:
    """Write the program that takes Python's place, for the server at `address`."""
    path.write_text(CLIENT.format(python=sys.executable, address=str(address)), encoding="utf-8")
    path.chmod(0o755)


def serve(address: str) -> list[str]:
    """Import, say so in a line, and fork for every client until standard input ends.

    Returns in the forked processes only: the arguments of Python.
    """
    for module in IMPORTS:
        with suppress(ModuleNotFoundError):  # of an extra that is not installed, or a version without it
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # or the first collection in every fork copies what they share
    woken, wake = socket.socketpair()  # the end of a process wakes the loop
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    print("ready", flush=True)
    clients: dict[socket.socket, int] = {}
    while True:
        ready, _, _ = select.select([0, woken, listening, *clients], [], [])
        if 0 in ready:
            os._exit(0)
        if woken in ready:
            woken.recv(1000)
        for client, process in list(clients.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if not ended and client in ready:  # the client was killed
                os.kill(process, signal.SIGKILL)
                status = os.waitpid(process, 0)[1]
            if ended or client in ready:
                with suppress(OSError):
                    client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                del clients[client]
                client.close()
        if listening in ready:
            client = listening.accept()[0]
            request, streams = receive(client)
            process = os.fork()
            if not process:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for held in (woken, wake, listening, client, *clients):
                    held.close()
                return become(request, streams)
            for stream in streams:
                os.close(stream)
            clients[client] = process
            with suppress(OSError):
                client.sendall(f"{process}\n".encode())


def receive(client: socket.socket) -> tuple[list, list[int]]:
    """What a client wants run: its name and arguments, folder and environment; and its three streams."""
    length, streams, _, _ = socket.recv_fds(client, 4, 3)
    with client.makefile("rb") as file:
        return json.loads(file.read(int.from_bytes(length, "big"))), streams


def become(request: list, streams: list[int]) -> list[str]:
    """Take over a client's name, folder, environment and streams; returns its arguments."""
    cold = sys.executable
    (sys.executable, *arguments), folder, environment = request
    if environment.pop("WARM_ALONE", None):  # the programs that it starts are others
        sys.executable = cold
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [*environment.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    return arguments


def run(arguments: list[str]) -> None:
    """What Python does with its arguments: a script, `-m` a module, or `-c` a program."""
    while arguments[0].startswith(("-u", "-X")):
        arguments = arguments[1:]
    sys.argv = arguments
    if arguments[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments[2:]]
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(arguments[1], module.__dict__)
    else:
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


def finish(arguments: list[str]) -> None:
    """Run them and end as Python does, but without taking every module down."""
    code = 0
    try:
        run(arguments)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        code = traceback.format_exc()
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.path.pop(0)
    finish(serve(sys.argv[1]))
